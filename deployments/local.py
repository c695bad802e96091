"""Serving on a cluster of this machine: the one that is up, or one brought up for the occasion."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import ray

from cluster.connect import connect
from cluster.file import ClusterFile
from cluster.local import held, running
from deployments.app import Serving, serving
from deployments.place import Progress


@contextlib.contextmanager
def served(file: ClusterFile, progress: Progress) -> Iterator[Serving]:
    """Serve a cluster file until the block ends; takes down what it brought up, also on an error."""
    with contextlib.ExitStack() as stack:
        cluster = running(file.name) or stack.enter_context(held(file, progress))
        connect(cluster)
        stack.callback(ray.shutdown)
        yield stack.enter_context(serving(file, progress))
