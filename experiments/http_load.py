"""A light HTTP client for load: some connections, each one request after the other, as little work as can be.

It is to cost less than what it measures. Answers are scanned, not parsed: status, length, events of a stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

ANSWERED_WITHIN_S: Final = 120.0
_END_OF_STREAM: Final = b"data: [DONE]\n\n"
_END_OF_CHUNKS: Final = b"0\r\n\r\n"


class LoadError(RuntimeError):
    """A server refused a request, or broke it off, or did not answer in time; the message quotes it."""


@dataclass(slots=True)
class Load:
    """What came of some requests.

    Attributes:
        seconds: from the first request to the last answer.
        latencies: seconds of each, in the order in which they ended.
        events: of streams: pieces with tokens, ``[DONE]`` not counted.
        handed_over: answers whose ``x-handoff-path`` names two workers.
        request_ids: of each, from ``x-request-id``; empty where the server tells none.

    """

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    events: int = 0
    handed_over: int = 0
    request_ids: list[str] = field(default_factory=list)


async def offer(url: str, path: str, body: bytes, count: int, connections: int) -> Load:
    """Send ``count`` equal requests over so many connections that stay open.

    Raises:
        LoadError: an answer was not 200, or its stream did not end as one should.

    """
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    found, turns, made = Load(), iter(range(count)), []
    try:
        for _ in range(min(connections, count)):
            ended = loop.create_future()
            connection = _Connection(request, turns, found, ended)
            made.append((connection, ended))
            await loop.create_connection(partial(_same, connection), parts.hostname or "", parts.port or 80)
        began = time.perf_counter()
        for connection, _ in made:
            connection.next()
        async with asyncio.timeout(ANSWERED_WITHIN_S):
            await asyncio.gather(*(ended for _, ended in made))
        found.seconds = time.perf_counter() - began
    except TimeoutError:
        raise LoadError(
            f"{url}{path}: {len(found.latencies)} of {count} requests were answered within "
            f"{ANSWERED_WITHIN_S:.0f} s; see the server's log"
        ) from None
    except OSError as error:
        raise LoadError(f"{url}{path} cannot be reached: {error}") from error
    finally:
        for connection, _ in made:
            connection.close()
    return found


def _same(connection: _Connection) -> _Connection:
    return connection


class _Connection(asyncio.Protocol):
    def __init__(
        self, request: bytes, turns: Iterator[int], found: Load, ended: asyncio.Future[None]
    ) -> None:
        self._request, self._turns, self._found, self._ended = request, turns, found, ended
        self._transport: Any = None  # uvloop's is none of asyncio's classes
        self._answer = bytearray()
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def next(self) -> None:
        """Send a request, if there is one left."""
        if next(self._turns, None) is None:
            self._ended.set_result(None)
            return
        self._answer.clear()
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._ended.done():
            return
        self._answer += data
        try:
            if not is_whole(self._answer):
                return
            self._found.latencies.append(time.perf_counter() - self._sent)
            self._found.events += count_events(self._answer)
        except LoadError as error:
            self._ended.set_exception(error)
            return
        self._found.handed_over += b">" in header(self._answer, b"x-handoff-path").partition(b";")[0]
        self._found.request_ids.append(header(self._answer, b"x-request-id").decode())
        self.next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            said = bytes(self._answer[-200:]).decode(errors="replace")
            self._ended.set_exception(LoadError(f"the connection was closed ({exc}) after: {said!r}"))


def is_whole(answer: bytearray) -> bool:
    """Return whether an answer, its head included, has come to its end."""
    if (head := answer.find(b"\r\n\r\n")) < 0:
        return False
    low = bytes(answer[:head]).lower()
    if b"transfer-encoding: chunked" in low:
        return answer.endswith(_END_OF_CHUNKS)
    _, _, rest = low.partition(b"content-length:")
    return len(answer) - head - 4 >= int(rest.partition(b"\r\n")[0] or 0)


def count_events(answer: bytearray) -> int:
    """Return how many pieces with tokens a whole answer's stream has, 0 if it is none.

    Raises:
        LoadError: it is an error, or a stream that was cut short or holds an error.

    """
    if not answer.startswith(b"HTTP/1.1 200"):
        raise LoadError(f"refused: {bytes(answer[:400]).decode(errors='replace')}")
    if b"text/event-stream" not in answer[: answer.find(b"\r\n\r\n")].lower():
        return 0
    if _END_OF_STREAM not in answer or b'data: {"error"' in answer:
        raise LoadError(f"not a whole stream: {bytes(answer[-400:]).decode(errors='replace')}")
    return answer.count(b"data: ") - 1


def header(answer: bytearray, name: bytes) -> bytes:
    """Return a header of an answer as servers here write them, empty if it is not there."""
    head = bytes(answer[: answer.find(b"\r\n\r\n")])
    return head.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0]
