"""The plot of a ``bench kv`` run: rate over size, one panel for each link. Plain SVG; it only reads rows."""

from collections.abc import Mapping, Sequence
from html import escape
from math import log2
from typing import Any, Final

WIDTH, HEIGHT, MARGIN, LEGEND = 440, 300, 46, 120
COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
IPERF3 = "iperf3"
MEMORY_COPY = "memory copy"
"""Crosses no link, and is so fast that nothing else could be told apart beside it."""


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the plot of rows with one request at a time."""
    placed = [
        f'<g transform="translate({index * WIDTH},12)">\n{panel}\n</g>'
        for index, panel in enumerate(panels(rows).values())
    ]
    width, height = WIDTH * max(1, len(placed)), HEIGHT + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *placed,
            "</svg>\n",
        ]
    )


def panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return each link's plot, ``WIDTH`` by ``HEIGHT``, without the ``svg`` around it; axes in its colour."""
    shown = [row for row in rows if row["concurrency"] == 1 and row["transport"] != MEMORY_COPY]
    alone = [row for row in shown if row["mbytes"]]
    names = dict.fromkeys(row["transport"] for row in alone)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    return {
        link: _panel([row for row in alone if row["link"] == link], _limit(rows, link), link, colours)
        for link in dict.fromkeys(row["link"] for row in alone)
    }


def _limit(rows: Sequence[Mapping[str, Any]], link: str) -> float | None:
    rates = [row["gbit_s_p50"] for row in rows if row["transport"] == IPERF3 and row["link"] == link]
    return max(rates, default=None)


def _panel(
    rows: Sequence[Mapping[str, Any]],
    limit: float | None,
    link: str,
    colours: Mapping[str, str],
) -> str:
    sizes = sorted({row["mbytes"] for row in rows})
    highest: float = 1.1 * max([row["gbit_s_p50"] for row in rows] + ([limit] if limit else []))
    span: float = max(1e-9, log2(sizes[-1] / sizes[0]))
    inner_width, inner_height = WIDTH - MARGIN - LEGEND, HEIGHT - 2 * MARGIN

    def x(mbytes: float) -> float:
        return MARGIN + inner_width * log2(mbytes / sizes[0]) / span

    def y(rate: float) -> float:
        return HEIGHT - MARGIN - inner_height * rate / highest

    right = MARGIN + inner_width
    parts = [_text(MARGIN + 14, 24, link, "start", 13)]
    for step in range(5):
        rate = highest * step / 4
        parts.append(_line(MARGIN, y(rate), right, y(rate), "currentColor", 'stroke-opacity="0.15"'))
        parts.append(_text(MARGIN - 5, y(rate) + 4, f"{rate:.3g}", "end"))
    parts += [_text(x(size), HEIGHT - MARGIN + 16, str(size), "middle") for size in sizes]
    parts.append(_text(MARGIN + inner_width / 2, HEIGHT - 12, "MB (2^20 bytes)", "middle"))
    parts.append(_text(6, MARGIN - 20, "Gbit/s", "start"))
    if limit is not None:
        parts.append(_line(MARGIN, y(limit), right, y(limit), "currentColor", 'stroke-dasharray="5 4"'))
        parts.append(_text(right + 6, MARGIN + 4, f"- - {IPERF3}", "start"))
    for place, name in enumerate(dict.fromkeys(row["transport"] for row in rows), start=1):
        points = sorted((row["mbytes"], row["gbit_s_p50"]) for row in rows if row["transport"] == name)
        path = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(size):.1f}" cy="{y(rate):.1f}" r="3" fill="{colours[name]}"/>'
            for size, rate in points
        ]
        parts.append(_text(right + 6, MARGIN + 4 + 16 * place, name, "start", colour=colours[name]))
    return "\n".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 11, colour: str = "currentColor") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
