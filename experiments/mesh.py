"""What crosses which link for a request and for a token, and which node should do what. Pure.

The questions of a published report on a mesh of unequal machines (R2 in ``published.json``): how many round
trips a token waits for, whether weights and tensors pass the node that orchestrates, and what it matters
which node does which work. docs/experiments.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from experiments.conclusions import Conclusion, ms_p50

KIND: Final = "mesh"
PAIRS: Final = ("gateway - prefill", "gateway - decode", "prefill - decode")
THROUGH: Final = PAIRS[:2]
COUNTS: Final = ("bytes", "turns", "packets")
Connection = tuple[int, str, int]
"""(own port, the other's address, its port)."""
Totals = Mapping[Connection, tuple[int, int, int]]
"""Payload bytes, turns and packets with payload of each connection, as a tap counts them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which node does what. ``slow``: the node that is throttled; None: neither."""

    name: str
    mode: str
    slow: str | None


CHOICES: Final = (
    Choice("equal: split", "always", None),
    Choice("equal: one alone", "never", None),
    Choice("fast prefills, slow decodes", "always", "decode"),
    Choice("slow prefills, fast decodes", "always", "prefill"),
    Choice("fast alone", "never", "prefill"),
    Choice("slow alone", "never", "decode"),
    Choice("split, the gateway is slow", "always", "gateway"),
)
"""``never``: the node of the decode worker does all of it."""
UNEQUAL: Final = tuple(choice.name for choice in CHOICES[2:6])


def since(before: Totals, after: Totals) -> dict[Connection, tuple[int, int, int]]:
    """Return what was counted between two readings of a tap."""
    return {
        one: tuple(a - b for a, b in zip(counts, before.get(one, (0, 0, 0)), strict=True))  # type: ignore[misc]
        for one, counts in after.items()
    }


def divided(
    counted: Totals, resting: Totals, share: float
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Divide what crossed between two nodes into (of requests, of services above rest, in all).

    resting: what crossed while nothing was asked, ``share`` times shorter. Connections that were silent then
    carry requests; what others carry beyond their rate at rest is told apart.
    """
    quiet, above, total = (dict.fromkeys(COUNTS, 0) for _ in range(3))
    for connection, counts in counted.items():
        rest = resting.get(connection, (0, 0, 0))
        for name, count, at_rest in zip(COUNTS, counts, rest, strict=True):
            total[name] += count
            if rest[2]:
                above[name] += round(count - at_rest * share)
            else:
                quiet[name] += count
    return quiet, above, total


def traffic_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each prompt length and pair of nodes: what a request costs, and what each token adds.

    From two lengths of the answer: the slope is a token's, the rest a request's. A round trip is two turns.
    """
    lines = []
    taken = [one for one in samples if one["what"] == "traffic"]
    for prompt in dict.fromkeys(one["prompt_tokens"] for one in taken):
        here = [one for one in taken if one["prompt_tokens"] == prompt]
        few, many = min(one["output_tokens"] for one in here), max(one["output_tokens"] for one in here)
        for pair in PAIRS:
            line: dict[str, Any] = {
                "pair": pair,
                "prompt_tokens": prompt,
                "kv_bytes": round(median(one["kv_bytes"] / one["requests"] for one in here)),
                "total_bytes_per_request": round(
                    median(one["total"][pair]["bytes"] / one["requests"] for one in here)
                ),
                "samples": len(here),
            }
            for name in COUNTS:
                at = {
                    tokens: median(
                        one["of_requests"][pair][name] / one["requests"]
                        for one in here
                        if one["output_tokens"] == tokens
                    )
                    for tokens in (few, many)
                }
                slope = (at[many] - at[few]) / (many - few) if many > few else 0.0
                unit, per = ("round_trips", 2) if name == "turns" else (name, 1)
                line[f"{unit}_per_request"] = round((at[few] - slope * few) / per, 2)
                line[f"{unit}_per_token"] = round(slope / per, 3)
            above = median(one["services_above_rest"][pair]["bytes"] / one["requests"] for one in here)
            line["services_bytes_per_request"] = round(above)
            lines.append(line)
    return lines


def choice_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each choice of which node does what, with medians."""
    lines = []
    for choice in CHOICES:
        own = [one for one in samples if one["what"] == "choice" and one["case"] == choice.name]
        if own:
            lines.append(
                {
                    "choice": choice.name,
                    "ttft_ms_p50": ms_p50([one["ttft_s"] for one in own]),
                    "tpot_ms_p50": ms_p50([one["tpot_s"] for one in own]),
                    "total_ms_p50": ms_p50([one["total_s"] for one in own]),
                    "tokens_s_p50": round(1 / median(one["tpot_s"] for one in own), 2),
                    "samples": len(own),
                }
            )
    return lines


LITTLE: Final = 0.1
"""Of the KV: what passes by less is not it."""
FEW: Final = 0.5
"""Of the weights. Workers that meet try their ways with up to 16 MB, a quarter of the tiny model."""
MATTERS: Final = 1.2
WAITED_PUBLISHED: Final = 2


def conclusions(
    traffic: Sequence[Mapping[str, Any]],
    links: Sequence[Mapping[str, Any]],
    weights: int,
    choices: Sequence[Mapping[str, Any]],
) -> list[Conclusion]:
    """Return what was claimed, for which there are figures."""
    found = []
    if links:
        most = max(links, key=lambda one: one["received_bytes"])
        figures = (
            f"at most {most['received_bytes'] / 1e6:.1f} MB came over a node's link until it served "
            f"({most['node']}); the weights have {weights / 1e6:.1f} MB"
        )
        claim = "Weights never cross the network (here: less than half of them)"
        found.append(Conclusion(claim, figures, most["received_bytes"] < FEW * weights))
    longest = max((line["prompt_tokens"] for line in traffic), default=0)
    at = {line["pair"]: line for line in traffic if line["prompt_tokens"] == longest}
    if at:
        kv, direct = at[PAIRS[2]]["kv_bytes"], at[PAIRS[2]]["total_bytes_per_request"]
        through = sum(at[pair]["total_bytes_per_request"] for pair in THROUGH)
        figures = (
            f"of a request with {kv / 1e6:.2f} MB of KV, {direct / 1e6:.2f} MB cross from worker to worker, "
            f"and {through / 1e3:.0f} kB the gateway's links, Ray's own services included"
        )
        claim = "KV goes from worker to worker, not through the gateway (here: less than a tenth of it)"
        found.append(Conclusion(claim, figures, direct >= kv and through < LITTLE * kv))
        waits = {pair: at[pair]["round_trips_per_token"] for pair in PAIRS}
        figures = ", ".join(f"{pair} {count:g}" for pair, count in waits.items()) + " for each token"
        claim = (
            f"No token waits for a round trip between nodes (published: {WAITED_PUBLISHED}; here: under 0.5)"
        )
        found.append(Conclusion(claim, figures, sum(waits.values()) < 0.5))
    by = {line["choice"]: line["total_ms_p50"] for line in choices}
    if set(UNEQUAL) <= by.keys():
        best, worst = (pick(UNEQUAL, key=lambda name: by[name]) for pick in (min, max))
        figures = f"{best} {by[best]:.0f} ms, {worst} {by[worst]:.0f} ms: {by[worst] / by[best]:.1f} times"
        claim = f"Which node does what matters where nodes are unequal (here: {MATTERS} times or more)"
        found.append(Conclusion(claim, figures, by[worst] >= MATTERS * by[best]))
    return found


def recommendation(choices: Sequence[Mapping[str, Any]], share: float) -> list[str]:
    """Return what to do with unequal nodes, from the figures."""
    by = {line["choice"]: line for line in choices}
    if not set(UNEQUAL) <= by.keys():
        return []
    told = []
    best = min(UNEQUAL, key=lambda name: by[name]["total_ms_p50"])
    split = min(UNEQUAL[:2], key=lambda name: by[name]["total_ms_p50"])
    told.append(
        f"With one node at {100 * share:.0f} % of its speed, one request is over first with: {best} "
        f"({by[best]['total_ms_p50']:.0f} ms; first token {by[best]['ttft_ms_p50']:.0f} ms)."
    )
    other = next(name for name in UNEQUAL[:2] if name != split)
    told.append(
        f"If both must work, {split} ({by[split]['total_ms_p50']:.0f} ms against "
        f"{by[other]['total_ms_p50']:.0f} ms the other way round)."
    )
    gateway, equal = by.get(CHOICES[6].name), by.get(CHOICES[0].name)
    if gateway and equal:
        ratio = gateway["total_ms_p50"] / equal["total_ms_p50"]
        told.append(f"A gateway as slow costs {ratio:.2f} times the time of one that is not.")
    return told
