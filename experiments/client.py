"""A client that measures when the tokens of one streamed completion arrive, and does little else meanwhile.

The standard library's HTTP client on one kept connection: bytes are stamped as they come out of the socket
and parsed after the stream has ended. ``overhead_ms`` says what that costs.
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

TIMEOUT_S = 300.0


class StreamError(RuntimeError):
    """A server answered with an error, or its stream was cut short; the message quotes it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece of a stream: when it arrived (``time.monotonic()``), and output tokens received by then."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One streamed completion, on this process's monotonic clock.

    Attributes:
        sent: just before the request's first byte was written.
        arrivals: pieces that brought tokens.
        text: the whole answer.

    """

    sent: float
    arrivals: tuple[Arrival, ...]
    text: str

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return self.arrivals[-1].tokens

    @property
    def at_once(self) -> bool:
        """Whether all tokens arrived together, as they do when this process got no CPU: no time per token."""
        return len(self.arrivals) == 1

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return (self.arrivals[0].at - self.sent) * 1e3

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first piece of the stream; not defined if they came ``at_once``."""
        first, last = self.arrivals[0], self.arrivals[-1]
        return (last.at - first.at) * 1e3 / (last.tokens - first.tokens)

    def at_token(self, number: int) -> float:
        """Return when the ``number``-th token (from 1) was there."""
        return next(arrival.at for arrival in self.arrivals if arrival.tokens >= number)

    def gaps_ms(self) -> list[float]:
        """Return the times between pieces."""
        return [(later.at - earlier.at) * 1e3 for earlier, later in pairwise(self.arrivals)]


class Client:
    """A client of an OpenAI server, one request at a time. A context manager."""

    def __init__(self, url: str, model: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        self._model, self._headers = model, dict(headers or {})
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def complete(self, prompt: Sequence[int], max_tokens: int, request_id: str) -> Timing:
        """Stream a greedy completion of exactly ``max_tokens`` tokens.

        Raises:
            StreamError: the server refused it, or the stream ended early.

        """
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        sent, pieces = self._stream("/v1/completions", json.dumps(body).encode(), request_id)
        timing = parse(sent, pieces)
        if timing.tokens != max_tokens:
            raise StreamError(f"request {request_id}: {timing.tokens} tokens came instead of {max_tokens}")
        return timing

    def record(self, request_id: str) -> dict[str, Any]:
        """Return the gateway's record of a request (Handoff only)."""
        return self._get_json(f"/handoff/requests/{request_id}")

    def _stream(self, path: str, body: bytes, request_id: str) -> tuple[float, list[tuple[float, bytes]]]:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id, **self._headers}
        self._connection.close()  # servers drop connections that rest for a few seconds
        self._connection.connect()  # not part of a request's time
        sent = time.monotonic()
        self._connection.request("POST", path, body, headers)
        response = self._connection.getresponse()
        pieces: list[tuple[float, bytes]] = []
        while data := response.read1(1 << 20):
            pieces.append((time.monotonic(), data))
        if response.status != 200:
            text = b"".join(data for _, data in pieces).decode(errors="replace")
            raise StreamError(f"request {request_id}: HTTP {response.status}: {text[:500]}")
        return sent, pieces

    def _get_json(self, path: str) -> dict[str, Any]:
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise StreamError(f"GET {path}: HTTP {response.status}: {text[:500].decode(errors='replace')}")
        found: dict[str, Any] = json.loads(text)
        return found


def parse(sent: float, pieces: Sequence[tuple[float, bytes]]) -> Timing:
    """Turn the pieces of an event stream into a timing.

    An event belongs to the piece that completed it.

    Raises:
        StreamError: the stream holds an error, no token, or does not end with ``[DONE]``.

    """
    arrivals: list[Arrival] = []
    texts: list[str] = []
    done = False
    for at, event in _events(pieces):
        if event == "[DONE]":
            done = True
            continue
        data = json.loads(event)
        if "error" in data:
            raise StreamError(f"the stream holds an error: {data['error']}")
        texts.extend(choice.get("text", "") for choice in data["choices"])
        tokens = data["usage"]["completion_tokens"]
        if data["choices"] and tokens > (arrivals[-1].tokens if arrivals else 0):
            if arrivals and arrivals[-1].at == at:
                arrivals.pop()
            arrivals.append(Arrival(at, tokens))
    if not done or not arrivals:
        raise StreamError("the stream was cut short")
    return Timing(sent, tuple(arrivals), "".join(texts))


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    rest = b""
    for at, data in pieces:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield at, event[6:].decode()


def overhead_ms(prompt: Sequence[int], repeats: int = 50) -> float:
    """Measure the client itself: the median time to first token from a server that answers at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer_at_once, args=(listener,), daemon=True).start()
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "none") as client:
            times = [client.complete(prompt, 2, "overhead").ttft_ms for _ in range(repeats)]
    return median(times)


def _answer_at_once(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        _answer(connection)


def _answer(connection: socket.socket) -> None:
    event = 'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": %d}}\n\n'
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, connection.makefile("rwb") as file:
        while line := file.readline():
            length = 0
            while line.strip():
                name, _, value = line.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
                line = file.readline()
            file.read(length)
            file.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for text in (event % 1, event % 2, "data: [DONE]\n\n", ""):
                file.write(f"{len(text):x}\r\n{text}\r\n".encode())
                file.flush()
