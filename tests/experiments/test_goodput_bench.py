"""Loads, traces and the arithmetic of goodput."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.goodput_bench import SYSTEMS, TRACE, Parameters, measure, ratios
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


def test_a_run_has_a_row_for_every_system_and_mix() -> None:
    parameters = Parameters(engines=("simulated",), seconds=4, mixes=("balanced", TRACE))
    run = measure(parameters, lambda line: None)
    rows = run.results["rows"]
    assert [(row["mix"], row["system"]) for row in rows] == [
        (mix, system) for mix in ("balanced", TRACE) for system in SYSTEMS
    ]
    for row in rows:
        low, high = row["goodput_ci95"]
        assert 0 <= low <= row["goodput_rps"] <= high <= row["offered_rps"] * 2
        assert row["ttft_ms_p50"] <= row["ttft_ms_p99"]
        assert row["slo"] == {"ttft_ms": 1500.0, "tpot_ms": 60.0}
        assert (row["engine"], row["errors"]) == ("simulated", 0)
    assert [ratio["mix"] for ratio in run.results["ratios"]] == ["balanced", TRACE]
    json.dumps(run.as_json())


def test_ratios_are_to_each_and_to_the_best() -> None:
    good = {"adaptive": 3.0, "always": 2.0, "never": 4.0, "replicas": 0.0}
    rows = [{"engine": "e", "mix": "m", "system": name, "goodput_rps": rate} for name, rate in good.items()]
    (found,) = ratios(rows)
    assert found["by"] == {"always": 1.5, "never": 0.75, "replicas": None}
    assert found["by_best"] == 0.75
