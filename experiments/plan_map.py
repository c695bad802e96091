"""A machines file with the links that a probe has measured, in place of those that it assumes."""

from pathlib import Path

from experiments.plan_machines import Machines, Pair
from experiments.plan_model import PlanError
from experiments.probe_map import read, ways
from experiments.results import ResultError


def with_map(machines: Machines, path: Path) -> Machines:
    """Return the machines with the map's figure for every pair of nodes that both name.

    The rate is TCP's in the worse direction, with the best number of streams; the latency half the round
    trip; the collective rate all-reduce's bus bandwidth. What the map does not have stays as the file has it,
    `kv_gbit_s` of a pair too, which is measured from cache to cache. Raises PlanError if nothing fits.
    """
    try:
        run = read(path)
    except ResultError as error:
        raise PlanError(f"--map: {error}") from error
    names = {device.node for device in machines.devices()}
    measured = {frozenset(way.nodes): way for way in ways(run) if set(way.nodes) <= names}
    if not measured:
        raise PlanError(
            f"--map: {path} has links between {', '.join(run.results['nodes'])}, --cluster has the nodes "
            f"{', '.join(sorted(names))}: no pair is in both; call the groups under `nodes` as the cluster "
            f"file does (nodes are GROUP-INDEX)"
        )
    given = {frozenset(pair.nodes): pair for pair in machines.links.pairs}
    pairs = {**given}
    for nodes, way in measured.items():
        link = machines.link(*way.nodes)
        pairs[nodes] = Pair(
            nodes=way.nodes,
            gbit_s=way.gbit_s,
            latency_us=way.latency_us,
            collective_gbit_s=way.collective_gbit_s or link.collective_gbit_s,
            kv_gbit_s=given[nodes].kv_gbit_s if nodes in given else None,
        )
    links = machines.links.model_copy(update={"pairs": tuple(pairs.values())})
    return machines.model_copy(update={"links": links})
