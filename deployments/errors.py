"""Errors of serving.

ServingError
├── StartError          the application could not be brought up; says what to change
├── NoWorker            no worker is alive that could take the request
└── RequestLost         a request failed on every worker that was tried
"""


class ServingError(Exception):
    """Base of every error raised by this package."""


class StartError(ServingError):
    """The application could not be brought up."""


class NoWorker(ServingError):
    """No worker is alive that could take the request."""


class RequestLost(ServingError):
    """A request failed on every worker that was tried."""
