"""Write-behind: pages go to the tier after the engine has been given them back.

`put` copies into memory that was taken at the start and returns at once; a thread uploads.
The tier is a cache: when uploads cannot keep up, or the store is down, pages are dropped
and counted, and nobody waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kv.chunk import Run
from kv.errors import TransferError
from kv.tier import KVTier

logger = logging.getLogger(__name__)

BATCH: Final = 16
COMPLAIN_S: Final = 60.0
"""How often a store that is down is logged."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the pages that were put.

    Attributes:
        stored: in the tier, some of them before.
        written: those of them that were uploaded.
        dropped: there was no memory for them.
        failed: the store did not take them.
        waiting: not yet tried.

    """

    stored: int
    written: int
    dropped: int
    failed: int
    waiting: int


class WriteBehind:
    """Uploads pages to a tier in the background. Thread-safe.

    Args:
        tier: where they go; it stays the caller's.
        capacity: bytes of memory for pages that wait; at least one page's worth is taken.
        timeout_s: deadline of one upload of some pages.

    """

    def __init__(self, tier: KVTier, capacity: int, timeout_s: float) -> None:
        self._tier, self._timeout_s = tier, timeout_s
        slots = max(1, capacity // tier.page_nbytes)
        # Zeroed by hand: memory that the system has not handed out yet is slow to copy into.
        self._memory = np.empty((slots, tier.runs, tier.run_nbytes), np.uint8)
        self._memory[:] = 0
        self._free = list(range(slots))
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._held: set[bytes] = set()
        self._stored = self._written = self._dropped = self._failed = 0
        self._closed = False
        self._changed = threading.Condition()
        self._complained = -COMPLAIN_S
        self._thread = threading.Thread(target=self._run, name="kv-s3-behind", daemon=True)
        self._thread.start()

    def put(self, keys: Sequence[bytes], pages: Sequence[Sequence[Run]]) -> bool:
        """Take pages of one prefix, as ``KVTier.put`` does. They are the caller's again when this returns.

        Returns whether there was memory for all. Those after the first that is dropped are dropped as well:
        nobody would find them.
        """
        for index, (key, runs) in enumerate(zip(keys, pages, strict=True)):
            if self._tier.seen_lately(key):
                continue
            with self._changed:
                if key in self._held:
                    continue
                if self._closed or not self._free:
                    self._dropped += len(keys) - index
                    return False
                slot = self._free.pop()
                self._held.add(key)
            for room, run in zip(self._memory[slot], runs, strict=True):
                room[:] = run
            with self._changed:
                self._waiting.append((key, slot))
                self._changed.notify_all()
        return True

    def drop(self, count: int) -> None:
        """Count pages that the caller did not even put, because one before them was dropped."""
        with self._changed:
            self._dropped += count

    def counts(self) -> Counts:
        """Return what became of the pages so far."""
        with self._changed:
            return Counts(self._stored, self._written, self._dropped, self._failed, len(self._held))

    def flush(self, timeout_s: float) -> bool:
        """Wait until no page waits any more; return whether that is so within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Take no more pages; those that wait are given some seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while batch := self._next():
            written = self._upload(batch)
            with self._changed:
                if written is not None:
                    self._stored += len(batch)
                    self._written += written
                else:
                    self._failed += len(batch)
                self._free += [slot for _, slot in batch]
                self._held -= {key for key, _ in batch}
                self._changed.notify_all()

    def _next(self) -> list[tuple[bytes, int]]:
        """Wait for pages; return some, or none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]

    def _upload(self, batch: list[tuple[bytes, int]]) -> int | None:
        """Return how many were written that were not there before, None if the store did not take them."""
        try:
            pages = [list(self._memory[slot]) for _, slot in batch]
            return self._tier.put([key for key, _ in batch], pages, self._timeout_s)
        except TransferError as error:
            if time.monotonic() - self._complained >= COMPLAIN_S:
                self._complained = time.monotonic()
                logger.warning("KV is not kept for later: %s", error)
            return None
