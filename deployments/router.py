"""Where a request runs, and whether its prompt is computed there: a pure function over a snapshot.

For every way there is, the time to first token, the time per token and the delay that it brings to requests
which decode already are predicted from measured costs (``deployments/costs.py``, docs/router.md); the
cheapest way is taken. Hundreds of workers are first reduced to a few by bounds that are computed for all of
them at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

from deployments.costs import Costs, Way, rank
from deployments.snapshot import Array, Ask, Snapshot
from deployments.split import Mode

Policy = Literal["adaptive", "always", "never", "replicas"]
POLICIES: Final[tuple[Policy, ...]] = ("adaptive", "always", "never", "replicas")

EXACT: Final = 6
"""Up to so many workers, every way is looked at."""
SHORTLIST: Final = 3
"""Of more workers, the best of each kind."""
HOLDERS: Final = 2
"""And those that hold most of the prompt's prefix."""
GAIN: Final = 0.05
"""A handover must be better by this share: what it costs beside time, and what a prediction is off by."""


class Prediction(NamedTuple):
    """What a way is expected to take, in seconds; the names of ``parts`` are those of docs/router.md.

    ``cached``: tokens of the prompt whose KV the worker that computes it is taken to hold.
    """

    ttft_s: float
    tpot_s: float
    cached: int
    parts: Mapping[str, float]


class Route(NamedTuple):
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


def route(snapshot: Snapshot, ask: Ask, policy: Policy = "adaptive") -> Route:
    """Choose where a request goes.

    ``always`` divides whatever can be divided, ``never`` divides nothing, ``replicas`` does not either and
    takes the workers in turn, as a plain load balancer would. What cannot be divided runs on a decode worker
    under ``always`` (on a prefill worker if it is one token), else on any.

    Raises:
        NoWorker: none is alive.

    """
    costs = Costs(snapshot, ask)
    told = partial(_told, snapshot, ask, costs)
    compared = partial(_compared, snapshot, costs)
    if policy == "replicas":
        alive = [i for i, worker in enumerate(snapshot.workers) if worker.alive] or costs.nobody()
        return told(costs.alone(alive[ask.turn % len(alive)]), "turn", "in turn")
    alone, prefills, decodes = _candidates(snapshot, ask)
    if not alone:
        costs.nobody()
    divisible = ask.mode is not Mode.UNDIVIDED and policy != "never"
    if divisible or policy == "always":
        for role, found in (("prefill", prefills), ("decode", decodes)):
            if not found:
                best = min(map(costs.alone, alone), key=rank)
                return told(best, f"no {role}", f"no {role} worker is alive")
    if not divisible:
        if policy == "always":
            alone = prefills if ask.one_token else decodes
        best = min(map(costs.alone, alone), key=rank)
        if ask.mode is Mode.UNDIVIDED:
            return told(best, "not divisible", ask.why)
        return told(best, "never", "as configured")
    pair = costs.best_pair(prefills, decodes)
    if policy == "always" or ask.must_divide:
        return told(pair, "always", ask.why)
    single = min(map(costs.alone, alone), key=rank)
    if rank(single) <= rank(pair, 1 + GAIN):
        return told(single, "undivided is faster", compared(single, pair))
    return told(pair, "handover is faster", compared(pair, single))


def _told(snapshot: Snapshot, ask: Ask, costs: Costs, way: Way, cause: str, reason: str) -> Route:
    """Return a way as the decision."""
    return Route(
        prefill=snapshot.workers[way.prefill].name,
        decode=snapshot.workers[way.decode].name,
        mode=Mode.UNDIVIDED if way.prefill == way.decode else ask.mode,
        reason=reason,
        cause=cause,
        predicted=Prediction(way.ttft, way.tpot, ask.cached.get(way.prefill, 0), costs.parts(way)),
        meets=way.meets,
    )


def _compared(snapshot: Snapshot, costs: Costs, taken: Way, other: Way) -> str:
    """Say in figures why one way was better."""

    def figures(way: Way) -> str:
        names = [snapshot.workers[index].name for index in dict.fromkeys(way[:2])]
        harm = costs.others(way)
        told = f"{'>'.join(names)} {way.ttft * 1e3:.0f} ms + {way.tpot * 1e3:.1f} ms/token"
        return told + (f", others {harm * 1e3:.0f} ms" if harm >= 5e-4 else "")

    return f"{figures(taken)}; else {figures(other)}"


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
    cached = ask.cached
    if len(cached) <= HOLDERS:
        return list(cached)
    most = max(cached.values())
    holders = [index for index, tokens in cached.items() if tokens == most]
    queues = snapshot.table[0]
    if len(holders) < HOLDERS:
        return sorted(cached, key=lambda index: (-cached[index], queues[index]))[:HOLDERS]
    waits = queues[holders]
    found = []
    for _ in range(HOLDERS):
        found.append(holders[at := int(waits.argmin())])
        waits[at] = math.inf
    return found
