"""What `handoff status` shows of a cluster: what was started, and what Ray's control store says of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cluster.names import GATEWAY, ROLES
from cluster.network import accepts
from cluster.placement import NodeOffer
from cluster.running import LocalCluster, LocalNode
from cluster.sizes import show

State = Literal["starting", "alive", "dead"]


@dataclass(frozen=True)
class NodeReport:
    """One node. `total` and `free` map Ray resource names to amounts, and are empty unless it is alive."""

    name: str
    role: str
    address: str
    state: State
    total: Mapping[str, float]
    free: Mapping[str, float]

    def share(self, resource: str) -> str:
        """Free and total amount of a resource: "1/2"; "-" if the node has none."""
        total = self.total.get(resource, 0.0)
        return f"{self.free.get(resource, 0.0):g}/{total:g}" if total else "-"

    def slots(self) -> str:
        """Free and total slots of each role: "prefill 0/1"."""
        roles = [role for role in (*ROLES, GATEWAY) if self.total.get(role)]
        return ", ".join(f"{role} {self.share(role)}" for role in roles) or "-"

    def store(self) -> str:
        """Size of the object store."""
        size = self.total.get("object_store_memory", 0.0)
        return show(size) if size else "-"


def report(cluster: LocalCluster) -> list[NodeReport]:
    """The nodes of `cluster`, in the order of its file, the head first."""
    offers: dict[str, NodeOffer] = {}
    if accepts(cluster.address):
        from cluster.connect import observe
        from cluster.nodes import snapshot

        offers = {offer.name: offer for offer in snapshot(observe(cluster.address, cluster.token_path))}
    return [_node(node, offers.get(node.name)) for node in cluster.nodes]


def _node(node: LocalNode, offer: NodeOffer | None) -> NodeReport:
    # The process is asked first: the control store learns of a death only some seconds later.
    if node.process.state == "dead" or offer is None:
        state: State = "dead" if node.process.state == "dead" else "starting"
        return NodeReport(node.name, node.role, node.address, state, {}, {})
    return NodeReport(node.name, node.role, node.address, "alive", offer.total, offer.free)
