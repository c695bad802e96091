"""The background processes of a local cluster: `python -m cluster.supervisor STATE_DIR LIFELINE LOCK`.

The supervisor starts the nodes, notes what becomes of them, and ends them when told to (SIGTERM), when the
head dies, or when the lifeline, a pipe from the command that started it, closes before the word "keep" came
through.

Its parent, the reaper, does nothing but wait for the supervisor's end, however that comes about, and then
removes what is left. Ray's own processes are bound to `ray start`, and `ray start` to the supervisor, by the
kernel's parent-death signal. The reaper sees to the rest: agents, Python workers, their children, and files.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Final

from cluster.launch import NodeLaunch
from cluster.names import HEAD
from cluster.network import accepts
from cluster.processes import has_dead_child
from cluster.state import NodeStatus, Plan, StateDir, Status

KEEP: Final = b"keep"
_GRACE_S: Final = 8.0
_TICK_S: Final = 0.1
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None)  # loaded before any fork


class Supervisor:
    """Runs the nodes of one plan. `run` returns when they have ended."""

    def __init__(self, state: StateDir, plan: Plan, lifeline: int) -> None:
        self._state = state
        self._plan = plan
        self._lifeline: int | None = lifeline
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._statuses = {node.name: NodeStatus() for node in plan.nodes}
        self._stopping = False
        self._next_look = 0.0

    def stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """Make `run` end the nodes and return. Fit to be a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Start the head, the other nodes as soon as they can reach it, and watch them until told to stop."""
        head, *others = self._plan.nodes
        self._start(head)
        self._save()
        while not self._stopping:
            if others and accepts(self._plan.address):
                for node in others:
                    self._start(node)
                others = []
                self._save()
            self._end_broken_starts()
            self._note_deaths()
            self._read_lifeline()
        self._end_nodes()

    def _start(self, node: NodeLaunch) -> None:
        with self._state.log_of(node.name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *node.argv],
                env={**os.environ, **node.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )
        self._processes[node.name] = process
        self._statuses[node.name] = NodeStatus(state="started", pid=process.pid)

    def _note_deaths(self) -> None:
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None and self._statuses[name].state != "dead":
                self._statuses[name] = NodeStatus(state="dead", pid=process.pid, exit_code=code)
                self._save()
                print(f"node {name} ended with exit code {code}", flush=True)
                if name == HEAD:
                    self.stop()  # without the head's services no node can be used or restarted

    def _end_broken_starts(self) -> None:
        """End a `ray start` whose raylet or control store has died.

        Once it runs it notices such a death itself; while it starts it waits in vain for more than a minute.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 1.0
        for process in self._processes.values():
            if process.poll() is None and has_dead_child(process.pid, ("raylet", "gcs_server")):
                process.kill()

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
