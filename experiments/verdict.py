"""Should I disaggregate? Equal workers, undivided against every split of them, under one load.

Every contender serves the same requests on simulated engines (``experiments/simulate.py``, the real router)
whose steps take what a real engine took on this machine (``experiments/verdict_engine.py``). Its goodput is
requests a second that meet both objectives, at the offered rate that suits it best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any, Final

from actors.steps import StepModel
from deployments.router import Policy
from deployments.snapshot import Slo
from experiments.compare import of_median
from experiments.energy import Watts
from experiments.simulate import Busy, Plant, simulated
from experiments.workload import MIXES, Mix, arrivals

KIND: Final = "verdict"
UNDIVIDED: Final = "undivided"
RATES: Final = (0.15, 0.18, 0.22, 0.27, 0.33, 0.41, 0.5, 0.61, 0.74, 0.9, 1.1)
"""Offered rates, by what all workers together could serve without waiting."""
SEARCHED: Final = 2
"""Loads that choose each contender's rate; others then judge it, so that the choice flatters nobody."""
TTFT_TIMES, TPOT_TIMES = 5.0, 2.0
"""Objectives unless given: so many times what the mix's mean request takes alone on an idle engine."""
Progress = Callable[[str], None]


class VerdictError(RuntimeError):
    """The question cannot be answered as it was asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is asked.

    Attributes:
        model: local path or hub id.
        workers: how many engines, however they are divided.
        mixes: names in ``workload.MIXES``.
        ttft_ms, tpot_ms: objectives; None: see ``TTFT_TIMES``.
        gbit_s: KV's rate between two workers.
        handover_ms: fixed time of a handover.
        seconds: of each load.
        loads: how many judge.
        seed: of the first.

    """

    model: str
    workers: int = 2
    mixes: tuple[str, ...] = tuple(MIXES)
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gbit_s: float = 10.0
    handover_ms: float = 20.0
    seconds: float = 20.0
    loads: int = 9
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Contender:
    """Workers of each role, and how requests are routed to them."""

    name: str
    prefills: int
    decodes: int
    policy: Policy


def contenders(workers: int) -> list[Contender]:
    """Return the undivided one, and each split: dividing always, and where the router thinks it pays."""
    found = [Contender(UNDIVIDED, 1, workers - 1, "replicas")]
    for prefills in range(1, workers):
        split = f"{prefills}p{workers - prefills}d"
        found.append(Contender(f"{split} always", prefills, workers - prefills, "always"))
        found.append(Contender(f"{split} adaptive", prefills, workers - prefills, "adaptive"))
    return found


def alone(step: StepModel, mix: Mix, chunk: int) -> tuple[float, float]:
    """Return seconds to the first token, and per token, of a mix's mean request on an idle engine."""
    prompt = mean(mix.prompt)
    return step.prefill_s(prompt, 0) + step.base * max(1, round(prompt / chunk)), step.decode_s(1, prompt)


def capacity(step: StepModel, mix: Mix, workers: int, slots: int) -> float:
    """Return about how many requests a second all workers can compute, with full batches."""
    prompt, output = mean(mix.prompt), mean(mix.output)
    each_token = step.decode_s(slots, slots * prompt) / slots
    return workers / (step.prefill_s(prompt, 0) + output * each_token)


def judged(
    parameters: Parameters, step: StepModel, plant: Plant, progress: Progress, watts: Watts | None = None
) -> dict[str, Any]:
    """Return rows, one for each mix and contender, and the verdict on each mix; no energy without watts."""
    rows: list[dict[str, Any]] = []
    verdicts = []
    for name in parameters.mixes:
        objectives = objective(parameters, step, MIXES[name], plant.chunk)
        of_mix = {
            one.name: _row(parameters, name, one, objectives, step, plant, watts)
            for one in contenders(parameters.workers)
        }
        rows += of_mix.values()
        verdicts.append(verdict(name, of_mix))
        progress(f"{name}: {verdicts[-1]['answer']}")
    return {"rows": rows, "verdicts": verdicts}


def objective(parameters: Parameters, step: StepModel, mix: Mix, chunk: int) -> Slo:
    """Return the objectives of a mix, in seconds."""
    first, each = alone(step, mix, chunk)
    ttft_ms, tpot_ms = parameters.ttft_ms, parameters.tpot_ms
    return Slo(
        TTFT_TIMES * first if ttft_ms is None else ttft_ms / 1e3,
        TPOT_TIMES * each if tpot_ms is None else tpot_ms / 1e3,
    )


def _row(
    parameters: Parameters,
    mix: str,
    one: Contender,
    slo: Slo,
    step: StepModel,
    plant: Plant,
    watts: Watts | None,
) -> dict[str, Any]:
    own = replace(plant, prefills=one.prefills, decodes=one.decodes, step=step)
    most = capacity(step, MIXES[mix], parameters.workers, plant.slots)
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None

    def serve(rate: float, seed: int) -> tuple[int, Busy]:
        load = arrivals(MIXES[mix], rate, parameters.seconds, seed)
        served, busy = simulated(load, one.policy, own, slo)
        return sum(of.good(slo.ttft_s or 0, slo.tpot_s or 0) for of in served), busy

    rates = [most * share for share in RATES]
    searched = range(parameters.seed, parameters.seed + SEARCHED)
    best = max(rates, key=lambda rate: sum(serve(rate, seed)[0] for seed in searched))
    judges = range(searched.stop, searched.stop + parameters.loads)
    loads = [serve(best, seed) for seed in judges]
    found = [round(good / parameters.seconds, 4) for good, _ in loads]
    bounds = of_median(found)
    return {
        "mix": mix,
        "contender": one.name,
        "prefills": one.prefills,
        "decodes": one.decodes,
        "policy": one.policy,
        "offered_rps": round(best, 4),
        "goodput_rps_p50": round(median(found), 4),
        "goodput_rps_ci95": None if bounds is None else list(bounds),
        "goodputs_rps": found,
        **_energy(parameters, loads, watts),
        "slo": {"ttft_ms": round(slo.ttft_s * 1e3, 1), "tpot_ms": round(slo.tpot_s * 1e3, 1)},
    }


def _energy(parameters: Parameters, loads: Sequence[tuple[int, Busy]], watts: Watts | None) -> dict[str, Any]:
    """Return joules by request in time, of each load: None where there was none, or no counter."""
    found: list[float | None] = [
        round(watts.joules(busy, parameters.workers, parameters.seconds) / good, 4)
        if watts is not None and good
        else None
        for good, busy in loads
    ]
    known = [one for one in found if one is not None]
    bounds = of_median(known)
    return {
        "joules_per_request_p50": round(median(known), 4) if known else None,
        "joules_per_request_ci95": None if bounds is None else list(bounds),
        "joules_per_request": None if watts is None else found,
    }


def verdict(mix: str, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return whether a split serves more of a mix than the undivided workers do, beyond noise.

    Loads are paired: the ratio is taken load by load, and its interval is that of their median
    (``compare.of_median``). The split looked at is the best of several, which flatters it a little.
    """
    plain = rows[UNDIVIDED]
    best = max(
        (row for name, row in rows.items() if name != UNDIVIDED), key=lambda row: row["goodput_rps_p50"]
    )
    ratios = paired(best["goodputs_rps"], plain["goodputs_rps"])
    bounds = of_median(ratios)
    pays = bounds is not None and bounds[0] > 1
    worse = bounds is not None and bounds[1] < 1
    ratio = median(ratios) if ratios else None
    used = _joules_ratio(best, plain)
    told = (
        "" if ratio is None or bounds is None else f": {ratio:.2f} times ({bounds[0]:.2f} to {bounds[1]:.2f})"
    )
    answer = (
        f"disaggregate, {best['contender']}"
        if pays
        else "don't"
        if worse
        else "don't: no difference beyond noise"
    )
    if used["energy_ratio_ci95"] is not None:
        low, high = used["energy_ratio_ci95"]
        told += f", at {used['energy_ratio']:.2f} times the energy per request ({low:.2f} to {high:.2f})"
    return {
        "mix": mix,
        "disaggregate": pays,
        "contender": best["contender"],
        "ratio": None if ratio is None else round(ratio, 4),
        "ratio_ci95": None if bounds is None else list(bounds),
        **used,
        "answer": answer + told,
    }


def _joules_ratio(best: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    ratios = paired(best.get("joules_per_request") or (), plain.get("joules_per_request") or ())
    bounds = of_median(ratios)
    return {
        "energy_ratio": round(median(ratios), 4) if ratios else None,
        "energy_ratio_ci95": None if bounds is None else list(bounds),
    }


def paired(values: Sequence[float | None], of: Sequence[float | None]) -> list[float]:
    """Return the ratios of values of the same loads, without those that have none, or whose divisor is 0."""
    pairs = zip(values, of, strict=True)
    return [round(one / other, 4) for one, other in pairs if one is not None and other]
