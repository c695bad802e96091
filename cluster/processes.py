"""Processes that belong to a cluster, found by the marker in their environment, and ending them.

Nothing here ends a process without the marker, except descendants of one that has it.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterable

import psutil

from cluster.launch import MARKER


def marked(marker: str, spare: Collection[int] = ()) -> list[psutil.Process]:
    """Live processes whose environment holds `marker`, with their descendants, save this one and `spare`."""
    spared = {os.getpid(), *spare}
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        # Processes that end meanwhile or belong to another user are none of ours.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE:
                for member in (process, *process.children(recursive=True)):
                    found[member.pid] = member
    return [process for pid, process in found.items() if pid not in spared]


def carries(pid: int, marker: str) -> bool:
    """Whether the process `pid` lives and belongs to the cluster."""
    try:
        return bool(psutil.Process(pid).environ().get(MARKER) == marker)
    except (psutil.Error, OSError):
        return False


def has_dead_child(pid: int, names: Collection[str]) -> bool:
    """Whether a child of `pid` with one of `names` has ended, and `pid` has not yet asked how."""
    try:
        children = psutil.Process(pid).children()
        return any(child.name() in names and child.status() == psutil.STATUS_ZOMBIE for child in children)
    except psutil.Error:
        return False


def end(marker: str, spare: Collection[int] = (), within_s: float = 10.0) -> list[psutil.Process]:
    """Kill the processes of the cluster, until none is left. Returns those alive after `within_s` seconds.

    It looks again after each round, because a process may have started another one before it ended.
    """
    deadline = time.monotonic() + within_s
    while left := marked(marker, spare):
        if time.monotonic() > deadline:
            return left
        kill(left)
    return []


def wait_gone(marker: str, within_s: float) -> None:
    """Wait until no process of the cluster lives; end those that still do after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while marked(marker):
        if time.monotonic() > deadline:
            end(marker)
            return
        time.sleep(0.02)


def kill(processes: Iterable[psutil.Process], within_s: float = 3.0) -> None:
    """SIGKILL, then wait until they are gone."""
    victims = list(processes)
    for process in victims:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(victims, timeout=within_s)
