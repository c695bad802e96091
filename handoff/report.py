"""`handoff report`: recorded runs as one page."""

from pathlib import Path
from typing import Annotated

import typer

from handoff import console

RESULTS = Path("results")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES]...", help="Recorded runs; default: results/*.json."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the page is written.")] = RESULTS / "report.html",
) -> None:
    """Write one HTML page: the verdict, published figures beside the measured ones, tables and plots.

    The page needs nothing from anywhere else; it can be mailed, and read on a phone.

    Examples:

        handoff report

        handoff report results/bench-serve.json results/bench-kv.json --out report.html
    """
    from experiments.report import page, read

    runs = read(files or sorted(RESULTS.glob("*.json")))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(runs), "utf-8")
    console.out.print(f"written to {out}: {', '.join(path.name for path, _ in runs)}")
