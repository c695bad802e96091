"""Prefill side of a handover: KV leaves the paged cache in chunks while prefill still runs.

The engine thread says after each step how far a request's KV is valid; a publisher thread
checksums and publishes the new part and posts it to the decode worker, while the next step
computes. The engine keeps a request's blocks until the request is reported finished, which
is when no transport reads them any more.

Every chunk has an owner (a request) and a lease. It is withdrawn when the peer has it or will
never want it, when its request is given up, and at the latest when the lease runs out. A peer that
cannot fetch a chunk asks for it ``again``, over the next rung of the ladder.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.messages import Again, Chunk, Delivery, HandoverEnd, HandoverFailed
from actors.rungs import Rungs
from kv.chunk import ChunkHeader, KVLayout, Run, checksum
from kv.errors import KVError, PeerLost, TransferError
from kv.ladder import cause_of
from kv.paged import PagedCache
from kv.transport import Ticket

logger = logging.getLogger(__name__)

Post = Callable[[str, Delivery, Callable[[float | None], None]], None]
"""Send a delivery to the named peer; calls back once the peer is done with it (with the seconds that its
fetch took, None if there was none), or is gone (None)."""

MAX_CHUNK_BYTES = 8 << 20
"""Larger ranges are split, so that several connections carry them and copies overlap."""
HOLD_S = 5.0
"""Engine blocks are held this long for a peer that has no room yet; then they are copied, and given back."""
PARKING = "plasma"
"""The transport that they are copied to, where the worker has it."""
LEASE_S = 150.0
COPY_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Published:
    """A chunk that can be fetched. Guarded by the sender's lock."""

    chunk: Chunk
    blocks: Sequence[int]
    publish_s: float
    lease_until: float
    tried: set[str]
    holds: bool = True
    """Whether the transport reads the engine's own blocks, which are kept for it."""


@dataclass(slots=True)
class _Outgoing:
    """A request being published.

    What has been sent is counted by the publisher thread alone; everything else is guarded by the
    sender's lock.
    """

    peer: str
    lease_s: float = LEASE_S
    sent: int = 0
    count: int = 0
    nbytes: int = 0
    failed: bool = False
    unread: int = 0
    """Payloads that read the engine's blocks."""
    published: dict[int, _Published] = field(default_factory=dict)
    """By chunk, until the peer needs it no longer. Holding its ticket may hold the payload."""
    ended: bool = False
    reported: bool = False
    """Whether the engine has its blocks back."""


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


@dataclass(frozen=True, slots=True)
class _Abandoned:
    """The gateway has given these requests up."""

    request_ids: Collection[str]


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Look for leases that have run out and for blocks that are held for too long."""


_Item = _Valid | _Finished | _Preempted | _Abandoned | _Sweep | None


class Sender:
    """Publishes the KV of requests that are prefilled here and decoded elsewhere.

    Args:
        name: this worker's, for peers that ask ``again``.
        cache: the engine's paged cache.
        layout: what goes in every chunk's header.
        rungs: where payloads are published.
        post: how deliveries reach the peer.
        wake: wakes the engine loop, called when ``take_finished`` has something new.

    ``open``, ``valid``, ``finish``, ``preempted`` and ``take_finished`` are called by the engine thread.

    """

    def __init__(
        self,
        name: str,
        cache: PagedCache,
        layout: KVLayout,
        rungs: Rungs,
        post: Post,
        wake: Callable[[], None],
    ) -> None:
        self._name, self._cache, self._layout, self._rungs = name, cache, layout, rungs
        self._post, self._wake = post, wake
        self._outgoing: dict[str, _Outgoing] = {}
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._finished: set[str] = set()
        self._quiet = threading.Condition(threading.RLock())
        self.expired_leases = 0
        self._thread = threading.Thread(target=self._run, name="kv-publisher", daemon=True)
        self._thread.start()

    def open(self, request_id: str, peer: str, lease_s: float = LEASE_S) -> None:
        """Start a handover to ``peer``."""
        with self._quiet:
            self._outgoing[request_id] = _Outgoing(peer, lease_s)

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
        """Return requests whose blocks are kept for their handover."""
        with self._quiet:
            return [request_id for request_id, outgoing in self._outgoing.items() if not outgoing.reported]

    def owned_bytes(self) -> int:
        """Return the bytes of all chunks that belong to a live request; any other live byte is an orphan."""
        with self._quiet:
            return sum(
                entry.chunk.header.nbytes
                for outgoing in self._outgoing.values()
                for entry in outgoing.published.values()
            )

    def abandon(self, request_ids: Collection[str]) -> None:
        """The gateway has given requests up: withdraw what is published for them. Never blocks."""
        self._queue.put(_Abandoned(request_ids))

    def sweep(self) -> None:
        """Withdraw what has outlived its lease; free blocks held for too long. Never blocks."""
        self._queue.put(_Sweep())

    def close(self) -> None:
        """Stop the publisher and release everything that was published."""
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._rungs.close()

    # -- publisher thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            match item:
                case _Valid():
                    self._publish_new(item)
                case _Finished():
                    self._end(item)
                case _Preempted():
                    self._give_up(item.request_ids, "prefill was preempted")
                    item.passed.set()
                case _Abandoned():
                    self._give_up(item.request_ids, "the request was aborted")
                case _Sweep():
                    self._expire()
                    self._park()

    def _publish_new(self, valid: _Valid) -> None:
        outgoing = self._outgoing.get(valid.request_id)
        if outgoing is None or outgoing.failed:
            return
        try:
            for start, end in _pieces(outgoing.sent, valid.end, self._cache):
                self._publish_piece(valid.request_id, outgoing, valid.blocks, start, end)
        except Exception as error:
            logger.exception("request %s: publishing its KV failed", valid.request_id)
            self._fail(valid.request_id, outgoing, str(error) if isinstance(error, KVError) else repr(error))

    def _publish_piece(
        self, request_id: str, outgoing: _Outgoing, blocks: Sequence[int], start: int, end: int
    ) -> None:
        size = self._cache.block_size
        blocks = list(blocks[start // size : self._cache.blocks_of(end)])
        runs = self._cache.runs(blocks)
        header = ChunkHeader(
            request_id=request_id,
            layout=self._layout,
            index=outgoing.count,
            tokens=(start, end),
            layers=(0, self._cache.num_layers),
            checksums=tuple(checksum(run) for run in runs),
            nbytes=sum(run.nbytes for run in runs),
        )
        entry = self._publish(request_id, outgoing, header, blocks, runs, "first", ())
        outgoing.sent, outgoing.count = end, outgoing.count + 1
        outgoing.nbytes += header.nbytes
        self._post(outgoing.peer, entry.chunk, lambda seconds: self._taken(outgoing, header.index, seconds))

    def _end(self, finished: _Finished) -> None:
        request_id = finished.request_id
        outgoing = self._outgoing[request_id]
        if finished.first_token is None:
            self._fail(request_id, outgoing, "prefill was aborted")
        elif not outgoing.failed:
            end = HandoverEnd(
                request_id, outgoing.count, outgoing.sent, finished.first_token, outgoing.nbytes
            )
            self._post(outgoing.peer, end, _nothing)
        with self._quiet:
            outgoing.ended = True
            self._settle(request_id, outgoing)

    def _give_up(self, request_ids: Collection[str], reason: str) -> None:
        for request_id in request_ids:
            if (outgoing := self._outgoing.get(request_id)) is not None:
                self._fail(request_id, outgoing, reason)

    def _fail(self, request_id: str, outgoing: _Outgoing, reason: str) -> None:
        """Tell the peer that the rest will not come, and withdraw what was published."""
        with self._quiet:
            if outgoing.failed:
                return
            outgoing.failed = True
            published = list(outgoing.published)
        self._post(outgoing.peer, HandoverFailed(request_id, reason), _nothing)
        for index in published:
            self._withdraw(request_id, outgoing, index)

    def _expire(self) -> None:
        now = time.monotonic()
        with self._quiet:
            expired = [
                (request_id, outgoing, index)
                for request_id, outgoing in self._outgoing.items()
                for index, entry in outgoing.published.items()
                if now > entry.lease_until
            ]
        for request_id, outgoing, index in expired:
            logger.warning("request %s: the lease of chunk %d has run out", request_id, index)
            self.expired_leases += 1
            self._withdraw(request_id, outgoing, index)

    def _park(self) -> None:
        """Copy chunks whose peer has not taken them for long, so that the engine gets its blocks back.

        Otherwise two workers that prefill for each other, and have no block left to receive into, would
        wait for each other.
        """
        if PARKING not in self._rungs.transports:
            return
        now = time.monotonic()
        with self._quiet:
            held = [
                (request_id, outgoing, entry)
                for request_id, outgoing in self._outgoing.items()
                for entry in outgoing.published.values()
                if entry.holds and entry.chunk.rung != PARKING and now - entry.chunk.published_at > HOLD_S
            ]
        for request_id, outgoing, entry in held:
            if PARKING not in self._rungs.order(outgoing.peer, entry.chunk.header.nbytes).rungs:
                continue
            try:
                self._move(request_id, outgoing, entry, (PARKING,), "moved", "its peer had no room for it")
            except TransferError as error:
                logger.warning("request %s: its KV keeps its blocks: %s", request_id, error)

    # -- any thread -------------------------------------------------------------------------------

    def again(self, asked: Again) -> Chunk:
        """Publish a chunk over the next rung, because its peer could not fetch it. Blocks while it is copied.

        Raises:
            TransferError: the chunk is not published any more, or no rung is left.

        """
        with self._quiet:
            outgoing = self._outgoing.get(asked.request_id)
            entry = outgoing.published.get(asked.index) if outgoing is not None else None
            if outgoing is None or entry is None:
                raise PeerLost(f"chunk {asked.index} of request {asked.request_id} is not published any more")
            if entry.chunk.rung != asked.rung:  # moved meanwhile
                return entry.chunk
            entry.tried.add(asked.rung)
        self._rungs.broke(outgoing.peer, asked.rung, asked.cause, asked.detail)
        choice = self._rungs.order(outgoing.peer, entry.chunk.header.nbytes)
        left = tuple(rung for rung in choice.rungs if rung not in entry.tried)
        if not left:
            raise TransferError(f"no rung is left for chunk {asked.index}: {choice.reason}")
        detail = f"{asked.rung}: {asked.detail}; {choice.reason}"
        try:
            return self._move(asked.request_id, outgoing, entry, left, asked.cause, detail)
        except TransferError:
            with self._quiet:
                now = outgoing.published.get(asked.index)
            if now is None or now is entry:
                raise
            return now.chunk  # it was moved at the same moment

    def _publish(
        self,
        request_id: str,
        outgoing: _Outgoing,
        header: ChunkHeader,
        blocks: Sequence[int],
        runs: Sequence[Run],
        cause: str,
        rungs: Sequence[str],
        reason: str = "",
        ours: bool = True,
        replaces: _Published | None = None,
    ) -> _Published:
        """Publish through the first rung that takes the payload, and enter it in ``outgoing.published``.

        ``ours``: whether the runs are the engine's blocks, to be kept until the payload is read.
        """
        if not rungs:
            choice = self._rungs.order(outgoing.peer, header.nbytes)
            rungs, reason = choice.rungs, choice.reason
        for rung in rungs:
            began = time.monotonic()
            entry = _Published(
                Chunk(header, None, began, rung, self._name, 0.0, cause, reason),
                blocks,
                0.0,
                began + outgoing.lease_s,
                tried=set(),
                holds=ours,
            )
            try:
                ticket = self._publish_on(rung, request_id, outgoing, entry, runs)
            except Exception as error:
                self._rungs.failed(rung, error)
                cause = cause_of(error)
                reason = f"{rung}: {error}; {reason}"
                self._rungs.broke(outgoing.peer, rung, cause, str(error))
                continue
            published_at = time.monotonic()
            timeout_s = self._rungs.deadline_s(outgoing.peer, rung, header.nbytes)
            entry.publish_s = published_at - began
            entry.chunk = Chunk(header, ticket, published_at, rung, self._name, timeout_s, cause, reason)
            with self._quiet:
                wanted = not outgoing.failed and outgoing.published.get(header.index) is replaces
                if wanted:
                    outgoing.published[header.index] = entry
            if not wanted:
                self._rungs.transport(rung).release(ticket)
                raise PeerLost(f"chunk {header.index} of request {request_id} is not wanted any more")
            return entry
        raise TransferError(f"no rung takes chunk {header.index} of request {request_id}: {reason}")

    def _publish_on(
        self, rung: str, request_id: str, outgoing: _Outgoing, entry: _Published, runs: Sequence[Run]
    ) -> Ticket:
        def read() -> None:
            self._read(request_id, outgoing, entry)

        with self._quiet:
            outgoing.unread += entry.holds
        try:
            return self._rungs.publish(outgoing.peer, rung, runs, read)
        except BaseException:
            read()
            raise

    def _move(
        self,
        request_id: str,
        outgoing: _Outgoing,
        entry: _Published,
        rungs: Sequence[str],
        cause: str,
        reason: str,
    ) -> Chunk:
        """Publish a chunk through another rung, from the engine's blocks or else from what is published."""
        header = entry.chunk.header
        with self._quiet:
            ours = not outgoing.reported and not outgoing.failed
            outgoing.unread += ours  # the blocks stay while we publish from them
        try:
            if ours:
                runs = self._cache.runs(entry.blocks)
            else:
                runs = [np.empty(self._cache.run_nbytes, np.uint8) for _ in header.checksums]
                old = entry.chunk
                self._rungs.transport(old.rung).fetch(old.ticket, runs, COPY_TIMEOUT_S)
                header.verify(runs)
            moved = self._publish(
                request_id, outgoing, header, entry.blocks, runs, cause, rungs, reason, ours, entry
            )
            moved.tried |= entry.tried
        finally:
            if ours:
                with self._quiet:
                    outgoing.unread -= 1
                    self._settle(request_id, outgoing)
        self._rungs.transport(entry.chunk.rung).release(entry.chunk.ticket)
        return moved.chunk

    def _taken(self, outgoing: _Outgoing, index: int, seconds: float | None) -> None:
        """The peer needs a chunk no longer, or cannot be reached."""
        with self._quiet:
            entry = outgoing.published.get(index)
        if entry is None:
            return
        chunk = entry.chunk
        if seconds is not None:
            self._rungs.took(outgoing.peer, chunk.rung, chunk.header.nbytes, entry.publish_s + seconds)
        self._withdraw(chunk.header.request_id, outgoing, index)

    def _withdraw(self, request_id: str, outgoing: _Outgoing, index: int) -> None:
        """Release a chunk, unless it has been."""
        with self._quiet:
            entry = outgoing.published.pop(index, None)
        if entry is not None:
            self._rungs.transport(entry.chunk.rung).release(entry.chunk.ticket)
            with self._quiet:
                self._settle(request_id, outgoing)

    def _read(self, request_id: str, outgoing: _Outgoing, entry: _Published) -> None:
        """A transport has read a chunk and needs the engine's memory no longer."""
        with self._quiet:
            outgoing.unread -= entry.holds
            entry.holds = False
            self._settle(request_id, outgoing)

    def _settle(self, request_id: str, outgoing: _Outgoing) -> None:
        """Under the lock: of an ended request, give the blocks back once all is read; then forget it."""
        self._quiet.notify_all()
        if not outgoing.ended:
            return
        if not outgoing.unread and not outgoing.reported:
            outgoing.reported = True
            self._finished.add(request_id)
            self._wake()
        if outgoing.reported and not outgoing.published and self._outgoing.get(request_id) is outgoing:
            del self._outgoing[request_id]


def _pieces(start: int, end: int, cache: PagedCache) -> Iterator[tuple[int, int]]:
    """Split ``[start, end)`` on block boundaries into ranges of at most MAX_CHUNK_BYTES."""
    blocks = max(1, MAX_CHUNK_BYTES // (cache.block_nbytes * cache.num_layers))
    step = blocks * cache.block_size
    while start < end:
        yield start, min(end, start + step)
        start += step


def _nothing(seconds: float | None) -> None:
    pass
