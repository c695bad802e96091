"""The smallest cluster that divides requests: a prefill and a decode node on this machine, a core each."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from cluster.file import ClusterFile
from cluster.launch import cpu_binds
from cluster.network import free_ports

ENGINE: Final[Mapping[str, Any]] = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 2**30,
    "enforce_eager": True,
}
"""vLLM options of every engine here, the undivided one included. Compiling would be most of the run."""

CPUS: Final = 1
"""Of each worker."""
OBJECT_STORE: Final = 512 * 2**20


def local_pair(
    name: str, model: str, engine: Mapping[str, Any] = ENGINE, links: Mapping[str, Any] | None = None
) -> ClusterFile:
    """Return the cluster file, with a free port for the gateway; ``links`` makes nodes hosts of their own.

    The cluster's name ends with this process's id: runs at the same time do not meet.
    """
    node = {"cpus": CPUS, "memory": 4 * 2**30, "object_store": OBJECT_STORE}
    return ClusterFile.model_validate(
        {
            "name": f"{name}-{os.getpid()}",
            "model": model,
            "engine": dict(engine),
            "links": None if links is None else dict(links),
            "gateway": {"port": free_ports(1)[0]},
            "router": {"mode": "always"},  # the handover is what is shown and measured
            "nodes": {"prefill": {"role": "prefill", **node}, "decode": {"role": "decode", **node}},
        }
    )


def prefill_cpus(file: ClusterFile) -> str:
    """Return the CPUs that the prefill worker's engine is bound to (``VLLM_CPU_OMP_THREADS_BIND``)."""
    return cpu_binds(file, sorted(os.sched_getaffinity(0)))["prefill-0"]


def local_model(model: str | None, progress: Callable[[str], None]) -> str:
    """Return the model to use: a local path made absolute, a hub id, or the tiny one, made if need be."""
    if model is None:
        from experiments.models import make

        return str(make(Path("models/tiny"), "tiny", progress))
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def vocabulary(model: str) -> int:
    """Return how many token ids a model has, from its ``config.json``, local or in the hub."""
    path = Path(model) / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(model, "config.json"))
    config = json.loads(path.read_text("utf-8"))
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
