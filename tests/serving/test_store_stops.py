"""The tier's store stops answering, and then dies, while requests run: nobody gets an error or a wrong token.

The fake engine's tokens follow from all KV of a request, loaded or computed.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from asking import Endpoint, until
from comparing import prompt
from test_storm import FAKE, STARTED_WITHIN_S, VOCAB, answers, cluster_file, errors

from actors.fake_kv import continuation
from experiments.children import child
from experiments.s3_server import S3Server
from experiments.storm import plans, storm

pytestmark = [pytest.mark.cluster]

REQUESTS, AT_ONCE, MOST_TOKENS = 400, 24, 16
PREFILL_TOKENS_S = 12_000
SETTLED_WITHIN_S = 20.0


@pytest.fixture
def tiered(model: Path, own: S3Server) -> Iterator[Endpoint]:
    """A cluster whose cache is much smaller than what its requests have in common."""
    data = cluster_file(model, **{**FAKE, "prefill_tokens_s": PREFILL_TOKENS_S})
    data["s3"] = {**asdict(replace(own.settings, prefix="store-stops", timeout_s=5.0)), "tier": True}
    data["recompute"] = {"tokens_per_s": 100_000}
    url = f"http://127.0.0.1:{data['gateway']['port']}"
    argv = ["-m", "handoff", "serve", "{folder}/cluster.yaml"]
    with child("store-stops", argv, {}, {"cluster.yaml": json.dumps(data)}) as server:
        until(lambda: answers(server, url), "the cluster serves", STARTED_WITHIN_S)
        yield Endpoint(url, "tiny")
        server.check()


def counters(endpoint: Endpoint) -> dict[str, Any]:
    found: dict[str, Any] = endpoint.workers()["prefill-worker-0"]["tier"]
    return found


def test_a_store_that_stops_and_dies_under_load_fails_no_request(tiered: Endpoint, own: S3Server) -> None:
    begins = [prompt(1100, f"begin {i}") for i in range(12)]
    prompts = [[*begins[i % 12], *prompt(20 + i, f"end {i}")] for i in range(60)]
    right = {tuple(tokens): continuation(tokens, MOST_TOKENS, VOCAB) for tokens in prompts}
    asked = [replace(plan, params={}) for plan in plans(REQUESTS, 5, prompts, MOST_TOKENS, aborted=0.0)]
    sound: dict[str, Any] = {}
    fired: list[str] = []
    done = threading.Event()

    def faults() -> None:
        deadline = time.monotonic() + 30
        while not done.is_set() and time.monotonic() < deadline:
            if (seen := counters(tiered))["hits"] >= 3 and seen["written_bytes"] > 0:
                sound.update(seen)
                os.kill(own.pid, signal.SIGSTOP)
                fired.append("stopped")
                break
            time.sleep(0.1)
        if not done.wait(1.5):
            own.stop()
            fired.append("killed")

    thread = threading.Thread(target=faults)
    thread.start()
    began = time.monotonic()
    try:
        outcomes = storm(tiered.url, tiered.model, asked, AT_ONCE)
    finally:
        done.set()
        thread.join()
    took, after = time.monotonic() - began, counters(tiered)
    print(f"{REQUESTS} requests in {took:.0f} s; before the fault {sound}, in the end {after}")
    assert fired == ["stopped", "killed"], "the storm was over too early"
    assert after["failures"] > sound["failures"]
    assert not errors(outcomes)
    for outcome in outcomes:
        assert outcome.complete
        assert outcome.tokens == right[tuple(outcome.plan.prompt)][: outcome.plan.max_tokens]
    tiered.settled(SETTLED_WITHIN_S)
    own.start()
    until(lambda: _hits_again(tiered, begins[0]), "what was kept is loaded again", within_s=45)
    tiered.settled()


def _hits_again(endpoint: Endpoint, begin: list[int]) -> bool:
    """Push the beginning out of the workers' own caches, and ask for it."""
    before = counters(endpoint)["hits"]
    for i in range(4):
        endpoint.complete(prompt(1500, f"push out {i} {time.monotonic()}"), max_tokens=1)
    tokens = [*begin, *prompt(30, time.monotonic())]
    answer = endpoint.complete(tokens, max_tokens=4, ignore_eos=True)
    assert answer.tokens == continuation(tokens, 4, VOCAB)
    return bool(counters(endpoint)["hits"] > before)
