"""Which worker changes between prefill and decode, and when: a pure function over what the workers tell.

A role is short of workers when what it has too much of has lasted: prompts that wait at prefill workers, or
sequences that fill decode workers. It gets one if the other role can do without it: what is taken there
now, shared by one worker less, stays below a limit that is lower than the one for being short. So a change
is never a reason to take it back (docs/adr/0019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from actors.messages import Burden, Role

COOLDOWN: Final = 3.0
"""After a change, figures are smoothed for so many time constants until the next: they show what it did."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a role is short of workers, and when it can give one; see ``cluster.file.Roles``.

    Attributes:
        prompts_s: prefill is short above so many seconds of waiting prompts per worker.
        occupied: decode is short above this share.
        spare: a role gives a worker if no more than this share of its limit is used without it.
        smooth_s: time constant of the figures.
        hold_s: a worker keeps a role for that long.
        tpot_s: objective per token, if there is one.

    """

    prompts_s: float = 1.0
    occupied: float = 0.8
    spare: float = 0.7
    smooth_s: float = 5.0
    hold_s: float = 60.0
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker that is alive.

    Attributes:
        name: the worker.
        role: which it has.
        prompts_s: how long the prompts will take that wait there.
        prompting: share of its time that prompts took, lately.
        occupied: share of its slots, of its KV cache or of its objective that is used, the largest.
        may_change: whether its node is one for both roles.

    """

    name: str
    role: Role
    prompts_s: float = 0.0
    prompting: float = 0.0
    occupied: float = 0.0
    may_change: bool = True


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered from one look to the next; the figures are sums over a role's workers, smoothed.

    Attributes:
        at: when the last look was; None: there was none.
        prompts_s: that wait at prefill workers.
        prompting: time of prefill workers that prompts take, in workers.
        occupied: of decode workers, in workers.
        since: each worker's role, and since when it is known to have it.
        changed_at: when the last change was decided.

    """

    at: float | None = None
    prompts_s: float = 0.0
    prompting: float = 0.0
    occupied: float = 0.0
    since: Mapping[str, tuple[Role, float]] = field(default_factory=dict)
    changed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A worker takes another role. ``reason`` is a word for metrics, ``why`` has the figures."""

    worker: str
    to: Role
    reason: str
    why: str


def occupied(burden: Burden, tpot_s: float | None) -> float:
    """Return the largest share that a worker's sequences take: of slots, KV cache, or the objective's time.

    Of the objective, only what grows with sequences counts; it can be above 1.
    """
    step = burden.step
    shares = [burden.decoding / burden.slots, burden.context / max(1, burden.kv_tokens)]
    if tpot_s is not None and tpot_s > step.base:
        shares.append((step.decode_s(burden.decoding, burden.context) - step.base) / (tpot_s - step.base))
    return max(shares)


def decide(
    workers: Sequence[Loaded], memory: Memory, now: float, limits: Limits
) -> tuple[Memory, Change | None]:
    """Return what to remember, and the change to make now, if there is one.

    Args:
        workers: those that are alive.
        memory: what this returned the last time.
        now: seconds, of any monotonic clock.
        limits: the settings.

    """
    memory = _look(workers, memory, now, limits)
    if now - memory.changed_at < COOLDOWN * limits.smooth_s:
        return memory, None
    prefills = [worker for worker in workers if worker.role == "prefill"]
    decodes = [worker for worker in workers if worker.role == "decode"]
    if not prefills or not decodes:
        return memory, None
    change = _for_prompts(prefills, decodes, memory, now, limits) or _for_answers(
        prefills, decodes, memory, now, limits
    )
    return (memory if change is None else replace(memory, changed_at=now)), change


def _for_prompts(
    prefills: Sequence[Loaded], decodes: Sequence[Loaded], memory: Memory, now: float, limits: Limits
) -> Change | None:
    waits_s, taken = memory.prompts_s / len(prefills), memory.occupied / len(decodes)
    if waits_s <= limits.prompts_s or not can_give(len(decodes), memory.occupied, limits, limits.occupied):
        return None
    if (found := _least(decodes, memory, now, limits)) is None:
        return None
    why = (
        f"prompts wait {waits_s:.2g} s at each of {len(prefills)} prefill workers (limit "
        f"{limits.prompts_s:g} s), and {len(decodes)} decode workers are {taken:.0%} occupied"
    )
    return Change(found.name, "prefill", "prompts", why)


def _for_answers(
    prefills: Sequence[Loaded], decodes: Sequence[Loaded], memory: Memory, now: float, limits: Limits
) -> Change | None:
    taken, busy = memory.occupied / len(decodes), memory.prompting / len(prefills)
    if taken <= limits.occupied or not can_give(len(prefills), memory.prompting, limits, 1.0):
        return None
    if (found := _least(prefills, memory, now, limits)) is None:
        return None
    why = (
        f"{len(decodes)} decode workers are {taken:.0%} occupied (limit {limits.occupied:.0%}), and "
        f"prompts take {busy:.0%} of the time of {len(prefills)} prefill workers"
    )
    return Change(found.name, "decode", "answers", why)


def can_give(count: int, used: float, limits: Limits, limit: float) -> bool:
    """Whether one worker less could do it; the last one is never given."""
    return count > 1 and used / (count - 1) <= limits.spare * limit


def _least(workers: Sequence[Loaded], memory: Memory, now: float, limits: Limits) -> Loaded | None:
    """Return the one with the least to do, of those that may change and have had their role for a while."""
    free = [w for w in workers if w.may_change and now - memory.since[w.name][1] >= limits.hold_s]
    return min(free, key=lambda w: (w.prompts_s + w.occupied, w.name), default=None)


def _look(workers: Sequence[Loaded], memory: Memory, now: float, limits: Limits) -> Memory:
    first = memory.at is None
    new = 1.0 - math.exp(-(now - (memory.at or 0.0)) / limits.smooth_s) if not first else 0.0

    def smoothed(before: float, values: Sequence[float]) -> float:
        return before + new * (math.fsum(values) - before)

    prefills = [worker for worker in workers if worker.role == "prefill"]
    known = memory.since
    return Memory(
        at=now,
        prompts_s=smoothed(memory.prompts_s, [w.prompts_s for w in prefills]),
        prompting=smoothed(memory.prompting, [w.prompting for w in prefills]),
        occupied=smoothed(memory.occupied, [w.occupied for w in workers if w.role == "decode"]),
        since={
            w.name: known[w.name] if w.name in known and known[w.name][0] == w.role else (w.role, now)
            for w in workers
        },
        changed_at=now if first else memory.changed_at,
    )
