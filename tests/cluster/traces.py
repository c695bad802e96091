"""Cluster files and a look at what a cluster left behind."""

import os
import secrets
import time
from collections.abc import Callable

import psutil

from cluster.file import ClusterFile
from cluster.processes import marked
from cluster.running import LocalCluster
from cluster.state import StateDir


def until(condition: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    """Poll `condition` until it holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)


def small_file(**nodes: dict[str, object]) -> ClusterFile:
    """A cluster file with a name of its own, and no workers unless nodes of both roles are given."""
    name = f"t{secrets.token_hex(4)}"
    groups = {group: {"object_store": "80MiB", "memory": "500MB", **spec} for group, spec in nodes.items()}
    roles = {spec["role"] for spec in nodes.values()}
    workers = {
        role: {"count": 0} for role in ("prefill", "decode") if role not in roles and "both" not in roles
    }
    content = {"name": name, "model": "none", "nodes": groups, "workers": workers, "gateway": {"port": 0}}
    return ClusterFile.model_validate(content)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.ppid()} {process.status()} {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} ended meanwhile"


class Traces:
    """What a cluster has on this machine, remembered while it runs."""

    def __init__(self, name: str) -> None:
        plan = StateDir.of(name).plan()
        assert plan is not None
        self.state_dir = StateDir.of(name).path
        self.temp_dir = plan.temp_dir
        self.marker = plan.marker
        self.processes = marked(plan.marker)

    def remains(self) -> list[str]:
        """What is still there."""
        folders = [str(path) for path in (self.temp_dir, self.state_dir) if path.exists()]
        return folders + [describe(process) for process in self.living()]

    def living(self) -> list[psutil.Process]:
        known = {process.pid: process for process in (*self.processes, *marked(self.marker))}
        return [process for process in known.values() if alive(process)]

    def assert_gone(self, within_s: float = 20.0) -> None:
        until(lambda: not self.remains(), f"no process, folder or file left of {self.marker}", within_s)
        assert not [name for name in os.listdir("/dev/shm") if self.temp_dir.name in name]


def traces(cluster: LocalCluster) -> Traces:
    """Traces of a running cluster."""
    return Traces(cluster.name)
