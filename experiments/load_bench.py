"""`handoff bench load`: open-loop load on OpenAI servers that run already, by mix and rate.

What a system, a mix and a rate give is one row. Of several systems each gets every load, one after the other
and in an order that changes, so a change of the machine's speed meets all. Nothing is known of them but their
addresses: that they have equal machines is up to who starts them. Those of this machine may be stopped while
another one is asked (``apart``); else they share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx

from experiments import goodput
from experiments.apart import apart
from experiments.open_loop import Target, TargetError, offer
from experiments.results import Run
from experiments.workload import MIXES, Arrival, Mix, Served, arrivals, read_trace, scaled, synthetic_trace

KIND: Final = "bench-load"
TRACE: Final = "trace"
"""The mix whose requests come from a trace."""
SYNTHETIC: Final = 3000
"""Requests of the trace that is made where none is given."""
TELL_S: Final = 1.0
ASKED_WITHIN_S: Final = 10.0
AWAKE_WITHIN_S: Final = 60.0
SECONDS_PER_HOUR: Final = 3600.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is offered, and what counts as good.

    Attributes:
        systems: by name, the address of each server, without ``/v1``.
        model: as the servers call it; None: the only one that each has.
        rates: requests a second, on average, one load for each.
        seconds: of each load.
        mixes: by name, one of ``workload.MIXES`` or ``trace``, what its rates are multiplied by; the lengths
            and ``bursts`` below replace what a mix says.
        prompt_tokens: least and most.
        output_tokens: least and most.
        bursts: arrivals of a burst come at this many times the mean rate; 1: Poisson.
        trace: a file in the Mooncake format, for the mix ``trace``; None: a synthetic one.
        shorter: the trace's lengths are divided by this.
        most_prompt: the trace's prompts are cut at so many tokens.
        ttft_ms: objective of the time to first token.
        tpot_ms: objective of the time per token after it.
        slo_class: sent as ``X-Handoff-Class``.
        plain: only what OpenAI's API has; answers may end early.
        hourly: dollars an hour for one worker; None: not known.
        workers: how many there are.
        answered_within_s: a request that takes longer is an error.
        warm_s: seconds of load on each system beforehand that are not counted.
        rest_s: before each load nobody is asked for so long: engines may spin for a while after an answer.
        apart: while a system is asked, stop the processes of the others; see ``experiments/apart.py``.
        seed: of everything drawn.

    """

    systems: Mapping[str, str] = field(default_factory=lambda: {"server": "http://127.0.0.1:8000"})
    model: str | None = None
    rates: tuple[float, ...] = (2.0,)
    seconds: float = 60.0
    mixes: Mapping[str, float] = field(default_factory=lambda: {"balanced": 1.0})
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
    rest_s: float = 0.0
    apart: bool = False
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
        ApartError: a system's processes are not known.

    """
    trace = _trace(parameters) if TRACE in parameters.mixes else None
    headers = {} if parameters.slo_class is None else {"X-Handoff-Class": parameters.slo_class}
    targets = {
        name: Target(
            url.rstrip("/"),
            parameters.model or _only_model(url, key),
            headers,
            plain=parameters.plain,
            key=key,
        )
        for name, url in parameters.systems.items()
    }
    models = {name: target.model for name, target in targets.items()}
    run = Run.begin(KIND, {**asdict(parameters), "models": models})
    mixes, names = list(parameters.mixes), list(targets)
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    turns = [(mix, rate * parameters.mixes[mix]) for mix in mixes for rate in parameters.rates]
    with apart(names) if parameters.apart else contextlib.nullcontext(_all_run) as only:
        for name, target in targets.items() if parameters.warm_s else ():
            only(name)
            progress(f"{name}: {parameters.warm_s:g} s of load that is not counted")
            rate = min(parameters.rates) * parameters.mixes[mixes[0]]
            warm = load_of(parameters, trace, mixes[0], rate, parameters.warm_s, parameters.seed - 1)
            warm = own_prompts(warm, len(turns))
            _refuse_if_broken(asyncio.run(offer(target, warm, parameters.answered_within_s)), target)
        for turn, (mix, rate) in enumerate(turns):
            load = load_of(parameters, trace, mix, rate, parameters.seconds, parameters.seed)
            load = own_prompts(load, turn)
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                only(name)
                if parameters.apart:
                    _awake(targets[name], parameters)
                time.sleep(parameters.rest_s)
                progress(
                    f"{name}, {mix}, {rate:g} requests/s for {parameters.seconds:g} s: {len(load)} requests"
                )
                served = asyncio.run(_offer(targets[name], load, parameters, progress))
                case = {"system": name, "mix": mix, "rate": round(rate, 6)}
                rows.append({**case, **row_of(parameters, served)})
                samples.append({**case, "requests": goodput.sample(served)})
                run = run.end({"rows": rows}, samples)
                keep(run)
    return run


def _all_run(name: str) -> None:
    """Stop nobody."""


def own_prompts(load: list[Arrival], number: int) -> list[Arrival]:
    """Give a load's prompts blocks that no load of another number has: no server has them in its cache yet.

    What the prompts of a load share with each other, they still do.
    """
    first = (number + 1) << 40
    return [replace(one, hash_ids=tuple(first + block for block in one.hash_ids or (0,))) for one in load]


def _awake(target: Target, parameters: Parameters) -> None:
    """Wait until a system that was stopped answers a short request, which is not counted."""
    deadline = time.monotonic() + AWAKE_WITHIN_S
    while True:
        (served,) = asyncio.run(offer(target, [Arrival(0.0, 8, 1)], parameters.answered_within_s))
        if not served.error:
            return
        if time.monotonic() > deadline:
            raise TargetError(
                f"{target.url} does not answer {AWAKE_WITHIN_S:g} s after it was let go on: {served.error}"
            )
        time.sleep(1)


def _trace(parameters: Parameters) -> list[Arrival]:
    if parameters.trace is not None:
        found = read_trace(Path(parameters.trace))
        if len(found) < 2:
            raise TargetError(f"{parameters.trace}: a trace needs at least two requests")
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        synthetic_trace(path, SYNTHETIC, 2.0, parameters.seed)
        return read_trace(path)


def load_of(
    parameters: Parameters, trace: list[Arrival] | None, mix: str, rate: float, seconds: float, seed: int
) -> list[Arrival]:
    """Return the load of a mix at a rate."""
    if mix == TRACE:
        assert trace is not None, "the mix is one of the parameters, so the trace has been read"
        if parameters.trace is None:  # any part of a synthetic one is as good; its start has no long prompts
            trace = trace[random.Random(seed).randrange(len(trace) // 2) :]
        return scaled(trace, parameters.shorter, rate, parameters.most_prompt, seconds)
    given = MIXES[mix]
    chosen = Mix(
        parameters.prompt_tokens or given.prompt,
        parameters.output_tokens or given.output,
        parameters.bursts or given.bursts,
    )
    return arrivals(chosen, rate, seconds, seed)


def row_of(parameters: Parameters, served: list[Served]) -> dict[str, Any]:
    """Return what a load gave; dollars are of the time that load came, idle workers included."""
    seconds = parameters.seconds
    row = goodput.outcome(served, parameters.ttft_ms / 1e3, parameters.tpot_ms / 1e3, seconds)
    answered = sum(one.ttft_s is not None for one in served)
    paid = None
    if parameters.hourly is not None:
        paid = parameters.hourly * parameters.workers * seconds / SECONDS_PER_HOUR
    good = round(row["goodput_rps"] * seconds)
    return {
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
