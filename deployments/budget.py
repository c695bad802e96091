"""How much prompt may be computed again: a token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Tokens that flow in at a rate and are spent in one go per request.

    A request is let in while anything is left, and may overdraw: a long prompt is no more refused than a
    short one, and those that come after it wait until the debt has been paid.

    Args:
        tokens_per_s: what flows in.
        burst_s: how many seconds' worth are kept at most.
        clock: seconds, monotonic.

    """

    def __init__(
        self, tokens_per_s: float, burst_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tokens_per_s, self._most, self._clock = tokens_per_s, tokens_per_s * burst_s, clock
        self._left, self._at = self._most, clock()

    def spend(self, tokens: int) -> float:
        """Spend tokens and return 0, or spend nothing and return the seconds until there are some again."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self.tokens_per_s)
        self._at = now
        if self._left <= 0:
            return (1 - self._left) / self.tokens_per_s
        self._left -= tokens
        return 0.0

    def refund(self, tokens: int) -> None:
        """Give back what was spent and not needed after all."""
        self._left = min(self._most, self._left + tokens)
