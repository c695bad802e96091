"""Where a request runs, and whether its prompt is computed there: a pure function over a snapshot.

For every way there is, the time to first token, the time per token and the delay that it brings to requests
which decode already are predicted from measured costs (docs/router.md); the cheapest way is taken. Hundreds
of workers are first reduced to a few by bounds that are computed for all of them at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from actors.messages import Role
from actors.steps import PRIOR, StepModel
from deployments.errors import NoWorker
from deployments.split import Mode

Policy = Literal["adaptive", "always", "never", "replicas"]
POLICIES: Final[tuple[Policy, ...]] = ("adaptive", "always", "never", "replicas")

EXACT: Final = 6
"""Up to so many workers, every way is looked at."""
SHORTLIST: Final = 3
"""Of more workers, the best of each kind."""
HOLDERS: Final = 2
"""And those that hold most of the prompt's prefix."""
LONGER_THAN_ANY_QUEUE_S: Final = 1e6
SHARE_DECAY_S: Final = 3.0
"""Time constant of the share of a worker's time that prompts take."""
MOST_SHARE: Final = 0.9
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
FULL: Final = 1e3
"""Stands in a bound for having no room."""
GAIN: Final = 0.05
"""A handover must be better by this share: what it costs beside time, and what a prediction is off by."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in seconds; None: there is none."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_SLO: Final = Slo()


@dataclass(frozen=True, slots=True)
class Link:
    """From one worker to another: what handing over takes, whatever the size, and bytes per second."""

    fixed_s: float = 0.01
    rate: float = 1e9


UNMEASURED: Final = Link()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What is known of a worker.

    Attributes:
        name: the worker.
        role: what it is for first; every worker can do both.
        alive: whether its output stream is up.
        waiting_tokens: prompt tokens that were sent there and are not computed yet.
        waiting_s: what they add to the steps that compute them.
        decoding: sequences that decode now.
        running: sequences that decode there now or will, all that were sent there and have not ended.
        context: tokens in the context of those.
        free_tokens: room in its KV cache, beyond what those that were sent there will need.
        slots: sequences that its scheduler runs at once.
        chunk: tokens that a step computes at most.
        share: of its time, that prompts take (0 to 1), some seconds' mean, as of ``at``.
        busy_since: when it began to compute the first of the prompts that wait.
        at: when this was written, on the snapshot's clock.
        step: what its steps take.
        slack_s: for how long prompts may keep it from decoding until a request there misses its objective.

    """

    name: str
    role: Role
    alive: bool = True
    waiting_tokens: float = 0.0
    waiting_s: float = 0.0
    decoding: int = 0
    running: int = 0
    context: float = 0.0
    free_tokens: float = 1e9
    slots: int = 256
    chunk: int = 2048
    share: float = 0.0
    busy_since: float = 0.0
    at: float = 0.0
    step: StepModel = PRIOR
    slack_s: float = math.inf

    @property
    def step_s(self) -> float:
        """What its present sequences make of a step."""
        return self.step.decode_s(self.decoding, self.context * self.decoding / max(1, self.running))

    def queue_s(self, now: float) -> float:
        """Return how long the prompts that wait there will take, less what it has done of them."""
        if self.waiting_tokens <= 0 and not self.decoding:
            return 0.0
        step_s = self.step_s
        if self.waiting_tokens <= 0:
            return step_s / 2  # the step that is under way
        whole = self.waiting_s + self.waiting_tokens / self.chunk * step_s
        return max(whole * 0.05, whole - max(0.0, now - self.busy_since))

    def row(self) -> tuple[float, ...]:
        """What bounds for many workers are computed from at once; see ``_candidates``."""
        dead = 0.0 if self.alive else math.inf
        running, step, step_s = self.running, self.step, self.step_s
        room = running < self.slots and self.free_tokens > 0
        felt = 1 + self.decoding
        after = step.decode_s(running + 1, self.context)
        return (
            dead + self.queue_s(self.at),
            (step_s / self.chunk + step.token) * felt,
            step.token_context / 2 * felt,
            after / (1 - min(MOST_SHARE, self.share)) + running * step.sequence,
            running * step.context,
            dead + (0.0 if room else FULL),
            0.0 if self.role == "prefill" else math.inf,
            0.0 if self.role == "decode" else math.inf,
        )


COLUMNS: Final = 8


@dataclass(frozen=True)
class Snapshot:
    """The workers and the ways between them at one moment.

    Attributes:
        workers: in any order; they are referred to by their place here.
        table: ``row()`` of each, ``[columns, workers]``; read-only.
        links: by (prefill worker, decode worker); those that are missing are like ``link``.
        link: of a pair that has not been measured.
        kv_bytes: of one token's KV.
        overhead_s: of every request, beside what the engines do.
        now: the moment, on the clock of the workers' ``at``.

    """

    workers: Sequence[WorkerState]
    table: Array
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    link: Link = UNMEASURED
    kv_bytes: float = 0.0
    overhead_s: float = 0.0
    now: float = 0.0

    @classmethod
    def of(cls, workers: Sequence[WorkerState], **others: object) -> Snapshot:
        """Return a snapshot of workers, with its table made from them."""
        table = np.array([worker.row() for worker in workers], np.float64).reshape(-1, COLUMNS).T.copy()
        return cls(tuple(workers), table, **others)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be routed.

    Attributes:
        prompt: its tokens.
        output: tokens that its answer is expected to have.
        mode: how it can be divided without changing its result.
        why: why that is so, for people.
        cached: tokens of the prompt whose KV a worker holds, by the worker's place in the snapshot.
        one_token: it is all prefill.
        must_divide: one engine could not run it alone.
        slo: what it should meet.
        turn: counts requests, for taking turns.

    """

    prompt: int
    output: float
    mode: Mode
    why: str = ""
    cached: Mapping[int, int] = field(default_factory=dict)
    one_token: bool = False
    must_divide: bool = False
    slo: Slo = NO_SLO
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a way is expected to take, in seconds; the names of ``parts`` are those of docs/router.md."""

    ttft_s: float
    tpot_s: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. ``prefill`` equals ``decode`` for an undivided request.

    Attributes:
        prefill: the worker that computes the prompt.
        decode: the worker that writes the answer.
        mode: how it is divided.
        reason: for people.
        cause: the same in a word or two: a label with few values.
        predicted: what it is expected to take; None where nobody asked.
        meets: whether the objectives are met, as predicted.

    """

    prefill: str
    decode: str
    mode: Mode
    reason: str
    cause: str = ""
    predicted: Prediction | None = None
    meets: bool = True


class _Way(NamedTuple):
    """Workers, whether one is full, what it costs, whether objectives are met; times in seconds."""

    prefill: int
    decode: int
    full: bool
    cost: float
    meets: bool
    ttft: float
    tpot: float
    handover: float


def route(snapshot: Snapshot, ask: Ask, policy: Policy = "adaptive") -> Route:
    """Choose where a request goes.

    ``always`` divides whatever can be divided, ``never`` divides nothing, ``replicas`` does not either and
    takes the workers in turn, as a plain load balancer would. What cannot be divided runs on a decode worker
    under ``always`` (on a prefill worker if it is one token), else on any.

    Raises:
        NoWorker: none is alive.

    """
    costs = _Costs(snapshot, ask)
    if policy == "replicas":
        alive = [i for i, worker in enumerate(snapshot.workers) if worker.alive] or costs.nobody()
        return costs.told(costs.alone(alive[ask.turn % len(alive)]), "turn", "in turn")
    alone, prefills, decodes = _candidates(snapshot, ask)
    if not alone:
        costs.nobody()
    divisible = ask.mode is not Mode.UNDIVIDED and policy != "never"
    if divisible or policy == "always":
        for role, found in (("prefill", prefills), ("decode", decodes)):
            if not found:
                best = min(map(costs.alone, alone), key=_rank)
                return costs.told(best, f"no {role}", f"no {role} worker is alive")
    if not divisible:
        if policy == "always":
            alone = prefills if ask.one_token else decodes
        best = min(map(costs.alone, alone), key=_rank)
        if ask.mode is Mode.UNDIVIDED:
            return costs.told(best, "not divisible", ask.why)
        return costs.told(best, "never", "as configured")
    pair = costs.best_pair(prefills, decodes)
    if policy == "always" or ask.must_divide:
        return costs.told(pair, "always", ask.why)
    single = min(map(costs.alone, alone), key=_rank)
    if _rank(single) <= _rank(pair, 1 + GAIN):
        return costs.told(single, "undivided is faster", costs.compared(single, pair))
    return costs.told(pair, "handover is faster", costs.compared(pair, single))


def _rank(way: _Way, cost: float = 1.0) -> tuple[bool, bool, float]:
    """What room and the objectives allow comes first, then what costs least; ``cost`` is a factor."""
    return way.full, not way.meets, way.cost * cost


# -- which workers are looked at ----------------------------------------------------------------------


def _candidates(snapshot: Snapshot, ask: Ask) -> tuple[list[int], list[int], list[int]]:
    """Return workers that could run all of it, prefill workers and decode workers, alive, the likely best.

    In an order in which the first of equals is the one to take.
    """
    workers = snapshot.workers
    if len(workers) <= EXACT:
        alive = [i for i, worker in enumerate(workers) if worker.alive]
        prefills = [i for i in alive if workers[i].role == "prefill"]
        decodes = [i for i in alive if workers[i].role == "decode"]
        return decodes + prefills, prefills, decodes
    held, length = _holders(snapshot, ask), max(1.0, ask.output - 1)
    queue, token, square, step, crowd, room, not_prefill, not_decode = snapshot.table
    delay = queue + (token + square * ask.prompt) * ask.prompt
    write = (step + crowd * ask.prompt) * length + room
    return _few(delay + write, held), _few(delay + not_prefill, held), _few(write + not_decode, held)


def _few(cost: Array, held: Sequence[int]) -> list[int]:
    """Return the workers of least cost, and holders of the prefix; none whose cost is infinite."""
    left, found = cost.copy(), []
    for _ in range(SHORTLIST):  # faster than a partition
        found.append(int(left.argmin()))
        left[found[-1]] = math.inf
    return [i for i in dict.fromkeys([*found, *held]) if cost[i] < math.inf]


def _holders(snapshot: Snapshot, ask: Ask) -> list[int]:
    """Return those that hold most of the prompt; of equals, those with the shortest queue."""
    if len(ask.cached) <= HOLDERS:
        return list(ask.cached)
    holders = np.fromiter(ask.cached, np.intp, len(ask.cached))
    missing = ask.prompt - np.fromiter(ask.cached.values(), np.float64, len(ask.cached))
    score = missing * LONGER_THAN_ANY_QUEUE_S + snapshot.table[0, holders]
    found = []
    for _ in range(HOLDERS):
        found.append(int(score.argmin()))
        score[found[-1]] = math.inf
    return [int(index) for index in holders[found]]


# -- what a way takes -----------------------------------------------------------------------------------


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


class _Costs:
    """What the ways of one request take, each part computed once."""

    def __init__(self, snapshot: Snapshot, ask: Ask) -> None:
        self._of, self._ask = snapshot, ask
        self._length = max(1.0, ask.output - 1)
        self._fills: dict[int, _Fill] = {}
        self._writes: dict[int, _Write] = {}

    def nobody(self) -> list[int]:
        """Raise ``NoWorker``."""
        raise NoWorker(f"none of the {len(self._of.workers)} workers is alive; see `handoff status`")

    def alone(self, index: int) -> _Way:
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

    def pair(self, prefill: int, decode: int) -> _Way:
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

    def best_pair(self, prefills: Sequence[int], decodes: Sequence[int]) -> _Way:
        """Return the best way of dividing it; the first of equals.

        A pair costs at least what its two halves do without the handover: they are looked at in the order of
        that, until it exceeds the best that was found.
        """
        if len(prefills) * len(decodes) <= FEW_PAIRS:
            return min((self.pair(p, d) for p in prefills for d in decodes), key=_rank)
        fills = [(self._of_filling(fill := self._fill(p)), fill, p) for p in prefills]
        writes = [(self._of_writing(write := self._write(d)), write.room > 0, d) for d in decodes]
        bounds = sorted(
            (fill.full or no_room, not fill.meets, filling + writing, place, p, d)
            for place, ((filling, fill, p), (writing, no_room, d)) in enumerate(
                itertools.product(fills, writes)
            )
        )
        best: tuple[bool, bool, float, int] | None = None
        taken: _Way | None = None
        for full, misses, bound, place, p, d in bounds:
            if best is not None and (full, misses, bound * (1 - ROUNDING)) > best[:3]:
                break
            way = self.pair(p, d)
            if best is None or (*_rank(way), place) < best:
                best, taken = (*_rank(way), place), way
        assert taken is not None
        return taken

    def told(self, way: _Way, cause: str, reason: str) -> Route:
        """Return a way as the decision."""
        return Route(
            prefill=self._of.workers[way.prefill].name,
            decode=self._of.workers[way.decode].name,
            mode=Mode.UNDIVIDED if way.prefill == way.decode else self._ask.mode,
            reason=reason,
            cause=cause,
            predicted=Prediction(way.ttft, way.tpot, self._parts(way)),
            meets=way.meets,
        )

    def compared(self, taken: _Way, other: _Way) -> str:
        """Say in figures why one way was better."""

        def figures(way: _Way) -> str:
            names = [self._of.workers[index].name for index in dict.fromkeys(way[:2])]
            harm = self._parts(way)["others"]
            told = f"{'>'.join(names)} {way.ttft * 1e3:.0f} ms + {way.tpot * 1e3:.1f} ms/token"
            return told + (f", others {harm * 1e3:.0f} ms" if harm >= 5e-4 else "")

        return f"{figures(taken)}; else {figures(other)}"

    def _parts(self, way: _Way) -> dict[str, float]:
        fill = self._fill(way.prefill)
        write = self._writes.get(way.decode, _Write(0.0, 0.0, 0.0, 0.0))
        waits = write.room if way.prefill == way.decode else 0.0
        return {
            "overhead": self._of.overhead_s,
            "queue": fill.queue + waits,
            "prefill": fill.own,
            "handover": way.handover,
            "others": self._of.workers[way.prefill].decoding * fill.added + write.crowd,
        }

    def _weigh(
        self, prefill: int, decode: int, fill: _Fill, write: _Write, ttft: float, tpot: float, handover: float
    ) -> _Way:
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
        return _Way(prefill, decode, fill.full or write.room > 0, cost, meets, ttft, tpot, handover)

    def _of_filling(self, fill: _Fill) -> float:
        """Return what a pair costs at least because of its prefill worker; see ``_weigh``."""
        return _value(self._of.overhead_s + fill.queue + fill.own, self._ask.slo.ttft_s, 1.0) + fill.harm

    def _of_writing(self, write: _Write) -> float:
        """Return what a pair costs at least because of its decode worker; see ``_weigh``."""
        tpot = _value(write.tpot, self._ask.slo.tpot_s, self._length)
        return tpot + self._crowding(write) + MISSED * write.risk

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
        each = max(1.0, worker.context / max(1, running))
        too_many = max(running + 1 - worker.slots, math.ceil(missing / each))
        # They end one after the other, one in each such part of the time that an answer takes.
        room = max(0, too_many) * tpot * ask.output / max(1, running)
        risk = self._risk(worker, step_s)
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
