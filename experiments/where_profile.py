"""A tensor-parallel prefill taken apart, step by step, from the profiles of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean
from typing import Any, Final

PARTS: Final = ("compute", "copy", "wait", "transfer", "other")
STEP: Final = "handoff step"
"""What a step is called in a profile."""
COPIES: Final = frozenset(
    (
        "aten::copy_",
        "aten::_to_copy",
        "aten::cat",
        "aten::clone",
        "aten::contiguous",
        "_C::cpu_attn_reshape_and_cache",
    )
)
"""Operations that only move: casts and copies, and writing the KV cache."""
_ITEM_BYTES: Final[Mapping[str, int]] = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "int": 4,
    "long int": 8,
}


class ProfileError(ValueError):
    """A profile is not that of a tensor-parallel prefill; the message says what is missing."""


# -- one rank's profile


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective operation: its kind, bytes of a rank's tensor, seconds from its call to its end."""

    kind: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step of one rank. Seconds; those of operations are without those of operations within them."""

    tokens: int
    seconds: float
    compute_s: float
    copy_s: float
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    start: float
    end: float
    name: str


def rank_steps(trace: Mapping[str, Any]) -> list[RankStep]:
    """Read the steps out of a profile of ``torch.profiler`` in Chrome's trace format.

    A collective is called on the engine's thread (``c10d::``), which then waits; gloo's thread records it
    (``gloo:``) until its end. Both are in the order of the calls.

    Raises:
        ProfileError: there are no steps, or calls without their collectives.

    """
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
    events.sort(key=lambda one: (one["ts"], -one["dur"]))
    marks = [one for one in events if one["name"].startswith(STEP)]
    if not marks:
        raise ProfileError(f"the profile has no {STEP!r}")
    thread = marks[0]["tid"]
    events = [one for one in events if one["ts"] >= marks[0]["ts"]]
    calls = [one for one in events if one["tid"] == thread and one["name"].startswith("c10d::")]
    works = [one for one in events if one["name"].startswith("gloo:")]
    if len(calls) != len(works) or not calls:
        raise ProfileError(
            f"the profile has {len(calls)} collective calls, and {len(works)} that gloo carried out: did the "
            "ranks reduce by gloo?"
        )
    found = [
        (_Span(call["ts"], work["ts"] + work["dur"], work["name"]), work)
        for call, work in zip(calls, works, strict=True)
    ]
    operations = [
        _Span(one["ts"], one["ts"] + one["dur"], one["name"])
        for one in events
        if one["tid"] == thread and one.get("cat") == "cpu_op" and not one["name"].startswith("c10d::")
    ]
    return [_step(mark, operations, found) for mark in marks]


def _step(
    mark: Mapping[str, Any],
    operations: Sequence[_Span],
    found: Sequence[tuple[_Span, Mapping[str, Any]]],
) -> RankStep:
    start, end = mark["ts"], mark["ts"] + mark["dur"]
    within = [(span, work) for span, work in found if start <= span.start < end]
    collectives = tuple(
        Collective(work["name"].removeprefix("gloo:"), _nbytes(work), (span.end - span.start) / 1e6)
        for span, work in within
    )
    spans = [span for span in operations if start <= span.start < end] + [span for span, _ in within]
    seconds = {"compute": 0.0, "copy": 0.0}
    for name, own in _own_times(spans):
        if not name.startswith("gloo:"):
            seconds["copy" if name in COPIES else "compute"] += own / 1e6
    tokens = next((work["args"]["Input Dims"][0][0] for _, work in within if _reduces(work)), 0)
    return RankStep(tokens, mark["dur"] / 1e6, seconds["compute"], seconds["copy"], collectives)


def _own_times(spans: Sequence[_Span]) -> Iterator[tuple[str, float]]:
    """Return (name, its time without that of spans within it); nothing within a collective counts."""
    open_: list[tuple[_Span, float]] = []
    for span in [*sorted(spans, key=lambda one: (one.start, -one.end)), _Span(float("inf"), 0.0, "")]:
        while open_ and open_[-1][0].end <= span.start:
            done, inner = open_.pop()
            if not any(outer.name.startswith("gloo:") for outer, _ in open_):
                yield done.name, max(0.0, done.end - done.start - inner)
        if open_:
            outer, inner = open_[-1]
            open_[-1] = (outer, inner + min(span.end, outer.end) - span.start)
        open_.append((span, 0.0))


def _reduces(work: Mapping[str, Any]) -> bool:
    return bool(work["name"] == "gloo:all_reduce")


def _nbytes(work: Mapping[str, Any]) -> int:
    kind = work["args"]["Input type"][0]
    if kind not in _ITEM_BYTES:
        raise ProfileError(f"{work['name']} of {kind!r}: known are {', '.join(_ITEM_BYTES)}")
    return int(prod(work["args"]["Input Dims"][0])) * _ITEM_BYTES[kind]


# -- all ranks together


def together(ranks: Sequence[Sequence[RankStep]]) -> list[dict[str, Any]]:
    """Return what each step took, as means over the ranks.

    Of a collective, the rank that comes last waits for nobody: what it takes is ``transfer``, and what others
    take longer is ``wait``. No clock is compared with another.

    Raises:
        ProfileError: ranks did not do the same.

    """
    steps = []
    for number, of in enumerate(zip(*ranks, strict=True)):
        if len({tuple((one.kind, one.nbytes) for one in step.collectives) for step in of}) != 1:
            raise ProfileError(f"step {number}: the ranks' collectives are not the same")
        least = [min(times) for times in zip(*(_times(step) for step in of), strict=True)]
        transfer = sum(least)
        spent = [sum(_times(step)) for step in of]
        parts = {
            "compute": fmean(step.compute_s for step in of),
            "copy": fmean(step.copy_s for step in of),
            "wait": fmean(spent) - transfer,
            "transfer": transfer,
        }
        seconds = fmean(step.seconds for step in of)
        reduced = [one for one in of[0].collectives if one.kind == "all_reduce"]
        steps.append(
            {
                "tokens": of[0].tokens,
                "seconds": round(seconds, 6),
                **{f"{name}_s": round(value, 6) for name, value in parts.items()},
                "other_s": round(seconds - sum(parts.values()), 6),
                "all_reduces": len(reduced),
                "all_reduce_bytes": sum(one.nbytes for one in reduced),
                "all_reduce_s": round(
                    fmean(
                        sum(one.seconds for one in step.collectives if one.kind == "all_reduce")
                        for step in of
                    ),
                    6,
                ),
                "other_collectives": len(of[0].collectives) - len(reduced),
            }
        )
    return steps


def _times(step: RankStep) -> list[float]:
    return [one.seconds for one in step.collectives]
