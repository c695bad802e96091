"""One page of recorded runs: the verdict first, published figures beside, nothing loaded from anywhere.

Everything shown is read from the files; what none of them has is called "not measured".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from experiments import head
from experiments.report_tables import PARTS
from experiments.report_verdict import LINES, verdict
from experiments.results import ResultError, Run, check

HERE: Final = Path(__file__).parent
PUBLISHED: Final = HERE / "published.json"
MB: Final = 2**20


def read(paths: Sequence[Path]) -> list[tuple[Path, Run]]:
    """Return the runs of files in the page's order; ``ResultError`` if one does not fit the schema."""
    if not paths:
        raise ResultError(
            "no recorded runs to report on: make bench-serve (or bench-kv, bench-goodput) first"
        )
    order = list(LINES)
    runs = [(path, check(path)) for path in paths]
    return sorted(runs, key=lambda one: order.index(one[1].kind) if one[1].kind in order else len(order))


def page(runs: Sequence[tuple[Path, Run]]) -> str:
    """Return the page: HTML that is well-formed XML too."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        verdict=verdict([run for _, run in runs]),
        published=published([run for _, run in runs]),
        sections=[_section(path, run) for path, run in runs],
    )


# -- published figures


def published(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the reports with, beside each figure, what was measured here: (where, figure) or nothing."""
    reports: list[dict[str, Any]] = json.loads(PUBLISHED.read_text("utf-8"))
    for report in reports:
        for row in report["rows"]:
            row["here"] = [
                f"{run.started}, {one}" if [other.kind for other in runs].count(run.kind) > 1 else one
                for run in runs
                for one in _beside(run, row["measured"])
            ]
    return reports


def _beside(run: Run, wanted: Mapping[str, Any] | None) -> list[str]:
    if wanted is None or wanted["kind"] != run.kind:
        return []
    found = []
    for row in map(_derived, run.results[wanted.get("rows", "rows")]):
        if all(row[name] == value for name, value in wanted["where"].items()):
            value = row[wanted["field"]]
            where = _where(row)
            if value is not None:
                found.append(f"{where}: {_short(value)} {wanted['unit']}".rstrip())
    return found


def _where(row: Mapping[str, Any]) -> str:
    """What tells a row from the others that stand beside the same published figure."""
    if "chunk_tokens" in row:
        return str(row["case"])
    if "phases_ms_p50" in row:
        return f"{row['link']}, {row['prompt_tokens']} tokens"
    if "setup" in row:
        return str(row["setup"])
    if "pair" in row:
        return f"{row['pair']}, {row['prompt_tokens']} tokens"
    if "choice" in row:
        return str(row["choice"])
    if "link" in row:
        return str(row["link"])
    if "loaders" in row:
        return f"{len(row['loaders'])} loader{'s' if len(row['loaders']) > 1 else ''}"
    if "source" in row:
        return f"{row['source']} > {row['target']}" if row["target"] else str(row["source"])
    return f"{row['prompt_tokens']} tokens"


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the units that the reports use."""
    if "tpot_ms_p50" in row:
        return {**row, "tokens_s": 1e3 / row["tpot_ms_p50"]}
    if "loaders" in row:
        by = {f"machine_{name}": seconds for name, seconds in row["by_machine_s_p50"].items()}
        return {**row, **by, "name": row["case"].rpartition(" x")[0]}
    if any(name in row for name in ("source", "pair", "choice", "chunk_tokens")):
        return dict(row)
    if "phases_ms_p50" in row:
        share = row["transfer_share"]
        return {**row, "share_percent": None if share is None else 100 * share, **head.sums(row)}
    percent = None if row["ratio"] is None else 100 * row["ratio"]
    return {**row, "ms": row["mbytes"] * MB * 8 / row["gbit_s_p50"] / 1e6, "ratio_percent": percent}


# -- a section for each run


def _section(path: Path, run: Run) -> dict[str, Any]:
    parts = PARTS.get(run.kind)
    tables, plots = parts(run) if parts is not None else ([], [])
    facts = {
        "file": path.name,
        "started": run.started,
        "commit": run.commit or "unknown",
        "machine": f"{run.host['cpu']}, {run.host['cores']} cores, {run.host['memory_bytes'] / 1e9:.0f} GB, "
        f"{run.host['system']}, load {run.host['load_average_1m']} at the start",
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "parameters": json.dumps(dict(run.parameters)),
    }
    return {"kind": run.kind, "facts": facts, "tables": [asdict(one) for one in tables], "plots": plots}
