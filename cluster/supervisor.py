"""The background processes of a local cluster: `python -m cluster.supervisor STATE_DIR LIFELINE LOCK`.

The supervisor starts the nodes, notes what becomes of them, starts those that died again, and ends them when
told to (SIGTERM), when the head dies, or when the lifeline, a pipe from the command that started it, closes
before the word "keep" came through.

Its parent, the reaper, does nothing but wait for the supervisor's end, however that comes about, and then
removes what is left. Ray's own processes are bound to `ray start`, and `ray start` to the supervisor, by the
kernel's parent-death signal. The reaper sees to the rest: agents, Python workers, their children, and files.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from cluster.agents import announce
from cluster.launch import NodeLaunch
from cluster.names import HEAD
from cluster.netns import network
from cluster.processes import has_dead_child
from cluster.state import NodeState, NodeStatus, Plan, StateDir, Status

KEEP: Final = b"keep"
_GRACE_S: Final = 8.0
_TICK_S: Final = 0.1
_MAX_STARTS: Final = 3
_AGAIN_AFTER_S: Final = 5.0
"""By then Ray has noted the death, and the agents and workers of the dead node have ended."""
_STARTED: Final = b"Ray runtime started"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None)  # loaded before any fork


class Supervisor:
    """Runs the nodes of one plan. `run` returns when they have ended."""

    def __init__(self, state: StateDir, plan: Plan, lifeline: int) -> None:
        self._state = state
        self._plan = plan
        self._lifeline: int | None = lifeline
        self._nodes = {node.name: node for node in plan.nodes}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._statuses = {node.name: NodeStatus() for node in plan.nodes}
        self._announced: set[str] = set()
        self._again: dict[str, float] = {}
        self._stopping = False
        self._prefixes: Mapping[str, tuple[str, ...]] = {}

    def stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Make `run` end the nodes and return. Fit to be a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Start the nodes and watch them until told to stop, then end them."""
        self._save()
        with contextlib.ExitStack() as stack:
            if self._plan.net is not None:
                self._prefixes = stack.enter_context(_namespaces(self._plan, self._plan.net))
            self._watch()

    def _watch(self) -> None:
        while not self._stopping:
            self._start_some()
            self._note_arrivals()
            self._note_deaths()
            self._bring_back()
            self._read_lifeline()
        self._end_nodes()

    def _in(self, state: NodeState) -> list[str]:
        return [name for name, status in self._statuses.items() if status.state == state]

    def _start_some(self) -> None:
        """Start waiting nodes: the head first and alone, the others as many at once as the CPUs can bear."""
        width = max(1, (os.cpu_count() or 1) // 2) if self._statuses[HEAD].state == "alive" else 1
        for name in self._in("waiting")[: width - len(self._in("starting"))]:
            self._start(self._nodes[name])

    def _start(self, node: NodeLaunch) -> None:
        with self._state.log_of(node.name).open("wb") as log:
            process = subprocess.Popen(
                [
                    *self._prefixes.get(node.name, ()),
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    *node.argv,
                ],
                env={**os.environ, **node.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )
        self._processes[node.name] = process
        self._announced.discard(node.name)
        starts = self._statuses[node.name].starts + 1
        self._set(node.name, NodeStatus(state="starting", pid=process.pid, starts=starts))

    def _note_arrivals(self) -> None:
        """`ray start` says that the runtime has started once it finds the node in the control store.

        Until then it does not look after its children, and waits for a dead raylet for more than a minute.
        """
        for name in self._in("starting"):
            process = self._processes[name]
            if _STARTED in self._state.log_of(name).read_bytes():
                self._set(
                    name, NodeStatus(state="alive", pid=process.pid, starts=self._statuses[name].starts)
                )
            elif name not in self._announced and announce(process.pid, self._nodes[name].agents):
                self._announced.add(name)
            elif has_dead_child(process.pid, ("raylet", "gcs_server")):
                process.kill()
                process.wait()

    def _note_deaths(self) -> None:
        for name in (*self._in("starting"), *self._in("alive")):
            process, status = self._processes[name], self._statuses[name]
            code = process.poll()
            if code is None:
                continue
            print(f"node {name} ended with exit code {code}, start {status.starts}", flush=True)
            if status.state == "starting" and status.starts < _MAX_STARTS and name != HEAD:
                self._set(name, status.model_copy(update={"state": "waiting"}))
                continue
            self._set(name, status.model_copy(update={"state": "dead", "exit_code": code}))
            if name == HEAD:
                self.stop()  # without the head's services no node can be used or restarted
            elif status.state == "alive":
                self._again[name] = time.monotonic() + _AGAIN_AFTER_S

    def _bring_back(self) -> None:
        """Start nodes that were alive and have died once more. One that cannot be started stays dead."""
        for name in [name for name, when in self._again.items() if time.monotonic() > when]:
            del self._again[name]
            self._set(name, NodeStatus())

    def _set(self, name: str, status: NodeStatus) -> None:
        self._statuses[name] = status
        self._save()

    def _read_lifeline(self) -> None:
        if self._lifeline is None:
            time.sleep(_TICK_S)
            return
        readable, _, _ = select.select([self._lifeline], [], [], _TICK_S)
        if readable:
            if os.read(self._lifeline, len(KEEP)) != KEEP:
                print("the command that started this cluster is gone", flush=True)
                self.stop()
            os.close(self._lifeline)
            self._lifeline = None

    def _save(self) -> None:
        self._state.write_status(
            Status(supervisor_pid=os.getpid(), reaper_pid=os.getppid(), nodes=self._statuses)
        )

    def _end_nodes(self) -> None:
        """SIGTERM lets Ray end its own processes in order; the reaper ends whatever outlasts the grace."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def _namespaces(plan: Plan, net: str) -> Iterator[Mapping[str, tuple[str, ...]]]:
    """Make a network namespace for each node but the head, with the links of the file.

    Yields what comes before a command that is to run on a node.
    """
    names = [node.name for node in plan.nodes if node.name != HEAD]
    with network(len(names), attach_host=True, net=net) as made:
        for name, node in zip(names, made.nodes, strict=True):
            if plan.file.links is not None and (rate := plan.file.links.of(name)) is not None:
                node.limit(rate)
                node.limit_arrivals(rate)
        yield {name: node.prefix for name, node in zip(names, made.nodes, strict=True)}


def _die_with_parent() -> None:
    """Runs in a child between fork and exec: SIGKILL when the supervisor dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


def _reap(state: StateDir, supervisor: int) -> None:
    """Wait for the supervisor to end, then remove everything it leaves."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    # Orphans of the cluster become children of this process, which so collects their exit codes.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    while os.wait()[0] != supervisor:
        pass
    state.clean()


def main(argv: list[str]) -> None:
    """Run the cluster planned in the folder argv[0], with the file descriptors argv[1:] (lifeline, lock)."""
    state, lifeline, lock = StateDir(Path(argv[0])), int(argv[1]), int(argv[2])
    plan = state.plan()
    if plan is None:
        raise SystemExit(f"{state.path}: holds no plan; start clusters with `handoff up`")
    for fd in (lifeline, lock):
        os.set_inheritable(fd, False)  # nodes must hold neither
    if pid := os.fork():
        _reap(state, pid)
        return
    supervisor = Supervisor(state, plan, lifeline)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, supervisor.stop)
    supervisor.run()


if __name__ == "__main__":
    main(sys.argv[1:])
