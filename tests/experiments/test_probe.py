"""`handoff probe`: its arithmetic, drift, the map that the planner reads, and TCP on a limited link."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from cluster import netns
from cluster.errors import NotRunningError
from cluster.placement import NodeOffer
from experiments.compare import compare
from experiments.plan import Load, plan
from experiments.plan_machines import Machines
from experiments.plan_machines import load as load_machines
from experiments.plan_map import with_map
from experiments.plan_model import PlanError
from experiments.plan_model import read as read_model
from experiments.probe import Found, Parameters, measure, nodes_to_probe
from experiments.probe_map import (
    EACH_NODE,
    UNITS,
    Place,
    bus_gbyte_s,
    drift,
    heat_map,
    read,
    rows,
    too_few,
    ways,
)
from experiments.probe_tcp import Listener, ProbeError, rate_gbit_s, round_trip_us
from experiments.ray_nodes import ray_nodes
from experiments.results import ResultError, Run, load, save
from handoff.cli import app

HERE = Path(__file__).parent
MAPS = HERE / "maps"
FREE, LIMITED = MAPS / "unlimited.json", MAPS / "limited-1g.json"
"""Two maps that `handoff probe` wrote of the nodes of examples/machines.yaml, in namespaces."""
MACHINES = HERE.parents[1] / "examples" / "machines.yaml"
MISTRAL = HERE / "plan_models" / "mistral-7b.json"


def a_map(values: dict[Place, list[float]], nodes: tuple[str, ...] = ("a-0", "b-0")) -> Run:
    found = Found()
    for place, of in values.items():
        for turn, value in enumerate(of):
            found.add(place, value, turn)
    lines = [line.as_json() for line in rows(found.samples, {})]
    results = {"cluster": "x", "nodes": list(nodes), "rows": lines, "not_measured": []}
    return Run.begin("probe", {}).end(results, found.samples)


def tcp(
    rate: list[float], source: str = "a-0", target: str = "b-0", streams: int = 4
) -> dict[Place, list[float]]:
    return {Place("tcp", source, target, streams): rate}


def test_bus_bandwidth_is_nccl_tests() -> None:
    """2(n-1)/n of the bytes: two ranks send all of them, three 4/3."""
    assert bus_gbyte_s(10**9, 2, 1.0) == pytest.approx(1.0)
    assert bus_gbyte_s(3 * 10**9, 3, 2.0) == pytest.approx(2.0)


def test_rows_are_medians_with_their_range_in_the_order_of_the_quantities() -> None:
    values = {Place("memory copy", "a-0"): [5.0], **tcp([3, 1, 2]), Place("round trip", "a-0", "b-0"): [50.0]}
    lines = a_map(values).results["rows"]
    assert [line["what"] for line in lines] == ["round trip", "tcp", "memory copy"]
    assert (lines[1]["p50"], lines[1]["low"], lines[1]["high"], lines[1]["samples"]) == (2, 1, 3, 3)
    assert lines[1]["row"] == "tcp x4 a-0 > b-0"


@pytest.mark.parametrize(
    ("before", "now", "ratio"),
    [
        ([9, 10, 11], [4, 5, 6], 0.5),
        ([4, 5, 6], [9, 10, 11], 2.0),
        ([9, 10, 11], [10.5, 12, 13], None),  # ranges overlap
        ([10, 10.1, 10.2], [10.5, 10.6, 10.7], None),  # apart, but hardly a change
        ([9, 10], [4, 5], None),  # too few to say
    ],
)
def test_drift_is_what_changed_by_more_than_its_noise(
    before: list[float], now: list[float], ratio: float | None
) -> None:
    one, other = a_map(tcp(before)), a_map(tcp(now))
    assert [found.ratio for found in drift(one, other)] == ([] if ratio is None else [ratio])
    assert too_few(one, other) == (len(before) < 3)


def test_what_only_one_map_has_is_no_drift() -> None:
    assert drift(a_map(tcp([9, 9, 9])), a_map(tcp([1, 1, 1], target="c-0"))) == []


def test_a_way_is_the_worse_direction_with_the_best_streams() -> None:
    values = {
        **tcp([2.0], streams=1),
        **tcp([9.0], streams=4),
        **tcp([5.0], "b-0", "a-0"),
        Place("round trip", "a-0", "b-0"): [100.0],
        Place("round trip", "b-0", "a-0"): [80.0],
        Place("all-reduce", "a-0", "b-0"): [0.5],
        Place("iperf3", "a-0", "b-0", 4): [99.0],
    }
    (way,) = ways(a_map(values))
    assert (way.nodes, way.gbit_s, way.latency_us, way.collective_gbit_s) == (("a-0", "b-0"), 5.0, 50.0, 4.0)
    assert ways(a_map(tcp([9.0]))) == []  # one direction is no way


def test_the_heat_map_has_every_pair_and_is_small() -> None:
    for path in (FREE, LIMITED):
        drawing = heat_map(read(path))
        ElementTree.fromstring(drawing)
        assert "TCP, best number of streams" in drawing
        assert "fast-0" in drawing
        assert len(drawing) < 20_000


def test_stored_maps_show_the_limit() -> None:
    (free,), (limited,) = ways(read(FREE)), ways(read(LIMITED))
    assert 0.8 < limited.gbit_s < 1.1
    assert free.gbit_s > 5 * limited.gbit_s
    found = {one.row: one for one in drift(read(FREE), read(LIMITED))}
    assert found["tcp x4 fast-0 > wide-0"].ratio < 0.2
    assert "memory copy fast-0" not in {row for row, one in found.items() if one.ratio < 0.2}


def test_the_planners_verdict_changes_with_the_measured_link() -> None:
    """Apart is best on the free link; at 1 Gbit/s moving half a gigabyte takes longer than prefill."""
    machines, load_of = load_machines(MACHINES), Load()
    best = {}
    for path in (FREE, LIMITED):
        measured = with_map(machines, path)
        best[path] = plan(read_model(str(MISTRAL)), measured, load_of).ranked[0].layout.name
        assert measured.link("fast-0", "wide-0").gbit_s == ways(read(path))[0].gbit_s
    assert best == {FREE: "split-1p1d", LIMITED: "replicas-2"}


def test_a_map_replaces_links_and_nothing_else(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "nodes": {"a": {}, "b": {}, "c": {}},
        "links": {"pairs": [{"nodes": ["b-0", "a-0"], "gbit_s": 1, "kv_gbit_s": 0.7}]},
    }
    before = Machines.model_validate(data)
    both = {**tcp([8.0]), **tcp([8.0], "b-0", "a-0")}
    trips = {Place("round trip", one, other): [60.0] for one, other in (("a-0", "b-0"), ("b-0", "a-0"))}
    save(a_map({**both, **trips}), tmp_path / "map.json")
    after = with_map(before, tmp_path / "map.json")
    link = after.link("a-0", "b-0")
    assert (link.gbit_s, link.latency_us, link.kv_gbit_s) == (8.0, 30.0, 0.7)
    assert after.link("a-0", "c-0") == before.links.between
    assert any(line.startswith("links.between") for line in after.assumed())
    two = Machines.model_validate({"nodes": {"a": {}, "b": {}}})
    assert any(line.startswith("links.between") for line in two.assumed())
    assert not any(
        line.startswith("links.between") for line in with_map(two, tmp_path / "map.json").assumed()
    )


def test_a_map_of_other_nodes_is_refused_with_both_names(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"fast-0, wide-0.*n-0.*no pair is in both"):
        with_map(Machines.model_validate({"nodes": {"n": {"count": 2}}}), FREE)
    with pytest.raises(PlanError, match="bench-kv"):
        with_map(load_machines(MACHINES), HERE.parents[1] / "results" / "bench-kv.json")


def test_the_command_of_the_planner_takes_a_map() -> None:
    argv = ["plan", str(MISTRAL), "--cluster", str(MACHINES), "--json", "--map"]
    first = [
        json.loads(CliRunner().invoke(app, [*argv, str(path)]).stdout)["ranked"][0]["layout"]
        for path in (FREE, LIMITED)
    ]
    assert first == ["split-1p1d", "replicas-2"]


def test_a_map_of_another_version_or_shape_is_refused(tmp_path: Path) -> None:
    run = load(FREE)
    save(
        replace(run, results={**run.results, "rows": [{**run.results["rows"][0], "p50": 0}]}),
        tmp_path / "a.json",
    )
    with pytest.raises(ResultError, match=r"rows\[0\]"):
        read(tmp_path / "a.json")
    data = json.loads(FREE.read_text())
    (tmp_path / "b.json").write_text(json.dumps({**data, "schema_version": 0}))
    with pytest.raises(ResultError, match="schema version"):
        read(tmp_path / "b.json")


def test_maps_compare() -> None:
    rows_of = {one.row: one for one in compare(FREE, LIMITED).rows}
    assert rows_of["tcp x1 fast-0 > wide-0"].ratio is not None
    assert set(UNITS) >= {row["what"] for row in read(FREE).results["rows"]}


def test_nodes_without_a_role_are_left_out_where_others_have_one() -> None:
    def offer(name: str, *roles: Any) -> NodeOffer:
        return NodeOffer(name, name, "127.0.0.1", frozenset(roles), {}, {}, {})

    assert [one.name for one in nodes_to_probe([offer("head"), offer("a", "prefill")])] == ["a"]
    assert [one.name for one in nodes_to_probe([offer("x"), offer("y")])] == ["x", "y"]
    assert EACH_NODE not in ("x", "y")


def test_a_missing_map_is_said_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--against", str(tmp_path / "none.json")])
    assert result.exit_code == 1
    assert isinstance(result.exception, ResultError)


def test_without_a_cluster_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["probe", "--out", str(tmp_path / "map.json")])
    assert isinstance(result.exception, NotRunningError)
    assert "give a cluster file" in str(result.exception)


# -- for real


@pytest.mark.cluster
def test_two_nodes_are_mapped(tmp_path: Path) -> None:
    """Bare Ray nodes on loopback: stations are pinned to each, and every quantity that can be is there."""
    import ray

    from cluster.connect import join
    from cluster.nodes import snapshot

    with ray_nodes([("127.0.0.2", ()), ("127.0.0.3", ())], 128 << 20) as nodes:
        join(nodes.address, Path(nodes.environment["RAY_AUTH_TOKEN_PATH"]))
        try:
            asked = Parameters(rounds=1, seconds=0.1, streams=(1, 2), mbytes=4, iperf_s=0)
            run = measure(nodes_to_probe(snapshot()), None, asked, print)
        finally:
            ray.shutdown()
    save(run, tmp_path / "map.json")
    found = {
        (row["what"], row["source"], row["target"], row["streams"])
        for row in read(tmp_path / "map.json").results["rows"]
    }
    one, other = run.results["nodes"]
    for ends in ((one, other), (other, one)):
        assert {
            ("round trip", *ends, None),
            ("tcp", *ends, 1),
            ("tcp", *ends, 2),
            ("object store", *ends, None),
        } <= found
    assert ("all-reduce", one, other, None) in found
    assert ("memory copy", one, None, None) in found
    assert ("nixl", one, other, None) in found or "nixl" in str(run.results["not_measured"])
    assert len(ways(run)) == 1


def test_a_rate_and_a_round_trip_over_loopback() -> None:
    listener = Listener("127.0.0.1")
    try:
        assert rate_gbit_s("127.0.0.1", listener.port, 2, 0.1) > 0.1
        assert round_trip_us("127.0.0.1", listener.port, 5) > 1
    finally:
        listener.close()


def test_nobody_there_is_said_with_the_address() -> None:
    listener = Listener("127.0.0.1")
    listener.close()
    with pytest.raises(ProbeError, match=rf"127\.0\.0\.1:{listener.port} cannot be reached"):
        round_trip_us("127.0.0.1", listener.port)


@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_a_limited_link_shows_its_limit() -> None:
    """Between two namespaces: bytes that are still queued when the look begins would show as more."""
    probe = [sys.executable, "-m", "experiments.probe_tcp"]
    with netns.network(2) as network:
        one, other = network.nodes
        argv = [*other.prefix, *probe, "listen", other.address]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listening:
            assert listening.stdout is not None
            where = listening.stdout.readline().strip()
            network.limit(0.2)
            argv = [*one.prefix, *probe, "measure", where, "4", "0.5"]
            done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
            assert listening.stdin is not None
            listening.stdin.close()
    found = json.loads(done.stdout)
    assert 0.1 < found["gbit_s"] < 0.22
    assert found["round_trip_us"] > 1
