"""OpenTelemetry: the ledger's moments as spans, one trace per request, sent to a collector over OTLP.

There is no second clock: spans are made of a request's record when its answer has left. Where no collector
is set, nothing of this is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from deployments.ledger import FIRST_TOKEN_CHAIN, HANDOVER_CHAIN, Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import SpanContext, SpanKind

ENVIRONMENT = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE = "handoff"
CLOSED_WITHIN_MS = 500

SPANS = (
    ("gateway", "arrived", "prefill.accepted", ("tokenize", "route", "submit")),
    ("prefill", "prefill.accepted", "first_token", ("queue", "prefill", "return")),
    ("transfer", "prefill.output", "decode.loaded", ("publish", "wire", "scatter")),
    ("decode", "decode.loaded", "decode_token", ("decode_queue", "first_step", "decode_return")),
    ("answer", "first_token", "ended", ("stream",)),
)
"""(span, moment it begins, moment it ends, the ledger's stages that are its children: ``prefill.queue``)."""

_STAGES = {stage: (start, end) for stage, start, end in (*FIRST_TOKEN_CHAIN, *HANDOVER_CHAIN)}
_WORKER = {"prefill": "prefill", "transfer": "decode", "decode": "decode"}
_FACTS = {
    "mode": "handoff.mode",
    "reason": "handoff.reason",
    "transport": "handoff.transport",
    "transport_reason": "handoff.transport_reason",
    "kv_bytes": "handoff.kv_bytes",
    "attempts": "handoff.attempts",
    "failure": "handoff.failure",
    "error": "error.type",
    "prompt_tokens": "gen_ai.usage.input_tokens",
}


def tracer(endpoint: str | None) -> Tracer | None:
    """Return what exports to this collector, or to the one in the environment; None if there is none."""
    if endpoint is None and not any(os.environ.get(name) for name in ENVIRONMENT):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", SERVICE)})
    return Tracer(TracerProvider(resource=resource), BatchSpanProcessor(exporter))


class Tracer:
    """Makes spans of records. A thread of the SDK sends them in batches, and drops what nobody takes.

    Spans are made complete, not begun and ended: that takes a fifth of the time.

    Args:
        provider: whose resource the spans carry, and whose sampler decides (``OTEL_TRACES_SAMPLER``); by
            default the client's own choice holds.
        processor: takes spans that have ended.

    """

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._processor = provider, processor
        self._extract = TraceContextTextMapPropagator().extract

    def export(self, record: Record) -> None:
        """Make the spans of a request that has ended, if it was one for the engines."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace.sampling import Decision

        if "tokenized" not in record.moments:
            return
        ids, around = self._provider.id_generator, self._extract({"traceparent": record.parent})
        parent = trace.get_current_span(around).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else ids.generate_trace_id()
        attributes = _attributes(record)
        decided = self._provider.sampler.should_sample(around, trace_id, "request", _kind(True), attributes)
        record.facts["trace_id"] = trace.format_trace_id(trace_id)
        if decided.decision is Decision.RECORD_AND_SAMPLE:
            made = _Trace(self._provider, self._processor, trace_id, record)
            made.stages(
                made.span("request", "arrived", "ended", parent if parent.is_valid else None, attributes)
            )

    def close(self) -> None:
        """Send what has not been sent."""
        self._processor.force_flush(CLOSED_WITHIN_MS)
        self._processor.shutdown()


class _Trace:
    """One request's spans."""

    def __init__(
        self, provider: TracerProvider, processor: SpanProcessor, trace_id: int, record: Record
    ) -> None:
        self._provider, self._processor = provider, processor
        self._trace_id, self._record = trace_id, record
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def stages(self, root: SpanContext) -> None:
        """Make the spans of all stages whose moments are known and in order."""
        facts = self._record.facts
        for name, start, end, stages in SPANS:
            if not self._in_order(start, end):
                continue
            role = _WORKER.get(name)
            about = (
                {}
                if role is None
                else {
                    "handoff.worker": str(facts.get(f"{role}_worker")),
                    "handoff.node": str(facts.get(f"{role}_node")),
                }
            )
            span = self.span(name, start, end, root, about)
            for stage in stages:
                if self._in_order(*_STAGES[stage]):
                    self.span(f"{name}.{stage}", *_STAGES[stage], span)

    def span(
        self,
        name: str,
        start: str,
        end: str,
        parent: SpanContext | None,
        attributes: Mapping[str, Any] | None = None,
    ) -> SpanContext:
        """Make a span between two moments; returns its context."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan

        moments, error = self._record.moments, self._record.facts.get("error")
        context = trace.SpanContext(
            self._trace_id, self._provider.id_generator.generate_span_id(), False, trace.TraceFlags(1)
        )
        root = name == "request"
        status = trace.Status(trace.StatusCode.ERROR, str(error)) if root and error else trace.Status()
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                parent,
                self._provider.resource,
                attributes,
                kind=_kind(root),
                instrumentation_scope=_scope(),
                status=status,
                start_time=self._epoch_ns + int(moments[start] * 1e9),
                end_time=self._epoch_ns + int(moments[end] * 1e9),
            )
        )
        return context

    def _in_order(self, start: str, end: str) -> bool:
        moments = self._record.moments
        return start in moments and end in moments and moments[end] >= moments[start]


def _attributes(record: Record) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "handoff.request_id": record.request_id,
        "gen_ai.usage.output_tokens": record.passed,
    }
    for fact, name in _FACTS.items():
        if isinstance(value := record.facts.get(fact), (str, int, float)):
            attributes[name] = value
    return attributes


def _kind(root: bool) -> SpanKind:
    from opentelemetry.trace import SpanKind

    return SpanKind.SERVER if root else SpanKind.INTERNAL


@cache
def _scope() -> Any:
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope(SERVICE)
