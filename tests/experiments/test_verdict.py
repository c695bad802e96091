"""`handoff verdict`: the fit, the contenders, what a slow link does to the answer, and what is refused."""

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from actors.steps import StepModel
from cluster.file import load as load_cluster_file
from experiments import verdict as verdict_module
from experiments import verdict_run
from experiments.compare import _verdict
from experiments.energy import Watts
from experiments.probe_map import read as read_map
from experiments.probe_map import ways
from experiments.report_tables import _verdict_parts
from experiments.report_verdict import verdict as report_verdict
from experiments.results import check
from experiments.simulate import Plant
from experiments.verdict import (
    UNDIVIDED,
    Parameters,
    VerdictError,
    alone,
    capacity,
    contenders,
    judged,
    objective,
    paired,
    verdict,
)
from experiments.verdict_engine import Measured, fit
from experiments.verdict_run import cluster_file, link_gbit_s
from experiments.workload import MIXES
from handoff.cli import app

STEP = StepModel(8e-3, 1e-3, 2e-4, 1e-8, 0.0)
PLANT = Plant(chunk=512, slots=16, kv_bytes=8192, handover_s=0.02, link_rate=1.25e9)
SHORT = Parameters("m", mixes=("balanced",), seconds=8, loads=9)
MAPS = Path(__file__).parent / "maps"


def test_a_fit_gives_back_what_made_the_times() -> None:
    lengths, counts, chunk = (64, 256, 512, 1024, 2048), (1, 2, 4, 8), 512
    firsts = {one: 5e-3 + STEP.base * -(-one // chunk) + STEP.prefill_s(one, 0) for one in lengths}
    steps = {one: STEP.decode_s(one, 0) for one in counts}
    found = fit(firsts, steps, chunk)
    assert asdict(found) == pytest.approx(asdict(STEP), rel=1e-3, abs=1e-12)


def test_what_would_be_negative_is_nothing() -> None:
    found = fit({64: 0.01, 1024: 0.16, 2048: 0.3}, {1: 0.010, 4: 0.009, 8: 0.008}, 512)
    assert found.sequence == 0
    assert found.base == pytest.approx(0.009, rel=0.15)
    assert min(asdict(found).values()) >= 0


def test_every_split_of_the_workers_is_a_contender() -> None:
    found = contenders(3)
    assert [one.name for one in found] == [
        UNDIVIDED, "1p2d always", "1p2d adaptive", "2p1d always", "2p1d adaptive"
    ]  # fmt: skip
    assert {one.prefills + one.decodes for one in found} == {3}
    assert found[0].policy == "replicas"


def test_objectives_are_multiples_of_an_idle_engine_unless_given() -> None:
    first, each = alone(STEP, MIXES["balanced"], 512)
    slo = objective(SHORT, STEP, MIXES["balanced"], 512)
    assert (slo.ttft_s, slo.tpot_s) == (5 * first, 2 * each)
    given = objective(Parameters("m", ttft_ms=100, tpot_ms=7), STEP, MIXES["balanced"], 512)
    assert (given.ttft_s, given.tpot_s) == (0.1, 0.007)
    assert capacity(STEP, MIXES["balanced"], 4, 16) == 2 * capacity(STEP, MIXES["balanced"], 2, 16)


def row(contender: str, *goodputs: float) -> dict[str, Any]:
    return {
        "contender": contender,
        "goodput_rps_p50": sorted(goodputs)[len(goodputs) // 2],
        "goodputs_rps": goodputs,
    }


@pytest.mark.parametrize(
    ("split", "answer"),
    [
        ((3, 3, 3, 3, 3, 3), "disaggregate, 1p1d always: 1.50 times (1.50 to 1.50)"),
        ((3, 3, 3, 3, 3, 1), "don't: no difference beyond noise: 1.50 times (0.50 to 1.50)"),
        ((1, 1, 1, 1, 1, 1), "don't: 0.50 times (0.50 to 0.50)"),
        ((3, 3, 3), "don't: no difference beyond noise"),  # too few loads to say
    ],
)
def test_the_answer_takes_all_loads_into_account(split: tuple[float, ...], answer: str) -> None:
    plain = row(UNDIVIDED, *[2.0] * len(split))
    found = verdict("balanced", {UNDIVIDED: plain, "1p1d always": row("1p1d always", *split)})
    assert found["answer"] == answer
    assert found["disaggregate"] == answer.startswith("disaggregate")


def test_a_load_that_nobody_serves_has_no_ratio() -> None:
    assert paired([1, 2], [0, 4]) == [0.5]


def test_a_link_too_slow_for_the_kv_changes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding must not be held up, which speaks for a split, until KV takes longer than computing it."""
    said: list[str] = []
    monkeypatch.setattr(verdict_module, "RATES", (0.5,))
    fast = judged(SHORT, STEP, PLANT, said.append)
    slow = judged(SHORT, STEP, Plant(chunk=512, slots=16, kv_bytes=8192, link_rate=1e6), said.append)
    assert said[0].startswith("balanced: disaggregate, 1p1d")
    assert not slow["verdicts"][0]["disaggregate"]
    always = [next(one for one in of["rows"] if one["contender"] == "1p1d always") for of in (fast, slow)]
    assert always[1]["goodput_rps_p50"] < always[0]["goodput_rps_p50"]
    assert fast["rows"][0]["goodputs_rps"] == slow["rows"][0]["goodputs_rps"]  # undivided: no link


def test_the_slowest_link_of_a_map_is_taken() -> None:
    (way,) = ways(read_map(MAPS / "limited-1g.json"))
    assert link_gbit_s(MAPS / "limited-1g.json") == pytest.approx(0.9 * way.gbit_s)


def test_the_cluster_file_of_a_split_is_right(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_file(Parameters("m", workers=3), "1p2d adaptive", "balanced"))
    file = load_cluster_file(path)
    assert [node.name for node in file.each_node()] == ["prefill-0", "decode-0", "decode-1"]
    assert file.router.mode == "adaptive"
    assert yaml.safe_load(path.read_text())["workers"] == {"prefill": {"count": 1}, "decode": {"count": 2}}


@pytest.mark.parametrize("watts", [None, Watts("nvml", "NVIDIA H200", 1.0, 80.0, 400.0, 250.0)])
def test_the_command_ends_with_a_file_or_with_dont(
    watts: Watts | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine alone is not real: its steps are given."""
    config = Path(__file__).parent / "plan_models" / "mistral-7b.json"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(config.read_text())
    samples = [{"what": "step", "at_once": 1, "seconds": 0.01}]
    measured = Measured(STEP, samples, watts, None if watts else "no counter; buy one")
    monkeypatch.setattr(verdict_run.verdict_engine, "measure", lambda *_: measured)
    monkeypatch.setattr(verdict_module, "RATES", (0.3, 0.5))
    argv = ["verdict", str(model), "--mix", "prefill-heavy", "--out", str(tmp_path / "v.json")]
    argv += ["--cluster", str(tmp_path / "cluster.yaml"), "--gbit-s", "0.01", "--seconds", "4"]
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    run = check(tmp_path / "v.json")
    assert run.results["kv_bytes_per_token"] == 131072
    (said,) = run.results["verdicts"]
    assert said["disaggregate"] is (tmp_path / "cluster.yaml").exists()
    told = " ".join(result.stdout.split())
    assert said["answer"] in told
    (line,) = report_verdict([run])[:1]
    assert said["answer"] in line.figures
    rows = run.results["rows"]
    joules = [row["joules_per_request_p50"] for row in rows]
    assert len({len(table.columns) for table in _verdict_parts(run)[0]}) == 1
    assert len(list(_verdict(run))) == len(rows) + sum(one is not None for one in joules)
    if watts is None:
        assert run.results["energy"] == {"watts": None, "missing": "no counter; buy one"}
        assert "no energy: no counter; buy one" in told
        assert "joules" not in told
        assert {*joules, said["energy_ratio"], *(row["joules_per_request"] for row in rows)} == {None}
    else:
        assert "NVIDIA H200 (NVML) takes 80.0 W at rest, 400.0 W in prefill, 250.0 W in decode" in told
        assert "joules" in told
        assert joules[0] is not None
        best = next(row for row in rows if row["contender"] == said["contender"])
        pairs = zip(best["joules_per_request"], rows[0]["joules_per_request"], strict=True)
        assert said["energy_ratio"] == pytest.approx(median(a / b for a, b in pairs), abs=1e-4)
        assert f"at {said['energy_ratio']:.2f} times the energy per request" in told


def test_an_unknown_mix_is_named() -> None:
    result = CliRunner().invoke(app, ["verdict", "--mix", "tea"])
    assert isinstance(result.exception, VerdictError)
    assert "'tea'; one of prefill-heavy" in str(result.exception)
