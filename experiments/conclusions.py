"""What the published experiments have in common: claims that are held against figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A claim of a report, the figures here, and whether it holds."""

    claim: str
    figures: str
    holds: bool


def ms_p50(seconds: Sequence[float]) -> float:
    """Return the median in milliseconds, to the microsecond."""
    return round(median(seconds) * 1e3, 3)
