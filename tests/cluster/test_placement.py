"""Placement decides over plain values; none of these tests needs Ray."""

from collections import Counter
from collections.abc import Mapping

import pytest

from cluster.errors import PlacementError
from cluster.names import Role, at
from cluster.placement import NodeOffer, WorkerAsk, place


def offer(
    name: str,
    *roles: Role,
    cpus: float = 1,
    slots: float = 1,
    free: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
) -> NodeOffer:
    total: dict[str, float] = {"CPU": cpus, at(name): 1000, **dict.fromkeys(roles, slots)}
    return NodeOffer(
        name=name,
        node_id=f"id-{name}",
        address="127.0.0.2",
        roles=frozenset(roles),
        total=total,
        free={**total, **(free or {})},
        labels=labels or {},
    )


def ask(name: str, role: Role = "prefill", **more: object) -> WorkerAsk:
    return WorkerAsk(name, role, **more)  # type: ignore[arg-type]


def refusal(asks: list[WorkerAsk], offers: list[NodeOffer]) -> str:
    with pytest.raises(PlacementError) as caught:
        place(asks, offers)
    return str(caught.value)


def test_a_worker_goes_only_where_its_role_is_offered() -> None:
    placed = place([ask("d", "decode"), ask("p", "prefill")], [offer("a", "prefill"), offer("b", "decode")])
    assert [(p.worker, p.node_name, p.node_id) for p in placed] == [("d", "b", "id-b"), ("p", "a", "id-a")]


def test_the_actor_asks_ray_for_the_role_and_the_node() -> None:
    (placed,) = place([ask("p")], [offer("a", "prefill")])
    assert placed.resources == {"prefill": 1.0, "at:a": 0.001}


def test_workers_spread_over_nodes_before_they_share_one() -> None:
    offers = [offer(name, "prefill", cpus=4, slots=4) for name in "abc"]
    placed = place([ask(f"p{i}") for i in range(6)], offers)
    assert Counter(p.node_name for p in placed) == {"a": 2, "b": 2, "c": 2}


def test_spreading_counts_workers_that_already_run() -> None:
    busy = offer("a", "prefill", cpus=4, slots=4, free={"prefill": 2, "CPU": 2})
    placed = place([ask("p0"), ask("p1")], [busy, offer("b", "prefill", cpus=4, slots=4)])
    assert [p.node_name for p in placed] == ["b", "b"]


def test_packed_workers_fill_a_node_first() -> None:
    offers = [offer(name, "prefill", cpus=2, slots=2) for name in "ab"]
    placed = place([ask(f"p{i}") for i in range(3)], offers, spread=False)
    assert sorted(Counter(p.node_name for p in placed).values()) == [1, 2]


def test_a_worker_overrules_the_call_on_spreading() -> None:
    offers = [offer(name, "prefill", cpus=2, slots=2) for name in "ab"]
    placed = place([ask(f"p{i}", spread=False) for i in range(2)], offers, spread=True)
    assert len({p.node_name for p in placed}) == 1


def test_a_forced_worker_finds_its_node_free_though_it_is_asked_for_last() -> None:
    offers = [offer("a", "prefill"), offer("b", "prefill")]
    placed = place([ask("free"), ask("forced", node="a")], offers)
    assert [p.node_name for p in placed] == ["b", "a"]


def test_a_node_of_one_role_is_used_before_one_of_both() -> None:
    offers = [offer("both", "prefill", "decode"), offer("a", "prefill")]
    assert place([ask("p")], offers)[0].node_name == "a"


def test_all_labels_must_match() -> None:
    offers = [
        offer("a", "prefill", labels={"zone": "x", "disk": "ssd"}),
        offer("b", "prefill", labels={"zone": "y", "disk": "ssd"}),
    ]
    assert place([ask("p", labels={"zone": "y", "disk": "ssd"})], offers)[0].node_name == "b"


def test_gpus_and_slots_limit_what_a_node_takes() -> None:
    gpu = offer("g", "prefill", cpus=8, slots=8, free={"GPU": 1})
    assert place([ask("p", gpus=0.5), ask("q", gpus=0.5)], [gpu])
    assert "GPU: 0 free of 0, 0.5 needed" in refusal([ask(n, gpus=0.5) for n in "pqr"], [gpu])


def test_shares_of_a_cpu_add_up_to_the_whole() -> None:
    asks = [ask(f"p{i}", cpus=0.1) for i in range(10)]
    assert len(place(asks, [offer("a", "prefill", slots=10)])) == 10
    more = [*asks, ask("last", cpus=0.1)]
    assert "CPU: " in refusal(more, [offer("a", "prefill", slots=11)])


def test_the_message_lists_the_ask_and_what_every_node_lacks() -> None:
    offers = [
        offer("a", "prefill", free={"CPU": 0.5}, labels={"zone": "x"}),
        offer("b", "decode"),
        offer("c", "prefill", labels={"zone": "y"}),
    ]
    message = refusal([ask("p", labels={"zone": "x"})], offers)
    assert "p fits on no node. It asks for 1 prefill, 1 CPU, label zone=x." in message
    assert "a (prefill): CPU: 0.5 free of 1, 1 needed" in message
    assert "b (decode): does not offer the role prefill; no label zone" in message
    assert "c (prefill): label zone='y', not 'x'" in message


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        (ask("p", node="prefil-0"), "no node is called 'prefil-0'; did you mean 'prefill-0'?"),
        (ask("p", labels={"zoen": "x"}), "no node has a label 'zoen'; did you mean 'zone'?"),
        (ask("p", labels={"zone": "east"}), "no node has zone=east; did you mean 'us-east'?"),
        (ask("p", "decode"), "no node offers the role 'decode'; there are: prefill"),
        (ask("p", cpus=9), "give the nodes more cpus"),
    ],
)
def test_the_message_ends_with_the_likeliest_way_out(wanted: WorkerAsk, hint: str) -> None:
    offers = [offer("prefill-0", "prefill", labels={"zone": "us-east"})]
    assert hint in refusal([wanted], offers).splitlines()[-1]


def test_without_nodes_the_message_points_to_status() -> None:
    assert "handoff status" in refusal([ask("p")], [])
