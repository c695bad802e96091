import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from experiments import results
from experiments.results import SCHEMA_VERSION, ResultError, Run, check, commit, load, p50, save

RECORDED = sorted((Path(__file__).parents[2] / "results").glob("*.json"))


def a_run(results: dict[str, Any] | None = None) -> Run:
    samples = [{"system": "a", "ms": 1.5}, {"system": "b", "ms": 2.0}]
    return Run.begin("race", {"repeats": 2}).end(results or {"won": "a"}, samples)


def test_a_saved_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    run = a_run()
    save(run, tmp_path / "results" / "race.json")
    assert load(tmp_path / "results" / "race.json", "race") == run


def test_a_file_tells_what_was_measured_with_what_and_where(tmp_path: Path) -> None:
    save(a_run(), tmp_path / "race.json")
    data = json.loads((tmp_path / "race.json").read_text())
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["won"] == "a"
    assert data["parameters"] == {"repeats": 2}
    assert data["samples"][1] == {"system": "b", "ms": 2.0}
    assert abs(datetime.now(UTC) - datetime.fromisoformat(data["started"])) < timedelta(minutes=1)
    assert data["host"]["cores"] >= 1
    assert data["versions"]["ray"]


def test_paths_within_the_project_do_not_tell_where_it_is() -> None:
    project = Path(__file__).parents[2]
    run = Run.begin("race", {"model": str(project / "models" / "tiny"), "other": "/srv/model", "repeats": 2})
    assert run.parameters == {"model": "models/tiny", "other": "/srv/model", "repeats": 2}


def test_saving_leaves_only_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        save(a_run(), tmp_path / "race.json")
    assert [path.name for path in tmp_path.iterdir()] == ["race.json"]


@pytest.mark.parametrize("name", ["kind", "samples", "host"])
def test_results_cannot_hide_what_every_run_has(name: str) -> None:
    with pytest.raises(ResultError, match=name):
        a_run({name: 1}).as_json()


def broken(change: dict[str, Any]) -> str:
    return json.dumps(
        {key: value for key, value in {**a_run().as_json(), **change}.items() if value != "gone"}
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "schema version"),
        (broken({"schema_version": 99}), "schema version"),
        (broken({"kind": "walk"}), "kind 'walk'"),
        (broken({"samples": "gone"}), "'samples' is missing"),
    ],
)
def test_what_is_no_such_run_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=complaint) as caught:
        load(path, "race")
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="cannot be read"):
        load(tmp_path / "none.json", "race")


def test_runs_are_recorded() -> None:
    assert {"bench-kv", "bench-serve", "bench-goodput"} <= {path.stem for path in RECORDED}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_fits_the_schema(path: Path) -> None:
    assert check(path).samples is not None


def test_a_new_run_fits_the_schema_whatever_its_kind(tmp_path: Path) -> None:
    save(a_run(), tmp_path / "race.json")
    assert check(tmp_path / "race.json").kind == "race"


def edited(path: Path, edit: Callable[[dict[str, Any]], object], folder: Path) -> Path:
    data = json.loads(path.read_text())
    edit(data)
    (folder / path.name).write_text(json.dumps(data))
    return folder / path.name


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda data: data["host"].update(cores="two"), r"\$\.host\.cores: 'two' is not of type 'integer'"),
        (lambda data: data.update(started="yesterday"), r"\$\.started: 'yesterday' does not match"),
        (lambda data: data.update(commit="main"), r"\$\.commit: 'main' does not match"),
        (lambda data: data["samples"].append({}), r"\$\.samples\[\d+\]"),
    ],
    ids=["host", "started", "commit", "samples"],
)
def test_what_does_not_fit_is_named(
    path: Path, edit: Callable[[dict[str, Any]], object], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ResultError, match=complaint):
        check(edited(path, edit, tmp_path))


@pytest.mark.parametrize("kind", ["bench-kv", "bench-serve", "bench-goodput"])
def test_every_field_of_a_row_that_is_read_must_be_there(kind: str, tmp_path: Path) -> None:
    (path,) = (path for path in RECORDED if path.stem == kind)
    definition = json.loads((Path(results.__file__).parent / "result.schema.json").read_text())["$defs"][kind]
    fields = definition["properties"]["rows"]["items"]["required"]
    assert len(fields) > 5

    def without(data: dict[str, Any], name: str) -> None:
        data["rows"], data["samples"] = data["rows"][:1], data["samples"][:1]
        del data["rows"][0][name]

    for name in fields:
        with pytest.raises(ResultError, match=rf"rows\[0\].*'{name}' is a required"):
            check(edited(path, lambda data, gone=name: without(data, gone), tmp_path))


def test_the_commit_says_if_the_tree_has_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert commit(tmp_path) is None
    git("init")
    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/run.json"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "--message=first")
    clean = commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "results/run.json").write_text("2")  # what a run writes is no change of what is measured
    assert commit(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert commit(tmp_path) == f"{clean}+changes"


def test_p50_is_the_median() -> None:
    assert p50([3.0, 1.0, 2.0]) == 2.0
    assert p50([1.0, 2.0]) == 1.5
