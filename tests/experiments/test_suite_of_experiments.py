"""Experiments after each other: what is done is not done again, and what fails does not stop the others."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.results import Run, load
from experiments.suite import Step, done, run_all
from handoff import experiment
from handoff.cli import app

HERE = Path(__file__).parent


def step(kind: str, asked: list[str], fails: bool = False, resumes: bool = False, **parameters: Any) -> Step:
    def run(_: Path) -> Run:
        asked.append(kind)
        if fails:
            raise ValueError(f"{kind} is broken")
        return Run.begin(kind, {name: list(value) for name, value in parameters.items()}).end(
            {"won": kind}, []
        )

    return Step(kind, parameters, run, resumes)


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    asked: list[str] = []
    said: list[str] = []
    steps = [step("a", asked, sizes=(1, 2)), step("b", asked, sizes=(3,))]
    assert run_all(tmp_path, steps, said.append) == {}
    assert run_all(tmp_path, steps, said.append) == {}
    assert asked == ["a", "b"]
    assert said[-1] == f"b (2 of 2): {tmp_path / 'b.json'} is there; delete it to measure again"
    assert load(tmp_path / "a.json").results == {"won": "a"}


def test_other_parameters_are_measured_and_files_of_others_are_no_excuse(tmp_path: Path) -> None:
    asked: list[str] = []
    run_all(tmp_path, [step("a", asked, sizes=(1,))], print)
    other = step("a", asked, sizes=(2,))
    assert not done(other, tmp_path / "a.json")
    run_all(tmp_path, [other], print)
    (tmp_path / "a.json").write_text("{")
    run_all(tmp_path, [other], print)
    assert asked == ["a"] * 3


def test_what_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    asked: list[str] = []
    failed = run_all(tmp_path, [step("a", asked, fails=True), step("b", asked)], print)
    assert failed == {"a": "ValueError: a is broken"}
    assert asked == ["a", "b"]
    assert not (tmp_path / "a.json").exists()


def test_one_that_resumes_is_always_asked(tmp_path: Path) -> None:
    asked: list[str] = []
    steps = [step("a", asked, resumes=True)]
    run_all(tmp_path, steps, print)
    run_all(tmp_path, steps, print)
    assert asked == ["a", "a"]


def test_the_command_writes_a_page_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner is real, on a stored map; what fails the first time is all that runs the second time."""
    given = {
        "model": str(HERE / "plan_models" / "mistral-7b.json"),
        "map": str(HERE / "maps" / "limited-1g.json"),
    }
    machines = HERE.parents[1] / "examples" / "machines.yaml"
    asked: list[str] = []

    def steps(*_: Any, **__: Any) -> list[Step]:
        def plan(_: Path) -> Run:
            asked.append("plan")
            return experiment._planned(given["model"], machines, Path(given["map"]), given)

        return [step("race", asked, fails="race" not in asked), Step("plan", given, plan)]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "_steps", steps)
    first = CliRunner().invoke(app, ["experiment", "all"])
    assert first.exit_code == 1
    assert "replicas-2" in Path("results/report.html").read_text()
    second = CliRunner().invoke(app, ["experiment", "all"])
    assert second.exit_code == 0, second.output
    assert asked == ["race", "plan", "race"]
