"""The handover in Prometheus: the workers' own counters, beside vLLM's in the gateway's ``/metrics``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector

from actors.messages import WorkerStats
from deployments.worker_client import WorkerClient

logger = logging.getLogger(__name__)

POLL_S = 1.0

TIER = {
    "written_bytes": "Bytes of KV written to the bucket's tier, behind the requests",
    "dropped_bytes": "Bytes of KV not kept in the tier: it was too slow for them",
    "failed_bytes": "Bytes of KV that the tier's store did not take",
    "waiting_bytes": "Bytes of KV that wait to be written to the tier",
    "loaded_bytes": "Bytes of KV loaded from the tier",
    "loaded_tokens": "Tokens whose KV was loaded from the tier instead of being computed",
    "hits": "Requests whose prompt's beginning was in the tier",
    "misses": "Requests that the tier was asked for in vain",
    "slower": "Requests whose KV was expected to be computed faster than loaded from the tier",
    "corrupt": "Loads from the tier that found a damaged page",
    "gone": "Loads from the tier that came too late: a page had expired",
    "failures": "Answers and loads from the tier that did not come, or not in time",
}
"""What ``WorkerStats.tier`` counts (``actors/tier.py``)."""


class WorkerMetrics(Collector):
    """Asks the workers for their counters every second; a scrape shows the latest.

    Args:
        workers: the workers as they are now.

    """

    def __init__(self, workers: Callable[[], Sequence[WorkerClient]]) -> None:
        self._workers = workers
        self._latest: dict[str, WorkerStats] = {}

    def register(self) -> None:
        """Show them in this process's ``/metrics``."""
        REGISTRY.register(self)

    async def poll(self) -> None:
        """Keep asking, until cancelled. A worker that does not answer is shown no longer."""
        while True:
            workers = list(self._workers())
            found = await asyncio.gather(*(_ask(worker) for worker in workers))
            self._latest = {
                worker.info.name: stats
                for worker, stats in zip(workers, found, strict=True)
                if stats is not None
            }
            await asyncio.sleep(POLL_S)

    def collect(self) -> Iterator[Metric]:
        """See the base class."""
        return families(self._latest)


async def _ask(worker: WorkerClient) -> WorkerStats | None:
    if not worker.alive:
        return None
    try:
        return await worker.stats()
    except Exception as error:
        logger.debug("worker %s gave no counters: %s", worker.info.name, error or type(error).__name__)
        return None


def families(latest: dict[str, WorkerStats]) -> Iterator[Metric]:
    """Return the metrics of workers, by name."""
    rungs = CounterMetricFamily(
        "handoff_kv_rung",
        "Chunks of KV that came to a worker, by transport and why it was that one",
        labels=("worker", "rung", "reason"),
    )
    nbytes = CounterMetricFamily(
        "handoff_kv_bytes", "Bytes of KV that came to a worker, by transport", labels=("worker", "rung")
    )
    rates = GaugeMetricFamily(
        "handoff_kv_rate_bytes_per_second",
        "Estimated rate from a worker to a peer, by transport; 0 while it is broken",
        labels=("worker", "peer", "rung"),
    )
    expired = CounterMetricFamily(
        "handoff_kv_expired_leases", "Published KV withdrawn because its lease ran out", labels=("worker",)
    )
    gauges = {
        "live_objects": ("Published payloads that have not been taken", "live_chunks"),
        "live_bytes": ("Their bytes", "live_bytes"),
        "orphan_bytes": ("Published bytes that belong to no live request", "orphan_bytes"),
    }
    live = {
        key: GaugeMetricFamily(f"handoff_kv_{key}", text, labels=("worker",))
        for key, (text, _) in gauges.items()
    }
    computed = CounterMetricFamily(
        "handoff_computed_tokens", "Tokens whose KV a worker has computed itself", labels=("worker",)
    )
    tier: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        name: (GaugeMetricFamily if name == "waiting_bytes" else CounterMetricFamily)(
            f"handoff_tier_{name}", text, labels=("worker",)
        )
        for name, text in TIER.items()
    }
    for worker, stats in latest.items():
        for key, count in stats.taken_chunks.items():
            rungs.add_metric((worker, *key.split(" ")), count)
        for rung, count in stats.taken_bytes.items():
            nbytes.add_metric((worker, rung), count)
        for key, rate in stats.rates.items():
            rates.add_metric((worker, *key.split(" ")), rate)
        expired.add_metric((worker,), stats.expired_leases)
        computed.add_metric((worker,), stats.computed_tokens)
        for name, count in stats.tier.items():
            tier[name].add_metric((worker,), count)
        for key, (_, field) in gauges.items():
            live[key].add_metric((worker,), getattr(stats, field))
    yield from (rungs, nbytes, rates, expired, computed, *live.values(), *tier.values())
