"""The reference transport: payloads in this process's memory. For tests and the fake engine."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence

import numpy as np

from kv.chunk import Run, copy_runs
from kv.errors import PeerLost, StoreFull
from kv.transport import Ticket


class MemoryTransport:
    """Keeps payloads in a dictionary.

    Args:
        capacity: bytes that may be published at once.

    """

    name = "memory"

    def __init__(self, capacity: int = 1 << 30) -> None:
        self._capacity = capacity
        self._payloads: dict[str, list[Run]] = {}
        self._lock = threading.Lock()

    def register(self, memory: Sequence[Run]) -> None:
        """See ``Transport.register``. Any memory will do."""

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> Ticket:
        """See ``Transport.publish``. Copies."""
        copies: list[Run] = [np.array(run) for run in runs]
        nbytes = sum(copy.nbytes for copy in copies)
        with self._lock:
            used = sum(run.nbytes for payload in self._payloads.values() for run in payload)
            if used + nbytes > self._capacity:
                raise StoreFull(f"a chunk of {nbytes} bytes does not fit: {used} of {self._capacity} in use")
            ticket = uuid.uuid4().hex
            self._payloads[ticket] = copies
        read()
        return ticket

    def fetch(self, ticket: Ticket, into: Sequence[Run | None], timeout_s: float) -> None:
        """See ``Transport.fetch``. Never waits: what is published is there."""
        with self._lock:
            payload = self._payloads.get(ticket)
        if payload is None:
            raise PeerLost(f"payload {ticket} has been released")
        copy_runs(ticket, payload, into)

    def release(self, ticket: Ticket) -> None:
        """See ``Transport.release``."""
        with self._lock:
            self._payloads.pop(ticket, None)

    def live(self) -> tuple[int, int]:
        """See ``Transport.live``."""
        with self._lock:
            runs = [run for payload in self._payloads.values() for run in payload]
            return len(self._payloads), sum(run.nbytes for run in runs)

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._lock:
            self._payloads.clear()
