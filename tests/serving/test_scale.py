"""A decode worker is added under load, serves, finishes what it has when the load is gone, and ends.

What decides it dies meanwhile, and goes on where it was.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from asking import Endpoint, until
from comparing import prompt
from fake_serving import fake_serving, process
from test_roles import Load
from test_storm import VOCAB, cluster_file

from actors.fake_kv import continuation

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

ADDED = "decode-worker-1"
FEW = 3
"""Requests at once that one worker can do alone, and of which each of two gets one or more."""
FAKE = {"kv_bytes_per_token": 64, "kv_blocks": 2000, "prefill_tokens_s": 20_000, "step_ms": 20}


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[str, Endpoint]]:
    """Two decode nodes, of which one has no worker at first."""
    data = cluster_file(model, **FAKE)
    data["engine"]["max_num_seqs"] = 8
    data["nodes"]["decode"]["count"] = 2
    data["workers"] = {"decode": {"most": 2}}
    data["roles"] = {"occupied": 0.5, "spare": 0.9, "smooth_s": 0.5, "idle_s": 2}
    with fake_serving(data, {}) as (_, url):
        yield data["name"], Endpoint(url, "tiny")


def test_a_worker_comes_with_the_load_and_leaves_when_it_has_finished(served: tuple[str, Endpoint]) -> None:
    cluster, endpoint = served
    assert set(endpoint.workers()) == {"prefill-worker-0", "decode-worker-0"}
    answers = Load(endpoint, 20, 100)
    with answers.running() as wait:
        wait(lambda: ADDED in endpoint.workers(), "a decode worker is added")
        wait(lambda: any(r["decode_worker"] == ADDED for r in answers.records[-20:]), "it is asked to")
        process(cluster, "ray::RoleBalancer").kill()
    assert all(record["attempts"] == 1 for record in answers.records)
    tokens = [prompt(30, f"long {i}") for i in range(FEW)]
    with ThreadPoolExecutor(FEW) as pool:
        long = [pool.submit(endpoint.complete, one, max_tokens=700, ignore_eos=True) for one in tokens]
        until(lambda: endpoint.workers()[ADDED]["requests"] > 0, "one is at the worker that was added")
        until(lambda: ADDED not in endpoint.workers(), "it is given up", within_s=90)
        for asked, future in zip(tokens, long, strict=True):
            answer = future.result(timeout=60)
            assert answer.tokens == continuation(asked, 700, VOCAB)
            assert answer.record["attempts"] == 1
    assert ADDED in {future.result().record["decode_worker"] for future in long}
    answer = endpoint.complete(prompt(30, "after"), max_tokens=5, ignore_eos=True)
    assert answer.record["decode_worker"] == "decode-worker-0"
    endpoint.settled()
