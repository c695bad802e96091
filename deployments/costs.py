"""What the ways that a request could take would cost, as predicted: docs/router.md has the formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from deployments.refusals import NoWorker
from deployments.snapshot import MOST_SHARE, Ask, Snapshot, WorkerState
from deployments.split import Mode

SHARE_DECAY_S: Final = 3.0
"""Time constant of the share of a worker's time that prompts take."""
LATE_FROM: Final = 0.8
"""From this share of an objective on, being later costs more ..."""
LATE_COST: Final = 20.0
"""... by this factor."""
MISSED: Final = 5.0
"""What missing an objective costs, in shares of it."""
SPENT: Final = 2.0
"""What using up all the delay that a worker's requests can bear costs, in shares of an objective."""
SURE: Final = 0.9
"""Of that delay, and of an objective of the time per token, as much may be used: both are predicted."""
FEW_PAIRS: Final = 4
ROUNDING: Final = 1e-9
MISSES, NO_ROOM = 1, 2
"""What may be wrong with a pair: a missed objective and, which is worse, no room; added where it is both."""


class Way(NamedTuple):
    """Workers, whether one is full, what it costs, whether objectives are met; times in seconds."""

    prefill: int
    decode: int
    full: bool
    cost: float
    meets: bool
    ttft: float
    tpot: float
    handover: float


def rank(way: Way, cost: float = 1.0) -> tuple[bool, bool, float]:
    """What room and the objectives allow comes first, then what costs least; ``cost`` is a factor."""
    return way.full, not way.meets, way.cost * cost


class _Fill(NamedTuple):
    """A prompt's computation on a worker.

    Attributes:
        queue: seconds until it begins.
        own: seconds that it takes.
        steps: the steps it is in.
        added: what it adds to those steps, by which all that decode there are delayed.
        harm: what that costs.
        meets: whether the objectives of those are still met.
        full: whether there is no room for it.

    """

    queue: float
    own: float
    steps: int
    added: float
    harm: float
    meets: bool
    full: bool


class _Write(NamedTuple):
    """An answer on a worker.

    Attributes:
        room: seconds until there is room.
        step: seconds per token where no prompt comes between.
        tpot: seconds per token, with as many prompts as of late.
        crowd: seconds by which it makes others' answers longer.
        risk: how probably prompts that are computed meanwhile make it miss its objective.

    """

    room: float
    step: float
    tpot: float
    crowd: float
    risk: float = 0.0


class Costs:
    """What the ways of one request take, each part computed once."""

    def __init__(self, snapshot: Snapshot, ask: Ask) -> None:
        self._of, self._ask = snapshot, ask
        self._length = max(1.0, ask.output - 1)
        self._fills: dict[int, _Fill] = {}
        self._writes: dict[int, _Write] = {}

    def nobody(self) -> list[int]:
        """Raise ``NoWorker``."""
        raise NoWorker(f"none of the {len(self._of.workers)} workers is alive; see `handoff status`")

    def alone(self, index: int) -> Way:
        """Return the way of running all of it on one worker."""
        fill = self._fill(index)
        write = _Write(0.0, 0.0, 0.0, 0.0) if self._ask.one_token else self._write(index)
        ttft = self._of.overhead_s + fill.queue + write.room + fill.own
        if self._ask.slo.tpot_s is not None:
            # Prompts that come while it waits are computed when it writes.
            worker = self._of.workers[index]
            risk = self._risk(worker, worker.step_s, fill.queue + fill.own)
            write = write._replace(risk=risk)
        return self._weigh(index, index, fill, write, ttft, write.tpot, 0.0)

    def pair(self, prefill: int, decode: int) -> Way:
        """Return the way of dividing it."""
        fill, write, ask = self._fill(prefill), self._write(decode), self._ask
        link = self._of.links.get((prefill, decode), self._of.link)
        tokens = max(0, ask.prompt - ask.cached.get(decode, 0))
        # Chunks leave while later ones are computed: left at the end is the last one, or a slow link's lag.
        s_per_token = self._of.kv_bytes / link.rate
        last = min(tokens, self._of.workers[prefill].chunk) * s_per_token
        lag = tokens * s_per_token - fill.own * (fill.steps - 1) / fill.steps
        handover = link.fixed_s + max(last, lag) + write.room
        ttft, tpot = self._of.overhead_s + fill.queue + fill.own, write.tpot
        if ask.mode is Mode.DECODE_SAMPLES:
            ttft += handover + tpot
        else:
            tpot += handover / self._length
        return self._weigh(prefill, decode, fill, write, ttft, tpot, handover)

    def best_pair(self, prefills: Sequence[int], decodes: Sequence[int]) -> Way:
        """Return the best way of dividing it; the first of equals.

        A pair costs at least what its two halves do, and sending the last chunk between them: the ones whose
        halves cost least are looked at first, and others only as long as they could be better.
        """
        if len(prefills) * len(decodes) <= FEW_PAIRS:
            return min((self.pair(p, d) for p in prefills for d in decodes), key=rank)
        ask, of = self._ask, self._of
        fills, writes = [], []
        for place, p in enumerate(prefills):
            fill = self._fill(p)
            wrong = NO_ROOM * fill.full + MISSES * (not fill.meets)
            fills.append((wrong, self._of_filling(fill), place * len(decodes), p, of.workers[p].chunk))
        for place, d in enumerate(decodes):
            write, tokens = self._write(d), max(0, ask.prompt - ask.cached.get(d, 0))
            writes.append((write.room > 0, self._of_writing(write), place, d, tokens * of.kv_bytes))
        fills.sort()
        writes.sort()
        second = self._of_a_second_more()
        least, cheapest, first = NO_ROOM + MISSES, math.inf, 0
        taken: Way | None = None
        for fill_wrong, filling, row, p, chunk in fills:
            for no_room, writing, column, d, nbytes in writes:
                wrong = fill_wrong | NO_ROOM if no_room else fill_wrong
                if wrong > least:
                    continue
                if wrong == least:
                    link = of.links.get((p, d), of.link)
                    sending = link.fixed_s + min(nbytes, chunk * of.kv_bytes) / link.rate
                    if (filling + writing + second * sending) * (1 - ROUNDING) > cheapest:
                        continue
                way = self.pair(p, d)
                found = NO_ROOM * way.full + MISSES * (not way.meets)
                if taken is None or (found, way.cost, row + column) < (least, cheapest, first):
                    least, cheapest, first, taken = found, way.cost, row + column, way
        assert taken is not None
        return taken

    def parts(self, way: Way) -> dict[str, float]:
        """Return the seconds that a way is made of, by the names of docs/router.md."""
        fill = self._fill(way.prefill)
        write = self._writes.get(way.decode, _Write(0.0, 0.0, 0.0, 0.0))
        waits = write.room if way.prefill == way.decode else 0.0
        return {
            "overhead": self._of.overhead_s,
            "queue": fill.queue + waits,
            "prefill": fill.own,
            "handover": way.handover,
            "others": self.others(way),
        }

    def others(self, way: Way) -> float:
        """Return the seconds by which those that decode there are delayed, all together."""
        write = self._writes.get(way.decode)
        delayed = self._of.workers[way.prefill].decoding * self._fill(way.prefill).added
        return delayed if write is None else delayed + write.crowd

    def _weigh(
        self, prefill: int, decode: int, fill: _Fill, write: _Write, ttft: float, tpot: float, handover: float
    ) -> Way:
        """Weigh what a request gets and what it costs those that decode where it goes.

        Without objectives: the seconds by which the request's end, and those of the others, are delayed. With
        them, each time counts as a share of its objective, and being late counts much more.
        """
        slo, length = self._ask.slo, self._length
        cost = _value(ttft, slo.ttft_s, 1.0) + _value(tpot, slo.tpot_s, length) + fill.harm
        cost += self._crowding(write) + MISSED * write.risk
        # Prompts that come later are let in only while this answer can bear them: no reason to refuse it.
        least = write.step + (tpot - write.tpot)
        meets = fill.meets and _within(ttft, slo.ttft_s) and _within(least / SURE, slo.tpot_s)
        return Way(prefill, decode, fill.full or write.room > 0, cost, meets, ttft, tpot, handover)

    def _of_filling(self, fill: _Fill) -> float:
        """Return what a pair costs at least because of its prefill worker; see ``_weigh``."""
        return _value(self._of.overhead_s + fill.queue + fill.own, self._ask.slo.ttft_s, 1.0) + fill.harm

    def _of_writing(self, write: _Write) -> float:
        """Return what a pair costs at least because of its decode worker; see ``_weigh``."""
        tpot = _value(write.tpot, self._ask.slo.tpot_s, self._length)
        return tpot + self._crowding(write) + MISSED * write.risk

    def _of_a_second_more(self) -> float:
        """Return what a second more of a handover costs at least; see ``_weigh``."""
        slo = self._ask.slo
        if self._ask.mode is Mode.DECODE_SAMPLES:
            return 1.0 if slo.ttft_s is None else 1 / slo.ttft_s
        return 1.0 if slo.tpot_s is None else 1 / (self._length * slo.tpot_s)

    def _crowding(self, write: _Write) -> float:
        objective = self._ask.slo.tpot_s
        return write.crowd if objective is None else write.crowd / self._length / objective

    def _fill(self, index: int) -> _Fill:
        if (known := self._fills.get(index)) is not None:
            return known
        ask, worker, objective = self._ask, self._of.workers[index], self._ask.slo.tpot_s
        cached = min(ask.cached.get(index, 0), ask.prompt - 1)
        tokens = ask.prompt - cached
        added, steps, step_s = (
            worker.step.prefill_s(tokens, cached),
            -(-tokens // worker.chunk),
            worker.step_s,
        )
        harm, meets = worker.decoding * added, True
        if objective is not None:
            used = added / worker.slack_s if worker.slack_s > 0 else math.inf
            harm, meets = SPENT * min(1.0, used), used <= SURE
        full = worker.running >= worker.slots or worker.free_tokens < ask.prompt
        queue = worker.queue_s(self._of.now)
        found = self._fills[index] = _Fill(queue, added + steps * step_s, steps, added, harm, meets, full)
        return found

    def _write(self, index: int) -> _Write:
        if (known := self._writes.get(index)) is not None:
            return known
        ask, worker = self._ask, self._of.workers[index]
        context, running = ask.prompt + ask.output / 2, worker.running
        step_s = worker.step.decode_s(running + 1, worker.context + context)
        tpot = step_s / (1 - min(MOST_SHARE, self._share(worker)))
        crowd = running * (worker.step.sequence + worker.step.context * context) * ask.output
        missing = ask.prompt + ask.output - ask.cached.get(index, 0) - worker.free_tokens
        too_many, room = running + 1 - worker.slots, 0.0
        if missing > 0:
            each = max(1.0, worker.context / max(1, running))
            too_many = max(too_many, math.ceil(missing / each))
        if too_many > 0:
            # They end one after the other, one in each such part of the time that an answer takes.
            room = too_many * tpot * ask.output / max(1, running)
        risk = 0.0 if ask.slo.tpot_s is None else self._risk(worker, step_s)
        found = self._writes[index] = _Write(room, step_s, tpot, crowd, risk)
        return found

    def _risk(self, worker: WorkerState, step_s: float, waits: float = 0.0) -> float:
        """Return how probably the answer is stalled beyond its objective by prompts that are still to come.

        They are taken to come at random, as long as the present one, at the rate that gives the worker's
        ``share``; those that come while it waits and is written must be more than it can bear.
        """
        objective = self._ask.slo.tpot_s
        if objective is None:
            return 0.0
        unit = worker.step.prefill_s(self._ask.prompt, 0)
        share = min(MOST_SHARE, self._share(worker))
        expected = share / (1 - share) * (waits + self._length * step_s) / unit
        return _poisson_tail(math.ceil((objective - step_s) * self._length / unit), expected)

    def _share(self, worker: WorkerState) -> float:
        if not worker.share:
            return 0.0
        return worker.share * math.exp(-max(0.0, self._of.now - worker.at) / SHARE_DECAY_S)


def _poisson_tail(least: int, mean: float) -> float:
    """Return the probability of ``least`` or more events where ``mean`` are expected."""
    if least <= 0:
        return 1.0
    if least > 2 * mean + 12:
        return 0.0
    term = below = math.exp(-mean)
    for i in range(1, least):
        term *= mean / i
        below += term
    return max(0.0, 1 - below)


def _value(seconds: float, objective: float | None, weight: float) -> float:
    if objective is None:
        return seconds * weight
    share = seconds / objective
    return share + LATE_COST * max(0.0, share - LATE_FROM)


def _within(seconds: float, objective: float | None) -> bool:
    return objective is None or seconds <= objective
