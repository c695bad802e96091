from typing import Any

import pytest

from experiments.client import Arrival, Timing
from experiments.serve_bench import HANDOFF, UNDIVIDED, Pair, Sample, summary

CHAIN = [
    "arrived",
    "tokenized",
    "routed",
    "prefill.accepted",
    "prefill.scheduled",
    "prefill.output",
    "first_token",
    "sent",
    "peer.published",
    "decode.fetched",
    "decode.loaded",
    "decode.scheduled",
    "decode.output",
    "decode_token",
    "decode_sent",
]


def timing(ttft: float, gap: float, text: str = "a") -> Timing:
    first = 10 + ttft
    return Timing(10.0, tuple(Arrival(first + n * gap, n + 1) for n in range(3)), text)


def pair(length: int, plain: tuple[float, float], ours: tuple[float, float], text: str = "a") -> Pair:
    """A pair with (time to first token, time per token), in seconds; moments are a millisecond apart."""
    moments = {name: 10 + 0.001 * n for n, name in enumerate(CHAIN, start=1)}
    record: dict[str, Any] = {"moments": moments, "kv_bytes": 8, "mode": "first-token"}
    return (
        Sample(UNDIVIDED, length, 0, timing(*plain)),
        Sample(HANDOFF, length, 0, timing(*ours, text), record),
    )


def test_ratios_are_medians_over_pairs_not_ratios_of_medians() -> None:
    pairs = [
        pair(256, (0.1, 0.01), (0.2, 0.01)),
        pair(256, (0.4, 0.01), (0.4, 0.03)),
        pair(256, (0.2, 0.02), (0.5, 0.02)),
    ]
    plain, ours = summary(pairs)["rows"]
    assert (plain["system"], ours["system"]) == (UNDIVIDED, HANDOFF)
    assert plain["ttft_ms_p50"] == pytest.approx(200)
    assert ours["ttft_ms_p50"] == pytest.approx(400)
    assert ours["ttft_ratio"] == pytest.approx(2.0)  # of 2, 1 and 2.5
    assert ours["tpot_ratio"] == pytest.approx(1.0)  # of 1, 3 and 1
    assert plain["ttft_ratio"] == plain["tpot_ratio"] == 1.0


def test_every_length_has_its_rows_and_its_ledger() -> None:
    pairs = [pair(length, (0.1, 0.01), (0.2, 0.02)) for length in (256, 2048)]
    found = summary(pairs)
    assert [(row["prompt_tokens"], row["system"]) for row in found["rows"]] == [
        (256, UNDIVIDED),
        (256, HANDOFF),
        (2048, UNDIVIDED),
        (2048, HANDOFF),
    ]
    assert [ledger["prompt_tokens"] for ledger in found["ledger"]] == [256, 2048]
    first = found["ledger"][0]
    assert sum(first["first_token_ms_p50"].values()) == pytest.approx(200)
    assert first["ledger_error"] == 0
    assert first["first_gap_ms_p50"] == pytest.approx(20)
    assert (first["kv_bytes"], first["modes"]) == ([8], ["first-token"])


def test_the_worst_sample_says_how_far_the_ledger_is_off() -> None:
    good, bad = (pair(256, (0.1, 0.01), (0.1, 0.01)) for _ in range(2))
    assert bad[1].record is not None
    bad[1].record["moments"]["tokenized"] = bad[1].record["moments"]["arrived"] - 0.01
    assert summary([good, good, bad])["ledger"][0]["ledger_error"] == pytest.approx(0.1)


def test_answers_that_differ_are_counted() -> None:
    found = summary([pair(256, (0.1, 0.01), (0.2, 0.01), text) for text in ("a", "b", "a")])
    assert (found["outputs_equal"], found["outputs"]) == (2, 3)


def test_a_raw_sample_is_relative_to_the_send() -> None:
    raw = pair(256, (0.1, 0.01), (0.2, 0.01))[1].as_json()
    assert raw["arrivals_ms"] == [[200.0, 1], [210.0, 2], [220.0, 3]]
    assert raw["moments_ms"]["arrived"] == pytest.approx(1)
    assert raw["ttft_ms"] == pytest.approx(200)
