"""Ray's object store as a transport.

To a receiver on the same node: through a segment, one object that the sender keeps for as long as it
lives and both map. The sender copies runs into it, the receiver copies them out, and Ray takes no part:
no object is made, announced, resolved or freed per chunk, and no page is touched for the first time. The
owner goes on writing to that object, which Ray calls immutable: nobody else uses it, it is pinned while the
sender has it mapped, and it goes when its owner dies. A payload that is withdrawn while it is read
shows (``kv/segment.py``).

To other nodes, and if the segment is full: an object per payload. Runs go to Ray as out-of-band
buffers (pickle protocol 5), so that the store gathers them straight from the engine's paged memory: one
copy. Ray's object manager moves it. Those objects are owned by the sender's process; they go when the sender
has released them and the receiver has dropped its views, or when the sender dies.
"""

from __future__ import annotations

import ctypes
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray import exceptions as ray_errors

from kv.chunk import Run, copy_runs, require_sizes
from kv.errors import PeerLost, StoreFull, TransferTimeout
from kv.segment import HEAD_BYTES, Segment, number_at
from kv.transport import Ticket

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 128 << 20
SEGMENT_SHARE = 8
"""A segment takes at most this part of the node's object store."""
NO_SEGMENT_S = 30.0
"""After the store had no room for a segment, none is asked for again for so long."""
FORGET_S = 60.0
"""A receiver lets go of a segment that it has not read from for so long: its owner may be gone."""
PAGE = 4096

_Failures = (ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError)


@dataclass(frozen=True, slots=True)
class SegmentTicket:
    """Where a payload lies in a segment, and the sizes of its runs.

    ``segment`` is the pickled reference to the segment's object, the same for all payloads in it; ``node``
    is the only one where it shows what its owner writes.
    """

    segment: bytes
    node: str
    offset: int
    number: int
    sizes: tuple[int, ...]


@dataclass(slots=True)
class _Own:
    """The segment that this process writes to. ``held`` is the store's view of it, which pins it."""

    segment: Segment
    pickled: bytes
    node: str
    held: Run


@dataclass(slots=True)
class _Theirs:
    """A segment that another process writes to."""

    memory: Run
    used_at: float


class PlasmaTransport:
    """Publishes payloads in a segment, or as Ray objects.

    The ticket of an object is a one-element list that holds its reference. The list keeps Ray from resolving
    it when the ticket is passed to an actor call: the receiver decides when, and how long, to wait.
    """

    name = "plasma"

    def __init__(self) -> None:
        self._held: dict[str, tuple[Ticket, int]] = {}
        self._placed: dict[tuple[int, int], int] = {}
        """Bytes of payloads in the segment, by (offset, number)."""
        self._own: _Own | None = None
        self._no_segment_until = 0.0
        self._theirs: dict[bytes, _Theirs] = {}
        self._lock = threading.Lock()
        self._making, self._opening = threading.Lock(), threading.Lock()

    def register(self, memory: Sequence[Run]) -> None:
        """See ``Transport.register``. Any memory will do."""

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> Ticket:
        """See ``Transport.publish``. The runs are copied; the first that is ``near`` makes the segment."""
        ticket = self._place(runs) if near else None
        if ticket is None:
            ticket = self._put(runs)
        read()
        return ticket

    def _put(self, runs: Sequence[Run]) -> Ticket:
        nbytes = sum(run.nbytes for run in runs)
        try:
            ticket = [ray.put(list(runs))]
        except _Failures as error:
            raise StoreFull(
                f"the node's object store has no room for a chunk of {nbytes} bytes; "
                f"give the node group more `object_store`"
            ) from error
        with self._lock:
            self._held[ticket[0].hex()] = (ticket, nbytes)
        return ticket

    def fetch(self, ticket: Ticket, into: Sequence[Run | None], timeout_s: float) -> None:
        """See ``Transport.fetch``."""
        if isinstance(ticket, SegmentTicket):
            self._copy_out(ticket, into, timeout_s)
        else:
            copy_runs(ticket[0].hex(), _get(ticket[0], timeout_s), into)

    def release(self, ticket: Ticket) -> None:
        """See ``Transport.release``."""
        with self._lock:
            if not isinstance(ticket, SegmentTicket):
                self._held.pop(ticket[0].hex(), None)
            elif self._placed.pop((ticket.offset, ticket.number), None) is not None and self._own is not None:
                self._own.segment.give_back(ticket.offset)

    def live(self) -> tuple[int, int]:
        """See ``Transport.live``. Lets go of the segments of others that have not been in use."""
        now = time.monotonic()
        with self._lock:
            for pickled in [name for name, theirs in self._theirs.items() if now - theirs.used_at > FORGET_S]:
                del self._theirs[pickled]
            sizes = [*(nbytes for _, nbytes in self._held.values()), *self._placed.values()]
        return len(sizes), sum(sizes)

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._lock:
            if self._own is not None:
                for offset, _ in self._placed:
                    self._own.segment.give_back(offset)
            self._own, self._no_segment_until = None, float("inf")
            self._held.clear()
            self._placed.clear()
            self._theirs.clear()

    # -- segments ---------------------------------------------------------------------------------

    def _place(self, runs: Sequence[Run]) -> SegmentTicket | None:
        """Copy runs into the segment; None if there is no room, or no segment."""
        sizes = tuple(run.nbytes for run in runs)
        own = self._segment()
        if own is None:
            return None
        with self._lock:
            if (room := own.segment.take(sum(sizes))) is None:
                return None
            self._placed[room] = sum(sizes)
        offset, number = room
        at, memory = offset + HEAD_BYTES, own.segment.memory
        for run in runs:
            memory[at : at + run.nbytes] = run
            at += run.nbytes
        return SegmentTicket(own.pickled, own.node, offset, number, sizes)

    def _segment(self) -> _Own | None:
        """Return this process's segment, made now if need be; None if the store has no room for one."""
        with self._making:
            if self._own is None and time.monotonic() >= self._no_segment_until:
                self._no_segment_until = time.monotonic() + NO_SEGMENT_S
                try:
                    own = _make_segment()
                except _Failures as error:
                    logger.warning("the object store has no room for a segment: %s", error)
                    return None
                with self._lock:
                    self._own = own
            return self._own

    def _copy_out(self, ticket: SegmentTicket, into: Sequence[Run | None], timeout_s: float) -> None:
        name = f"{ticket.number} at {ticket.offset}"
        require_sizes(name, ticket.sizes, into)
        memory = self._open(ticket, timeout_s)
        _require(memory, ticket)
        at = ticket.offset + HEAD_BYTES
        for size, target in zip(ticket.sizes, into, strict=True):
            if target is not None:
                target[:] = memory[at : at + size]
            at += size
        _require(memory, ticket)

    def _open(self, ticket: SegmentTicket, timeout_s: float) -> Run:
        """Return another process's segment, with all its pages mapped."""
        with self._lock:
            if (theirs := self._theirs.get(ticket.segment)) is not None:
                theirs.used_at = time.monotonic()
                return theirs.memory
        with self._opening:
            with self._lock:
                theirs = self._theirs.get(ticket.segment)
            if theirs is None:
                if (here := ray.get_runtime_context().get_node_id()) != ticket.node:
                    raise PeerLost(
                        f"the payload lies in a segment of node {ticket.node}, this is node {here}"
                    )
                memory: Run = _get(pickle.loads(ticket.segment), timeout_s)
                memory[::PAGE].max()  # touches every page once, so that no transfer has to
                theirs = _Theirs(memory, time.monotonic())
                with self._lock:
                    self._theirs[ticket.segment] = theirs
            return theirs.memory


def _make_segment() -> _Own:
    """Put an object, find where it is mapped, and write to it from then on."""
    here = ray.get_runtime_context().get_node_id()
    store = next(node["Resources"]["object_store_memory"] for node in ray.nodes() if node["NodeID"] == here)
    size = min(SEGMENT_BYTES, int(store) // SEGMENT_SHARE)
    reference = ray.put(np.zeros(size, np.uint8))
    held: Run = ray.get(reference)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(held.ctypes.data))
    return _Own(Segment(memory), ray.cloudpickle.dumps(reference), here, held)


def _require(memory: Run, ticket: SegmentTicket) -> None:
    if number_at(memory, ticket.offset) != ticket.number:
        raise PeerLost(f"payload {ticket.number} at {ticket.offset} of a segment has been released")


def _get(reference: ray.ObjectRef[Any], timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray_errors.GetTimeoutError as error:
        raise TransferTimeout(f"object {reference.hex()} did not arrive in {timeout_s:.1f} s") from error
    except (ray_errors.ObjectLostError, ray_errors.OwnerDiedError) as error:
        raise PeerLost(f"object {reference.hex()} is gone: {type(error).__name__}") from error
