"""What Handoff is compared with: plain vLLM, one engine, no Ray. As a server, and for single answers."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from cluster.network import free_ports
from experiments.children import TELL_EVERY_S, Child, ChildError, child

Progress = Callable[[str], None]

SERVED_NAME = "undivided"
STARTED_WITHIN_S = 600.0
ANSWERED_WITHIN_S = 900.0


@dataclass(frozen=True, slots=True)
class Server:
    """vLLM's own OpenAI server, running."""

    url: str
    model: str
    child: Child

    def processes(self) -> list[psutil.Process]:
        """Return the server's processes: API server, engine core, worker."""
        return self.child.processes()


@contextlib.contextmanager
def served(model: str, engine: Mapping[str, Any], bind: str, progress: Progress) -> Iterator[Server]:
    """Serve a model with vLLM's own OpenAI server until the block ends; ``wait_ready`` before using it.

    Args:
        model: local path or hub id.
        engine: vLLM engine options, passed on unchanged.
        bind: CPUs of the engine's threads, in the form of vLLM's ``VLLM_CPU_OMP_THREADS_BIND``.
        progress: takes one line per step.

    """
    (port,) = free_ports(1)
    argv = [
        "-m",
        "vllm.entrypoints.launchers.api_server.entry",  # `vllm serve`, which needs a package called `vllm`
        f"--model={model}",
        f"--served-model-name={SERVED_NAME}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--disable-uvicorn-access-log",
        *options(
            {"distributed_executor_backend": "uni", **engine}
        ),  # one process less: vLLM at its best here
    ]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    progress(f"starting vLLM's own server, engine on CPU {bind}")
    with child("undivided", argv, environment) as running:
        yield Server(f"http://127.0.0.1:{port}", SERVED_NAME, running)


def answers(
    model: str,
    engine: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
    max_tokens: int,
    bind: str,
    threads: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Compute greedy answers with an undivided engine; see ``actors/reference.py`` for the form.

    Args:
        model: local path or hub id.
        engine: vLLM engine options, passed on unchanged.
        requests: what is asked.
        max_tokens: length of every answer.
        bind: CPUs of the engine's threads.
        threads: ``OMP_NUM_THREADS``, which Ray sets to the CPUs of a worker. Kernels divide their work by it
            when they are first used, and so round otherwise: a near tie between two tokens can fall the other
            way, although the engine computes with the threads of ``bind`` in any case.
        progress: takes one line per step.

    Raises:
        ChildError: it failed, with the end of its log, or took too long.

    """
    asked = {"model": model, "engine": dict(engine), "max_tokens": max_tokens, "requests": list(requests)}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": bind, "OMP_NUM_THREADS": str(threads)}
    argv = ["-m", "actors.reference", "{folder}/asked.json", "{folder}/answers.json"]
    began = told = time.monotonic()
    with child("reference", argv, environment, {"asked.json": json.dumps(asked)}) as running:
        while running.process.poll() is None:
            waited = time.monotonic() - began
            if waited > ANSWERED_WITHIN_S:
                raise ChildError(f"the reference engine took more than {waited:.0f} s:\n{running.tail()}")
            if time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                progress(f"waiting for the undivided engine ({waited:.0f} s)")
            time.sleep(0.1)
        running.check()
        found: list[dict[str, Any]] = json.loads((running.folder / "answers.json").read_text("utf-8"))
        return found


def options(engine: Mapping[str, Any]) -> list[str]:
    """Return engine options as arguments of vLLM's command line; None leaves vLLM's default."""
    arguments = []
    for key, value in engine.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            arguments.append(f"--{name}={text}")
    return arguments


def wait_ready(server: Server, progress: Progress) -> None:
    """Return when the server answers.

    Raises:
        ChildError: it ended while it started, with the end of its log, or took too long.

    """

    def waiting(waited: float) -> None:
        progress(f"waiting for vLLM's own server to load the model ({waited:.0f} s)")

    took = server.child.serves(server.url, STARTED_WITHIN_S, waiting)
    progress(f"vLLM's own server is ready after {took:.0f} s")
