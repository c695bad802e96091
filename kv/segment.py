"""Room in a piece of memory that two processes see, handed out and taken back by one of them.

Every payload begins with a number that no other payload in the segment has had. The owner takes it away
before the room is used again, so that a reader which finds it before and after its copy has copied that
payload.
"""

from __future__ import annotations

import itertools
from bisect import insort

from kv.chunk import Run

ALIGNMENT = 4096
"""Payloads begin on their own pages."""
HEAD_BYTES = 64
"""In front of each payload: its number, and nothing else."""


class Segment:
    """The owner's side. Not thread-safe.

    Args:
        memory: writable; given out from its beginning, first fit.

    """

    def __init__(self, memory: Run) -> None:
        self.memory = memory
        self._free: list[tuple[int, int]] = [(0, memory.nbytes // ALIGNMENT * ALIGNMENT)]
        """(offset, size) of what is free, by offset."""
        self._used: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Return (offset, number) of new room for a payload, None if there is none."""
        needed = -(-(nbytes + HEAD_BYTES) // ALIGNMENT) * ALIGNMENT
        for position, (offset, size) in enumerate(self._free):
            if size >= needed:
                self._free[position : position + 1] = (
                    [(offset + needed, size - needed)] if size > needed else []
                )
                self._used[offset] = needed
                number = next(self._numbers)
                _write_number(self.memory, offset, number)
                return offset, number
        return None

    def give_back(self, offset: int) -> None:
        """Take a payload's number away, and its room back."""
        size = self._used.pop(offset)
        _write_number(self.memory, offset, 0)
        insort(self._free, (offset, size))
        joined: list[tuple[int, int]] = []
        for start, length in self._free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._free = joined


def number_at(memory: Run, offset: int) -> int:
    """Return the number of the payload that is at ``offset`` now, 0 if none is."""
    return int.from_bytes(memory[offset : offset + 8].tobytes(), "little")


def _write_number(memory: Run, offset: int, number: int) -> None:
    memory[offset : offset + 8].view("<u8")[0] = number
