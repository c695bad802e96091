"""What a user of the endpoint gets when something is wrong: with the request, the client, or a worker.

The tests that kill workers are last; they leave all workers alive.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import ray
from asking import Answer, Endpoint, until
from comparing import equal_but_for_ties, prompt
from limits import MAX_LEN
from undivided import Undivided

from deployments.app import Serving

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

BACK_WITHIN_S = 120.0


# -- requests that are wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_an_unknown_model(endpoint: Endpoint, kind: str) -> None:
    body = {"model": "other", "max_tokens": 1}
    body |= (
        {"prompt": "Hello"} if kind == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    response = endpoint.http.post(f"/v1/{kind}", json=body)
    assert response.status_code == 404
    assert "`other`" in response.json()["error"]["message"]


@pytest.mark.parametrize("length", [MAX_LEN + 1, 3 * MAX_LEN])
def test_a_prompt_that_is_too_long_names_the_lengths(endpoint: Endpoint, length: int) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        endpoint.complete(prompt(length), max_tokens=4)
    assert str(MAX_LEN) in str(caught.value)
    assert str(length) in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": "many"},
        {"max_tokens": -1},
        {"temperature": "hot"},
        {"temperature": -0.5},
        {"top_p": 1.5},
        {"n": 0},
        {"logprobs": 10_000},
        {"prompt": []},
        {"prompt": {"text": "Hello"}},
        {"prompt": [1 << 30]},
        {"stop_token_ids": ["x"]},
        {"structured_outputs": {"regex": "(["}},
        {"structured_outputs": {"json": {"type": "nonsense"}}},
    ],
    ids=str,
)
def test_a_wrong_parameter(endpoint: Endpoint, wrong: dict[str, object]) -> None:
    body = {"model": endpoint.model, "prompt": "Hello", "max_tokens": 2, **wrong}
    response = endpoint.http.post("/v1/completions", json=body)
    assert response.status_code in (400, 422), response.text
    assert response.json()["error"]["message"]
    endpoint.settled()


def test_a_body_that_is_no_json(endpoint: Endpoint) -> None:
    response = endpoint.http.post(
        "/v1/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert response.status_code in (400, 422)


def test_an_unknown_request_has_no_record(endpoint: Endpoint) -> None:
    response = endpoint.http.get("/handoff/requests/never-seen")
    assert response.status_code == 404
    assert "never-seen" in response.text


# -- what there is beside completions ------------------------------------------------------------


def test_health_and_models(endpoint: Endpoint) -> None:
    assert endpoint.http.get("/health").status_code == 200
    (model,) = endpoint.openai.models.list().data
    assert model.id == endpoint.model
    assert getattr(model, "max_model_len") == MAX_LEN  # noqa: B009 - vLLM's own field


def test_workers_tell_what_they_are(endpoint: Endpoint) -> None:
    workers = endpoint.workers()
    assert {name: (worker["role"], worker["node"]) for name, worker in workers.items()} == {
        "prefill-worker-0": ("prefill", "prefill-0"),
        "decode-worker-0": ("decode", "decode-0"),
    }
    assert all(worker["alive"] for worker in workers.values())


def counted(endpoint: Endpoint) -> dict[str, float]:
    """vLLM's counters, summed over their labels."""
    response = endpoint.http.get("/metrics")
    assert response.status_code == 200
    totals: dict[str, float] = {}
    for line in response.text.splitlines():
        if line.startswith("vllm:"):
            name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
            totals[name] = totals.get(name, 0.0) + value
    return totals


@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 0.1}], ids=["first", "decode"])
def test_metrics_count(endpoint: Endpoint, extra: dict[str, float]) -> None:
    before = counted(endpoint)
    endpoint.complete(prompt(333, f"metrics {extra}"), max_tokens=9, ignore_eos=True, **extra)
    after = counted(endpoint)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == 333
    assert grown["vllm:generation_tokens_total"] == 9
    assert grown["vllm:request_success_total"] == 1
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:e2e_request_latency_seconds_count"] == 1
    assert grown["vllm:request_queue_time_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == 8


def test_found_prefixes_are_counted_once_where_the_prompt_is_computed(endpoint: Endpoint) -> None:
    def counts(worker: str) -> dict[str, int]:
        found: dict[str, int] = endpoint.workers()[worker]["prefixes"]
        return found

    names, tokens = ("prefill-worker-0", "decode-worker-0"), prompt(333, "found")
    before, total = (
        {name: counts(name) for name in names},
        counted(endpoint)["vllm:prefix_cache_queries_total"],
    )
    for _ in range(2):
        endpoint.complete(tokens, max_tokens=2)
    grown = {name: {key: n - before[name][key] for key, n in counts(name).items()} for name in names}
    assert grown["prefill-worker-0"]["queries"] == 666
    assert 250 < grown["prefill-worker-0"]["hits"] < 333
    assert not any(grown["decode-worker-0"].values())
    until(lambda: counted(endpoint)["vllm:prefix_cache_queries_total"] - total >= 666, "vLLM's metric grows")


# -- clients that go away ------------------------------------------------------------------------


def start_and_leave(endpoint: Endpoint, length: int, after: int, **params: Any) -> None:
    """Stream a long answer and disconnect after so many parts."""
    stream = endpoint.openai.completions.create(
        model=endpoint.model,
        prompt=prompt(length, f"leave {after} {params}"),
        max_tokens=1000,
        temperature=params.pop("temperature", 0.0),
        stream=True,
        extra_body={"ignore_eos": True, **params},
    )
    with stream:
        for _, _ in zip(range(after), stream, strict=False):
            pass


@pytest.mark.parametrize("params", [{}, {"presence_penalty": 0.1}, {"n": 3, "temperature": 0.8}], ids=str)
def test_a_client_that_leaves_amid_the_answer_frees_everything(
    endpoint: Endpoint, params: dict[str, Any]
) -> None:
    start_and_leave(endpoint, 600, after=5, **params)
    endpoint.settled()


def test_a_client_that_leaves_before_the_first_token_frees_everything(endpoint: Endpoint) -> None:
    tokens = prompt(MAX_LEN - 100, "impatient")
    body = {"model": endpoint.model, "prompt": tokens, "max_tokens": 50}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(endpoint.http.post, "/v1/completions", json=body, timeout=0.25)
        until(lambda: endpoint.workers()["prefill-worker-0"]["requests"], "it is prefilled", within_s=5)
        assert asked.exception(timeout=10) is not None
    endpoint.settled()


def test_thirty_aborts_under_load_leave_nothing(endpoint: Endpoint, reference: Undivided) -> None:
    drawn = random.Random(30)
    plan = [
        (drawn.choice([3, 130, 700, 1800]), drawn.choice([0, 0, 1, 2, 7, 30]), drawn.random() < 0.3)
        for _ in range(30)
    ]

    def leave(case: tuple[int, int, bool]) -> None:
        length, after, penalty = case
        start_and_leave(endpoint, length, after, **({"presence_penalty": 0.1} if penalty else {}))

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(leave, plan, timeout=120))
    endpoint.settled()
    tokens = prompt(520, "after the aborts")
    answer = endpoint.complete(tokens, max_tokens=16, ignore_eos=True)
    assert answer.record["mode"] == "first-token"
    assert answer.tokens == reference.generate(tokens, max_tokens=16, ignore_eos=True).tokens


# -- workers that die ----------------------------------------------------------------------------


@pytest.fixture
def kill(serving: Serving) -> Callable[[str], None]:
    """Kill -9 a worker's process, as it is now."""

    def kill(name: str) -> None:
        (worker,) = [placed for placed in serving.workers if placed.info.name == name]
        os.kill(ray.get(worker.handle.start.remote(), timeout=30).pid, signal.SIGKILL)

    return kill


def back(endpoint: Endpoint, reference: Undivided, seed: str) -> None:
    """Wait until all workers are alive; then a request is divided again, and answered right."""
    until(
        lambda: all(worker["alive"] for worker in endpoint.workers().values()),
        "the workers are back",
        BACK_WITHIN_S,
    )
    tokens = prompt(600, seed)
    answer = endpoint.complete(tokens, max_tokens=16, ignore_eos=True)
    assert (answer.record["mode"], answer.record["attempts"]) == ("first-token", 1)
    assert answer.tokens == reference.generate(tokens, max_tokens=16, ignore_eos=True).tokens
    endpoint.settled()


def test_prefill_dies_while_it_prefills(
    endpoint: Endpoint, reference: Undivided, kill: Callable[[str], None]
) -> None:
    tokens = prompt(MAX_LEN - 50, "prefill dies")
    asked = {"max_tokens": 20, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(endpoint.complete, tokens, **asked)
        until(lambda: endpoint.workers()["prefill-worker-0"]["requests"], "it is prefilled", within_s=10)
        kill("prefill-worker-0")
        answer: Answer = future.result(timeout=60)
    assert answer.record["attempts"] == 2
    assert "prefill-worker-0" in answer.record["failure"]
    assert answer.record["mode"] == "undivided"
    assert answer.record["decode_worker"] == "decode-worker-0"
    equal_but_for_ties(answer.tokens, reference.generate(tokens, **asked).sequences[0])
    back(endpoint, reference, "prefill is back")


def test_decode_dies_amid_a_stream(
    endpoint: Endpoint, reference: Undivided, kill: Callable[[str], None]
) -> None:
    """A greedy answer goes on, right, elsewhere; one that cannot be repeated ends with an error."""
    tokens = prompt(300, "decode dies")
    asked: dict[str, Any] = {"max_tokens": 400}
    common = {"model": endpoint.model, "prompt": tokens, "stream": True, **asked}
    extra = {"ignore_eos": True, "return_token_ids": True}
    create = endpoint.openai.completions.create
    greedy = create(**common, temperature=0, extra_body=extra, extra_headers={"X-Request-Id": "decode-dies"})
    drawn = {**extra, "presence_penalty": 0.1}
    sampled = create(**common, temperature=0.9, extra_body=drawn)
    parts = [next(greedy) for _ in range(8)]
    for _ in range(3):
        next(sampled)
    kill("decode-worker-0")
    with pytest.raises(openai.APIError, match="cannot be continued"):
        list(sampled)
    parts += list(greedy)
    found = [token for part in parts for token in part.choices[0].token_ids]
    record = endpoint.record("decode-dies")
    assert record["attempts"] == 2
    assert "decode-worker-0" in record["failure"]
    assert record["decode_worker"] == "prefill-worker-0"
    expected = reference.generate(tokens, ignore_eos=True, **asked)
    equal_but_for_ties(found, expected.sequences[0])
    if found == expected.tokens:
        assert "".join(part.choices[0].text for part in parts) == expected.text
    assert parts[-1].choices[0].finish_reason == "length"
    back(endpoint, reference, "decode is back")


def test_no_worker_is_alive(endpoint: Endpoint, reference: Undivided, kill: Callable[[str], None]) -> None:
    """A request that the engines die of takes them all; clients are told, and the workers come back.

    vLLM's CPU build dies of a seeded prompt that it prefills in several chunks, here on both workers in turn.
    Should that be mended one day, both are killed.
    """
    body = {"model": endpoint.model, "prompt": prompt(1100, "deadly"), "max_tokens": 1, "seed": 1}
    response = endpoint.http.post("/v1/completions", json={**body, "temperature": 0.8})
    if response.status_code == 200:
        for name in endpoint.workers():
            kill(name)
        until(lambda: not any(worker["alive"] for worker in endpoint.workers().values()), "noticed", 10)
    began = time.monotonic()
    response = endpoint.http.post("/v1/completions", json={**body, "seed": None})
    assert response.status_code == 503
    assert "none of the 2 workers is alive" in response.json()["error"]["message"]
    assert endpoint.http.get("/health").status_code == 503
    assert time.monotonic() - began < 5
    back(endpoint, reference, "all are back")
    assert endpoint.http.get("/health").status_code == 200
