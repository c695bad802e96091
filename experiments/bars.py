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
