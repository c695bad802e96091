"""The arithmetic of goodput: percentiles, requests that met their objectives, and how sure that is.

Requests of one burst are late together, so nothing here resamples single requests: arrivals are cut into
blocks of time, and blocks are resampled (a block bootstrap). Two systems that were offered the same load are
compared block by block.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from experiments.workload import Served

BLOCK_S: Final = 2.0
RESAMPLED: Final = 1000
SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def one_after_another(parts: Sequence[Sequence[Served]], seconds: float) -> list[Served]:
    """Return loads of ``seconds`` each as one."""
    return [
        replace(one, arrival=replace(one.arrival, at=one.arrival.at + turn * seconds))
        for turn, part in enumerate(parts)
        for one in part
    ]


def good_by_block(
    served: Iterable[Served], ttft_s: float, tpot_s: float, seconds: float, block_s: float = BLOCK_S
) -> list[int]:
    """Return how many requests of each block of arrivals met both objectives."""
    counts = [0] * max(1, int(seconds / block_s))
    for one in served:
        counts[int(one.arrival.at / block_s) % len(counts)] += one.good(ttft_s, tpot_s)
    return counts


def interval(counts: Sequence[int], seconds: float) -> list[float]:
    """Return 95 % of what other stretches of such a load would give, in requests a second."""
    drawn = random.Random(0)
    found = sorted(sum(drawn.choices(counts, k=len(counts))) / seconds for _ in range(RESAMPLED))
    return _middle(found)


def ratio(ours: Sequence[int], theirs: Sequence[int]) -> tuple[float | None, list[float] | None]:
    """Return ours by theirs, and 95 % of what other stretches would give; None where theirs are none.

    The blocks are of the same loads in the same order, and are drawn in pairs.
    """
    if not sum(theirs):
        return None, None
    drawn, pairs = random.Random(0), list(zip(ours, theirs, strict=True))
    found = []
    for _ in range(RESAMPLED):
        again = drawn.choices(pairs, k=len(pairs))
        if below := sum(pair[1] for pair in again):
            found.append(sum(pair[0] for pair in again) / below)
    return round(sum(ours) / sum(theirs), 3), _middle(sorted(found))


def times(served: Sequence[Served]) -> dict[str, float | None]:
    """Return percentiles in milliseconds: to the first token, per token, between tokens, end to end."""
    series: dict[str, list[float | None]] = {
        "ttft": [one.ttft_s for one in served],
        "tpot": [one.tpot_s for one in served],
        "itl": [gap for one in served for gap in one.gaps_s],
        "e2e": [one.e2e_s for one in served],
    }
    found = {}
    for name, seconds in series.items():
        ordered = sorted(s * 1e3 for s in seconds if s is not None)
        for label, share in SHARES.items():
            found[f"{name}_ms_{label}"] = percentile(ordered, share)
    return found


def outcome(served: Sequence[Served], ttft_s: float, tpot_s: float, seconds: float) -> dict[str, Any]:
    """Return the part of a row that every load has: goodput, times, refusals, errors and what they said."""
    counts = good_by_block(served, ttft_s, tpot_s, seconds)
    said = [one.error for one in served if one.error]
    late = sorted(one.late_s * 1e3 for one in served)
    return {
        "goodput_rps": round(sum(counts) / seconds, 3),
        "goodput_ci95": interval(counts, seconds),
        "offered_rps": round(len(served) / seconds, 3),
        "slo": {"ttft_ms": round(ttft_s * 1e3, 3), "tpot_ms": round(tpot_s * 1e3, 3)},
        **times(served),
        "requests": len(served),
        "refused": sum(one.refused for one in served),
        "errors": len(said),
        "said": {text: said.count(text) for text in sorted(set(said))[:5]},
        "client_late_ms_p99": percentile(late, 0.99),
    }


def sample(served: Iterable[Served]) -> list[list[object]]:
    """Return the raw times of requests: arrival (s), prompt and output tokens, ttft and tpot (ms), error."""

    def one(of: Served) -> list[object]:
        came = [None if s is None else round(s * 1e3, 1) for s in (of.ttft_s, of.tpot_s)]
        what = of.error or ("refused" if of.refused else None)
        return [round(of.arrival.at, 3), of.arrival.prompt, of.arrival.output, *came, what]

    return [one(of) for of in served]


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the value at a share of an ascending series, to 0.1; None of an empty one."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


def _middle(ordered: Sequence[float]) -> list[float]:
    return [round(ordered[int(share * len(ordered))], 3) for share in (0.025, 0.975)]
