"""Horizontal bars as SVG, in the colours of the page around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH, LABELS, FIGURES, ROW, SIZE = 360, 122, 60, 22, 12
COLOURS: Final = ("#2f7ed8", "#7a8691")
"""Of what is looked at, and of what it is compared with."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar; ``shade`` is an index into ``COLOURS``, ``interval`` a whisker in the unit of ``value``."""

    label: str
    value: float
    figure: str
    shade: int = 0
    interval: tuple[float, float] | None = None


PART_COLOURS: Final = ("#2f7ed8", "#2aa198", "#c9504a", "#e0a030", "#9aa3ab")


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar of parts, one after the other, each in its own of ``PART_COLOURS``."""

    label: str
    values: Sequence[float]
    figure: str


def stacked(stacks: Sequence[Stack], names: Sequence[str], title: str) -> str:
    """Return bars of parts below each other, on one scale from 0, under what the colours mean."""
    most = max([sum(max(0.0, value) for value in one.values) for one in stacks] + [1e-9])
    scale, text = (
        (WIDTH - LABELS - FIGURES) / most,
        f'font-size="{SIZE}" fill="currentColor" dominant-baseline="central"',
    )
    height = ROW * (len(stacks) + 1)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    for index, (name, colour) in enumerate(zip(names, PART_COLOURS, strict=True)):
        left = index * WIDTH / len(names)
        parts += [
            f'<rect x="{left:.1f}" y="6" width="9" height="9" fill="{colour}"/>',
            f'<text x="{left + 13:.1f}" y="11" {text}>{escape(name)}</text>',
        ]
    for row, one in enumerate(stacks, 1):
        top, middle, left = ROW * row, ROW * row + ROW / 2, float(LABELS)
        parts.append(
            f'<text x="{LABELS - 6}" y="{middle}" text-anchor="end" {text}>{escape(one.label)}</text>'
        )
        for value, colour in zip(one.values, PART_COLOURS, strict=True):
            width = max(0.0, value) * scale
            parts.append(
                f'<rect x="{left:.1f}" y="{top + 4}" width="{width:.1f}" height="{ROW - 8}" fill="{colour}"/>'
            )
            left += width
        parts.append(f'<text x="{left + 5:.1f}" y="{middle}" {text}>{escape(one.figure)}</text>')
    return "\n".join([*parts, "</svg>"])


def draw(bars: Sequence[Bar], title: str) -> str:
    """Return the bars below each other, on one scale from 0; what is below 0 has no length."""
    most = max([max(bar.value, *(bar.interval or (0.0,))) for bar in bars] + [1e-9])
    scale = (WIDTH - LABELS - FIGURES) / most
    parts = [f'<svg viewBox="0 0 {WIDTH} {ROW * len(bars)}" role="img" aria-label="{escape(title)}">']
    for index, bar in enumerate(bars):
        top, middle = ROW * index, ROW * index + ROW / 2
        length = max(0.0, bar.value) * scale
        end = max(length, *((high * scale for _, high in [bar.interval]) if bar.interval else (0.0,)))
        text = f'font-size="{SIZE}" fill="currentColor" dominant-baseline="central"'
        parts += [
            f'<text x="{LABELS - 6}" y="{middle}" text-anchor="end" {text}>{escape(bar.label)}</text>',
            f'<rect x="{LABELS}" y="{top + 4}" width="{length:.1f}" height="{ROW - 8}" '
            f'fill="{COLOURS[bar.shade]}"/>',
            f'<text x="{LABELS + end + 5:.1f}" y="{middle}" {text}>{escape(bar.figure)}</text>',
        ]
        if bar.interval:
            low, high = (LABELS + bound * scale for bound in bar.interval)
            path = f"M{low:.1f} {middle - 4}v8m0 -4H{high:.1f}m0 -4v8"
            parts.append(f'<path d="{path}" stroke="currentColor" fill="none"/>')
    return "\n".join([*parts, "</svg>"])
