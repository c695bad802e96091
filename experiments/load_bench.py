"""`handoff bench load`: open-loop load on any OpenAI server that runs already, at one rate or at several.

What a rate gives is one row. Nothing is known of the server but its address, so nothing here compares
systems: run it against each with the same parameters, and hold the files against each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from experiments import goodput
from experiments.open_loop import Target, TargetError, offer
from experiments.results import Run
from experiments.workload import MIXES, Arrival, Mix, Served, arrivals, read_trace, scaled

KIND: Final = "bench-load"
TELL_S: Final = 1.0
ASKED_WITHIN_S: Final = 10.0
SECONDS_PER_HOUR: Final = 3600.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is offered, and what counts as good.

    Attributes:
        url: of the server, without ``/v1``.
        model: as the server calls it; None: the only one it has.
        rates: requests a second, on average, one load for each.
        seconds: of each load.
        mix: its name, one of ``workload.MIXES``; the lengths and ``bursts`` below replace what it says.
        prompt_tokens: least and most.
        output_tokens: least and most.
        bursts: arrivals of a burst come at this many times the mean rate; 1: Poisson.
        trace: a file in the Mooncake format instead of a mix.
        shorter: the trace's lengths are divided by this.
        most_prompt: the trace's prompts are cut at so many tokens.
        ttft_ms: objective of the time to first token.
        tpot_ms: objective of the time per token after it.
        slo_class: sent as ``X-Handoff-Class``.
        plain: only what OpenAI's API has; answers may end early.
        hourly: dollars an hour for one worker; None: not known.
        workers: how many there are.
        answered_within_s: a request that takes longer is an error.
        warm_s: seconds of load beforehand that are not counted.
        seed: of everything drawn.

    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    rates: tuple[float, ...] = (2.0,)
    seconds: float = 60.0
    mix: str = "balanced"
    prompt_tokens: tuple[int, int] | None = None
    output_tokens: tuple[int, int] | None = None
    bursts: float | None = None
    trace: str | None = None
    shorter: float = 1.0
    most_prompt: int = 3000
    ttft_ms: float = 1500.0
    tpot_ms: float = 60.0
    slo_class: str | None = None
    plain: bool = False
    hourly: float | None = None
    workers: int = 1
    answered_within_s: float = 120.0
    warm_s: float = 3.0
    seed: int = 1


def measure(
    parameters: Parameters,
    key: str | None,
    progress: Progress,
    keep: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Offer one load after the other, and return the run. ``keep`` is given the run after each.

    Raises:
        TargetError: the server does not answer, or what it says of its models does not fit.
        TraceError: the trace cannot be read.

    """
    trace = None if parameters.trace is None else read_trace(Path(parameters.trace))
    if trace is not None and len(trace) < 2:
        raise TargetError(f"{parameters.trace}: a trace needs at least two requests")
    model = parameters.model or _only_model(parameters.url, key)
    headers = {} if parameters.slo_class is None else {"X-Handoff-Class": parameters.slo_class}
    target = Target(parameters.url.rstrip("/"), model, headers, plain=parameters.plain, key=key)
    run = Run.begin(KIND, {**asdict(parameters), "model": model})
    if parameters.warm_s:
        progress(f"{parameters.warm_s:g} s of load that is not counted")
        warm = load_of(parameters, trace, min(parameters.rates), parameters.warm_s, parameters.seed - 1)
        _refuse_if_broken(asyncio.run(offer(target, warm, parameters.answered_within_s)), target)
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for rate in parameters.rates:
        load = load_of(parameters, trace, rate, parameters.seconds, parameters.seed)
        progress(f"{rate:g} requests/s for {parameters.seconds:g} s: {len(load)} requests")
        served = asyncio.run(_offer(target, load, parameters, progress))
        rows.append(row_of(parameters, rate, served))
        samples.append({"rate": rate, "requests": goodput.sample(served)})
        run = run.end({"rows": rows}, samples)
        keep(run)
    return run


def load_of(
    parameters: Parameters, trace: list[Arrival] | None, rate: float, seconds: float, seed: int
) -> list[Arrival]:
    """Return the load of a rate."""
    if trace is not None:
        return scaled(trace, parameters.shorter, rate, parameters.most_prompt, seconds)
    mix = MIXES[parameters.mix]
    chosen = Mix(
        parameters.prompt_tokens or mix.prompt,
        parameters.output_tokens or mix.output,
        parameters.bursts or mix.bursts,
    )
    return arrivals(chosen, rate, seconds, seed)


def row_of(parameters: Parameters, rate: float, served: list[Served]) -> dict[str, Any]:
    """Return what a rate gave; dollars are of the time that load came, idle workers included."""
    seconds = parameters.seconds
    row = goodput.outcome(served, parameters.ttft_ms / 1e3, parameters.tpot_ms / 1e3, seconds)
    answered = sum(one.ttft_s is not None for one in served)
    paid = None
    if parameters.hourly is not None:
        paid = parameters.hourly * parameters.workers * seconds / SECONDS_PER_HOUR
    good = round(row["goodput_rps"] * seconds)
    return {
        "rate": rate,
        "load_s": seconds,
        **row,
        "answered": answered,
        "output_tokens_s": round(sum(one.tokens for one in served) / seconds, 1),
        "usd_per_request": None if paid is None or not answered else round(paid / answered, 8),
        "usd_per_good_request": None if paid is None or not good else round(paid / good, 8),
    }


async def _offer(
    target: Target, load: list[Arrival], parameters: Parameters, progress: Progress
) -> list[Served]:
    """Offer a load, and tell every second how it stands."""
    ended: list[Served] = []
    began = time.monotonic()

    async def tell() -> None:
        while True:
            await asyncio.sleep(TELL_S)
            progress(_standing(load, ended, time.monotonic() - began, parameters))

    told = asyncio.create_task(tell())
    try:
        return await offer(target, load, parameters.answered_within_s, ended.append)
    finally:
        told.cancel()


def _standing(load: list[Arrival], ended: list[Served], now: float, parameters: Parameters) -> str:
    due = sum(one.at <= now for one in load)
    refused, errors = sum(one.refused for one in ended), sum(bool(one.error) for one in ended)
    good = sum(one.good(parameters.ttft_ms / 1e3, parameters.tpot_ms / 1e3) for one in ended)
    first = sorted(one.ttft_s * 1e3 for one in ended if one.ttft_s is not None)
    median = f", first token p50 {goodput.percentile(first, 0.5):.0f} ms" if first else ""
    return (
        f"{min(now, parameters.seconds):.0f} of {parameters.seconds:g} s: {due} of {len(load)} due, "
        f"{due - len(ended)} open, {good} good, {refused} refused, {errors} errors{median}"
    )


def _refuse_if_broken(served: list[Served], target: Target) -> None:
    """Raise ``TargetError`` where no request of a load could be answered: none of the next ones could."""
    errors = [one.error for one in served if one.error]
    if served and len(errors) == len(served):
        hint = "" if target.plain else "; a server other than vLLM's may need --plain"
        raise TargetError(f"{target.url} answers no request of this kind: {errors[0]}{hint}")


def _only_model(url: str, key: str | None) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    where = f"{url.rstrip('/')}/v1/models"
    try:
        answer = httpx.get(where, headers=headers, timeout=ASKED_WITHIN_S)
        answer.raise_for_status()
        names = [str(model["id"]) for model in answer.json()["data"]]
    except httpx.HTTPStatusError as error:
        hint = " (a key is read from --api-key-file or OPENAI_API_KEY)" if answer.status_code == 401 else ""
        raise TargetError(f"{where}: HTTP {answer.status_code}{hint}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TargetError(
            f"{where} does not answer: {error}; start a server (handoff serve FILE) or give its --url"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{where}: no list of models; is this an OpenAI server?") from error
    if len(names) != 1:
        raise TargetError(f"{where} has {len(names)} models ({', '.join(names)}); choose one with --model")
    return names[0]
