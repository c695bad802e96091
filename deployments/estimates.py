"""What is estimated from a stream of observations, of which some are far off."""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 0.05
"""Of the latest observation."""


class Quantile:
    """A quantile of the latest observations, within bounds.

    It moves up or down with each observation by a share of their mean distance (Robbins and Monro 1951): one
    that is far off moves it no further than any other.

    Args:
        share: which quantile; 0.5 is the median.
        start: its value until something is seen.
        low, high: bounds.

    """

    def __init__(self, share: float, start: float, low: float, high: float) -> None:
        self._share, self._low, self._high = share, low, high
        self.value, self._spread, self._seen = start, 0.0, 0

    def saw(self, observed: float) -> None:
        """Take an observation."""
        observed = min(self._high, max(self._low, observed))
        self._seen += 1
        weight = max(WEIGHT, 1 / self._seen)
        self._spread += weight * (abs(observed - self.value) - self._spread)
        step = 2 * weight * self._spread * (self._share - (observed < self.value))
        self.value = min(self._high, max(self._low, self.value + step))


class Mean:
    """The mean of the latest observations."""

    def __init__(self, start: float) -> None:
        self.value, self._seen = start, 0

    def saw(self, observed: float) -> None:
        """Take an observation."""
        self._seen += 1
        self.value += max(WEIGHT, 1 / self._seen) * (observed - self.value)
