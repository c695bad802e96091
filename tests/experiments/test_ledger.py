from itertools import pairwise

import pytest

from deployments.ledger import Record
from experiments.ledger import FIRST_TOKEN, HANDOVER, breakdown, exposed_ms, stages_ms

MS = 1e-3

# A divided request, in milliseconds after the client's send. The last chunk is published 2 ms after prefill.
REQUEST = {
    "client.sent": 0,
    "arrived": 4,
    "tokenized": 5,
    "routed": 6,
    "prefill.accepted": 8,
    "prefill.scheduled": 9,
    "prefill.output": 109,
    "first_token": 112,
    "sent": 113,
    "client.first": 118,
    "peer.published": 111,
    "decode.fetched": 116,
    "decode.loaded": 119,
    "decode.scheduled": 120,
    "decode.output": 130,
    "decode_token": 132,
    "decode_sent": 133,
    "client.decoded": 137,
}


def moments(**changes: float) -> dict[str, float]:
    named = {name.replace("__", "."): at for name, at in changes.items()}
    return {name: 1000 + at * MS for name, at in {**REQUEST, **named}.items()}


@pytest.mark.parametrize("chain", [FIRST_TOKEN, HANDOVER])
def test_a_chain_has_no_gap(chain: list[tuple[str, str, str]]) -> None:
    assert all(end == begin for (_, _, end), (_, begin, _) in pairwise(chain))


def test_the_first_tokens_stages_add_up_to_what_the_client_measured() -> None:
    parts = breakdown(moments())
    assert sum(parts.first_token.values()) == pytest.approx(118)
    assert parts.first_token["http_in"] == pytest.approx(4)
    assert parts.first_token["prefill"] == pytest.approx(100)
    assert parts.first_token["http_out"] == pytest.approx(5)
    assert parts.error == pytest.approx(0, abs=1e-9)


def test_the_overhead_is_all_but_prefill_and_wire() -> None:
    parts = breakdown(moments())
    assert parts.handover["wire"] == pytest.approx(5)
    assert parts.overhead == pytest.approx(137 - 100 - 5)
    assert parts.overhead_without_first_step == pytest.approx(137 - 100 - 5 - 10)


def test_what_overlaps_with_prefill_costs_nothing() -> None:
    parts = breakdown(moments(peer__published=100, decode__fetched=110, decode__loaded=111))
    assert parts.handover["publish"] == 0
    assert parts.handover["wire"] == pytest.approx(1)  # of 10 ms, 9 were hidden behind prefill
    assert parts.overhead == pytest.approx(137 - 100 - 1)


def test_a_handover_hidden_completely_leaves_only_what_follows() -> None:
    parts = breakdown(moments(peer__published=80, decode__fetched=90, decode__loaded=95))
    assert [parts.handover[stage] for stage in ("publish", "wire", "scatter")] == [0, 0, 0]
    assert parts.handover["decode_queue"] == pytest.approx(120 - 109)
    assert parts.overhead == pytest.approx(137 - 100)


@pytest.mark.parametrize("published", [80, 105, 111, 125])
def test_exposed_stages_add_up_and_are_never_negative(published: float) -> None:
    stages = exposed_ms(moments(peer__published=published), HANDOVER)
    assert min(stages.values()) >= 0
    assert sum(stages.values()) == pytest.approx(137 - 109)


def test_moments_out_of_order_show_as_an_error() -> None:
    parts = breakdown(moments(arrived=7))  # two milliseconds after the prompt was tokenised
    assert parts.first_token["tokenize"] == pytest.approx(-2)
    assert parts.error == pytest.approx(2 / 118)


def test_a_moment_that_was_not_noted_is_an_error() -> None:
    known = moments()
    del known["prefill.accepted"]
    with pytest.raises(KeyError, match=r"prefill\.accepted"):
        breakdown(known)


def test_stages_are_in_milliseconds() -> None:
    assert stages_ms({"a": 1.0, "b": 1.25}, [("wait", "a", "b")]) == {"wait": 250.0}


def test_a_piece_of_the_response_takes_along_only_tokens_that_were_passed_before() -> None:
    record = Record("r", facts={"mode": "first-token"})
    record.note_sent()  # headers and the like: no token yet
    assert "sent" not in record.moments
    record.passed = 1
    record.note(
        "decode_token", 5.0
    )  # decode is so quick that its token is here before the first one has left
    record.note_sent()
    assert "sent" in record.moments
    assert "decode_sent" not in record.moments
    record.passed = 2
    record.note_sent()
    assert record.moments["decode_sent"] >= record.moments["sent"]


def test_where_decode_samples_every_token_the_first_one_is_its_own() -> None:
    record = Record("r", facts={"mode": "decode-samples"}, passed=1)
    record.note("decode_token", 5.0)
    record.note_sent()
    assert {"sent", "decode_sent"} <= record.moments.keys()
