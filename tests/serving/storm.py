"""Many requests at once, some of whose clients leave at any moment; bare sockets, so that they keep up."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

ANSWERED_WITHIN_S = 120.0


@dataclass(frozen=True)
class Plan:
    """One request, and when its client leaves: after so many seconds, or parts of the stream."""

    prompt: list[int]
    max_tokens: int
    stream: bool
    params: dict[str, Any] = field(default_factory=dict)
    leave_after_s: float | None = None
    leave_after_parts: int | None = None

    @property
    def leaves(self) -> bool:
        return self.leave_after_s is not None or self.leave_after_parts is not None


@dataclass(frozen=True)
class Outcome:
    """What came of a request: `complete` if all was answered, `tokens` that came until then.

    `error` says what went wrong, if something did.
    """

    plan: Plan
    complete: bool
    tokens: list[int]
    error: str | None = None


def plans(
    count: int, seed: int, prompts: Sequence[list[int]], most_tokens: int, aborted: float = 0.3
) -> list[Plan]:
    """Draw requests: of these prompts, streamed or not, of both ways to divide, a share of them aborted.

    Of the aborted ones, a fifth leave at once, two fifths within the time that prefill and decode may take,
    a fifth at the first token and a fifth after some more.
    """
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        leaves = drawn.random() < aborted
        stream, after_s, parts = drawn.random() < 0.5, None, None
        if leaves:
            match drawn.randrange(5):
                case 0:
                    after_s = drawn.random() * 0.004
                case 1 | 2:
                    after_s = drawn.random() * 0.3
                case 3:
                    stream, parts = True, 1
                case 4:
                    stream, parts = True, drawn.randrange(2, most_tokens)
        made.append(
            Plan(
                prompt=drawn.choice(prompts),
                max_tokens=drawn.randrange(1, most_tokens + 1) if not leaves else most_tokens,
                stream=stream,
                params={"presence_penalty": 0.1} if drawn.random() < 0.25 else {},
                leave_after_s=after_s,
                leave_after_parts=parts,
            )
        )
    return made


def storm(url: str, model: str, plans: Sequence[Plan], at_once: int) -> list[Outcome]:
    """Run all requests, so many at a time; outcomes are in the order of the plans."""

    async def run() -> list[Outcome]:
        gate = asyncio.Semaphore(at_once)

        async def one(plan: Plan) -> Outcome:
            async with gate:
                return await ask(url, model, plan)

        return await asyncio.gather(*(one(plan) for plan in plans))

    return asyncio.run(run())


async def ask(url: str, model: str, plan: Plan) -> Outcome:
    """Make one request over a connection of its own, and leave as planned."""
    parts = urlsplit(url)
    tokens: list[int] = []
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(_request(model, plan))
        answer = _stream(reader, plan, tokens) if plan.stream else _whole(reader, tokens)
        complete = await asyncio.wait_for(answer, plan.leave_after_s or ANSWERED_WITHIN_S)
    except TimeoutError:
        error = None if plan.leave_after_s else f"no answer within {ANSWERED_WITHIN_S:g} s"
        return Outcome(plan, False, tokens, error)
    except (Wrong, OSError, EOFError) as error:
        return Outcome(plan, False, tokens, f"{type(error).__name__}: {error}")
    finally:
        writer.transport.abort()  # at once, whatever has not been read
    return Outcome(plan, complete, tokens)


class Wrong(Exception):
    """The answer is not what it should be."""


def _request(model: str, plan: Plan) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "prompt": plan.prompt,
            "max_tokens": plan.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": plan.stream,
            "return_token_ids": True,
            **plan.params,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _head(reader: asyncio.StreamReader) -> None:
    status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
    if status != b"200":
        raise Wrong(f"status {status.decode()}: {(await reader.read()).decode()[:300]}")


async def _whole(reader: asyncio.StreamReader, tokens: list[int]) -> bool:
    await _head(reader)
    tokens += json.loads(await reader.read())["choices"][0]["token_ids"]
    return True


async def _stream(reader: asyncio.StreamReader, plan: Plan, tokens: list[int]) -> bool:
    await _head(reader)
    parts = 0
    while line := await reader.readline():
        if line == b"data: [DONE]\n":
            return True
        if not line.startswith(b"data: "):
            continue
        part = json.loads(line[6:])
        if "choices" not in part:
            raise Wrong(f"amid the stream: {part}")
        tokens += part["choices"][0].get("token_ids") or []
        parts += 1
        if parts == plan.leave_after_parts:
            return False
    raise Wrong("the stream was cut short")
