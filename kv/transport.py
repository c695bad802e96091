"""The transport interface: how a chunk's bytes get from one worker's memory into another's.

A sender publishes runs and gets a ticket; the ticket travels to the receiver over the
control plane (an actor call), beside the chunk's header; the receiver fetches the bytes
with it, into memory of its own. Every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from kv.chunk import Run

Ticket = Any
"""What a receiver needs to fetch one payload; picklable by Ray. Opaque to callers."""


def needs_ray(ticket: Ticket) -> bool:
    """Return whether only Ray's own calls can carry a ticket: then it is a list of references."""
    return isinstance(ticket, list)


@runtime_checkable
class Transport(Protocol):
    """Moves payloads between two workers. Thread-safe."""

    name: str
    """Short name in logs, metrics and ledgers: ``plasma``, ``tcp`` ..."""

    def register(self, memory: Sequence[Run]) -> None:
        """Announce memory that payloads will be published from and fetched into, once, before they are.

        It is kept alive, and must stay where it is, until ``close``.
        """
        ...

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> Ticket:
        """Make runs fetchable and return a ticket for them.

        The runs must stay as they are until ``read`` is called, which happens exactly once:
        within this call if the transport copies, otherwise when the payload has been
        released and nothing is being sent from it any more. ``near``: the receiver is on this node.

        Raises:
            StoreFull: there is no room for the payload. ``read`` is not called.

        """
        ...

    def fetch(self, ticket: Ticket, into: Sequence[Run | None], timeout_s: float) -> None:
        """Fill ``into`` with the payload's runs, in the order they were published; None skips a run.

        ``into`` is the caller's memory and of the sizes that were published. On an error its
        content is undefined. May be called again, until the payload is released.

        Raises:
            TransferTimeout: the payload did not arrive within ``timeout_s``.
            PeerLost: its owner is gone, or it has been released.
            ChunkCorrupt: the sizes differ from those that were published.

        """
        ...

    def release(self, ticket: Ticket) -> None:
        """Give up a payload that was published here. Idempotent; never raises."""
        ...

    def live(self) -> tuple[int, int]:
        """Return (payloads, bytes) that were published here and not released."""
        ...

    def close(self) -> None:
        """Release everything that was published here; further fetches from it fail."""
        ...
