"""Where the time of a tensor-parallel prefill goes: what is measured, tables, and what follows. Pure.

The question of a published report (R4 in ``published.json``): of 49.7 s of prefill, 49.4 s were spent in
all-reduces, which nothing hid. docs/experiments.md says what each part is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from experiments.conclusions import Conclusion, ms_p50
from experiments.plan_costs import activation_bytes, all_reduce_seconds, all_reduces
from experiments.plan_machines import Link
from experiments.plan_model import Shape
from experiments.where_profile import PARTS

KIND: Final = "where-time-goes"
RANKS: Final = 2
EMBEDDING: Final = 1
"""vLLM divides the embedding between ranks by vocabulary, and sums what they have of each token."""
PUBLISHED: Final[Mapping[str, float]] = {
    "prefill_s": 49.7,
    "compute_s": 0.2858 + 0.0069,
    "all_reduce_s": 49.4,
    "all_reduces": 124,
    "each_mb": 95,
    "each_ms": 400,
    "layers": 62,
}
"""Three machines, 62 layers, 16k tokens; compute is that of GPU (285.8 ms) and CPU (6.9 ms)."""


# -- cells


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure. Without ``chunk`` it is the link itself; without ``buffer`` the kernel's."""

    gbit_s: float | None
    chunk: int | None = None
    buffer: int | None = None

    @property
    def name(self) -> str:
        """For people, and what its samples are found by."""
        if self.chunk is None:
            return f"{link_name(self.gbit_s)}: the link itself"
        return f"{link_name(self.gbit_s)}: chunks of {self.chunk}{_buffers(self.buffer)}"


def link_name(gbit_s: float | None) -> str:
    """Return what a link is called."""
    return "unlimited" if gbit_s is None else f"{gbit_s:g} Gbit/s"


def _buffers(nbytes: int | None) -> str:
    return "" if nbytes is None else f", buffers of {_size(nbytes)}"


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "the kernel's"
    return f"{nbytes >> 10} KiB" if nbytes % 2**20 else f"{nbytes >> 20} MiB"


def cells(links: Sequence[float | None], chunks: Sequence[int], buffers: Sequence[int]) -> list[Cell]:
    """Return everything there is to measure: all chunks on all links, and buffers where a link is limited."""
    middle = chunks[len(chunks) // 2]
    found = [Cell(gbit_s) for gbit_s in links]
    found += [Cell(gbit_s, chunk) for gbit_s in links for chunk in chunks]
    limited = [gbit_s for gbit_s in links if gbit_s is not None]
    return found + [Cell(gbit_s, middle, buffer) for gbit_s in limited for buffer in buffers]


def missing(samples: Sequence[Mapping[str, Any]], wanted: Sequence[Cell], repeats: int) -> list[Cell]:
    """Return the cells that have not been measured so often."""
    done = [one["cell"] for one in samples]
    return [cell for cell in wanted if done.count(cell.name) < repeats]


# -- rows


def link_rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what a link does with all-reduces: bus bandwidth of a large one, latency by an empty one."""
    lines = []
    taken = [one for one in samples if one["what"] == "link"]
    for link in dict.fromkeys(one["link"] for one in taken):
        here = [one for one in taken if one["link"] == link]
        bus = median(2 * (RANKS - 1) / RANKS * one["nbytes"] * 8 / one["seconds"] for one in here)
        lines.append(
            {
                "link": link,
                "bus_gbit_s_p50": round(bus / 1e9, 4),
                "latency_us_p50": round(median(one["empty_s"] for one in here) / (2 * (RANKS - 1)) * 1e6, 1),
                "samples": len(here),
            }
        )
    return lines


def predicted_s(shape: Shape, steps: Sequence[int], bus_gbit_s: float, latency_us: float) -> float:
    """What the planner says of a prefill's all-reduces, given the link: count x (bytes / rate + latency)."""
    link = Link(gbit_s=bus_gbit_s, latency_us=latency_us)
    each = (all_reduce_seconds(activation_bytes(shape, tokens), RANKS, link) for tokens in steps)
    return all_reduces(shape) * sum(each)


def rows(samples: Sequence[Mapping[str, Any]], shape: Shape) -> list[dict[str, Any]]:
    """Return a line for each link, chunk and buffer, with medians; parts are those of profiled prefills."""
    lines = []
    links = {one["link"]: one for one in link_rows(samples)}
    taken = [one for one in samples if one["what"] == "prefill"]
    for cell in dict.fromkeys(one["cell"] for one in taken):
        here = [one for one in taken if one["cell"] == cell]
        first, steps = here[0], here[0]["steps"]
        count = sum(step["all_reduces"] for step in steps)
        nbytes = sum(step["all_reduce_bytes"] for step in steps)
        reduced = median(_sum(one, "all_reduce_s") for one in here)
        line = {
            "case": cell,
            "link": first["link"],
            "gbit_s": first["gbit_s"],
            "chunk_tokens": first["chunk_tokens"],
            "buffer_bytes": first["buffer_bytes"],
            "prompt_tokens": first["prompt_tokens"],
            "steps": len(steps),
            "prefill_ms_p50": ms_p50([one["seconds"] for one in here]),
            "profiled_ms_p50": ms_p50([one["profiled_s"] for one in here]),
            **{f"{part}_ms_p50": ms_p50([_sum(one, f"{part}_s") for one in here]) for part in PARTS},
            "all_reduce_ms_p50": round(reduced * 1e3, 3),
            "all_reduce_percent": round(
                100 * median(_sum(one, "all_reduce_s") / _sum(one, "seconds") for one in here), 1
            ),
            "all_reduces": count,
            "all_reduces_per_step": count / len(steps),
            "all_reduce_bytes": nbytes,
            "each_mb": round(nbytes / count / 1e6, 4),
            "each_ms": round(reduced / count * 1e3, 3),
            "other_collectives": sum(step["other_collectives"] for step in steps),
            "sent_bytes_p50": round(median(one["sent_bytes"] for one in here)),
            "by_step": _by_step(here),
            "samples": len(here),
        }
        if (link := links.get(first["link"])) is not None:
            tokens = [step["tokens"] for step in steps]
            told = predicted_s(shape, tokens, link["bus_gbit_s_p50"], link["latency_us_p50"])
            line |= {
                "predicted_ms": round(told * 1e3, 3),
                "predicted_by_measured": round(told / reduced, 3),
            }
        else:
            line |= {"predicted_ms": None, "predicted_by_measured": None}
        lines.append(line)
    return sorted(lines, key=_order)


def _order(line: Mapping[str, Any]) -> tuple[float, bool, int, int]:
    fast = float("inf") if line["gbit_s"] is None else line["gbit_s"]
    return -fast, line["buffer_bytes"] is not None, line["chunk_tokens"], line["buffer_bytes"] or 0


def _sum(sample: Mapping[str, Any], field: str) -> float:
    return sum(float(step[field]) for step in sample["steps"])


def _by_step(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for of in zip(*(one["steps"] for one in samples), strict=True):
        parts = {f"{part}_ms_p50": ms_p50([step[f"{part}_s"] for step in of]) for part in PARTS}
        first = {"tokens": of[0]["tokens"], "all_reduces": of[0]["all_reduces"]}
        lines.append({**first, "step_ms_p50": ms_p50([step["seconds"] for step in of]), **parts})
    return lines


# -- what follows

MOST: Final = 50.0
"""Percent of the time. Computing is slower here than on the report's GPUs, and links are what they are."""
SAVES: Final = 0.2
NEAR: Final = 0.25
OVERHEAD: Final = 1.15
"""Of a link's bytes over what is reduced: headers, acknowledgements, what else crosses."""


def conclusions(lines: Sequence[Mapping[str, Any]], shape: Shape) -> list[Conclusion]:
    """Return what the report said, for which there are figures."""
    limited = [line for line in lines if line["gbit_s"] is not None]
    if not limited:
        return []
    slowest = min(line["gbit_s"] for line in limited)
    here = [line for line in limited if line["gbit_s"] == slowest]
    by_chunk = [line for line in here if line["buffer_bytes"] is None]
    by_buffer = [line for line in here if line["buffer_bytes"] is not None]
    found = [_count(lines, shape)]
    if by_chunk:
        found.append(_most(by_chunk))
        if len(by_chunk) > 1:
            found.append(_saves("Larger chunks do not shrink it", by_chunk, "chunk_tokens"))
    usual = [
        line for line in by_chunk if any(line["chunk_tokens"] == one["chunk_tokens"] for one in by_buffer)
    ]
    if usual and by_buffer:
        title = "Nor do socket buffers of another size"
        found.append(_saves(title, [*usual, *by_buffer], "buffer_bytes"))
    usual = [line for line in limited if line["buffer_bytes"] is None]
    if usual and all(line["predicted_ms"] is not None for line in usual):
        found.append(_predicted(usual))
    return found


def _count(lines: Sequence[Mapping[str, Any]], shape: Shape) -> Conclusion:
    wanted = all_reduces(shape) + EMBEDDING
    right = True
    for line in lines:
        tokens = sum(step["tokens"] for step in line["by_step"])
        nbytes = wanted * activation_bytes(shape, tokens)
        right = right and all(step["all_reduces"] == wanted for step in line["by_step"])
        right = right and tokens == line["prompt_tokens"] and line["all_reduce_bytes"] == nbytes
        right = right and nbytes <= line["sent_bytes_p50"] <= OVERHEAD * nbytes
    one = lines[-1]
    figures = (
        f"{one['all_reduces_per_step']:g} a step: 2 for each of {shape.layers} layers, {EMBEDDING} for the "
        f"embedding; tokens x hidden x 2 bytes each, {one['all_reduce_bytes'] / 1e6:.1f} MB a prompt, while "
        f"{one['sent_bytes_p50'] / 1e6:.1f} MB left each node's link"
    )
    return Conclusion(
        "A layer has 2 all-reduces of its activations (published: 124 of 62 layers)", figures, right
    )


def _most(lines: Sequence[Mapping[str, Any]]) -> Conclusion:
    told = [f"{line['all_reduce_percent']:.0f} % with chunks of {line['chunk_tokens']}" for line in lines]
    share = 100 * PUBLISHED["all_reduce_s"] / PUBLISHED["prefill_s"]
    claim = f"Prefill is waiting for all-reduces (published: {share:.1f} %; here: half of it or more)"
    figures = f"{lines[0]['link']}: {', '.join(told)}"
    return Conclusion(claim, figures, all(line["all_reduce_percent"] >= MOST for line in lines))


def _predicted(lines: Sequence[Mapping[str, Any]]) -> Conclusion:
    ratios = [line["predicted_by_measured"] for line in lines]
    moving = [line["predicted_ms"] / line["transfer_ms_p50"] for line in lines]
    figures = (
        f"predicted by measured {min(ratios):.2f} to {max(ratios):.2f}; by transfer alone, without what "
        f"ranks wait for each other, {min(moving):.2f} to {max(moving):.2f}"
    )
    claim = "Count x (bytes / bandwidth + latency) predicts it (here: within 25 % on limited links)"
    return Conclusion(claim, figures, all(abs(ratio - 1) <= NEAR for ratio in ratios))


def _saves(title: str, lines: Sequence[Mapping[str, Any]], field: str) -> Conclusion:
    """Whether no setting takes a fifth less than the first: the smallest chunk, the kernel's buffers."""
    times = [line["all_reduce_ms_p50"] for line in lines]
    names = [f"{line[field]} tokens" if field == "chunk_tokens" else _size(line[field]) for line in lines]
    told = [f"{name} {ms:.0f} ms" for name, ms in zip(names, times, strict=True)]
    saved = 1 - min(times) / times[0]
    figures = f"{lines[0]['link']}, all-reduces of a prompt: {', '.join(told)}"
    claim = f"{title} (published: seven attempts failed; here: saves less than a fifth)"
    return Conclusion(claim, figures, saved < SAVES)


# -- in words, for the terminal and the report

PART_COLUMNS: Final = ("steps", "prefill", *PARTS)
COLUMNS: Final = (
    *PART_COLUMNS,
    "all-reduces %",
    "how many",
    "MB each",
    "ms each",
    "ms in all",
    "predicted",
    "by measured",
)
FEW_STEPS: Final = 4
STEP_COLUMNS: Final = ("tokens", "all-reduces", "step", *PARTS)
PUBLISHED_CELLS: Final = (
    "published, 62 layers",
    "–",
    f"{PUBLISHED['prefill_s'] * 1e3:.0f}",
    f"{PUBLISHED['compute_s'] * 1e3:.1f}",
    *("–",) * 4,
    f"{100 * PUBLISHED['all_reduce_s'] / PUBLISHED['prefill_s']:.1f}",
    f"{PUBLISHED['all_reduces']:g}",
    f"{PUBLISHED['each_mb']:g}",
    f"{PUBLISHED['each_ms']:g}",
    f"{PUBLISHED['all_reduce_s'] * 1e3:.0f}",
    "–",
    "–",
)


def cells_of(line: Mapping[str, Any]) -> list[str]:
    """Return a row of the table, in the order of (chunk, *COLUMNS)."""
    parts = [_figure(line[f"{part}_ms_p50"]) for part in PARTS]
    reduced = [f"{line['all_reduce_percent']:.1f}", f"{line['all_reduces']}", _figure(line["each_mb"])]
    reduced += [_figure(line["each_ms"]), _figure(line["all_reduce_ms_p50"]), _figure(line["predicted_ms"])]
    ratio = line["predicted_by_measured"]
    return [
        f"{line['chunk_tokens']}{_buffers(line['buffer_bytes']).replace('buffers of ', '')}",
        str(line["steps"]),
        _figure(line["prefill_ms_p50"]),
        *parts,
        *reduced,
        "–" if ratio is None else f"{ratio:.2f}",
    ]


def steps_of(lines: Sequence[Mapping[str, Any]]) -> tuple[str, list[list[str]]] | None:
    """Return (cell, rows in the order of (step, *STEP_COLUMNS)) of a chunk on the slowest link.

    The largest with a few steps, else the smallest.
    """
    usual = [line for line in lines if line["buffer_bytes"] is None]
    if not usual:
        return None
    here = [line for line in usual if line["link"] == usual[-1]["link"]]
    line = next((line for line in reversed(here) if line["steps"] >= FEW_STEPS), here[0])
    return line["case"], [
        [
            str(number),
            str(step["tokens"]),
            str(step["all_reduces"]),
            *(_figure(step[f"{name}_ms_p50"]) for name in ("step", *PARTS)),
        ]
        for number, step in enumerate(line["by_step"], 1)
    ]


def title_of(line: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> str:
    """Return what stands above the rows of a link."""
    rates = [
        f" ({one['bus_gbit_s_p50']:.2f} Gbit/s and {one['latency_us_p50']:.0f} us in an all-reduce)"
        for one in links
        if one["link"] == line["link"]
    ]
    prompt = f"{line['prompt_tokens']} prompt tokens"
    return f"{line['link']}{''.join(rates)}, {prompt}: ms, medians, means of two ranks"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
