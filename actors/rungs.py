"""A worker's transports, and what it knows of the way to each of its peers (``kv/ladder.py``).

Probing asks the peer to fetch two payloads over one rung. Rungs are probed when a peer is first
met and after they broke, in a thread of their own and never by a request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.messages import Probe
from kv.chunk import Run, checksum
from kv.errors import ChunkCorrupt, KVError, TransferError
from kv.ladder import NO_MAP, PROBE_SIZES, PROBE_WITHIN_S, Choice, Cost, Ladder, Side, cause_of, possible
from kv.transport import Ticket, Transport, needs_ray

logger = logging.getLogger(__name__)

PROBE_ROUNDS = 2
"""The faster counts: the first use of a connection or of shared memory is slower than all later ones."""

NO_LINKS: Mapping[str, Mapping[str, Cost]] = {}

AskProbe = Callable[[str, Probe, float], float]
"""Have the named peer fetch a probe's payload within a time; returns the seconds it took."""


@dataclass(slots=True)
class _Peer:
    ladder: Ladder
    first: str | None = None
    """The rung that was chosen last, for the log."""
    announcing_s: dict[str, float] = field(default_factory=dict)
    """By rung: what announcing a chunk takes, where tickets travel by Ray's calls; by channel, nothing."""


@dataclass(slots=True)
class Tally:
    """What this worker has seen since it started.

    Attributes:
        chunks: that were handed over to it, by (rung, cause).
        nbytes: their bytes, by rung.
        failed: publications and fetches that failed here, of chunks and probes, by (rung, cause).

    """

    chunks: Counter[tuple[str, str]] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)


class Rungs:
    """The transports of one worker and a ladder for each peer. Thread-safe.

    Args:
        transports: by name.
        node: the node this worker is on.
        ask_probe: how a peer is asked to fetch a probe.
        mapped: what a map says of the links from this node, by the other node and transport.

    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        node: str = "",
        ask_probe: AskProbe | None = None,
        mapped: Mapping[str, Mapping[str, Cost]] = NO_LINKS,
    ) -> None:
        self.transports, self.tally = dict(transports), Tally()
        self._node, self._ask_probe, self._mapped = node, ask_probe, mapped
        self._peers: dict[str, _Peer] = {}
        self._sides: dict[str, Side] = {}
        self._lock = threading.Lock()
        self._probing = threading.Lock()
        self._answering = threading.Lock()
        size = max(PROBE_SIZES) if ask_probe is not None else 0
        self._payload: Run = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self._scratch: Run = np.empty(size, np.uint8)

    @property
    def names(self) -> tuple[str, ...]:
        """The transports that this worker has."""
        return tuple(self.transports)

    def register(self, memory: Sequence[Run]) -> None:
        """Tell all transports what payloads are published from and fetched into: the cache, and probes."""
        for transport in self.transports.values():
            transport.register([*memory, self._payload, self._scratch])

    def transport(self, rung: str) -> Transport:
        """Return a transport; raises TransferError if this worker does not have it."""
        if rung not in self.transports:
            raise TransferError(f"this worker has no transport {rung!r}, only {', '.join(self.transports)}")
        return self.transports[rung]

    def publish(self, peer: str, rung: str, runs: Sequence[Run], read: Callable[[], None]) -> Ticket:
        """Publish over one rung for one peer; see ``Transport.publish``."""
        with self._lock:
            side = self._sides.get(peer)
        near = side is not None and side.node == self._node
        return self.transport(rung).publish(runs, read, near)

    def meet(self, peer: str, node: str, transports: tuple[str, ...]) -> None:
        """Learn where a peer is and what it has; until then it is taken to be elsewhere and have the same."""
        with self._lock:
            if self._sides.get(peer) != (side := Side(node, transports)):
                self._sides[peer] = side
                self._peers.pop(peer, None)
            self._peer(peer)

    def forget(self, peer: str) -> None:
        """A peer is gone for good: nothing probes it any more."""
        with self._lock:
            self._sides.pop(peer, None)
            self._peers.pop(peer, None)

    def order(self, peer: str, nbytes: int) -> Choice:
        """Return the rungs to a peer, best first; logs when the first is another than the last time."""
        with self._lock:
            state = self._peer(peer)
            choice = state.ladder.order(nbytes, time.monotonic())
            first = choice.rungs[0] if choice.rungs else None
            before, state.first = state.first, first
        if first != before:
            logger.info("KV to %s goes over %s: %s", peer, first or "no rung", choice.reason)
        return choice

    def unproven(self, peers: Sequence[str]) -> dict[str, str]:
        """Return those of the peers that no probe has got to over a rung that works now, and why."""
        with self._lock:
            return {
                peer: self._peer(peer).ladder.order(PROBE_SIZES[1], time.monotonic()).reason
                for peer in peers
                if not self._peer(peer).ladder.proven()
            }

    def deadline_s(self, peer: str, rung: str, nbytes: int) -> float:
        """Return how long a fetch of that size may take."""
        with self._lock:
            return self._peer(peer).ladder.deadline_s(rung, nbytes, time.monotonic())

    def took(self, peer: str, rung: str, nbytes: int, seconds: float) -> None:
        """A payload went over."""
        with self._lock:
            state = self._peer(peer)
            seconds += state.announcing_s.get(rung, 0.0)
            state.ladder.took(rung, nbytes, seconds, time.monotonic())

    def broke(self, peer: str, rung: str, cause: str, detail: str) -> None:
        """A payload did not go over."""
        with self._lock:
            sound = self._peer(peer).ladder.broke(rung, cause, time.monotonic())
        if sound:
            logger.warning("KV to %s: %s is broken (%s): %s", peer, rung, cause, detail)

    def failed(self, rung: str, error: BaseException) -> None:
        """Count a publication or a fetch that failed here."""
        with self._lock:
            self.tally.failed[rung, cause_of(error)] += 1

    def rates(self) -> dict[tuple[str, str], float]:
        """Return the estimated bytes per second by (peer, rung); 0 while a rung is broken."""
        now = time.monotonic()
        with self._lock:
            return {
                (name, rung): rate
                for name, peer in self._peers.items()
                for rung, rate in peer.ladder.rates(now).items()
            }

    def mapped(self) -> dict[tuple[str, str], float]:
        """Return the bytes per second that a map says by (peer, rung)."""
        with self._lock:
            return {
                (name, rung): rate
                for name, peer in self._peers.items()
                for rung, rate in peer.ladder.mapped().items()
            }

    def live(self) -> tuple[int, int]:
        """Return (payloads, bytes) that are published here, over all transports."""
        live = [transport.live() for transport in self.transports.values()]
        return sum(count for count, _ in live), sum(nbytes for _, nbytes in live)

    def close(self) -> None:
        """Close all transports."""
        for transport in self.transports.values():
            transport.close()

    def _peer(self, name: str) -> _Peer:
        """Under the lock."""
        if name not in self._peers:
            ours, theirs = Side(self._node, self.names), self._sides.get(name, Side("", self.names))
            mapped = self._mapped.get(theirs.node, NO_MAP)
            self._peers[name] = _Peer(Ladder(possible(ours, theirs, mapped), mapped))
        return self._peers[name]

    # -- probes ---------------------------------------------------------------------------------

    def probe_due(self) -> None:
        """Probe what should be probed now, of all peers. Blocks meanwhile; one thread at a time."""
        if self._ask_probe is None or not self._probing.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            with self._lock:
                due = [(name, rung) for name, peer in self._peers.items() for rung in peer.ladder.due(now)]
            for name, rung in due:
                self._probe(name, rung, self._ask_probe)
        finally:
            self._probing.release()

    def _probe(self, peer: str, rung: str, ask: AskProbe) -> None:
        try:
            seconds, announcing_s = self._measure(peer, rung, ask)
        except Exception as error:
            why = cause_of(error)
            with self._lock:
                self._peer(peer).ladder.probe_failed(rung, why, time.monotonic())
            said = error if isinstance(error, KVError) else repr(error)
            logger.warning("KV to %s: a probe of %s failed (%s): %s", peer, rung, why, said)
            return
        with self._lock:
            state = self._peer(peer)
            state.announcing_s[rung] = announcing_s
            state.ladder.probed(rung, [took + announcing_s for took in seconds], time.monotonic())
            drift = state.ladder.drift(rung)
        logger.info("KV to %s: %s is sound: %s s for %s bytes", peer, rung, seconds, PROBE_SIZES)
        if drift is not None:
            logger.warning(
                "KV to %s: %s takes %.1f times what the map says; if the link is meant to be like that "
                "now, make the map anew: handoff probe FILE",
                peer,
                rung,
                drift,
            )

    def _measure(self, peer: str, rung: str, ask: AskProbe) -> tuple[list[float], float]:
        """Return what publishing and fetching each size took, and what announcing did."""
        transport, deadline = self.transport(rung), time.monotonic() + PROBE_WITHIN_S
        rounds: list[list[float]] = []
        asking: list[float] = []
        by_ray = False
        for _ in range(PROBE_ROUNDS):
            seconds = []
            for size in PROBE_SIZES:
                run = self._payload[:size]
                began = time.monotonic()
                ticket = self.publish(peer, rung, [run], _nothing)
                published_s = time.monotonic() - began
                by_ray = needs_ray(ticket)
                try:
                    probe = Probe(rung, ticket, size, checksum(run))
                    began = time.monotonic()
                    fetched_s = ask(peer, probe, max(0.1, deadline - began))
                    asking.append(time.monotonic() - began - fetched_s)
                    seconds.append(published_s + fetched_s)
                finally:
                    transport.release(ticket)
            rounds.append(seconds)
        announcing_s = max(0.0, min(asking)) / 2 if by_ray else 0.0  # there, not back
        return [min(times) for times in zip(*rounds, strict=True)], announcing_s

    def answer(self, probe: Probe, timeout_s: float) -> float:
        """Fetch a peer's probe; return the seconds it took."""
        with self._answering:
            into = self._scratch[: probe.nbytes]
            into[:] = 0
            began = time.monotonic()
            try:
                self.transport(probe.rung).fetch(probe.ticket, [into], timeout_s)
                seconds = time.monotonic() - began
                if (found := checksum(into)) != probe.checksum:
                    raise ChunkCorrupt("probe", "checksum", f"{probe.checksum:016x}", f"{found:016x}")
            except Exception as error:
                self.failed(probe.rung, error)
                raise
            return seconds


def _nothing() -> None:
    pass
