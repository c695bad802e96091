"""Chaos: what serves requests is killed, cut and damaged at random; then the history of them is judged.

A cluster of the fake engine on this machine, whose every token proves the KV that it was computed from. The
seed decides which requests are made and which faults happen in which order; when each of them strikes
depends on the machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from actors.fake_kv import continuation
from cluster.file import ClusterFile
from cluster.network import free_ports
from experiments.faulty_serve import CommandError, Controls, gone, served_faulty, until
from experiments.storm import Load, Outcome, plans, wrong
from kv.faulty import DAMAGES, Fault

Progress = Callable[[str], None]

RUNGS = ("tcp", "plasma")
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
STAGES = ("post 0", "post 1", "post end", "take 0", "take 1", "take end")
BACK_WITHIN_S = 180.0
SETTLED_WITHIN_S = 10.0
FIRED_WITHIN_S = 60.0
TOLD_S = 5.0
"""Between two lines of progress."""
MOST_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is done.

    Attributes:
        model: a folder with tokenizer and configuration; nothing else of it is read.
        seed: of requests and faults.
        requests: how many.
        at_once: how many of them.
        aborted: share of them whose client leaves.
        slow: share of them whose client reads slowly.
        pause_s: between two faults, at most.
        kinds: of faults, drawn evenly; see ``_FAULTS``.

    """

    model: str
    seed: int = 0
    requests: int = 10_000
    at_once: int = 32
    aborted: float = 0.2
    slow: float = 0.05
    pause_s: float = 5.0
    kinds: tuple[str, ...] = ("worker", "stage", "damage", "lost", "stalled", "gateway", "raylet")


@dataclass(slots=True)
class Report:
    """What came of it.

    Attributes:
        answered: requests that were answered to their end.
        left: whose client left as planned.
        broken: connections that broke; their requests were made again.
        cut_short: of those, how many had been answered in part.
        faults: that happened, by kind.
        wrong: what is wrong in the history, a line each.
        settled_s: how long workers held anything after the last request.
        grown_mbytes: by process that lived through the second half: how much its memory grew then.
        seconds: all of it.
        history: what came of every request, in the order of their ends.

    """

    answered: int = 0
    left: int = 0
    broken: int = 0
    cut_short: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    settled_s: float = 0.0
    grown_mbytes: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    history: list[Outcome] = field(default_factory=list)


def cluster_file(model: str) -> ClusterFile:
    """Two gateways, and two prefill and two decode nodes, each with a worker of the fake engine."""
    node = {"cpus": 1, "object_store": "80MiB", "count": 2}
    return ClusterFile.model_validate(
        {
            "name": f"chaos-{os.getpid()}",
            "model": model,
            "served_model_name": "tiny",
            "engine": {
                "max_model_len": 2048,
                "max_num_batched_tokens": 256,
                "max_num_seqs": 64,
                "block_size": 32,
                "fake": {
                    "kv_bytes_per_token": 1024,
                    "kv_blocks": 400,
                    "prefill_tokens_s": 20_000,
                    "step_ms": 4,
                    "step_ms_per_sequence": 0.02,
                },
            },
            "gateway": {"port": free_ports(1)[0], "replicas": 2},
            "recompute": {"tokens_per_s": 1_000_000},
            "router": {"mode": "always"},
            "nodes": {"prefill": {"role": "prefill", **node}, "decode": {"role": "decode", **node}},
            "workers": {"prefill": {"count": 2}, "decode": {"count": 2}},
        }
    )


def run(parameters: Parameters, progress: Progress) -> Report:
    """Bring a cluster up, break it while requests run, and judge what came of them.

    Raises ``ChildError`` or ``WaitError`` if the cluster does not come up, or back after a fault.
    """
    progress("starting two gateways and four workers")
    with served_faulty(cluster_file(parameters.model)) as controls:
        return strike(controls, parameters, progress)


def strike(controls: Controls, parameters: Parameters, progress: Progress) -> Report:
    """Break a cluster while requests run, and judge what came of them; afterwards it is whole again."""
    drawn = random.Random(parameters.seed)
    vocab = int(json.loads((Path(parameters.model) / "config.json").read_text("utf-8"))["vocab_size"])
    prompts = [[drawn.randrange(7, vocab) for _ in range(drawn.randrange(1, 900))] for _ in range(120)]
    right = {tuple(tokens): continuation(tokens, MOST_TOKENS, vocab) for tokens in prompts}
    asked = plans(
        parameters.requests, parameters.seed, prompts, MOST_TOKENS, parameters.aborted, slow=parameters.slow
    )
    report, began = Report(), time.monotonic()
    memory: dict[int, tuple[str, int]] = {}
    with Load(lambda: controls.url, "tiny", asked, parameters.at_once, parameters.requests) as load:
        told = 0.0
        while load.running:
            kind = drawn.choice(parameters.kinds)
            _pause(load, drawn.uniform(0.2, parameters.pause_s))
            if not load.running:
                break
            _FAULTS[kind](controls, drawn, load)
            report.faults[kind] += 1
            if not memory and len(load.outcomes) > parameters.requests // 2:
                memory = _memory(controls)
            if time.monotonic() - told > TOLD_S:
                told = time.monotonic()
                faults = ", ".join(f"{name} {count}" for name, count in sorted(report.faults.items()))
                progress(f"{len(load.outcomes)} of {parameters.requests} requests; faults: {faults}")
    _mend(controls)
    report.settled_s = controls.settled(SETTLED_WITHIN_S)
    now = _memory(controls)
    report.grown_mbytes = {
        f"{name} {pid}": (now[pid][1] - before) / 2**20
        for pid, (name, before) in memory.items()
        if pid in now
    }
    _judge(report, load.outcomes, parameters.requests, right)
    report.seconds = time.monotonic() - began
    return report


def _judge(
    report: Report, outcomes: list[Outcome], requests: int, right: dict[tuple[int, ...], list[int]]
) -> None:
    report.history = outcomes
    report.wrong = wrong(outcomes, right)
    ends = Counter(outcome.plan.index for outcome in outcomes if not outcome.broken)
    report.wrong += [f"request {index}: it never ended" for index in range(requests) if not ends[index]]
    report.wrong += [f"request {index}: it ended {ends[index]} times" for index in ends if ends[index] > 1]
    report.answered = sum(outcome.complete for outcome in outcomes)
    report.broken = sum(outcome.broken for outcome in outcomes)
    report.cut_short = sum(outcome.broken and bool(outcome.tokens) for outcome in outcomes)
    report.left = len(outcomes) - report.answered - report.broken


def _pause(load: Load, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while load.running and time.monotonic() < deadline:
        time.sleep(0.05)


def _memory(controls: Controls) -> dict[int, tuple[str, int]]:
    """Resident bytes of gateways and workers, by process."""
    found: dict[int, tuple[str, int]] = {}
    for node in ("head", *NODES):
        for what in ("ray::ServeReplica", "ray::FaultyWorker"):
            for process in controls.processes(node, what):
                with suppress(psutil.Error):
                    found[process.pid] = (node, process.memory_info().rss)
    return found


# -- faults ----------------------------------------------------------------------------------------


def _workers_back(controls: Controls, load: Load) -> bool:
    """Wait until all workers are alive; return False if the load has ended before."""

    def back() -> bool:
        with suppress(httpx.HTTPError):
            return not load.running or len(controls.alive()) == 4
        return False

    until(back, "all workers are alive", BACK_WITHIN_S)
    return load.running


def _kill_worker(controls: Controls, drawn: random.Random, load: Load) -> None:
    node = drawn.choice(NODES)
    if _workers_back(controls, load):
        pid = controls.kill(node, "ray::FaultyWorker")
        until(lambda: gone(pid), f"the worker on {node} is dead")


def _kill_raylet(controls: Controls, drawn: random.Random, load: Load) -> None:
    """With its raylet, a node loses its object store and its worker; the node is started again."""
    node = drawn.choice(NODES)
    if _workers_back(controls, load):
        pid = controls.kill(node, "/raylet")
        until(lambda: gone(pid), f"the raylet of {node} is dead")


def _kill_at_a_stage(controls: Controls, drawn: random.Random, load: Load) -> None:
    stage, index = drawn.choice(STAGES), drawn.randrange(2)
    name = f"{'prefill' if stage.startswith('post') else 'decode'}-worker-{index}"
    if _workers_back(controls, load):
        pid = controls.die_at(name, stage)
        until(lambda: gone(pid) or not load.running, f"{name} dies at {stage}", FIRED_WITHIN_S)


def _suffer(kinds: tuple[str, ...]) -> Callable[[Controls, random.Random, Load], None]:
    def suffer(controls: Controls, drawn: random.Random, load: Load) -> None:
        name, rung = f"decode-worker-{drawn.randrange(2)}", drawn.choice(RUNGS)
        fault = Fault(drawn.choice(kinds), times=drawn.randrange(1, 6))  # type: ignore[arg-type]
        with suppress(CommandError):  # it may be dead at the moment
            controls.worker(name, "suffer", rung, fault)

    return suffer


def _kill_gateway(controls: Controls, drawn: random.Random, load: Load) -> None:
    which = drawn.randrange(2)
    until(lambda: len(controls.gateways()) == 2 or not load.running, "both gateways serve", BACK_WITHIN_S)
    if load.running:
        pid = controls.gateways()[which]
        os.kill(pid, signal.SIGKILL)
        until(lambda: gone(pid), "the gateway is dead")


def _mend(controls: Controls) -> None:
    """Wait until everything is there, and have no faults any more."""
    until(lambda: len(controls.gateways()) == 2, "both gateways serve", BACK_WITHIN_S)
    until(lambda: len(controls.alive()) == 4, "all workers are alive", BACK_WITHIN_S)
    for name in controls.alive():
        for rung in RUNGS:
            controls.worker(name, "suffer", rung)


_FAULTS: dict[str, Callable[[Controls, random.Random, Load], None]] = {
    "worker": _kill_worker,
    "stage": _kill_at_a_stage,
    "damage": _suffer(DAMAGES),
    "lost": _suffer(("lost",)),
    "stalled": _suffer(("stalled",)),
    "gateway": _kill_gateway,
    "raylet": _kill_raylet,
}
"""By kind: a worker is killed, at any moment or at a stage of a transfer; KV is damaged, lost or stalled; a
gateway is killed; a node's raylet is."""
