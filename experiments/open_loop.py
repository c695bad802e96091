"""Open-loop load on an OpenAI server: requests are sent when their time has come, whatever became of others.

Every time is counted from the moment at which the request was *due*: a server, a connection or this client
that falls behind makes its requests late, it does not make them fewer or look fast (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from experiments.workload import Arrival, Served, prompt_of

PREPARED_S: Final = 60.0
"""Requests are written out so long before they are due, all of a short load before it begins."""
KEPT_OPEN_S: Final = 2.0
"""A connection is used again within this time: servers close those that rest, uvicorn after 5 s."""
SAID: Final = 200
"""Characters of an error that are kept."""
KEY_VARIABLE: Final = "OPENAI_API_KEY"


class TargetError(RuntimeError):
    """The server cannot be loaded; the message says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and how they are asked.

    Attributes:
        url: of the server, without ``/v1``.
        model: as the server calls it.
        headers: sent with every request.
        body: goes into every request, beside prompt and length.
        plain: only what OpenAI's API has: answers may end early, and tokens are counted by pieces of text.
        key: an API key; never printed.

    """

    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    key: str | None = field(default=None, repr=False)


def api_key(path: Path | None) -> str | None:
    """Return what a file holds, or the environment under ``OPENAI_API_KEY``; None: neither."""
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    lines = path.read_text("utf-8").split()
    if not lines:
        raise TargetError(f"the API key file {path} is empty; write one key into it")
    return lines[0]


async def offer(
    target: Target,
    load: Sequence[Arrival],
    answered_within_s: float,
    tell: Callable[[Served], None] = lambda served: None,
    own: Callable[[Arrival], Mapping[str, str]] = lambda arrival: {},
) -> list[Served]:
    """Send a load, and return what became of each request, in the order of ``load``.

    Args:
        target: where to.
        load: by time of arrival.
        answered_within_s: after this, counted from when it was due, a request is given up and is an error.
        tell: called as each request ends.
        own: headers of a request, beside those that all have.

    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_OPEN_S)
    headers = dict(target.headers) | ({"Authorization": f"Bearer {target.key}"} if target.key else {})
    async with aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        soon = [one for one in load if one.at < PREPARED_S]
        bodies = [_body(target, one) for one in soon]
        began = time.monotonic() + 0.1

        async def run(arrival: Arrival, body: bytes) -> Served:
            due = began + arrival.at
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            late = max(0.0, time.monotonic() - due)
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + answered_within_s - late):
                    served = await _ask(session, target, arrival, body, due, late, own(arrival))
            except TimeoutError:
                served = _failed(arrival, late, f"no whole answer within {answered_within_s:g} s")
            except (aiohttp.ClientError, OSError, EOFError, ValueError) as error:
                served = _failed(arrival, late, f"{type(error).__name__}: {error}")
            tell(served)
            return served

        tasks = [asyncio.create_task(run(*each)) for each in zip(soon, bodies, strict=True)]
        for arrival in load[len(soon) :]:
            await asyncio.sleep(max(0.0, began + arrival.at - PREPARED_S - time.monotonic()))
            tasks.append(asyncio.create_task(run(arrival, _body(target, arrival))))
        return await asyncio.gather(*tasks)


def _failed(arrival: Arrival, late: float, error: str) -> Served:
    return Served(arrival, None, None, error=error[:SAID], late_s=late)


def _body(target: Target, arrival: Arrival) -> bytes:
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt_of(arrival),
        "max_tokens": arrival.output,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not target.plain:
        body |= {"ignore_eos": True, "return_token_ids": True}
    return json.dumps(body | dict(target.body)).encode()


async def _ask(
    session: aiohttp.ClientSession,
    target: Target,
    arrival: Arrival,
    body: bytes,
    due: float,
    late: float,
    own: Mapping[str, str],
) -> Served:
    """Make one streamed request, and time its tokens from when it was due."""
    headers = {"Content-Type": "application/json", **own}
    async with session.post(f"{target.url}/v1/completions", data=body, headers=headers) as answer:
        if answer.status != 200:
            said = (await answer.read()).decode(errors="replace")[:SAID]
            if answer.status == 429:
                return Served(arrival, None, None, refused=True, late_s=late)
            return _failed(arrival, late, f"HTTP {answer.status}: {said}")
        cause = _cause(answer.headers.get("x-handoff-path", ""))
        stream = _Stream()
        async for data in answer.content.iter_any():
            stream.take(data, time.monotonic())
        if not stream.done:
            raise EOFError("the stream was cut short")
    if not stream.times:
        raise ValueError("the answer holds no token")
    if not target.plain and stream.tokens != arrival.output:
        raise ValueError(f"{stream.tokens} tokens came instead of {arrival.output}")
    first, last = stream.times[0], stream.times[-1]
    return Served(
        arrival,
        first - due,
        (last - first) / (stream.tokens - 1) if stream.tokens > 1 else 0.0,
        cause,
        late_s=late,
        e2e_s=last - due,
        tokens=stream.tokens,
        gaps_s=tuple(b - a for a, b in zip(stream.times, stream.times[1:], strict=False)),
    )


class _Stream:
    """An event stream: when its tokens came, on this process's monotonic clock."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = False
        self._pieces = 0
        self._ids = 0
        self._usage: int | None = None
        self._rest = b""

    @property
    def tokens(self) -> int:
        """How many came: as the server says, else those that it named, else the pieces that held some."""
        return self._usage if self._usage is not None else self._ids or self._pieces

    def take(self, data: bytes, now: float) -> None:
        """Take what came now; raises ``ValueError`` for what is no event of an answer."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.done = True
            return
        part = json.loads(event)
        if "choices" not in part:
            raise ValueError(f"amid the stream: {str(part)[:SAID]}")
        if usage := part.get("usage"):
            self._usage = usage["completion_tokens"]
        for choice in part["choices"]:
            ids = choice.get("token_ids")
            if ids or (ids is None and choice.get("text")):
                self._ids += len(ids or ())
                self._pieces += 1
                if not self.times or self.times[-1] != now:
                    self.times.append(now)


def _cause(path: str) -> str:
    """Return whether an answer's `x-handoff-path` tells of one worker or of two; nothing of other servers."""
    if not path:
        return ""
    return "handover" if ">" in path.split(";", 1)[0] else "undivided"
