"""NIXL: one-sided reads out of one engine's registered memory straight into the other's.

NIXL moves bytes with UCX, which takes the best way that both ends have: RDMA, another process's
memory on the same machine (CMA), or TCP. ``paths`` and a log line say which it is.

**A release does not wait for readers.** The sender of a one-sided read cannot know of it. Every payload
therefore has a slot in a table of the sender's, which holds the payload's mark until its release wipes it,
*before* ``read`` gives the memory back. A receiver reads the data, and then the slot: if the mark is still
there, the memory was untouched while it was being read; if not, the bytes may be torn and the fetch fails.
Registered memory stays registered until ``close``, so a read that comes late reads something, which is then
thrown away. Checksums (``ChunkHeader.verify``) are the second line.

**A fetch that failed writes nothing any more.** UCX cannot take a read back: one that was given up still
lands when the peer wakes up, perhaps in blocks that are another request's by then. Each peer is read by an
agent of its own; a transfer that fails or runs out of time ends the agent, with everything that it had
under way, before ``fetch`` returns. The next fetch makes a new one; other peers are not disturbed.

**Who may read.** Addresses and keys travel in tickets, over the cluster's authenticated control plane. UCX
itself authenticates nobody: whoever can connect to its TCP port can read, and also write, memory of this
process, for TCP's one-sided operations are carried out by UCX in software and unchecked. (RDMA hardware
checks keys, and CMA the user's rights.) So it is bound to the node's address, and the network must be one
that only the cluster is on; where it is not, use the ``tcp`` transport, or forbid it (``UCX_TLS=^tcp``).
Over TCP, UCX also ends the *sender's* process if it was frozen while a receiver gave up. Between nodes
without RDMA the ``tcp`` transport is the better one; this one warns.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kv import ucx
from kv.chunk import Run, require_sizes
from kv.errors import PeerLost, StoreFull, TransferTimeout
from kv.nixl_reader import MARK_BYTES, Reader, left
from kv.registered import Numbers, RegisteredMemory, address_of

logger = logging.getLogger(__name__)

SLOTS = 1 << 14
"""Payloads that can be live at once."""
IDLE_S = 600.0
"""A peer's agent that was not used for this long is ended when another peer's is made."""
QUIET_TIMEOUT_S = 30.0
"""How long the threads that use a broken agent may take to leave it; each looks every millisecond."""


@dataclass(frozen=True, slots=True)
class NixlTicket:
    """Where a payload lies in its sender's memory, and what it takes to read it.

    Attributes:
        host: the sender's address, for messages.
        agent: the sender's NIXL agent.
        metadata: how that agent is reached and what it has registered, in NIXL's own format.
        mark: what is in ``slot`` as long as the payload is live.
        slot: address of the payload's slot.
        sizes: bytes of each run.
        addresses: of each run.
        regions: which piece of registered memory each run lies in. A read cannot span two.

    """

    host: str
    agent: str
    metadata: bytes
    mark: bytes
    slot: int
    sizes: tuple[int, ...]
    addresses: tuple[int, ...]
    regions: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return sum(self.sizes)


class NixlTransport:
    """Lets others read what it published, and reads what they did.

    Args:
        address: the node's address that other nodes reach it by.
        memory: NIXL's name of the kind of memory that is registered: ``DRAM``, or ``VRAM`` for a GPU's.

    Raises:
        ImportError: NIXL is not installed.

    """

    name = "nixl"

    def __init__(self, address: str, memory: str = "DRAM") -> None:
        self._nixl = ucx.library()
        self._lost: tuple[type[Exception], ...] = (ConnectionError, *ucx.errors(self._nixl))
        self._kind = getattr(self._nixl, f"{memory}_SEG")
        self._config = ucx.config_for(address)
        self._host = address
        self._memory = RegisteredMemory()
        self._slots = np.zeros((SLOTS, MARK_BYTES), np.uint8)
        self._free = deque(range(SLOTS))
        self._payloads: dict[bytes, _Payload] = {}
        self._readers: dict[str, Reader] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._name = ucx.new_name()
        self._agent = ucx.new_agent(self._nixl, self._name, self._config)
        self._agent.registerMem(ucx.regions(self._nixl, self._nixl.DRAM_SEG, [self._slots.reshape(-1)]))
        self._metadata: bytes = self._agent.getLocalMD()

    def register(self, memory: Sequence[Run]) -> None:
        """See ``Transport.register``. Other memory is refused."""
        with self._lock:
            if self._closed:
                raise PeerLost("this transport has been closed")
            if new := self._memory.add(memory):
                self._agent.registerMem(ucx.regions(self._nixl, self._kind, new))
                self._metadata = self._agent.getLocalMD()

    # -- the sender's side ------------------------------------------------------------------------

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> NixlTicket:
        """See ``Transport.publish``. Nothing is copied: ``read`` is called on release.

        Raises:
            ValueError: a run does not lie in registered memory.

        """
        mark = secrets.token_bytes(MARK_BYTES)
        with self._lock:
            if self._closed:
                raise PeerLost("this transport has been closed")
            addresses, regions = self._memory.find(runs)
            if not self._free:
                raise StoreFull(f"{SLOTS} payloads are live, as many as can be; some are not released")
            slot = self._free.popleft()
            self._slots[slot] = np.frombuffer(mark, np.uint8)
            ticket = NixlTicket(
                self._host,
                self._name,
                self._metadata,
                mark,
                address_of(self._slots[slot]),
                tuple(run.nbytes for run in runs),
                tuple(addresses.tolist()),
                tuple(regions.tolist()),
            )
            self._payloads[mark] = _Payload(slot, ticket.nbytes, read)
        return ticket

    def release(self, ticket: NixlTicket) -> None:
        """See ``Transport.release``. Reads that are under way fail; see the top of this file."""
        with self._lock:
            payload = self._payloads.pop(ticket.mark, None)
            if payload is not None:
                self._wipe(payload)
        if payload is not None:
            payload.read()

    def _wipe(self, payload: _Payload) -> None:
        self._slots[payload.slot] = 0
        self._free.append(payload.slot)

    def live(self) -> tuple[int, int]:
        """See ``Transport.live``."""
        with self._lock:
            return len(self._payloads), sum(payload.nbytes for payload in self._payloads.values())

    def close(self) -> None:
        """See ``Transport.close``. Ends what is being read here, and by others from here."""
        with self._lock:
            self._closed = True
            payloads, self._payloads = list(self._payloads.values()), {}
            for payload in payloads:
                self._wipe(payload)
            for reader in list(self._readers.values()):
                self._give_up(reader)
            self._agent = None  # its threads and sockets go with it
        for payload in payloads:
            payload.read()

    # -- the receiver's side ----------------------------------------------------------------------

    def fetch(self, ticket: NixlTicket, into: Sequence[Run | None], timeout_s: float) -> None:
        """See ``Transport.fetch``.

        Raises:
            ValueError: a run of ``into`` does not lie in registered memory.

        """
        deadline = time.monotonic() + timeout_s
        require_sizes(ticket.mark.hex(), ticket.sizes, into)
        theirs, ours = self._pieces(ticket, into)
        peer = f"{ticket.host} ({ticket.agent})"
        try:
            with self._reader(ticket, deadline) as reader:
                if len(ours):
                    reader.read(self._kind, theirs, ours, deadline)
                mark = reader.mark(ticket.slot, deadline)
        except TimeoutError as error:
            raise TransferTimeout(
                f"{ticket.nbytes} bytes from {peer} did not arrive in {timeout_s:.1f} s"
            ) from error
        except self._lost as error:
            raise PeerLost(f"{peer} is gone: {error or type(error).__name__}") from error
        if mark != ticket.mark:
            raise PeerLost(f"{peer} no longer has payload {ticket.mark.hex()}")

    def paths(self) -> dict[str, str]:
        """Return how large reads go, by peer: what UCX chose, e.g. ``zero-copy cma/memory``."""
        with self._lock:
            return {peer: reader.path for peer, reader in self._readers.items() if reader.path}

    def _pieces(self, ticket: NixlTicket, into: Sequence[Run | None]) -> tuple[Numbers, Numbers]:
        """Return what is to be read, and where to: rows of address, size and device, as few as can be."""
        wanted = [i for i, run in enumerate(into) if run is not None and run.nbytes]
        targets = [run for run in into if run is not None and run.nbytes]
        with self._lock:
            local, region = self._memory.find(targets)
        remote = np.array(ticket.addresses, np.uint64)[wanted]
        sizes = np.array(ticket.sizes, np.uint64)[wanted]
        their_region = np.array(ticket.regions, np.int64)[wanted]
        apart = np.ones(len(wanted), bool)  # from the piece before
        apart[1:] = (
            (remote[1:] != remote[:-1] + sizes[:-1])
            | (local[1:] != local[:-1] + sizes[:-1])
            | (region[1:] != region[:-1])
            | (their_region[1:] != their_region[:-1])
        )
        first = np.flatnonzero(apart)
        sizes = np.add.reduceat(sizes, first) if len(first) else sizes
        device = np.zeros(len(first), np.uint64)
        return np.stack([remote[first], sizes, device], 1), np.stack([local[first], sizes, device], 1)

    @contextlib.contextmanager
    def _reader(self, ticket: NixlTicket, deadline: float) -> Iterator[Reader]:
        """Yield the agent that reads this peer. After an error in the block it has ended."""
        with self._lock:
            if self._closed:
                raise ConnectionError("this transport has been closed")
            left(deadline)
            reader = self._readers.get(ticket.agent)
            if reader is None:
                self._forget_idle()
                reader = self._readers[ticket.agent] = Reader(self._nixl, self._config, ticket.agent)
            reader.users += 1
        try:
            reader.prepare(self._kind, self._memory, ticket.metadata, deadline)
            yield reader
        except BaseException:
            with self._lock:
                self._give_up(reader)
            raise
        finally:
            self._leave(reader)

    def _forget_idle(self) -> None:
        """Under the lock: end agents of peers that have not been read for long; they may be gone for good."""
        before = time.monotonic() - IDLE_S
        for reader in [one for one in self._readers.values() if not one.users and one.used_at < before]:
            self._give_up(reader)

    def _give_up(self, reader: Reader) -> None:
        """Under the lock: use an agent no more. It ends as soon as no thread uses it."""
        reader.broken = True
        if self._readers.get(reader.peer) is reader:
            del self._readers[reader.peer]
        if not reader.users:
            reader.end()

    def _leave(self, reader: Reader) -> None:
        """Return when the agent is left in good order, or has ended."""
        with self._changed:
            reader.users -= 1
            reader.used_at = time.monotonic()
            if reader.broken and not reader.users:
                reader.end()
                self._changed.notify_all()
            if reader.broken and not self._changed.wait_for(lambda: reader.ended, QUIET_TIMEOUT_S):
                logger.critical("reads from %s have not ended in %g s", reader.peer, QUIET_TIMEOUT_S)


@dataclass(slots=True)
class _Payload:
    """Published runs: their slot, their size, and whom to tell when they are released."""

    slot: int
    nbytes: int
    read: Callable[[], None]
