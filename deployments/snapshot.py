"""What is known of the workers when a request is routed, and what is asked of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from actors.messages import Role
from actors.steps import PRIOR, StepModel
from deployments.split import Mode

MOST_SHARE: Final = 0.9
FULL: Final = 1e3
"""Stands in a bound for having no room."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in seconds; None: there is none."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_SLO: Final = Slo()


@dataclass(frozen=True, slots=True)
class Link:
    """From one worker to another: what handing over takes, whatever the size, and bytes per second."""

    fixed_s: float = 0.01
    rate: float = 1e9


UNMEASURED: Final = Link()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What is known of a worker.

    Attributes:
        name: the worker.
        role: what it is for first; every worker can do both.
        alive: whether its output stream is up.
        waiting_tokens: prompt tokens that were sent there and are not computed yet.
        waiting_s: what they add to the steps that compute them.
        decoding: sequences that decode now.
        running: sequences that decode there now or will, all that were sent there and have not ended.
        context: tokens in the context of those.
        free_tokens: room in its KV cache, beyond what those that were sent there will need.
        slots: sequences that its scheduler runs at once.
        chunk: tokens that a step computes at most.
        share: of its time, that prompts take (0 to 1), some seconds' mean, as of ``at``.
        busy_since: when it began to compute the first of the prompts that wait.
        at: when this was written, on the snapshot's clock.
        step: what its steps take.
        slack_s: for how long prompts may keep it from decoding until a request there misses its objective.
        step_s: what its present sequences make of a step; follows from the others.

    """

    name: str
    role: Role
    alive: bool = True
    waiting_tokens: float = 0.0
    waiting_s: float = 0.0
    decoding: int = 0
    running: int = 0
    context: float = 0.0
    free_tokens: float = 1e9
    slots: int = 256
    chunk: int = 2048
    share: float = 0.0
    busy_since: float = 0.0
    at: float = 0.0
    step: StepModel = PRIOR
    slack_s: float = math.inf
    step_s: float = field(init=False)

    def __post_init__(self) -> None:
        context = self.context * self.decoding / max(1, self.running)
        object.__setattr__(self, "step_s", self.step.decode_s(self.decoding, context))

    def queue_s(self, now: float) -> float:
        """Return how long the prompts that wait there will take, less what it has done of them."""
        if self.waiting_tokens <= 0:
            return self.step_s / 2 if self.decoding else 0.0  # the step that is under way
        whole = self.waiting_s + self.waiting_tokens / self.chunk * self.step_s
        return max(whole * 0.05, whole - max(0.0, now - self.busy_since))

    def row(self) -> tuple[float, ...]:
        """What bounds for many workers are computed from at once; see ``_candidates``."""
        dead = 0.0 if self.alive else math.inf
        running, step, step_s = self.running, self.step, self.step_s
        room = running < self.slots and self.free_tokens > 0
        felt = 1 + self.decoding
        after = step.decode_s(running + 1, self.context)
        return (
            dead + self.queue_s(self.at),
            (step_s / self.chunk + step.token) * felt,
            step.token_context / 2 * felt,
            after / (1 - min(MOST_SHARE, self.share)) + running * step.sequence,
            running * step.context,
            dead + (0.0 if room else FULL),
            0.0 if self.role == "prefill" else math.inf,
            0.0 if self.role == "decode" else math.inf,
        )


COLUMNS: Final = 8


@dataclass(frozen=True)
class Snapshot:
    """The workers and the ways between them at one moment.

    Attributes:
        workers: in any order; they are referred to by their place here.
        table: ``row()`` of each, ``[columns, workers]``; read-only.
        links: by (prefill worker, decode worker); those that are missing are like ``link``.
        link: of a pair that has not been measured.
        kv_bytes: of one token's KV.
        overhead_s: of every request, beside what the engines do.
        now: the moment, on the clock of the workers' ``at``.

    """

    workers: Sequence[WorkerState]
    table: Array
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    link: Link = UNMEASURED
    kv_bytes: float = 0.0
    overhead_s: float = 0.0
    now: float = 0.0

    @classmethod
    def of(cls, workers: Sequence[WorkerState], **others: object) -> Snapshot:
        """Return a snapshot of workers, with its table made from them."""
        table = np.array([worker.row() for worker in workers], np.float64).reshape(-1, COLUMNS).T.copy()
        return cls(tuple(workers), table, **others)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be routed.

    Attributes:
        prompt: its tokens.
        output: tokens that its answer is expected to have.
        mode: how it can be divided without changing its result.
        why: why that is so, for people.
        cached: tokens of the prompt whose KV a worker holds, by the worker's place in the snapshot.
        one_token: it is all prefill.
        must_divide: one engine could not run it alone.
        slo: what it should meet.
        turn: counts requests, for taking turns.

    """

    prompt: int
    output: float
    mode: Mode
    why: str = ""
    cached: Mapping[int, int] = field(default_factory=dict)
    one_token: bool = False
    must_divide: bool = False
    slo: Slo = NO_SLO
    turn: int = 0
