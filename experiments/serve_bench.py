"""Handoff against an undivided engine: time to first token, time per token, and where the difference goes.

Both systems run at the same time on one machine, the engine of the undivided one on the same core as
Handoff's prefill worker. One request at a time: each prompt is new, and goes to both systems one after the
other (a pair). So a change of the machine's speed meets both, and only ratios of pairs are compared. Before
every request both systems rest: for a second after an answer, vLLM's own worker process keeps its core busy
waiting for more, and would slow down whoever is measured next.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from cluster.processes import marked
from cluster.state import StateDir
from deployments.local import served
from experiments import undivided
from experiments.client import Client, Timing, overhead_ms
from experiments.ledger import Breakdown, breakdown
from experiments.local_pair import ENGINE, local_pair, prefill_cpus, vocabulary
from experiments.results import Run, p50

KIND = "bench-serve"
HANDOFF, UNDIVIDED = "handoff", "undivided"
SYSTEMS = (UNDIVIDED, HANDOFF)
FIRST_ORDINARY_ID = 16
"""Token ids below are special ones in many vocabularies."""

MAX_DISCARDED = 5

Progress = Callable[[str], None]


class BusyError(RuntimeError):
    """The machine does not let this process read its streams in time."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured.

    Attributes:
        model: local path or hub id.
        prompt_tokens: the prompt lengths.
        output_tokens: how many tokens every answer has.
        repeats: pairs for each length that count.
        warmup: pairs for each length before those.
        engine: vLLM options of all engines.
        idle_s: how long the CPU use of both systems at rest is watched.
        rest_s: how long nothing is asked before each request.
        seed: of the random prompts.

    """

    model: str
    prompt_tokens: tuple[int, ...] = (256, 2048, 3900)
    output_tokens: int = 33
    repeats: int = 7
    warmup: int = 2
    engine: Mapping[str, Any] = field(default_factory=lambda: dict(ENGINE))
    idle_s: float = 3.0
    rest_s: float = 1.5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        system: which system answered.
        prompt_tokens: length of the prompt.
        repeat: which pair.
        timing: what the client saw.
        record: the gateway's record of it; None for the undivided system.

    """

    system: str
    prompt_tokens: int
    repeat: int
    timing: Timing
    record: Mapping[str, Any] | None = None

    def breakdown(self) -> Breakdown:
        """Return where the time went; for Handoff's samples."""
        assert self.record is not None, self.system
        timing = self.timing
        seen = {
            "client.sent": timing.sent,
            "client.first": timing.at_token(1),
            "client.decoded": timing.at_token(2),
        }
        return breakdown({**self.record["moments"], **seen})

    def as_json(self) -> dict[str, Any]:
        """Return the raw sample: clock readings relative to the client's send, in milliseconds."""
        sent = self.timing.sent
        raw: dict[str, Any] = {
            "system": self.system,
            "prompt_tokens": self.prompt_tokens,
            "repeat": self.repeat,
            "ttft_ms": round(self.timing.ttft_ms, 3),
            "tpot_ms": round(self.timing.tpot_ms, 3),
            "arrivals_ms": [[round((a.at - sent) * 1e3, 3), a.tokens] for a in self.timing.arrivals],
        }
        if self.record is not None:
            raw["kv_bytes"] = self.record.get("kv_bytes")
            raw["mode"] = self.record.get("mode")
            raw["moments_ms"] = {
                name: round((at - sent) * 1e3, 3) for name, at in self.record["moments"].items()
            }
        return raw


Pair = tuple[Sample, Sample]
"""The same prompt, answered by the undivided system and by Handoff."""


SETTLE_AT_LEAST_S = 20.0
SETTLED_WITHIN_S = 60.0
SETTLE_STEP_S = 5.0
AT_REST_PERCENT = 20.0


def measure(parameters: Parameters, progress: Progress) -> Run:
    """Bring both systems up, measure, take them down, and return the run."""
    run = Run.begin(KIND, asdict(parameters))
    file = local_pair("bench", parameters.model, parameters.engine)
    with ExitStack() as stack:
        cpus = prefill_cpus(file)
        plain = stack.enter_context(undivided.served(parameters.model, parameters.engine, cpus, progress))
        undivided.wait_ready(plain, progress)
        serving = stack.enter_context(served(file, progress))
        cluster = StateDir.of(file.name).plan()
        assert cluster is not None, "it has just been brought up"
        processes = {UNDIVIDED: plain.processes(), HANDOFF: marked(cluster.marker)}
        clients = {
            UNDIVIDED: stack.enter_context(Client(plain.url, plain.model)),
            HANDOFF: stack.enter_context(Client(serving.url, serving.model)),
        }
        _settle(processes, progress)
        pairs, discarded = _measure_pairs(parameters, clients, progress)
        progress(f"watching both systems at rest for {parameters.idle_s:g} s")
        idle = {name: cpu_percent(found, parameters.idle_s) for name, found in processes.items()}
    facts = {
        "idle_cpu_percent": idle,
        "client_overhead_ms": round(overhead_ms(list(range(max(parameters.prompt_tokens)))), 3),
        "engine_cpus": cpus,
        "pairs_discarded": discarded,
    }
    samples = [sample.as_json() for pair in pairs for sample in pair]
    return run.end({**summary(pairs), **facts}, samples)


def _measure_pairs(
    parameters: Parameters, clients: Mapping[str, Client], progress: Progress
) -> tuple[list[Pair], int]:
    ids = random.Random(parameters.seed)
    highest = vocabulary(parameters.model) - 1
    pairs: list[Pair] = []
    discarded = 0
    for length in parameters.prompt_tokens:
        repeat = -parameters.warmup
        while repeat < parameters.repeats:
            prompt = [ids.randint(FIRST_ORDINARY_ID, highest) for _ in range(length)]
            order = SYSTEMS if repeat % 2 == 0 else SYSTEMS[::-1]  # neither always comes first
            done = {system: _one(system, clients[system], prompt, repeat, parameters) for system in order}
            plain, ours = done[UNDIVIDED], done[HANDOFF]
            if plain.timing.at_once or ours.timing.at_once:
                discarded += 1
                if discarded > MAX_DISCARDED:
                    raise BusyError("answers keep arriving in one piece: this machine is too busy to measure")
                progress(f"{length} tokens: an answer arrived in one piece, measuring again")
                continue
            progress(
                f"{length} tokens, {'warm-up' if repeat < 0 else f'{repeat + 1} of {parameters.repeats}'}: "
                f"first token {plain.timing.ttft_ms:.0f} ms undivided, {ours.timing.ttft_ms:.0f} ms handoff; "
                f"per token {plain.timing.tpot_ms:.1f} and {ours.timing.tpot_ms:.1f} ms"
            )
            if repeat >= 0:
                pairs.append((plain, ours))
            repeat += 1
    return pairs, discarded


def _one(system: str, client: Client, prompt: Sequence[int], repeat: int, parameters: Parameters) -> Sample:
    request_id = f"bench-{len(prompt)}-{repeat}"
    time.sleep(parameters.rest_s)
    timing = client.complete(prompt, parameters.output_tokens, request_id)
    record = client.record(request_id) if system == HANDOFF else None
    return Sample(system, len(prompt), repeat, timing, record)


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return rows and ledger: medians, and medians of each pair's ratio, for each prompt length."""
    lengths = list(dict.fromkeys(plain.prompt_tokens for plain, _ in pairs))
    by_length = {length: [pair for pair in pairs if pair[0].prompt_tokens == length] for length in lengths}
    return {
        "rows": [row for group in by_length.values() for row in _rows(group)],
        "ledger": [_ledger(group) for group in by_length.values()],
        "outputs_equal": sum(plain.timing.text == ours.timing.text for plain, ours in pairs),
        "outputs": len(pairs),
    }


def _rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return a row for each system; ratios are Handoff's by the undivided system's."""
    rows: list[dict[str, Any]] = []
    for index, system in enumerate(SYSTEMS):
        timings = [pair[index].timing for pair in pairs]
        rows.append(
            {
                "system": system,
                "prompt_tokens": pairs[0][0].prompt_tokens,
                "ttft_ms_p50": p50([timing.ttft_ms for timing in timings]),
                "tpot_ms_p50": p50([timing.tpot_ms for timing in timings]),
                "ttft_ratio": 1.0,
                "tpot_ratio": 1.0,
                "handover_overhead_ms_p50": None,
            }
        )
    rows[-1] |= {
        "ttft_ratio": p50([ours.timing.ttft_ms / plain.timing.ttft_ms for plain, ours in pairs]),
        "tpot_ratio": p50([ours.timing.tpot_ms / plain.timing.tpot_ms for plain, ours in pairs]),
        "handover_overhead_ms_p50": p50([ours.breakdown().overhead for _, ours in pairs]),
    }
    return rows


def _ledger(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the medians of every stage at one prompt length. ``ledger_error`` is the worst sample's."""
    parts = [ours.breakdown() for _, ours in pairs]
    stages = {name: p50([part.first_token[name] for part in parts]) for name in parts[0].first_token}
    handover = {name: p50([part.handover[name] for part in parts]) for name in parts[0].handover}
    records = [ours.record or {} for _, ours in pairs]
    return {
        "prompt_tokens": pairs[0][0].prompt_tokens,
        "ttft_ms_p50": p50([ours.timing.ttft_ms for _, ours in pairs]),
        "first_token_ms_p50": stages,
        "handover_ms_p50": handover,
        "handover_overhead_ms_p50": p50([part.overhead for part in parts]),
        "handover_overhead_without_first_step_ms_p50": p50(
            [part.overhead_without_first_step for part in parts]
        ),
        "first_gap_ms_p50": p50([ours.timing.gaps_ms()[0] for _, ours in pairs]),
        "ledger_error": round(max(part.error for part in parts), 5),
        "kv_bytes": sorted({record.get("kv_bytes") for record in records}, key=str),
        "modes": sorted({str(record.get("mode")) for record in records}),
    }


def _settle(processes: Mapping[str, Sequence[psutil.Process]], progress: Progress) -> None:
    """Wait until what has just been started is at rest: Ray's own services work for a while after a start."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < SETTLED_WITHIN_S:
        busy = sum(cpu_percent(found, SETTLE_STEP_S) for found in processes.values())
        if busy < AT_REST_PERCENT and waited >= SETTLE_AT_LEAST_S:
            return
        progress(f"letting both systems come to rest: they take {busy:.0f} % of a core")


def cpu_percent(processes: Sequence[psutil.Process], seconds: float) -> float:
    """Return the CPU time that processes use, in percent of one core, over a stretch of time."""
    before = {process.pid: spent for process in processes if (spent := _cpu_s(process)) is not None}
    began = time.monotonic()
    time.sleep(seconds)
    used = sum(
        spent - before[process.pid]
        for process in processes
        if process.pid in before and (spent := _cpu_s(process)) is not None
    )
    return round(100 * used / (time.monotonic() - began), 2)


def _cpu_s(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)
