"""Decode side of a handover: chunks are written into the engine's blocks as they arrive.

Three parties meet here, in any order: the decode worker's engine, which allocates blocks
for the request (``open``); the prefill worker, which delivers chunks and the end
(``deliver``); and the gateway, which may abort (``close``). Threads of a small pool fetch,
verify and write, so that the engine thread never waits for the wire.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from actors.marks import Marks
from actors.messages import Chunk, Delivery, HandoverEnd, HandoverFailed
from kv.chunk import KVLayout, Run
from kv.errors import ChunkCorrupt, KVError
from kv.paged import PagedCache
from kv.transport import Transport

logger = logging.getLogger(__name__)

FETCH_THREADS = 4
UNCLAIMED_LEASE_S = 60.0
"""Chunks whose request never shows up here are dropped after this long."""
CLOSED_KEPT = 4096
"""How many closed requests are remembered, so that late chunks are dropped at once."""


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


@dataclass(slots=True)
class _Incoming:
    """A request whose KV is on its way. Guarded by the receiver's lock."""

    deadline: float
    expected: bool = False
    target: Target | None = None
    tokens: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each chunk that came: which tokens it says it holds."""
    parked: list[tuple[Chunk, list[Run]]] = field(default_factory=list)
    fetching: int = 0
    written: int = 0
    end: HandoverEnd | None = None
    reported: bool = False
    failed: bool = False

    @property
    def complete(self) -> bool:
        return self.target is not None and self.end is not None and self.written == self.end.chunks

    @property
    def arrived(self) -> bool:
        """Whether nothing is waited for, even if no blocks were opened (all of it was cached here)."""
        here = self.written + len(self.parked)
        return self.end is not None and self.fetching == 0 and here == self.end.chunks

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


class Receiver:
    """Loads the KV of requests that were prefilled elsewhere into this engine's cache.

    Args:
        cache: the engine's paged cache.
        layout: what every chunk must say it is.
        transport: where payloads are fetched from.
        marks: stage times.
        wake: wakes the engine loop, called when there is something for it.
        on_failed: called with (request id, reason) when a request's KV will not come; the
            engine loop then aborts the request, which calls ``close``.

    """

    def __init__(
        self,
        cache: PagedCache,
        layout: KVLayout,
        transport: Transport,
        marks: Marks,
        wake: Callable[[], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        self._cache, self._layout, self._transport = cache, layout, transport
        self._marks, self._wake, self._on_failed = marks, wake, on_failed
        self._incoming: dict[str, _Incoming] = {}
        self._closed: OrderedDict[str, HandoverEnd | None] = OrderedDict()
        self._finished: set[str] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="kv-receiver")

    # -- the gateway's side ---------------------------------------------------------------

    def expect(self, request_id: str, timeout_s: float) -> None:
        """A request was accepted whose KV must be complete within ``timeout_s``."""
        with self._lock:
            incoming = self._incoming.setdefault(request_id, _Incoming(0.0))
            incoming.deadline, incoming.expected = time.monotonic() + timeout_s, True

    def sweep(self) -> None:
        """Fail every request whose deadline has passed. Called a few times a second."""
        now = time.monotonic()
        with self._lock:
            late = [
                (rid, inc)
                for rid, inc in self._incoming.items()
                if now > inc.deadline and not (inc.expected and inc.arrived)
            ]
        for request_id, incoming in late:
            chunks = "an unknown number" if incoming.end is None else incoming.end.chunks
            self._fail(
                request_id, f"waited too long for its KV: {incoming.written} of {chunks} chunks arrived"
            )

    # -- the prefill worker's side ----------------------------------------------------------

    def deliver(self, delivery: Delivery) -> None:
        """Take a chunk, the end, or the failure of a handover. Never blocks."""
        match delivery:
            case Chunk(header=header):
                request_id = header.request_id
            case HandoverEnd(request_id=request_id) | HandoverFailed(request_id=request_id):
                pass
        with self._lock:
            if request_id in self._closed:
                return
            incoming = self._incoming.setdefault(request_id, _Incoming(time.monotonic() + UNCLAIMED_LEASE_S))
            if isinstance(delivery, HandoverEnd):
                incoming.end = delivery
            elif isinstance(delivery, Chunk):
                if delivery.header.index in incoming.tokens:
                    logger.warning("request %s: chunk %d came twice", request_id, delivery.header.index)
                    return
                incoming.tokens[delivery.header.index] = delivery.header.tokens
                incoming.fetching += 1
        if isinstance(delivery, HandoverFailed):
            self._fail(request_id, delivery.reason)
        elif isinstance(delivery, Chunk):
            self._pool.submit(self._fetch, request_id, incoming, delivery)
        else:
            self._settle(request_id, incoming)
            self._wake()

    # -- the engine's side ------------------------------------------------------------------

    def open(self, request_id: str, target: Target) -> None:
        """Blocks are allocated: write what has arrived, and what arrives from now on."""
        with self._lock:
            incoming = self._incoming.get(request_id)
            if incoming is None:  # closed, or never expected: nothing will come
                self._finished.add(request_id)
                self._on_failed(request_id, "no handover is under way for it")
                return
            incoming.target = target
            parked, incoming.parked = incoming.parked, []
            incoming.fetching += len(parked)
        for chunk, payload in parked:
            self._pool.submit(self._write, request_id, incoming, chunk, payload)
        self._settle(request_id, incoming)

    def ended(self, request_id: str) -> HandoverEnd | None:
        """Return the end of the handover, once it has been delivered; for a while also after ``close``."""
        with self._lock:
            incoming = self._incoming.get(request_id)
            return incoming.end if incoming else self._closed.get(request_id)

    def take_finished(self) -> set[str]:
        """Return opened requests into whose blocks nothing is written any more, each once."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def close(self, request_id: str) -> None:
        """The engine is done with the request: drop what is here, ignore what still comes.

        If blocks were opened, they are reported by ``take_finished`` as soon as no thread
        writes to them any more.
        """
        with self._lock:
            incoming = self._incoming.pop(request_id, None)
            if incoming is not None or request_id not in self._closed:
                self._closed[request_id] = incoming.end if incoming else None
            while len(self._closed) > CLOSED_KEPT:
                self._closed.popitem(last=False)
            if incoming is None:
                return
            incoming.parked.clear()
            self._report_if_quiet(request_id, incoming)

    def waiting(self) -> int:
        """Return how many handovers are under way."""
        with self._lock:
            return len(self._incoming)

    def stop(self) -> None:
        """Stop the pool; fetches under way end by their own deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- pool threads -----------------------------------------------------------------------

    def _fetch(self, request_id: str, incoming: _Incoming, chunk: Chunk) -> None:
        try:
            self._check_identity(request_id, chunk)
            self._marks.note(request_id, "peer.published", last=True, at=chunk.published_at)
            payload = self._transport.fetch(chunk.ticket, max(0.1, incoming.deadline - time.monotonic()))
            self._marks.note(request_id, "fetched", last=True)
            chunk.header.verify(payload)
        except Exception as error:
            self._release_slot(request_id, incoming)
            self._fail(request_id, str(error) if isinstance(error, KVError) else repr(error))
            return
        with self._lock:
            if incoming.target is None:
                if request_id in self._incoming:
                    incoming.parked.append((chunk, payload))
                incoming.fetching -= 1
                return
        self._write(request_id, incoming, chunk, payload)

    def _write(self, request_id: str, incoming: _Incoming, chunk: Chunk, payload: list[Run]) -> None:
        try:
            with self._lock:
                alive = request_id in self._incoming
            if alive:
                assert incoming.target is not None
                self._scatter(incoming.target, chunk, payload)
                self._marks.note(request_id, "written", last=True)
        except Exception as error:
            self._release_slot(request_id, incoming)
            self._fail(request_id, repr(error))
            return
        with self._lock:
            incoming.written += 1
        self._release_slot(request_id, incoming)

    def _scatter(self, target: Target, chunk: Chunk, payload: list[Run]) -> None:
        """Write the chunk's blocks that this engine wants: not those it has, nor any it did not allocate."""
        cache, (start, end) = self._cache, chunk.header.tokens
        first, last = start // cache.block_size, cache.blocks_of(end)
        if len(payload) != (last - first) * cache.num_layers:
            raise ChunkCorrupt(
                chunk.header.request_id, "number of runs", (last - first) * cache.num_layers, len(payload)
            )
        low = min(max(first, target.skip // cache.block_size), last)
        high = max(low, min(last, cache.blocks_of(target.end)))
        cache.write(target.blocks[low:high], payload, slice(low - first, high - first))

    def _check_identity(self, request_id: str, chunk: Chunk) -> None:
        if chunk.header.layout != self._layout:
            raise ChunkCorrupt(request_id, "layout", self._layout, chunk.header.layout)

    def _release_slot(self, request_id: str, incoming: _Incoming) -> None:
        with self._lock:
            incoming.fetching -= 1
            if request_id not in self._incoming:
                self._report_if_quiet(request_id, incoming)
        self._settle(request_id, incoming)

    def _settle(self, request_id: str, incoming: _Incoming) -> None:
        """If everything has been written, tell the engine."""
        with self._lock:
            if request_id not in self._incoming or not incoming.complete or incoming.reported:
                return
            if (gap := incoming.gap()) is None:
                self._marks.note(request_id, "loaded")
                self._report_if_quiet(request_id, incoming)
                return
        self._fail(request_id, gap)

    def _report_if_quiet(self, request_id: str, incoming: _Incoming) -> None:
        """Under the lock: hand the blocks back to the engine when no thread writes to them."""
        if incoming.target is not None and incoming.fetching == 0 and not incoming.reported:
            incoming.reported = True
            self._finished.add(request_id)
            self._wake()

    def _fail(self, request_id: str, reason: str) -> None:
        with self._lock:
            incoming = self._incoming.get(request_id)
            if incoming is None or incoming.reported or incoming.failed:
                return
            incoming.failed = True
        logger.warning("request %s: handover failed: %s", request_id, reason)
        self._on_failed(request_id, reason)
