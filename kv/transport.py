"""The transport interface: how a chunk's bytes get from one worker to another.

A sender publishes runs and gets a ticket; the ticket travels to the receiver over the
control plane (an actor call), beside the chunk's header; the receiver fetches the bytes
with it and releases it. Every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from kv.chunk import Run

Ticket = Any
"""What a receiver needs to fetch one payload; picklable by Ray. Opaque to callers."""


@runtime_checkable
class Transport(Protocol):
    """Moves payloads between two workers. Thread-safe."""

    name: str
    """Short name in logs, metrics and ledgers: ``plasma``, ``memory`` ..."""

    def publish(self, runs: Sequence[Run]) -> Ticket:
        """Copy the runs out of the engine's memory and return a ticket for them.

        On return the runs may be reused. The transport owns the copy until ``release``
        is called here *and* the receiver has dropped what it fetched.

        Raises:
            StoreFull: there is no room for the payload.

        """
        ...

    def fetch(self, ticket: Ticket, timeout_s: float) -> list[Run]:
        """Return the payload's runs, read-only, in the order they were published.

        The memory stays valid for as long as the returned list is alive.

        Raises:
            TransferTimeout: the payload did not arrive within ``timeout_s``.
            PeerLost: its owner is gone, or it has been released.

        """
        ...

    def release(self, ticket: Ticket) -> None:
        """Give up the sender's hold on a payload. Idempotent; never raises."""
        ...

    def live(self) -> tuple[int, int]:
        """Return (payloads, bytes) that this side has published and not released."""
        ...

    def close(self) -> None:
        """Release everything that this side published."""
        ...
