"""The router in Prometheus: what it decided and why, and how far its predictions are off."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Histogram

_RATIOS: Final = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)

DECISIONS: Final = Counter(
    "handoff_router_decisions",
    "Requests by how they were routed and why; shadow: decided so, but not done",
    ("cause", "mode", "shadow"),
)
ADMISSION: Final = Counter(
    "handoff_admission_refused", "Requests refused because no way would have met their objectives"
)
TTFT: Final = Histogram(
    "handoff_router_ttft_predicted_by_observed", "Predicted time to first token by observed", buckets=_RATIOS
)
TPOT: Final = Histogram(
    "handoff_router_tpot_predicted_by_observed", "Predicted time per token by observed", buckets=_RATIOS
)
