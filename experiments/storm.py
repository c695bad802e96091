"""Many requests at once, some of whose clients leave at any moment; bare sockets, so that they keep up.

What comes of each is kept, and judged afterwards: the fake engine's tokens follow from the prompt, so that
a history of requests on it can be checked to the last token (``wrong``).
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

ANSWERED_WITHIN_S = 120.0


AGAIN_S = 0.1
"""After a connection broke, a client waits this long, and asks again."""


@dataclass(frozen=True)
class Plan:
    """One request, and when its client leaves: after so many seconds, or parts of the stream.

    ``pause_s``: how long a slow client rests after each part. ``index``: which of all it is.
    """

    prompt: list[int]
    max_tokens: int
    stream: bool
    params: dict[str, Any] = field(default_factory=dict)
    leave_after_s: float | None = None
    leave_after_parts: int | None = None
    pause_s: float = 0.0
    index: int = 0

    @property
    def leaves(self) -> bool:
        """Whether its client will not wait for the end."""
        return self.leave_after_s is not None or self.leave_after_parts is not None


@dataclass(frozen=True)
class Outcome:
    """What came of a request: `complete` if all was answered, `tokens` that came until then.

    `error` says what went wrong, if something did. `broken`: that was the connection, and not the answer.
    `ended`: seconds, monotonic.
    """

    plan: Plan
    complete: bool
    tokens: list[int]
    error: str | None = None
    broken: bool = False
    ended: float = field(default_factory=time.monotonic)


def errors(outcomes: Sequence[Outcome]) -> Counter[str]:
    """What went wrong, and how often."""
    return Counter(outcome.error for outcome in outcomes if outcome.error is not None)


def wrong(outcomes: Sequence[Outcome], right: Mapping[tuple[int, ...], Sequence[int]]) -> list[str]:
    """Say what is wrong in a history: answers that failed, or differ from what is right for their prompt.

    A connection that broke is no answer, but what came over it must have been right.
    """
    found = []
    for outcome in outcomes:
        plan, expected = outcome.plan, list(right[tuple(outcome.plan.prompt)])[: outcome.plan.max_tokens]
        if outcome.error is not None and not outcome.broken:
            found.append(f"request {plan.index}: {outcome.error}")
        elif outcome.complete and outcome.tokens != expected:
            found.append(f"request {plan.index}: its tokens are {outcome.tokens}, not {expected}")
        elif outcome.tokens != expected[: len(outcome.tokens)]:
            found.append(f"request {plan.index}: its first tokens are {outcome.tokens}, not {expected}")
        elif not (outcome.complete or plan.leaves or outcome.broken):
            found.append(f"request {plan.index}: it ended early, after {len(outcome.tokens)} tokens")
    return found


def plans(
    count: int,
    seed: int,
    prompts: Sequence[list[int]],
    most_tokens: int,
    aborted: float = 0.3,
    decode_samples: float = 0.25,
    slow: float = 0.0,
) -> list[Plan]:
    """Draw requests: of these prompts, streamed or not, of both ways to divide, some aborted or slow.

    Of the aborted ones, a fifth leave at once, two fifths within the time that prefill and decode may take,
    a fifth at the first token and a fifth after some more.
    """
    drawn = random.Random(seed)
    made = []
    for index in range(count):
        leaves = drawn.random() < aborted
        pause_s = 0.02 if slow and drawn.random() < slow else 0.0
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
                params={"presence_penalty": 0.1} if drawn.random() < decode_samples else {},
                leave_after_s=after_s,
                leave_after_parts=parts,
                pause_s=pause_s,
                index=index,
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
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError as error:
        return Outcome(plan, False, tokens, f"{type(error).__name__}: {error}", broken=True)
    try:
        writer.write(_request(model, plan))
        answer = _stream(reader, plan, tokens) if plan.stream else _whole(reader, tokens)
        complete = await asyncio.wait_for(answer, plan.leave_after_s or ANSWERED_WITHIN_S)
    except TimeoutError:
        late = None if plan.leave_after_s else f"no answer within {ANSWERED_WITHIN_S:g} s"
        return Outcome(plan, False, tokens, late)
    except Wrong as error:
        return Outcome(plan, False, tokens, f"{type(error).__name__}: {error}")
    except (OSError, EOFError) as error:
        return Outcome(plan, False, tokens, f"{type(error).__name__}: {error}", broken=True)
    finally:
        writer.transport.abort()  # at once, whatever has not been read
    return Outcome(plan, complete, tokens)


class Load:
    """Requests one after the other, so many at once, in a thread, until it is told to stop.

    Args:
        url: gives the endpoint's address, asked for before each request.
        model: its name there.
        plans: what is asked; it goes round.
        at_once: how many.
        total: stop by itself after so many.

    A request whose connection breaks is made again, until it is answered: ``outcomes`` has all its attempts.
    Use it as a context; leaving it waits for what is under way.

    """

    def __init__(
        self,
        url: Callable[[], str],
        model: str,
        plans: Sequence[Plan],
        at_once: int,
        total: int | None = None,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._url, self._model, self._plans, self._at_once = url, model, plans, at_once
        self._left = iter(range(total)) if total is not None else None
        self._next = 0
        self._stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping = True
        self._thread.join()

    @property
    def running(self) -> bool:
        """Whether requests are still being made."""
        return self._thread.is_alive()

    def answered(self) -> int:
        """How many requests have been answered to their end."""
        return sum(outcome.complete for outcome in list(self.outcomes))

    async def _run(self) -> None:
        await asyncio.gather(*(self._one_after_the_other() for _ in range(self._at_once)))

    async def _one_after_the_other(self) -> None:
        while not self._stopping:
            if self._left is not None and next(self._left, None) is None:
                return
            plan = self._plans[self._next % len(self._plans)]
            self._next += 1
            while (outcome := await ask(self._url(), self._model, plan)).broken:
                self.outcomes.append(outcome)
                await asyncio.sleep(AGAIN_S)
            self.outcomes.append(outcome)


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
    head = await reader.readuntil(b"\r\n\r\n")
    if (status := head.split(b" ", 2)[1]) != b"200":
        raise Wrong(f"status {status.decode()}: {(await reader.read()).decode()[:300]}")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    body = json.loads(await reader.readexactly(length))
    tokens += body["choices"][0]["token_ids"]
    return True


async def _stream(reader: asyncio.StreamReader, plan: Plan, tokens: list[int]) -> bool:
    await _head(reader)
    parts = finishes = 0
    while line := await reader.readline():
        if line == b"data: [DONE]\n":
            if finishes != 1:
                raise Wrong(f"the stream had {finishes} ends")
            return True
        if not line.startswith(b"data: "):
            continue
        part = json.loads(line[6:])
        if "choices" not in part:
            raise Wrong(f"amid the stream: {part}")
        choice = part["choices"][0]
        if finishes:
            raise Wrong(f"after the stream's end: {part}")
        tokens += choice.get("token_ids") or []
        finishes += choice.get("finish_reason") is not None
        parts += 1
        if parts == plan.leave_after_parts:
            return False
        if plan.pause_s:
            await asyncio.sleep(plan.pause_s)
    raise EOFError("the stream was cut short")
