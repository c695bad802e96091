"""A prompt's beginning comes out of the bucket's tier, if somebody has computed it and that is faster.

vLLM asks before it schedules a request how much of its KV comes from elsewhere. The first time, the tier is
asked in a thread; until it has answered, the request waits, and the engine goes on with others. What is
found is loaded into the blocks that vLLM then allocates, and the engine computes the rest. All of it is
bounded: asking and loading together take no longer than computing would, by much. Whatever goes wrong
(nothing is there, it is damaged, the store is slow or down), the engine computes.

A store that did not answer in time is not asked again until a probe has passed (``kv/ladder.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.loading import Loader
from actors.messages import Recalled
from actors.steps import Meter
from kv.bucket import Bucket
from kv.chunk import ChunkHeader, KVLayout, Run
from kv.errors import ChunkCorrupt, Gone, KVError, LayoutMismatch, TransferTimeout
from kv.ladder import PRIORS, PROBE_SIZES, Ladder, cause_of
from kv.paged import PagedCache
from kv.s3 import S3Transport
from kv.tier import KVTier

logger = logging.getLogger(__name__)

RUNG: Final = "tier"
THREADS: Final = 8
"""Requests that ask or load at once; others wait, and their time runs."""
ASK_S: Final = (0.25, 2.0)
"""The tier is asked for as long as computing would take, within these bounds."""
LOAD_SLACK_S: Final = 1.0
"""A load may take so much longer than computing would."""
UNMEASURED_S: Final = 5.0
"""What computing a prompt is taken to need before the engine has computed any."""
PROBE_S: Final = 5.0
KEPT: Final = 4096
"""Of so many requests is remembered what was loaded for them, if nobody asks."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the tier holds of a prompt.

    Attributes:
        tier: of the layout that holds most of it.
        keys: of its pages, from token 0.
        start: the engine had the tokens before this one when it asked; they were not looked for.
        end: one past the last token that is worth loading; ``start`` if there is none.
        reason: why, for people.

    """

    tier: KVTier
    keys: Sequence[bytes]
    start: int
    end: int
    reason: str


@dataclass(slots=True)
class _Asked:
    """A request that asked. Guarded by the lock."""

    compute_s: float | None
    found: Found | None = None
    wanted: bool = True


class Recall:
    """Finds and loads KV in the tier for one engine.

    Args:
        bucket: that holds it; stays the caller's.
        layout: the engine's.
        cache: its paged cache.
        meter: of the engine's steps, which tell what computing takes.
        wake: wakes the engine loop.

    ``ask``, ``answer``, ``load``, ``take_finished`` and ``forget`` are called by the engine thread.

    """

    def __init__(
        self, bucket: Bucket, layout: KVLayout, cache: PagedCache, meter: Meter, wake: Callable[[], None]
    ) -> None:
        self._bucket, self._layout, self._cache, self._wake = bucket, layout, cache, wake
        self._meter = meter
        self._loader = Loader(cache, layout, _nothing)
        self.tiers = [KVTier(bucket, layout)]
        """Of this engine's layout, and of others that can be converted."""
        self._ladder = Ladder({RUNG: PRIORS["s3"]})
        self._probes = S3Transport(bucket)
        self._asked: dict[str, _Asked] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._recalled: OrderedDict[str, Recalled] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "kv-recall")

    def learn(self, layout: KVLayout) -> None:
        """Other workers keep KV in this layout: look for theirs as well, if it can be converted."""
        if any(tier.layout == layout for tier in self.tiers):
            return
        try:
            self._layout.require_compatible(layout)
        except LayoutMismatch:
            return
        self.tiers.append(KVTier(self._bucket, layout))

    # -- engine thread --------------------------------------------------------------------------

    def ask(self, request_id: str, tokens: Sequence[int], salt: bytes, computed: int) -> bool:
        """Ask for a request of which the engine has ``computed`` tokens. Return whether there is any point.

        If so, ``answer`` will have something to say, soon, and ``forget`` must be called in the end.
        """
        most, page = self._most(len(tokens)), min(tier.page_tokens for tier in self.tiers)
        gain = min(most, len(tokens) // page * page) - computed
        if gain <= 0:
            return False
        compute_s = self._compute_s(computed, computed + gain)
        with self._lock:
            load_s = self._ladder.estimate_s(RUNG, self._nbytes(gain), time.monotonic())
            if load_s >= (UNMEASURED_S if compute_s is None else compute_s):
                self.counts["slower"] += 1
                return False
            asked = self._asked[request_id] = _Asked(compute_s)
        low, high = ASK_S
        deadline = time.monotonic() + max(low, min(high, compute_s or high))
        self._pool.submit(self._look, asked, list(tokens), salt, computed, deadline)
        return True

    def asked(self, request_id: str) -> bool:
        """Return whether the tier was asked for a request."""
        return request_id in self._asked

    def answer(self, request_id: str) -> Found | None:
        """Return what was found, None as long as that is not known."""
        return self._asked[request_id].found

    def load(self, request_id: str, blocks: Sequence[int], tokens: tuple[int, int]) -> None:
        """Blocks are allocated: fill them with what was found for this half-open range of tokens.

        ``take_finished`` reports when nothing writes to them any more.
        """
        asked = self._asked.get(request_id)
        compute_s = UNMEASURED_S if asked is None or asked.compute_s is None else asked.compute_s
        deadline = time.monotonic() + compute_s + LOAD_SLACK_S
        self._pool.submit(self._load, request_id, asked, blocks, tokens, deadline)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return requests whose loads are over, each once, and those of them that failed."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        return finished, failed

    def forget(self, request_id: str) -> None:
        """The engine is done with a request. A load that is under way ends by itself, and is reported."""
        with self._lock:
            if (asked := self._asked.pop(request_id, None)) is not None:
                asked.wanted = False

    # -- any thread -----------------------------------------------------------------------------

    def recalled(self, request_id: str) -> Recalled | None:
        """Return what was loaded for a request, if something was, once; also after ``forget``."""
        with self._lock:
            return self._recalled.pop(request_id, None)

    def sweep(self) -> None:
        """Probe the store if that is due. Called a few times a second; never blocks."""
        with self._lock:
            due = self._ladder.due(time.monotonic())
        if due:
            self._pool.submit(self._probe)

    def close(self) -> None:
        """Stop; loads under way end by their own deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._probes.close()

    # -- pool threads ---------------------------------------------------------------------------

    def _look(
        self, asked: _Asked, tokens: Sequence[int], salt: bytes, computed: int, deadline: float
    ) -> None:
        own = self.tiers[0]
        found = Found(own, (), computed, computed, "nothing is there")
        try:
            for tier in self.tiers:
                found = max(found, self._find(tier, tokens, salt, computed, deadline), key=_end)
                if found.end >= self._most(len(tokens)):
                    break
            if found.end > computed:
                found = self._weighed(found)
            else:
                self.counts["misses"] += 1
        except Exception as error:
            found = Found(own, (), computed, computed, _said(error))
            if asked.wanted:  # whoever is gone did not wait for long
                self._broke("asking", error)
        with self._lock:
            asked.found = found
        self._wake()

    def _find(
        self, tier: KVTier, tokens: Sequence[int], salt: bytes, computed: int, deadline: float
    ) -> Found:
        skipped = computed // tier.page_tokens
        keys = tier.keys(tokens, salt)
        if (left := deadline - time.monotonic()) <= 0:
            raise TransferTimeout("the tier was not asked in time: other requests are at it")
        count = tier.has(keys[skipped:], left)
        end = min((skipped + count) * tier.page_tokens, self._most(len(tokens)))
        end -= end % self._layout.block_size
        return Found(tier, keys, computed, max(computed, end), "")

    def _weighed(self, found: Found) -> Found:
        """Return what was found with the reason to load it; or with nothing to load."""
        size = found.tier.page_tokens
        nbytes = (-(-found.end // size) - found.start // size) * found.tier.page_nbytes
        compute_s = self._compute_s(found.start, found.end)
        with self._lock:
            load_s = self._ladder.estimate_s(RUNG, nbytes, time.monotonic())
        computing = "not measured" if compute_s is None else f"{compute_s * 1e3:.1f} ms"
        reason = f"for {nbytes / 1e6:.1f} MB: tier {load_s * 1e3:.1f} ms, computing {computing}"
        worth = compute_s is None or load_s < compute_s
        self.counts["hits" if worth else "slower"] += 1
        return Found(found.tier, found.keys, found.start, found.end if worth else found.start, reason)

    def _load(
        self,
        request_id: str,
        asked: _Asked | None,
        blocks: Sequence[int],
        tokens: tuple[int, int],
        deadline: float,
    ) -> None:
        failed = True
        try:
            if asked is not None and asked.wanted and asked.found is not None:
                recalled = self._fetch(request_id, asked.found, blocks, tokens, deadline)
                failed = False
                with self._lock:
                    self._recalled[request_id] = recalled
                    while len(self._recalled) > KEPT:
                        self._recalled.popitem(last=False)
        except Exception as error:
            logger.warning("request %s: %d tokens are computed: %s", request_id, tokens[1], _said(error))
            if isinstance(error, ChunkCorrupt | Gone):  # the store is sound
                self.counts["corrupt" if isinstance(error, ChunkCorrupt) else "gone"] += 1
            else:
                self._broke("loading", error)
        with self._lock:
            self._finished.add(request_id)
            if failed:
                self._failed.add(request_id)
        self._wake()

    def _fetch(
        self,
        request_id: str,
        found: Found,
        blocks: Sequence[int],
        tokens: tuple[int, int],
        deadline: float,
    ) -> Recalled:
        began = time.monotonic()
        tier, size = found.tier, found.tier.page_tokens
        pages = range(tokens[0] // size, -(-tokens[1] // size))
        # What is converted is fetched to memory that each thread has once, so page by page.
        batch = len(pages) if tier.layout == self._layout else 1
        for start in range(0, len(pages), batch):
            some = pages[start : start + batch]
            landings = [
                self._loader.landing(_header(request_id, tier, page), blocks, tokens) for page in some
            ]
            left = max(0.0, deadline - time.monotonic())
            tier.load([found.keys[page] for page in some], [landing.into for landing in landings], left)
            for landing in landings:
                landing.settle()
        seconds, nbytes = time.monotonic() - began, len(pages) * tier.page_nbytes
        count = tokens[1] - tokens[0]
        with self._lock:
            self._ladder.took(RUNG, nbytes, seconds, time.monotonic())
            self.counts["loaded_bytes"] += nbytes
            self.counts["loaded_tokens"] += count
        logger.info(
            "request %s: KV of %d tokens came from the tier in %.1f ms: %s",
            request_id,
            count,
            seconds * 1e3,
            found.reason,
        )
        return Recalled(count, nbytes, found.reason)

    def _broke(self, doing: str, error: Exception) -> None:
        with self._lock:
            self.counts["failures"] += 1
            sound = self._ladder.broke(RUNG, cause_of(error), time.monotonic())
        if sound:
            logger.warning("the tier is not used for now: %s it failed: %s", doing, _said(error))

    def _probe(self) -> None:
        """Measure the store: write two payloads, read them, delete them."""
        payload: Run = np.zeros(max(PROBE_SIZES), np.uint8)
        seconds = []
        try:
            for size in PROBE_SIZES:
                ticket = self._probes.publish([payload[:size]], _done)
                try:
                    began = time.monotonic()
                    self._probes.fetch(ticket, [payload[:size]], PROBE_S)
                    seconds.append(time.monotonic() - began)
                finally:
                    self._probes.release(ticket)
        except Exception as error:
            with self._lock:
                self._ladder.probe_failed(RUNG, cause_of(error), time.monotonic())
            logger.warning("the tier is not used: a probe failed: %s", _said(error))
            return
        with self._lock:
            self._ladder.probed(RUNG, seconds, time.monotonic())
        logger.info("the tier is sound: %s s for %s bytes", seconds, PROBE_SIZES)

    def _compute_s(self, start: int, end: int) -> float | None:
        """Return what computing these tokens would take; None if nothing was measured yet."""
        return self._meter.model().prefill_s(end - start, start) if self._meter.measured else None

    def _most(self, tokens: int) -> int:
        """Return how many tokens of a request can come from elsewhere: whole blocks, and not its last one."""
        return (tokens - 1) // self._layout.block_size * self._layout.block_size

    def _nbytes(self, tokens: int) -> int:
        return tokens * self._layout.layers * self._layout.block_bytes // self._layout.block_size


def _header(request_id: str, tier: KVTier, page: int) -> ChunkHeader:
    """Return a page as a chunk; its checksums are the tier's affair."""
    tokens = (page * tier.page_tokens, (page + 1) * tier.page_tokens)
    layout = tier.layout
    return ChunkHeader(request_id, layout, page, tokens, (0, layout.layers), (), tier.page_nbytes)


def _end(found: Found) -> int:
    return found.end


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, KVError) else repr(error)


def _nothing(memory: Sequence[Run]) -> None:
    pass


def _done() -> None:
    pass
