"""Decides for the dispatcher: asks the router, admits or refuses, and learns from what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from cluster.file import ClusterFile, Objectives
from deployments import split
from deployments.estimates import Mean, Quantile
from deployments.fleet import Fleet
from deployments.refusals import Unmeetable
from deployments.router import Policy, Route, route
from deployments.router_metrics import ADMISSION, DECISIONS, TPOT, TTFT
from deployments.snapshot import NO_SLO, Ask, Slo
from deployments.split import Mode, Split

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

logger = logging.getLogger(__name__)

OUTPUT: Final = 128.0
"""Tokens that an answer is taken to have until some have ended."""
MOST_MARGIN: Final = 2.0
TELLING_TOKENS: Final = 16
"""Shorter answers say little of the time per token: one step of another's prompt is most of it."""
TELLING: Final = 0.67
"""Predictions above this share of what is let in tell how far they are to be trusted there. Lower ones are
mostly exceeded, and higher ones not reached, because load changes: that is no error of the prediction."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The options of the cluster file.

    Attributes:
        policy: see ``router.route``.
        shadow: decide adaptively, tell it, and divide always.
        slo: of requests without a class.
        classes: by the name that a request's ``X-Handoff-Class`` header has.

    """

    policy: Policy = "adaptive"
    shadow: bool = False
    slo: Slo = NO_SLO
    classes: Mapping[str, Slo] = field(default_factory=dict)

    @classmethod
    def of(cls, file: ClusterFile) -> Routing:
        """Return those of a cluster file."""

        def slo(of: Objectives) -> Slo:
            ttft_s, tpot_s = (None if ms is None else ms / 1e3 for ms in (of.ttft_ms, of.tpot_ms))
            return Slo(ttft_s, tpot_s)

        classes = {name: slo(of) for name, of in file.slo.classes.items()}
        return cls(file.router.mode, file.router.shadow, slo(file.slo), classes)


DEFAULT: Final = Routing()


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision, and what it was taken for."""

    route: Route
    ask: Ask
    blocks: list[int]
    shadow: Route | None = None


@dataclass(slots=True)
class Trip:
    """What is observed of a request on its way, on this process's clock."""

    plan: Plan
    sent_at: float
    first_at: float | None = None
    tokens: int = 0
    told_gap: bool = False


class Planner:
    """Routes and admits requests; one for each gateway.

    Args:
        routing: the options.
        clock: seconds, monotonic.

    """

    def __init__(self, routing: Routing = DEFAULT, clock: Callable[[], float] = time.monotonic) -> None:
        self.routing, self._clock = routing, clock
        self.fleet = Fleet(clock)
        self._output = Mean(OUTPUT)
        self._margins = (
            Quantile(0.5, 1.0, 1.0, MOST_MARGIN),
            Quantile(0.5, 1.0, 1.0, MOST_MARGIN),
        )
        self._trips: dict[str, Trip] = {}

    def slo(self, name: str | None) -> Slo:
        """Return the objectives of a class; raises ``KeyError`` for a name that the cluster file has not."""
        return self.routing.slo if name is None else self.routing.classes[name]

    def plan(
        self,
        request: EngineCoreRequest,
        chosen: Split,
        must_divide: bool = False,
        slo: Slo = NO_SLO,
        policy: Policy | None = None,
    ) -> Plan:
        """Decide where a request goes; by ``policy``, or as the options say.

        Raises:
            NoWorker: none is alive.

        """
        ask = self._ask(request, chosen, must_divide, slo)
        return self.decide(ask, request.prompt_token_ids or [], request.cache_salt or "", policy)

    def decide(self, ask: Ask, tokens: list[int], salt: str = "", policy: Policy | None = None) -> Plan:
        """Decide where what is asked goes, with its objectives tightened by what predictions are off by.

        Raises:
            NoWorker: none is alive.

        """
        ttft, tpot = (margin.value for margin in self._margins)
        slo = Slo(
            None if ask.slo.ttft_s is None else ask.slo.ttft_s / ttft,
            None if ask.slo.tpot_s is None else ask.slo.tpot_s / tpot,
        )
        ask, blocks = self.fleet.known(replace(ask, slo=slo), tokens, salt)
        snapshot = self.fleet.snapshot()
        usual: Policy = "always" if self.routing.shadow else self.routing.policy
        taken = route(snapshot, ask, policy or usual)
        shadow = route(snapshot, ask) if self.routing.shadow else None
        return Plan(taken, ask, blocks, shadow)

    def admit(self, plan: Plan) -> None:
        """Raise ``Unmeetable`` if no way meets the request's objectives, as predicted."""
        if plan.route.meets:
            return
        predicted = plan.route.predicted
        assert predicted is not None, "without a prediction nothing is missed"
        slo = plan.ask.slo
        wait_s = max(0.0, predicted.ttft_s - (slo.ttft_s or predicted.ttft_s))
        if slo.tpot_s is not None and predicted.tpot_s > slo.tpot_s:
            wait_s = max(
                wait_s, predicted.tpot_s * plan.ask.output / 2
            )  # until half of what decodes has ended
        ADMISSION.inc()
        raise Unmeetable(
            "the objectives cannot be met now, here or for requests that are being served: predicted "
            f"{predicted.ttft_s * 1e3:.0f} ms to the first token, {predicted.tpot_s * 1e3:.1f} ms per token; "
            f"try again in {max(1.0, wait_s):.0f} s",
            max(1.0, wait_s),
        )

    def sent(self, key: str, plan: Plan) -> None:
        """A request was sent as planned."""
        self.fleet.placed(key, plan.route, plan.ask, plan.blocks)
        self._trips[key] = Trip(plan, self._clock())
        DECISIONS.labels(cause=plan.route.cause, mode=plan.route.mode.value, shadow="no").inc()
        if plan.shadow is not None:
            DECISIONS.labels(cause=plan.shadow.cause, mode=plan.shadow.mode.value, shadow="yes").inc()

    def prefilled(self, key: str, cached: int | None) -> None:
        """A prompt has been computed; ``cached`` tokens of it were not, if the engine said so."""
        if cached is not None:
            self.fleet.cached(key, cached)
        self.fleet.prefilled(key)

    def passed(self, key: str, tokens: int) -> None:
        """Tokens of a request's answer were passed on."""
        if (trip := self._trips.get(key)) is None or not tokens:
            return
        now, trip.tokens = self._clock(), trip.tokens + tokens
        self.fleet.passed(key, tokens)
        if trip.first_at is None:
            trip.first_at = now
            self._observe(0, now - trip.sent_at, trip)
            if trip.plan.ask.mode is not Mode.DECODE_SAMPLES:
                self.fleet.took(key, now - trip.sent_at)
        elif not trip.told_gap:
            trip.told_gap = True
            if trip.plan.route.mode is Mode.FIRST_TOKEN:
                self.fleet.handed_over(key, now - trip.first_at)

    def ended(self, key: str, whole: bool = False) -> None:
        """A request is over, or this attempt at it; ``whole`` if all of its answer came."""
        self.fleet.ended(key)
        trip = self._trips.pop(key, None)
        if trip is None or not whole or trip.first_at is None:
            return
        self._output.saw(trip.tokens)
        if trip.tokens >= TELLING_TOKENS:
            self._observe(1, (self._clock() - trip.first_at) / (trip.tokens - 1), trip)

    def _observe(self, which: int, seconds: float, trip: Trip) -> None:
        """Compare a time to the first token (0) or per token (1) with what was predicted."""
        if (predicted := trip.plan.route.predicted) is None or seconds <= 0:
            return
        expected = (predicted.ttft_s, predicted.tpot_s)[which]
        (TTFT, TPOT)[which].observe(expected / seconds)
        slo = (trip.plan.ask.slo.ttft_s, trip.plan.ask.slo.tpot_s)[which]
        if slo is not None and expected > TELLING * slo:
            self._margins[which].saw(seconds / expected)

    def _ask(self, request: EngineCoreRequest, chosen: Split, must_divide: bool, slo: Slo) -> Ask:
        params = request.sampling_params
        assert params is not None
        most = float(params.max_tokens or OUTPUT)
        return Ask(
            prompt=max(1, len(request.prompt_token_ids or ())),
            output=most if params.ignore_eos else min(most, self._output.value),
            mode=chosen.mode,
            why=chosen.reason,
            one_token=params.max_tokens == 1 and not split.seeded(params),
            must_divide=must_divide,
            slo=slo,
        )


def facts_of(plan: Plan) -> dict[str, object]:
    """Return what a request's record tells of a decision."""
    found: dict[str, object] = {"mode": plan.route.mode.value, "reason": plan.route.reason}
    found["decision"] = _decision(plan.route)
    if plan.shadow is not None:
        found["shadow"] = _decision(plan.shadow) | {"reason": plan.shadow.reason}
    return found


def _decision(route: Route) -> dict[str, object]:
    found: dict[str, object] = {"cause": route.cause, "prefill": route.prefill, "decode": route.decode}
    if (predicted := route.predicted) is not None:
        found |= {
            "ttft_ms": round(predicted.ttft_s * 1e3, 3),
            "tpot_ms": round(predicted.tpot_s * 1e3, 3),
            "cached_tokens": predicted.cached,
            "parts_ms": {name: round(seconds * 1e3, 3) for name, seconds in predicted.parts.items()},
        }
    return found
