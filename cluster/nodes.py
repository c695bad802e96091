"""What the nodes of a cluster offer right now, as Ray's control store knows it."""

from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import GlobalState
from ray._private.state import state as connected

from cluster.names import LABEL_NODE, ROLES
from cluster.placement import NodeOffer


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
