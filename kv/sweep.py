"""The sweeper: deletes what has expired, and the oldest pages when there are too many bytes.

Every worker that has the bucket looks regularly whether somebody has swept lately, and sweeps if nobody
has: nobody need be appointed. Several at once do no harm: each decides by what it sees, and an object
that is gone already needs no deleting. A page that is swept while somebody loads it is a miss.
Ages are by the server's own clock, read from a mark that each sweep writes.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kv.bucket import Bucket, Gate, Stored
from kv.chunk import Run
from kv.errors import TransferError, TransferTimeout
from kv.tier import PAGES

logger = logging.getLogger(__name__)

MARK: Final = "sweep"
NOTHING: Final[list[Run]] = []
BATCH: Final = 256
INTERVAL_S: Final = 300.0
SWEEP_TIMEOUT_S: Final = 600.0
LOOK_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did: objects and bytes that it deleted, and that are left."""

    deleted: int
    deleted_nbytes: int
    kept: int
    kept_nbytes: int


def doomed(objects: Iterable[Stored], now: float, expiry_s: float, size_limit: int) -> list[Stored]:
    """Return what is to be deleted: what is older than ``expiry_s``, then the oldest pages above the limit.

    Payloads on their way count, but only pages are deleted for room.
    """
    by_age = sorted(objects, key=lambda stored: (stored.modified, stored.name))
    gone = [stored for stored in by_age if now - stored.modified > expiry_s]
    kept = by_age[len(gone) :]
    above = sum(stored.nbytes for stored in kept) - size_limit
    for stored in kept:
        if above <= 0:
            break
        if stored.name.startswith(PAGES):
            gone.append(stored)
            above -= stored.nbytes
    return gone


def sweep(bucket: Bucket, timeout_s: float = SWEEP_TIMEOUT_S) -> Swept:
    """Look through the prefix once. Raises ``TransferError``; what was deleted until then stays deleted."""
    deadline = time.monotonic() + timeout_s

    def look(gate: Gate) -> tuple[list[Stored], float]:
        bucket.put(MARK, NOTHING, gate)
        objects = bucket.list()
        return [stored for stored in objects if stored.name != MARK], next(
            stored.modified for stored in objects if stored.name == MARK
        )

    ((objects, now),) = bucket.write([look], timeout_s, "sweep")
    gone = doomed(objects, now, bucket.settings.expiry_s, bucket.settings.size_limit)
    for start in range(0, len(gone), BATCH):
        if (left := deadline - time.monotonic()) <= 0:
            raise TransferTimeout(
                f"sweep: {len(gone) - start} objects of {bucket} are left after {timeout_s:g} s"
            )
        tasks = [partial(_delete, bucket, stored.name) for stored in gone[start : start + BATCH]]
        bucket.write(tasks, left, f"deletion of {len(gone)} objects")
    deleted, total = sum(stored.nbytes for stored in gone), sum(stored.nbytes for stored in objects)
    return Swept(len(gone), deleted, len(objects) - len(gone), total - deleted)


def _delete(bucket: Bucket, name: str, gate: Gate) -> None:
    if not gate.closed:
        bucket.delete(name)


class Sweeper:
    """Sweeps again and again, in a thread, until it is closed. The bucket stays the caller's to close.

    Of several, one sweeps in each interval: the others find its mark renewed.
    """

    def __init__(self, bucket: Bucket, interval_s: float = INTERVAL_S) -> None:
        self._bucket, self._interval_s = bucket, interval_s
        self._end = threading.Event()
        self._seen: float | None = None
        self._thread = threading.Thread(target=self._run, name="kv-s3-sweep", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Sweepers that were started together part company.
        while not self._end.wait(self._interval_s * random.uniform(0.75, 1.25)):
            try:
                self.turn()
            except TransferError as error:
                logger.warning("not swept: %s", error)

    def turn(self) -> None:
        """Sweep, unless somebody else has since our last turn. Raises ``TransferError``."""
        if (mark := self._mark()) is None or mark == self._seen:
            logger.info("swept %s: %s", self._bucket, sweep(self._bucket))
            mark = self._mark()
        self._seen = mark

    def _mark(self) -> float | None:
        """Return when somebody swept last, by the server's clock; None: nobody has."""

        def find(_: Gate) -> Stored | None:
            return self._bucket.find(MARK)

        (mark,) = self._bucket.look([find], LOOK_TIMEOUT_S, "look for the last sweep")
        return None if mark is None else mark.modified

    def close(self, timeout_s: float = 5.0) -> None:
        """End it; a sweep under way is given some seconds."""
        self._end.set()
        self._thread.join(timeout_s)
