"""A transport that misbehaves on request: latency, a slower link, loss, damage.

For tests and experiments: wraps any transport and can be told what to do while it is in use.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from kv.chunk import Run
from kv.errors import PeerLost, StoreFull, TransferTimeout
from kv.transport import Ticket, Transport

Damage = Literal["corrupt", "truncated", "duplicated", "swapped", "foreign"]
DAMAGES: tuple[Damage, ...] = get_args(Damage)
Kind = Literal["lost", "stalled", "held", "full"] | Damage


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong.

    Attributes:
        kind: ``lost``, ``stalled``: the fetch fails, at once or when its deadline passes.
            ``held``: the fetch waits until ``suffer`` is called again, then has the faults asked for then.
            ``corrupt``, ``truncated``, ``duplicated``, ``swapped``, ``foreign``: the fetch succeeds, and a
            bit is flipped, the last run's second half is missing, the last run is the first once more, the
            two are exchanged, or all of it is what an earlier fetch brought. It happens only to fetches
            that it can change.
            ``full``: publishing fails.
        times: how often it happens before it is over.
        share: of the fetches (or publications), evenly spread; 1 is each of them.

    """

    kind: Kind
    times: int = 1 << 30
    share: float = 1.0


class FaultyTransport:
    """A transport over another one.

    Args:
        inner: what really moves the bytes.

    ``latency_s`` is added to every fetch, and ``s_per_byte`` for every byte that is fetched. ``fired``
    counts the faults that have happened, by kind.

    """

    def __init__(self, inner: Transport) -> None:
        self.inner, self.name = inner, inner.name
        self.latency_s = 0.0
        self.s_per_byte = 0.0
        self.fired: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._chances = 0.0
        self._asked = 0
        self._earlier: list[Run] = []
        self._changed = threading.Condition()

    def suffer(self, *faults: Fault) -> None:
        """Have these faults from now on, and no others."""
        with self._changed:
            self._faults, self._chances = list(faults), 0.0
            self._asked += 1
            self._changed.notify_all()

    def register(self, memory: Sequence[Run]) -> None:
        """See ``Transport.register``."""
        self.inner.register(memory)

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> Ticket:
        """See ``Transport.publish``."""
        if self._next("full"):
            raise StoreFull("no room is left: a fault was asked for")
        return self.inner.publish(runs, read, near)

    def fetch(self, ticket: Ticket, into: Sequence[Run | None], timeout_s: float) -> None:
        """See ``Transport.fetch``."""
        wanted = [run for run in into if run is not None and run.nbytes]
        deadline = time.monotonic() + timeout_s
        delay_s = self.latency_s + self.s_per_byte * sum(run.nbytes for run in wanted)
        kind = self._next("lost", "stalled", "held") if wanted else None
        if kind == "lost":
            raise PeerLost("the peer is gone: a fault was asked for")
        if kind == "held":
            self._wait(timeout_s)
            self.fetch(ticket, into, max(1e-3, deadline - time.monotonic()))
            return
        if kind == "stalled" or delay_s >= timeout_s:
            time.sleep(timeout_s)
            raise TransferTimeout(f"nothing arrived in {timeout_s:.1f} s: a fault was asked for")
        time.sleep(delay_s)
        self.inner.fetch(ticket, into, max(1e-3, deadline - time.monotonic()))
        if wanted:
            self._damage(wanted)

    def release(self, ticket: Ticket) -> None:
        """See ``Transport.release``."""
        self.inner.release(ticket)

    def live(self) -> tuple[int, int]:
        """See ``Transport.live``."""
        return self.inner.live()

    def close(self) -> None:
        """See ``Transport.close``."""
        self.inner.close()

    def _wait(self, timeout_s: float) -> None:
        """Wait until other faults are asked for."""
        with self._changed:
            asked = self._asked
            if not self._changed.wait_for(lambda: self._asked != asked, timeout_s):
                raise TransferTimeout(f"nothing arrived in {timeout_s:.1f} s: a fault was asked for")

    def _damage(self, runs: list[Run]) -> None:
        """Damage what has arrived, if that is its turn; keep a sound payload for a later one."""
        if not any(fault.kind in DAMAGES for fault in self._faults):
            return
        sound = [run.copy() for run in runs]
        earlier, self._earlier = self._earlier, sound
        if (kind := self._next(*DAMAGES)) is None:
            return
        _damage(kind, runs, earlier)
        if all(np.array_equal(run, before) for run, before in zip(runs, sound, strict=True)):
            with self._changed:
                self.fired[kind] -= 1
                self._faults = [
                    replace(fault, times=fault.times + (fault.kind == kind)) for fault in self._faults
                ]

    def _next(self, *kinds: Kind) -> Kind | None:
        """Return the fault that happens now, if one does, and count it."""
        with self._changed:
            for position, fault in enumerate(self._faults):
                if fault.kind not in kinds or fault.times <= 0:
                    continue
                self._chances += fault.share
                if self._chances < 1.0:
                    return None
                self._chances -= 1.0
                self._faults[position] = replace(fault, times=fault.times - 1)
                self.fired[fault.kind] += 1
                return fault.kind
        return None


def _damage(kind: Kind, runs: list[Run], earlier: list[Run]) -> None:
    last = runs[-1]
    first = next(run for run in runs if run.nbytes == last.nbytes)
    if kind == "corrupt":
        last[last.nbytes // 3] ^= 1
    elif kind == "truncated":
        last[last.nbytes // 2 :] = 0
    elif kind == "duplicated":
        last[:] = first
    elif kind == "swapped":
        last[:], first[:] = first.copy(), last.copy()
    elif kind == "foreign":
        for run, other in zip(runs, earlier, strict=False):
            size = min(run.nbytes, other.nbytes)
            run[:size] = other[:size]
