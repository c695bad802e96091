"""Errors of the handover.

    KVError
    ├── TransferError            a transfer did not complete; the request can be retried
    │   ├── TransferTimeout      the deadline passed; says what was waited for
    │   ├── PeerLost             the other side, or the object it owned, is gone
    │   │   └── Gone             the object alone: its store answers
    │   ├── StoreFull            no room to publish a chunk
    │   └── ChunkCorrupt         bytes or identity differ from what was promised
    └── LayoutMismatch           the two engines cannot exchange KV at all; not retried

Every error passes all its arguments to ``Exception`` so that it survives pickling
between Ray actors.
"""


class KVError(Exception):
    """Base of every error raised by this package."""


class TransferError(KVError):
    """A transfer did not complete. The KV is not usable; the request still is."""


class TransferTimeout(TransferError):
    """The deadline of a wait passed."""


class PeerLost(TransferError):
    """The peer, or an object that it owned, is gone."""


class Gone(PeerLost):
    """The object is gone: released, expired or swept. Its store answers."""


class StoreFull(TransferError):
    """The sender's store has no room for the chunk."""


class ChunkCorrupt(TransferError):
    """A chunk's bytes, or what it says it is, differ from what was promised.

    Args:
        request_id: the request whose chunk it is.
        field: what differs: ``checksum``, ``request``, ``layout``, ``tokens``, ``size`` ...
        expected: the promised value.
        found: the value that arrived.

    """

    def __init__(self, request_id: str, field: str, expected: object, found: object) -> None:
        super().__init__(request_id, field, expected, found)
        self.request_id, self.field, self.expected, self.found = request_id, field, expected, found

    def __str__(self) -> str:
        return f"KV of request {self.request_id}: {self.field} is {self.found}, expected {self.expected}"


class LayoutMismatch(KVError):
    """Two engines whose KV caches cannot be exchanged.

    Args:
        field: the first field that differs.
        ours: our value.
        theirs: the peer's value.

    """

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(field, ours, theirs)
        self.field, self.ours, self.theirs = field, ours, theirs

    def __str__(self) -> str:
        return (
            f"KV caches cannot be exchanged: {self.field} is {self.ours!r} here and {self.theirs!r} there. "
            f"Give both groups of workers the same model files and engine options."
        )
