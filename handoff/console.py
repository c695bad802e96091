"""Where the command line prints: results to standard output, progress and errors to standard error."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(error: Exception) -> None:
    """Print `error` as a message, not as a traceback. What is not one of our errors is named by its type."""
    ours = any(kind.__name__.endswith("Error") and _is_ours(kind) for kind in type(error).__mro__)
    message = str(error) if ours and str(error) else f"{type(error).__name__}: {error}"
    err.print(Text.assemble(("error: ", "bold red"), message))
    if not ours:
        err.print("this may be a mistake in handoff; HANDOFF_DEBUG=1 shows where it came from", style="dim")


def tell_conclusions(to: Console, title: str, conclusions: Sequence[Mapping[str, Any]]) -> None:
    """Print the claims of a published report, the figures here, and which of them hold."""
    to.print(f"\n[bold]{title}[/]")
    for one in conclusions:
        mark = "[green]holds[/]" if one["holds"] else "[yellow]does not hold[/]"
        why = f" Why: {one['why']}." if one.get("why") else ""
        to.print(f"  {mark}: {escape(one['claim'])}: {escape(one['figures'])}.{escape(why)}")


def tell_advice(to: Console, lines: Sequence[str]) -> None:
    """Print what an experiment ends with."""
    to.print("\n[bold]What to do[/]")
    for line in lines:
        to.print(f"  {escape(line)}")


def figures(title: str, *columns: str) -> Table:
    """Return a table whose first column is words, and the others figures."""
    table = Table(title=title, title_justify="left", header_style="bold", box=None)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def progress() -> Callable[[str], None]:
    """A function that prints lines with the seconds since this call."""
    began = time.monotonic()

    def line(text: str) -> None:
        err.print(Text.assemble((f"{time.monotonic() - began:6.1f} s  ", "dim"), text))

    return line


def _is_ours(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in {"handoff", "experiments", "deployments", "actors", "cluster", "kv"}
