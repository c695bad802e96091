"""`handoff experiment mesh`: what crosses the links, and which node should do what."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from handoff import console, interrupt
from handoff.status import WIDE

FOLDER = Path("results/experiments")


def mesh(
    model: Annotated[
        str | None, typer.Option(help="A local folder or hub id; default: the tiny random model.")
    ] = None,
    gbit_s: Annotated[float, typer.Option(min=0.01, help="Of each node's link, each way.")] = 1.0,
    prompt: Annotated[
        list[int] | None, typer.Option(min=2, help="Prompt tokens; repeat for more. Default: 256 and 2048.")
    ] = None,
    tokens: Annotated[
        tuple[int, int], typer.Option(help="Two lengths of the answers: their difference is a token's part.")
    ] = (9, 65),
    speed: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="Share of the time in which the slow node computes.")
    ] = 0.33,
    requests: Annotated[int, typer.Option(min=1, help="That are counted together.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    out: Annotated[Path, typer.Option(help="Finished cells in this file are not run again.")] = FOLDER
    / "mesh.json",
) -> None:
    """Count what requests and tokens send through the gateway and between workers, and make one node slow.

    Two real workers on hosts of their own (network namespaces: root), a tap on each link: TCP payload and
    round trips for each request and each token, what weights and KV go where, and the time of a request for
    every choice of which node prefills and decodes, one of them slow: docs/experiments.md.

    Examples:

        handoff experiment mesh

        handoff experiment mesh --speed 0.1 --gbit-s 10 --prompt 3000 --out results/mesh.json
    """
    interrupt.end_in_order()
    from experiments.local_pair import local_model
    from experiments.mesh_run import Parameters, measure

    progress = console.progress()
    parameters = Parameters(
        local_model(model, progress),
        gbit_s,
        tuple(prompt or (256, 2048)),
        tokens,
        requests,
        speed,
        repeats,
    )
    run = measure(parameters, out, progress)
    show(run.results)
    console.out.print(f"\nin {out}; next: handoff report {out}")


def show(results: Mapping[str, Any]) -> None:
    """Print tables, what was claimed, and what to do."""
    out = console.out if console.out.is_terminal else Console(highlight=False, width=WIDE)
    table = Table(title="TCP payload on the links", title_justify="left", header_style="bold", box=None)
    columns = (
        "kB a request",
        "bytes a token",
        "round trips a request",
        "a token",
        "everything, kB a request",
    )
    for index, column in enumerate(("between", "prompt", *columns)):
        table.add_column(column, justify="right" if index else "left")
    for row in results["rows"]:
        table.add_row(
            row["pair"],
            str(row["prompt_tokens"]),
            f"{row['bytes_per_request'] / 1e3:.1f}",
            f"{row['bytes_per_token']:.0f}",
            f"{row['round_trips_per_request']:g}",
            f"{row['round_trips_per_token']:g}",
            f"{row['total_bytes_per_request'] / 1e3:.1f}",
        )
    out.print(table)
    table = Table(title="\nWhich node does what", title_justify="left", header_style="bold", box=None)
    for index, column in enumerate(("choice", "first token ms", "per token ms", "all ms", "tokens/s")):
        table.add_column(column, justify="right" if index else "left")
    for row in results["choices"]:
        figures = (row["ttft_ms_p50"], row["tpot_ms_p50"], row["total_ms_p50"], row["tokens_s_p50"])
        table.add_row(row["choice"], *(f"{figure:.1f}" for figure in figures))
    out.print(table)
    console.tell_conclusions(out, "What was claimed", results["conclusions"])
    console.tell_advice(out, results["recommendation"])
