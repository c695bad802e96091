"""Errors of serving. Those with a status of their own are in ``deployments.refusals``, which imports vLLM.

ServingError
├── StartError          the application could not be brought up; says what to change
├── NoWorker            no worker is alive that could take the request; clients see 503
├── AnswerTooLate       an answer was not complete within the gateway's limit; 504
├── Unmeetable          no way would meet the request's objectives now; 429, with Retry-After
├── Overloaded          recomputing after a failed handover would slow running requests; 503, with Retry-After
└── RequestLost         a request failed on every worker that was tried
"""


class ServingError(Exception):
    """Base of every error raised by this package."""


class StartError(ServingError):
    """The application could not be brought up."""


class RequestLost(ServingError):
    """A request failed on every worker that was tried."""
