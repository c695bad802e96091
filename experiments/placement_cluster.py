"""The placement experiment on the cluster that this process is connected to: its nodes are the pods."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.file import ClusterFile
from cluster.names import AT_SHARE
from cluster.nodes import snapshot
from cluster.placement import NodeOffer
from deployments import store
from experiments.placement import SOURCE, Medium, named
from experiments.placement_run import WAIT_S, Parameters, measure
from experiments.probe import nodes_to_probe, resource_of
from experiments.results import Run


def measure_here(
    file: ClusterFile | None,
    name: str | None,
    model: str | None,
    repeats: int,
    media: tuple[Medium, ...],
    out: Path,
    progress: Callable[[str], None],
) -> Run:
    """Measure what the file at ``out`` does not have yet; see ``placement_run.measure``.

    file: the cluster's, whose bucket is used; None: not known. name: what results call the cluster. model: a
    folder on the source's node; None: the file's own.
    """
    offers = {offer.name: offer for offer in nodes_to_probe(snapshot())}
    links = None if file is None else file.links
    apart = file is not None and (links is not None or file.hosts is not None)
    pods = named(machines_of([*offers.values()], apart))
    progress(", ".join(f"{pod} is {node}" for pod, node in pods.items()))
    if model is None:
        assert file is not None, "without a file there is a model"
        model = file.model_on(pods[SOURCE])
    limit = None if links is None else links.gbit_s
    parameters = Parameters(model, None, limit, name, repeats, media)
    bucket = None if file is None else store.settings(file)
    return measure(parameters, out, progress, {pod: offers[node] for pod, node in pods.items()}, bucket)


def machines_of(offers: Sequence[NodeOffer], apart: bool) -> dict[str, list[str]]:
    """Return the names of nodes by the machine that each is on, which must be connected to.

    apart: network namespaces are machines of their own, as `links:` in a cluster file make them and `hosts:`
    says of its nodes.
    """
    import ray

    asked = {
        offer.name: ray.remote(where).options(num_cpus=0, resources={resource_of(offer): AT_SHARE}).remote()
        for offer in offers
    }
    found: dict[str, list[str]] = {}
    for name, (kernel, network) in zip(asked, ray.get([*asked.values()], timeout=WAIT_S), strict=True):
        found.setdefault(f"{kernel} {network}" if apart else kernel, []).append(name)
    return found


def where() -> tuple[str, str]:
    """Return what tells this machine, and its network namespace, from others."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return (
        boot.read_text("ascii").strip() if boot.exists() else platform.node(),
        os.readlink(network) if network.exists() else "",
    )
