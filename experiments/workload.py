"""Loads: when requests arrive, how long their prompts and answers are, and which prefixes they share."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TRACE_BLOCK: Final = 512
"""Tokens that an id of a trace's ``hash_ids`` stands for."""


class TraceError(ValueError):
    """A file is no trace; the message names file, line and reason."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: seconds from the start, tokens of prompt and answer, and its prefix.

    ``hash_ids``: one for each ``block`` tokens of the prompt; equal ones from the start are an equal prefix.
    """

    at: float
    prompt: int
    output: int
    hash_ids: tuple[int, ...] = ()
    block: int = TRACE_BLOCK


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request.

    Attributes:
        arrival: the request.
        ttft_s: seconds from when it was due to the first token; None if none came.
        tpot_s: seconds per token after it.
        cause: why it ran as it did, if the server tells.
        refused: with 429.
        error: what went wrong; empty: nothing.
        late_s: seconds by which the client sent it late; they are part of ``ttft_s`` and ``e2e_s``.
        e2e_s: seconds from when it was due to the last token.
        tokens: of the answer.
        gaps_s: between the pieces in which tokens came.

    """

    arrival: Arrival
    ttft_s: float | None
    tpot_s: float | None
    cause: str = ""
    refused: bool = False
    error: str = ""
    late_s: float = 0.0
    e2e_s: float | None = None
    tokens: int = 0
    gaps_s: tuple[float, ...] = ()

    def good(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it met both objectives. An answer of one token has no time per token."""
        return self.ttft_s is not None and self.ttft_s <= ttft_s and (self.tpot_s or 0.0) <= tpot_s


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths, uniform between two bounds, and how arrivals bunch.

    Attributes:
        prompt: tokens, least and most.
        output: the same of answers.
        bursts: arrivals of a burst come at this many times the mean rate, none between bursts; 1: Poisson.
        sessions: share of requests that go on from an earlier prompt.

    """

    prompt: tuple[int, int]
    output: tuple[int, int]
    bursts: float = 1.0
    sessions: float = 0.0


MIXES: Final[dict[str, Mix]] = {
    "prefill-heavy": Mix((1000, 3000), (4, 12)),
    "decode-heavy": Mix((16, 128), (64, 160)),
    "balanced": Mix((200, 1400), (24, 72)),
    "bursty": Mix((200, 1400), (24, 72), bursts=4.0),
}
BURST_S: Final = 4.0
"""From the start of a burst to the start of the next."""


def arrivals(mix: Mix, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Draw a load of ``rate`` requests a second on average."""
    drawn = random.Random(seed)
    found: list[Arrival] = []
    at = 0.0
    ids = 0
    while (at := at + drawn.expovariate(rate * mix.bursts)) < seconds:
        if mix.bursts > 1 and at % BURST_S > BURST_S / mix.bursts:
            at += BURST_S - at % BURST_S  # what is between bursts; memoryless, so nothing is lost
            if at >= seconds:
                break
        prompt, output = drawn.randint(*mix.prompt), drawn.randint(*mix.output)
        blocks = math.ceil(prompt / TRACE_BLOCK)
        found.append(Arrival(at, prompt, output, tuple(range(ids, ids + blocks))))
        ids += blocks
    return found


def synthetic_trace(path: Path, requests: int, rate: float, seed: int) -> None:
    """Write a small trace of conversations: sessions begin with one of a few prompts and grow by turns."""
    drawn = random.Random(seed)
    at, ids = 0.0, 1000
    open_sessions: list[list[int]] = []
    lines = []
    for _ in range(requests):
        at += drawn.expovariate(rate)
        if open_sessions and drawn.random() < 0.6:
            session = drawn.choice(open_sessions)
        else:
            session = [drawn.randint(0, 3)]
            open_sessions = [*open_sessions[-20:], session]
        new = min(8, 1 + int(drawn.expovariate(0.5)))
        session += range(ids, ids + new)
        ids += new
        if len(session) > 24:
            open_sessions.remove(session)
        length = TRACE_BLOCK * (len(session) - 1) + drawn.randint(1, TRACE_BLOCK)
        output = max(2, min(800, int(drawn.lognormvariate(5.0, 0.8))))
        record = {
            "timestamp": int(at * 1000),
            "input_length": length,
            "output_length": output,
            "hash_ids": list(session),
        }
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n", "utf-8")


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace in the published Mooncake format: JSON lines of timestamp (ms), lengths and hash ids.

    Raises:
        TraceError: a line is not of that form.

    """
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            data = json.loads(line)
            found.append(
                Arrival(
                    data["timestamp"] / 1000,
                    int(data["input_length"]),
                    int(data["output_length"]),
                    tuple(data["hash_ids"]),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"{path}, line {number}: {error!r}; wanted {{timestamp, input_length, ...}}"
            ) from error
    return found


def scaled(trace: Sequence[Arrival], shorter: float, rate: float, most: int, seconds: float) -> list[Arrival]:
    """Return the first of a trace's requests, for a smaller model: lengths by ``1/shorter``, and a mean rate.

    Prompts are cut at ``most`` tokens; a block of the trace stands for as many fewer tokens.
    """
    count = min(len(trace), int(rate * seconds))
    first, last = trace[0].at, trace[count - 1].at
    stretch = seconds / max(1e-9, last - first)
    block = max(1, int(TRACE_BLOCK / shorter))
    return [
        Arrival(
            (one.at - first) * stretch,
            max(1, min(most, int(one.prompt / shorter))),
            max(2, int(one.output / shorter)),
            one.hash_ids,
            block,
        )
        for one in trace[:count]
    ]


def prompt_of(arrival: Arrival, low: int = 16, high: int = 4000) -> list[int]:
    """Return token ids of a prompt: blocks with equal ids are equal. Ids from ``low`` to below ``high``."""
    found: list[int] = []
    for block in arrival.hash_ids or (0,):
        drawn = random.Random(block)
        found += drawn.choices(range(low, high), k=min(arrival.block, arrival.prompt - len(found)))
        if len(found) >= arrival.prompt:
            break
    drawn = random.Random(-1)
    return found + drawn.choices(range(low, high), k=arrival.prompt - len(found))
