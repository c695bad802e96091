"""Goodput: requests a second that meet their objectives, under open-loop load, by router mode and mix.

The systems differ in the router alone, and run on equal workers: ``adaptive`` (with the objectives, so it
refuses what it cannot serve in time), ``always``, ``never``, ``replicas`` (plain replicas that are
taken in turn) and ``threshold N`` (prompts of more than N tokens are divided, others are not: what other
routers have users set; theirs run what is not divided on decode workers alone). Two engines: ``fake``
(`handoff serve --engine fake`: everything but the model is real) and ``simulated``
(``experiments/simulate.py``: the router itself on a model of the workers, exact and repeatable). Neither
says what a real model reaches; they say what the router makes of its workers.

Every round is another load. All systems get it, one after the other, in an order that changes from round to
round; ``adaptive`` gets it twice, and what that differs by is what the others' differences are held against.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from deployments.router import POLICIES
from deployments.snapshot import Slo
from experiments import goodput
from experiments.goodput_systems import (
    GoodputError,
    Progress,
    Serve,
    System,
    cluster_file,
    fake,
    simulated,
)
from experiments.results import Run
from experiments.simulate import PLANT
from experiments.workload import MIXES, Arrival, Served, arrivals, read_trace, scaled, synthetic_trace

KIND: Final = "bench-goodput"
AGAIN: Final = "adaptive again"
"""The same system a second time: what two runs of one system differ by."""
TRACE: Final = "trace"
RATES: Final = {"prefill-heavy": 5.0, "decode-heavy": 36.0, "balanced": 12.0, "bursty": 9.0, TRACE: 18.0}
"""Requests a second that the simulated workers are offered: about what the best system can just serve."""
OVERLOADED: Final = "balanced"
OVERLOADS: Final = (1.5, 3.0)
"""Times that mix's rate."""
MOST_PROMPT: Final = 3000


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured.

    Attributes:
        engines: ``fake``, ``simulated`` or both.
        model: local path, for tokenizer and configuration of the fake engine; not needed for ``simulated``.
        ttft_ms: objective of the time to first token.
        tpot_ms: objective of the time per token after it.
        seconds: of each load.
        rounds: loads for each system and mix.
        slower: the fake engine's workers are that much slower than the simulated ones, with rates and
            objectives to match: this machine must be able to carry the tokens.
        trace: a file in the Mooncake format; None: a synthetic one.
        shorter: the trace's lengths are divided by this.
        mixes: which.
        thresholds: prompt tokens beyond which a static router divides, a system each. 1000 is what Dynamo's
            conditional disaggregation had by default (``max_local_prefill_length``).
        overload: whether `adaptive` is offered more than it can serve as well.
        seed: of everything drawn.

    """

    engines: tuple[str, ...] = ("fake",)
    model: str | None = None
    ttft_ms: float = 1500.0
    tpot_ms: float = 60.0
    seconds: float = 20.0
    rounds: int = 2
    slower: float = 2.0
    trace: str | None = None
    shorter: float = 6.0
    mixes: tuple[str, ...] = (*MIXES, TRACE)
    thresholds: tuple[int, ...] = (1000,)
    overload: bool = True
    seed: int = 1


CHOICES: Final = ("engines", "mixes", "overload")
"""Parameters that choose what is measured, not how: a run may be continued with others."""


def systems(parameters: Parameters) -> list[System]:
    """Return what is compared; ``adaptive`` comes first."""
    modes = [System(mode, mode) for mode in POLICIES]
    return modes + [System(f"threshold {tokens}", "always", tokens) for tokens in parameters.thresholds]


@dataclass(frozen=True, slots=True)
class Case:
    """One engine under one mix, at so many times the mix's rate."""

    engine: str
    mix: str
    times: float = 1.0

    @property
    def overload(self) -> bool:
        """Whether more is offered than can be served."""
        return self.times != 1.0


@dataclass(slots=True)
class _Seen:
    """What became of a system's loads so far, and how busy the machine's cores were meanwhile (0 to 1)."""

    parts: list[list[Served]]
    busy: list[float]


def measure(
    parameters: Parameters,
    progress: Progress,
    earlier: Run | None = None,
    keep: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Run every system on every mix, and return the run.

    Args:
        parameters: what is measured.
        progress: told each result.
        earlier: an unfinished run with the same parameters: what it has is not measured again.
        keep: given the run after each case, whole but for the cases that are still to come.

    """
    run = begin(parameters) if earlier is None else continued(earlier, parameters)
    rows: list[dict[str, Any]] = list(run.results.get("rows", ()))
    ratios: list[dict[str, Any]] = list(run.results.get("ratios", ()))
    overload: list[dict[str, Any]] = list(run.results.get("overload", ()))
    samples = list(run.samples)
    for engine in parameters.engines:
        have = {Case(row["engine"], row["mix"], row.get("times", 1.0)) for row in (*rows, *overload)}
        wanted = [case for case in _cases(parameters, engine) if case not in have]
        if not wanted:
            continue
        with _served(parameters, engine, progress) as serve:
            for case in wanted:
                found = _rounds(parameters, case, serve, progress)
                told = {name: _row(parameters, case, name, seen) for name, seen in found.items()}
                if case.overload:
                    overload += [row | {"times": case.times} for row in told.values()]
                else:
                    rows += [row for name, row in told.items() if name != AGAIN]
                    ratios.append(_ratios(parameters, case, found))
                if engine != "simulated":  # the parameters give those again
                    samples += [_sample(case, name, parameters, seen) for name, seen in found.items()]
                _of_peak(rows, overload)
                run = run.end({"rows": [*rows], "ratios": [*ratios], "overload": [*overload]}, samples)
                keep(run)
    return run


def begin(parameters: Parameters) -> Run:
    """Return a run without results."""
    return Run.begin(KIND, {**asdict(parameters), "workers": asdict(PLANT), "rates": RATES})


def continued(earlier: Run, parameters: Parameters) -> Run:
    """Return a run that takes in what an earlier one has.

    Raises:
        GoodputError: it was measured with other parameters or other code; the message names what differs.

    """
    run = begin(parameters)
    before, now = (json.loads(json.dumps(dict(one.parameters))) for one in (earlier, run))
    differs = [key for key in now if key not in CHOICES and before.get(key) != now[key]]
    if differs:
        told = ", ".join(f"{key}: {before.get(key)!r}, now {now[key]!r}" for key in differs)
        raise GoodputError(f"the run cannot be resumed with other parameters ({told}); leave --resume out")
    if earlier.commit != run.commit:
        raise GoodputError(
            f"the run cannot be resumed with other code (commit {earlier.commit}, now {run.commit}); "
            "leave --resume out"
        )
    both = {key: list(dict.fromkeys([*before[key], *now[key]])) for key in ("engines", "mixes")}
    return Run(**{**_fields(earlier), "parameters": now | both | {"overload": True}})


def _fields(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in Run.__dataclass_fields__}


def _cases(parameters: Parameters, engine: str) -> list[Case]:
    found = [Case(engine, mix) for mix in parameters.mixes]
    if parameters.overload and OVERLOADED in parameters.mixes:
        found += [Case(engine, OVERLOADED, times) for times in OVERLOADS]
    return found


def _rounds(parameters: Parameters, case: Case, serve: Serve, progress: Progress) -> dict[str, _Seen]:
    """Offer each round's load to all systems, in an order that changes from round to round."""
    trace = _trace(parameters)
    compared = systems(parameters)
    compared = compared[:1] if case.overload else [*compared, System(AGAIN, "adaptive")]
    found: dict[str, _Seen] = defaultdict(lambda: _Seen([], []))
    for turn in range(parameters.rounds):
        slower = parameters.slower if case.engine == "fake" else 1.0
        load = _load(parameters, trace, case.mix, slower / case.times, parameters.seed + turn)
        first = turn % len(compared)
        for system in (*compared[first:], *compared[:first]):
            before = psutil.cpu_times()
            served = serve(load, system)
            name, seen = system.name, found[system.name]
            seen.parts.append(served)
            seen.busy.append(_busy(before, psutil.cpu_times()))
            row = _row(parameters, case, name, _Seen([served], seen.busy[-1:]), 1)
            keys = ("goodput_rps", "offered_rps", "refused", "errors", "cpu_busy")
            progress(
                f"{case.engine} {case.mix} x{case.times:g}, round {turn + 1} of {parameters.rounds}, {name}: "
                + ", ".join(f"{key} {row[key]}" for key in keys)
            )
    return {system.name: found[system.name] for system in compared}


def _busy(before: Any, after: Any) -> float:
    """Return the share of the time between two ``psutil.cpu_times()`` in which cores were at work."""
    spent = sum(after) - sum(before)
    idle = after.idle - before.idle + getattr(after, "iowait", 0.0) - getattr(before, "iowait", 0.0)
    return float(1 - idle / spent) if spent > 0 else 0.0


def _trace(parameters: Parameters) -> list[Arrival]:
    if parameters.trace is not None:
        return read_trace(Path(parameters.trace))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        synthetic_trace(path, 3000, 2.0, parameters.seed)
        return read_trace(path)


def _load(parameters: Parameters, trace: list[Arrival], mix: str, slower: float, seed: int) -> list[Arrival]:
    rate = RATES[mix] / slower
    if mix == TRACE:
        count = int(rate * parameters.seconds)
        start = random.Random(seed).randrange(max(1, len(trace) - count))
        return scaled(trace[start:], parameters.shorter, rate, MOST_PROMPT, parameters.seconds)
    return arrivals(MIXES[mix], rate, parameters.seconds, seed)


def _objectives(parameters: Parameters, engine: str) -> tuple[float, float]:
    slower = parameters.slower if engine == "fake" else 1.0
    return parameters.ttft_ms * slower / 1e3, parameters.tpot_ms * slower / 1e3


def _whole(parameters: Parameters, seen: _Seen) -> list[Served]:
    return goodput.one_after_another(seen.parts, parameters.seconds)


def _row(
    parameters: Parameters, case: Case, system: str, seen: _Seen, rounds: int | None = None
) -> dict[str, Any]:
    served, load_s = _whole(parameters, seen), parameters.seconds * (rounds or parameters.rounds)
    causes = [one.cause for one in served if one.cause]
    return {
        "engine": case.engine,
        "system": system,
        "mix": case.mix,
        "load_s": load_s,
        **goodput.outcome(served, *_objectives(parameters, case.engine), load_s),
        "cpu_busy": round(sum(seen.busy) / len(seen.busy), 3),
        "decisions": {cause: causes.count(cause) for cause in sorted(set(causes))},
    }


def _ratios(parameters: Parameters, case: Case, found: dict[str, _Seen]) -> dict[str, Any]:
    """Return adaptive's goodput by each other system's, by the best of them, and by its own."""
    load_s = parameters.seconds * parameters.rounds
    objectives = _objectives(parameters, case.engine)
    blocks = {
        name: goodput.good_by_block(_whole(parameters, seen), *objectives, load_s)
        for name, seen in found.items()
    }
    return {"engine": case.engine, "mix": case.mix, **ratios(blocks)}


def ratios(blocks: dict[str, list[int]]) -> dict[str, Any]:
    """Return adaptive's good requests by those of each other system, by the best of them, and by its own."""
    ours = blocks["adaptive"]
    others = {name: counts for name, counts in blocks.items() if name not in ("adaptive", AGAIN)}
    best = max(others, key=lambda name: sum(others[name]))
    by_best, by_best_ci95 = goodput.ratio(ours, others[best])
    again, again_ci95 = goodput.ratio(blocks[AGAIN], ours) if AGAIN in blocks else (None, None)
    return {
        "by": {name: goodput.ratio(ours, counts)[0] for name, counts in others.items()},
        "best": best,
        "by_best": by_best,
        "by_best_ci95": by_best_ci95,
        "again": again,
        "again_ci95": again_ci95,
    }


def _of_peak(rows: Sequence[dict[str, Any]], overload: Sequence[dict[str, Any]]) -> None:
    """Write into the rows of overload their goodput by the highest at any rate, for each engine."""
    for row in overload:
        peers = [
            other["goodput_rps"]
            for other in (*rows, *overload)
            if all(other[key] == row[key] for key in ("engine", "mix", "system"))
        ]
        row["of_peak"] = round(row["goodput_rps"] / max(peers), 3) if max(peers) else None


def _sample(case: Case, system: str, parameters: Parameters, seen: _Seen) -> dict[str, Any]:
    head = {"engine": case.engine, "system": system, "mix": case.mix}
    head |= {"times": case.times} if case.overload else {}  # type: ignore[dict-item]
    return {**head, "requests": goodput.sample(_whole(parameters, seen))}


def _served(
    parameters: Parameters, engine: str, progress: Progress
) -> contextlib.AbstractContextManager[Serve]:
    """Bring the workers up, once for all systems."""
    ttft_s, tpot_s = _objectives(parameters, engine)
    if engine == "simulated":
        return simulated(Slo(ttft_s, tpot_s))
    if parameters.model is None:
        raise GoodputError("the fake engine needs a model folder for its tokenizer")
    file = cluster_file(parameters.model, parameters.slower, ttft_s, tpot_s)
    return fake(file, parameters.seed, progress)
