"""Errors of the workers.

    WorkerError
    ├── EngineStartError     vLLM refused the model or the options; carries vLLM's own message
    ├── ModelFilesDiffer     two nodes read different model files
    └── RequestFailed        one request failed on a worker; says whether another try can help

Every error passes all its arguments to ``Exception`` so that it survives pickling by Ray.
"""


class WorkerError(Exception):
    """Base of every error raised by this package."""


class EngineStartError(WorkerError):
    """vLLM refused the model or the engine options."""


class ModelFilesDiffer(WorkerError):
    """Two nodes would serve different models under one name."""


class RequestFailed(WorkerError):
    """A request failed on a worker.

    Args:
        request_id: the engine request.
        reason: what happened, for people.
        retry: whether trying again (elsewhere, or undivided) can succeed.

    """

    def __init__(self, request_id: str, reason: str, retry: bool) -> None:
        super().__init__(request_id, reason, retry)
        self.request_id, self.reason, self.retry = request_id, reason, retry

    def __str__(self) -> str:
        return f"request {self.request_id}: {self.reason}"
