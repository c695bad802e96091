"""Errors of serving.

ServingError
├── StartError          the application could not be brought up; says what to change
├── NoWorker            no worker is alive that could take the request; clients see 503
└── RequestLost         a request failed on every worker that was tried
"""

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError


class ServingError(Exception):
    """Base of every error raised by this package."""


class StartError(ServingError):
    """The application could not be brought up."""


class NoWorker(ServingError, GracefulHTTPError):
    """No worker is alive that could take the request. Carries the status that vLLM's server answers with."""

    def __init__(self, message: str) -> None:
        GracefulHTTPError.__init__(self, message, HTTPStatus.SERVICE_UNAVAILABLE)


class RequestLost(ServingError):
    """A request failed on every worker that was tried."""
