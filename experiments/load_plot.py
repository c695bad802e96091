"""The plot of a ``bench load`` run: goodput and times over the offered rate. It only reads rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 300, 56, 24, 52, 44
PANELS = 3
GOOD, MEDIAN, TAIL, GIVEN = "#1f77b4", "#2ca02c", "#d62728", "#999999"

Row = Mapping[str, Any]
Line = tuple[str, str, list[tuple[float, float]]]
"""(name, colour, points)."""


def draw(rows: Sequence[Row]) -> str:
    """Return the plot: goodput with its 95 %, then times to the first token and per token with objectives.

    A strip of three panels for each system and mix.
    """
    cases = list(dict.fromkeys((row["mix"], row["system"]) for row in rows))
    strips = [
        _strip([row for row in rows if (row["mix"], row["system"]) == case], place * HEIGHT)
        for place, case in enumerate(cases)
    ]
    width, height = PANELS * WIDTH, HEIGHT * len(strips)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *strips,
            "</svg>\n",
        ]
    )


def _strip(rows: Sequence[Row], top: int) -> str:
    ordered = sorted(rows, key=lambda row: row["offered_rps"])
    of = f"{rows[0]['system']}, {rows[0]['mix']}"
    drawn = [
        _goodput(ordered, f"{of}: requests/s"),
        _times(ordered, "ttft", "first token, ms"),
        _times(ordered, "tpot", "per token, ms"),
    ]
    return "\n".join(
        f'<g transform="translate({i * WIDTH},{top})">\n{panel}\n</g>' for i, panel in enumerate(drawn)
    )


def _goodput(rows: Sequence[Row], title: str) -> str:
    points = [(row["offered_rps"], row["goodput_rps"]) for row in rows]
    most = max(row["offered_rps"] for row in rows)
    offered: Line = ("offered", GIVEN, [(0.0, 0.0), (most, most)])
    highest = max([most, *(row["goodput_ci95"][1] for row in rows)])

    def bars(x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
        return [
            f'<line x1="{x(row["offered_rps"]):.1f}" x2="{x(row["offered_rps"]):.1f}" '
            f'y1="{y(row["goodput_ci95"][0]):.1f}" y2="{y(row["goodput_ci95"][1]):.1f}" stroke="{GOOD}"/>'
            for row in rows
        ]

    lines: list[Line] = [offered, ("within objectives", GOOD, points)]
    return _panel(title, lines, most, highest, bars)


def _times(rows: Sequence[Row], what: str, title: str) -> str:
    lines: list[Line] = [
        (
            share,
            colour,
            [(row["offered_rps"], ms) for row in rows if (ms := row[f"{what}_ms_{share}"]) is not None],
        )
        for share, colour in (("p50", MEDIAN), ("p99", TAIL))
    ]
    most, objective = max(row["offered_rps"] for row in rows), rows[0]["slo"][f"{what}_ms"]
    lines.append(("objective", GIVEN, [(0.0, objective), (most, objective)]))
    highest = max([objective, *(y for _, _, points in lines for _, y in points)])
    return _panel(title, lines, most, highest)


def _panel(
    title: str,
    lines: Sequence[Line],
    most: float,
    highest: float,
    more: Callable[[Callable[[float], float], Callable[[float], float]], list[str]] = lambda x, y: [],
) -> str:
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(rate: float) -> float:
        return LEFT + inner_width * rate / (most * 1.05)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - inner_height * value / (highest * 1.05)

    parts = [_text(LEFT, 16, title, "start", 13)]
    for step in range(5):
        value, rate = highest * step / 4, most * step / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#dddddd"/>'
        )
        parts.append(_text(LEFT - 5, y(value) + 4, f"{value:.3g}", "end"))
        parts.append(_text(x(rate), HEIGHT - BOTTOM + 15, f"{rate:.3g}", "middle"))
    parts.append(_text(LEFT + inner_width / 2, HEIGHT - 10, "offered requests/s", "middle"))
    for place, (name, colour, points) in enumerate(lines):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        dashes = ' stroke-dasharray="5 4"' if colour == GIVEN else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        if colour != GIVEN:
            parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>' for a, b in points]
        parts.append(_text(LEFT + place * 105, 34, name, "start", colour=colour))
    return "\n".join([*parts, *more(x, y)])


def _text(x: float, y: float, text: str, anchor: str, size: int = 11, colour: str = "#222222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
