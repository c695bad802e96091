"""Stage times of requests inside one worker, for the ledger."""

from __future__ import annotations

import threading
import time

Mark = tuple[str, float]
"""(stage, seconds on this process's monotonic clock when the stage was reached)."""


class Marks:
    """Collects marks per request, up to its first output. Thread-safe.

    A stage is kept once, at its first occurrence, except those noted with ``last=True``.
    """

    def __init__(self) -> None:
        self._marks: dict[str, dict[str, float]] = {}
        self._lock = threading.Lock()

    def open(self, request_id: str) -> None:
        """Start collecting for a request; marks of unknown requests are dropped."""
        with self._lock:
            self._marks[request_id] = {}

    def note(self, request_id: str, stage: str, last: bool = False, at: float | None = None) -> None:
        """Note that a request reached a stage now, or at ``at``."""
        now = time.monotonic() if at is None else at
        with self._lock:
            marks = self._marks.get(request_id)
            if marks is not None and (last or stage not in marks):
                marks[stage] = now

    def close(self, request_id: str) -> tuple[Mark, ...]:
        """Stop collecting for a request and return what was collected; empty if it was closed before."""
        with self._lock:
            return tuple(self._marks.pop(request_id, {}).items())
