"""The map of a cluster: what a probe found for each node and each pair of nodes. Pure; see docs/probe.md.

A map is a recorded run of kind ``probe`` (``experiments/results.py``). Its rows are medians of its samples,
one for each quantity, place and number of streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from experiments.results import ResultError, Run, check

KIND: Final = "probe"
EACH_NODE: Final = "all nodes"
"""The source of what all nodes do together."""
LEAST_SAMPLES: Final = 3
"""Of each map, for a change to be told from noise."""
LEAST_CHANGE: Final = 0.1
"""What changed by a smaller share than this is no drift, however little it varies within a run: machines
differ as much from hour to hour."""

Unit = Literal["us", "gbit_s", "gbyte_s"]
SHOWN: Final[Mapping[Unit, str]] = {"us": "µs", "gbit_s": "Gbit/s", "gbyte_s": "GB/s"}
UNITS: Final[Mapping[str, Unit]] = {
    "round trip": "us",
    "tcp": "gbit_s",
    "iperf3": "gbit_s",
    "object store": "gbit_s",
    "nixl": "gbit_s",
    "all-reduce": "gbyte_s",
    "s3 put": "gbit_s",
    "s3 get": "gbit_s",
    "memory copy": "gbyte_s",
    "to device": "gbyte_s",
    "from device": "gbyte_s",
}
"""Everything that is measured, in the order of tables. All-reduce is its bus bandwidth."""


@dataclass(frozen=True, slots=True)
class Place:
    """What was measured where: ``target`` is None for what one node, or all of them, do by themselves.

    streams: connections at once, where that was chosen. device: where it is one of several.
    """

    what: str
    source: str
    target: str | None = None
    streams: int | None = None
    device: str | None = None

    def __str__(self) -> str:
        parts = [self.what, self.device, f"x{self.streams}" if self.streams else None, self.source]
        name = " ".join(part for part in parts if part)
        return f"{name} > {self.target}" if self.target else name


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the map; ``how``: the way it took, where that is known."""

    place: Place
    unit: Unit
    p50: float
    low: float
    high: float
    samples: int
    how: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the line as it is written."""
        rest = {name: getattr(self, name) for name in ("unit", "p50", "low", "high", "samples", "how")}
        return {"row": str(self.place), **asdict(self.place), **rest}


@dataclass(frozen=True, slots=True)
class Drift:
    """A row that changed by more than its noise; ``ratio`` is the new median by the old one."""

    row: str
    unit: Unit
    before: float
    now: float
    ratio: float


def bus_gbyte_s(nbytes: int, ranks: int, seconds: float) -> float:
    """Bus bandwidth of an all-reduce: 2(n-1)/n of the bytes by its time (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks * nbytes / seconds / 1e9


def rows(samples: Sequence[Mapping[str, Any]], ways: Mapping[Place, str]) -> list[Row]:
    """Return the lines of a map: medians of its samples."""
    values: dict[Place, list[float]] = {}
    for one in samples:
        values.setdefault(place_of(one), []).append(one["value"])
    order = list(UNITS)
    return [
        Row(
            place,
            UNITS[place.what],
            _digits(median(of)),
            _digits(min(of)),
            _digits(max(of)),
            len(of),
            ways.get(place),
        )
        for place, of in sorted(values.items(), key=lambda one: order.index(one[0].what))
    ]


def place_of(line: Mapping[str, Any]) -> Place:
    """Return the place of a written row or sample."""
    return Place(line["what"], line["source"], line["target"], line["streams"], line["device"])


def read(path: Path) -> Run:
    """Read a map; raises ``ResultError`` if the file is none, or none that this version can read."""
    run = check(path)
    if run.kind != KIND:
        raise ResultError(f"{path}: a run of kind {run.kind!r}, not a map; make one: handoff probe FILE")
    return run


def drift(before: Run, now: Run) -> list[Drift]:
    """Return what changed between two maps by more than its noise.

    That is: all samples of one map lie on one side of all samples of the other. Where nothing has changed
    that happens to 10 % of rows with three samples each, and to 0.8 % with five (the exact rank test);
    ``LEAST_CHANGE`` is asked for besides. Rows that only one map has are no drift.
    """
    old = {place_of(row): row for row in before.results["rows"]}
    return [
        Drift(row["row"], row["unit"], was["p50"], row["p50"], round(row["p50"] / was["p50"], 4))
        for row in now.results["rows"]
        if (was := old.get(place_of(row))) is not None and _changed(was, row)
    ]


def too_few(before: Run, now: Run) -> int:
    """Return how many rows both maps have, with too few samples to say whether they changed."""
    old = {place_of(row): row["samples"] for row in before.results["rows"]}
    return sum(
        min(old.get(place_of(row), LEAST_SAMPLES), row["samples"]) < LEAST_SAMPLES
        for row in now.results["rows"]
    )


def _changed(was: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    enough: bool = min(was["samples"], row["samples"]) >= LEAST_SAMPLES
    apart: bool = row["low"] > was["high"] or row["high"] < was["low"]
    large: bool = abs(row["p50"] / was["p50"] - 1) > LEAST_CHANGE
    return enough and apart and large


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


# -- what others take from a map ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """The link between two nodes as a planner needs it: its worse direction, and the best way to use that.

    gbit_s: TCP with the number of streams that is best. latency_us: one way.
    collective_gbit_s: bus bandwidth of all-reduce.
    """

    nodes: tuple[str, str]
    gbit_s: float
    latency_us: float
    collective_gbit_s: float | None


def ways(run: Run) -> list[Way]:
    """Return a way for each pair of nodes whose TCP rate and round trip the map has in both directions."""
    best: dict[tuple[str, str], float] = {}
    trips: dict[tuple[str, str], float] = {}
    buses: dict[frozenset[str], float] = {}
    for row in run.results["rows"]:
        if row["target"] is None:
            continue
        ends = (row["source"], row["target"])
        if row["what"] == "tcp":
            best[ends] = max(best.get(ends, 0.0), row["p50"])
        elif row["what"] == "round trip":
            trips[ends] = row["p50"]
        elif row["what"] == "all-reduce":
            buses[frozenset(ends)] = row["p50"] * 8
    found = []
    for one, other in _pairs(run.results["nodes"]):
        both = ((one, other), (other, one))
        if all(ends in best and ends in trips for ends in both):
            rate, trip = min(best[ends] for ends in both), max(trips[ends] for ends in both)
            found.append(Way((one, other), rate, trip / 2, buses.get(frozenset((one, other)))))
    return found


def _pairs(nodes: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((one, other) for i, one in enumerate(nodes) for other in nodes[i + 1 :])


# -- the heat map -------------------------------------------------------------------------------------

CELL, HEAD, ROW_HEIGHT, TITLE, LEAST_WIDTH = 74, 110, 30, 26, 340
PANELS: Final = ("tcp", "object store", "nixl", "all-reduce", "round trip")


def heat_map(run: Run) -> str:
    """Return the map's pairs as an SVG, one panel for each quantity: a row for each source."""
    panels = list(_panels(run))
    placed, top = [], 8
    for panel, height in panels:
        placed.append(f'<g transform="translate(8,{top})">\n{panel}\n</g>')
        top += height + 18
    width = max(LEAST_WIDTH, HEAD + CELL * len(run.results["nodes"]) + 24)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
            f'viewBox="0 0 {width} {top}" font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{top}" fill="white"/>',
            *placed,
            "</svg>\n",
        ]
    )


def _panels(run: Run) -> Iterator[tuple[str, int]]:
    for what in PANELS:
        cells = cells_of(run, what)
        if cells:
            unit = UNITS[what]
            better = "less is better" if unit == "us" else "more is better"
            title = f"{TITLES.get(what, what)}, {SHOWN[unit]}; {better}"
            yield _panel(title, run.results["nodes"], cells, unit == "us")


TITLES: Final = {"tcp": "TCP, best number of streams", "all-reduce": "all-reduce, bus bandwidth"}


def cells_of(run: Run, what: str) -> dict[tuple[str, str], float]:
    """Return the medians of a quantity by (source, target); TCP's with the streams that are best."""
    cells: dict[tuple[str, str], float] = {}
    for row in run.results["rows"]:
        if row["what"] == what and row["target"] is not None:
            for ends in {(row["source"], row["target"]), *_mirrored(row)}:
                cells[ends] = max(cells.get(ends, 0.0), row["p50"])
    return cells


def _mirrored(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A collective has no direction."""
    return [(row["target"], row["source"])] if row["what"] == "all-reduce" else []


def _panel(
    title: str, nodes: Sequence[str], cells: Mapping[tuple[str, str], float], low_is_good: bool
) -> tuple[str, int]:
    parts = [f'<text x="0" y="14" font-weight="bold">{escape(title)}</text>']
    most, least = max(cells.values()), min(cells.values())
    for column, target in enumerate(nodes):
        x = HEAD + CELL * column + CELL / 2
        parts.append(f'<text x="{x}" y="{TITLE + 12}" text-anchor="middle">{escape(_short(target))}</text>')
    for line, source in enumerate(nodes):
        y = TITLE + 20 + ROW_HEIGHT * line
        parts.append(
            f'<text x="{HEAD - 6}" y="{y + ROW_HEIGHT / 2 + 4}" text-anchor="end">'
            f"{escape(_short(source))}</text>"
        )
        for column, target in enumerate(nodes):
            value = cells.get((source, target))
            x = HEAD + CELL * column
            fill = "#f2f2f2" if value is None else _shade(value, least, most, low_is_good)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{ROW_HEIGHT - 2}" fill="{fill}"/>'
            )
            if value is not None:
                parts.append(
                    f'<text x="{x + CELL / 2 - 1}" y="{y + ROW_HEIGHT / 2 + 3}" text-anchor="middle" '
                    f'fill="#111">{value:.3g}</text>'
                )
    return "\n".join(parts), TITLE + 20 + ROW_HEIGHT * len(nodes)


def _shade(value: float, least: float, most: float, low_is_good: bool) -> str:
    """From pale orange, far from the best, to pale green, the best: by the ratio of the two."""
    share = least / value if low_is_good else value / most
    red, green, blue = (
        round(low + (high - low) * share) for low, high in zip((253, 190, 133), (161, 217, 155), strict=True)
    )
    return f"#{red:02x}{green:02x}{blue:02x}"


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"
