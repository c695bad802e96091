"""Memory that a transport has been told of: where runs lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv.chunk import Run

Numbers = npt.NDArray[np.uint64]


@dataclass(slots=True)
class RegisteredMemory:
    """Pieces of memory, kept alive. Not thread-safe."""

    pieces: list[Run] = field(default_factory=list)
    _starts: Numbers = field(default_factory=lambda: np.empty(0, np.uint64))
    _ends: Numbers = field(default_factory=lambda: np.empty(0, np.uint64))
    _order: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, memory: Sequence[Run]) -> list[Run]:
        """Take new pieces; return those that were not within what is here already."""
        new = [run for run in memory if run.nbytes and not self._holds(run)]
        self.pieces += new
        starts = np.array([address_of(run) for run in self.pieces], np.uint64)
        self._order = np.argsort(starts)
        self._starts = starts[self._order]
        self._ends = self._starts + np.array([run.nbytes for run in self.pieces], np.uint64)[self._order]
        return new

    def find(self, runs: Sequence[Run]) -> tuple[Numbers, npt.NDArray[np.int64]]:
        """Return each run's address, and which piece holds it. Empty runs are anywhere."""
        addresses = np.array([address_of(run) for run in runs], np.uint64)
        sizes = np.array([run.nbytes for run in runs], np.uint64)
        place = np.searchsorted(self._starts, addresses, "right") - 1
        outside = (place < 0) & (sizes > 0)
        if len(self._ends):
            outside |= (addresses + sizes > self._ends[place]) & (sizes > 0)
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            raise ValueError(
                f"run {first} of {runs[first].nbytes} bytes does not lie in registered memory: "
                f"announce it with `register` first"
            )
        return addresses, self._order[place] if len(self._order) else np.zeros(len(runs), np.int64)

    def _holds(self, run: Run) -> bool:
        try:
            self.find([run])
        except ValueError:
            return False
        return True


def address_of(run: Run) -> int:
    """Return where a run lies."""
    address: int = run.__array_interface__["data"][0]
    return address
