"""Errors that clients get with a status of their own, from vLLM's server."""

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from deployments.errors import ServingError


class NoWorker(ServingError, GracefulHTTPError):
    """No worker is alive that could take the request. Carries the status that vLLM's server answers with."""

    def __init__(self, message: str) -> None:
        GracefulHTTPError.__init__(self, message, HTTPStatus.SERVICE_UNAVAILABLE)


class AnswerTooLate(ServingError, GracefulHTTPError):
    """An answer was not complete within ``answer_s`` seconds."""

    def __init__(self, answer_s: float) -> None:
        GracefulHTTPError.__init__(
            self,
            f"the answer was not complete within {answer_s:g} s (gateway.limits.answer_s); ask for less",
            HTTPStatus.GATEWAY_TIMEOUT,
        )


class Overloaded(ServingError, GracefulHTTPError):
    """A prompt would have to be computed again, beyond what decode workers may spend on that.

    Args:
        message: for people.
        retry_after_s: when there is a budget again.

    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        GracefulHTTPError.__init__(self, message, HTTPStatus.SERVICE_UNAVAILABLE)
        self.retry_after_s = retry_after_s


class Unmeetable(ServingError, GracefulHTTPError):
    """No way would meet the request's objectives, as predicted.

    Args:
        message: for people.
        retry_after_s: when one probably will.

    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        GracefulHTTPError.__init__(self, message, HTTPStatus.TOO_MANY_REQUESTS)
        self.retry_after_s = retry_after_s
