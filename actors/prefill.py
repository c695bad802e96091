"""Prefill side of a handover: KV leaves the paged cache in chunks while prefill still runs.

The engine thread says after each step how far a request's KV is valid; a publisher thread
gathers, checksums and publishes the new part and posts it to the decode worker, while the
next step computes. The engine keeps the blocks until the request is reported finished.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from actors.messages import Chunk, Delivery, HandoverEnd, HandoverFailed
from kv.chunk import ChunkHeader, KVLayout, digest
from kv.errors import KVError
from kv.paged import PagedCache
from kv.transport import Transport

logger = logging.getLogger(__name__)

Post = Callable[[str, Delivery, Callable[[], None]], None]
"""Send a delivery to the named peer; calls back once the peer has taken it, or is gone."""

MAX_CHUNK_BYTES = 32 << 20
"""Larger ranges (a prompt found in the prefix cache) are split, so that copies overlap."""


@dataclass(slots=True)
class _Outgoing:
    """A request being published. Only the publisher thread touches it after creation."""

    peer: str
    sent: int = 0
    chunks: int = 0
    nbytes: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Valid:
    """KV of tokens up to ``end`` is valid in ``blocks``."""

    request_id: str
    blocks: Sequence[int]
    end: int


@dataclass(frozen=True, slots=True)
class _Finished:
    """The engine is done with the request; ``first_token`` is None if it was aborted."""

    request_id: str
    first_token: int | None


@dataclass(frozen=True, slots=True)
class _Barrier:
    """Set when everything queued before it has been read from the cache."""

    passed: threading.Event = field(default_factory=threading.Event)


class Sender:
    """Publishes the KV of requests that are prefilled here and decoded elsewhere.

    Args:
        cache: the engine's paged cache.
        layout: what goes in every chunk's header.
        transport: where payloads are published.
        post: how deliveries reach the peer.
        wake: wakes the engine loop, called when ``take_finished`` has something new.

    ``valid``, ``finish``, ``settle`` and ``take_finished`` are called by the engine thread.

    """

    def __init__(
        self,
        cache: PagedCache,
        layout: KVLayout,
        transport: Transport,
        post: Post,
        wake: Callable[[], None],
    ) -> None:
        self._cache, self._layout, self._transport = cache, layout, transport
        self._post, self._wake = post, wake
        self._outgoing: dict[str, _Outgoing] = {}
        self._queue: queue.SimpleQueue[_Valid | _Finished | _Barrier | None] = queue.SimpleQueue()
        self._finished: set[str] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-publisher", daemon=True)
        self._thread.start()

    def open(self, request_id: str, peer: str) -> None:
        """Start a handover to ``peer``."""
        with self._lock:
            self._outgoing[request_id] = _Outgoing(peer)

    def valid(self, request_id: str, blocks: Sequence[int], end: int) -> None:
        """Tokens ``[0, end)`` of the request are valid in ``blocks``; publish what is new."""
        self._queue.put(_Valid(request_id, blocks, end))

    def finish(self, request_id: str, first_token: int | None) -> bool:
        """End a handover; return whether the engine must keep the blocks until it is reported."""
        with self._lock:
            known = request_id in self._outgoing
        if known:
            self._queue.put(_Finished(request_id, first_token))
        return known

    def settle(self, timeout_s: float) -> None:
        """Wait until nothing queued so far reads the cache any more (before blocks are reused)."""
        barrier = _Barrier()
        self._queue.put(barrier)
        if not barrier.passed.wait(timeout_s):
            raise TimeoutError(f"the KV publisher did not catch up within {timeout_s} s")

    def take_finished(self) -> set[str]:
        """Return requests whose blocks are no longer read, each once."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def open_requests(self) -> Collection[str]:
        """Return requests with a handover under way."""
        with self._lock:
            return list(self._outgoing)

    def close(self) -> None:
        """Stop the publisher and release everything that was published."""
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._transport.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            match item:
                case _Valid():
                    self._publish_new(item)
                case _Finished():
                    self._end(item)
                case _Barrier():
                    item.passed.set()

    def _publish_new(self, valid: _Valid) -> None:
        with self._lock:
            outgoing = self._outgoing.get(valid.request_id)
        if outgoing is None or outgoing.failed:
            return
        try:
            for start, end in _pieces(outgoing.sent, valid.end, self._cache):
                self._publish(valid.request_id, outgoing, valid.blocks, start, end)
        except Exception as error:
            outgoing.failed = True
            logger.exception("request %s: publishing its KV failed", valid.request_id)
            reason = str(error) if isinstance(error, KVError) else repr(error)
            self._post(outgoing.peer, HandoverFailed(valid.request_id, reason), _nothing)

    def _publish(
        self, request_id: str, outgoing: _Outgoing, blocks: Sequence[int], start: int, end: int
    ) -> None:
        size = self._cache.block_size
        runs = self._cache.runs(blocks[start // size : self._cache.blocks_of(end)])
        checksum, nbytes = digest(runs)
        layers = (0, self._cache.num_layers)
        header = ChunkHeader(
            request_id, self._layout, outgoing.chunks, (start, end), layers, nbytes, checksum
        )
        ticket = self._transport.publish(runs)
        outgoing.sent, outgoing.chunks, outgoing.nbytes = end, outgoing.chunks + 1, outgoing.nbytes + nbytes
        chunk = Chunk(header, ticket, time.monotonic())
        self._post(outgoing.peer, chunk, lambda: self._transport.release(ticket))

    def _end(self, finished: _Finished) -> None:
        with self._lock:
            outgoing = self._outgoing.pop(finished.request_id)
            self._finished.add(finished.request_id)
        if finished.first_token is None:
            self._post(outgoing.peer, HandoverFailed(finished.request_id, "prefill was aborted"), _nothing)
        elif not outgoing.failed:
            end = HandoverEnd(
                finished.request_id, outgoing.chunks, outgoing.sent, finished.first_token, outgoing.nbytes
            )
            self._post(outgoing.peer, end, _nothing)
        self._wake()


def _pieces(start: int, end: int, cache: PagedCache) -> Iterator[tuple[int, int]]:
    """Split ``[start, end)`` on block boundaries into ranges of at most MAX_CHUNK_BYTES."""
    blocks = max(1, MAX_CHUNK_BYTES // (cache.block_nbytes * cache.num_layers))
    step = blocks * cache.block_size
    while start < end:
        yield start, min(end, start + step)
        start += step


def _nothing() -> None:
    pass
