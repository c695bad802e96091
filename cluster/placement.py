"""Which worker goes to which node: a pure function over a snapshot of the nodes.

The answer is enforced by Ray, not by us: each placement names the custom resources that the worker's actor
must request, and only the chosen node has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.errors import PlacementError
from cluster.explain import nearest
from cluster.names import AT_SHARE, ROLES, Role, at

_EPSILON = 1e-9


@dataclass(frozen=True)
class NodeOffer:
    """One live node. `total` and `free` map Ray resource names to amounts; a missing name means none."""

    name: str
    node_id: str
    address: str
    roles: frozenset[Role]
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class WorkerAsk:
    """What one worker needs.

    `node` forces a node by name. `labels` must all be on the node, with these values.
    `spread` decides for this worker alone; None leaves it to the call of `place`.
    """

    name: str
    role: Role
    cpus: float = 1.0
    gpus: float = 0.0
    node: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    spread: bool | None = None

    def wants(self) -> list[str]:
        """Those resources in words, such as ``1 decode``."""
        return [f"{amount:g} {name}" for name, amount in self.needs().items()]

    def needs(self) -> dict[str, float]:
        """Ray resources that a node must have free for this worker."""
        needs: dict[str, float] = {self.role: 1.0, "CPU": self.cpus, "GPU": self.gpus}
        return {name: amount for name, amount in needs.items() if amount > 0}


@dataclass(frozen=True)
class Placement:
    """A worker and its node. `resources` are the custom resources that the worker's actor must request."""

    worker: str
    node_name: str
    node_id: str
    resources: dict[str, float]


class _Room:
    """What is still free on a node while workers are being placed."""

    def __init__(self, offer: NodeOffer, order: int) -> None:
        self.offer = offer
        self.order = order
        self.free = dict(offer.free)
        total = sum(offer.total.get(role, 0.0) for role in ROLES)
        self.workers = total - sum(offer.free.get(role, 0.0) for role in ROLES)

    def refusals(self, ask: WorkerAsk) -> list[str]:
        """Why `ask` cannot go here, or nothing."""
        offer = self.offer
        if ask.node is not None and ask.node != offer.name:
            return [f"is not {ask.node}"]
        reasons = [
            f"label {key}={offer.labels.get(key)!r}, not {value!r}"
            if key in offer.labels
            else f"no label {key}"
            for key, value in ask.labels.items()
            if offer.labels.get(key) != value
        ]
        if ask.role not in offer.roles:
            return [f"does not offer the role {ask.role}", *reasons]
        for name, amount in ask.needs().items():
            if self.free.get(name, 0.0) + _EPSILON < amount:
                free, total = self.free.get(name, 0.0), offer.total.get(name, 0.0)
                reasons.append(f"{name}: {free:g} free of {total:g}, {amount:g} needed")
        return reasons

    def take(self, ask: WorkerAsk) -> None:
        for name, amount in ask.needs().items():
            self.free[name] = self.free.get(name, 0.0) - amount
        self.workers += 1

    def rank(self, spread: bool) -> tuple[float, int, float, int]:
        """Sort key. Nodes of one role come first among equals, which leaves the versatile ones for others."""
        load = self.workers if spread else -self.workers
        return (load, len(self.offer.roles), -self.free.get("CPU", 0.0), self.order)


def place(asks: Sequence[WorkerAsk], offers: Sequence[NodeOffer], spread: bool = True) -> list[Placement]:
    """One placement for each ask, in the order of `asks`.

    spread: prefer the node with the fewest workers; otherwise the one with the most that still fits.
    Workers with the fewest possible nodes choose first, so that a forced worker finds its node free.
    Raises PlacementError for the first worker that fits nowhere; nothing is placed by halves.
    """
    rooms = [_Room(offer, order) for order, offer in enumerate(offers)]
    choices = [sum(not room.refusals(ask) for room in rooms) for ask in asks]
    chosen: dict[int, NodeOffer] = {}
    for index in sorted(range(len(asks)), key=lambda i: choices[i]):
        ask = asks[index]
        fitting = [room for room in rooms if not room.refusals(ask)]
        if not fitting:
            raise PlacementError(_explain(ask, rooms))
        wide = spread if ask.spread is None else ask.spread
        room = min(fitting, key=lambda room: room.rank(wide))
        room.take(ask)
        chosen[index] = room.offer
    return [_placement(ask, chosen[index]) for index, ask in enumerate(asks)]


def _placement(ask: WorkerAsk, offer: NodeOffer) -> Placement:
    return Placement(ask.name, offer.name, offer.node_id, {ask.role: 1.0, at(offer.name): AT_SHARE})


def _explain(ask: WorkerAsk, rooms: Sequence[_Room]) -> str:
    wanted = ask.wants()
    wanted += [f"node {ask.node}"] if ask.node else []
    wanted += [f"label {key}={value}" for key, value in ask.labels.items()]
    lines = [f"{ask.name} fits on no node. It asks for {', '.join(wanted)}."]
    for room in rooms:
        roles = "+".join(role for role in ROLES if role in room.offer.roles) or "no role"
        lines.append(f"  {room.offer.name} ({roles}): {'; '.join(room.refusals(ask))}")
    if not rooms:
        lines.append("  There is no live node; `handoff status` shows why.")
    lines.append(_remedy(ask, [room.offer for room in rooms]))
    return "\n".join(lines)


def _remedy(ask: WorkerAsk, offers: Sequence[NodeOffer]) -> str:
    """The likeliest way out: a misspelt name, label or role first, otherwise less or more of everything."""
    names = [offer.name for offer in offers]
    if ask.node is not None and ask.node not in names:
        return _typo(f"no node is called {ask.node!r}", ask.node, names)
    roles = sorted({role for offer in offers for role in offer.roles})
    if ask.role not in roles:
        return _typo(f"no node offers the role {ask.role!r}", ask.role, roles)
    for key, value in ask.labels.items():
        values = sorted({offer.labels[key] for offer in offers if key in offer.labels})
        if not values:
            keys = sorted({key for offer in offers for key in offer.labels})
            return _typo(f"no node has a label {key!r}", key, keys)
        if value not in values:
            return _typo(f"no node has {key}={value}", value, values)
    return (
        "Ask for less or for fewer workers, or give the nodes more cpus, gpus or slots in the cluster file."
    )


def _typo(problem: str, word: str, valid: Sequence[str]) -> str:
    guess = nearest(word, valid)
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"{problem}; {hint}there are: {', '.join(valid) or 'none'}"
