"""Rungs that break under real workers: the answer stays right, and everybody is told which way it went.

Faults are injected where the decode worker fetches; everything else is as in any other run.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from asking import Answer, Endpoint, until
from comparing import equal_but_for_ties, prompt
from limits import MAX_LEN
from undivided import Undivided

from deployments.app import Serving
from deployments.metrics import POLL_S
from kv.faulty import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

RUNGS = ("tcp", "plasma")
ASKED: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
MENDED_WITHIN_S = 90.0
"""Probes of a rung that has broken several times are up to half a minute apart."""


@pytest.fixture
def decode(serving: Serving) -> Any:
    """The decode worker's actor."""
    return next(worker.handle for worker in serving.workers if worker.info.role == "decode")


@pytest.fixture
def fault(decode: Any, endpoint: Endpoint) -> Iterator[Callable[..., None]]:
    """Have faults on a rung: ``fault("tcp", Fault("lost"))``. Afterwards all are sound and known to be."""

    def fault(rung: str, *faults: Fault) -> None:
        ray.get(decode.suffer.remote(rung, *faults), timeout=30)

    yield fault
    for rung in RUNGS:
        fault(rung)
    until(lambda: all(rates(endpoint)[rung] for rung in RUNGS), "the rungs are mended", MENDED_WITHIN_S)
    endpoint.settled()


def metric(endpoint: Endpoint, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric of ours by its labels' values, those in alphabetical order; not by role and node."""
    found = {}
    for line in endpoint.http.get("/metrics").text.splitlines():
        if line.startswith(name + "{"):
            labels, value = line.removeprefix(name + "{").rsplit("} ", 1)
            pairs = sorted(pair.split("=", 1) for pair in labels.split(","))
            key = tuple(value.strip('"') for label, value in pairs if label not in ("role", "node"))
            found[key] = float(value)
    return found


def rates(endpoint: Endpoint) -> dict[str, float]:
    """What prefill thinks of the rungs to decode: bytes per second, 0 while broken."""
    found = metric(endpoint, "handoff_kv_rate_bytes_per_second")
    return {rung: found.get(("decode-worker-0", rung, "prefill-worker-0"), 0.0) for rung in RUNGS}


def fired(decode: Any, rung: str, kind: str) -> int:
    found: dict[str, int] = ray.get(decode.fired.remote(rung), timeout=30)
    return found.get(kind, 0)


def complete(endpoint: Endpoint, reference: Undivided, seed: str, length: int = 700) -> Answer:
    """Ask, and check that the answer is right."""
    tokens = prompt(length, seed)
    answer = endpoint.complete(tokens, **ASKED)
    expected = reference.generate(tokens, **ASKED)
    if answer.record["attempts"] == 1:
        assert answer.tokens == expected.tokens
    else:
        equal_but_for_ties(answer.tokens, expected.sequences[0])
    return answer


def test_a_broken_rung_gives_way_to_the_next_and_comes_back(
    endpoint: Endpoint, reference: Undivided, decode: Any, fault: Callable[..., None]
) -> None:
    first = complete(endpoint, reference, "sound").record["transport"]
    assert first in RUNGS
    (other,) = set(RUNGS) - {first}
    before = fired(decode, first, "lost")
    fault(first, Fault("lost"))
    answer = complete(endpoint, reference, "broken")
    assert fired(decode, first, "lost") > before
    assert (answer.record["attempts"], answer.record["transport"]) == (1, other)
    assert first in answer.record["transport_reason"]
    until(lambda: rates(endpoint)[first] == 0.0, "the metric says that it is broken", within_s=10)
    assert complete(endpoint, reference, "still broken").record["transport"] == other
    fault(first)
    until(lambda: rates(endpoint)[first] > 0.0, "a probe has mended it", MENDED_WITHIN_S)
    fault(other, Fault("lost"))
    assert complete(endpoint, reference, "the other is broken").record["transport"] == first


def test_a_damaged_chunk_is_found_and_fetched_over_the_next_rung(
    endpoint: Endpoint, reference: Undivided, decode: Any, fault: Callable[..., None]
) -> None:
    first = complete(endpoint, reference, "undamaged").record["transport"]
    (other,) = set(RUNGS) - {first}
    before, counted = fired(decode, first, "corrupt"), metric(endpoint, "handoff_kv_rung_total")
    fault(first, Fault("corrupt", times=1))
    answer = complete(endpoint, reference, "damaged", length=1500)
    assert fired(decode, first, "corrupt") == before + 1
    assert answer.record["attempts"] == 1
    assert other in answer.record["transport"].split("+")
    key = ("corrupt", other, "decode-worker-0")
    until(
        lambda: metric(endpoint, "handoff_kv_rung_total").get(key, 0) == counted.get(key, 0) + 1,
        "the metric counts it",
        within_s=10,
    )


def test_with_all_rungs_broken_decode_computes_the_prompt(
    endpoint: Endpoint, reference: Undivided, decode: Any, fault: Callable[..., None]
) -> None:
    before = sum(fired(decode, rung, "lost") for rung in RUNGS)
    for rung in RUNGS:
        fault(rung, Fault("lost"))
    record = complete(endpoint, reference, "all broken").record
    assert sum(fired(decode, rung, "lost") for rung in RUNGS) > before
    assert (record["attempts"], record["mode"]) == (2, "undivided")
    assert record["decode_worker"] == record["prefill_worker"] == "decode-worker-0"
    for rung in RUNGS:
        assert rung in record["failure"]


def test_beyond_the_budget_clients_are_told_when_to_come_back(
    endpoint: Endpoint, fault: Callable[..., None]
) -> None:
    for rung in RUNGS:
        fault(rung, Fault("lost"))
    for turn in range(12):
        body = {"model": endpoint.model, "prompt": prompt(MAX_LEN - 100, f"budget {turn}"), "max_tokens": 2}
        response = endpoint.http.post("/v1/completions", json=body)
        if response.status_code != 200:
            break
    assert response.status_code == 503
    assert turn >= 2  # there was some
    assert 1 <= int(response.headers["retry-after"]) <= 60
    error = response.json()["error"]
    assert error["code"] == 503
    assert "decode-worker-0" in error["message"]
    assert "try again in" in error["message"]
    assert response.headers["x-handoff-path"].startswith("prefill-worker-0>decode-worker-0;")


def test_the_way_is_told_in_a_header(endpoint: Endpoint) -> None:
    body = {"model": endpoint.model, "prompt": prompt(300, "header"), "max_tokens": 3}
    response = endpoint.http.post("/v1/completions", json=body)
    workers, rung, reason = response.headers["x-handoff-path"].split("; ", 2)
    assert workers == "prefill-worker-0>decode-worker-0"
    assert rung in RUNGS
    assert rung in reason
    assert " ms" in reason
    body |= {"prompt": prompt(300, "streamed header"), "stream": True}
    with endpoint.http.stream("POST", "/v1/completions", json=body) as streamed:
        assert streamed.headers["x-handoff-path"].startswith("prefill-worker-0>decode-worker-0; ")
        assert streamed.headers["x-request-id"]
        assert b"[DONE]" in streamed.read()
    body = {"model": endpoint.model, "prompt": prompt(30, "alone"), "max_tokens": 1}
    alone = endpoint.http.post("/v1/completions", json=body).headers["x-handoff-path"]
    assert alone.startswith("prefill-worker-0; undivided; one token")
    assert "x-handoff-path" not in endpoint.http.get("/health").headers


def test_the_handover_is_in_the_metrics(endpoint: Endpoint) -> None:
    time.sleep(2 * POLL_S)  # the counters of earlier requests are in
    before = sum(metric(endpoint, "handoff_kv_bytes_total").values())
    record = endpoint.complete(prompt(800, "metrics of KV"), **ASKED).record

    def counted() -> bool:
        grown = sum(metric(endpoint, "handoff_kv_bytes_total").values()) - before
        return grown == record["kv_bytes"]

    until(counted, "the bytes are counted", within_s=10)
    workers = {("decode-worker-0",), ("prefill-worker-0",)}
    for name in ("handoff_kv_live_objects", "handoff_kv_live_bytes", "handoff_kv_orphan_bytes"):
        until(lambda name=name: set(metric(endpoint, name)) == workers, "both workers answer")  # type: ignore[misc]
        until(lambda name=name: not any(metric(endpoint, name).values()), f"{name} is 0", within_s=10)  # type: ignore[misc]
    assert set(metric(endpoint, "handoff_kv_expired_leases_total").values()) == {0.0}
    assert all(rate > 1e6 for rate in rates(endpoint).values())
