"""The budget of recomputed prompts, and the workers' counters as Prometheus sees them."""

import pytest

from actors.messages import PrefixCounts, WorkerStats
from actors.tier import COUNTERS
from deployments.budget import Budget
from deployments.edge import extra_headers
from deployments.ledger import PATH_CHARACTERS, Record
from deployments.metrics import TIER, Seen, families, together


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_is_spent_overdrawn_and_paid_back() -> None:
    clock = Clock()
    budget = Budget(tokens_per_s=100, burst_s=5, clock=clock)
    assert budget.spend(400) == 0
    assert budget.spend(1000) == 0  # 100 are left: that is enough to begin
    wait_s = budget.spend(1)
    assert wait_s == pytest.approx(9.01)
    clock.now += wait_s - 0.1
    assert budget.spend(1) == pytest.approx(0.1)
    clock.now += 0.11
    assert budget.spend(1) == 0


def test_what_was_not_needed_goes_back_into_the_budget() -> None:
    budget = Budget(tokens_per_s=100, burst_s=5, clock=Clock())
    assert budget.spend(1000) == 0
    assert budget.spend(1) > 0
    budget.refund(900)
    assert budget.spend(400) == 0
    budget.refund(10_000)
    assert budget.spend(500) == 0
    assert budget.spend(1) > 0


def test_a_budget_does_not_grow_beyond_its_burst() -> None:
    clock = Clock()
    budget = Budget(tokens_per_s=100, burst_s=5, clock=clock)
    clock.now += 1000
    assert budget.spend(500) == 0
    assert budget.spend(1) > 0


def test_workers_counters_become_metrics() -> None:
    stats = WorkerStats(
        requests=1,
        engine_requests=1,
        kv_blocks_used=1,
        sending=2,
        receiving=3,
        live_chunks=4,
        live_bytes=500,
        orphan_bytes=60,
        expired_leases=7,
        steps=8,
        taken_chunks={"tcp first": 9, "plasma corrupt": 1},
        taken_bytes={"tcp": 900, "plasma": 100},
        failed={"tcp corrupt": 2, "plasma full": 3},
        rates={"decode-worker-0 tcp": 1e9, "decode-worker-0 plasma": 0.0},
        computed_tokens=9000,
        prefixes=PrefixCounts(requests=5, queries=100, hits=30, tier_hits=20),
        tier={name: count for count, name in enumerate(COUNTERS, 100)},
        stepped=11,
        waiting=12,
        role_changes={"prefill prompts": 13},
    )
    workers = [Seen("w", "decode", "n", 10, True, stats), Seen("gone", "decode", "n", 10, False, None)]
    samples = [sample for family in families(workers) for sample in family.samples]
    of_roles = {"handoff_role_changes_total"}  # a series that goes on whatever the role is
    assert all(
        sample.labels.keys() >= {"worker", "role", "node"} or sample.name in of_roles for sample in samples
    )
    found = {
        (
            sample.name,
            *(sample.labels[key] for key in sorted(sample.labels.keys() - {"role", "node"})),
        ): sample.value
        for sample in samples
    }
    assert found == {
        ("handoff_kv_rung_total", "first", "tcp", "w"): 9,
        ("handoff_kv_rung_total", "corrupt", "plasma", "w"): 1,
        ("handoff_kv_bytes_total", "tcp", "w"): 900,
        ("handoff_kv_bytes_total", "plasma", "w"): 100,
        ("handoff_kv_failed_total", "corrupt", "tcp", "w"): 2,
        ("handoff_kv_failed_total", "full", "plasma", "w"): 3,
        ("handoff_kv_rate_bytes_per_second", "decode-worker-0", "tcp", "w"): 1e9,
        ("handoff_kv_rate_bytes_per_second", "decode-worker-0", "plasma", "w"): 0,
        ("handoff_kv_expired_leases_total", "w"): 7,
        ("handoff_kv_live_objects", "w"): 4,
        ("handoff_kv_live_bytes", "w"): 500,
        ("handoff_kv_orphan_bytes", "w"): 60,
        ("handoff_computed_tokens_total", "w"): 9000,
        **{
            (f"handoff_tier_{name}{'' if name == 'waiting_bytes' else '_total'}", "w"): count
            for count, name in enumerate(COUNTERS, 100)
        },
        ("handoff_kv_sending", "w"): 2,
        ("handoff_kv_receiving", "w"): 3,
        ("handoff_worker_up", "w"): 1,
        ("handoff_worker_up", "gone"): 0,
        ("handoff_worker_kv_blocks", "w"): 10,
        ("handoff_worker_kv_blocks", "gone"): 10,
        ("handoff_worker_kv_blocks_used", "w"): 1,
        ("handoff_worker_requests_running", "w"): 11,
        ("handoff_worker_requests_waiting", "w"): 12,
        ("handoff_worker_steps_total", "w"): 8,
        ("handoff_role_changes_total", "prompts", "prefill", "w"): 13,
    }
    whole = together(workers, {"w": PrefixCounts(requests=4, queries=60, hits=10, tier_hits=20)})
    assert (whole.num_running_reqs, whole.num_waiting_reqs, whole.kv_cache_usage) == (11, 12, 0.1)
    local, tier = whole.prefix_cache_stats, whole.connector_prefix_cache_stats
    assert (local.requests, local.queries, local.hits) == (1, 40, 20)
    assert tier is not None
    assert (tier.queries, tier.hits) == (20, 0)


def test_a_worker_that_was_started_anew_counts_from_nothing() -> None:
    assert PrefixCounts(1, 10, 5, 0).since(PrefixCounts(9, 90, 50, 7)) == PrefixCounts(1, 10, 5, 0)
    assert PrefixCounts(1, 10, 5, 0).since(None) == PrefixCounts(1, 10, 5, 0)


def test_every_counter_of_the_tier_is_explained() -> None:
    assert set(TIER) == set(COUNTERS)


@pytest.mark.parametrize(
    ("facts", "path"),
    [
        ({}, None),
        (
            {"prefill_worker": "p", "decode_worker": "d", "transport": None, "reason": "why"},
            "p>d; under way; why",
        ),
        (
            {"prefill_worker": "p", "decode_worker": "d", "transport": "tcp", "transport_reason": "a\r\nb"},
            "p>d; tcp; a b",
        ),
        ({"prefill_worker": "d", "decode_worker": "d", "reason": "why"}, "d; undivided; why"),
        (
            {
                **{"prefill_worker": "d", "decode_worker": "d", "reason": "why"},
                **{"tier_tokens": 512, "tier_worker": "d", "tier_reason": "faster"},
            },
            "d; undivided; why; 512 tokens from the tier on d, faster",
        ),
        (
            {"prefill_worker": "d", "decode_worker": "d", "reason": "x" * 1000},
            "d; undivided; " + "x" * (PATH_CHARACTERS - 14),
        ),
    ],
)
def test_the_path_of_a_request(facts: dict[str, object], path: str | None) -> None:
    record = Record("r", facts=facts)
    assert record.path() == path
    expected = [] if path is None else [(b"x-handoff-path", path.encode())]
    assert extra_headers(record) == [(b"x-request-id", b"r"), *expected]


@pytest.mark.parametrize(("wait_s", "header"), [(0.2, b"1"), (1.0, b"1"), (7.2, b"8")])
def test_when_to_try_again_is_told_in_whole_seconds(wait_s: float, header: bytes) -> None:
    assert (b"retry-after", header) in extra_headers(Record("r", facts={"retry_after_s": wait_s}))
