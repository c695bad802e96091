"""Which worker probably holds the KV of which prompt prefixes: remembered from what was sent there.

Bounded, and corrected by what engines say they had cached. Being wrong costs a prediction, never a token.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import xxhash

BLOCKS: Final = 200_000
"""Of how many blocks it is known who holds them; about 25 MB. The ones not asked for longest go."""
MOST_BLOCKS: Final = 512
"""Of one prompt, so many are looked at."""


def chain(tokens: Sequence[int], block: int, salt: str = "") -> list[int]:
    """Return a hash for each whole block of a prompt, over everything up to its end."""
    data = array("q", tokens[: MOST_BLOCKS * block]).tobytes()
    size = block * 8
    found, before = [], xxhash.xxh3_64_intdigest(salt.encode())
    for end in range(size, len(data) + 1, size):
        before = xxhash.xxh3_64_intdigest(data[end - size : end], seed=before)
        found.append(before)
    return found


class Prefixes:
    """Block hash to the workers that hold the block, as bits of an int."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self._holders: OrderedDict[int, int] = OrderedDict()
        self._most = blocks

    def held(self, blocks: Sequence[int]) -> dict[int, int]:
        """Return how many blocks from the start each worker holds, by the worker's number."""
        found: dict[int, int] = {}
        holding = -1
        for depth, block in enumerate(blocks):
            now = holding & self._holders.get(block, 0)
            for worker in _bits(holding & ~now) if depth else ():
                found[worker] = depth
            holding = now
            if not holding:
                return found
            self._holders.move_to_end(block)
        for worker in _bits(holding) if blocks else ():
            found[worker] = len(blocks)
        return found

    def add(self, blocks: Sequence[int], worker: int) -> None:
        """A worker computes or gets these blocks."""
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) | 1 << worker
            self._holders.move_to_end(block)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def remove(self, blocks: Sequence[int], worker: int) -> None:
        """A worker turned out not to have these blocks."""
        for block in blocks:
            if (holders := self._holders.get(block)) is not None:
                self._holders[block] = holders & ~(1 << worker)

    def forget(self, worker: int) -> None:
        """A worker has lost everything."""
        self.remove(list(self._holders), worker)


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
