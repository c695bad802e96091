"""What an engine step takes, learnt from the steps themselves.

A step computes prompt tokens, and one token for each sequence that decodes:

``seconds = base + sequence * decoding + token * prompt + token_context * sum(prompt * context before it)
+ context * sum(context of those that decode)``

This is the usual linear model of chunked prefill (Agrawal et al., Sarathi-Serve, OSDI 2024; Zhong et al.,
DistServe, OSDI 2024, appendix A): matrix products grow with tokens, attention with tokens times context,
and reading weights is the base. The coefficients are those of a least squares fit, weighted so that errors
count by their share of a step; older steps count less, and one that took far longer than expected counts
little.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np

FORGET: Final = 0.99
"""What a step weighs when the next of its kind comes: the last hundred count."""
RIDGE: Final = 1e-4
"""Pull towards what is assumed at the start, where steps do not tell."""
TRUSTED: Final = 0.5
"""A step that is further off than this share of what was expected counts less, by as much."""
SWEEPS: Final = 30


@dataclass(frozen=True, slots=True)
class StepModel:
    """The coefficients, in seconds; the defaults are assumed until steps have been seen.

    Attributes:
        base: of every step.
        sequence: of each sequence that decodes.
        token: of each prompt token.
        token_context: of each prompt token and token before it.
        context: of each token in the context of a sequence that decodes.

    """

    base: float = 5e-3
    sequence: float = 2e-4
    token: float = 1e-4
    token_context: float = 1e-8
    context: float = 1e-7

    def decode_s(self, sequences: float, context: float) -> float:
        """Return what a step takes that only decodes."""
        return self.base + self.sequence * sequences + self.context * context

    def prefill_s(self, tokens: float, start: float) -> float:
        """Return what ``tokens`` of a prompt after the first ``start`` add to the steps they are in."""
        return tokens * (self.token + self.token_context * (start + tokens / 2))


PRIOR: Final = StepModel()


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: sequences that decode, their context, prompt tokens, those times context."""

    decoding: int
    context: int
    tokens: int
    token_context: float

    @property
    def features(self) -> tuple[float, ...]:
        """In the order of the model's coefficients."""
        return (1.0, self.decoding, self.tokens, self.token_context, self.context)


class Meter:
    """Fits a ``StepModel`` to an engine's steps. Thread-safe to read; told by the engine thread.

    A step that prefills and one that only decodes are two kinds: many of one kind do not let the other be
    forgotten.
    """

    def __init__(self) -> None:
        self._scale = np.array(astuple(PRIOR))
        self._planned: deque[tuple[Work, float]] = deque()
        self._completed_at = 0.0
        self._gram = np.zeros((2, 5, 5))
        self._moment = np.zeros((2, 5))
        self._weight = np.zeros(2)
        self._model = PRIOR
        self._stale = False
        self._lock = threading.Lock()
        self.prompting_s = 0.0
        """What steps took that computed prompts, since the start."""

    def planned(self, work: Work, now: float | None = None) -> None:
        """A step has been scheduled."""
        self._planned.append((work, time.monotonic() if now is None else now))

    def completed(self, unfinished: int, now: float | None = None) -> None:
        """All planned steps but the last ``unfinished`` have been computed."""
        now = time.monotonic() if now is None else now
        while len(self._planned) > unfinished:
            work, planned_at = self._planned.popleft()
            if work.tokens or work.decoding:
                self.saw(work, now - max(planned_at, self._completed_at))
            self._completed_at = now

    def saw(self, work: Work, seconds: float) -> None:
        """A step took so long."""
        features = np.array(work.features) * self._scale
        with self._lock:
            expected = max(float(features @ (np.array(astuple(self._model)) / self._scale)), 1e-5)
            off = abs(seconds - expected) / expected
            kind = int(work.tokens > 0)
            self.prompting_s += seconds * kind
            trust = min(1.0, TRUSTED / off) if off > 0 and self._weight[kind] > 1 else 1.0
            weight = trust / max(seconds, expected) ** 2
            self._gram[kind] = FORGET * self._gram[kind] + weight * np.outer(features, features)
            self._moment[kind] = FORGET * self._moment[kind] + weight * seconds * features
            self._weight[kind] = FORGET * self._weight[kind] + trust
            self._stale = True

    @property
    def measured(self) -> bool:
        """Whether a step has computed prompt tokens."""
        return bool(self._weight[1] > 0)

    def model(self) -> StepModel:
        """Return what fits best now."""
        with self._lock:
            if self._stale:
                self._stale = False
                seen = np.maximum(self._weight, 1e-9)
                gram = (self._gram / seen[:, None, None]).sum(0) + RIDGE * np.eye(5)
                moment = (self._moment / seen[:, None]).sum(0) + RIDGE
                now = np.array(astuple(self._model)) / self._scale
                fitted = _nonnegative(gram.tolist(), moment.tolist(), now.tolist())
                self._model = StepModel(*(float(x * s) for x, s in zip(fitted, self._scale, strict=True)))
            return self._model


def _nonnegative(
    gram: Sequence[Sequence[float]], moment: Sequence[float], start: Sequence[float]
) -> list[float]:
    """Return x >= 0 that minimises ``x'Gx/2 - m'x``, by coordinate descent."""
    x = list(start)
    for _ in range(SWEEPS):
        for i, row in enumerate(gram):
            rest = sum(g * v for g, v in zip(row, x, strict=True)) - row[i] * x[i]
            x[i] = max(0.0, (moment[i] - rest) / row[i])
    return x
