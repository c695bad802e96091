"""KV of an engine that packs its blocks differently, brought into this engine's form.

Blocks of one size cannot be cut into blocks of another: what is inside is packed by the attention
kernel, in tiles that hold several tokens. But packing only moves elements. A ``Packing`` says where
each element of a block goes, and two of them together give the move from one engine's blocks to the
other's, token by token. Where both kernels keep elements together, they are moved together, so that
blocks that differ in size alone are moved in large pieces.

Heads are never mixed: a head's elements lie together, one head after the other. So the heads of a block
can be given out to any number of ranks that divides them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kv.chunk import KVLayout
from kv.paged import PagedCache

Offsets = npt.NDArray[np.int64]
"""Where elements lie in the part of a block that holds one head, counted in elements:
``[2, block_size, head_dim]``, keys first, then values."""

Index = npt.NDArray[np.int64]


def encode(offsets: Offsets) -> str | None:
    """Return a packing as ``KVLayout.packing`` holds it, or None if it is not made of regular tiles.

    It is written as nested loops ``count*stride`` over tokens and dimensions, outermost first, from a
    first offset; for keys, and for values. With 128 tokens of 64 elements, ``0 8192*1, 8192 8192*1`` is one
    token after the other, and ``0 4*2048 32*1 64*32, ...`` is tiles of 32 tokens, in which an element of
    all of them comes before the next element.
    """
    parts = [_loops(part.ravel()) for part in offsets]
    return None if None in parts else ", ".join(map(str, parts))


def _loops(offsets: Index) -> str | None:
    loops: list[str] = []
    while offsets.size > 1:
        stride = offsets[1] - offsets[0]
        other = np.flatnonzero(np.diff(offsets) != stride)
        count = int(other[0]) + 1 if other.size else offsets.size
        if offsets.size % count:
            return None
        rows = offsets.reshape(-1, count)
        if not np.array_equal(rows, rows[:, :1] + np.arange(count) * stride):
            return None
        loops.insert(0, f"{count}*{stride}")
        offsets = rows[:, 0]
    return " ".join((str(offsets[0]), *loops))


def decode(layout: KVLayout) -> Offsets:
    """Return the packing of a layout that has one.

    Raises ``ValueError`` unless it says of every element of a head where it goes, and of no two the same.
    """
    shape = (2, layout.block_size, layout.head_dim)
    parts = [_looped(part.split(), layout.block_size * layout.head_dim) for part in layout.packing.split(",")]
    offsets = np.concatenate(parts)
    if not np.array_equal(np.sort(offsets), np.arange(math.prod(shape))):
        raise ValueError(f"packing {layout.packing!r} is no order of {shape} elements")
    return offsets.reshape(shape)


def _looped(words: Sequence[str], size: int) -> Index:
    """Undo ``_loops``; nothing if it is not of ``size`` offsets."""
    loops = [(int(count), int(stride)) for count, stride in (word.split("*") for word in words[1:])]
    if not words or math.prod(count for count, _ in loops) != size:
        return np.empty(0, np.int64)
    offsets = np.array([int(words[0])], np.int64)
    for count, stride in loops:
        offsets = (offsets[:, None] + np.arange(count) * stride).ravel()
    return offsets


class Converter:
    """Writes blocks of one layout into a cache of another.

    Args:
        theirs: of the blocks that come.
        ours: of the cache that they are written to.

    Raises:
        LayoutMismatch: the two cannot be converted.

    """

    def __init__(self, theirs: KVLayout, ours: KVLayout) -> None:
        ours.require_compatible(theirs)
        self._theirs, self._ours = theirs, ours
        self._from, self._to = decode(theirs), decode(ours)
        self._moves = lru_cache(maxsize=256)(self._move)

    def write(
        self,
        source: npt.NDArray[np.uint8],
        start: int,
        cache: PagedCache,
        blocks: Sequence[int],
        tokens: tuple[int, int],
    ) -> None:
        """Write tokens of a request into its blocks. Other tokens of these blocks are left as they are.

        Args:
            source: their blocks, ``[layers, blocks, bytes per block]``, contiguous; of whatever ranks.
            start: the token that the first of them starts with.
            cache: where to.
            blocks: the request's blocks in it, from token 0.
            tokens: half-open range of what is written; ``source`` holds all of it.

        """
        for first, count in self._pieces(*tokens):
            place, theirs = divmod(first - start, self._theirs.block_size)
            block, ours = divmod(first, self._ours.block_size)
            unit, take, put = self._moves(theirs, ours, count)
            runs = iter(cache.runs([blocks[block]]))
            for layer in source[:, place].reshape(len(source), cache.ranks, -1):
                for share in layer:  # of one of our ranks
                    _in_units(next(runs), unit)[put] = _in_units(share, unit)[take]

    def _pieces(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Split a range of tokens where a block of either side ends: (first, count)."""
        while low < high:
            ends = [low - low % size + size for size in (self._theirs.block_size, self._ours.block_size)]
            end = min(high, *ends)
            yield low, end - low
            low = end

    def _move(self, theirs: int, ours: int, count: int) -> tuple[int, Index, Index]:
        """Plan the move of ``count`` tokens, from token ``theirs`` of a block to token ``ours`` of one.

        It is that of the heads which one of our ranks has; every rank's is the same.

        Returns the bytes that are moved together, and the indices of such units to take and to put.
        """
        take = self._from[:, theirs : theirs + count].ravel()
        put = self._to[:, ours : ours + count].ravel()
        order = np.argsort(put)
        take, put = take[order], put[order]
        apart = (np.diff(take, prepend=-2) != 1) | (np.diff(put, prepend=-2) != 1)
        first = np.flatnonzero(apart)
        strides = [self._from.size, self._to.size]
        unit = int(np.gcd.reduce(np.concatenate([take[first], put[first], first, [take.size], strides])))
        heads = np.arange(self._ours.heads // self._ours.ranks)[:, None]
        take, put = (
            (heads * (stride // unit) + index[::unit] // unit).ravel()
            for stride, index in zip(strides, (take, put), strict=True)
        )
        element = self._ours.block_bytes // (self._ours.heads * self._to.size)
        return unit * element, take, put


def _in_units(block: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.generic]:
    """View a block as units of ``size`` bytes: numbers if there are such, which index faster, or rows."""
    return block.view(f"u{size}") if size in (1, 2, 4, 8) else block.reshape(-1, size)
