"""`handoff compare`: two recorded runs of one kind, and which of their differences are more than noise."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.text import Text

from handoff import console

if TYPE_CHECKING:
    from experiments.compare import Difference


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(no_args_is_help=True)(compare)


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A recorded run.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another, of the same kind.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Compare two recorded runs row by row: B by A, with a 95 % interval from the raw samples.

    A difference is noise where the interval covers 1. Rows with fewer than 5 samples are not judged.

    Examples:

        handoff compare results/bench-serve.json /tmp/today.json

        handoff compare old.json new.json --json | jq '.rows[] | select(.finding == "worse")'
    """
    from experiments.compare import METHOD
    from experiments.compare import compare as compared

    found = compared(first, second)
    if as_json:
        console.out.print_json(json.dumps(found.as_json()))
        return
    say = console.out.print
    say(f"[bold]{found.kind}[/]: A = {escape(str(first))}, B = {escape(str(second))}")
    for name, (a, b) in found.settings.items():
        say(f"  not the same: {escape(f'{name}: {a} and {b}')}", style="yellow")
    styles = {"better": "green", "worse": "red", "noise": "", "too few samples": "dim"}
    rows = [("row", "measure", "A", "B", "samples", "B by A", "95 %", "B is"), *map(_cells, found.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:  # not a table of rich's: it cuts names to fit 80 columns
        line = [
            cell.rjust(width) if 2 <= index < 7 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        say(Text("  ".join(line).rstrip(), style=styles.get(cells[-1], "bold")))
    for name, missing in (("A", found.only_a), ("B", found.only_b)):
        if missing:
            say(f"only in {name}: {escape(', '.join(missing))}", style="yellow")
    findings: list[str] = [row.finding for row in found.rows]
    told = len(findings) - findings.count("too few samples")
    counts = ", ".join(f"{findings.count(name)} {name}" for name in styles)
    say(f"\n{len(findings)} rows: {counts}. Of {told} rows told, about one in 20 would differ by chance.")
    say(METHOD, style="dim")


def _cells(row: "Difference") -> tuple[str, ...]:
    return (
        row.row,
        row.measure,
        f"{row.a:.5g}",
        f"{row.b:.5g}",
        f"{row.samples[0]}, {row.samples[1]}",
        "" if row.ratio is None else f"{row.ratio:.3f}",
        "" if row.interval is None else f"{row.interval[0]:.3f} to {row.interval[1]:.3f}",
        row.finding,
    )
