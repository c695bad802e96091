"""Ray's object store as a transport.

The runs go to Ray as out-of-band buffers (pickle protocol 5), so that the store gathers
them straight from the engine's paged memory into shared memory: one copy. On the same
node the receiver maps that memory; between nodes Ray's object manager moves it.

Objects are owned by the sender's process. They go when the sender has released them and
the receiver has dropped its views, or when the sender dies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import ray
from ray import exceptions as ray_errors

from kv.chunk import Run, copy_runs
from kv.errors import PeerLost, StoreFull, TransferTimeout
from kv.transport import Ticket


class PlasmaTransport:
    """Publishes payloads as Ray objects. A ticket is a one-element list holding the reference.

    The list keeps Ray from resolving the reference when the ticket is passed to an actor
    call: the receiver decides when, and how long, to wait.
    """

    name = "plasma"
    plain_tickets = False

    def __init__(self) -> None:
        self._held: dict[str, tuple[Ticket, int]] = {}
        self._lock = threading.Lock()

    def register(self, memory: Sequence[Run]) -> None:
        """See ``Transport.register``. Any memory will do."""

    def publish(self, runs: Sequence[Run], read: Callable[[], None]) -> Ticket:
        """See ``Transport.publish``. The object store copies."""
        nbytes = sum(run.nbytes for run in runs)
        try:
            ticket = [ray.put(list(runs))]
        except (ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError) as error:
            raise StoreFull(
                f"the node's object store has no room for a chunk of {nbytes} bytes; "
                f"give the node group more `object_store`"
            ) from error
        with self._lock:
            self._held[ticket[0].hex()] = (ticket, nbytes)
        read()
        return ticket

    def fetch(self, ticket: Ticket, into: Sequence[Run | None], timeout_s: float) -> None:
        """See ``Transport.fetch``."""
        try:
            payload: list[Run] = ray.get(ticket[0], timeout=timeout_s)
        except ray_errors.GetTimeoutError as error:
            raise TransferTimeout(f"object {ticket[0].hex()} did not arrive in {timeout_s:.1f} s") from error
        except (ray_errors.ObjectLostError, ray_errors.OwnerDiedError) as error:
            raise PeerLost(f"object {ticket[0].hex()} is gone: {type(error).__name__}") from error
        copy_runs(ticket[0].hex(), payload, into)

    def release(self, ticket: Ticket) -> None:
        """See ``Transport.release``."""
        with self._lock:
            self._held.pop(ticket[0].hex(), None)

    def live(self) -> tuple[int, int]:
        """See ``Transport.live``."""
        with self._lock:
            return len(self._held), sum(nbytes for _, nbytes in self._held.values())

    def close(self) -> None:
        """See ``Transport.close``."""
        with self._lock:
            self._held.clear()
