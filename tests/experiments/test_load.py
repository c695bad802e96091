"""Open-loop load: what is sent, counted from when, and what is made of answers; with a real HTTP server."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from experiments.load_bench import Parameters, load_of, measure, own_prompts, row_of
from experiments.load_plot import draw
from experiments.open_loop import KEY_VARIABLE, Target, TargetError, _Stream, api_key, offer
from experiments.results import check, save
from experiments.workload import Arrival, Served, prompt_of, synthetic_trace
from handoff.cli import app

KEY = "sk-that-nobody-prints"


class Handler(BaseHTTPRequestHandler):
    """Streams as many tokens as it is asked for; what it does else is up to the server's attributes."""

    protocol_version = "HTTP/1.1"
    server: "Server"
    kinds: ClassVar[dict[str, tuple[int, bytes]]] = {
        "refuse": (429, b"{}"),
        "break": (500, b"the engine is gone"),
    }

    def do_GET(self) -> None:
        names = self.server.models
        self._whole(200, json.dumps({"data": [{"id": name} for name in names]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((dict(self.headers), body))
        if (kind := self.server.kind) in self.kinds:
            self._whole(*self.kinds[kind])
            return
        with self.server.turn if kind == "one at a time" else threading.Lock():
            time.sleep(self.server.first_s)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = body["max_tokens"] - (kind == "short")
        for index in range(count):
            choice = {"text": "x", "token_ids": [7]} if "return_token_ids" in body else {"text": "x"}
            event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            half = len(event) // 2 if index == 1 else len(event)  # an event may come in two pieces
            self._piece(event[:half])
            self._piece(event[half:])
        if kind == "cut":
            self.close_connection = True
            self._piece(b"")
            return
        usage = {"choices": [], "usage": {"completion_tokens": count}}
        self._piece(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _piece(self, data: bytes) -> None:
        if data or self.close_connection:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    def _whole(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    kind, first_s, models = "", 0.0, ("m",)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.turn = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def served(kind: str = "") -> Iterator[Server]:
    with Server() as server:
        server.kind = kind
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def run(target: Target, load: list[Arrival], within_s: float = 20.0) -> list[Served]:
    return asyncio.run(offer(target, load, within_s))


def test_every_request_is_sent_as_asked_and_timed() -> None:
    load = [Arrival(0.02 * i, 20 + i, 3 + i, (i,)) for i in range(5)]
    with served() as server:
        found = run(Target(server.url, "m", {"X-Handoff-Class": "bench"}, {"cache_salt": "s"}, key=KEY), load)
    assert [(one.arrival, one.tokens, one.error) for one in found] == [(one, one.output, "") for one in load]
    bodies = sorted((body for _, body in server.asked), key=lambda body: body["max_tokens"])
    assert [(len(body["prompt"]), body["max_tokens"]) for body in bodies] == [
        (20 + i, 3 + i) for i in range(5)
    ]
    assert all(body["ignore_eos"] and body["cache_salt"] == "s" for body in bodies)
    head = server.asked[0][0]
    assert (head["Authorization"], head["X-Handoff-Class"]) == (f"Bearer {KEY}", "bench")
    for one in found:
        assert one.ttft_s is not None
        assert one.e2e_s is not None
        assert 0 < one.ttft_s <= one.e2e_s
        assert sum(one.gaps_s) == pytest.approx(one.e2e_s - one.ttft_s)


def test_a_server_that_stalls_makes_later_requests_late_not_fewer() -> None:
    """Ten requests are due within 0.1 s; the server takes one after the other, 0.1 s each."""
    load = [Arrival(0.01 * i, 4, 2) for i in range(10)]
    with served("one at a time") as server:
        server.first_s = 0.1
        found = run(Target(server.url, "m"), load)
    times = sorted(one.ttft_s or 0.0 for one in found)
    assert len(server.asked) == 10
    assert times[0] >= 0.1
    assert times[-1] >= 10 * 0.1 - 0.1, "the last one waited for all the others"


def test_a_client_that_is_late_itself_counts_it_as_the_servers_time() -> None:
    load = [Arrival(0.0, 4, 2), Arrival(0.2, 4, 2)]

    def stall(one: Served) -> None:
        if one.arrival.at == 0:
            time.sleep(0.6)  # the loop: the second request cannot be sent when it is due

    with served() as server:
        _, second = asyncio.run(offer(Target(server.url, "m"), load, 20.0, stall))
    assert second.late_s > 0.3
    assert second.ttft_s is not None
    assert second.ttft_s > second.late_s


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("break", "HTTP 500: the engine is gone"),
        ("short", "ValueError: 2 tokens came instead of 3"),
        ("cut", "EOFError: the stream was cut short"),
    ],
)
def test_what_goes_wrong_is_an_error_and_never_good(kind: str, error: str) -> None:
    with served(kind) as server:
        (found,) = run(Target(server.url, "m"), [Arrival(0, 4, 3)])
    assert (found.error, found.refused) == (error, False)
    assert not found.good(100, 100)


def test_a_refusal_is_no_error() -> None:
    with served("refuse") as server:
        (found,) = run(Target(server.url, "m"), [Arrival(0, 4, 3)])
    assert (found.refused, found.error, found.good(100, 100)) == (True, "", False)


def test_an_answer_that_does_not_come_is_given_up() -> None:
    with served() as server:
        server.first_s = 2.0
        (found,) = run(Target(server.url, "m"), [Arrival(0, 4, 3)], within_s=0.3)
    assert found.error == "no whole answer within 0.3 s"


def test_plain_requests_have_nothing_that_openai_has_not_and_may_end_early() -> None:
    with served("short") as server:
        (found,) = run(Target(server.url, "m", plain=True), [Arrival(0, 4, 3)])
    assert set(server.asked[0][1]) == {
        *("model", "prompt", "max_tokens", "temperature", "stream", "stream_options")
    }
    assert (found.tokens, found.error) == (2, "")


def test_tokens_are_counted_by_usage_else_by_ids_else_by_pieces() -> None:
    stream = _Stream()
    stream.take(b'data: {"choices": [{"text": "ab"}]}\n\nda', 1.0)
    assert (stream.tokens, stream.times) == (1, [1.0])
    stream.take(b'ta: {"choices": [{"text": "", "token_ids": [1, 2]}]}\r\n\r\n', 2.0)
    assert (stream.tokens, stream.times) == (2, [1.0, 2.0])
    stream.take(b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\ndata: [DONE]\n\n', 3.0)
    assert (stream.tokens, stream.times, stream.done) == (5, [1.0, 2.0], True)
    with pytest.raises(ValueError, match="amid the stream"):
        stream.take(b'data: {"error": {"message": "gone"}}\n\n', 4.0)


def test_a_run_has_a_row_for_every_rate_and_fits_the_schema(tmp_path: Path) -> None:
    with served() as server:
        parameters = Parameters(
            {"here": server.url}, rates=(5.0, 10.0), seconds=2.0, hourly=3.6, workers=2, warm_s=1.0
        )
        told: list[str] = []
        run = measure(parameters, KEY, told.append)
    first, second = run.results["rows"]
    assert (first["rate"], second["rate"], first["errors"], second["errors"]) == (5.0, 10.0, 0, 0)
    assert second["goodput_rps"] == second["offered_rps"] == second["answered"] / 2.0
    assert second["usd_per_request"] == pytest.approx(2 * 3.6 * 2.0 / 3600 / second["answered"], abs=1e-8)
    assert any("due" in line and "open" in line for line in told), "nothing is told while it runs"
    save(run, tmp_path / "run.json")
    assert KEY not in (tmp_path / "run.json").read_text("utf-8")
    assert check(tmp_path / "run.json").parameters["models"] == {"here": "m"}
    assert len(ElementTree.fromstring(draw(run.results["rows"])).findall("{*}g")) == 3


def test_lengths_bursts_and_traces_can_be_chosen(tmp_path: Path) -> None:
    parameters = Parameters(prompt_tokens=(5, 6), output_tokens=(2, 2), bursts=4.0)
    load = load_of(parameters, None, "balanced", 10.0, 20.0, 1)
    assert {(one.prompt, one.output) for one in load} == {(5, 2), (6, 2)}
    assert {int(one.at % 4.0) for one in load} == {0}
    synthetic_trace(tmp_path / "trace.jsonl", 100, 2.0, 1)
    with served() as server:
        chosen = replace(
            parameters,
            systems={"here": server.url},
            mixes={"trace": 1.0},
            trace=str(tmp_path / "trace.jsonl"),
            shorter=50,
            seconds=2.0,
            warm_s=0,
        )
        run = measure(replace(chosen, rates=(10.0,)), None, lambda line: None)
    assert (run.results["rows"][0]["requests"], run.results["rows"][0]["errors"]) == (20, 0)


def test_no_prompt_of_a_load_is_cached_from_another_one() -> None:
    """Every system gets the same ones; within a load they share what they share."""
    with served() as one, served() as two:
        measure(
            Parameters({"one": one.url, "two": two.url}, rates=(4.0, 4.0), output_tokens=(2, 2), seconds=2.0),
            None,
            lambda line: None,
        )
    asked = [tuple(body["prompt"]) for _, body in one.asked]
    assert len(set(asked)) == len(asked)
    assert sorted(asked) == sorted(tuple(body["prompt"]) for _, body in two.asked)
    shared = [Arrival(0, 1000, 1, (7, 8)), Arrival(0, 1000, 1, (7, 9))]
    first, again = (tuple(map(prompt_of, own_prompts(shared, number))) for number in (0, 1))
    assert first[0][:512] == first[1][:512]
    assert first[0][512:] != first[1][512:]
    assert first[0][:16] != again[0][:16]


def test_each_system_gets_every_load_in_turn(tmp_path: Path) -> None:
    with served() as one, served("refuse") as two:
        run = measure(
            Parameters(
                {"one": one.url, "two": two.url},
                rates=(4.0,),
                mixes={"decode-heavy": 1.0, "trace": 2.0},
                output_tokens=(2, 3),
                seconds=2.0,
                shorter=100,
                warm_s=0,
            ),
            None,
            lambda line: None,
        )
        prompts = [sorted(body["prompt"] for _, body in server.asked) for server in (one, two)]
    assert prompts[0] == prompts[1], "the systems were asked other things"
    cases = [(row["system"], row["mix"], row["rate"]) for row in run.results["rows"]]
    assert cases == [
        ("one", "decode-heavy", 4.0),
        ("two", "decode-heavy", 4.0),
        ("two", "trace", 8.0),
        ("one", "trace", 8.0),
    ]
    for row in run.results["rows"]:
        assert row["requests"] > 0
        assert (row["answered"], row["refused"]) == (
            (row["requests"], 0) if row["system"] == "one" else (0, row["requests"])
        )
    save(run, tmp_path / "run.json")
    check(tmp_path / "run.json")
    assert len(ElementTree.fromstring(draw(run.results["rows"])).findall("{*}g")) == 3 * 4


def test_without_an_answer_nothing_has_a_price() -> None:
    row = row_of(Parameters(hourly=1.0), [Served(Arrival(0, 1, 1), None, None, refused=True)])
    assert (row["usd_per_request"], row["usd_per_good_request"], row["refused"]) == (None, None, 1)


def test_a_server_that_cannot_be_loaded_is_named_with_a_remedy() -> None:
    with pytest.raises(TargetError, match=r"does not answer: .*start a server \(handoff serve FILE\)"):
        measure(Parameters({"gone": "http://127.0.0.1:9"}), None, lambda line: None)
    with served("break") as server:
        with pytest.raises(
            TargetError, match="answers no request of this kind: HTTP 500: the engine is gone"
        ):
            measure(Parameters({"here": server.url}, seconds=2.0), None, lambda line: None)
        server.models = ("a", "b")
        with pytest.raises(TargetError, match=r"has 2 models \(a, b\); choose one with --model"):
            measure(Parameters({"here": server.url}), None, lambda line: None)


def test_the_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    assert api_key(None) == "from-environment"
    monkeypatch.delenv(KEY_VARIABLE)
    assert api_key(None) is None
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    assert api_key(path) == KEY
    assert KEY not in repr(Target("u", "m", key=KEY))
    path.write_text("\n")
    with pytest.raises(TargetError, match="is empty; write one key into it"):
        api_key(path)


def test_the_command_writes_run_and_plot_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    with served() as server:
        arguments = ["bench", "load", "--url", server.url, "--seconds", "2", "--rate", "5", "--out", str(out)]
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert check(out).kind == "bench-load"
    assert out.with_suffix(".svg").exists()
    for wrong, said in (
        (["--mix", "x"], "known: prefill-heavy"),
        (["--mix", "bursty=0"], "MIX=NUMBER"),
        (["--url", server.url], "NAME=URL"),
        (["--prompt-tokens", "9:3"], "LEAST:MOST"),
    ):
        done = CliRunner().invoke(app, [*arguments, *wrong])
        assert done.exit_code == 2
        assert said in " ".join(done.output.split())
