"""The ladder: which transports ("rungs") can carry KV from one worker to another, best first, and why.

A ladder belongs to a sender and one of its peers. It does no I/O and knows no clock: its owner
probes, publishes and fetches, tells the ladder what it saw, and passes the time.

Cost of a rung: a probe with a small and a large payload gives latency and rate,
``seconds(n) = latency + n / rate``; every transfer since moves a factor on it (the mean of the logarithm
of measured over expected, exponentially weighted), which fades back to 1 while a rung is not in use.
A rung that fails is broken: nothing is sent over it until a probe has passed, and probes wait
longer each time they fail.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kv.errors import ChunkCorrupt, PeerLost, StoreFull, TransferTimeout

PROBE_SIZES = (64 << 10, 4 << 20)
"""Bytes of the two payloads of a probe."""
WEIGHT = 0.1
"""Of the latest transfer in a rung's running estimate."""
FADE_S = 60.0
"""Time constant with which the estimate of a rung that is not in use returns to what the probe measured."""
SWITCH = 1.5
"""Another rung must be this much faster to take the place of the one in use."""
PATIENCE, MIN_DEADLINE_S, MAX_DEADLINE_S = 20.0, 5.0, 30.0
"""A transfer may take this many times what is expected, within these bounds."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
PROBE_WITHIN_S = 10.0
"""How long a probe may take; another is not asked for meanwhile."""

Cost = tuple[float, float]
"""(seconds per transfer, seconds per byte)."""

UNMEASURED: Cost = (1e-3, 1e-9)
PRIORS: dict[str, Cost] = {
    "nixl": (0.5e-3, 0.4e-9),
    "tcp": (0.5e-3, 0.5e-9),
    "plasma": (2e-3, 1e-9),
    "s3": (50e-3, 10e-9),
}
"""What is assumed until the first probe has passed."""
SAME_NODE_PRIORS: dict[str, Cost] = {"plasma": (1e-3, 0.5e-9)}

NO_MAP: Mapping[str, Cost] = {}
DRIFT = 3.0
"""A probe that takes so many times what the map says tells of another link, not of a transport's own cost."""

_CAUSES = {TransferTimeout: "timeout", PeerLost: "lost", StoreFull: "full", ChunkCorrupt: "corrupt"}


def cause_of(error: BaseException) -> str:
    """Return a transfer's error in one word: a label with few values."""
    return next((cause for kind, cause in _CAUSES.items() if isinstance(error, kind)), "error")


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a pair: the node it is on, and the transports that it holds."""

    node: str
    transports: tuple[str, ...]


def possible(ours: Side, theirs: Side, mapped: Mapping[str, Cost] = NO_MAP) -> dict[str, Cost]:
    """Return the rungs between two workers, with the cost that is assumed before any is measured.

    mapped: what a map says of the links between their nodes; a transport's own latency comes on top.
    """
    near = SAME_NODE_PRIORS if ours.node == theirs.node else {}
    found = {}
    for name in ours.transports:
        if name in theirs.transports:
            latency_s, s_per_byte = near.get(name, PRIORS.get(name, UNMEASURED))
            if (link := mapped.get(name)) is not None:
                latency_s, s_per_byte = latency_s + link[0], link[1]
            found[name] = latency_s, s_per_byte
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """The rungs that may be used now, best first (empty: none), and the reason as text."""

    rungs: tuple[str, ...]
    reason: str


@dataclass(slots=True)
class _Rung:
    latency_s: float
    s_per_byte: float
    measured: bool = False
    slowdown: float = 1.0
    used_at: float = -math.inf
    broken: str = ""
    """Why, if it is."""
    backoff_s: float = 0.0
    probe_at: float = -math.inf
    healed_at: float = -math.inf
    map_s: float | None = None
    """Of the large probe, by a map."""

    def expected_s(self, nbytes: int) -> float:
        return self.latency_s + nbytes * self.s_per_byte

    def estimate_s(self, nbytes: int, now: float) -> float:
        return self.expected_s(nbytes) * self.factor(now)

    def factor(self, now: float) -> float:
        idle_s = max(0.0, now - self.used_at)
        return float(self.slowdown ** math.exp(-idle_s / FADE_S))


class Ladder:
    """What is known of the rungs to one peer. Not thread-safe.

    Args:
        rungs: from ``possible``.
        mapped: names of those whose cost comes from a map.

    Times are seconds on any one monotonic clock.

    """

    def __init__(self, rungs: dict[str, Cost], mapped: Collection[str] = ()) -> None:
        self._rungs = {name: _Rung(*cost) for name, cost in rungs.items()}
        self._first: str | None = None
        for name, state in self._rungs.items():
            state.map_s = state.expected_s(PROBE_SIZES[1]) if name in mapped else None

    # -- what was seen --------------------------------------------------------------------------

    def probed(self, rung: str, seconds: Sequence[float], now: float) -> None:
        """A probe passed: what each of ``PROBE_SIZES`` took. Mends a broken rung."""
        state = self._rungs[rung]
        (small, large), (small_s, large_s) = PROBE_SIZES, seconds
        state.s_per_byte = max(0.0, large_s - small_s) / (large - small)
        state.latency_s = max(1e-6, small_s - small * state.s_per_byte)
        state.measured, state.slowdown, state.used_at = True, 1.0, now
        if state.broken:
            state.broken, state.healed_at = "", now

    def probe_failed(self, rung: str, why: str, now: float) -> None:
        """A probe failed: the rung is, or stays, broken, and the next probe waits twice as long."""
        state = self._rungs[rung]
        state.broken = why
        state.backoff_s = min(MAX_BACKOFF_S, max(FIRST_BACKOFF_S, 2 * state.backoff_s))
        state.probe_at = now + state.backoff_s

    def took(self, rung: str, nbytes: int, seconds: float, now: float) -> None:
        """A transfer succeeded."""
        state = self._rungs[rung]
        ratio = max(1e-3, min(1e3, seconds / state.expected_s(nbytes)))
        state.slowdown = state.factor(now) ** (1 - WEIGHT) * ratio**WEIGHT
        state.used_at = now

    def broke(self, rung: str, why: str, now: float) -> bool:
        """A transfer failed. Return whether the rung was sound until now."""
        state = self._rungs[rung]
        if state.broken:
            return False
        recent = now - state.healed_at < MAX_BACKOFF_S
        state.broken = why
        state.backoff_s = min(MAX_BACKOFF_S, 2 * state.backoff_s) if recent else FIRST_BACKOFF_S
        state.probe_at = now + state.backoff_s
        return True

    # -- what follows from it -------------------------------------------------------------------

    def due(self, now: float) -> list[str]:
        """Return the rungs that should be probed now: never measured, or broken for long enough.

        Each is returned once; the caller answers with ``probed`` or ``probe_failed``.
        """
        due = [
            name
            for name, state in self._rungs.items()
            if (state.broken or not state.measured) and now >= state.probe_at
        ]
        for name in due:
            self._rungs[name].probe_at = now + PROBE_WITHIN_S
        return due

    def order(self, nbytes: int, now: float) -> Choice:
        """Return the rungs for a payload, best first. Keeps to the one in use while it is nearly the best."""
        estimates = {
            name: state.estimate_s(nbytes, now) for name, state in self._rungs.items() if not state.broken
        }
        rungs = sorted(estimates, key=lambda name: estimates[name])
        if rungs and self._first in estimates and estimates[self._first] <= SWITCH * estimates[rungs[0]]:
            rungs.remove(self._first)
            rungs.insert(0, self._first)
        self._first = rungs[0] if rungs else self._first
        told = [f"{name} {_ms(estimates[name])}{self._guess(name)}" for name in rungs]
        told += [f"{name} broken ({state.broken})" for name, state in self._rungs.items() if state.broken]
        return Choice(
            tuple(rungs), f"for {nbytes / 1e6:.1f} MB: " + (", ".join(told) or "no transport in common")
        )

    def estimate_s(self, rung: str, nbytes: int, now: float) -> float:
        """Return how long a payload is expected to take over a rung; infinite while it is broken."""
        state = self._rungs[rung]
        return math.inf if state.broken else state.estimate_s(nbytes, now)

    def deadline_s(self, rung: str, nbytes: int, now: float) -> float:
        """Return how long a transfer may take before its rung counts as broken."""
        estimate = self._rungs[rung].estimate_s(nbytes, now)
        return min(MAX_DEADLINE_S, max(MIN_DEADLINE_S, PATIENCE * estimate))

    def mapped(self) -> dict[str, float]:
        """Return what a map says: bytes per second of the large probe payload, by rung."""
        return {
            name: PROBE_SIZES[1] / state.map_s
            for name, state in self._rungs.items()
            if state.map_s is not None
        }

    def drift(self, rung: str) -> float | None:
        """Return how many times as long as the map says the large payload took, where that is ``DRIFT``."""
        state = self._rungs[rung]
        if state.map_s is None or not state.measured:
            return None
        times = state.expected_s(PROBE_SIZES[1]) / state.map_s
        return times if times >= DRIFT else None

    def proven(self) -> bool:
        """Whether a probe has passed over a rung that works now."""
        return any(state.measured and not state.broken for state in self._rungs.values())

    def rates(self, now: float) -> dict[str, float]:
        """Return the estimated bytes per second of the large probe payload, by rung; 0 while broken."""
        size = PROBE_SIZES[1]
        return {
            name: 0.0 if state.broken else size / state.estimate_s(size, now)
            for name, state in self._rungs.items()
        }

    def _guess(self, name: str) -> str:
        state = self._rungs[name]
        return "" if state.measured else " (assumed)" if state.map_s is None else " (by the map)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
