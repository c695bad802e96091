"""Goodput: requests a second that meet their objectives, under open-loop load, by router mode and mix.

The systems differ in the router alone, and run on equal workers: ``adaptive`` (with the objectives, so it
refuses what it cannot serve in time), ``always``, ``never`` and ``replicas`` (plain replicas that are
taken in turn). Two engines: ``simulated`` (``experiments/simulate.py``: the router itself on a model of
the workers, exact and repeatable) and ``fake`` (`handoff serve --engine fake`: everything but the model is
real). Neither says what a real model reaches; they say what the router makes of its workers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from cluster.network import free_ports
from deployments.router import POLICIES, Policy, Slo
from experiments.children import Child, child
from experiments.results import Run
from experiments.simulate import PLANT, simulate
from experiments.workload import (
    MIXES,
    Arrival,
    Served,
    arrivals,
    prompt_of,
    read_trace,
    scaled,
    synthetic_trace,
)

KIND: Final = "bench-goodput"
SYSTEMS: Final = POLICIES
TRACE: Final = "trace"
RATES: Final = {"prefill-heavy": 5.0, "decode-heavy": 36.0, "balanced": 12.0, "bursty": 9.0, TRACE: 18.0}
"""Requests a second that the simulated workers are offered: about what the best system can just serve."""
MOST_PROMPT: Final = 3000
STARTED_WITHIN_S: Final = 240.0
ANSWERED_WITHIN_S: Final = 90.0
BLOCK_S: Final = 2.0
RESAMPLED: Final = 1000

Progress = Callable[[str], None]


class GoodputError(RuntimeError):
    """The benchmark could not be run; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured.

    Attributes:
        engines: ``simulated``, ``fake`` or both.
        model: local path, for tokenizer and configuration of the fake engine; not needed for ``simulated``.
        ttft_ms: objective of the time to first token.
        tpot_ms: objective of the time per token after it.
        seconds: of load for each system and mix; the simulated engine gets three such loads.
        slower: the fake engine's workers are that much slower than the simulated ones, with rates and
            objectives to match: this machine must be able to carry the tokens.
        trace: a file in the Mooncake format; None: a synthetic one.
        shorter: the trace's lengths are divided by this.
        mixes: which.
        seed: of everything drawn.

    """

    engines: tuple[str, ...] = ("simulated", "fake")
    model: str | None = None
    ttft_ms: float = 1500.0
    tpot_ms: float = 60.0
    seconds: float = 20.0
    slower: float = 2.0
    trace: str | None = None
    shorter: float = 6.0
    mixes: tuple[str, ...] = (*MIXES, TRACE)
    seed: int = 1


def measure(parameters: Parameters, progress: Progress) -> Run:
    """Run every system on every mix, and return the run."""
    run = Run.begin(KIND, {**asdict(parameters), "workers": asdict(PLANT), "rates": RATES})
    trace = _trace(parameters)
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for engine in parameters.engines:
        for system, mix, load, served in _ENGINES[engine](parameters, trace, progress):
            row = _row(parameters, engine, system, mix, load, served)
            told = ", ".join(
                f"{key} {row[key]}" for key in ("goodput_rps", "offered_rps", "refused", "errors")
            )
            progress(f"{engine} {mix} {system}: {told}")
            rows.append(row)
            if engine != "simulated":  # the parameters give those again
                samples.append(_sample(row, served))
    return run.end({"rows": rows, "ratios": ratios(rows)}, samples)


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each engine and mix, adaptive's goodput by each other system's, and by the best of them."""
    found = []
    for engine, mix in dict.fromkeys((row["engine"], row["mix"]) for row in rows):
        good = {
            row["system"]: row["goodput_rps"] for row in rows if (row["engine"], row["mix"]) == (engine, mix)
        }
        ours = good.pop("adaptive")
        by = {name: round(ours / value, 3) if value else None for name, value in good.items()}
        best = max(good.values())
        found.append(
            {"engine": engine, "mix": mix, "by": by, "by_best": round(ours / best, 3) if best else None}
        )
    return found


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


def _row(
    parameters: Parameters, engine: str, system: str, mix: str, load: float, served: Sequence[Served]
) -> dict[str, Any]:
    slower = parameters.slower if engine == "fake" else 1.0
    ttft_ms, tpot_ms = parameters.ttft_ms * slower, parameters.tpot_ms * slower
    good = [one.good(ttft_ms / 1e3, tpot_ms / 1e3) for one in served]
    ttft = sorted(one.ttft_s * 1e3 for one in served if one.ttft_s is not None)
    tpot = sorted(one.tpot_s * 1e3 for one in served if one.tpot_s is not None)
    causes = [one.cause for one in served if one.cause]
    return {
        "engine": engine,
        "system": system,
        "mix": mix,
        "goodput_rps": round(sum(good) / load, 3),
        "goodput_ci95": _interval(served, good, load),
        "offered_rps": round(len(served) / load, 3),
        "slo": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms},
        "ttft_ms_p50": _percentile(ttft, 0.5),
        "ttft_ms_p99": _percentile(ttft, 0.99),
        "tpot_ms_p50": _percentile(tpot, 0.5),
        "tpot_ms_p99": _percentile(tpot, 0.99),
        "requests": len(served),
        "refused": sum(one.refused for one in served),
        "errors": sum(bool(one.error) for one in served),
        "decisions": {cause: causes.count(cause) for cause in sorted(set(causes))},
    }


def _sample(row: dict[str, Any], served: Sequence[Served]) -> dict[str, Any]:
    """Return the raw times of a row: arrival (s), prompt and output tokens, and what came (ms), the error."""

    def one(of: Served) -> list[object]:
        came = [None if s is None else round(s * 1e3, 1) for s in (of.ttft_s, of.tpot_s)]
        return [round(of.arrival.at, 3), of.arrival.prompt, of.arrival.output, *came, of.error or None]

    head = {key: row[key] for key in ("engine", "system", "mix")}
    return {**head, "requests": [one(of) for of in served]}


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


def _interval(served: Sequence[Served], good: Sequence[bool], seconds: float) -> list[float]:
    """Return 95 % of what other stretches of such a load would give: bootstrap over blocks of arrivals."""
    blocks: dict[int, int] = dict.fromkeys(range(max(1, int(seconds / BLOCK_S))), 0)
    for one, is_good in zip(served, good, strict=True):
        index = int(one.arrival.at / BLOCK_S) % len(blocks)
        blocks[index] += is_good
    drawn, counts = random.Random(0), list(blocks.values())
    found = sorted(sum(drawn.choices(counts, k=len(counts))) / seconds for _ in range(RESAMPLED))
    return [round(found[int(share * RESAMPLED)], 3) for share in (0.025, 0.975)]


# --- simulated

Measured = tuple[Policy, str, float, list[Served]]
"""(system, mix, seconds of load, what became of its requests)."""


def _simulated(parameters: Parameters, trace: list[Arrival], progress: Progress) -> Iterator[Measured]:
    objectives = Slo(parameters.ttft_ms / 1e3, parameters.tpot_ms / 1e3)
    for mix, system in itertools.product(parameters.mixes, SYSTEMS):
        adaptive = system == "adaptive"
        served: list[Served] = []
        for turn in range(3):
            load = _load(parameters, trace, mix, 1.0, parameters.seed + turn)
            part = simulate(load, system, slo=objectives if adaptive else Slo(), admit=adaptive)
            later = turn * parameters.seconds
            served += [replace(one, arrival=replace(one.arrival, at=one.arrival.at + later)) for one in part]
        yield system, mix, 3 * parameters.seconds, served


# --- the fake engine, served


def _fake(parameters: Parameters, trace: list[Arrival], progress: Progress) -> Iterator[Measured]:
    """One bring-up for all systems: a header says how each request is routed. They take turns, mix by mix."""
    if parameters.model is None:
        raise GoodputError("the fake engine needs a model folder for its tokenizer")
    data = cluster_file(parameters)
    url = f"http://127.0.0.1:{data['gateway']['port']}"
    argv = ["-m", "handoff", "serve", "{folder}/cluster.yaml"]
    with child("goodput", argv, {}, {"cluster.yaml": json.dumps(data)}) as server:
        _wait_ready(server, url, progress)
        asyncio.run(_offer(url, arrivals(MIXES["balanced"], 2.0, 6.0, parameters.seed + 99), "adaptive"))
        for mix in parameters.mixes:
            load = _load(parameters, trace, mix, parameters.slower, parameters.seed)
            for system in SYSTEMS:
                yield system, mix, parameters.seconds, asyncio.run(_offer(url, load, system))
                server.check()


def cluster_file(parameters: Parameters) -> dict[str, Any]:
    """Return the cluster file: the simulated workers, slowed down; the class `bench` has objectives."""
    plant, slower = PLANT, parameters.slower
    data: dict[str, Any] = {
        "name": f"goodput-{free_ports(1)[0]}",
        "model": parameters.model,
        "served_model_name": "m",
        "engine": {
            "max_model_len": 4096,
            "max_num_batched_tokens": plant.chunk,
            "max_num_seqs": plant.slots,
            "block_size": plant.block,
            "fake": {
                "kv_bytes_per_token": plant.kv_bytes,
                "kv_blocks": plant.kv_blocks,
                "prefill_tokens_s": 1 / (plant.step.token * slower),
                "step_ms": plant.step.base * 1e3 * slower,
                "step_ms_per_sequence": plant.step.sequence * 1e3 * slower,
            },
        },
        "slo": {
            "classes": {
                "bench": {"ttft_ms": parameters.ttft_ms * slower, "tpot_ms": parameters.tpot_ms * slower}
            }
        },
        "gateway": {"port": free_ports(1)[0]},
        "nodes": {
            "all": {
                "role": "both",
                "slots": max(plant.prefills, plant.decodes),
                "cpus": plant.prefills + plant.decodes,
                "object_store": "256MiB",
            }
        },
        "workers": {"prefill": {"count": plant.prefills}, "decode": {"count": plant.decodes}},
    }
    return data


def _wait_ready(server: Child, url: str, progress: Progress) -> None:
    began = time.monotonic()
    while True:
        server.check()
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                progress(f"{server.name} serves after {time.monotonic() - began:.0f} s")
                return
        except httpx.TransportError:
            pass
        if time.monotonic() - began > STARTED_WITHIN_S:
            raise GoodputError(
                f"{server.name} does not serve after {STARTED_WITHIN_S:.0f} s:\n{server.tail()}"
            )
        time.sleep(0.2)


async def _offer(url: str, load: Sequence[Arrival], system: Policy) -> list[Served]:
    """Send each request when its time has come, whatever became of those before it."""
    prompts = [prompt_of(one) for one in load]
    salt = secrets.token_hex(8)  # nothing is cached of what another system was asked
    began = time.monotonic() + 0.2

    async def one(arrival: Arrival, prompt: list[int]) -> Served:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": arrival.output,
            "ignore_eos": True,
            "stream": True,
        }
        body |= {"temperature": 0.0, "return_token_ids": True, "cache_salt": salt}
        text = json.dumps(body).encode()
        await asyncio.sleep(max(0.0, began + arrival.at - time.monotonic()))
        try:
            async with asyncio.timeout(ANSWERED_WITHIN_S):
                return await _ask(url, arrival, text, system)
        except TimeoutError:
            return Served(arrival, None, None, error=f"no answer within {ANSWERED_WITHIN_S:.0f} s")
        except (OSError, EOFError, ValueError) as error:
            return Served(arrival, None, None, error=repr(error))

    return await asyncio.gather(*(one(a, p) for a, p in zip(load, prompts, strict=True)))


async def _ask(url: str, arrival: Arrival, body: bytes, system: Policy) -> Served:
    """Make one streamed request over a connection of its own, and time its tokens."""
    parts = urlsplit(url)
    sent = time.monotonic()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\nX-Handoff-Router: {system}\r\n"
            + ("X-Handoff-Class: bench\r\n\r\n" if system == "adaptive" else "\r\n")
        )
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = answer.split(" ", 2)[1]
        if status != "200":
            said = (await reader.read()).decode(errors="replace")[:200]
            refused = status == "429"
            return Served(arrival, None, None, refused=refused, error="" if refused else f"{status}: {said}")
        cause = _cause(answer)
        first = last = 0.0
        tokens = 0
        while line := await reader.readline():
            if line == b"data: [DONE]\n":
                if tokens != arrival.output:
                    raise ValueError(f"{tokens} tokens came instead of {arrival.output}")
                each = (last - first) / (tokens - 1) if tokens > 1 else 0.0
                return Served(arrival, first - sent, each, cause)
            if line.startswith(b"data: "):
                part = json.loads(line[6:])
                if "choices" not in part:
                    raise ValueError(f"amid the stream: {part}")
                if count := len(part["choices"][0].get("token_ids") or ()):
                    last = time.monotonic()
                    first, tokens = first or last, tokens + count
        raise EOFError("the stream was cut short")
    finally:
        writer.transport.abort()


def _cause(head: str) -> str:
    """Return whether the answer's `x-handoff-path` tells of one worker or of two."""
    for line in head.split("\r\n"):
        if line.lower().startswith("x-handoff-path:"):
            return "handover" if ">" in line.split(";", 1)[0] else "undivided"
    return ""


_ENGINES: Final[dict[str, Callable[..., Iterator[Measured]]]] = {"simulated": _simulated, "fake": _fake}
