"""Prefill side of a handover: KV leaves the paged cache in chunks while prefill still runs.

The engine thread says after each step how far a request's KV is valid; a publisher thread
checksums and publishes the new part and posts it to the decode worker, while the next step
computes. The engine keeps a request's blocks until the request is reported finished, which
is when no transport reads them any more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from actors.messages import Chunk, Delivery, HandoverEnd, HandoverFailed
from kv.chunk import ChunkHeader, KVLayout, checksum
from kv.errors import KVError
from kv.paged import PagedCache
from kv.transport import Ticket, Transport

logger = logging.getLogger(__name__)

Post = Callable[[str, Delivery, Callable[[], None]], None]
"""Send a delivery to the named peer; calls back once the peer is done with it, or is gone."""

MAX_CHUNK_BYTES = 8 << 20
"""Larger ranges are split, so that several connections carry them and copies overlap."""


@dataclass(slots=True)
class _Outgoing:
    """A request being published.

    What has been sent is counted by the publisher thread alone; ``unread``, ``tickets`` and
    ``ended`` are guarded by the sender's lock.
    """

    peer: str
    sent: int = 0
    chunks: int = 0
    nbytes: int = 0
    failed: bool = False
    unread: int = 0
    tickets: dict[int, Ticket] = field(default_factory=dict)
    """By chunk, until the peer needs it no longer. Holding one may hold the payload."""
    ended: bool = False


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
class _Preempted:
    """The engine takes these requests' blocks away. ``passed`` is set when nothing more is published."""

    request_ids: Collection[str]
    passed: threading.Event = field(default_factory=threading.Event)


class Sender:
    """Publishes the KV of requests that are prefilled here and decoded elsewhere.

    Args:
        cache: the engine's paged cache.
        layout: what goes in every chunk's header.
        transport: where payloads are published.
        post: how deliveries reach the peer.
        wake: wakes the engine loop, called when ``take_finished`` has something new.

    ``open``, ``valid``, ``finish``, ``preempted`` and ``take_finished`` are called by the engine thread.

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
        self._queue: queue.SimpleQueue[_Valid | _Finished | _Preempted | None] = queue.SimpleQueue()
        self._finished: set[str] = set()
        self._quiet = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name="kv-publisher", daemon=True)
        self._thread.start()

    def open(self, request_id: str, peer: str) -> None:
        """Start a handover to ``peer``."""
        with self._quiet:
            self._outgoing[request_id] = _Outgoing(peer)

    def valid(self, request_id: str, blocks: Sequence[int], end: int) -> None:
        """Tokens ``[0, end)`` of the request are valid in ``blocks``; publish what is new."""
        self._queue.put(_Valid(request_id, blocks, end))

    def finish(self, request_id: str, first_token: int | None) -> bool:
        """End a handover; return whether the engine must keep the blocks until it is reported."""
        with self._quiet:
            known = request_id in self._outgoing
        if known:
            self._queue.put(_Finished(request_id, first_token))
        return known

    def preempted(self, request_ids: Collection[str], timeout_s: float) -> None:
        """The engine is about to reuse these requests' blocks: give their handovers up.

        Returns when nothing reads the blocks any more; the decode side is told, and the
        gateway tries again. Raises TimeoutError after ``timeout_s``.
        """
        item = _Preempted(request_ids)
        self._queue.put(item)
        if not item.passed.wait(timeout_s):
            raise TimeoutError(f"the KV publisher did not catch up within {timeout_s} s")
        with self._quiet:
            theirs = [outgoing for rid, outgoing in self._outgoing.items() if rid in request_ids]
            if not self._quiet.wait_for(lambda: not any(out.unread for out in theirs), timeout_s):
                raise TimeoutError(f"preempted KV is still being sent after {timeout_s} s")

    def take_finished(self) -> set[str]:
        """Return requests whose blocks are no longer read, each once."""
        with self._quiet:
            finished, self._finished = self._finished, set()
        return finished

    def open_requests(self) -> Collection[str]:
        """Return requests with a handover under way."""
        with self._quiet:
            return list(self._outgoing)

    def close(self) -> None:
        """Stop the publisher and release everything that was published."""
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._transport.close()

    # -- publisher thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            match item:
                case _Valid():
                    self._publish_new(item)
                case _Finished():
                    self._end(item)
                case _Preempted():
                    for request_id in item.request_ids:
                        if (outgoing := self._outgoing.get(request_id)) is not None:
                            self._fail(request_id, outgoing, "prefill was preempted")
                    item.passed.set()

    def _publish_new(self, valid: _Valid) -> None:
        outgoing = self._outgoing.get(valid.request_id)
        if outgoing is None or outgoing.failed:
            return
        try:
            for start, end in _pieces(outgoing.sent, valid.end, self._cache):
                self._publish(valid.request_id, outgoing, valid.blocks, start, end)
        except Exception as error:
            logger.exception("request %s: publishing its KV failed", valid.request_id)
            self._fail(valid.request_id, outgoing, str(error) if isinstance(error, KVError) else repr(error))

    def _publish(
        self, request_id: str, outgoing: _Outgoing, blocks: Sequence[int], start: int, end: int
    ) -> None:
        size = self._cache.block_size
        runs = self._cache.runs(blocks[start // size : self._cache.blocks_of(end)])
        header = ChunkHeader(
            request_id=request_id,
            layout=self._layout,
            index=outgoing.chunks,
            tokens=(start, end),
            layers=(0, self._cache.num_layers),
            checksums=tuple(checksum(run) for run in runs),
            nbytes=sum(run.nbytes for run in runs),
        )
        with self._quiet:
            outgoing.unread += 1
        try:
            ticket = self._transport.publish(runs, lambda: self._read(request_id, outgoing))
        except BaseException:
            self._read(request_id, outgoing)
            raise
        with self._quiet:
            outgoing.tickets[header.index] = ticket
        outgoing.sent, outgoing.chunks = end, outgoing.chunks + 1
        outgoing.nbytes += header.nbytes
        chunk = Chunk(header, ticket, time.monotonic())
        self._post(outgoing.peer, chunk, lambda: self._withdraw(outgoing, [header.index]))

    def _end(self, finished: _Finished) -> None:
        request_id = finished.request_id
        outgoing = self._outgoing[request_id]
        if finished.first_token is None:
            self._fail(request_id, outgoing, "prefill was aborted")
        elif not outgoing.failed:
            end = HandoverEnd(
                request_id, outgoing.chunks, outgoing.sent, finished.first_token, outgoing.nbytes
            )
            self._post(outgoing.peer, end, _nothing)
        with self._quiet:
            outgoing.ended = True
            self._report_if_read(request_id, outgoing)

    def _fail(self, request_id: str, outgoing: _Outgoing, reason: str) -> None:
        """Tell the peer that the rest will not come, and withdraw what was published."""
        if outgoing.failed:
            return
        outgoing.failed = True
        self._post(outgoing.peer, HandoverFailed(request_id, reason), _nothing)
        with self._quiet:
            published = list(outgoing.tickets)
        self._withdraw(outgoing, published)

    # -- any thread -------------------------------------------------------------------------------

    def _withdraw(self, outgoing: _Outgoing, chunks: Sequence[int]) -> None:
        """Release chunks, unless they have been."""
        for chunk in chunks:
            with self._quiet:
                ticket = outgoing.tickets.pop(chunk, None)
            if ticket is not None:
                self._transport.release(ticket)

    def _read(self, request_id: str, outgoing: _Outgoing) -> None:
        """A transport has read a chunk and needs the engine's memory no longer."""
        with self._quiet:
            outgoing.unread -= 1
            self._quiet.notify_all()
            self._report_if_read(request_id, outgoing)

    def _report_if_read(self, request_id: str, outgoing: _Outgoing) -> None:
        """Under the lock: give the blocks back once the request has ended and all of it is read."""
        if outgoing.ended and not outgoing.unread and self._outgoing.pop(request_id, None) is not None:
            self._finished.add(request_id)
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
