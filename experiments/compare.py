"""Two recorded runs of one kind, row by row: the ratio of their medians, and whether it is more than noise.

The interval is that of a percentile bootstrap (Efron, 1979): both files' samples are drawn again with
replacement, ``DRAWS`` times, and the middle 95 % of the ratios are kept. Every row begins with the same
seed, so its interval does not depend on what else is in the files.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from experiments import head
from experiments.probe_map import Place, place_of
from experiments.results import SCHEMA_VERSION, ResultError, Run, check, identity

DRAWS: Final = 5000
SEED: Final = 0
LEAST_SAMPLES: Final = 5
"""Of each file. Where nothing differs, 3 to 4 % of intervals leave out 1 from 5 on, 7 to 10 % with 3 or 4."""
METHOD: Final = (
    f"percentile bootstrap of the ratio, 95 %, {DRAWS} draws, seed {SEED}; from {LEAST_SAMPLES} samples each"
)
MB: Final = 2**20
BLOCK_S: Final = 2.0

Finding = Literal["noise", "better", "worse", "too few samples"]
Key = tuple[str, str]
"""(row, measure)."""


@dataclass(frozen=True, slots=True)
class Series:
    """What one file says of one row.

    Attributes:
        recorded: the row's own figure.
        higher_is_better: or lower.
        values: the raw samples that the figure is made of; empty if the file has none.
        middle: what is made of them.

    """

    recorded: float
    higher_is_better: bool
    values: list[float] = field(default_factory=list)
    middle: Literal["median", "mean"] = "median"


@dataclass(frozen=True, slots=True)
class Difference:
    """One row that both files have; ``ratio`` is B's figure by A's, None where A's is 0."""

    row: str
    measure: str
    a: float
    b: float
    samples: tuple[int, int]
    ratio: float | None
    interval: tuple[float, float] | None
    finding: Finding


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two files: what differs beside the figures, the rows of both, and the rows of only one."""

    kind: str
    files: tuple[str, str]
    settings: Mapping[str, tuple[Any, Any]]
    rows: Sequence[Difference]
    only_a: Sequence[str]
    only_b: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Return everything, with the method."""
        return {"version": 1, "method": METHOD, **asdict(self)}


def compare(first: Path, second: Path) -> Comparison:
    """Compare two files; raises ``ResultError`` if they are not runs of one kind and of this version."""
    (version_a, kind_a), (version_b, kind_b) = identity(first), identity(second)
    if version_a != version_b or kind_a != kind_b:
        raise ResultError(
            f"{first} is a run of kind {kind_a!r}, schema version {version_a!r}; {second} is one of kind "
            f"{kind_b!r}, schema version {version_b!r}: give two of one kind and of version {SCHEMA_VERSION}"
        )
    a, b = check(first), check(second)
    if kind_a not in SERIES:
        raise ResultError(
            f"{first} and {second}: runs of kind {kind_a!r}; known: {', '.join(sorted(SERIES))}"
        )
    of_a, of_b = series(a), series(b)
    rows = [_difference(key, of_a[key], of_b[key]) for key in of_a if key in of_b]
    return Comparison(
        kind_a,
        (str(first), str(second)),
        _settings(a, b),
        rows,
        [" ".join(key) for key in of_a if key not in of_b],
        [" ".join(key) for key in of_b if key not in of_a],
    )


def series(run: Run) -> dict[Key, Series]:
    """Return every row of a run with its raw samples, in the file's order."""
    found: dict[Key, Series] = {}
    for key, one in SERIES[run.kind](run):
        if key in found:
            raise ResultError(f"two rows are called {' '.join(key)}; a run has each case once")
        found[key] = one
    return found


def of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the median with 95 % or more; None for fewer than 6 values.

    Whatever the distribution: it ends at order statistics, chosen by the binomial distribution as in
    the sign test. A bootstrap of so few values is too narrow: of 7, its ends are the second and the sixth,
    which hold the median in 87.5 % of cases.
    """
    count, rank, tail = len(values), 0, 0.0
    while count and tail + math.comb(count, rank) / 2**count <= 0.025:
        tail += math.comb(count, rank) / 2**count
        rank += 1
    ordered = sorted(values)
    return (ordered[rank - 1], ordered[count - rank]) if rank else None


def interval(
    values: Sequence[float], of: Sequence[float], middle: str = "median"
) -> tuple[float, float] | None:
    """Return 95 % of the ratio of two samples' middles; None where that divides by 0."""
    draws = np.random.default_rng(SEED)
    below, above = _drawn(draws, of, middle), _drawn(draws, values, middle)
    if not below.all():
        return None
    low, high = np.quantile(above / below, (0.025, 0.975))
    return round(float(low), 4), round(float(high), 4)


def finding(bounds: tuple[float, float] | None, higher_is_better: bool) -> Finding:
    """Return what an interval of a ratio says; None is one that could not be had."""
    if bounds is None:
        return "too few samples"
    low, high = bounds
    if low <= 1 <= high:
        return "noise"
    return "better" if (low > 1) == higher_is_better else "worse"


def _drawn(draws: np.random.Generator, values: Sequence[float], middle: str) -> npt.NDArray[np.float64]:
    drawn = draws.choice(np.asarray(values, np.float64), (DRAWS, len(values)))
    found: npt.NDArray[np.float64] = (np.median if middle == "median" else np.mean)(drawn, axis=1)
    return found


def _difference(key: Key, a: Series, b: Series) -> Difference:
    enough = min(len(a.values), len(b.values)) >= LEAST_SAMPLES
    bounds = interval(b.values, a.values, a.middle) if enough else None
    ratio = round(b.recorded / a.recorded, 4) if a.recorded else None
    counts = len(a.values), len(b.values)
    return Difference(
        *key, a.recorded, b.recorded, counts, ratio, bounds, finding(bounds, a.higher_is_better)
    )


def _settings(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Return what was not the same: the machine, the code, the versions, the parameters."""
    flat = [
        {
            "commit": run.commit,
            **{
                f"{part}.{name}": value
                for part in ("host", "versions", "parameters")
                for name, value in getattr(run, part).items()
            },
        }
        for run in (a, b)
    ]
    names = dict.fromkeys([*flat[0], *flat[1]])
    pairs = {name: (flat[0].get(name), flat[1].get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# -- what each kind's rows are called, and which samples they are made of


def _kv(run: Run) -> Iterator[tuple[Key, Series]]:
    product = run.parameters["chunk_bytes"] // MB
    rates: dict[tuple[Any, ...], list[float]] = {}
    for one in run.samples:
        if one.get("piece") not in (None, product):
            continue  # one of the curve over chunk sizes
        mbytes, at_once = one.get("mbytes", 0), one.get("concurrency", 1)
        rate = one["gbit_s"] if "gbit_s" in one else mbytes * MB * at_once * 8 / one["seconds"] / 1e9
        rates.setdefault((one["link"], one["transport"], mbytes, at_once), []).append(rate)
    for row in run.results["rows"]:
        case = (row["link"], row["transport"], row["mbytes"], row["concurrency"])
        yield (row["case"], "gbit_s"), Series(row["gbit_s_p50"], True, rates.get(case, []))


def _serve(run: Run) -> Iterator[tuple[Key, Series]]:
    taken: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for one in run.samples:
        taken.setdefault((one["system"], one["prompt_tokens"]), {})[one["repeat"]] = one
    for row in run.results["rows"]:
        system, length = row["system"], row["prompt_tokens"]
        name, own = f"{system}/{length}", taken.get((system, length), {})
        plain = taken.get(("undivided", length), {})
        for measure in ("ttft_ms", "tpot_ms"):
            values = [one[measure] for one in own.values()]
            yield (name, measure), Series(row[f"{measure}_p50"], False, values)
            if system != "undivided":
                pairs = [own[turn][measure] / plain[turn][measure] for turn in own if turn in plain]
                ratio = measure.replace("_ms", "_ratio")
                yield (name, ratio), Series(row[ratio], False, pairs)


def _goodput(run: Run) -> Iterator[tuple[Key, Series]]:
    """Good requests a second, in blocks of arrivals: the requests of one burst are not independent."""
    taken = {
        (one["engine"], one["system"], one["mix"]): one["requests"]
        for one in run.samples
        if "times" not in one
    }
    for row in run.results["rows"]:
        case = (row["engine"], row["system"], row["mix"])
        blocks = max(1, int(row["load_s"] / BLOCK_S))
        each_s = row["load_s"] / blocks
        good = [0.0] * blocks if case in taken else []
        for at, _prompt, _output, ttft_ms, tpot_ms, _error in taken.get(case, ()):
            met = (
                ttft_ms is not None
                and ttft_ms <= row["slo"]["ttft_ms"]
                and (tpot_ms or 0.0) <= row["slo"]["tpot_ms"]
            )
            good[int(at / BLOCK_S) % blocks] += met / each_s
        yield ("/".join(case), "goodput_rps"), Series(row["goodput_rps"], True, good, "mean")


def _demo(run: Run) -> Iterator[tuple[Key, Series]]:
    for one in run.samples:
        for measure in ("ttft_ms", "total_ms"):
            if one[measure] is not None:
                yield (one["title"], measure), Series(one[measure], False, [one[measure]])


def _probe(run: Run) -> Iterator[tuple[Key, Series]]:
    taken: dict[Place, list[float]] = {}
    for one in run.samples:
        taken.setdefault(place_of(one), []).append(one["value"])
    for row in run.results["rows"]:
        values = taken.get(place_of(row), [])
        yield (row["row"], row["unit"]), Series(row["p50"], row["unit"] != "us", values)


def _placement(run: Run) -> Iterator[tuple[Key, Series]]:
    for row in run.results["rows"]:
        own = [one for one in run.samples if one["case"] == row["case"]]
        yield (
            (row["case"], "slowest_s"),
            Series(row["slowest_s_p50"], False, [max(one["seconds"]) for one in own]),
        )


def _verdict(run: Run) -> Iterator[tuple[Key, Series]]:
    for row in run.results["rows"]:
        values = list(row["goodputs_rps"])
        yield (
            (f"{row['mix']}/{row['contender']}", "goodput_rps"),
            Series(row["goodput_rps_p50"], True, values),
        )
        if row.get("joules_per_request_p50") is not None:
            joules = [one for one in row["joules_per_request"] if one is not None]
            key = (f"{row['mix']}/{row['contender']}", "joules_per_request")
            yield key, Series(row["joules_per_request_p50"], False, joules)


def _head(run: Run) -> Iterator[tuple[Key, Series]]:
    for row in run.results["rows"]:
        cell = f"{row['link']}: {row['case']}, {row['prompt_tokens']} tokens"
        own = [one for one in run.samples if one["cell"] == cell]
        yield (cell, "ttft_ms"), Series(row["ttft_ms_p50"], False, [one["ttft_s"] * 1e3 for one in own])
        if row["kv_bytes"]:
            took = [sum(one["phases_s"][name] for name in head.TRANSFER) * 1e3 for one in own]
            yield (cell, "transfer_ms"), Series(row["transfer_ms_p50"], False, took)


def _mesh(run: Run) -> Iterator[tuple[Key, Series]]:
    for row in run.results["choices"]:
        own = [one for one in run.samples if one["case"] == row["choice"]]
        for measure, seconds in (("ttft_ms", "ttft_s"), ("total_ms", "total_s")):
            yield (
                (row["choice"], measure),
                Series(row[f"{measure}_p50"], False, [one[seconds] * 1e3 for one in own]),
            )


def _where(run: Run) -> Iterator[tuple[Key, Series]]:
    for row in run.results["rows"]:
        own = [one for one in run.samples if one["cell"] == row["case"]]
        reduced = [1e3 * sum(step["all_reduce_s"] for step in one["steps"]) for one in own]
        taken = {"prefill_ms": [one["seconds"] * 1e3 for one in own], "all_reduce_ms": reduced}
        for measure, values in taken.items():
            yield (row["case"], measure), Series(row[f"{measure}_p50"], False, values)


def _pipeline(run: Run) -> Iterator[tuple[Key, Series]]:
    for row in run.results["rows"]:
        own = [one for one in run.samples if one["what"] == "answer" and one["case"] == row["setup"]]
        own = [one for one in own if one["prompt_tokens"] == row["prompt_tokens"]]
        for measure, seconds in (("ttft_ms", "ttft_s"), ("total_ms", "total_s")):
            values = [one[seconds] * 1e3 for one in own]
            yield (row["setup"], measure), Series(row[f"{measure}_p50"], False, values)
    for line in run.results["fabric"]:
        taken = [one["sample"] for one in run.samples if one["what"] == "fabric"]
        values = [one["value"] for one in taken if place_of(one) == place_of(line)]
        yield (line["row"], line["unit"]), Series(line["p50"], line["unit"] != "us", values)


SERIES: Final[Mapping[str, Callable[[Run], Iterator[tuple[Key, Series]]]]] = {
    "bench-kv": _kv,
    "bench-serve": _serve,
    "bench-goodput": _goodput,
    "demo": _demo,
    "probe": _probe,
    "placement": _placement,
    "head-to-head": _head,
    "mesh": _mesh,
    "pipeline": _pipeline,
    "where-time-goes": _where,
    "verdict": _verdict,
}
