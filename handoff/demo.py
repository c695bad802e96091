"""`handoff demo`: what Handoff does, in one command, on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from handoff import console, interrupt
from handoff.trace import AFTERWARDS
from handoff.waterfall import known, waterfall

if TYPE_CHECKING:
    from experiments.demo import Outcome

STAGES = (
    ("gateway: tokenise, route", "arrived", "routed"),
    ("prefill: wait for the engine", "routed", "prefill.scheduled"),
    ("prefill: read the prompt", "prefill.scheduled", "prefill.output"),
    ("gateway: first token leaves", "prefill.output", "sent"),
    *AFTERWARDS,
)
"""What the waterfall shows: a line for each (words, moment it begins, moment it ends)."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    model: Annotated[
        str | None, typer.Option(help="Local folder or hub id; default: a tiny random model, made now.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the result is written.")] = Path("results/demo.json"),
) -> None:
    """Bring up two nodes, send real prompts, and compare every answer with an undivided engine.

    Needs no GPU and no download; takes one to two minutes, most of it for engines to start. Ends with exit
    code 1 if an answer differs or anything is left behind.

    Example: [bold]handoff demo --model ~/models/my-model[/bold]
    """
    interrupt.end_in_order()
    progress = console.progress()
    from experiments.demo import demonstrate
    from experiments.local_pair import local_model
    from experiments.results import save

    outcome = demonstrate(local_model(model, progress), progress)
    save(outcome.run, out)
    _show(outcome)
    console.out.print(f"Written to {out}.")
    if not outcome.good:
        raise typer.Exit(1)
    _next(model)


def _show(outcome: "Outcome") -> None:
    from experiments.demo import longest

    shown = longest(outcome.answers)
    record = shown.record
    console.out.print(
        f"\nEvery prompt was read by a vLLM engine on node [bold]{record['prefill_node']}[/] and answered by "
        f"another one on node [bold]{record['decode_node']}[/].\nThe KV cache went from one to the other "
        f"by way of {record['transport']}; no byte of it passed the gateway.\n"
    )
    console.out.print(_answers(outcome))
    console.out.print(f"\n[bold]{shown.title}[/], followed through the cluster:\n")
    for line in waterfall(known(STAGES, shown.record["moments"])):
        console.out.print(line)
    console.out.print(f"\nIt answered: {shown.text.strip()[:160]!r}")
    if outcome.run.parameters["model"].endswith("models/tiny"):
        console.out.print(
            "(the tiny model's weights are random: its words mean nothing, its tokens must agree)"
        )
    console.out.print()
    if all(outcome.matches):
        console.out.print("[green]✓[/] every token is the one that undivided vLLM computed in this same run")
    else:
        console.out.print("[bold red]✗ answers differ from those of undivided vLLM[/]")
    if outcome.left:
        left = ", ".join((*outcome.left.processes, *outcome.left.paths))
        console.out.print(f"[bold red]✗ left behind: {left}[/]")
    else:
        console.out.print(
            "[green]✓[/] both nodes are gone: no process, no object store, no session folder is left"
        )


def _answers(outcome: "Outcome") -> Table:
    table = Table(header_style="bold", box=None)
    table.add_column("request", no_wrap=True)
    for column in ("prompt", "KV moved", "first token", "whole answer", "as undivided"):
        table.add_column(column, justify="right", no_wrap=True)
    for answer, match in zip(outcome.answers, outcome.matches, strict=True):
        kv_bytes = answer.record.get("kv_bytes")
        table.add_row(
            answer.title,
            f"{len(answer.prompt_token_ids)} tokens",
            "-" if kv_bytes is None else f"{kv_bytes / 1e6:.1f} MB",
            "-" if answer.ttft_ms is None else f"{answer.ttft_ms:.0f} ms",
            f"{answer.total_ms:.0f} ms",
            "[green]yes[/]" if match else "[bold red]no[/]",
        )
    return table


def _next(model: str | None) -> None:
    name = Path(model).name if model else "tiny"
    file = "examples/local.yaml" if model is None else "examples/local.yaml   # with your model in `model:`"
    console.out.print(
        "\n[bold]Next[/]\n"
        f"  handoff serve {file}\n"
        "  curl -i localhost:8000/v1/completions -H 'content-type: application/json' \\\n"
        f"""       -d '{{"model": "{name}", "prompt": "def main", "max_tokens": 16}}'\n"""
        "  curl localhost:8000/handoff/requests/ID     # ID from the answer's X-Request-Id\n"
        "  make bench-serve                            # against undivided vLLM, with a ledger",
        markup=True,
    )
