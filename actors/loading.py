"""A chunk's way from its sender's memory into this engine's blocks.

Blocks of an equal layout are fetched to where they belong, also from an engine whose ranks have each a part
of what one rank has here. Others are fetched aside, verified as their sender published them, and then
converted.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kv.chunk import ChunkHeader, KVLayout, Run
from kv.convert import Converter
from kv.errors import ChunkCorrupt
from kv.paged import PagedCache

LAYOUTS_KEPT = 16
"""Converters that are kept, each for one layout of other engines."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a chunk's runs go, None for those that are not wanted; and what to do once they are verified."""

    into: list[Run | None]
    settle: Callable[[], None]


class Loader:
    """Says where chunks go in an engine's cache. Thread-safe.

    Args:
        cache: the engine's paged cache.
        layout: its layout.
        register: told of memory that payloads will be fetched into, before they are.

    Each thread that converts keeps memory for a chunk to be fetched into; a landing is settled, or given
    up, before the same thread asks for the next.

    """

    def __init__(
        self, cache: PagedCache, layout: KVLayout, register: Callable[[Sequence[Run]], None]
    ) -> None:
        self._cache, self._layout, self._register = cache, layout, register
        self._converters: dict[KVLayout, Converter] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    def require(self, header: ChunkHeader) -> None:
        """Raise unless a chunk can be brought into this cache.

        Raises:
            LayoutMismatch: it cannot be converted.
            ChunkCorrupt: it does not start where one of its blocks does.

        """
        if header.layout != self._layout:
            self._converter(header.layout)
        size, start = header.layout.block_size, header.tokens[0]
        if start % size:
            raise ChunkCorrupt(header.request_id, "first token", f"a multiple of {size}", start)

    def landing(self, header: ChunkHeader, blocks: Sequence[int], wanted: tuple[int, int]) -> Landing:
        """Return where a chunk goes.

        Args:
            header: of a chunk that was found good by ``require``.
            blocks: the request's blocks in this engine, from token 0.
            wanted: half-open range of tokens; the first is a block's first. Blocks before it are not touched.

        """
        ranks = header.layout.ranks
        if (
            replace(header.layout, ranks=self._layout.ranks) == self._layout
            and ranks % self._layout.ranks == 0
        ):
            cache = self._cache
            first, last = header.tokens[0] // cache.block_size, cache.blocks_of(header.tokens[1])
            low, high = wanted[0] // cache.block_size, cache.blocks_of(wanted[1])
            return Landing(cache.runs_within(blocks, first, last - first, low, high, ranks), _nothing)
        return self._aside(header, blocks, wanted)

    def _aside(self, header: ChunkHeader, blocks: Sequence[int], wanted: tuple[int, int]) -> Landing:
        layout, (start, end) = header.layout, header.tokens
        low, high = max(start, wanted[0]), min(end, wanted[1])
        first, last = low // layout.block_size, -(-high // layout.block_size)
        count, before = -(-(end - start) // layout.block_size), start // layout.block_size
        source = self._memory(layout.layers, count, layout.block_bytes)
        within = [low < high and first <= before + i < last for i in range(count)]
        into: list[Run | None] = [
            run if within[i] else None
            for layer in source
            for i in range(count)
            for run in layer[i].reshape(layout.ranks, -1)
        ]
        if low >= high:
            return Landing(into, _nothing)
        write = self._converter(layout).write
        return Landing(into, partial(write, source, start, self._cache, blocks, (low, high)))

    def _converter(self, layout: KVLayout) -> Converter:
        with self._lock:
            if layout not in self._converters:
                while len(self._converters) >= LAYOUTS_KEPT:
                    del self._converters[next(iter(self._converters))]
                self._converters[layout] = Converter(layout, self._layout)
            return self._converters[layout]

    def _memory(self, *shape: int) -> npt.NDArray[np.uint8]:
        """This thread's memory for a chunk's blocks: ``[layers, blocks, bytes per block]``."""
        size = math.prod(shape)
        held: Run | None = getattr(self._thread, "aside", None)
        if held is None or held.nbytes < size:
            held = np.empty(size, np.uint8)
            self._register([held])
            self._thread.aside = held
        return held[:size].reshape(shape)


def _nothing() -> None:
    pass
