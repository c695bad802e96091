"""What `handoff bench gateway` measures with, and what it makes of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from experiments import gateway_bench
from experiments.gateway_bench import HANDOFF, VLLM, body_of
from experiments.http_load import Load, LoadError, offer
from experiments.router_bench import decisions

HEAD = b"HTTP/1.1 200 OK\r\n"
WHOLE = HEAD + b"x-request-id: a1\r\nx-handoff-path: p>d; tcp; x\r\ncontent-length: 2\r\n\r\n{}"
STREAM = HEAD + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


@asynccontextmanager
async def answering(pieces: list[bytes], asked: list[bytes]) -> AsyncIterator[str]:
    """A server that answers every request with these pieces, one write each."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                asked.append(await reader.readexactly(length))
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def offered(pieces: list[bytes], count: int = 5, connections: int = 2) -> tuple[Load, list[bytes]]:
    async def both() -> tuple[Load, list[bytes]]:
        asked: list[bytes] = []
        async with answering(pieces, asked) as url:
            return await offer(url, "/v1/completions", body_of(1, stream=False), count, connections), asked

    return asyncio.run(both())


def test_every_request_is_sent_once_and_its_answer_read_to_its_end() -> None:
    load, asked = offered([WHOLE[:30], WHOLE[30:-1], WHOLE[-1:]])
    assert [json.loads(body)["max_tokens"] for body in asked] == [1] * 5
    assert (len(load.latencies), load.events, load.handed_over) == (5, 0, 5)
    assert load.request_ids == ["a1"] * 5


def test_events_of_streams_are_counted() -> None:
    done = chunk(b"data: [DONE]\n\n")
    load, _ = offered([STREAM, chunk(b"data: {}\n\n"), chunk(b"data: {}\n\n") + done, b"0\r\n\r\n"], 3)
    assert (len(load.latencies), load.events, load.handed_over) == (3, 6, 0)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno"], "refused: HTTP/1.1 503"),
        ([STREAM, chunk(b"data: {}\n\n"), b"0\r\n\r\n"], "not a whole stream"),
        ([STREAM, chunk(b'data: {"error": 1}\n\ndata: [DONE]\n\n'), b"0\r\n\r\n"], "not a whole stream"),
    ],
)
def test_a_bad_answer_is_an_error(pieces: list[bytes], said: str) -> None:
    with pytest.raises(LoadError, match=said):
        offered(pieces)


def test_rows_and_ratios_are_medians_of_rounds() -> None:
    samples: list[dict[str, Any]] = [
        {"case": "request", "system": system, "round": turn, "cpu_us": us, "rps": 100.0, "handed_over": 0}
        for turn, pair in enumerate([(300.0, 100.0), (600.0, 300.0), (800.0, 800.0)])
        for system, us in zip((HANDOFF, VLLM), pair, strict=True)
    ]
    samples += [
        {"case": "latency", "system": HANDOFF, "round": 0, "ms": 5.0, "engine_ms": 2.0},
        {"case": "latency", "system": VLLM, "round": 0, "ms": 3.5},
    ]
    rows = gateway_bench.rows_of(samples)
    assert [(row["case"], row["system"]) for row in rows] == [
        *(("request", HANDOFF), ("request", VLLM), ("latency", HANDOFF), ("latency", VLLM))
    ]
    assert (rows[0]["cpu_us_p50"], rows[0]["per_cpu_s"]) == (600.0, pytest.approx(1666.7))
    assert [row["added_ms_p50"] for row in rows[2:]] == [3.0, 1.5]
    assert gateway_bench.ratios_of(samples) == [{"case": "request", "cpu_ratio": 2.0}]


def test_decisions_are_timed_for_each_number_of_workers() -> None:
    found = decisions((3, 20), 30)
    assert [one["workers"] for one in found] == [3, 20]
    for one in found:
        assert 0 < one["choice_us_p50"] <= one["decision_us_p50"] <= one["decision_us_p99"]
