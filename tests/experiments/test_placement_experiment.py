"""`handoff experiment placement`: the matrix, its conclusions, resuming, and one case for real."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments import placement, placement_run
from experiments.compare import compare
from experiments.placement import MATRIX, conclusions, left_out, machine, missing, named, pods, possible, rows
from experiments.placement_run import Parameters, PlacementError, measure
from experiments.report import page, read
from experiments.results import Run, check, save
from handoff.cli import app


def sample(case: str, *seconds: float) -> dict[str, Any]:
    (of,) = (one for one in MATRIX if one.cell == case)
    assert len(seconds) == len(of.loaders)
    return {"case": case, "loaders": list(of.loaders), "seconds": list(seconds)}


TWO = pods(2)
PUBLISHED = [
    sample("store 1 x1", 5.4),
    sample("store 2 x1", 2.59),
    sample("store 3 x1", 2.1),
    sample("store 4 x4", 2.6, 2.6, 7.8, 7.8),
    *(sample(f"store 5 x{count}", *[5.4 * count] * count) for count in range(1, 6)),
    *(sample(f"s3 2 x{count}", *[5.4] * count) for count in range(1, 5)),
    sample("s3 4 x3", 10.8, 10.8, 5.4),
]


def test_the_matrix_has_the_seven_cases() -> None:
    names = {case.name for case in MATRIX}
    assert names == {*(f"store {number}" for number in range(1, 6)), "s3 2", "s3 4"}
    assert [len(case.loaders) for case in MATRIX if case.name == "store 5"] == [1, 2, 3, 4, 5]
    for case in MATRIX:
        if case.name in ("store 5", "s3 2"):  # each on its own machine, none on the source's
            assert len({machine(pod) for pod in case.loaders} - {"0"}) == len(case.loaders)
    assert len({case.cell for case in MATRIX}) == len(MATRIX)


def test_pods_and_cases_follow_the_machines() -> None:
    assert pods(6) == ["0a", "0b", "0c", "1a", "1b", "2a", "3a", "4a", "5a"]
    assert pods(2) == ["0a", "0b", "0c", "1a", "1b"]
    assert {case.cell for case in possible(pods(2), ("s3",))} == {"s3 2 x1"}
    assert {"case": "store 5 x5", "reason": "there is no pod 5a"} in left_out(pods(5))
    assert len(left_out(pods(2))) + len(possible(pods(2))) == len(MATRIX)


def test_nodes_of_a_cluster_are_pods_by_their_machines() -> None:
    """The machine with the most nodes has the source, so that as many cases as can be are possible."""
    found = named({"x": ["d"], "y": ["c", "a", "b"], "z": ["f", "e"]})
    assert found == {"0a": "a", "0b": "b", "0c": "c", "1a": "e", "1b": "f", "2a": "d"}
    assert len(possible(found)) == len(MATRIX) - 5  # no machines 3, 4 and 5
    assert [case.cell for case in possible(named({"x": ["only"]}))] == ["store 3 x1", "store 3 x2"]


def test_the_published_figures_bear_out_the_published_conclusions() -> None:
    found = conclusions(rows(PUBLISHED), 1.0, 564)
    assert len(found) == 6
    assert all(one.holds and one.why is None for one in found)


def test_what_does_not_hold_says_why() -> None:
    flat = [sample(f"store 5 x{count}", *[1.0] * count) for count in range(1, 6)]
    (one,) = conclusions(rows(flat), 1.0, 64)
    assert not one.holds
    assert "pass it on" in str(one.why)
    (one,) = conclusions(rows(flat), None, 64, loopback=True)
    assert "no limit" in str(one.why)


def test_rows_are_medians_over_loaders_and_repeats() -> None:
    taken = [sample("store 4 x4", 1, 2, 6, 7), sample("store 4 x4", 2, 2, 8, 9)]
    (line,) = rows(taken)
    assert line["by_machine_s_p50"] == {"0": 2.0, "1": 7.5}
    assert line["slowest_s_p50"] == 8.0
    assert line["samples"] == 2


def model(tmp_path: Path) -> str:
    (tmp_path / "a.safetensors").write_bytes(b"weights" * 1000)
    return str(tmp_path)


class Recorder:
    """Stands in for pods that run, and notes what they are asked."""

    no_s3, nbytes, names = None, 7000, dict.fromkeys(TWO, "pod")

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.asked: list[str] = []
        self.interrupted_at = interrupted_at

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def load(self, case: placement.Case) -> dict[str, Any]:
        self.asked.append(case.cell)
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        return sample(case.cell, *[1.0] * len(case.loaders))


def test_an_interrupted_experiment_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_run.netns, "missing", lambda: None)
    out, wanted = tmp_path / "out.json", Parameters(model(tmp_path), machines=2, repeats=1, media=("store",))
    recorders: list[Recorder] = []

    def pods_up(*_: object) -> Recorder:
        recorders.append(Recorder(None if recorders else 4))
        return recorders[-1]

    monkeypatch.setattr(placement_run, "_own", pods_up)
    with pytest.raises(KeyboardInterrupt):
        measure(wanted, out, print)
    assert len(check(out).samples) == 3
    run = measure(wanted, out, print)
    cells = [case.cell for case in possible(TWO, ("store",))]
    assert [*recorders[0].asked[:3], *recorders[1].asked] == cells
    assert run.results["not_measured"] == left_out(TWO, ("store",))
    before = out.read_text()
    assert measure(wanted, out, print).results == run.results  # nothing is brought up
    assert len(recorders) == 2
    assert out.read_text() == before


def test_another_model_or_link_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_run.netns, "missing", lambda: None)
    monkeypatch.setattr(placement_run, "_own", lambda *_: Recorder())
    out, folder = tmp_path / "out.json", model(tmp_path)
    only: Any = {"machines": 2, "repeats": 1, "media": ("s3",)}
    measure(Parameters(folder, gbit_s=1.0, **only), out, print)
    said: list[str] = []
    run = measure(Parameters(folder, gbit_s=2.0, **only), out, said.append)
    assert said[0] == f"{out} has other parameters; beginning anew"
    assert run.parameters["gbit_s"] == 2.0
    assert missing(run.samples, possible(TWO, ("s3",)), 1) == []


def test_mistakes_name_the_option_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="handoff model make"):
        measure(Parameters(str(tmp_path), gbit_s=None), tmp_path / "out.json", print)
    result = CliRunner().invoke(app, ["experiment", "placement", "--medium", "tape"])
    assert isinstance(result.exception, PlacementError)
    assert "'tape'; one of store, s3" in str(result.exception)


def test_a_run_is_drawn_and_compared(tmp_path: Path) -> None:
    lines = rows(PUBLISHED)
    run = Run.begin(
        "placement", {"machines": 6, "gbit_s": 1.0, "cluster": None, "repeats": 1, "media": ["store", "s3"]}
    )
    told = [asdict(one) for one in conclusions(lines, 1.0, 564)]
    results = {
        "model_bytes": 564_000_000,
        "pods": {"0a": "pod 0a"},
        "rows": lines,
        "conclusions": told,
        "not_measured": [],
    }
    save(run.end(results, PUBLISHED), tmp_path / "placement.json")
    assert {one.finding for one in compare(*[tmp_path / "placement.json"] * 2).rows} == {"too few samples"}
    text = page(read([tmp_path / "placement.json"]))
    assert "store 5 x3" in text
    assert "5.40 s" in text  # beside the published 5.4


@pytest.mark.cluster
def test_two_pods_move_a_model_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the store, on loopback; every loader's checksum is compared inside."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").write_bytes(bytes(range(256)) * (4 << 12))
    cases = tuple(case for case in MATRIX if case.cell in ("store 2 x1", "store 3 x1"))
    monkeypatch.setattr(placement, "MATRIX", cases)  # two pods instead of five
    wanted = Parameters(str(tmp_path / "model"), 2, None, None, 1, ("store",))
    run = measure(wanted, tmp_path / "out.json", print)
    assert json.loads((tmp_path / "out.json").read_text())["model_bytes"] == 4 << 20
    assert [row["case"] for row in run.results["rows"]] == ["store 2 x1", "store 3 x1"]
    assert check(tmp_path / "out.json").results["conclusions"]
