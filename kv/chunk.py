"""A chunk: a range of tokens of one request, over a range of layers, and what proves it is that.

A chunk's payload is a list of *runs*: contiguous pieces of memory in a fixed order
(layer by layer, block by block; see ``kv/paged.py``). Runs of one chunk are stored
together, so that a few large pieces cross the wire however many blocks they come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kv.errors import ChunkCorrupt, LayoutMismatch

Run = npt.NDArray[np.uint8]
"""A contiguous, one-dimensional view of bytes. Not owned by whoever holds it."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How an engine's KV cache lies in memory; equal layouts can be exchanged byte for byte.

    Attributes:
        model: fingerprint of the weights and the configuration (``actors/fingerprint.py``).
        dtype: element type of the cache, e.g. ``torch.bfloat16``.
        layers: number of cache tensors (one per attention layer on this rank).
        block_size: tokens per block.
        block_bytes: bytes per block, layer and rank (keys and values together).
        order: how the attention kernel packs a block; opaque, compared only.

    """

    model: str
    dtype: str
    layers: int
    block_size: int
    block_bytes: int
    order: str

    def require_equal(self, peer: KVLayout) -> None:
        """Raise ``LayoutMismatch`` naming the first field that differs, with both values."""
        for field in self.__slots__:
            ours, theirs = getattr(self, field), getattr(peer, field)
            if ours != theirs:
                raise LayoutMismatch(field, ours, theirs)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk is. Travels beside the payload, never inside it.

    Attributes:
        request_id: the engine request that it belongs to, the same on both sides.
        layout: fingerprint of model, dtype and memory order.
        index: position in the request's sequence of chunks, from 0.
        tokens: half-open range of token positions ``[start, end)``.
        layers: half-open range of layers ``[start, end)``.
        nbytes: payload size in bytes.
        checksum: XXH3-64 over the runs in order.

    """

    request_id: str
    layout: KVLayout
    index: int
    tokens: tuple[int, int]
    layers: tuple[int, int]
    nbytes: int
    checksum: int

    def verify(self, runs: Iterable[Run]) -> None:
        """Check size and checksum of a payload; raise ``ChunkCorrupt`` naming which differs."""
        checksum, nbytes = digest(runs)
        if nbytes != self.nbytes:
            raise ChunkCorrupt(self.request_id, f"size of chunk {self.index}", self.nbytes, nbytes)
        if checksum != self.checksum:
            raise ChunkCorrupt(
                self.request_id,
                f"checksum of chunk {self.index} (tokens {self.tokens[0]}-{self.tokens[1]})",
                f"{self.checksum:016x}",
                f"{checksum:016x}",
            )


def digest(runs: Iterable[Run]) -> tuple[int, int]:
    """Return (XXH3-64, total bytes) over the runs in order.

    XXH3 keeps up with memory (https://xxhash.com); it detects corruption, it does not
    authenticate.
    """
    state, nbytes = xxhash.xxh3_64(), 0
    for run in runs:
        state.update(run.data)
        nbytes += run.nbytes
    return state.intdigest(), nbytes
