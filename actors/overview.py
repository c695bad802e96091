"""The workers of a running cluster, as a driver of it sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from actors.messages import Role, WorkerStats
from actors.peers import NAMESPACE

State = Literal["ready", "starting", "lost", "silent", "absent"]


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker.

    Attributes:
        name: of its actor.
        role: prefill or decode: the one that it has now, if it is ready; else that of the cluster file.
        node: where it is; "-" if that is not known.
        state: ready to serve; starting (loads the model); lost (Ray starts it again); silent (no answer in
            time); absent (nobody has started it).
        stats: what it tells of itself; None unless it is ready.

    """

    name: str
    role: Role
    node: str
    state: State
    stats: WorkerStats | None = None

    def ways(self) -> dict[str, dict[str, float]]:
        """Return the rungs to each peer with their estimated bytes per second, 0 for a broken one."""
        return _by_peer(self.stats.rates if self.stats is not None else {})

    def mapped(self, peer: str) -> dict[str, float]:
        """Return the bytes per second of the rungs to a peer by the cluster file's map."""
        return _by_peer(self.stats.mapped if self.stats is not None else {}).get(peer, {})


def _by_peer(rates: Mapping[str, float]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for way, rate in rates.items():
        peer, _, rung = way.partition(" ")
        found.setdefault(peer, {})[rung] = rate
    return found


def overview(roles: Mapping[str, Role], within_s: float = 3.0) -> list[WorkerState]:
    """Return the state of the workers of these names (and first roles); all of them are asked at once."""
    asked: dict[str, Sequence[Any] | None] = {}
    for name in roles:
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
            asked[name] = handle.versions.remote(), handle.stats.remote()
        except ValueError:
            asked[name] = None
    references = [one for both in asked.values() if both is not None for one in both]
    if references:
        ray.wait(references, num_returns=len(references), timeout=within_s)
    return [_state(name, roles[name], both) for name, both in asked.items()]


def _state(name: str, role: Role, answers: Sequence[Any] | None) -> WorkerState:
    if answers is None:
        return WorkerState(name, role, "-", "absent")
    try:
        node, _ = ray.get(answers[0], timeout=0)
    except ray.exceptions.GetTimeoutError:
        return WorkerState(name, role, "-", "silent")
    except ray.exceptions.RayError:
        return WorkerState(name, role, "-", "lost")
    try:
        stats: WorkerStats = ray.get(answers[1], timeout=0)
        return WorkerState(name, stats.role, node, "ready", stats)
    except ray.exceptions.RayTaskError:  # it has no engine yet
        return WorkerState(name, role, node, "starting")
    except ray.exceptions.GetTimeoutError:
        return WorkerState(name, role, node, "silent")
    except ray.exceptions.RayError:
        return WorkerState(name, role, node, "lost")
