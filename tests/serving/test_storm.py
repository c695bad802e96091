"""Storms of requests, of which a third is aborted at any moment: all others are right, and nothing is left.

10,000 on the fake engine, whose every token proves the KV that it was computed from, and 300 on vLLM's own.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asking import Endpoint, until
from comparing import equal_but_for_ties, prompt
from undivided import Undivided

from actors.fake_kv import continuation
from cluster.network import free_ports
from experiments.children import Child, child
from experiments.storm import Outcome, errors, plans, storm

pytestmark = [pytest.mark.cluster]

VOCAB = 4096
REQUESTS, AT_ONCE, MOST_TOKENS = 10_000, 64, 24
STARTED_WITHIN_S = 180.0

FAKE = {
    "kv_bytes_per_token": 1024,
    "kv_blocks": 120,
    "prefill_tokens_s": 100_000,
    "step_ms": 1,
    "step_ms_per_sequence": 0.02,
}


def cluster_file(model: Path, **fake: Any) -> dict[str, Any]:
    node = {"cpus": 1, "object_store": "128MiB"}
    return {
        "name": f"fake-{time.monotonic_ns() % 10**9}",
        "model": str(model),
        "served_model_name": "tiny",
        "engine": {
            "max_model_len": 2048,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 64,
            "block_size": 32,
            "fake": fake,
        },
        "gateway": {"port": free_ports(1)[0]},
        "router": {"mode": "always"},
        "nodes": {"prefill": {"role": "prefill", **node}, "decode": {"role": "decode", **node}},
    }


@pytest.fixture(scope="module")
def fake(model: Path) -> Iterator[Endpoint]:
    """`handoff serve --engine fake` in a process of its own."""
    data = cluster_file(model, **FAKE)
    url = f"http://127.0.0.1:{data['gateway']['port']}"
    argv = ["-m", "handoff", "serve", "{folder}/cluster.yaml", "--engine", "fake"]
    began = time.monotonic()
    with child("fake", argv, {}, {"cluster.yaml": json.dumps(data)}) as server:
        until(lambda: answers(server, url), "the fake cluster serves", STARTED_WITHIN_S)
        print(f"the fake cluster serves after {time.monotonic() - began:.1f} s")
        yield Endpoint(url, "tiny")
        server.check()


def answers(server: Child, url: str) -> bool:
    server.check()
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def stages(outcomes: list[Outcome]) -> Counter[str]:
    """How many requests ended how."""
    return Counter(
        "complete"
        if outcome.complete
        else "left before the first token"
        if not outcome.tokens
        else "left amid the answer"
        for outcome in outcomes
    )


def test_a_divided_answer_is_the_fake_engines(fake: Endpoint) -> None:
    for length in (1, 31, 32, 33, 512, 700, 2000):
        tokens = prompt(length, "fake")
        answer = fake.complete(tokens, max_tokens=20, ignore_eos=True)
        assert answer.record["mode"] == "first-token"
        assert answer.tokens == continuation(tokens, 20, VOCAB)
        answer = fake.complete(tokens, max_tokens=20, ignore_eos=True, presence_penalty=0.1)
        assert answer.tokens == continuation(tokens, 20, VOCAB)
    fake.settled()


def test_what_the_fake_engine_can_beside_greedy_tokens(fake: Endpoint) -> None:
    tokens = prompt(100, "features")
    right = continuation(tokens, 12, VOCAB)
    asked: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    seeded = fake.complete(tokens, temperature=0.9, seed=4, logprobs=2, **asked)
    assert seeded.tokens == right
    assert seeded.choices[0].logprobs == [0.0] * 12
    echoed = fake.complete(tokens, prompt_logprobs=1, **asked)
    assert echoed.tokens == right
    assert echoed.record["mode"] == "undivided"
    number = fake.complete(tokens, max_tokens=12, structured_outputs={"regex": "[0-9]{3}"})
    assert number.text.isdigit()
    assert len(number.text) == 3
    stopped = fake.complete(tokens, stop_token_ids=[right[5]], **asked)
    assert stopped.tokens[:5] == right[:5]
    assert stopped.choices[0].finish_reason == "stop"
    fake.settled()


@pytest.mark.timeout(420)
def test_ten_thousand_requests_of_which_a_third_is_aborted(fake: Endpoint) -> None:
    prompts = [prompt(1 + 700 * i // 300, f"storm {i}") for i in range(300)]
    prompts += [prompts[-1][:512] + prompt(1 + i, f"prefix {i}") for i in range(60)]
    answers = {tuple(tokens): continuation(tokens, MOST_TOKENS, VOCAB) for tokens in prompts}
    began = time.monotonic()
    outcomes = storm(fake.url, fake.model, plans(REQUESTS, 1, prompts, MOST_TOKENS), AT_ONCE)
    took = time.monotonic() - began
    fake.settled()
    found = stages(outcomes)
    print(f"{REQUESTS} requests in {took:.0f} s, {REQUESTS / took:.0f} a second: {dict(found)}")
    assert len(outcomes) == REQUESTS
    assert not errors(outcomes)
    for outcome in outcomes:
        right = answers[tuple(outcome.plan.prompt)][: outcome.plan.max_tokens]
        if outcome.complete:
            assert outcome.tokens == right
        else:
            assert outcome.plan.leaves
            assert outcome.tokens == right[: len(outcome.tokens)]
    assert found["left before the first token"] > REQUESTS * 0.05
    assert found["left amid the answer"] > REQUESTS * 0.08
    assert all(worker["alive"] for worker in fake.workers().values())


@pytest.mark.engine
def test_three_hundred_requests_on_a_real_engine(endpoint: Endpoint, reference: Undivided) -> None:
    most = 12
    prompts = [prompt(1 + 20 * i, f"real storm {i}") for i in range(30)]
    outcomes = storm(endpoint.url, endpoint.model, plans(300, 2, prompts, most), 24)
    endpoint.settled()
    found = stages(outcomes)
    print(dict(found))
    assert not errors(outcomes)
    right = {
        tuple(tokens): reference.generate(tokens, max_tokens=most, ignore_eos=True).sequences[0]
        for tokens in prompts
    }
    for outcome in outcomes:
        if outcome.complete:
            assert len(outcome.tokens) == outcome.plan.max_tokens
        else:
            assert outcome.plan.leaves
        if not outcome.plan.params:
            equal_but_for_ties(outcome.tokens, cut(right[tuple(outcome.plan.prompt)], len(outcome.tokens)))
    assert found["left before the first token"] > 10
    assert found["left amid the answer"] > 10


def cut(sequence: Any, count: int) -> Any:
    """The first tokens of a reference's sequence."""
    from dataclasses import replace

    return replace(sequence, tokens=sequence.tokens[:count], logprobs=sequence.logprobs[:count])
