"""What the nodes of a cluster offer right now, as Ray's control store knows it."""

import time
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

import ray
from ray._private.state import GlobalState
from ray._private.state import state as connected

from cluster.errors import BringUpError
from cluster.file import ClusterFile
from cluster.names import LABEL_NODE, ROLES
from cluster.placement import NodeOffer

NODES_S: Final = 180.0
"""`ray up` returns when the head is there; the others follow."""


def snapshot(state: GlobalState | None = None) -> list[NodeOffer]:
    """The live nodes, sorted by name: from `state`, or from the cluster this process is connected to.

    The head is among them and has no role. What is free is as fresh as the nodes' last report (about 0.1 s);
    after starting an actor, wait for it before you look again.
    """
    source = connected if state is None else state
    if state is None and not ray.is_initialized():
        raise RuntimeError("not connected to Ray; call cluster.connect.connect first")
    free = source.available_resources_per_node()
    nodes = [_offer(node, free.get(node["NodeID"], {})) for node in source.node_table() if node["Alive"]]
    return sorted(nodes, key=lambda node: node.name)


def wait_for_nodes(
    file: ClusterFile,
    progress: Callable[[str], None],
    within_s: float = NODES_S,
    names: Set[str] | None = None,
) -> None:
    """Wait until every node of the file, or of these names, is in the cluster we are connected to.

    Raises BringUpError, with what is there and what is not.
    """
    wanted, seen = set(names or {node.name for node in file.each_node()}), set[str]()
    deadline = time.monotonic() + within_s
    while True:
        alive = {node.name for node in snapshot()}
        for name in sorted((alive & wanted) - seen):
            progress(f"{name} is alive")
        seen |= alive & wanted
        if not (missing := sorted(wanted - alive)):
            return
        if time.monotonic() > deadline:
            raise BringUpError(
                f"{', '.join(missing)} did not join within {within_s:g} s; in the cluster: "
                f"{', '.join(sorted(alive)) or 'nothing'}. What their start commands said: ray monitor FILE"
            )
        time.sleep(0.5)


def _offer(node: Mapping[str, Any], free: Mapping[str, float]) -> NodeOffer:
    labels = dict(node["Labels"])
    total = dict(node["Resources"])
    return NodeOffer(
        name=labels.get(LABEL_NODE) or node["NodeName"],
        node_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        roles=frozenset(role for role in ROLES if total.get(role, 0) > 0),
        total=total,
        free=dict(free),
        labels=labels,
    )
