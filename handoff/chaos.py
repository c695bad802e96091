"""`handoff chaos`: break a cluster of the fake engine at random while requests run, and judge the answers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from handoff import console, interrupt


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(chaos)


def chaos(
    requests: Annotated[int, typer.Option(min=1, help="How many requests are made.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of requests and faults: the same seed draws the same.")] = 0,
    at_once: Annotated[int, typer.Option(min=1, help="How many of them at once.")] = 32,
    pause: Annotated[float, typer.Option(min=0.2, help="Most seconds between two faults.")] = 5.0,
    model: Annotated[
        str | None, typer.Option(help="Local folder with tokenizer and config.json; default: the tiny model.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(help="Write what came of every request there, a JSON line each.")
    ] = None,
) -> None:
    """Kill workers, gateways and nodes, damage and stall KV, at random, under load on the fake engine.

    Clients abort, read slowly, and ask again when their connection breaks. Then every answer is compared
    with what the fake engine answers when nothing goes wrong. Exit code 1 if one is missing or differs.

    Examples:

        handoff chaos --requests 1000

        handoff chaos --seed 7 --history /tmp/history.jsonl
    """
    interrupt.end_in_order()
    from experiments.chaos import Parameters, run
    from experiments.local_pair import local_model

    progress = console.progress()
    parameters = Parameters(
        local_model(model, progress), seed=seed, requests=requests, at_once=at_once, pause_s=pause
    )
    report = run(parameters, progress)
    if history is not None:
        lines = [json.dumps(asdict(outcome)) for outcome in report.history]
        history.write_text("\n".join(lines) + "\n", "utf-8")
    _show(report)
    if report.wrong:
        raise typer.Exit(1)


def _show(report: Any) -> None:
    out = console.out
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(report.faults.items()))
    out.print(
        f"{report.answered} requests answered, {report.left} left by their clients, in {report.seconds:.0f} s"
    )
    out.print(f"faults: {faults}")
    out.print(
        f"connections that broke and were made again: {report.broken}, {report.cut_short} amid an answer"
    )
    out.print(f"workers held nothing {report.settled_s:.1f} s after the last request")
    for process, mbytes in report.grown_mbytes.items():
        out.print(f"{process} grew by {mbytes:.0f} MB in the second half")
    for line in report.wrong[:20]:
        console.err.print(line, style="red")
    lost = len(report.wrong)
    out.print(f"[bold]{lost} of them lost or wrong[/]" if lost else "[bold]nothing is lost or wrong[/]")
