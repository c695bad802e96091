import json

import pytest

from experiments.client import StreamError, overhead_ms, parse


def event(text: str, tokens: int, choices: bool = True) -> bytes:
    data = {"choices": [{"text": text}] if choices else [], "usage": {"completion_tokens": tokens}}
    return f"data: {json.dumps(data)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def test_a_token_arrives_with_the_piece_that_completes_its_event() -> None:
    first, second = event("a", 1), event("b", 2)
    timing = parse(1.0, [(1.1, first + second[:10]), (1.3, second[10:]), (1.4, DONE)])
    assert [(a.at, a.tokens) for a in timing.arrivals] == [(1.1, 1), (1.3, 2)]
    assert timing.text == "ab"
    assert timing.ttft_ms == pytest.approx(100)
    assert timing.tpot_ms == pytest.approx(200)


def test_tokens_that_arrive_together_count_together() -> None:
    timing = parse(
        0.0, [(1.0, event("a", 1)), (2.0, event("bc", 3) + event("d", 4)), (3.0, event("", 5) + DONE)]
    )
    assert [(a.at, a.tokens) for a in timing.arrivals] == [(1.0, 1), (2.0, 4), (3.0, 5)]
    assert timing.at_token(2) == 2.0
    assert timing.tpot_ms == pytest.approx(500)
    assert timing.gaps_ms() == [1000, 1000]


def test_an_answer_in_one_piece_has_no_time_per_token() -> None:
    assert parse(0.0, [(1.0, event("a", 1) + event("b", 2) + DONE)]).at_once
    assert not parse(0.0, [(1.0, event("a", 1)), (2.0, event("b", 2) + DONE)]).at_once


def test_usage_at_the_end_is_no_token() -> None:
    timing = parse(
        0.0, [(1.0, event("a", 1)), (2.0, event("b", 2)), (9.0, event("", 2, choices=False) + DONE)]
    )
    assert timing.arrivals[-1].at == 2.0


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([(1.0, event("a", 1))], "cut short"),
        ([(1.0, DONE)], "cut short"),
        ([(1.0, b'data: {"error": {"message": "no"}}\n\n')], "no"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(pieces: list[tuple[float, bytes]], complaint: str) -> None:
    with pytest.raises(StreamError, match=complaint):
        parse(0.0, pieces)


def test_the_client_measures_itself() -> None:
    assert 0 < overhead_ms([1, 2, 3], repeats=3) < 1000
