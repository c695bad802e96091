"""A prompt computed on one node and answered on another, ways against each other: rows and verdict. Pure.

The comparison of a published report (R1 in ``published.json``): pickled tensors over TCP and Ray's object
store, beside Handoff's transports and each node alone, with the same model, prompts and link:
docs/experiments.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from experiments.conclusions import Conclusion, ms_p50

KIND: Final = "head-to-head"
PICKLE, STORE = "pickle over tcp", "ray object store"
OURS: Final = ("handoff tcp", "handoff plasma")
WAYS: Final = (PICKLE, STORE, *OURS)
ALONE: Final = ("alone 0", "alone 1")
ENCODINGS: Final = (
    "pickle, tensors",
    "torch.save",
    "pickle, arrays",
    "pickle5, out of band",
    "arrow ipc",
    "ray put and get",
    "memory copy",
)
USER_WAYS: Final = (PICKLE, OURS[0])
ONE, SEVERAL = "one process", "a process each"
PHASES: Final = ("prefill", "to_host", "encode", "network", "decode_bytes", "to_device")
"""Up to the moment at which the decode node has the cache; the last four and ``to_host`` are the transfer."""
TRANSFER: Final = PHASES[1:]
PUBLISHED: Final[Mapping[str, Mapping[str, float | None]]] = {
    PICKLE: {
        **dict.fromkeys(("to_host", "encode", "decode_bytes", "to_device")),
        "prefill": 5389,
        "serialize": 93,
        "network": 572,
        "deserialize": 1370,
        "transfer": 2035,
        "ttft": 7553,
        "total": 34198,
        "tokens_s": 8.7,
    },
    STORE: {
        "prefill": 3620,
        "to_host": 122,
        "encode": 106,
        "serialize": 228,
        "network": 1261,
        "decode_bytes": 12,
        "to_device": 1424,
        "deserialize": 1436,
        "transfer": 2924,
        "ttft": 6642,
        "total": 36639,
        "tokens_s": 8.8,
    },
}
"""Milliseconds and tokens a second, at 871 prompt tokens and 109 MB; no figure where it gives a sum only."""


def link_name(gbit_s: float | None) -> str:
    """Return what a link is called."""
    return "loopback" if gbit_s is None else f"{gbit_s:g} Gbit/s"


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure, ``repeats`` times."""

    what: str
    case: str
    gbit_s: float | None = None
    prompt: int = 0
    users: int = 0

    @property
    def name(self) -> str:
        """What it is called in the file."""
        if self.what == "encoding":
            return f"encoding: {self.case}"
        size = f", {self.prompt} tokens" if self.prompt else f", {self.users} users" if self.users else ""
        return f"{link_name(self.gbit_s)}: {self.case}{size}"


def cells(
    links: Sequence[float | None], prompts: Sequence[int], users: Sequence[int], iperf: bool
) -> list[Cell]:
    """Return everything there is to measure; users and encodings on the first link only."""
    found = []
    for link in links:
        if iperf:
            found += [Cell("iperf3", f"iperf3 x{streams}", link) for streams in (1, 4)]
        found += [Cell("request", case, link, prompt) for prompt in prompts for case in (*ALONE, *WAYS)]
    for count in users:
        found += [
            Cell("users", f"{way}, {how}", links[0], 0, count) for way in USER_WAYS for how in (ONE, SEVERAL)
        ]
    return [*found, *(Cell("encoding", name) for name in ENCODINGS)]


def missing(samples: Sequence[Mapping[str, Any]], wanted: Sequence[Cell], repeats: int) -> list[Cell]:
    """Return the cells that have not been measured so often yet."""
    done = [one["cell"] for one in samples]
    return [cell for cell in wanted if done.count(cell.name) < repeats]


# -- rows


def rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each link, prompt length and way: medians of its phases, in milliseconds."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in samples:
        if one["what"] == "request":
            groups.setdefault(one["cell"], []).append(one)
    lines = []
    for taken in groups.values():
        first = taken[0]
        limit = _iperf(samples, first["link"])
        ms = {name: ms_p50([one["phases_s"][name] for one in taken]) for name in PHASES}
        transfers = [sum(one["phases_s"][name] for name in TRANSFER) for one in taken]
        wires = [one["phases_s"]["network"] for one in taken]
        handed = first["kv_bytes"] > 0
        lines.append(
            {
                "case": first["case"],
                "link": first["link"],
                "prompt_tokens": first["prompt_tokens"],
                "kv_bytes": first["kv_bytes"],
                "phases_ms_p50": ms,
                "transfer_ms_p50": ms_p50(transfers),
                "ttft_ms_p50": ms_p50([one["ttft_s"] for one in taken]),
                "decode_ms_p50": ms_p50([one["decode_s"] for one in taken]),
                "total_ms_p50": ms_p50([one["ttft_s"] + one["decode_s"] for one in taken]),
                "tokens_s_p50": round(
                    median((one["output_tokens"] - 1) / one["decode_s"] for one in taken), 2
                ),
                "network_share": _share(first["kv_bytes"], wires, limit) if handed else None,
                "transfer_share": _share(first["kv_bytes"], transfers, limit) if handed else None,
                "samples": len(taken),
            }
        )
    return lines


COLUMNS: Final = (
    ("prefill", "prefill"),
    ("device to host", "to_host"),
    ("encode", "encode"),
    ("network", "network"),
    ("decode", "decode_bytes"),
    ("host to device", "to_device"),
    ("transfer, sum", "transfer"),
    ("first token", "ttft"),
    ("end to end", "total"),
    ("tokens/s", "tokens_s"),
    ("network's share", "network_share"),
    ("transfer's share", "transfer_share"),
)
"""Of the table: headings, and keys of ``sums``."""


def sums(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return a row's figures by the names that ``PUBLISHED`` has, shares in percent; None: there is none."""
    phases, handed = row["phases_ms_p50"], row["kv_bytes"] > 0
    moved: dict[str, float | None] = {
        **{name: phases[name] if handed else None for name in TRANSFER},
        "serialize": phases["to_host"] + phases["encode"] if handed else None,
        "deserialize": phases["decode_bytes"] + phases["to_device"] if handed else None,
        "transfer": row["transfer_ms_p50"] if handed else None,
    }
    shares = {name: row[name] for name in ("network_share", "transfer_share")}
    return {
        "prefill": phases["prefill"],
        **moved,
        "ttft": row["ttft_ms_p50"],
        "total": row["total_ms_p50"],
        "tokens_s": row["tokens_s_p50"],
        **{name: None if share is None else 100 * share for name, share in shares.items()},
    }


def encoding_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each encoding."""
    found = []
    for name in ENCODINGS:
        taken = [one for one in samples if one["what"] == "encoding" and one["case"] == name]
        if taken:
            found.append(
                {
                    "case": name,
                    "encode_ms_p50": ms_p50([one["encode_s"] for one in taken]),
                    "decode_ms_p50": ms_p50([one["decode_s"] for one in taken]),
                    "bytes": taken[0]["bytes"],
                    "samples": len(taken),
                }
            )
    return found


def user_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each way and number of users: in one process, and in one each."""
    found = []
    taken = [one for one in samples if one["what"] == "users"]
    for users in dict.fromkeys(one["users"] for one in taken):
        for way in USER_WAYS:
            line: dict[str, Any] = {"case": way, "users": users, "link": taken[0]["link"]}
            for how, name in ((ONE, "one"), (SEVERAL, "several")):
                of = [one for one in taken if one["users"] == users and one["case"] == f"{way}, {how}"]
                if not of:
                    break
                line[f"{name}_gbit_s_p50"] = round(
                    median(one["kv_bytes"] * users * 8 / one["seconds"] / 1e9 for one in of), 3
                )
                line[f"{name}_slowest_ms_p50"] = ms_p50([one["seconds"] for one in of])
                line["samples"] = len(of)
            else:
                line["several_by_one"] = round(line["several_gbit_s_p50"] / line["one_gbit_s_p50"], 3)
                found.append(line)
    return found


def link_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what iperf3 found on each link, by its streams."""
    found: dict[tuple[str, int], list[float]] = {}
    for one in samples:
        if one["what"] == "iperf3":
            found.setdefault((one["link"], one["streams"]), []).append(one["gbit_s"])
    return [
        {"link": link, "streams": streams, "gbit_s_p50": round(median(rates), 3), "samples": len(rates)}
        for (link, streams), rates in found.items()
    ]


def _iperf(samples: Sequence[Mapping[str, Any]], link: str) -> float | None:
    return max((one["gbit_s_p50"] for one in link_rows(samples) if one["link"] == link), default=None)


def _share(nbytes: int, seconds: Sequence[float], limit: float | None) -> float | None:
    return None if limit is None else round(nbytes * 8 / median(seconds) / 1e9 / limit, 4)


# -- what follows


POINTER: Final = 0.1
"""A decoding that takes at most this part of unpickling does not copy."""
ESCAPED: Final = 1.2
"""Processes that are faster by this factor escape something."""


def conclusions(
    lines: Sequence[Mapping[str, Any]],
    encodings: Sequence[Mapping[str, Any]],
    users: Sequence[Mapping[str, Any]],
) -> list[Conclusion]:
    """Return the report's claims for which there are figures; the longest prompt, the first link."""
    found = []
    at = _longest(lines, lines[0]["link"]) if lines else {}
    if {PICKLE, STORE, *ALONE} <= at.keys():
        alone = max(at[name]["ttft_ms_p50"] for name in ALONE)
        split = [at[name]["ttft_ms_p50"] for name in (PICKLE, STORE)]
        figures = f"{split[0]:.0f} ms pickled, {split[1]:.0f} ms by Ray's store; alone {alone:.0f} ms at most"
        claim = "Handing over loses against either node alone (first token of one request)"
        found.append(Conclusion(claim, figures, min(split) > alone))
    by = {one["case"]: one for one in encodings}
    if {ENCODINGS[0], ENCODINGS[3]} <= by.keys():
        slow, fast = by[ENCODINGS[0]]["decode_ms_p50"], by[ENCODINGS[3]]["decode_ms_p50"]
        claim = (
            "Decoding pickle5 out of band is a matter of pointers, unpickling is not (here: a tenth or less)"
        )
        found.append(Conclusion(claim, f"{fast:.2f} ms against {slow:.1f} ms", fast <= POINTER * slow))
    if ENCODINGS[5] in by and STORE in at:
        here, there = by[ENCODINGS[5]]["decode_ms_p50"], at[STORE]["phases_ms_p50"]["network"]
        claim = "Ray's store copies nothing on one node, but does between nodes (here: a tenth or less)"
        found.append(Conclusion(claim, f"{here:.2f} ms against {there:.0f} ms", here <= POINTER * there))
    many = [one for one in users if one["case"] == PICKLE]
    if many:
        one = max(many, key=lambda row: row["users"])
        figures = (
            f"{one['users']} users: {one['several_gbit_s_p50']:.2f} Gbit/s against "
            f"{one['one_gbit_s_p50']:.2f} in one process: {one['several_by_one']:.2f} times"
        )
        claim = f"A process for each user escapes the GIL (pickled; here: {ESCAPED} times the rate or more)"
        found.append(Conclusion(claim, figures, one["several_by_one"] >= ESCAPED))
    wasted = [(name, at[name]["transfer_share"]) for name in (PICKLE, STORE) if name in at]
    if wasted and all(share is not None for _, share in wasted):
        figures = ", ".join(f"{name} {100 * share:.0f} %" for name, share in wasted)
        claim = "Pickles and Ray's store leave more than half of the link unused, all phases counted"
        found.append(Conclusion(claim, figures, max(share for _, share in wasted) < 0.5))
    return found


def break_even(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each link and prompt length, the fastest way and how fast a prefill node must be.

    One request: handing over costs ``transfer`` and spares the decode node its own prefill, which takes it
    ``alone_ms``. It pays if the prefill node is ``speedup`` times as fast: alone / (alone - transfer).
    ``gbit_s_for_twice`` is the link from which on a node twice as fast pays: what does not depend on the link
    stays as it is, the rest shrinks with the rate.
    """
    found = []
    for link, prompt in dict.fromkeys((line["link"], line["prompt_tokens"]) for line in lines):
        at = {line["case"]: line for line in lines if (line["link"], line["prompt_tokens"]) == (link, prompt)}
        split = [at[name] for name in WAYS if name in at]
        if not split or ALONE[1] not in at:
            continue
        best = min(split, key=lambda line: line["transfer_ms_p50"])
        alone, cost = at[ALONE[1]]["phases_ms_p50"]["prefill"], best["transfer_ms_p50"]
        wire = best["phases_ms_p50"]["network"]
        spare = alone / 2 - (cost - wire)
        share = best["network_share"]
        rate = best["kv_bytes"] * 8 / spare / 1e6 / share if spare > 0 and share else None
        found.append(
            {
                "link": link,
                "prompt_tokens": prompt,
                "best": best["case"],
                "transfer_ms": cost,
                "alone_prefill_ms": alone,
                "speedup": round(alone / (alone - cost), 2) if alone > cost else None,
                "gbit_s_for_twice": None if rate is None else float(f"{rate:.3g}"),
            }
        )
    return found


def recommendation(lines: Sequence[Mapping[str, Any]], even: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what to do, each sentence from figures in the tables."""
    told = []
    for one in even:
        at = f"On {one['link']} with {one['prompt_tokens']} prompt tokens"
        costs = f"{one['best']} is the fastest way ({one['transfer_ms']:.0f} ms)"
        if one["speedup"] is None:
            told.append(
                f"{at}: don't hand single requests over. {costs}, and prefill itself takes the decode node "
                f"{one['alone_prefill_ms']:.0f} ms."
            )
        else:
            enough = one["gbit_s_for_twice"]
            twice = "" if enough is None else f"; one twice as fast pays from {enough:g} Gbit/s on"
            told.append(
                f"{at}: hand over if the prefill node is {one['speedup']:g} times as fast as the decode node "
                f"or more{twice}. {costs}."
            )
    for link in dict.fromkeys(line["link"] for line in lines):
        at_link = _longest(lines, link)
        if {PICKLE, STORE, OURS[0]} <= at_link.keys():
            ours = at_link[OURS[0]]["transfer_ms_p50"]
            old = {name: at_link[name]["transfer_ms_p50"] / ours for name in (PICKLE, STORE)}
            times = " and ".join(f"{name} {ratio:.1f}" for name, ratio in old.items())
            told.append(f"On {link}, by the time that {OURS[0]} takes: {times} times.")
    return told


def _longest(lines: Sequence[Mapping[str, Any]], link: str) -> dict[str, Mapping[str, Any]]:
    """Return the lines of a link at its longest prompt, by case."""
    of = [line for line in lines if line["link"] == link]
    longest = max((line["prompt_tokens"] for line in of), default=0)
    return {line["case"]: line for line in of if line["prompt_tokens"] == longest}
