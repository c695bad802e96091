"""How many workers a role has: more while the load asks for them, and no longer. A pure function.

It is asked where no change of roles helps (``deployments/balance.py``), and of the same figures. A role gets
workers while it is short, and gives one up once it could have done without it for a while; what that needs
is less than the limit for being short, so one is not the reason for the other (docs/adr/0020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from actors.messages import Role
from deployments.balance import COOLDOWN, Limits, Loaded, Memory, can_give

GROWTH: Final = 0.25
"""A role that is short gets this share of its workers at once, one at least: a node takes minutes to come."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers that the cluster file has for a role; by load, they may have another one at the moment.

    Attributes:
        count: that are always there.
        most: that there may be.
        coming: that have been asked for.
        added: names of those beside the ``count``, without such as are leaving.

    """

    count: int
    most: int
    coming: int = 0
    added: tuple[str, ...] = ()

    @property
    def room(self) -> int:
        """How many may still be asked for."""
        return self.most - self.count - self.coming - len(self.added)


@dataclass(frozen=True, slots=True)
class Grow:
    """A role gets ``by`` more workers; ``why`` has the figures."""

    role: Role
    by: int
    why: str


@dataclass(frozen=True, slots=True)
class Shrink:
    """A worker is given up; ``why`` has the figures."""

    worker: str
    why: str


def resize(
    workers: Sequence[Loaded],
    memory: Memory,
    pools: Mapping[Role, Pool],
    spare_since: Mapping[Role, float],
    now: float,
    limits: Limits,
    idle_s: float,
) -> tuple[dict[Role, float], Grow | Shrink | None]:
    """Return since when roles could do with a worker less, and what to do now, if anything.

    Args:
        workers: those that are alive and stay.
        memory: what ``balance.decide`` remembers.
        pools: the workers by the role that the cluster file has them for.
        spare_since: what this returned the last time.
        now: seconds, of any monotonic clock.
        limits: when a role is short.
        idle_s: how long a role has done without a worker before it is given up.

    """
    count: dict[Role, int] = {"prefill": 0, "decode": 0}
    for worker in workers:
        count[worker.role] += 1
    used = {"prefill": memory.prompting, "decode": memory.occupied}
    bound = {"prefill": 1.0, "decode": limits.occupied}
    waits_s = memory.prompts_s / max(1, count["prefill"])
    short = {
        "prefill": waits_s > limits.prompts_s,
        "decode": memory.occupied / max(1, count["decode"]) > limits.occupied,
    }
    spare: dict[Role, float] = {
        role: spare_since.get(role, now)
        for role in count
        if not short[role] and can_give(count[role], used[role], limits, bound[role])
    }
    if now - memory.changed_at < COOLDOWN * limits.smooth_s:
        return spare, None
    for role in count:
        pool = pools[role]
        if short[role] and count[role] and not pool.coming and pool.room > 0:
            by = min(pool.room, max(1, math.floor(GROWTH * count[role])))
            return spare, Grow(role, by, _why(role, count[role], used[role], waits_s))
    for role, since in spare.items():
        free = [w for w in workers if w.role == role and any(w.name in pool.added for pool in pools.values())]
        if free and now - since >= idle_s:
            least = min(free, key=lambda w: (w.prompts_s + w.occupied, w.name))
            why = f"for {now - since:.0f} s, {_why(role, count[role], used[role], waits_s)}"
            del spare[role]  # the next one after as long again
            return spare, Shrink(least.name, why)
    return spare, None


def _why(role: Role, count: int, used: float, waits_s: float) -> str:
    if role == "prefill":
        return (
            f"prompts wait {waits_s:.2g} s at each of {count} prefill workers and take {used / count:.0%} of "
            f"their time"
        )
    return f"{count} decode workers are {used / count:.0%} occupied"
