"""Prometheus metrics, all in the gateway's ``/metrics``: its own, and those of the workers wherever they run.

vLLM's names stand for what they stand for in vLLM; the rest begins with ``handoff_``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from actors.messages import PrefixCounts, WorkerStats
from deployments.ledger import FIRST_TOKEN_CHAIN, HANDOVER_CHAIN, Record
from deployments.worker_client import WorkerClient

logger = logging.getLogger(__name__)

POLL_S = 1.0

# -- requests ------------------------------------------------------------------------------------

REQUESTS = Counter("handoff_requests", "Requests that have ended, by how they ran", ("mode",))
FAILED = Counter(
    "handoff_failed_requests", "Requests that were answered with a 5xx, or whose stream ended with one"
)
RETRIES = Counter("handoff_retries", "Tries of requests after their first one")
STAGES = Histogram(
    "handoff_stage_seconds",
    "Time that requests spent in each stage of the ledger; queue and decode_queue are engines' queues",
    ("stage",),
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
_OBSERVE = {stage: STAGES.labels(stage).observe for stage, _, _ in (*FIRST_TOKEN_CHAIN, *HANDOVER_CHAIN)}


def count_request(record: Record) -> None:
    """Count a request that has ended, if it was one for the engines."""
    if "tokenized" not in record.moments:
        return
    REQUESTS.labels(record.facts.get("mode", "not routed")).inc()
    if "error" in record.facts:
        FAILED.inc()
    attempts = record.facts.get("attempts")
    if isinstance(attempts, int) and attempts > 1:
        RETRIES.inc(attempts - 1)
    for stage, ms in record.stages_ms().items():
        _OBSERVE[stage](max(0.0, ms / 1e3))


# -- workers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker as the gateway sees it; ``stats`` is None while it does not answer."""

    name: str
    role: str
    node: str
    kv_blocks: int
    alive: bool
    stats: WorkerStats | None


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
        report: takes vLLM's statistics of all engines together.

    """

    def __init__(
        self, workers: Callable[[], Sequence[WorkerClient]], report: Callable[[SchedulerStats], None]
    ) -> None:
        self._workers, self._report = workers, report
        self._latest: list[Seen] = []
        self._prefixes: dict[str, PrefixCounts] = {}

    def register(self) -> None:
        """Show them in this process's ``/metrics``."""
        REGISTRY.register(self)

    async def poll(self) -> None:
        """Keep asking, until cancelled. Of a worker that does not answer, only that is shown."""
        while True:
            workers = list(self._workers())
            found = await asyncio.gather(*(_ask(worker) for worker in workers))
            self._latest = [
                Seen(w.info.name, w.info.role, w.info.node, w.info.kv_blocks, w.alive, stats)
                for w, stats in zip(workers, found, strict=True)
            ]
            self._report(together(self._latest, self._prefixes))
            self._prefixes |= {one.name: one.stats.prefixes for one in self._latest if one.stats is not None}
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


def together(workers: Sequence[Seen], before: Mapping[str, PrefixCounts]) -> SchedulerStats:
    """Return vLLM's statistics of all engines, as of one. Prompts count where they are computed.

    Args:
        workers: as they are now.
        before: what each had counted at the last report: vLLM counts on from there.

    """
    found = [worker.stats.prefixes.since(before.get(worker.name)) for worker in workers if worker.stats]
    local, tier = PrefixCacheStats(), PrefixCacheStats()
    for one in found:
        local.requests, tier.requests = local.requests + one.requests, tier.requests + one.requests
        local.queries, tier.queries = local.queries + one.queries, tier.queries + one.queries - one.hits
        local.hits, tier.hits = local.hits + one.hits, tier.hits + one.tier_hits
    told = [(worker, worker.stats) for worker in workers if worker.stats is not None]
    blocks = sum(worker.kv_blocks for worker, _ in told)
    return SchedulerStats(
        num_running_reqs=sum(stats.stepped for _, stats in told),
        num_waiting_reqs=sum(stats.waiting for _, stats in told),
        kv_cache_usage=sum(stats.kv_blocks_used for _, stats in told) / blocks if blocks else 0.0,
        prefix_cache_stats=local,
        connector_prefix_cache_stats=tier,
    )


WORKER = ("worker", "role", "node")
_GAUGES = {
    "worker_requests_running": ("Requests that the worker's engine steps", "stepped"),
    "worker_requests_waiting": ("Requests that wait there, for a step or for KV", "waiting"),
    "worker_kv_blocks_used": ("Blocks of its KV cache that requests hold", "kv_blocks_used"),
    "kv_sending": ("Handovers being published", "sending"),
    "kv_receiving": ("Handovers being loaded", "receiving"),
    "kv_live_objects": ("Published payloads that have not been taken", "live_chunks"),
    "kv_live_bytes": ("Their bytes", "live_bytes"),
    "kv_orphan_bytes": ("Published bytes that belong to no live request", "orphan_bytes"),
}
_COUNTERS = {
    "worker_steps": ("Engine steps", "steps"),
    "computed_tokens": ("Tokens whose KV the worker has computed itself", "computed_tokens"),
    "kv_expired_leases": ("Published KV withdrawn because its lease ran out", "expired_leases"),
}


def families(workers: Sequence[Seen]) -> Iterator[Metric]:
    """Return the metrics of workers, by name."""
    up = GaugeMetricFamily("handoff_worker_up", "Whether the gateway reaches the worker", labels=WORKER)
    blocks = GaugeMetricFamily("handoff_worker_kv_blocks", "Blocks of its KV cache", labels=WORKER)
    rungs = CounterMetricFamily(
        "handoff_kv_rung",
        "Chunks of KV that came to a worker, by transport and why it was that one",
        labels=(*WORKER, "rung", "reason"),
    )
    nbytes = CounterMetricFamily(
        "handoff_kv_bytes", "Bytes of KV that came to a worker, by transport", labels=(*WORKER, "rung")
    )
    failed = CounterMetricFamily(
        "handoff_kv_failed",
        "Publications and fetches of KV that failed at a worker, probes among them, by transport and cause",
        labels=(*WORKER, "rung", "reason"),
    )
    rates = GaugeMetricFamily(
        "handoff_kv_rate_bytes_per_second",
        "Measured rate of the link from a worker to a peer, by transport; 0 while it is broken",
        labels=(*WORKER, "peer", "rung"),
    )
    mapped = GaugeMetricFamily(
        "handoff_kv_map_bytes_per_second",
        "Rate of the link from a worker to a peer by the cluster file's map, by transport",
        labels=(*WORKER, "peer", "rung"),
    )
    changes = CounterMetricFamily(
        "handoff_role_changes",
        "How often a worker got another role, by which and why",
        labels=("worker", "to", "reason"),
    )
    gauges = {
        field: GaugeMetricFamily(f"handoff_{name}", text, labels=WORKER)
        for name, (text, field) in _GAUGES.items()
    }
    counters = {
        field: CounterMetricFamily(f"handoff_{name}", text, labels=WORKER)
        for name, (text, field) in _COUNTERS.items()
    }
    tier: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        name: (GaugeMetricFamily if name == "waiting_bytes" else CounterMetricFamily)(
            f"handoff_tier_{name}", text, labels=WORKER
        )
        for name, text in TIER.items()
    }
    for worker in workers:
        labels, stats = (worker.name, worker.role, worker.node), worker.stats
        up.add_metric(labels, worker.alive)
        blocks.add_metric(labels, worker.kv_blocks)
        if stats is None:
            continue
        for key, chunks in stats.taken_chunks.items():
            rungs.add_metric((*labels, *key.split(" ")), chunks)
        for rung, taken in stats.taken_bytes.items():
            nbytes.add_metric((*labels, rung), taken)
        for key, count in stats.failed.items():
            failed.add_metric((*labels, *key.split(" ")), count)
        for key, rate in stats.rates.items():
            rates.add_metric((*labels, *key.split(" ")), rate)
        for key, rate in stats.mapped.items():
            mapped.add_metric((*labels, *key.split(" ")), rate)
        for key, count in stats.role_changes.items():
            changes.add_metric((worker.name, *key.split(" ")), count)
        for field, gauge in gauges.items():
            gauge.add_metric(labels, getattr(stats, field))
        for field, counter in counters.items():
            counter.add_metric(labels, getattr(stats, field))
        for name, count in stats.tier.items():
            tier[name].add_metric(labels, count)
    yield from (
        up,
        blocks,
        rungs,
        nbytes,
        failed,
        rates,
        mapped,
        changes,
        *gauges.values(),
        *counters.values(),
        *tier.values(),
    )
