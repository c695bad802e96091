"""A cluster on this machine: one Ray node for each node of the file, brought up and taken down as a whole.

`up` returns when all nodes are alive; the cluster then outlives the calling process until `down`. `held` ties
it to the caller instead. Whatever happens to the caller or to the supervisor, nothing of the cluster stays
behind.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Final

from cluster.errors import NotRunningError
from cluster.file import ClusterFile
from cluster.running import LocalCluster, LocalNode, clusters, running, terminate
from cluster.start import Progress, Start
from cluster.state import StateDir

__all__ = ["LocalCluster", "LocalNode", "Progress", "clusters", "down", "held", "running", "up"]

DEADLINE_S: Final = 180.0
"""Generous: a node that dies ends the wait at once, so only one that hangs, or a busy machine, needs it."""


def up(
    file: ClusterFile,
    progress: Progress = lambda _: None,
    deadline_s: float = DEADLINE_S,
    then: Callable[[LocalCluster], None] = lambda _: None,
) -> LocalCluster:
    """Start the nodes of `file` and return when all are alive and `then` has been done.

    Raises AlreadyRunningError if a cluster of that name runs, and BringUpError if a node dies, or is not
    alive after `deadline_s` seconds. After any exception, KeyboardInterrupt included, nothing is left but the
    logs of a failure.
    """
    start = Start.of(file)
    try:
        cluster = start.wait(progress, deadline_s)
        then(cluster)
        start.keep()
    except BaseException:
        progress("ending what was started")
        start.abandon()
        raise
    finally:
        os.close(start.lifeline)
    return cluster


@contextlib.contextmanager
def held(
    file: ClusterFile, progress: Progress = lambda _: None, deadline_s: float = DEADLINE_S
) -> Iterator[LocalCluster]:
    """A cluster that lasts as long as the `with` block, and no longer than this process. Else as `up`."""
    start = Start.of(file)
    try:
        yield start.wait(progress, deadline_s)
    finally:
        progress(f"ending {file.name}")
        os.close(start.lifeline)
        start.abandon()


def down(name: str, progress: Progress = lambda _: None, within_s: float = 20.0) -> None:
    """End the cluster called `name`, running or broken, and remove all its processes and files.

    Raises NotRunningError if there is none. Ray gets `within_s` seconds to end in order; then all is killed.
    """
    state = StateDir.of(name)
    if state.plan() is None and not state.locked():
        shutil.rmtree(state.path, ignore_errors=True)
        others = ", ".join(cluster.name for cluster in clusters()) or "none"
        raise NotRunningError(f"no cluster called {name!r} runs here; running: {others}")
    progress(f"ending {name}")
    terminate(state, within_s)
    progress(f"{name} is down")
