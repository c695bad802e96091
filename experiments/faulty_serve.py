"""A served cluster whose workers can be told to break, in a process of its own: its controls, and both ends.

``python -m experiments.faulty_serve`` is started as a child. It serves a cluster file like `handoff serve`,
with ``FaultyWorker`` in place of the worker, and does what ``Controls`` asks over a socket.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from actors.messages import WorkerStats
from cluster.file import ClusterFile, load
from cluster.launch import NODE_NAME
from cluster.names import HEAD
from cluster.processes import marked
from cluster.state import StateDir
from experiments.children import Child, ChildError, child
from experiments.ray_nodes import RayNodes

if TYPE_CHECKING:
    from deployments.app import Serving

STARTED_WITHIN_S = 180.0
ASKED_WITHIN_S = 60.0
HTTP_WITHIN_S = 10.0
_KEY = "HANDOFF_CONTROLS_KEY"
PENDING = (
    *("requests", "engine_requests", "kv_blocks_used", "sending", "receiving"),
    *("live_chunks", "live_bytes", "orphan_bytes"),
    *("prefill_tokens", "running"),
)
"""What must be zero on every worker when no request is under way."""


class WaitError(RuntimeError):
    """Something did not come to be in time; the message says what."""


def until(condition: Any, what: str, within_s: float = 60.0) -> None:
    """Poll until a condition holds; raise ``WaitError`` if it does not."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise WaitError(f"not within {within_s:g} s: {what}")
        time.sleep(0.05)


class CommandError(RuntimeError):
    """The serving process could not do what it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Controls:
    """A served cluster and what can be done to it.

    Attributes:
        url: of its gateway.
        marker: all processes of its nodes carry it.

    """

    url: str
    marker: str
    _address: str
    _key: bytes

    def ask(self, method: str, *arguments: object, within_s: float = ASKED_WITHIN_S) -> Any:
        """Have the serving process call one of ``_Commands``; return its result, or raise its error."""
        with Client(self._address, authkey=self._key) as connection:
            connection.send((method, arguments))
            if not connection.poll(within_s):
                raise WaitError(f"the serving process has not done {method} within {within_s:g} s")
            error, result = connection.recv()
        if error is not None:
            raise CommandError(error)
        return result

    def worker(self, name: str, method: str, *arguments: object) -> Any:
        """Call a method of a worker."""
        return self.ask("worker", name, method, arguments)

    def die_at(self, name: str, stage: str) -> int:
        """Have a worker's process, whose id is returned, kill itself when it next reaches a stage."""
        pid: int = self.worker(name, "pid")
        with contextlib.suppress(CommandError):  # it may be there before it has answered
            self.worker(name, "die_at", stage)
        return pid

    def workers(self) -> dict[str, dict[str, Any]]:
        """What a gateway tells of the workers, by name."""
        deadline = time.monotonic() + HTTP_WITHIN_S
        while True:
            try:
                answer = httpx.get(f"{self.url}/handoff/workers", timeout=HTTP_WITHIN_S)
            except httpx.TransportError:  # the gateway that was asked may just have died
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            return {worker["name"]: worker for worker in answer.raise_for_status().json()}

    def stats(self, name: str) -> WorkerStats:
        """A worker's counters, from itself."""
        stats: WorkerStats = self.worker(name, "stats")
        return stats

    def alive(self) -> set[str]:
        """The workers that the gateway can reach."""
        return {name for name, worker in self.workers().items() if worker["alive"]}

    def left(self) -> dict[str, dict[str, Any]]:
        """What workers that are alive still hold of any request."""
        held = {
            name: {key: worker.get(key, "unknown") for key in PENDING if worker.get(key, "unknown") != 0}
            for name, worker in self.workers().items()
            if worker["alive"]
        }
        return {name: what for name, what in held.items() if what}

    def settled(self, within_s: float) -> float:
        """Wait until workers that are alive hold nothing; return the seconds that took."""
        began = time.monotonic()
        left: dict[str, dict[str, Any]] = {}

        def nothing() -> bool:
            nonlocal left
            left = self.left()
            return not left

        try:
            until(nothing, "nothing is left", within_s)
        except WaitError as error:
            raise WaitError(f"{error}: {left}") from None
        return time.monotonic() - began

    def processes(self, node: str, what: str) -> list[psutil.Process]:
        """Return the processes on a node whose command line starts or ends with ``what``, oldest first."""
        found = []
        for process in marked(self.marker):
            with contextlib.suppress(psutil.Error, IndexError, OSError):
                command = process.cmdline()[0]
                if process.environ().get(NODE_NAME) == node and (
                    command.startswith(what) or command.endswith(what)
                ):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def gateways(self) -> list[int]:
        """Return the ids of the gateway replicas that listen, in ascending order."""
        port = int(self.url.rsplit(":", 1)[1])
        found = []
        for process in self.processes(HEAD, "ray::ServeReplica"):
            with contextlib.suppress(psutil.Error):
                if any(
                    c.status == psutil.CONN_LISTEN and c.laddr.port == port
                    for c in process.net_connections("tcp")
                ):
                    found.append(process.pid)
        return sorted(found)

    def kill(self, node: str, what: str, which: int = 0) -> int:
        """SIGKILL one of those processes; return its id."""
        found = self.processes(node, what)
        if not found:
            raise ChildError(f"there is no {what} on {node}")
        victim = found[which % len(found)]
        os.kill(victim.pid, signal.SIGKILL)
        return victim.pid


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def served_faulty(file: ClusterFile, environment: Mapping[str, str] | None = None) -> Iterator[Controls]:
    """Serve a cluster file, on a cluster made for it, for the length of the block.

    Raises ``ChildError`` if the child ends, ``WaitError`` if it is late.
    """
    url = f"http://127.0.0.1:{file.gateway.port}"
    with _serving(file, environment or {}, (), "", url) as controls:
        plan = StateDir.of(file.name).plan()
        assert plan is not None
        yield replace(controls, marker=plan.marker)


@contextlib.contextmanager
def served_faulty_on(
    nodes: RayNodes, file: ClusterFile, prefix: Sequence[str], url: str
) -> Iterator[Controls]:
    """As ``served_faulty``, on nodes that are there and offer what the file says.

    Args:
        nodes: the cluster.
        file: its gateway listens where ``url`` says.
        prefix: comes before the serving process's command line, so that it runs on the head.
        url: how this process reaches a gateway.

    """
    with _serving(file, nodes.environment, prefix, nodes.address, url) as controls:
        yield controls


@contextlib.contextmanager
def _serving(
    file: ClusterFile, environment: Mapping[str, str], prefix: Sequence[str], address: str, url: str
) -> Iterator[Controls]:
    key = secrets.token_hex(16)
    argv = ["-m", "experiments.faulty_serve", "{folder}/cluster.yaml", "{folder}/controls", address]
    files = {"cluster.yaml": file.model_dump_json(exclude_unset=True)}
    with child("faulty", argv, {**environment, _KEY: key}, files, prefix=prefix) as server:
        until(lambda: _answers(server, url), f"{file.name} serves", STARTED_WITHIN_S)
        until((server.folder / "controls").exists, "the serving process obeys", STARTED_WITHIN_S)
        yield Controls(url, server.marker, str(server.folder / "controls"), key.encode())


def _answers(server: Child, url: str) -> bool:
    server.check()
    try:
        return httpx.get(f"{url}/health", timeout=HTTP_WITHIN_S).status_code == 200
    except httpx.TransportError:
        return False


# -- the serving process ---------------------------------------------------------------------------


class _Commands:
    """What the serving process does when it is asked to."""

    def __init__(self, file: ClusterFile, handles: dict[str, Any]) -> None:
        self._file, self._handles = file, handles
        self._fillers: list[Any] = []

    def worker(self, name: str, method: str, arguments: tuple[object, ...]) -> Any:
        import ray

        return ray.get(getattr(self._handles[name], method).remote(*arguments), timeout=ASKED_WITHIN_S)

    def update(self) -> None:
        """Replace the gateways."""
        from deployments.app import update

        update(self._file, lambda line: print(line, flush=True))

    def fill(self, node: str) -> int:
        """Fill a node's object store with objects that are in use; return their bytes."""
        import ray

        from cluster.names import at

        filler = ray.remote(Filler).options(num_cpus=0, resources={at(node): 1e-3}).remote()
        self._fillers.append(filler)
        filled: int = ray.get(filler.fill.remote(), timeout=ASKED_WITHIN_S)
        return filled

    def drain(self) -> None:
        """Undo ``fill``."""
        import ray

        fillers, self._fillers = self._fillers, []
        for filler in fillers:
            ray.kill(filler)


class Filler:
    """Holds objects, mapped into its memory, so that the store can neither drop nor spill them."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def fill(self) -> int:
        """Put objects until there is no room for another of 16 KiB; return their bytes."""
        import numpy as np
        import ray

        nbytes = 0
        for size in (8 << 20, 512 << 10, 16 << 10):
            while True:
                try:
                    reference = ray.put(np.ones(size, np.uint8))
                except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError):
                    break
                self._held.append((reference, ray.get(reference)))
                nbytes += size
        return nbytes


def _obey(listener: Listener, commands: _Commands) -> None:
    while True:
        try:
            connection = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer, args=(connection, commands), daemon=True).start()


def _answer(connection: Connection, commands: _Commands) -> None:
    with connection, contextlib.suppress(EOFError, OSError):
        method, arguments = connection.recv()
        said: str | None = None
        result: Any = None
        try:
            result = getattr(commands, method)(*arguments)
        except Exception as error:
            said = f"{method}{arguments}: {type(error).__name__}: {error}"
        connection.send((said, result))


def main(path: str, controls: str, address: str) -> None:
    """Serve the cluster file at ``path`` and obey at the socket ``controls``, until SIGTERM.

    On the Ray cluster at ``address`` (HOST:PORT), whose token is where Ray looks for it; if empty, on one
    that is brought up.
    """
    from deployments import place
    from experiments.faulty_worker import FaultyWorker

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    setattr(place, "Worker", FaultyWorker)  # noqa: B010 - the only place that knows the class
    file = load(Path(path))
    with (
        _served(file, address) as serving,
        Listener(controls, authkey=os.environ[_KEY].encode()) as listener,
    ):
        handles = {worker.info.name: worker.handle for worker in serving.workers}
        threading.Thread(target=_obey, args=(listener, _Commands(file, handles)), daemon=True).start()
        threading.Event().wait()


@contextlib.contextmanager
def _served(file: ClusterFile, address: str) -> Iterator[Serving]:
    from deployments.app import serving
    from deployments.local import served

    def progress(line: str) -> None:
        print(line, flush=True)

    if not address:
        with served(file, progress) as running:
            yield running
        return
    import ray

    from cluster.connect import NAMESPACE

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    try:
        with serving(file, progress) as running:
            yield running
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
