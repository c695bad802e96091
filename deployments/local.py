"""Serving: on the machines of the cluster file, or on a cluster of this one, brought up for it if need be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import ray

from cluster import preflight
from cluster.connect import connect, join
from cluster.errors import NotRunningError
from cluster.file import ClusterFile
from cluster.local import LocalCluster, held, running
from cluster.nodes import wait_for_nodes
from cluster.ray_start import HOSTS_TOKEN
from deployments import store
from deployments.app import Serving, serving, start, update
from deployments.place import Progress


def replace_gateways(file: ClusterFile, progress: Progress) -> None:
    """Replace the gateways of the cluster that serves ``file``; see ``deployments.app.update``.

    Raises ``NotRunningError`` if no cluster of that name runs here.
    """
    if (address := _machines(file)) is not None:
        join(address, HOSTS_TOKEN)
    elif (cluster := running(file.name)) is not None:
        connect(cluster)
    else:
        raise NotRunningError(f"no cluster called {file.name!r} runs here; serve it with: handoff serve FILE")
    try:
        update(file, progress)
    finally:
        ray.shutdown()


def start_serving(cluster: LocalCluster, file: ClusterFile, progress: Progress) -> Serving:
    """Serve a cluster file on its nodes here; outlives this process. See ``deployments.app.start``."""
    connect(cluster)
    try:
        return start(file, progress)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def served(file: ClusterFile, progress: Progress) -> Iterator[Serving]:
    """Serve a cluster file until the block ends; takes down what it brought up, also on an error.

    A file with `hosts` is served on the cluster that `ray up` has made, from a machine of that cluster; one
    with `aws`, from its head.
    """
    with contextlib.ExitStack() as stack:
        if (address := _machines(file)) is not None:
            if not HOSTS_TOKEN.is_file():
                section = "aws" if file.hosts is None else "hosts"
                raise NotRunningError(
                    f"{section}: {HOSTS_TOKEN} is not here, which holds the cluster's token; serve from a "
                    f"machine of the cluster, which `ray up` copies it to: ray exec FILE 'handoff serve ...'"
                )
            store.require(file)
            join(address, HOSTS_TOKEN)
            stack.callback(ray.shutdown)
            wait_for_nodes(file, progress)
        else:
            if (cluster := running(file.name)) is None:
                preflight.require(file)
            store.require(file)
            if cluster is None:
                cluster = stack.enter_context(held(file, progress))
            connect(cluster)
            stack.callback(ray.shutdown)
        yield stack.enter_context(serving(file, progress))


def _machines(file: ClusterFile) -> str | None:
    """Address of the cluster that `ray up` has made of machines, of which this is one; None: all are here."""
    if file.hosts is not None:
        return f"{file.hosts.head_address}:{file.hosts.port}"
    return "auto" if file.aws is not None else None
