"""What a routing decision takes among many workers under load: hashes and prefixes, snapshot, choice.

The fleet is that of a gateway (`deployments/fleet.py`). Every decision follows what happens beside it:
reports that come in at REQUESTS_S decisions a second, a prompt that has been computed, a request that has
ended. These are not counted; bringing the snapshot up to date with them is.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from actors.messages import LoadReport, ModelFiles, Role, WorkerInfo
from actors.steps import StepModel
from deployments.fleet import Fleet
from deployments.router import route
from deployments.snapshot import Ask
from deployments.split import Mode
from kv.chunk import KVLayout

REQUESTS_S: Final = 500
REPORTS_S: Final = 4
PROMPT: Final = 512
BLOCK: Final = 16
GROUPS: Final = 50
"""Of prompts: those of one group share their first half."""
EACH: Final = 4
"""Requests under way, for each worker."""
RATES: Final = 8
"""Peers of a worker that have a measured rate."""


def decisions(workers: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Return microseconds of a decision, for each number of workers: all of it, and the choice alone."""
    return [_decisions(number, count) for number in workers]


def _decisions(workers: int, count: int) -> dict[str, Any]:
    drawn, fleet = random.Random(workers), Fleet()
    names = [f"worker-{i}" for i in range(workers)]
    layout = KVLayout("m", "bfloat16", 32, BLOCK, 4096 * BLOCK, "fake")
    for i, name in enumerate(names):
        role: Role = "prefill" if i % 2 else "decode"
        fleet.add(
            WorkerInfo(name, role, name, 0, ModelFiles("m", "/m"), layout, 1 << 17, 1 << 14, (), ("", 0))
        )
    prefixes = [[drawn.randrange(32_000) for _ in range(PROMPT // 2)] for _ in range(GROUPS)]
    under_way: deque[str] = deque()
    whole, chosen = [], []
    warm = EACH * workers
    for turn in range(warm + count):
        for _ in range(_reports(workers, turn)):
            fleet.report(drawn.choice(names), _report(drawn, names))
        if turn % 2 == 0 and under_way:
            fleet.prefilled(under_way[-1])
        if len(under_way) >= warm:
            fleet.ended(under_way.popleft())
        tokens = [*drawn.choice(prefixes), *(drawn.randrange(32_000) for _ in range(PROMPT // 2))]
        began = time.perf_counter()
        ask, blocks = fleet.known(Ask(len(tokens), 100.0, Mode.FIRST_TOKEN), tokens)
        snapshot = fleet.snapshot()
        looked = time.perf_counter()
        taken = route(snapshot, ask)
        ended = time.perf_counter()
        fleet.placed(str(turn), taken, ask, blocks)
        under_way.append(str(turn))
        if turn >= warm:
            whole.append(ended - began)
            chosen.append(ended - looked)
    return {
        "workers": workers,
        **{f"decision_us_{name}": at for name, at in _percentiles(whole).items()},
        **{f"choice_us_{name}": at for name, at in _percentiles(chosen).items()},
    }


def _reports(workers: int, turn: int) -> int:
    """Return how many reports come in between two decisions: a share of one at times."""
    due = workers * REPORTS_S / REQUESTS_S
    return int(due * (turn + 1)) - int(due * turn)


def _report(drawn: random.Random, names: Sequence[str]) -> LoadReport:
    model = StepModel()
    return LoadReport(
        replace(model, base=model.base * drawn.uniform(0.8, 1.2)),
        rates={drawn.choice(names): 1e9 * drawn.random() for _ in range(RATES)}
        if drawn.random() < 0.1
        else {},
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100}
    return {name: round(ordered[index] * 1e6, 1) for name, index in at.items()}
