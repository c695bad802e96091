"""What this gateway knows of the workers, between their reports: the router's snapshots are made here.

The gateway counts its own requests the moment it sends them, so that a burst does not all go to the worker
that was idle in the last report. Reports bring what it cannot know: what steps take, and what other gateways
have sent.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from actors.messages import LoadReport, WorkerInfo
from actors.steps import PRIOR, StepModel
from deployments.costs import SHARE_DECAY_S
from deployments.estimates import Quantile
from deployments.prefixes import Prefixes, chain
from deployments.router import EXACT, Prediction, Route
from deployments.snapshot import COLUMNS, Ask, Link, Snapshot, WorkerState

KEPT_WEIGHT: Final = 0.2
LATE: Final = 0.1
"""A request that is behind its objective by this share of it is late whatever is done."""
LEAST_KEPT: Final = 0.1
FIXED_S: Final = 0.01
"""What a handover is taken to cost beside its bytes until some have been seen."""
FORGET_S: Final = 30.0
"""A pair that has handed nothing over for so long is taken to be like the others again: otherwise one that
was slow once would never be chosen, and never be seen to be fast."""


@dataclass(slots=True)
class _Job:
    """A request that this gateway has sent: where, and what it is counted for there."""

    prefill: int
    decode: int
    prompt: int
    cached: int
    tokens: int
    seconds: float
    context: float
    need: float
    output: float
    tpot_s: float | None
    predicted: Prediction | None
    waits: bool = True
    """Its prompt is not computed yet."""
    ahead: float = 0.0
    """Of all seconds of prompts ever sent to where it decodes, those before it."""
    made: int = 0
    """Tokens of its answer that have come."""
    first_at: float = 0.0
    """When the first did."""


class _Seen:
    """A worker: its latest report, and the sums over this gateway's requests there."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info, self.alive, self.leaving = info, True, False
        self.report: LoadReport | None = None
        self.tokens, self.seconds, self.context, self.need = 0.0, 0.0, 0.0, 0.0
        self.waiting = self.running = 0
        self.starting = 0
        """Of those that decode here, how many have no first token yet."""
        self.share, self.at, self.busy_since = 0.0, 0.0, 0.0
        self.kept = 1.0
        """Of what it was expected to have cached, how much it had."""
        self.sent = 0.0
        """Seconds of all prompts ever sent here."""
        self.writers: dict[str, _Job] = {}
        """Those that decode here or will, and have an objective of the time per token."""

    @property
    def step(self) -> StepModel:
        return self.report.step if self.report is not None else PRIOR

    def slack_s(self, now: float, step_s: float) -> float:
        """Return how long prompts may keep this worker from decoding until a request misses its objective.

        Prompts that wait here delay all that decodes already; a request that waits itself, only those that
        came after it. One that is late anyway does not count.
        """
        waiting = max(0.0, self.seconds - max(0.0, now - self.busy_since)) if self.waiting else 0.0
        chunk_s = self.step.prefill_s(self.info.chunk, 0)
        least = math.inf
        for job in self.writers.values():
            assert job.tpot_s is not None
            left, ends, delay = job.output - 1, job.tpot_s * (job.output - 1), waiting
            if job.made:
                left, ends = max(1.0, job.output - job.made), job.first_at + ends - now
            else:
                delay = min(waiting, self.sent - job.ahead)
            # Each of its steps computes a chunk of prompts at most.
            slack, most = ends - left * step_s, left * chunk_s
            if slack < most and delay < most and -LATE * job.tpot_s * job.output < slack - delay < least:
                least = slack - delay
        return max(0.0, least)

    def state(self, now: float) -> WorkerState:
        """Return what the router is told."""
        info, other = self.info, self.report.others if self.report is not None else None
        tokens, running, context = (other.tokens, other.running, other.context) if other else (0, 0, 0)
        return WorkerState(
            name=info.name,
            role=info.role,
            alive=self.alive and not self.leaving,
            waiting_tokens=self.tokens + tokens,
            waiting_s=self.seconds + self.step.prefill_s(tokens, 0),
            decoding=self.running - self.starting + running,
            running=self.running + running,
            context=self.context + context,
            free_tokens=info.kv_blocks * info.layout.block_size - self.need - context - tokens,
            slots=info.slots,
            chunk=info.chunk,
            share=self.share,
            busy_since=self.busy_since,
            at=self.at,
            step=self.step,
            slack_s=self.slack_s(now, self.step.decode_s(self.running + 1, self.context)),
        )


class Fleet:
    """The workers as seen from one gateway.

    Args:
        clock: seconds, monotonic.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: list[_Seen] = []
        self._index: dict[str, int] = {}
        self._jobs: dict[str, _Job] = {}
        self._states: list[WorkerState] = []
        self._table = np.zeros((COLUMNS, 0))
        self._stale: set[int] = set()
        self._links: dict[tuple[int, int], Link] = {}
        self._fixed: dict[tuple[int, int], Quantile] = {}
        self._handed: dict[tuple[int, int], float] = {}
        """When each of those pairs handed over last; and all handovers of the last seconds, oldest first."""
        self._recent: deque[tuple[float, tuple[int, int]]] = deque()
        self._turn = 0
        self.prefixes = Prefixes()
        self.block = 1
        self.kv_bytes = 0.0
        self.overhead = Quantile(0.5, 0.0, 0.0, 1.0)
        self.fixed = Quantile(0.5, FIXED_S, 0.0, 2.0)

    # -- workers ----------------------------------------------------------------------------------

    def add(self, info: WorkerInfo) -> None:
        """Know a worker, or know it anew after it came back."""
        if info.name in self._index:
            self.came(info)
            return
        self._index[info.name] = len(self._seen)
        self._stale.add(len(self._seen))
        self._seen.append(_Seen(info))
        self._states.append(self._seen[-1].state(self._clock()))
        self._table = np.concatenate([self._table, np.zeros((COLUMNS, 1))], axis=1)
        layout = info.layout
        self.block = max(self.block, layout.block_size)
        self.kv_bytes = layout.layers * layout.block_bytes / layout.block_size

    def came(self, info: WorkerInfo) -> None:
        """A worker is back, with nothing in its cache."""
        index = self._index[info.name]
        seen = self._seen[index]
        seen.info, seen.alive, seen.leaving = info, True, False
        self._stale.add(index)

    def leaves(self, name: str, leaving: bool) -> None:
        """A worker is to get no more requests, or gets some again; those that it has go on."""
        index = self._index[name]
        if self._seen[index].leaving != leaving:
            self._seen[index].leaving = leaving
            self._stale.add(index)

    def lost(self, name: str) -> None:
        """A worker is gone, and what it held."""
        index = self._index[name]
        seen = self._seen[index]
        seen.alive, seen.report, seen.share = False, None, 0.0
        self._stale.add(index)
        self.prefixes.forget(index)
        for pair in [pair for pair in self._fixed if index in pair]:
            self._forget(pair)

    def report(self, name: str, report: LoadReport) -> None:
        """A worker tells its state."""
        index = self._index[name]
        seen = self._seen[index]
        seen.report = report
        seen.info = replace(seen.info, role=report.role or seen.info.role)
        if len(self._states) > EXACT:  # now, not when a request waits for a decision among so many
            self._renew(index, self._clock())
        else:
            self._stale.add(index)
        for peer, rate in report.rates.items():
            if (other := self._index.get(peer)) is not None and rate > 0:
                self._links[index, other] = replace(self._links.get((index, other), self._link()), rate=rate)

    def _forget(self, pair: tuple[int, int]) -> None:
        """What handing over cost a pair says nothing of what it would now."""
        del self._fixed[pair], self._handed[pair]
        self._links[pair] = replace(self._links[pair], fixed_s=self.fixed.value)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._recent and now - self._recent[0][0] > FORGET_S:
            at, pair = self._recent.popleft()
            if self._handed.get(pair) == at:
                self._forget(pair)

    def _link(self) -> Link:
        return Link(self.fixed.value)

    def describe(self, name: str) -> dict[str, object]:
        """Return what is known of a worker, for people; the first two are this gateway's own requests."""
        seen = self._seen[self._index[name]]
        state = seen.state(self._clock())
        return {
            "prefill_tokens": round(seen.tokens),
            "running": seen.running,
            "queue_ms": round(state.queue_s(self._clock()) * 1e3, 1),
            "step_model": asdict(seen.step),
        }

    # -- one request ------------------------------------------------------------------------------

    def known(self, ask: Ask, tokens: list[int], salt: str = "") -> tuple[Ask, list[int]]:
        """Return a request with what is probably cached of its prompt, and the hashes of its blocks."""
        blocks = chain(tokens, self.block, salt)
        held = self.prefixes.held(blocks)
        self._turn += 1
        cached = {worker: int(depth * self.block * self._seen[worker].kept) for worker, depth in held.items()}
        return replace(ask, cached=cached, turn=self._turn), blocks

    def snapshot(self) -> Snapshot:
        """Return the workers as they are now; its table is ours, and good until they change."""
        self._forget_old()
        now = self._clock()
        for index in self._stale:
            self._renew(index, now)
        self._stale.clear()
        return Snapshot(
            workers=tuple(self._states),
            table=self._table,
            links=self._links,
            link=self._link(),
            kv_bytes=self.kv_bytes,
            overhead_s=self.overhead.value,
            now=now,
        )

    def _renew(self, index: int, now: float) -> None:
        state = self._states[index] = self._seen[index].state(now)
        self._table[:, index] = state.row()

    def placed(self, key: str, route: Route, ask: Ask, blocks: list[int]) -> None:
        """A request has been sent where the router said."""
        prefill, decode = self._index[route.prefill], self._index[route.decode]
        there, now = self._seen[prefill], self._clock()
        cached = min(ask.cached.get(prefill, 0), ask.prompt - 1)
        tokens = ask.prompt - cached
        job = self._jobs[key] = _Job(
            prefill,
            decode,
            ask.prompt,
            cached,
            tokens,
            there.step.prefill_s(tokens, cached),
            ask.prompt + ask.output / 2,
            ask.prompt + ask.output,
            ask.output,
            ask.slo.tpot_s,
            route.predicted,
        )
        if not there.waiting:
            there.busy_since = now
        there.waiting += 1
        there.tokens += job.tokens
        there.seconds += job.seconds
        there.share *= math.exp(-max(0.0, now - there.at) / SHARE_DECAY_S)
        there.share += job.seconds / SHARE_DECAY_S
        there.at = now
        writer = self._seen[decode]
        writer.running += 1
        writer.starting += 1
        writer.context += job.context
        writer.need += job.need
        there.sent += job.seconds
        job.ahead = writer.sent
        if job.tpot_s is not None and ask.output > 1:
            writer.writers[key] = job
        if decode != prefill:
            there.need += ask.prompt
        self.prefixes.add(blocks, prefill)
        if decode != prefill:
            self.prefixes.add(blocks, decode)
        self._stale |= {prefill, decode}

    def prefilled(self, key: str) -> None:
        """A request's prompt has been computed; its decoding goes on, or begins, elsewhere or there."""
        if (job := self._jobs.get(key)) is not None and job.waits:
            self._end_prefill(job)

    def cached(self, key: str, tokens: int) -> None:
        """The prefill engine said how much of the prompt it had; it evicts without telling."""
        if (job := self._jobs.get(key)) is not None and job.cached:
            there = self._seen[job.prefill]
            had = min(1.0, tokens / job.cached)
            there.kept = max(LEAST_KEPT, there.kept + KEPT_WEIGHT * (had - there.kept))

    def passed(self, key: str, tokens: int) -> None:
        """Tokens of a request's answer have come."""
        if (job := self._jobs.get(key)) is not None:
            if not job.made:
                job.first_at = self._clock()
            job.made += tokens

    def took(self, key: str, ttft_s: float) -> None:
        """A request's first token has come, so long after it was sent."""
        if (job := self._jobs.get(key)) is not None and job.predicted is not None:
            engines = job.predicted.ttft_s - job.predicted.parts["overhead"]
            self.overhead.saw(ttft_s - engines)

    def handed_over(self, key: str, gap_s: float) -> None:
        """The first token that decode wrote came so long after the one of prefill."""
        job = self._jobs.get(key)
        if job is None or job.predicted is None or job.prefill == job.decode:
            return
        pair = job.prefill, job.decode
        link = self._links.get(pair, self._link())
        parts = job.predicted.parts
        own = self._fixed.setdefault(pair, Quantile(0.5, self.fixed.value, 0.0, 2.0))
        beside = (
            gap_s - (parts["handover"] - link.fixed_s) - self._seen[job.decode].state(self._clock()).step_s
        )
        own.saw(beside)
        self.fixed.saw(beside)
        self._links[pair] = replace(link, fixed_s=own.value)
        self._handed[pair] = now = self._clock()
        self._recent.append((now, pair))

    def ended(self, key: str) -> None:
        """A request is over, however."""
        if (job := self._jobs.pop(key, None)) is None:
            return
        if job.waits:
            self._end_prefill(job)
        writer = self._seen[job.decode]
        writer.writers.pop(key, None)
        writer.running -= 1
        writer.context -= job.context
        writer.need -= job.need
        self._stale.add(job.decode)

    def _end_prefill(self, job: _Job) -> None:
        there, writer = self._seen[job.prefill], self._seen[job.decode]
        job.waits = False
        there.waiting -= 1
        there.busy_since = self._clock()
        there.tokens -= job.tokens
        there.seconds -= job.seconds
        writer.starting -= 1
        if job.decode != job.prefill:
            there.need -= job.prompt
        self._stale |= {job.prefill, job.decode}
