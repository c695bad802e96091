"""A chunk: a range of tokens of one request, over a range of layers, and what proves it is that.

A chunk's payload is a list of *runs*: contiguous pieces of memory in a fixed order
(layer by layer, block by block; see ``kv/paged.py``). Runs of one chunk are stored
together, so that a few large pieces cross the wire however many blocks they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kv.errors import ChunkCorrupt, LayoutMismatch

Run = npt.NDArray[np.uint8]
"""A contiguous, one-dimensional view of bytes. Not owned by whoever holds it."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How an engine's KV cache lies in memory.

    Equal layouts can be exchanged byte for byte, compatible ones by ``kv/convert.py``.

    Attributes:
        model: fingerprint of the weights and the configuration (``actors/fingerprint.py``).
        dtype: element type of the cache, e.g. ``torch.bfloat16``.
        layers: number of attention layers.
        block_size: tokens per block.
        block_bytes: bytes per block and layer (keys and values together), of all ranks.
        order: name of how the attention kernel packs a block; compared only.
        heads: key-value heads, of all ranks; 0 if a block is not known to be divided into heads.
        head_dim: elements of one head's key, and of its value; 0 likewise.
        packing: where the kernel puts each element of a head (``kv/convert.py``); empty if that is
            not known, and then only equal layouts can be exchanged.

    """

    model: str
    dtype: str
    layers: int
    block_size: int
    block_bytes: int
    order: str
    heads: int = 0
    head_dim: int = 0
    packing: str = ""
    ranks: int = 1

    def require_compatible(self, peer: KVLayout) -> None:
        """Raise ``LayoutMismatch`` unless this cache can take the peer's KV, and the peer this one's.

        It names the first field that differs and must not, with both values.
        """
        known = bool(self.packing and peer.packing)
        converted = ("block_size", "block_bytes", "order", "packing", "ranks") if known else ()
        for field in self.__slots__:
            ours, theirs = getattr(self, field), getattr(peer, field)
            if field not in converted and ours != theirs:
                raise LayoutMismatch(field, ours, theirs)
        if self.heads % self.ranks or peer.heads % peer.ranks:  # some ranks have copies of others' heads
            ours, theirs = (f"{side.ranks} for {side.heads} heads" for side in (self, peer))
            raise LayoutMismatch("ranks", ours, theirs)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk is. Travels beside the payload, never inside it.

    Attributes:
        request_id: the engine request that it belongs to, the same on both sides.
        layout: fingerprint of model, dtype and memory order.
        index: position in the request's sequence of chunks, from 0.
        tokens: half-open range of token positions ``[start, end)``.
        layers: half-open range of layers ``[start, end)``.
        checksums: XXH3-64 of each run, in order.
        nbytes: payload size in bytes.

    """

    request_id: str
    layout: KVLayout
    index: int
    tokens: tuple[int, int]
    layers: tuple[int, int]
    checksums: tuple[int, ...]
    nbytes: int

    def verify(self, runs: Sequence[Run | None]) -> None:
        """Check runs that have arrived (None: not asked for).

        Raises ``ChunkCorrupt`` naming the first that differs.
        """
        if len(runs) != len(self.checksums):
            raise ChunkCorrupt(self.request_id, f"runs of chunk {self.index}", len(self.checksums), len(runs))
        for position, (run, expected) in enumerate(zip(runs, self.checksums, strict=True)):
            if run is not None and (found := checksum(run)) != expected:
                start, end = self.tokens
                raise ChunkCorrupt(
                    self.request_id,
                    f"checksum of run {position} of chunk {self.index} (tokens {start}-{end})",
                    f"{expected:016x}",
                    f"{found:016x}",
                )


def checksum(run: Run) -> int:
    """Return XXH3-64 of a run.

    XXH3 keeps up with memory (https://xxhash.com); it detects corruption, it does not
    authenticate.
    """
    return xxhash.xxh3_64_intdigest(run.data)


def copy_runs(name: str, payload: Sequence[Run], into: Sequence[Run | None]) -> None:
    """Copy a payload into runs of the same sizes, except where ``into`` is None.

    Raises ``ChunkCorrupt`` if the number of runs or a size differs; ``name`` goes in its message.
    """
    require_sizes(name, [run.nbytes for run in payload], into)
    for source, target in zip(payload, into, strict=True):
        if target is not None:
            target[:] = source


def require_sizes(name: str, sizes: Sequence[int], into: Sequence[Run | None]) -> None:
    """Raise ``ChunkCorrupt`` unless ``into`` has a run of each size, or None in its place."""
    if len(sizes) != len(into):
        raise ChunkCorrupt(name, "number of runs", len(into), len(sizes))
    for size, target in zip(sizes, into, strict=True):
        if target is not None and size != target.nbytes:
            raise ChunkCorrupt(name, "size of a run", target.nbytes, size)
