"""How a node of the cluster file appears to Ray: resource names and labels.

A role is a custom resource with as many units as the node has slots for workers of that role. A node is a
custom resource too (`at:prefill-0`; Ray reserves `node:`), so that Ray itself enforces a placement.
"""

from typing import Final, Literal

Role = Literal["prefill", "decode"]
GroupRole = Literal["prefill", "decode", "both"]

ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")
GATEWAY: Final = "gateway"
"""Custom resource of the head node: one unit for each gateway replica."""

HEAD: Final = "head"
"""Name of the node that runs Ray's own services, Serve's controller and the gateway. It takes no workers."""

AT_UNITS: Final = 1000
AT_SHARE: Final = 0.001

LABEL_NODE: Final = "handoff.node"
LABEL_GROUP: Final = "handoff.group"
LABEL_ROLE: Final = "handoff.role"


def at(node: str) -> str:
    """Name of the custom resource that only the node `node` has."""
    return f"at:{node}"


def roles_of(role: GroupRole) -> tuple[Role, ...]:
    """Roles that a node group of role `role` can serve."""
    return ROLES if role == "both" else (role,)
