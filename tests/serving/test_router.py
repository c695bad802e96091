"""Where requests go: properties of the pure function, over random snapshots."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from actors.messages import Role
from actors.steps import StepModel
from deployments.costs import Costs, Way, rank
from deployments.refusals import NoWorker
from deployments.router import EXACT, Policy, Route, route
from deployments.snapshot import Ask, Link, Slo, Snapshot, WorkerState
from deployments.split import Mode

STEP = StepModel(8e-3, 1e-4, 5e-5, 1e-9, 1e-8)
SEEDS = range(60)
POLICIES: tuple[Policy, ...] = ("adaptive", "always", "never", "replicas")


def worker(name: str, role: Role, **changes: Any) -> WorkerState:
    return WorkerState(name, role, **{"step": STEP, **changes})


P0, P1 = worker("p0", "prefill"), worker("p1", "prefill")
D0, D1 = worker("d0", "decode"), worker("d1", "decode")
ALL = [P0, P1, D0, D1]
ASK = Ask(prompt=1000, output=50, mode=Mode.FIRST_TOKEN, why="why")


def chosen(workers: list[WorkerState], ask: Ask = ASK, policy: Policy = "adaptive", **others: Any) -> Route:
    return route(Snapshot.of(workers, **others), ask, policy)


def ttft(found: Route) -> float:
    assert found.predicted is not None
    return found.predicted.ttft_s


def waits(one: WorkerState, tokens: int) -> WorkerState:
    return replace(one, waiting_tokens=tokens, waiting_s=one.step.prefill_s(tokens, 0))


def some(seed: int, count: int | None = None) -> tuple[list[WorkerState], Ask]:
    """Random workers and a random request."""
    drawn = random.Random(seed)
    count = count or drawn.randint(2, EXACT)
    workers = []
    for i in range(count):
        running = drawn.randint(0, 40)
        one = worker(
            f"w{i}",
            "prefill" if i % 2 else "decode",
            running=running,
            decoding=drawn.randint(0, running),
            context=running * drawn.randint(10, 2000),
            share=drawn.random() * 0.8,
            chunk=drawn.choice([512, 2048]),
        )
        workers.append(waits(one, drawn.choice([0, 0, drawn.randint(1, 20_000)])))
    cached = {i: drawn.randint(0, 500) for i in range(count) if drawn.random() < 0.2}
    slo = drawn.choice([Slo(), Slo(0.5, 0.05), Slo(ttft_s=1.0)])
    return workers, Ask(
        drawn.randint(1, 8000), drawn.randint(2, 500), Mode.FIRST_TOKEN, cached=cached, slo=slo
    )


# -- properties --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_more_work_at_a_worker_never_attracts_a_request(seed: int) -> None:
    workers, ask = some(seed)
    before = chosen(workers, ask)
    for i, one in enumerate(workers):
        longer = replace(waits(one, int(one.waiting_tokens) + 5000))
        after = chosen([*workers[:i], longer, *workers[i + 1 :]], ask)
        assert before.prefill == one.name or after.prefill != one.name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_longer_queue_is_a_longer_wait(seed: int) -> None:
    drawn = random.Random(seed)
    one, tokens = (
        worker("w", "decode", decoding=drawn.randint(0, 9), running=9),
        sorted(drawn.randint(0, 9000) for _ in range(9)),
    )
    found = [ttft(chosen([waits(one, count)])) for count in tokens]
    assert found == sorted(found)
    assert found[-1] > found[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_dead_get_nothing(seed: int, policy: Policy) -> None:
    workers, ask = some(seed)
    dead = random.Random(seed).sample(range(len(workers)), len(workers) - 1)
    workers = [replace(one, alive=i not in dead) for i, one in enumerate(workers)]
    found = chosen(workers, ask, policy)
    (alive,) = (one.name for one in workers if one.alive)
    assert (found.prefill, found.decode, found.mode) == (alive, alive, Mode.UNDIVIDED)


@pytest.mark.parametrize("policy", ["adaptive", "always", "never"])
@pytest.mark.parametrize("full", [{"slots": 8, "running": 8}, {"free_tokens": 100.0, "running": 3}])
def test_the_full_get_nothing_while_another_has_room(policy: Policy, full: dict[str, Any]) -> None:
    workers = [
        replace(P0, **full),
        P1,
        replace(D0, **full, context=300.0),
        waits(replace(D1, running=30, decoding=30, context=30_000.0), 60_000),
    ]
    found = chosen(workers, policy=policy)
    assert found.prefill in ("p1", "d1")
    assert found.decode in ("p1", "d1")


@pytest.mark.parametrize("policy", ["adaptive", "always", "never"])
def test_of_equal_workers_the_one_that_holds_the_prefix(policy: Policy) -> None:
    for index, name in ((0, "p0"), (1, "p1")):
        found = chosen(ALL, replace(ASK, cached={index: 900}), policy)
        assert found.prefill == name
    if policy != "always":
        assert chosen(ALL, replace(ASK, cached={3: 900}), policy).prefill == "d1"


def test_not_the_holder_of_the_prefix_if_its_queue_takes_longer() -> None:
    assert chosen([waits(P0, 50_000), P1, D0, D1], replace(ASK, cached={0: 900})).prefill != "p0"


def test_undivided_when_nothing_decodes_and_handing_over_costs() -> None:
    found = chosen(ALL)
    assert (found.mode, found.prefill, found.decode) == (Mode.UNDIVIDED, "d0", "d0")
    assert found.cause == "undivided is faster"
    assert "ms/token" in found.reason


BUSY = {"running": 30, "decoding": 30, "context": 30_000.0}


def test_divided_when_a_local_prefill_would_stall_many() -> None:
    found = chosen([P0, replace(D0, **BUSY, share=0.0)], replace(ASK, prompt=6000, output=400))
    alone = chosen([replace(P0, alive=False), replace(D0, **BUSY)], replace(ASK, prompt=6000, output=400))
    assert found.mode is Mode.UNDIVIDED  # p0 has nothing else to do
    both = [replace(P0, share=0.85), replace(D0, **BUSY)]
    found = chosen(both, replace(ASK, prompt=6000, output=400))
    assert (found.prefill, found.decode, found.mode) == ("p0", "d0", Mode.FIRST_TOKEN)
    assert found.predicted is not None
    assert alone.predicted is not None
    assert alone.predicted.parts["others"] > 5 * found.predicted.parts["others"]


def test_a_slow_link_is_not_used() -> None:
    both = [replace(P0, share=0.85), replace(D0, **BUSY)]
    ask = replace(ASK, prompt=6000, output=400)
    assert chosen(both, ask, kv_bytes=1e5, links={(0, 1): Link(0.01, 1e9)}).mode is Mode.FIRST_TOKEN
    assert chosen(both, ask, kv_bytes=1e5, links={(0, 1): Link(0.01, 1e7)}).mode is Mode.UNDIVIDED


def test_of_two_links_the_faster_one() -> None:
    links = {
        (0, 2): Link(0.01, 1e7),
        (0, 3): Link(0.01, 1e9),
        (1, 2): Link(0.01, 1e7),
        (1, 3): Link(0.01, 1e7),
    }
    found = chosen(ALL, policy="always", kv_bytes=1e4, links=links)
    assert (found.prefill, found.decode) == ("p0", "d1")


def test_the_last_chunk_is_what_a_fast_link_leaves_to_wait_for() -> None:
    found = chosen(ALL, policy="always", kv_bytes=1e4, link=Link(0.005, 1e9))
    assert found.predicted is not None
    assert found.predicted.parts["handover"] == pytest.approx(0.005 + 1000 * 1e4 / 1e9)
    chunked = [replace(one, chunk=100) for one in ALL]
    found = chosen(chunked, policy="always", kv_bytes=1e4, link=Link(0.005, 1e9))
    assert found.predicted is not None
    assert found.predicted.parts["handover"] == pytest.approx(0.005 + 100 * 1e4 / 1e9)


@pytest.mark.parametrize("seed", SEEDS)
def test_many_workers_are_not_routed_much_worse_than_few(seed: int) -> None:
    """The shortlist finds a way that is nearly as good as the best of all."""
    workers, ask = some(seed, EXACT)
    exact = chosen(workers, ask)
    padding = [worker(f"dead{i}", "decode", alive=False) for i in range(40)]
    found = chosen([*workers, *padding], ask)
    assert exact.predicted is not None
    assert found.predicted is not None
    taken, best = (
        p.ttft_s + p.tpot_s * ask.output + p.parts["others"] for p in (found.predicted, exact.predicted)
    )
    assert taken <= 1.3 * best + 0.05


@pytest.mark.parametrize("mode", [Mode.FIRST_TOKEN, Mode.DECODE_SAMPLES])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_pair_is_found_without_looking_at_all(seed: int, mode: Mode) -> None:
    workers, ask = some(seed, 30)
    drawn = random.Random(seed)
    workers = [replace(one, slots=drawn.choice([1, 256])) for one in workers]
    links = {
        (p, d): Link(drawn.random() / 50, 10 ** drawn.uniform(6, 10))
        for p in range(30)
        for d in range(30)
        if drawn.random() < 0.5
    }
    snapshot = Snapshot.of(workers, links=links, kv_bytes=1e4, now=1.0)
    prefills, decodes = [list(range(start, 30, 2)) for start in (1, 0)]

    def pairs(costs: Costs) -> list[Way]:
        return [costs.pair(p, d) for p in prefills for d in decodes]

    times = pairs(Costs(snapshot, replace(ask, mode=mode, slo=Slo())))
    for share in (0.02, 0.2, 0.5):  # of the pairs that meet each objective, about
        at = int(len(times) * share)
        slo = Slo(sorted(way.ttft for way in times)[at], sorted(way.tpot for way in times)[at])
        costs = Costs(snapshot, replace(ask, mode=mode, slo=slo))
        assert costs.best_pair(prefills, decodes) == min(pairs(costs), key=rank)
    plain = Costs(snapshot, replace(ask, mode=mode, slo=Slo()))
    assert plain.best_pair(prefills, decodes) == min(times, key=rank)


def test_equal_pairs_are_taken_in_order() -> None:
    equal = [worker(f"w{i}", "prefill" if i % 2 else "decode") for i in range(10)]
    found = Costs(Snapshot.of(equal), ASK).best_pair([5, 3, 1], [4, 2, 0])
    assert (found.prefill, found.decode) == (5, 4)


# -- what cannot be divided, and policies -----------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.FIRST_TOKEN, Mode.DECODE_SAMPLES])
def test_always_divides_and_keeps_the_reason(mode: Mode) -> None:
    found = chosen(ALL, replace(ASK, mode=mode), "always")
    assert (found.prefill, found.decode, found.mode, found.reason) == ("p0", "d0", mode, "why")


def test_what_one_engine_could_not_run_is_divided() -> None:
    assert chosen(ALL, replace(ASK, must_divide=True)).mode is Mode.FIRST_TOKEN


def test_always_runs_what_cannot_be_divided_on_decode() -> None:
    ask = replace(ASK, mode=Mode.UNDIVIDED)
    busy = [P0, P1, replace(D0, **BUSY), replace(D1, **BUSY)]
    assert chosen(busy, ask, "always").prefill == "d0"
    assert chosen(busy, replace(ask, one_token=True), "always").prefill == "p0"
    assert chosen(busy, ask).prefill == "p0"  # adaptively: anywhere
    assert chosen(busy, ask).reason == "why"


def test_never_divides_nothing_and_replicas_take_turns() -> None:
    both = [replace(P0, share=0.85), replace(D0, **BUSY)]
    assert chosen(both, replace(ASK, prompt=6000, output=400), "never").mode is Mode.UNDIVIDED
    found = [chosen(ALL, replace(ASK, turn=turn), "replicas") for turn in range(8)]
    assert [one.prefill for one in found] == ["p0", "p1", "d0", "d1"] * 2
    assert {one.mode for one in found} == {Mode.UNDIVIDED}


@pytest.mark.parametrize("policy", ["adaptive", "always"])
@pytest.mark.parametrize(("alive", "missing"), [([P0, P1], "decode"), ([D0, D1], "prefill")])
def test_a_role_without_workers_is_done_by_the_other(
    alive: list[WorkerState], missing: str, policy: Policy
) -> None:
    dead = [replace(one, alive=False) for one in ALL if one not in alive]
    found = chosen([*dead, *alive], policy=policy)
    assert (found.prefill, found.decode, found.mode) == (alive[0].name, alive[0].name, Mode.UNDIVIDED)
    assert found.reason == f"no {missing} worker is alive"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [0, 4, 40])
def test_no_worker_at_all(policy: Policy, count: int) -> None:
    dead = [replace(P0, name=f"p{i}", alive=False) for i in range(count)]
    with pytest.raises(NoWorker, match=f"none of the {count} workers is alive"):
        chosen(dead, policy=policy)


# -- objectives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "slo", "meets"),
    [
        (lambda one: one, Slo(1.0, 0.05), True),
        (lambda one: waits(one, 40_000), Slo(1.0, 0.05), False),
        (lambda one: waits(one, 40_000), Slo(None, 0.05), True),
        (
            lambda one: replace(one, running=60, decoding=60, step=replace(STEP, sequence=1e-3)),
            Slo(1.0, 0.05),
            False,
        ),
        (lambda one: replace(one, **BUSY, slack_s=0.05), Slo(1.0, 0.05), False),  # others', not its own
        (lambda one: replace(one, **BUSY, slack_s=0.06), Slo(1.0, 0.05), True),
        (lambda one: replace(one, **BUSY, slack_s=0.05), Slo(1.0, None), True),
        (lambda one: waits(one, 40_000), Slo(), True),
    ],
)
def test_objectives_are_met_or_not(
    change: Callable[[WorkerState], WorkerState], slo: Slo, meets: bool
) -> None:
    assert chosen([change(one) for one in ALL], replace(ASK, slo=slo)).meets is meets


def test_a_way_that_keeps_objectives_comes_before_a_cheaper_one() -> None:
    ask = replace(ASK, slo=Slo(1.0, 0.05))
    idle, other = replace(D0, slack_s=0.01), replace(D1, **BUSY, slack_s=10.0)
    assert chosen([idle, replace(other, slack_s=0.01)], ask, "never").decode == "d0"
    found = chosen([idle, other], ask, "never")
    assert (found.decode, found.meets) == ("d1", True)
