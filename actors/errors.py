"""Errors of the workers.

    WorkerError
    ├── EngineStartError     vLLM refused the model or the options; carries vLLM's own message
    ├── ModelFilesDiffer     two nodes read different model files
    ├── VersionsDiffer       two nodes have different versions of vLLM, Ray, Python or Handoff
    └── ChannelError         another member could not be reached, or did not prove that it is one

Every error passes all its arguments to ``Exception`` so that it survives pickling by Ray.
"""


class WorkerError(Exception):
    """Base of every error raised by this package."""


class EngineStartError(WorkerError):
    """vLLM refused the model or the engine options."""


class ModelFilesDiffer(WorkerError):
    """Two nodes would serve different models under one name."""


class VersionsDiffer(WorkerError):
    """Two nodes have different versions of what must be equal."""
