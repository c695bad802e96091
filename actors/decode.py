"""Decode side of a handover: chunks are read into the engine's blocks as they are announced.

Three parties meet here, in any order: the decode worker's engine, which allocates blocks
for the request (``open``); the prefill worker, which announces chunks and the end
(``deliver``); and the gateway, which may abort (``close``). Threads of a small pool fetch
and verify, so that the engine thread never waits for the wire.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from actors.loading import Loader
from actors.marks import Marks
from actors.messages import Again, Chunk, Delivery, Handed, HandoverEnd, HandoverFailed
from actors.rungs import Rungs
from kv.chunk import KVLayout
from kv.errors import KVError, PeerLost, TransferError
from kv.ladder import cause_of
from kv.paged import PagedCache

logger = logging.getLogger(__name__)

FETCH_THREADS = 4
UNCLAIMED_LEASE_S = 60.0
"""Chunks whose request never shows up here are dropped after this long."""
CLOSED_KEPT = 4096
"""How many closed requests are remembered, so that late chunks are dropped at once."""

Done = Callable[[float | None], None]
"""Called with the seconds that the fetch of a whole payload took, None if there was none."""
AskAgain = Callable[[str, Again, float], Chunk]
"""Ask the named worker to publish a chunk over another rung, within a time; raises TransferError."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request's KV goes.

    Attributes:
        blocks: the request's block ids, from token 0.
        skip: tokens that the engine has already (a local prefix hit); a multiple of the block size.
        end: one past the last token to load.

    """

    blocks: Sequence[int]
    skip: int
    end: int


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A chunk that was announced, and what to call once its payload is not needed any more."""

    chunk: Chunk
    done: Done


@dataclass(slots=True)
class _Incoming:
    """A request whose KV is on its way. Guarded by the receiver's lock."""

    deadline: float
    target: Target | None = None
    tokens: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each chunk that was announced: which tokens it says it holds."""
    parked: list[_Arrival] = field(default_factory=list)
    repeated: list[_Arrival] = field(default_factory=list)
    """Chunks that came a second time; the first may still have to be fetched by the same ticket."""
    loading: int = 0
    written: int = 0
    rungs: dict[str, str] = field(default_factory=dict)
    """That chunks came over, in the order of their first use, and the latest reason for each."""
    end: HandoverEnd | None = None
    reported: bool = False
    failed: str | None = None
    """Why, if it has."""

    @property
    def handed(self) -> Handed | None:
        if self.end is None:
            return None
        return Handed(self.end.nbytes, tuple(self.rungs), next(reversed(self.rungs.values()), ""))

    @property
    def complete(self) -> bool:
        return self.target is not None and self.end is not None and self.written == self.end.chunks

    def gap(self) -> str | None:
        """Of a complete request: say what is wrong if the chunks do not make up the prompt, end to end."""
        assert self.target is not None
        assert self.end is not None
        reached = 0
        for index in range(self.end.chunks):
            if index not in self.tokens:
                return f"of {self.end.chunks} chunks, number {index} did not come"
            start, end = self.tokens[index]
            if start != reached:
                return f"chunk {index} holds tokens {start}-{end}, expected them from {reached}"
            reached = end
        if reached != self.end.tokens or reached < self.target.end:
            return f"KV of {reached} tokens came, expected {max(self.end.tokens, self.target.end)} tokens"
        return None


class _Closed(NamedTuple):
    """What is still asked about a request that is over; ``failed`` is why its KV did not come, if so."""

    end: HandoverEnd | None = None
    handed: Handed | None = None
    failed: str | None = None


def _done(arrival: _Arrival, load: Future[float | None]) -> None:
    failed = load.cancelled() or load.exception() is not None
    arrival.done(None if failed else load.result())


class Receiver:
    """Loads the KV of requests that were prefilled elsewhere into this engine's cache.

    Args:
        cache: the engine's paged cache.
        layout: its layout; chunks of other layouts are converted, if they can be.
        rungs: what payloads are fetched through.
        marks: stage times.
        wake: wakes the engine loop, called when there is something for it.
        again: asks a chunk's sender for another rung.
        on_failed: called with (request id, reason) when a request's KV will not come; the
            engine loop then aborts the request, which calls ``close``.

    """

    def __init__(
        self,
        cache: PagedCache,
        layout: KVLayout,
        rungs: Rungs,
        marks: Marks,
        wake: Callable[[], None],
        again: AskAgain,
        on_failed: Callable[[str, str], None],
    ) -> None:
        self._loader, self._rungs = Loader(cache, layout, rungs.register), rungs
        self._marks, self._wake, self._again, self._on_failed = marks, wake, again, on_failed
        self._incoming: dict[str, _Incoming] = {}
        self._closed: OrderedDict[str, _Closed] = OrderedDict()
        self._broken: dict[tuple[str, str], float] = {}
        """By (sender, rung): what was published there before this time on the sender's clock is not tried."""
        self._finished: set[str] = set()
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="kv-receiver")

    # -- the gateway's side ---------------------------------------------------------------

    def expect(self, request_id: str, timeout_s: float) -> str | None:
        """A request was accepted whose KV must be complete within ``timeout_s``.

        Returns why it will not come, if prefill has said so already: its word may overtake the gateway's.
        """
        with self._lock:
            if (closed := self._closed.get(request_id)) is not None:
                return closed.failed or "its handover is over"
            incoming = self._incoming.setdefault(request_id, _Incoming(0.0))
            incoming.deadline = time.monotonic() + timeout_s
            return incoming.failed

    def sweep(self) -> None:
        """Fail every request whose deadline has passed. Called a few times a second."""
        now = time.monotonic()
        with self._lock:
            late = [
                (rid, inc) for rid, inc in self._incoming.items() if now > inc.deadline and not inc.reported
            ]
        for request_id, incoming in late:
            chunks = "an unknown number" if incoming.end is None else incoming.end.chunks
            self._fail(
                request_id, f"waited too long for its KV: {incoming.written} of {chunks} chunks arrived"
            )

    def sender_lost(self, request_id: str) -> None:
        """Its prefill worker is gone: fail the request unless all of its chunks have been announced.

        What was announced is fetched all the same, and fails by itself if it has gone with its sender.
        """
        with self._lock:
            incoming = self._incoming.get(request_id)
            if incoming is None or (incoming.end is not None and len(incoming.tokens) >= incoming.end.chunks):
                return
        self._fail(request_id, f"its prefill worker was lost after announcing {len(incoming.tokens)} chunks")

    # -- the prefill worker's side ----------------------------------------------------------

    def deliver(self, delivery: Delivery, done: Done) -> None:
        """Take a chunk, the end, or the failure of a handover. Never blocks.

        ``done`` is called exactly once, when the payload has been written or will never be
        wanted: from then on the sender may withdraw it.
        """
        if isinstance(delivery, Chunk):
            self._announce(_Arrival(delivery, done))
            return
        with self._lock:
            incoming = self._claim(delivery.request_id)
            if incoming is not None and isinstance(delivery, HandoverEnd):
                incoming.end = delivery
                self._report_if_complete(delivery.request_id, incoming)
        if isinstance(delivery, HandoverFailed):
            self._fail(delivery.request_id, delivery.reason)
        self._wake()
        done(None)

    def _announce(self, arrival: _Arrival) -> None:
        header = arrival.chunk.header
        with self._lock:
            incoming = self._claim(header.request_id)
            if incoming is not None and header.index not in incoming.tokens:
                incoming.tokens[header.index] = header.tokens
                if incoming.target is None:
                    incoming.parked.append(arrival)
                else:
                    self._load_soon(header.request_id, incoming, arrival)
                return
            if incoming is not None:
                logger.warning("request %s: chunk %d came twice", header.request_id, header.index)
                incoming.repeated.append(arrival)
                return
        arrival.done(None)

    def _claim(self, request_id: str) -> _Incoming | None:
        """Under the lock: return the request's state, made now if need be; None once it is closed."""
        if request_id in self._closed:
            return None
        return self._incoming.setdefault(request_id, _Incoming(time.monotonic() + UNCLAIMED_LEASE_S))

    # -- the engine's side ------------------------------------------------------------------

    def open(self, request_id: str, target: Target) -> None:
        """Blocks are allocated: load what has been announced, and what is from now on."""
        with self._lock:
            incoming = self._incoming.get(request_id)
            if incoming is None:  # closed, or never expected: nothing will come
                self._finished.add(request_id)
                self._on_failed(request_id, "no handover is under way for it")
                return
            incoming.target = target
            parked, incoming.parked = incoming.parked, []
            for arrival in parked:
                self._load_soon(request_id, incoming, arrival)
            self._report_if_complete(request_id, incoming)

    def ended(self, request_id: str) -> HandoverEnd | None:
        """Return the end of the handover, once it has been delivered; for a while also after ``close``."""
        with self._lock:
            incoming = self._incoming.get(request_id)
            return incoming.end if incoming else self._closed.get(request_id, _Closed()).end

    def handed(self, request_id: str) -> Handed | None:
        """Return how a request's KV came, once its end is here; for a while also after ``close``."""
        with self._lock:
            incoming = self._incoming.get(request_id)
            return incoming.handed if incoming else self._closed.get(request_id, _Closed()).handed

    def take_finished(self) -> set[str]:
        """Return opened requests into whose blocks nothing is written any more, each once."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def close(self, request_id: str) -> None:
        """The engine wants nothing more for the request: drop what is here, ignore what still comes.

        If blocks were opened, they are reported by ``take_finished`` as soon as no thread
        writes to them any more.
        """
        with self._lock:
            incoming = self._incoming.pop(request_id, None)
            if incoming is not None or request_id not in self._closed:
                self._closed[request_id] = (
                    _Closed(incoming.end, incoming.handed, incoming.failed) if incoming else _Closed()
                )
            while len(self._closed) > CLOSED_KEPT:
                self._closed.popitem(last=False)
            unwanted = [*incoming.parked, *incoming.repeated] if incoming is not None else []
            if incoming is not None:
                self._report_if_quiet(request_id, incoming)
        for arrival in unwanted:
            arrival.done(None)

    def waiting(self) -> int:
        """Return how many handovers are under way."""
        with self._lock:
            return sum(not incoming.reported for incoming in self._incoming.values())

    def stop(self) -> None:
        """Close every request and stop the pool; fetches under way end by their own deadline."""
        with self._lock:
            left = list(self._incoming)
        for request_id in left:
            self.close(request_id)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- pool threads -----------------------------------------------------------------------

    def _load_soon(self, request_id: str, incoming: _Incoming, arrival: _Arrival) -> None:
        """Under the lock: hand a chunk to the pool."""
        incoming.loading += 1
        load = self._pool.submit(self._load, request_id, incoming, arrival.chunk)
        load.add_done_callback(partial(_done, arrival))  # also if it is cancelled

    def _load(self, request_id: str, incoming: _Incoming, chunk: Chunk) -> float | None:
        reason, seconds = None, None
        try:
            if self._incoming.get(request_id) is incoming:
                seconds = self._climb(request_id, incoming, chunk)
        except Exception as error:
            reason = str(error) if isinstance(error, KVError) else repr(error)
        with self._lock:
            incoming.loading -= 1
            incoming.written += reason is None
            if self._incoming.get(request_id) is incoming:
                self._report_if_complete(request_id, incoming)
            else:
                self._report_if_quiet(request_id, incoming)
        if reason is not None:
            self._fail(request_id, reason)
        return seconds

    def _climb(self, request_id: str, incoming: _Incoming, chunk: Chunk) -> float | None:
        """Fetch a chunk over the rung it was published through, or over those that its sender offers then.

        Returns the seconds that the transfer took, None if only a part of the payload was wanted.
        Raises TransferError when no rung is left; says what was wrong with each.
        """
        self._loader.require(chunk.header)
        failures: list[str] = []
        while True:
            try:
                return self._fetch(request_id, incoming, chunk)
            except Exception as error:
                self._rungs.failed(chunk.rung, error)
                if self._incoming.get(request_id) is not incoming:
                    return None
                failures.append(f"{chunk.rung}: {error}")
                logger.warning("request %s: chunk %d over %s", request_id, chunk.header.index, failures[-1])
                asked = Again(request_id, chunk.header.index, chunk.rung, cause_of(error), str(error))
            try:
                other = self._again(chunk.source, asked, self._left_s(incoming))
            except TransferError as error:
                raise TransferError("; ".join([*failures, str(error)])) from error
            if other.cause != "moved":
                self._broken[chunk.source, chunk.rung] = other.published_at
            chunk = other

    def _left_s(self, incoming: _Incoming) -> float:
        return max(0.1, incoming.deadline - time.monotonic())

    def _fetch(self, request_id: str, incoming: _Incoming, chunk: Chunk) -> float | None:
        """Bring in a chunk's blocks: not those the engine has already, nor any it did not allocate."""
        target, rung = incoming.target, chunk.rung
        assert target is not None
        self._marks.note(request_id, "peer.published", last=True, at=chunk.published_at)
        landing = self._loader.landing(chunk.header, target.blocks, (target.skip, target.end))
        into = landing.into
        wanted = sum(run.nbytes for run in into if run is not None)
        began = time.monotonic()
        if wanted:
            if chunk.published_at < self._broken.get((chunk.source, rung), -math.inf):
                raise PeerLost("another chunk did not come over it a moment ago")
            timeout_s = min(chunk.timeout_s, self._left_s(incoming))
            self._rungs.transport(rung).fetch(chunk.ticket, into, timeout_s)
        seconds = time.monotonic() - began
        self._marks.note(request_id, "fetched", last=True)
        chunk.header.verify(into)
        landing.settle()
        if wanted:
            with self._lock:
                self._rungs.tally.chunks[rung, chunk.cause] += 1
                self._rungs.tally.nbytes[rung] += wanted
                incoming.rungs[rung] = chunk.reason
        return seconds if wanted == chunk.header.nbytes else None

    def _report_if_complete(self, request_id: str, incoming: _Incoming) -> None:
        """Under the lock: if everything has been written, tell the engine."""
        if not incoming.complete or incoming.reported or incoming.failed:
            return
        if (gap := incoming.gap()) is not None:
            self._fail(request_id, gap)
            return
        self._marks.note(request_id, "loaded")
        self._report_if_quiet(request_id, incoming)

    def _report_if_quiet(self, request_id: str, incoming: _Incoming) -> None:
        """Under the lock: hand the blocks back to the engine when no thread writes to them."""
        if incoming.target is not None and incoming.loading == 0 and not incoming.reported:
            incoming.reported = True
            self._finished.add(request_id)
            self._wake()

    def _fail(self, request_id: str, reason: str) -> None:
        with self._lock:
            incoming = self._incoming.get(request_id)
            if incoming is None or incoming.reported or incoming.failed:
                return
            incoming.failed = reason
        logger.warning("request %s: handover failed: %s", request_id, reason)
        self._on_failed(request_id, reason)
