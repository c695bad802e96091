"""One bring-up: from the lock on the cluster's name to the last node that is alive."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster import netns, preflight
from cluster.errors import AlreadyRunningError, BringUpError
from cluster.file import ClusterFile
from cluster.launch import (
    MARKER,
    UNWANTED,
    Ports,
    address_of,
    cluster_environment,
    launches,
)
from cluster.network import free_ports
from cluster.running import LocalCluster, running, terminate
from cluster.state import NodeStatus, Plan, StateDir
from cluster.supervisor import KEEP

Progress = Callable[[str], None]

_POLL_S: Final = 0.1


@dataclass(frozen=True)
class Start:
    """A bring-up in progress. `lifeline` is our end of the pipe whose closing makes it end."""

    state: StateDir
    plan: Plan
    reaper: subprocess.Popen[bytes]
    lifeline: int
    began: float

    @classmethod
    def of(cls, file: ClusterFile) -> "Start":
        """Take the name, write down what to start, and start the supervisor."""
        preflight.require(file)
        began = time.monotonic()
        state = StateDir.of(file.name)
        lock = _lock(state, file.name)
        theirs, ours = os.pipe()
        try:
            plan = _plan(file)
            state.logs.mkdir(exist_ok=True)
            state.write_token(secrets.token_hex(32))
            state.write_plan(plan)
            reaper = _spawn(state, plan, theirs, lock)
        except BaseException:
            os.close(ours)
            state.clean()
            raise
        finally:
            os.close(theirs)
            os.close(lock)  # the supervisor has its own copy
        return cls(state, plan, reaper, ours, began)

    def wait(self, progress: Progress, deadline_s: float) -> LocalCluster:
        """Return when every node is alive; raise BringUpError if one dies or is late."""
        names = [node.name for node in self.plan.nodes]
        progress(f"starting {self.plan.file.name}: {', '.join(names)}")
        alive: set[str] = set()
        while len(alive) < len(names):
            for name, status in self._statuses().items():
                if status.state == "dead":
                    raise self._failure(name, f"ended with exit code {status.exit_code}")
                if status.state == "alive" and name not in alive:
                    alive.add(name)
                    progress(f"{name} is alive")
            if self.reaper.poll() is not None:
                raise self._failure("supervisor", "ended")
            if self._elapsed() > deadline_s:
                late = next(name for name in names if name not in alive)
                raise self._failure(late, f"was not alive after {deadline_s:g} s")
            time.sleep(_POLL_S)
        cluster = running(self.plan.file.name)
        if cluster is None:
            raise self._failure("supervisor", "ended just after the nodes came up")
        return cluster

    def keep(self) -> None:
        """Let the cluster outlive this process."""
        os.write(self.lifeline, KEEP)
        # Not ours to wait for any more; without an exit code Popen would complain when it is collected.
        self.reaper.returncode = 0

    def abandon(self) -> None:
        """End what was started."""
        terminate(self.state, within_s=10.0)
        self.reaper.wait(timeout=10.0)

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _statuses(self) -> Mapping[str, NodeStatus]:
        status = self.state.status()
        return status.nodes if status else {}

    def _failure(self, node: str, what: str) -> BringUpError:
        with contextlib.suppress(FileNotFoundError):
            self.state.keep_logs()
        log = self.state.log_of(node)
        tail = _tail(log if log.exists() else self.state.failed / log.name)  # moved once cleaned up
        for index, launch in enumerate(self.plan.nodes):
            if launch.name == node:
                tail += _fatal(self.plan.temp_dir / str(index))
        return BringUpError(f"node {node} {what}. Its last lines:\n{tail}\nAll logs: {self.state.failed}")


def _lock(state: StateDir, name: str) -> int:
    """Take the lock of the cluster's name, clearing up what a dead supervisor may have left."""
    for _ in range(5):
        lock = state.try_lock()
        if lock is not None and state.plan() is None:
            return lock
        if lock is not None:
            state.clean()
            os.close(lock)
        elif running(name) is not None:
            break
        else:
            time.sleep(_POLL_S)  # somebody else may only be looking whether it is locked
    cluster = running(name)
    details = f" (supervisor pid {cluster.supervisor_pid}, address {cluster.address})" if cluster else ""
    raise AlreadyRunningError(f"cluster {name!r} already runs{details}; end it with: handoff down {name}")


def _plan(file: ClusterFile) -> Plan:
    # Unix socket paths end at 107 bytes, and Ray's own part takes about 70 of them.
    temp_dir = Path(tempfile.mkdtemp(prefix=f"handoff-{file.name[:10]}-", dir="/tmp"))
    ports = Ports.of(free_ports(Ports.needed(1 + len(list(file.each_node())))))
    cores = sorted(os.sched_getaffinity(0))
    net = netns.free_net() if file.links is not None else None
    return Plan(
        marker=f"{file.name}:{secrets.token_hex(8)}",
        address=f"{address_of(0, net)}:{ports.gcs}",
        temp_dir=temp_dir,
        file=file,
        nodes=tuple(launches(file, temp_dir, ports, cores, net)),
        net=net,
    )


def _spawn(state: StateDir, plan: Plan, lifeline: int, lock: int) -> subprocess.Popen[bytes]:
    project = Path(__file__).resolve().parent.parent
    env = {key: value for key, value in os.environ.items() if key not in (*UNWANTED, MARKER)}
    with state.log_of("supervisor").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cluster.supervisor", str(state.path), str(lifeline), str(lock)],
            env={**env, **cluster_environment(plan.marker, state.token, project)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(lifeline, lock),
            start_new_session=True,
        )


def _tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-lines:]) or "  (nothing was printed)"


def _fatal(temp_dir: Path) -> str:
    """Why a process of the node gave up, if it left word: the first line of its standard error."""
    lines = []
    for log in sorted(temp_dir.glob("session_2*/logs/*.err")):
        if log.name.startswith(("raylet", "gcs_server")) and log.stat().st_size:
            with log.open(encoding="utf-8", errors="replace") as file:
                lines.append(f"\n  {log.stem}: {file.readline().strip()[:600]}")
    return "".join(lines)
