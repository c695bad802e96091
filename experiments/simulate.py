"""Routing without engines: a discrete-event model of workers as vLLM schedules them, under the real router.

Workers step as vLLM's scheduler lets them (chunked prefill, running sequences first, first come first served,
a prefix cache), and a step takes what ``StepModel`` says. What decides, admits and learns is
``deployments/planner.py`` itself, on the model's clock: minutes of load take seconds, runs are the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from actors.messages import LoadReport, ModelFiles, Role, WorkerInfo
from actors.steps import Meter, StepModel, Work
from deployments.planner import Planner
from deployments.router import Policy
from deployments.snapshot import NO_SLO, Ask, Slo
from deployments.split import Mode
from experiments.workload import Arrival, Served, prompt_of
from kv.chunk import KVLayout

REPORT_S = 0.25


@dataclass(frozen=True, slots=True)
class Plant:
    """The simulated hardware: workers of each role, and what they and the way between them are capable of."""

    prefills: int = 2
    decodes: int = 2
    step: StepModel = field(default_factory=lambda: StepModel(20e-3, 5e-4, 2e-4, 0.0, 0.0))
    chunk: int = 512
    slots: int = 64
    block: int = 32
    kv_blocks: int = 4096
    kv_bytes: int = 1024
    handover_s: float = 0.01
    link_rate: float = 1e8


PLANT: Final = Plant()


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds that all workers together computed.

    Attributes:
        prefill_s: in steps that computed prompts, whatever was decoded in them as well.
        decode_s: in steps that only decoded.
        until: when the last step ended.

    """

    prefill_s: float
    decode_s: float
    until: float


@dataclass(slots=True, eq=False)
class _Part:
    """A request at one worker."""

    key: int
    prompt: int
    output: int
    hashes: list[int]
    computed: int = 0
    made: int = 0
    on_token: Callable[[float], None] | None = None
    counts: bool = True


class _Worker:
    def __init__(self, plant: Plant, wake: Callable[[float, Callable[[float], None]], None]) -> None:
        self._plant, self._wake = plant, wake
        self._waiting: deque[_Part] = deque()
        self._running: list[_Part] = []
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._held = 0
        self._busy = False
        self.meter = Meter()
        self.decode_s = 0.0
        self.until = 0.0

    def submit(self, part: _Part, now: float) -> None:
        self._waiting.append(part)
        self._go(now)

    def holds(self, part: _Part) -> int:
        """Tokens of a prompt that are cached, and keep them so."""
        found = 0
        for block in part.hashes:
            if block not in self._cache:
                break
            self._cache.move_to_end(block)
            found += 1
        return min(found * self._plant.block, part.prompt - 1)

    def keep(self, part: _Part) -> None:
        for block in part.hashes:
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self._plant.kv_blocks:
            self._cache.popitem(last=False)

    def _go(self, now: float) -> None:
        if self._busy:
            return
        plan: list[tuple[_Part, int]] = []
        left = self._plant.chunk
        for part in self._running:
            count = min(1 if part.computed >= part.prompt else part.prompt - part.computed, left)
            if count:
                plan.append((part, count))
                left -= count
        room = self._plant.kv_blocks * self._plant.block
        while left and self._waiting and len(self._running) < self._plant.slots:
            part = self._waiting[0]
            if self._held + part.prompt + part.output > room:
                break
            self._waiting.popleft()
            self._held += part.prompt + part.output
            part.computed = max(part.computed, self.holds(part)) if part.computed == 0 else part.computed
            self._running.append(part)
            count = min(max(1, part.prompt - part.computed), left)
            plan.append((part, count))
            left -= count
        if not plan:
            return
        self._busy = True
        decoding = [part for part, _ in plan if part.computed >= part.prompt]
        filling = [(part, count) for part, count in plan if part.computed < part.prompt]
        work = Work(
            len(decoding),
            sum(part.prompt + part.made for part in decoding),
            sum(count for _, count in filling),
            sum(count * (part.computed + count / 2) for part, count in filling),
        )
        step = self._plant.step
        seconds = step.decode_s(work.decoding, work.context) + step.token * work.tokens
        seconds += step.token_context * work.token_context
        self.meter.saw(work, seconds)
        self.decode_s += 0.0 if work.tokens else seconds
        self._wake(now + seconds, lambda at: self._end(plan, at))

    def _end(self, plan: list[tuple[_Part, int]], now: float) -> None:
        self._busy = False
        self.until = now
        for part, count in plan:
            filling = part.computed < part.prompt
            if filling:
                part.computed += count
            if part.computed >= part.prompt:
                if filling:
                    self.keep(part)
                part.made += 1
                if part.made >= part.output:
                    self._running.remove(part)
                    self._held -= part.prompt + part.output
                if part.on_token is not None:
                    part.on_token(now)
        self._go(now)


Choice = Policy | Callable[[Arrival], Policy]
"""A mode of the router, or one for each request."""


def simulate(
    arrivals: Sequence[Arrival], policy: Choice, plant: Plant = PLANT, slo: Slo = NO_SLO, admit: bool = False
) -> list[Served]:
    """Serve a load, open loop, and return what became of each request, in the order of arrival."""
    return simulated(arrivals, policy, plant, slo, admit)[0]


def simulated(
    arrivals: Sequence[Arrival], policy: Choice, plant: Plant = PLANT, slo: Slo = NO_SLO, admit: bool = False
) -> tuple[list[Served], Busy]:
    """Serve a load as ``simulate`` does, and return what the workers computed for it as well."""
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order, clock = itertools.count(), [0.0]

    def wake(at: float, what: Callable[[float], None]) -> None:
        heapq.heappush(events, (at, next(order), what))

    planner = Planner(clock=lambda: clock[0])
    fleet = planner.fleet
    roles: list[Role] = [*_times("prefill", plant.prefills), *_times("decode", plant.decodes)]
    workers = {f"{role}-{i}": _Worker(plant, wake) for i, role in enumerate(roles)}
    for (name, _), role in zip(workers.items(), roles, strict=True):
        fleet.add(_info(name, role, plant))
    served: dict[int, Served] = {}
    links: dict[str, float] = {}
    open_requests = [len(arrivals)]

    def report(now: float) -> None:
        for name, worker in workers.items():
            rates = dict.fromkeys(workers, plant.link_rate) if name.startswith("prefill") else {}
            fleet.report(name, LoadReport(worker.meter.model(), rates=rates))
        if open_requests[0]:
            wake(now + REPORT_S, report)

    def arrive(number: int, arrival: Arrival, now: float) -> None:
        tokens = prompt_of(arrival)
        ask = Ask(arrival.prompt, arrival.output, Mode.FIRST_TOKEN, slo=slo)
        mode = policy(arrival) if callable(policy) else policy
        plan = planner.decide(ask, tokens, policy=mode)
        where = plan.route
        if admit and not where.meets:
            served[number] = Served(arrival, None, None, where.cause, refused=True)
            open_requests[0] -= 1
            return
        planner.sent(str(number), plan)
        _run(number, arrival, where, plan.blocks, now)

    def _run(number: int, arrival: Arrival, where: Any, blocks: list[int], now: float) -> None:
        times: list[float] = []
        divided = where.prefill != where.decode
        whole = _Part(number, arrival.prompt, arrival.output, blocks)

        def token(at: float) -> None:
            times.append(at)
            if len(times) == 1:
                planner.prefilled(str(number), None)
            planner.passed(str(number), 1)
            if len(times) == arrival.output:
                planner.ended(str(number), whole=True)
                open_requests[0] -= 1
                each = (times[-1] - times[0]) / max(1, len(times) - 1)
                served[number] = Served(arrival, times[0] - now, each, where.cause)

        if not divided:
            whole.on_token = token
            workers[where.prefill].submit(whole, now)
            return

        def first(at: float) -> None:
            token(at)
            if arrival.output == 1:
                return
            # All but the last chunk may go while prefill runs; a sender's link carries one after the other.
            last, whole_s = (
                tokens * plant.kv_bytes / plant.link_rate
                for tokens in (min(arrival.prompt, plant.chunk), arrival.prompt)
            )
            sent = max(at + last, max(now, links.get(where.prefill, 0.0)) + whole_s)
            links[where.prefill] = sent
            wake(sent + plant.handover_s, arrived)

        def arrived(at: float) -> None:
            rest = _Part(number, arrival.prompt, arrival.output - 1, blocks, computed=arrival.prompt)
            rest.on_token = token
            workers[where.decode].keep(rest)
            workers[where.decode].submit(rest, at)

        part = _Part(number, arrival.prompt, 1, blocks, on_token=first)
        workers[where.prefill].submit(part, now)

    report(0.0)
    for number, arrival in enumerate(arrivals):
        wake(arrival.at, lambda now, n=number, a=arrival: arrive(n, a, now))  # type: ignore[misc]
    while events:
        clock[0], _, what = heapq.heappop(events)
        what(clock[0])
    busy = Busy(
        sum(worker.meter.prompting_s for worker in workers.values()),
        sum(worker.decode_s for worker in workers.values()),
        max(worker.until for worker in workers.values()),
    )
    return [served[number] for number in range(len(arrivals))], busy


def _times(role: Role, count: int) -> list[Role]:
    return [role] * count


def _info(name: str, role: Role, plant: Plant) -> WorkerInfo:
    layout = KVLayout("m", "uint8", 1, plant.block, plant.block * plant.kv_bytes, "fake")
    files = ModelFiles("m", "/m")
    return WorkerInfo(
        name, role, name, 0, files, layout, 1 << 20, plant.kv_blocks, (), ("", 0), plant.slots, plant.chunk
    )
