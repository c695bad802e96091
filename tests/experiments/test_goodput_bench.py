"""Loads, traces and the arithmetic of goodput."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.goodput import good_by_block, interval
from experiments.goodput_bench import (
    AGAIN,
    TRACE,
    Parameters,
    begin,
    measure,
    ratios,
    systems,
)
from experiments.goodput_systems import GoodputError
from experiments.results import Run
from experiments.workload import (
    MIXES,
    Arrival,
    Served,
    TraceError,
    arrivals,
    prompt_of,
    read_trace,
    scaled,
    synthetic_trace,
)


@pytest.mark.parametrize("mix", MIXES)
def test_a_load_has_the_rate_and_the_lengths_of_its_mix(mix: str) -> None:
    load = arrivals(MIXES[mix], 10, 200, 1)
    assert 1700 < len(load) < 2300
    assert all(earlier.at <= later.at < 200 for earlier, later in pairwise(load))
    assert all(MIXES[mix].prompt[0] <= one.prompt <= MIXES[mix].prompt[1] for one in load)
    assert all(MIXES[mix].output[0] <= one.output <= MIXES[mix].output[1] for one in load)
    assert load == arrivals(MIXES[mix], 10, 200, 1)


def test_bursts_leave_gaps() -> None:
    load = arrivals(MIXES["bursty"], 10, 40, 1)
    assert {int(one.at % 4.0) for one in load} == {0}  # a quarter of the time, at four times the rate


def test_a_trace_is_written_read_and_scaled(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    synthetic_trace(path, 200, 2.0, 1)
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        *("timestamp", "input_length", "output_length", "hash_ids")
    }
    trace = read_trace(path)
    assert len(trace) == 200
    load = scaled(trace, 8, 10.0, 1000, 10.0)
    assert len(load) == 100
    assert load[-1].at == pytest.approx(10.0)
    assert all(1 <= one.prompt <= 1000 for one in load)
    again = [one for one in trace if sum(other.hash_ids[:1] == one.hash_ids[:1] for other in trace) > 1]
    assert again, "no prefix is shared"


@pytest.mark.parametrize("line", ["{", "[]", '{"timestamp": 1}', '{"timestamp": "x", "input_length": 1}'])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n' + line)
    with pytest.raises(TraceError, match=r"bad\.jsonl, line 2"):
        read_trace(path)


def test_equal_ids_are_equal_prefixes() -> None:
    one = prompt_of(Arrival(0, 150, 1, (1, 2, 3), 64))
    other = prompt_of(Arrival(0, 180, 1, (1, 2, 9), 64))
    assert (len(one), len(other)) == (150, 180)
    assert one[:128] == other[:128]
    assert one[128:150] != other[128:150]


def test_good_is_what_met_both_objectives() -> None:
    arrival = Arrival(0, 1, 5)
    assert Served(arrival, 1.0, 0.05).good(1.0, 0.05)
    assert not Served(arrival, 1.1, 0.05).good(1.0, 0.05)
    assert not Served(arrival, 1.0, 0.06).good(1.0, 0.05)
    assert not Served(arrival, None, None, refused=True).good(1.0, 0.05)


SHORT = Parameters(engines=("simulated",), seconds=4, rounds=2, mixes=("balanced", TRACE))


def test_a_run_has_a_row_for_every_system_and_mix() -> None:
    kept: list[Run] = []
    run = measure(SHORT, lambda line: None, keep=kept.append)
    rows = run.results["rows"]
    assert [(row["mix"], row["system"]) for row in rows] == [
        (mix, system.name) for mix in ("balanced", TRACE) for system in systems(SHORT)
    ]
    assert {"adaptive", "always", "never", "replicas", "threshold 1000"} == {row["system"] for row in rows}
    for row in rows:
        low, high = row["goodput_ci95"]
        assert 0 <= low <= row["goodput_rps"] <= high <= row["offered_rps"] * 2
        assert row["ttft_ms_p50"] <= row["ttft_ms_p99"]
        assert row["slo"] == {"ttft_ms": 1500.0, "tpot_ms": 60.0}
        assert (row["engine"], row["errors"], row["load_s"]) == ("simulated", 0, 8.0)
    ratios = run.results["ratios"]
    assert [ratio["mix"] for ratio in ratios] == ["balanced", TRACE]
    assert [(ratio["again"], ratio["again_ci95"]) for ratio in ratios] == [(1.0, [1.0, 1.0])] * 2, (
        "the simulated engine does the same every time"
    )
    overload = run.results["overload"]
    assert [row["times"] for row in overload] == [1.5, 3.0]
    for row in overload:
        peak = max(other["goodput_rps"] for other in (rows[0], *overload))
        assert row["of_peak"] == pytest.approx(row["goodput_rps"] / peak, abs=1e-3)
    assert [len(run.results["rows"]) for run in kept] == [5, 10, 10, 10]
    json.dumps(run.as_json())


def test_a_threshold_divides_what_is_longer() -> None:
    run = measure(replace(SHORT, overload=False, thresholds=(700, 10_000)), lambda line: None)
    rows = {(row["mix"], row["system"]): row for row in run.results["rows"]}
    some, none = (rows["balanced", f"threshold {tokens}"]["decisions"] for tokens in (700, 10_000))
    assert set(none) == set(rows["balanced", "never"]["decisions"]) == {"never"}
    assert set(some) == {"always", "never"}
    assert some["never"] < none["never"]


def test_a_run_is_continued_where_it_was_interrupted() -> None:
    whole = measure(SHORT, lambda line: None)
    first = measure(replace(SHORT, mixes=("balanced",), overload=False), lambda line: None)
    told: list[str] = []
    run = measure(SHORT, told.append, first)
    assert {line.split(",")[0] for line in told} == {
        *("simulated trace x1", "simulated balanced x1.5", "simulated balanced x3")
    }
    rows = [{**row, "cpu_busy": 0} for row in run.results["rows"]]
    assert rows == [{**row, "cpu_busy": 0} for row in whole.results["rows"]]
    assert run.parameters["mixes"] == ["balanced", TRACE]


def test_a_run_of_something_else_is_not_continued() -> None:
    earlier = begin(SHORT)
    with pytest.raises(GoodputError, match=r"other parameters \(seconds: 4, now 5\); leave --resume out"):
        measure(replace(SHORT, seconds=5), lambda line: None, earlier)
    with pytest.raises(GoodputError, match="other code"):
        measure(SHORT, lambda line: None, replace(earlier, commit="0" * 40))


def test_ratios_are_to_each_to_the_best_and_to_itself() -> None:
    found = ratios({"adaptive": [2, 1], "always": [1, 1], "never": [3, 1], "replicas": [0, 0], AGAIN: [2, 2]})
    assert found["by"] == {"always": 1.5, "never": 0.75, "replicas": None}
    assert (found["best"], found["by_best"], found["again"]) == ("never", 0.75, 1.333)
    low, high = found["by_best_ci95"]
    assert (low, high) == (pytest.approx(2 / 3, abs=1e-3), 1.0), "blocks are drawn in pairs"


def test_intervals_are_of_blocks_and_hold_the_mean() -> None:
    served = [Served(Arrival(at / 10, 1, 2), 0.1 if at % 40 < 20 else 9.0, 0.01) for at in range(400)]
    counts = good_by_block(served, 1.0, 0.1, 40.0)
    assert counts == [20, 0] * 10
    low, high = interval(counts, 40.0)
    assert low < 5.0 < high
    assert high - low > 2.5, "requests of a block are late together: single ones would give half as much"
