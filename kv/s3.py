"""A bucket as a transport: for when the direct path is down, or the prefill worker is gone.

What was published outlives its sender, until it is released or, if the sender died, until
it expires (`kv/sweep.py`). A payload is one object, its runs one after the other; nothing
else is in it, because the chunk's header, with the checksums, travels beside it.

A fetch reads ranges of several runs each, on several connections at once.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final

from kv.bucket import Bucket, Gate, StoredFile
from kv.chunk import Run, require_sizes
from kv.errors import PeerLost, TransferError

logger = logging.getLogger(__name__)

HANDOVER: Final = "handover/"
RANGE_BYTES: Final = 8 << 20
"""Bytes of one ranged read: smaller ones are slower, larger ones need more memory (docs/s3.md)."""
CLOSE_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class S3Ticket:
    """Name of a payload's object, and the sizes of its runs."""

    name: str
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes ``[start, start + nbytes)`` of an object, and the memory they go to, in order."""

    start: int
    nbytes: int
    targets: tuple[Run, ...]


class S3Transport:
    """Publishes payloads as objects of a bucket that all members use; closing that is left to the caller."""

    name = "s3"

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._held: dict[str, int] = {}
        self._deletions: set[Future[None]] = set()
        self._closed = False
        self._lock = threading.Lock()

    def register(self, memory: Sequence[Run]) -> None:
        """See ``Transport.register``. Nothing to prepare."""

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> S3Ticket:
        """See ``Transport.publish``. Returns when the store has it: ``read`` is called here.

        Raises ``TransferTimeout`` if that takes longer than ``S3Settings.timeout_s``, ``PeerLost`` if the
        store cannot be reached, and other ``TransferError``s for what it refuses.
        """
        ticket = S3Ticket(f"{HANDOVER}{uuid.uuid4().hex}", tuple(run.nbytes for run in runs))
        with self._lock:
            if self._closed:
                raise PeerLost("this transport has been closed")
        upload = partial(self._bucket.put, ticket.name, list(runs))
        self._bucket.write([upload], self._bucket.settings.timeout_s, f"upload of {ticket.nbytes} bytes")
        with self._lock:
            late = self._closed
            if not late:
                self._held[ticket.name] = ticket.nbytes
        read()
        if late:
            self._delete(ticket.name)
        return ticket

    def fetch(self, ticket: S3Ticket, into: Sequence[Run | None], timeout_s: float) -> None:
        """See ``Transport.fetch``."""
        require_sizes(ticket.name, ticket.sizes, into)
        ranges = list(_ranges(ticket.sizes, into))
        if not ranges:
            return
        queue = iter(ranges)
        tasks = [
            partial(self._read, ticket, queue)
            for _ in range(min(len(ranges), self._bucket.settings.connections))
        ]
        self._bucket.read(tasks, timeout_s, f"{ticket.name} of {ticket.nbytes} bytes")

    def _read(self, ticket: S3Ticket, ranges: Iterator[_Range], gate: Gate) -> None:
        """Read ranges until there are no more; several threads share the iterator."""
        file: StoredFile | None = None
        while not gate.closed:
            with self._lock:
                piece = next(ranges, None)
            if piece is None:
                return
            if file is None:
                file = self._bucket.open(ticket.name)
                file.require_size(ticket.nbytes)
            arrived = file.into(piece.start, self._bucket.memory(piece.nbytes))
            with gate.inside():
                scatter(arrived, piece.targets)

    def release(self, ticket: S3Ticket) -> None:
        """See ``Transport.release``. The object is deleted soon afterwards."""
        with self._lock:
            held = self._held.pop(ticket.name, None)
        if held is not None:
            self._delete(ticket.name)

    def _delete(self, name: str) -> None:
        def delete() -> None:
            try:
                self._bucket.delete(name)
            except TransferError as error:
                logger.warning("a payload stays until it expires: %s", error)

        deletion = self._bucket.later(delete)
        if deletion is not None:
            with self._lock:
                self._deletions.add(deletion)
            deletion.add_done_callback(self._deleted)

    def _deleted(self, deletion: Future[None]) -> None:
        with self._lock:
            self._deletions.discard(deletion)

    def live(self) -> tuple[int, int]:
        """See ``Transport.live``."""
        with self._lock:
            return len(self._held), sum(self._held.values())

    def close(self) -> None:
        """See ``Transport.close``. Waits some seconds for the deletions; what is left then expires."""
        with self._lock:
            self._closed = True
            names, self._held = list(self._held), {}
        for name in names:
            self._delete(name)
        with self._lock:
            left = set(self._deletions)
        wait(left, CLOSE_TIMEOUT_S)


def scatter(source: Run, targets: Iterable[Run]) -> None:
    """Copy ``source`` into targets that are together of its size."""
    start = 0
    for target in targets:
        target[:] = source[start : start + target.nbytes]
        start += target.nbytes


def _ranges(sizes: Sequence[int], into: Sequence[Run | None]) -> Iterator[_Range]:
    """Cut what is wanted into ranges without gaps; a run may be in two."""
    start, nbytes, targets = 0, 0, list[Run]()
    for offset, run in zip(accumulate(sizes, initial=0), into, strict=False):
        done = 0
        while run is not None and done < run.nbytes:
            if targets and (nbytes == RANGE_BYTES or start + nbytes != offset + done):
                yield _Range(start, nbytes, tuple(targets))
                targets = []
            if not targets:
                start, nbytes = offset + done, 0
            take = min(run.nbytes - done, RANGE_BYTES - nbytes)
            targets.append(run[done : done + take])
            nbytes, done = nbytes + take, done + take
    if targets:
        yield _Range(start, nbytes, tuple(targets))
