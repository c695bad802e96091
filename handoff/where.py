"""`handoff experiment where-time-goes`: compute, copy, wait and transfer of a tensor-parallel prefill."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from handoff import console, interrupt
from handoff.status import WIDE

FOLDER = Path("results/experiments")


def where_time_goes(
    model: Annotated[
        str | None, typer.Option(help="A local folder or hub id; default: the tiny random model.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=2, help="Prompt tokens.")] = 2048,
    gbit_s: Annotated[
        list[float] | None,
        typer.Option(
            min=0, help="Of each rank's link, each way; 0: no limit; repeat for more. Default: 0, 1 and 0.2."
        ),
    ] = None,
    chunk: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a step; repeat for more. Default: 256, 512, 1024 and 2048."),
    ] = None,
    buffer_kib: Annotated[
        list[int] | None,
        typer.Option(
            min=4, help="Of sockets at most, beside the kernel's own; repeat for more. Default: 64 and 16384."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    traces: Annotated[
        Path | None, typer.Option(help="A folder for every profile: chrome://tracing and Perfetto show them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Finished cells in this file are not run again.")] = FOLDER
    / "where-time-goes.json",
) -> None:
    """Profile a prefill of two tensor-parallel ranks over a slow link: compute, copy, wait, transfer.

    One vLLM engine, a rank each on two hosts of their own (network namespaces: root), all-reduces by gloo
    over a limited link. Every step of the prefill is taken apart from both ranks' profiles; chunks, buffers
    and links are swept, and what the planner predicts stands beside what was measured: docs/experiments.md.

    Examples:

        handoff experiment where-time-goes

        handoff experiment where-time-goes --gbit-s 0.1 --chunk 512 --traces traces --out results/where.json
    """
    interrupt.end_in_order()
    from experiments.local_pair import local_model
    from experiments.where_run import Parameters, measure

    progress = console.progress()
    links = tuple(one or None for one in ((0.0, 1.0, 0.2) if gbit_s is None else gbit_s))
    parameters = Parameters(
        local_model(model, progress),
        prompt,
        links,
        tuple(sorted(chunk or (256, 512, 1024, 2048))),
        tuple(size << 10 for size in sorted(buffer_kib or (64, 16384))),
        repeats,
    )
    run = measure(parameters, out, progress, traces)
    show(run.results)
    console.out.print(f"\nin {out}; next: handoff report {out}")


def show(results: Mapping[str, Any]) -> None:
    """Print tables, the published figures beside, and which claims hold."""
    from experiments.where import COLUMNS, PUBLISHED_CELLS, STEP_COLUMNS, cells_of, steps_of, title_of

    out = console.out if console.out.is_terminal else Console(highlight=False, width=WIDE)
    rows = results["rows"]
    for link in dict.fromkeys(row["link"] for row in rows):
        here = [row for row in rows if row["link"] == link]
        table = console.figures(title_of(here[0], results["links"]), "chunk", *COLUMNS)
        for row in here:
            table.add_row(*cells_of(row))
        table.add_row(*(f"[dim]{cell}[/]" for cell in PUBLISHED_CELLS))
        out.print(table)
    if (chosen := steps_of(rows)) is not None:
        name, steps = chosen
        table = console.figures(f"\nStep by step, {name} (ms, medians)", "step", *STEP_COLUMNS)
        for cells in steps:
            table.add_row(*cells)
        out.print(table)
    console.tell_conclusions(out, "What the report said", results["conclusions"])
