"""Where a request's time went: stages between moments on one clock, kept per request.

Moments are noted by the gateway on its own monotonic clock; those noted by workers are
converted to it with the offset measured when the gateway connected to them. A stage is the
time between two consecutive moments of a chain, so a chain's stages add up to its length.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

FIRST_TOKEN_CHAIN = (
    ("tokenize", "arrived", "tokenized"),
    ("route", "tokenized", "routed"),
    ("submit", "routed", "prefill.accepted"),
    ("queue", "prefill.accepted", "prefill.scheduled"),
    ("prefill", "prefill.scheduled", "prefill.output"),
    ("return", "prefill.output", "first_token"),
    ("stream", "first_token", "sent"),
)
"""Stages from the request's arrival at the gateway to its first token's departure."""

HANDOVER_CHAIN = (
    ("publish", "prefill.output", "peer.published"),
    ("wire", "peer.published", "decode.fetched"),
    ("scatter", "decode.fetched", "decode.loaded"),
    ("decode_queue", "decode.loaded", "decode.scheduled"),
    ("first_step", "decode.scheduled", "decode.output"),
    ("decode_return", "decode.output", "decode_token"),
)
"""Stages from the end of prefill to decode's first token at the gateway."""


def first_token_path(moments: Mapping[str, float], mode: object) -> list[tuple[str, float, float]]:
    """Return the stages between a request's arrival and its first token's departure: (name, begin, end).

    What overlaps with the stage before is counted from that one's end, so that they add up. Where decode
    samples every token, the way leads through the handover.
    """
    chain: Iterable[tuple[str, str, str]] = FIRST_TOKEN_CHAIN
    if mode == "decode-samples":
        chain = (*FIRST_TOKEN_CHAIN[:5], *HANDOVER_CHAIN, ("stream", "decode_token", "sent"))
    path, now = [], moments.get("arrived")
    for stage, _, end in chain:
        if now is not None and end in moments and moments[end] >= now:
            path.append((stage, now, moments[end]))
            now = moments[end]
    return path


KEPT = 2048
PATH_CHARACTERS = 400


@dataclass(slots=True)
class Record:
    """What is known of one request.

    Attributes:
        request_id: as the client sees it.
        moments: name to seconds on the gateway's clock.
        facts: workers, nodes, mode, transport, bytes and whatever else is worth telling.
        passed: output tokens that vLLM's server has been given, to put into the response.
        parent: W3C trace context that the client sent, or empty.
        sequences: that are being generated for it now.

    """

    request_id: str
    moments: dict[str, float] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    passed: int = 0
    parent: str = ""
    sequences: int = 0

    def path(self) -> str | None:
        """Return on one line where the request went, by which transport and why; None until it is routed."""
        facts = self.facts
        prefill, decode, how = (facts.get(key) for key in ("prefill_worker", "decode_worker", "transport"))
        if decode is None:
            return None
        tier = ""
        if facts.get("tier_tokens"):
            tier = f"; {facts['tier_tokens']} tokens from the tier on {facts['tier_worker']}"
            tier += f", {facts['tier_reason']}"
        if prefill == decode:
            told = f"{decode}; undivided; {facts.get('reason')}{tier}"
        elif how is None:
            told = f"{prefill}>{decode}; under way; {facts.get('reason')}{tier}"
        else:
            told = f"{prefill}>{decode}; {how}; {facts.get('transport_reason')}{tier}"
        decision = facts.get("decision")
        if isinstance(decision, dict) and "ttft_ms" in decision:
            told += (
                f"; {decision['cause']}: {decision['ttft_ms']:.0f} ms + {decision['tpot_ms']:.1f} ms/token"
            )
        return " ".join(told.split())[:PATH_CHARACTERS]

    def note_sent(self) -> None:
        """Note that a piece of the response leaves now, with every token that has been passed."""
        if self.passed:
            self.note("sent")
        from_prefill = 1 if self.facts.get("mode") == "first-token" else 0
        if self.passed > from_prefill and "decode_token" in self.moments:
            self.note("decode_sent")

    def note(self, moment: str, at: float | None = None) -> None:
        """Note a moment once, now or at a given time on the gateway's clock."""
        self.moments.setdefault(moment, time.monotonic() if at is None else at)

    def note_worker(self, role: str, marks: Iterable[tuple[str, float]], offset: float, peer: float) -> None:
        """Note a worker's marks.

        Args:
            role: ``prefill`` or ``decode``: prefixed to the stage.
            marks: (stage, seconds on the worker's clock).
            offset: worker's clock minus the gateway's, seconds.
            peer: the same for the prefill worker, for stages named ``peer.*``.

        """
        for stage, at in marks:
            if stage.startswith("peer."):
                self.note(stage, at - peer)
            else:
                self.note(f"{role}.{stage}", at - offset)

    def stages_ms(self) -> dict[str, float]:
        """Return the stages whose two moments are known, in milliseconds.

        A handover that overlaps prefill completely has moments out of order: a stage that
        would be negative is reported as it is, so that chains still add up.
        """
        return {
            stage: (self.moments[end] - self.moments[start]) * 1e3
            for stage, start, end in (*FIRST_TOKEN_CHAIN, *HANDOVER_CHAIN)
            if start in self.moments and end in self.moments
        }

    def as_json(self) -> Mapping[str, object]:
        """Return the record for the HTTP endpoint."""
        return {
            "request_id": self.request_id,
            **self.facts,
            "moments": self.moments,
            "ledger_ms": {stage: round(ms, 3) for stage, ms in self.stages_ms().items()},
        }


current: ContextVar[Record | None] = ContextVar("handoff_record", default=None)
"""The record of the HTTP request that is being handled; set by the gateway's middleware."""


class Ledger:
    """The records of the most recent requests."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()

    def keep(self, record: Record) -> None:
        """Keep a record; the oldest goes when there are too many."""
        self._records[record.request_id] = record
        while len(self._records) > KEPT:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> Record | None:
        """Return the record of a request, if it is still kept."""
        return self._records.get(request_id)
