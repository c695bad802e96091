"""The receiver's end of NIXL: an agent that reads one peer's memory."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import numpy as np

from kv import ucx
from kv.chunk import Run
from kv.registered import Numbers, RegisteredMemory, address_of

logger = logging.getLogger(__name__)

MARK_BYTES = 16
PAUSE_S = (20e-6, 1e-3)
"""How long to wait before asking again whether a read is done: at first, and at most."""


class Reader:
    """The agent that reads one peer.

    ``users``, ``used_at``, ``broken`` and ``ended`` are guarded by the transport's lock.

    Args:
        nixl: the library.
        config: UCX settings.
        peer: the peer's agent.

    """

    def __init__(self, nixl: Any, config: str, peer: str) -> None:
        self._nixl, self._config, self.peer = nixl, config, peer
        self._name = ucx.new_name()
        self._agent: Any = None
        self._registered = 0
        self._known: set[bytes] = set()
        self._marks: list[Run] = []
        self._spare: list[Run] = []
        self._setup = threading.Lock()
        self.path: str | None = None
        self._asked = False
        self.users, self.used_at = 0, 0.0
        self.broken = self.ended = False

    def prepare(self, kind: Any, memory: RegisteredMemory, metadata: bytes, deadline: float) -> None:
        """Make the agent, tell it of our memory and of the peer's, as far as that is new."""
        if not self._setup.acquire(timeout=left(deadline)):
            raise TimeoutError("another thread is still connecting")
        try:
            if self._agent is None:
                self._agent = ucx.new_agent(self._nixl, self._name, self._config)
            if new := memory.pieces[self._registered :]:
                self._agent.registerMem(ucx.regions(self._nixl, kind, new))
                self._registered += len(new)
            if metadata not in self._known:
                self._agent.loadRemoteMD(metadata)
                self._known.add(metadata)
        finally:
            self._setup.release()

    def read(self, kind: Any, theirs: Numbers, ours: Numbers, deadline: float) -> None:
        """Read pieces of the peer's memory into ours, row by row."""
        self._transfer(kind, theirs, ours, deadline)
        asked, self._asked = self._asked, True
        if not asked and (path := ucx.path(self._name)) is not None:
            self.path = path
            software = "emulation" in path
            logger.log(
                logging.WARNING if software else logging.INFO,
                "KV is read from %s by way of UCX: %s%s",
                self.peer,
                path,
                "; there is no one-sided way, and the tcp transport is faster and safer" if software else "",
            )

    def mark(self, slot: int, deadline: float) -> bytes:
        """Read what is in a slot of the peer's."""
        with self._setup:
            if not self._spare:
                self._marks.append(np.zeros(MARK_BYTES, np.uint8))  # stays registered
                self._spare.append(self._marks[-1])
                self._agent.registerMem(ucx.regions(self._nixl, self._nixl.DRAM_SEG, self._marks[-1:]))
            found = self._spare.pop()
        rows = np.array([[slot, MARK_BYTES, 0], [address_of(found), MARK_BYTES, 0]], np.uint64)
        self._transfer(self._nixl.DRAM_SEG, rows[:1], rows[1:], deadline)
        mark = found.tobytes()
        self._spare.append(found)
        return mark

    def end(self) -> None:
        """End the agent and what it has under way: our memory is left alone. No thread may be using it."""
        self._agent = None
        self.ended = True

    def _transfer(self, kind: Any, theirs: Numbers, ours: Numbers, deadline: float) -> None:
        """Nothing here may keep a reference to the agent: errors carry these frames along."""
        nixl = self._nixl
        handle = self._agent.createXferReq(
            nixl.NIXL_READ, nixl.nixlXferDList(kind, ours), nixl.nixlXferDList(kind, theirs), self.peer
        )
        try:
            status = self._agent.postXferReq(handle)
            pause, longest = PAUSE_S
            while status == nixl.NIXL_IN_PROG:
                if self.broken:
                    raise ConnectionError("another transfer from it failed, or the transport has been closed")
                time.sleep(min(pause, left(deadline)))
                pause = min(pause * 1.25, longest)
                status = self._agent.getXferStatus(handle)
        finally:
            with contextlib.suppress(*ucx.errors(nixl)):
                self._agent.releaseXferReq(handle)


def left(deadline: float) -> float:
    """Return how long there is until a moment of the monotonic clock; TimeoutError once it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline has passed")
    return seconds
