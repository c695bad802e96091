"""`handoff compare`: what is called noise, what is not, and what cannot be told."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.compare import Comparison, compare, finding, interval, of_median, series
from experiments.results import ResultError, check
from handoff.cli import app

RESULTS = Path(__file__).parents[2] / "results"
SERVE, KV, GOODPUT = (RESULTS / f"bench-{name}.json" for name in ("serve", "kv", "goodput"))


def edited(path: Path, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    data = json.loads(path.read_text())
    edit(data)
    (folder / "edited.json").write_text(json.dumps(data))
    return folder / "edited.json"


def slower(data: dict[str, Any]) -> None:
    """Handoff's first tokens take three times as long with 2048 tokens."""
    for one in [*data["samples"], *data["rows"]]:
        if (one["system"], one["prompt_tokens"]) == ("handoff", 2048):
            for name in {"ttft_ms", "ttft_ms_p50", "ttft_ratio"} & one.keys():
                one[name] *= 3


@pytest.mark.parametrize("path", [SERVE, KV])
def test_a_row_is_the_median_of_the_samples_it_is_said_to_be_made_of(path: Path) -> None:
    found = series(check(path))
    assert len(found) >= 18
    for key, one in found.items():
        assert one.values, key
        assert median(one.values) == pytest.approx(one.recorded, rel=2e-3, abs=1e-3), key


def test_a_file_does_not_differ_from_itself() -> None:
    for path in (SERVE, KV, GOODPUT):
        found = compare(path, path)
        assert found.rows
        assert {row.finding for row in found.rows} <= {"noise", "too few samples"}
        assert {row.ratio for row in found.rows} == {1.0}
        assert not found.settings
        assert not found.only_a


def test_what_is_slower_is_found_and_nothing_else(tmp_path: Path) -> None:
    found = compare(SERVE, edited(SERVE, tmp_path, slower))
    worse = {(row.row, row.measure): row for row in found.rows if row.finding == "worse"}
    assert set(worse) == {("handoff/2048", "ttft_ms"), ("handoff/2048", "ttft_ratio")}
    for row in worse.values():
        assert row.ratio == pytest.approx(3.0)
        assert row.interval is not None
        assert 1 < row.interval[0] <= 3 <= row.interval[1]
    back = compare(tmp_path / "edited.json", SERVE)
    assert {row.row for row in back.rows if row.finding == "better"} == {"handoff/2048"}


def test_an_interval_is_the_same_every_time_and_shrinks_with_samples() -> None:
    few, many = [1.0, 1.1, 0.9, 1.2, 0.8], [1.0, 1.1, 0.9, 1.2, 0.8] * 20
    assert interval(few, few) == interval(few, few)
    wide, narrow = interval(few, few), interval(many, many)
    assert wide is not None
    assert narrow is not None
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert interval(few, [0.0] * 5) is None


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert of_median([]) is None
    assert of_median(values[-5:]) is None
    assert of_median(values[-6:]) == (1, 6)
    assert of_median(values[-9:]) == (2, 8)
    assert of_median(values) == (40, 61)


def test_higher_rates_and_lower_times_are_better() -> None:
    assert finding((1.1, 1.2), True) == finding((0.8, 0.9), False) == "better"
    assert finding((1.1, 1.2), False) == finding((0.8, 0.9), True) == "worse"
    assert finding((0.9, 1.0), True) == "noise"
    assert finding(None, True) == "too few samples"


def test_rows_with_few_samples_are_not_judged(tmp_path: Path) -> None:
    def fewer(data: dict[str, Any]) -> None:
        data["samples"] = [one for one in data["samples"] if one["repeat"] < 4]

    found = compare(SERVE, edited(SERVE, tmp_path, fewer))
    assert {row.finding for row in found.rows} == {"too few samples"}
    assert {row.samples for row in found.rows} == {(7, 4)}
    assert {row.interval for row in found.rows} == {None}


def test_goodput_of_a_served_load_is_made_of_blocks_of_arrivals(tmp_path: Path) -> None:
    """16 requests in 20 s, of which every other is late; one never came."""

    def served(data: dict[str, Any]) -> None:
        row = {**data["rows"][0], "engine": "fake", "goodput_rps": 0.4, "load_s": 20.0}
        ms = [row["slo"]["ttft_ms"] * (0.5 if i % 2 else 2.0) for i in range(16)]
        requests = [[1.25 * i, 10, 10, ms[i], 1.0, None] for i in range(16)]
        data["rows"] = [row]
        data["samples"] = [
            {**{name: row[name] for name in ("engine", "system", "mix")}, "requests": requests}
        ]
        requests.append([19.0, 10, 10, None, None, "no answer within 90 s"])

    ((_, one),) = series(check(edited(GOODPUT, tmp_path, served))).items()
    assert len(one.values) == 10
    assert mean(one.values) == pytest.approx(one.recorded)


def test_rows_of_only_one_file_and_other_settings_are_told(tmp_path: Path) -> None:
    def other(data: dict[str, Any]) -> None:
        data["host"]["cores"] = 64
        data["rows"] = [row for row in data["rows"] if row["prompt_tokens"] != 256]

    found: Comparison = compare(SERVE, edited(SERVE, tmp_path, other))
    assert found.settings == {"host.cores": (2, 64)}
    assert "handoff/256 ttft_ms" in found.only_a
    assert not found.only_b


def test_other_kinds_and_versions_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ResultError) as caught:
        compare(SERVE, KV)
    assert all(text in str(caught.value) for text in (str(SERVE), str(KV), "'bench-serve'", "'bench-kv'"))
    later = edited(SERVE, tmp_path, lambda data: data.update(schema_version=2))
    with pytest.raises(ResultError) as caught:
        compare(SERVE, later)
    assert all(text in str(caught.value) for text in (str(SERVE), str(later), "version 1", "version 2"))
    with pytest.raises(ResultError, match="schema version 1; measure again"):
        compare(later, later)
    unknown = edited(SERVE, tmp_path, lambda data: data.update(kind="race"))
    with pytest.raises(ResultError, match="'race'; known: bench-goodput"):
        compare(unknown, unknown)


def test_the_command(tmp_path: Path) -> None:
    other = str(edited(SERVE, tmp_path, slower))
    shown = CliRunner().invoke(app, ["compare", str(SERVE), other])
    assert shown.exit_code == 0, shown.output
    assert "handoff/2048    ttft_ratio" in shown.output
    assert "2 worse, 16 noise" in shown.output
    told = CliRunner().invoke(app, ["compare", str(SERVE), other, "--json"])
    assert told.exit_code == 0, told.output
    data = json.loads(told.output)
    assert data["version"] == 1
    assert "bootstrap" in data["method"]
    assert sum(row["finding"] == "worse" for row in data["rows"]) == 2
