"""KV goes to the bucket's tier behind the engine's back: whole pages, once they are valid.

The engine thread only says which pages became valid. A thread of our own copies them into memory that
the write-behind took at the start (``kv/behind.py``), whose thread uploads them. A finished or preempted
request's blocks stay the engine's until they are copied, which takes milliseconds: a block that is used
again while it is copied would be stored under a key that is not its own.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from kv.behind import WriteBehind
from kv.paged import PagedCache
from kv.tier import KVTier

logger = logging.getLogger(__name__)

MEMORY_BYTES: Final = 128 << 20
"""For pages that wait to be uploaded."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one request that became valid.

    Attributes:
        request_id: whose.
        salt: what its keys depend on beside the tokens.
        tokens: all of its tokens, up to the end of the last page.
        blocks: its blocks, from token 0.
        first: the first page that is to be kept, counted from token 0.

    """

    request_id: str
    salt: bytes
    tokens: Sequence[int]
    blocks: Sequence[int]
    first: int


class Keeper:
    """Copies valid pages out of the cache, to be uploaded.

    Args:
        tier: where they go.
        cache: the engine's paged cache, of the tier's layout.
        wake: wakes the engine loop, called when ``take_finished`` has something new.
        memory: bytes for pages that wait; beyond it they are dropped.

    All but ``close`` and ``behind.counts`` is called by the engine thread.

    """

    def __init__(
        self, tier: KVTier, cache: PagedCache, wake: Callable[[], None], memory: int = MEMORY_BYTES
    ) -> None:
        self._tier, self._cache, self._wake = tier, cache, wake
        self.behind = WriteBehind(tier, memory, tier.settings.timeout_s)
        self._pending: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._finished: set[str] = set()
        self._cut: set[str] = set()
        """Requests of which a page was dropped; what follows it would not be found."""
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[Pages | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-keeper", daemon=True)
        self._thread.start()

    def promise(self, request_id: str) -> None:
        """Pages of this request will be given to ``keep``, when the step that computes them has run."""
        with self._changed:
            self._pending[request_id] += 1

    def keep(self, pages: Pages) -> None:
        """Take pages that were promised and are valid now."""
        self._queue.put(pages)

    def finish(self, request_id: str) -> bool:
        """The engine is done with a request; return whether it must keep the blocks until it is reported."""
        with self._changed:
            if request_id in self._pending:
                self._ended.add(request_id)
                return True
            self._cut.discard(request_id)
            return False

    def preempted(self, request_ids: Collection[str], timeout_s: float) -> None:
        """The engine is about to reuse these requests' blocks: return when they are copied.

        Raises TimeoutError after ``timeout_s``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._pending.keys() & set(request_ids), timeout_s):
                raise TimeoutError(f"preempted KV is still being copied after {timeout_s} s")

    def take_finished(self) -> set[str]:
        """Return finished requests whose blocks are copied, each once."""
        with self._changed:
            finished, self._finished = self._finished, set()
        return finished

    def close(self) -> None:
        """Stop; pages that wait to be uploaded are given some seconds."""
        self._queue.put(None)
        self._thread.join(timeout=5)
        self.behind.close()

    def _run(self) -> None:
        while (pages := self._queue.get()) is not None:
            try:
                self._copy(pages)
            except Exception:
                logger.exception("request %s: its KV is not kept", pages.request_id)
            self._copied(pages.request_id)

    def _copy(self, pages: Pages) -> None:
        keys = self._tier.keys(pages.tokens, pages.salt)[pages.first :]
        with self._changed:
            cut = pages.request_id in self._cut
        if cut:
            self.behind.drop(len(keys))
            return
        size = self._tier.page_blocks
        runs = [
            self._cache.runs(pages.blocks[page * size : (page + 1) * size])
            for page in range(pages.first, pages.first + len(keys))
        ]
        if not self.behind.put(keys, runs):
            with self._changed:
                self._cut.add(pages.request_id)

    def _copied(self, request_id: str) -> None:
        with self._changed:
            self._pending[request_id] -= 1
            if not self._pending[request_id]:
                del self._pending[request_id]
                if request_id in self._ended:
                    self._ended.remove(request_id)
                    self._cut.discard(request_id)
                    self._finished.add(request_id)
                    self._wake()
            self._changed.notify_all()
