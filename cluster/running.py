"""The local clusters that run on this machine, and ending one."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.file import ClusterFile
from cluster.processes import carries, end, wait_gone
from cluster.state import NodeStatus, StateDir, home

_POLL_S: Final = 0.1


@dataclass(frozen=True)
class LocalNode:
    """One node of a local cluster; `role` is `gateway` for the head."""

    name: str
    group: str
    role: str
    address: str
    process: NodeStatus


@dataclass(frozen=True)
class LocalCluster:
    """A local cluster as it was when this value was made. `address` is the control store's HOST:PORT."""

    name: str
    address: str
    state_dir: Path
    temp_dir: Path
    supervisor_pid: int
    token_path: Path
    file: ClusterFile
    nodes: tuple[LocalNode, ...]


def running(name: str) -> LocalCluster | None:
    """The cluster called `name` if it runs here (or is just starting or ending), otherwise None."""
    state = StateDir.of(name)
    plan, status = state.plan(), state.status()
    if plan is None or status is None or not state.locked():
        return None
    return LocalCluster(
        name=name,
        address=plan.address,
        state_dir=state.path,
        temp_dir=plan.temp_dir,
        supervisor_pid=status.supervisor_pid,
        token_path=state.token,
        file=plan.file,
        nodes=tuple(
            LocalNode(node.name, node.group, node.role, node.address, status.nodes[node.name])
            for node in plan.nodes
        ),
    )


def clusters() -> list[LocalCluster]:
    """All clusters of this user that run on this machine, sorted by name."""
    folder = home()
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [cluster for name in names if (cluster := running(name))]


def terminate(state: StateDir, within_s: float) -> None:
    """Have the supervisor end the cluster, end what does not obey, and clean up."""
    deadline = time.monotonic() + within_s
    last = state.plan()
    told = False
    while state.locked():
        plan, status = state.plan(), state.status()
        last = plan or last
        if not told and plan and status and carries(status.supervisor_pid, plan.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(status.supervisor_pid, signal.SIGTERM)
            told = True
        if plan and time.monotonic() > deadline:
            end(plan.marker)
        time.sleep(_POLL_S)
    if (lock := state.try_lock()) is not None:
        state.clean()
        os.close(lock)
    if last is not None:
        # The reaper gives up the lock an instant before it ends.
        wait_gone(last.marker, within_s=5.0)
