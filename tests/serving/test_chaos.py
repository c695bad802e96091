"""Workers and a node are killed while requests run, on the fake engine: every answer is whole and right.

The fake engine's tokens follow from all KV of a request, so an answer that was put together wrongly shows.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from asking import PENDING, Endpoint, until
from comparing import prompt
from storm import plans, storm
from test_storm import FAKE, STARTED_WITHIN_S, VOCAB, answers, cluster_file, errors

from actors.fake_kv import continuation
from cluster.launch import NODE_NAME
from cluster.processes import marked
from cluster.state import StateDir
from experiments.children import child

pytestmark = [pytest.mark.cluster]

REQUESTS, AT_ONCE, MOST_TOKENS = 1500, 24, 60
SETTLED_WITHIN_S = 20.0


class Cluster:
    """Two prefill and two decode nodes, each with one worker."""

    def __init__(self, endpoint: Endpoint, marker: str) -> None:
        self.endpoint, self._marker = endpoint, marker

    def kill(self, node: str, what: str) -> int:
        """SIGKILL the process on a node whose command line starts or ends with `what`; return its id."""
        for process in marked(self._marker):
            try:
                command = process.cmdline()[0]
                if process.environ().get(NODE_NAME) == node and command.startswith(what) | command.endswith(
                    what
                ):
                    os.kill(process.pid, signal.SIGKILL)
                    return process.pid
            except (psutil.Error, IndexError, OSError):
                continue
        raise AssertionError(f"there is no {what} on {node}")

    def alive(self) -> set[str]:
        return {name for name, worker in self.endpoint.workers().items() if worker["alive"]}

    def left(self) -> dict[str, dict[str, Any]]:
        """What workers that are alive still hold."""
        return {
            name: held
            for name, worker in self.endpoint.workers().items()
            if worker["alive"]
            and (
                held := {
                    key: worker.get(key, "unknown") for key in PENDING if worker.get(key, "unknown") != 0
                }
            )
        }


@pytest.fixture(scope="module")
def four(model: Path) -> Iterator[Cluster]:
    data = cluster_file(model, **{**FAKE, "step_ms": 4, "prefill_tokens_s": 20_000})
    for group in data["nodes"].values():
        group["count"] = 2
    data["workers"] = {"prefill": {"count": 2}, "decode": {"count": 2}}
    data["recompute"] = {"tokens_per_s": 100_000}
    url = f"http://127.0.0.1:{data['gateway']['port']}"
    with child(
        "chaos", ["-m", "handoff", "serve", "{folder}/cluster.yaml"], {}, {"cluster.yaml": json.dumps(data)}
    ) as server:
        until(lambda: answers(server, url), "the cluster serves", STARTED_WITHIN_S)
        plan = StateDir.of(data["name"]).plan()
        assert plan is not None
        yield Cluster(Endpoint(url, "tiny"), plan.marker)


@pytest.mark.timeout(400)
def test_nothing_is_lost_when_workers_and_a_node_are_killed(four: Cluster) -> None:
    assert len(four.alive()) == 4
    prompts = [prompt(20 + 600 * i // 60, f"chaos {i}") for i in range(60)]
    right = {tuple(tokens): continuation(tokens, MOST_TOKENS, VOCAB) for tokens in prompts}
    asked = [replace(plan, params={}) for plan in plans(REQUESTS, 3, prompts, MOST_TOKENS, aborted=0.0)]
    seen: list[set[str]] = []
    fired: list[str] = []
    done = threading.Event()

    def after(seconds: float, what: Callable[[], object], name: str) -> None:
        if not done.wait(seconds):
            what()
            fired.append(name)

    def faults() -> None:
        after(1.0, lambda: four.kill("prefill-0", "ray::Worker"), "prefill worker")
        after(2.0, lambda: four.kill("decode-0", "ray::Worker"), "decode worker")
        after(2.0, lambda: four.kill("decode-1", "/raylet"), "node")
        after(0.5, lambda: seen.append(four.alive()), "look")

    thread = threading.Thread(target=faults)
    thread.start()
    began = time.monotonic()
    try:
        outcomes = storm(four.endpoint.url, four.endpoint.model, asked, AT_ONCE)
    finally:
        done.set()
        thread.join()
    print(f"{REQUESTS} requests in {time.monotonic() - began:.0f} s; alive amid it: {seen}")
    assert fired == ["prefill worker", "decode worker", "node", "look"], "the storm was over too early"
    assert "decode-worker-0" not in seen[0] or "decode-worker-1" not in seen[0]
    assert not errors(outcomes)
    assert len(outcomes) == REQUESTS
    for outcome in outcomes:
        assert outcome.complete
        assert outcome.tokens == right[tuple(outcome.plan.prompt)][: outcome.plan.max_tokens]
    until(lambda: not four.left(), "nothing is left on workers that are alive", SETTLED_WITHIN_S)
    back = {"prefill-worker-0", "prefill-worker-1", "decode-worker-0"}
    until(lambda: back <= four.alive(), "killed workers are back", 120)
    assert "decode-worker-1" not in four.alive(), "its node is gone"
    answer = four.endpoint.complete(prompts[0], max_tokens=8, ignore_eos=True)
    assert answer.tokens == right[tuple(prompts[0])][:8]
