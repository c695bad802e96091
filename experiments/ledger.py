"""Where the time of one request went, from the client's send to what it received: pure arithmetic.

The gateway's record (``deployments/ledger.py``) knows what happened between a request's arrival there and
the departure of a token. The client's two clock readings complete it. Both are seconds on one clock, which
holds for processes of one machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deployments.ledger import FIRST_TOKEN_CHAIN, HANDOVER_CHAIN

Moments = Mapping[str, float]
"""Name to seconds on one monotonic clock."""

Stage = tuple[str, str, str]
"""(name, moment it begins, moment it ends)."""

FIRST_TOKEN: Sequence[Stage] = (
    ("http_in", "client.sent", "arrived"),
    *FIRST_TOKEN_CHAIN,
    ("http_out", "sent", "client.first"),
)
"""From the client's send to the arrival of the first token there."""

HANDOVER: Sequence[Stage] = (
    *HANDOVER_CHAIN,
    ("decode_stream", "decode_token", "decode_sent"),
    ("decode_http_out", "decode_sent", "client.decoded"),
)
"""From the end of prefill to the arrival at the client of the first token that decode produced."""

BEFORE_PREFILL = ("http_in", "tokenize", "route", "submit", "queue")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A request's time in milliseconds.

    Attributes:
        first_token: the stages of ``FIRST_TOKEN``; they add up to the client's time to first token.
        handover: the stages of ``HANDOVER``, each counted only from the end of the one before it, the
            first from the end of prefill. What overlaps with prefill costs nothing and counts as 0.
        error: how far the first token's stages, those below 0 left out, are from the time that the client
            measured, as a share of it. 0 if every moment was noted, in the order of the chain.
        overhead: ``handover_overhead_ms``: the time from the client's send to the arrival of the first token
            that decode produced, less prefill's compute and what of the wire's time is not hidden behind it.
            It is the sum of ``http_in``, ``tokenize``, ``route``, ``submit``, ``queue`` (before prefill) and
            of all handover stages but ``wire``. It contains ``first_step``, the compute of one decode step,
            which an undivided engine needs for the same token as well.

    """

    first_token: dict[str, float]
    handover: dict[str, float]
    error: float
    overhead: float

    @property
    def overhead_without_first_step(self) -> float:
        """The part of the overhead that an undivided engine does not have, but for its own HTTP server."""
        return self.overhead - self.handover["first_step"]


def breakdown(moments: Moments) -> Breakdown:
    """Return where the time of a divided request went.

    Args:
        moments: the gateway's, and ``client.sent``, ``client.first`` and ``client.decoded``: when the request
            left the client, and when its first token and the first token that decode produced arrived.

    Raises:
        KeyError: a moment of one of the chains was not noted.

    """
    first_token = stages_ms(moments, FIRST_TOKEN)
    handover = exposed_ms(moments, HANDOVER)
    measured = (moments["client.first"] - moments["client.sent"]) * 1e3
    error = abs(sum(max(0.0, ms) for ms in first_token.values()) - measured) / measured
    before = sum(first_token[stage] for stage in BEFORE_PREFILL)
    after = sum(ms for stage, ms in handover.items() if stage != "wire")
    return Breakdown(first_token, handover, error, before + after)


def stages_ms(moments: Moments, chain: Iterable[Stage]) -> dict[str, float]:
    """Return the length of each stage; below 0 if its moments are in the other order."""
    return {name: (moments[end] - moments[begin]) * 1e3 for name, begin, end in chain}


def exposed_ms(moments: Moments, chain: Sequence[Stage]) -> dict[str, float]:
    """Return what each stage adds after the end of those before it.

    A stage that ended before the chain began, or before an earlier stage did, adds nothing. So none is
    below 0, and they add up to the time from the chain's first moment to its last one.
    """
    stages, reached = {}, moments[chain[0][1]]
    for name, _, end in chain:
        stages[name] = max(0.0, moments[end] - reached) * 1e3
        reached = max(reached, moments[end])
    return stages
