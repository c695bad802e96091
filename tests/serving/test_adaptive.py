"""The router at work: adaptive routing and admission over HTTP, on the fake engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import Endpoint, until
from comparing import prompt
from test_storm import STARTED_WITHIN_S, VOCAB, answers, cluster_file, errors

from actors.fake_kv import continuation
from experiments.children import child
from experiments.storm import plans, storm

pytestmark = [pytest.mark.cluster]

STEP_MS, TOKENS_S = 10.0, 20_000
MAP_GBIT_S = 8.0
ASKED: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def adaptive(model: Path) -> Iterator[Endpoint]:
    """One prefill and one decode worker, adaptive, with two classes of requests beside those without one."""
    data = cluster_file(
        model, kv_bytes_per_token=1024, kv_blocks=512, step_ms=STEP_MS, prefill_tokens_s=TOKENS_S
    )
    data["router"] = {"mode": "adaptive"}
    data["map"] = {"made": "2026-01-01", "gbit_s": {"prefill-0 > decode-0": {"tcp": MAP_GBIT_S}}}
    data["slo"] = {
        "classes": {"impossible": {"ttft_ms": 0.001}, "easy": {"ttft_ms": 60_000, "tpot_ms": 1000}}
    }
    url = f"http://127.0.0.1:{data['gateway']['port']}"
    argv = ["-m", "handoff", "serve", "{folder}/cluster.yaml"]
    with child("adaptive", argv, {}, {"cluster.yaml": json.dumps(data)}) as server:
        until(lambda: answers(server, url), "the cluster serves", STARTED_WITHIN_S)
        yield Endpoint(url, "tiny")
        server.check()


def ask(endpoint: Endpoint, tokens: list[int], klass: str | None = None) -> Any:
    body = {"model": endpoint.model, "prompt": tokens, "return_token_ids": True, **ASKED}
    headers = {} if klass is None else {"X-Handoff-Class": klass}
    return endpoint.http.post("/v1/completions", json=body, headers=headers)


def test_what_was_decided_and_predicted_is_told(adaptive: Endpoint) -> None:
    tokens = prompt(600, "told")
    answer = adaptive.complete(tokens, **ASKED)
    assert answer.tokens == continuation(tokens, 16, VOCAB)
    decision = answer.record["decision"]
    assert decision["cause"] in ("undivided is faster", "handover is faster")
    assert decision["ttft_ms"] > 0
    assert decision["tpot_ms"] > 0
    assert "ms/token" in answer.record["reason"]
    path = ask(adaptive, prompt(500, "header")).headers["x-handoff-path"]
    assert "ms/token" in path
    adaptive.settled()


def test_steps_are_learnt_and_one_request_alone_is_not_divided(adaptive: Endpoint) -> None:
    for i in range(12):
        adaptive.complete(prompt(300 + 100 * i, f"learn {i}"), **ASKED)

    def learnt() -> bool:
        models = [worker["step_model"] for worker in adaptive.workers().values()]
        return any(0.8 * STEP_MS < model["base"] * 1e3 < 3 * STEP_MS for model in models)

    until(learnt, "a worker's steps are known", within_s=20)
    record = adaptive.complete(prompt(700, "alone"), **ASKED).record
    assert (record["mode"], record["decision"]["cause"]) == ("undivided", "undivided is faster")


def test_many_requests_use_every_worker_and_all_answers_are_right(adaptive: Endpoint) -> None:
    prompts = [prompt(20 + 37 * i, f"adaptive storm {i}") for i in range(40)]
    right = {tuple(tokens): continuation(tokens, 24, VOCAB) for tokens in prompts}
    outcomes = storm(adaptive.url, adaptive.model, plans(400, 5, prompts, 24), 32)
    assert not errors(outcomes)
    for outcome in outcomes:
        assert outcome.tokens == right[tuple(outcome.plan.prompt)][: len(outcome.tokens)]
        assert outcome.complete or outcome.plan.leaves
    adaptive.settled()
    workers = adaptive.workers()
    assert all(worker["steps"] > 50 for worker in workers.values())
    assert {worker["queue_ms"] for worker in workers.values()} == {0.0}


def test_a_prefix_is_looked_for_where_it_was_computed(adaptive: Endpoint) -> None:
    """The worker that is known to hold the prefix is taken, if this pays by what was measured."""
    taken = []
    for i in range(5):
        tokens = prompt(1500, f"prefix {i}")
        first = adaptive.complete(tokens, **ASKED).record
        assert first["decision"]["cached_tokens"] == 0
        again = adaptive.complete([*tokens, 77], **ASKED).record
        known = again["decision"]["cached_tokens"]
        if again["prefill_worker"] in (first["prefill_worker"], first["decode_worker"]):
            assert 0 < known <= 1500  # less, if of late a worker had evicted what it was taken to hold
        else:
            assert known == 0
        taken.append(known)
    assert any(taken)


def test_objectives_that_cannot_be_met_are_refused_at_once(adaptive: Endpoint) -> None:
    refused = ask(adaptive, prompt(800, "refused"), "impossible")
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    error = refused.json()["error"]
    assert error["code"] == 429
    assert "objectives cannot be met" in error["message"]
    body = {"model": adaptive.model, "prompt": prompt(800, "refused"), "stream": True, **ASKED}
    headers = {"X-Handoff-Class": "impossible"}
    with adaptive.http.stream("POST", "/v1/completions", json=body, headers=headers) as streamed:
        assert (streamed.status_code, streamed.headers["content-type"]) == (429, "application/json")
        assert int(streamed.headers["retry-after"]) >= 1
        told = json.loads(streamed.read())["error"]
    assert set(told) == set(error)
    assert (told["code"], told["type"]) == (429, error["type"])
    assert ask(adaptive, prompt(800, "refused"), "easy").status_code == 200
    assert ask(adaptive, prompt(800, "refused")).status_code == 200
    unknown = ask(adaptive, prompt(8, "unknown"), "nonsense")
    assert unknown.status_code == 400
    assert "easy" in unknown.json()["error"]["message"]
    adaptive.settled()


def test_a_request_may_ask_for_another_mode(adaptive: Endpoint) -> None:
    for mode, expected in (("always", ">"), ("never", "undivided"), ("replicas", "undivided")):
        body = {"model": adaptive.model, "prompt": prompt(300, f"mode {mode}"), **ASKED}
        answer = adaptive.http.post("/v1/completions", json=body, headers={"X-Handoff-Router": mode})
        assert expected in answer.headers["x-handoff-path"].split("; ")[expected == "undivided"]
    body = {"model": adaptive.model, "prompt": [1, 2, 3], **ASKED}
    wrong = adaptive.http.post("/v1/completions", json=body, headers={"X-Handoff-Router": "sometimes"})
    assert wrong.status_code == 400
    assert "adaptive, always, never" in wrong.json()["error"]["message"]


def test_what_the_map_says_of_a_link_is_beside_what_was_measured(adaptive: Endpoint) -> None:
    """Of 4 MB, a transport's own latency included: a little less than the link's rate."""
    lines = adaptive.http.get("/metrics").text.splitlines()
    (said,) = (line for line in lines if line.startswith("handoff_kv_map_bytes_per_second{"))
    assert 'peer="decode-worker-0"' in said
    assert 'rung="tcp"' in said
    assert 0.8 * MAP_GBIT_S / 8 < float(said.split()[-1]) / 1e9 < MAP_GBIT_S / 8


def test_decisions_and_predictions_are_metrics(adaptive: Endpoint) -> None:
    adaptive.complete(prompt(100, "metrics"), **ASKED)
    text = adaptive.http.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("handoff_")]
    counted = [line for line in lines if line.startswith("handoff_router_decisions_total{")]
    assert any('cause="undivided is faster"' in line and 'shadow="no"' in line for line in counted)
    for name in ("ttft", "tpot"):
        (count,) = (x for x in lines if x.startswith(f"handoff_router_{name}_predicted_by_observed_count"))
        assert float(count.split()[-1]) > 0
    (refused,) = (line for line in lines if line.startswith("handoff_admission_refused_total"))
    assert float(refused.split()[-1]) >= 1
