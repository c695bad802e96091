"""What a step of a real engine takes on this machine: plain vLLM's own server, asked over HTTP."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median
from typing import Any, Final

import numpy as np

from actors.steps import StepModel
from experiments import energy, undivided
from experiments.client import Client
from experiments.energy import Counter, EnergyError, Phase, Watts
from experiments.local_pair import ENGINE, vocabulary

PROMPTS: Final = (64, 256, 512, 1024, 2048)
AT_ONCE: Final = (1, 2, 4, 8)
DECODE_PROMPT, DECODE_TOKENS = 64, 48
REPEATS: Final = 3
FIRST_ID: Final = 10
ENERGY_S: Final = 3.0
"""Of a phase, at least: NVML's counter moves every tenth of a second or so."""
PHASES: Final[Mapping[Phase, tuple[int, int, int]]] = {
    "idle": (0, 0, 0),
    "prefill": (2, PROMPTS[-1], 1),
    "decode": (AT_ONCE[-1], DECODE_PROMPT, 128),
}
"""Clients at once, and tokens of their prompts and answers; two for prompts, so that one is always there."""
Progress = Callable[[str], None]
Prompts = Callable[[int], list[int]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one engine takes: the step model, its samples, its device's power, or else why that is missing."""

    step: StepModel
    samples: list[dict[str, Any]]
    watts: Watts | None
    missing: str | None


def measure(model: str, progress: Progress, engine: Mapping[str, Any] = ENGINE) -> Measured:
    """Measure one engine on one core."""
    core = min(os.sched_getaffinity(0))
    drawn, most = random.Random(0), vocabulary(model)
    samples: list[dict[str, Any]] = []

    def prompt(length: int) -> list[int]:
        return [drawn.randrange(FIRST_ID, most) for _ in range(length)]

    with undivided.served(model, engine, str(core), progress) as server:
        undivided.wait_ready(server, progress)
        for turn in range(-1, REPEATS):  # the first one warms up
            for length in PROMPTS:
                with Client(server.url, server.model) as client:
                    timing = client.complete(prompt(length), 2, f"verdict-{length}-{turn}")
                if turn >= 0:
                    samples.append({"what": "first token", "prompt": length, "seconds": timing.ttft_ms / 1e3})
            for count in AT_ONCE:
                gaps = _together(
                    server.url, server.model, [prompt(DECODE_PROMPT) for _ in range(count)], turn
                )
                if turn >= 0:
                    samples.append({"what": "step", "at_once": count, "seconds": median(gaps) / 1e3})
        used, watts, missing = _watts(core, server, prompt, progress)
        server.child.check()
    firsts = {length: _p50(samples, "prompt", length) for length in PROMPTS}
    steps = {count: _p50(samples, "at_once", count) for count in AT_ONCE}
    step = fit(firsts, steps, int(engine["max_num_batched_tokens"]))
    return Measured(step, samples + used, watts, missing)


def _watts(
    core: int, server: undivided.Server, prompt: Prompts, progress: Progress
) -> tuple[list[dict[str, Any]], Watts | None, str | None]:
    """Return samples of energy, and what they say, or why they say nothing."""
    found: list[dict[str, Any]] = []
    try:
        counter: Counter = energy.counter(core)
        progress(f"reading the energy of {counter.device} at rest, in prefill and in decode")
        for _ in range(REPEATS):
            for phase, clients in PHASES.items():
                found.append(energy.sample(counter, phase, partial(_keep, server, prompt, *clients)))
        return found, energy.watts(counter, found), None
    except EnergyError as error:
        return found, None, str(error)


def _keep(server: undivided.Server, prompt: Prompts, clients: int, length: int, tokens: int) -> None:
    """Keep an engine busy with so many requests at once for ``ENERGY_S``; at rest if there are none."""
    until = time.monotonic() + ENERGY_S

    def one(index: int) -> None:
        with Client(server.url, server.model) as client:
            turns = itertools.count()
            while time.monotonic() < until:
                client.complete(prompt(length), tokens, f"energy-{length}-{index}-{next(turns)}")

    if not clients:
        time.sleep(ENERGY_S)
        return
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))


def _together(url: str, model: str, prompts: Sequence[Sequence[int]], turn: int) -> list[float]:
    """Return the milliseconds between tokens of requests that are answered at the same time."""

    def one(index: int) -> list[float]:
        with Client(url, model) as client:
            name = f"verdict-{len(prompts)}-{index}-{turn}"
            return client.complete(prompts[index], DECODE_TOKENS, name).gaps_ms()

    with ThreadPoolExecutor(len(prompts)) as pool:
        return [gap for gaps in pool.map(one, range(len(prompts))) for gap in gaps]


def _p50(samples: Sequence[Mapping[str, Any]], field: str, value: int) -> float:
    return float(median(one["seconds"] for one in samples if one.get(field) == value))


def fit(firsts: Mapping[int, float], steps: Mapping[int, float], chunk: int) -> StepModel:
    """Fit a step model to seconds to the first token by prompt length, and of a step by sequences at once.

    A step takes base + sequence x n; a first token a constant (HTTP, tokenising), base for each chunk of the
    prompt, and token and token_context of it. Least squares of relative errors; what would be negative is 0.
    """
    counts = np.array(list(steps), float)
    base, sequence = _least_squares([np.ones_like(counts), counts], np.array([*steps.values()]))
    lengths = np.array(list(firsts), float)
    rest = np.array([*firsts.values()])
    chunks = np.array([ceil(length / chunk) for length in firsts], float)
    features = [np.ones_like(lengths), lengths, lengths**2 / 2]
    _, token, token_context = _least_squares(features, rest - base * chunks)
    return StepModel(float(base), float(sequence), float(token), float(token_context), 0.0)


def _least_squares(features: Sequence[Any], values: Any) -> list[float]:
    """Coefficients of relative errors' least squares, none below 0: the most negative one is left out."""
    kept = list(range(len(features)))
    while kept:
        weights = 1 / np.maximum(values, 1e-6)
        matrix = np.stack([features[index] * weights for index in kept], 1)
        found = np.linalg.lstsq(matrix, values * weights, rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found * [np.mean(features[index]) for index in kept])))
    result = [0.0] * len(features)
    for index, value in zip(kept, found, strict=True):
        result[index] = float(value)
    return result
