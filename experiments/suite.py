"""Several experiments after each other, each with its file: what has been done is not done again. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.results import ResultError, Run, check, load, save


@dataclass(frozen=True, slots=True)
class Step:
    """One experiment.

    Attributes:
        kind: of its run; its file is called that.
        parameters: the run's, all of them: a file with others is measured anew.
        run: does it. It gets the path of the file.
        resumes: it looks itself at what is in the file, and does the rest.

    """

    kind: str
    parameters: Mapping[str, Any]
    run: Callable[[Path], Run]
    resumes: bool = False


def run_all(folder: Path, steps: Sequence[Step], progress: Callable[[str], None]) -> dict[str, str]:
    """Run the steps whose file is not there; returns why each that failed did. Others go on after one."""
    failed = {}
    for number, step in enumerate(steps, 1):
        path = folder / f"{step.kind}.json"
        where = f"{step.kind} ({number} of {len(steps)})"
        if not step.resumes and done(step, path):
            progress(f"{where}: {path} is there; delete it to measure again")
            continue
        progress(f"{where}: begins")
        try:
            save(step.run(path), path)
            check(path)
        except Exception as error:  # the others do not depend on it
            failed[step.kind] = f"{type(error).__name__}: {error}"
            progress(f"{where}: failed: {failed[step.kind]}")
    return failed


def begun(kind: str, parameters: Mapping[str, Any], path: Path, progress: Callable[[str], None]) -> Run:
    """Return the run in a file if it has these parameters, ``repeats`` aside, to go on; else a new one."""
    new = Run.begin(kind, json.loads(json.dumps(dict(parameters))))
    if not path.exists():
        return new
    old = load(path, kind)
    same = {**old.parameters, "repeats": 0} == {**new.parameters, "repeats": 0}
    if not same:
        progress(f"{path} has other parameters; beginning anew")
    return old if same else new


def done(step: Step, path: Path) -> bool:
    """Whether a file holds a step's run, with the same parameters."""
    try:
        run = load(path, step.kind)
    except ResultError:
        return False
    wanted = Run.begin(step.kind, json.loads(json.dumps(dict(step.parameters)))).parameters
    return run.parameters == wanted
