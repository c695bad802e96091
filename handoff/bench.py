"""`handoff bench`: measurements, each one recorded run."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from handoff import console, interrupt

app = typer.Typer(help="Measure on this machine, and record the run.", no_args_is_help=True)

LEDGER_TOLERANCE = 0.02


@app.callback()
def _group() -> None:
    """Measure on this machine, and record the run."""


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="Local folder or hub id; default: the tiny random model.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of requests for each prompt length.")] = 7,
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(help="A prompt length; may be given several times.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Let vLLM compile the model, on both sides; slow to start.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where the run is written.")] = Path("results/bench-serve.json"),
) -> None:
    """Compare Handoff with vLLM's own server: both run at once, and take turns with the same prompts.

    Ratios are medians over pairs of requests; absolute times mean little on a busy machine.

    Example: [bold]handoff bench serve --repeats 7[/bold]
    """
    interrupt.end_in_order()
    from experiments.local_pair import local_model
    from experiments.results import save
    from experiments.serve_bench import Parameters, measure

    progress = console.progress()
    parameters = Parameters(local_model(model, progress), repeats=repeats)
    parameters = replace(parameters, engine={**parameters.engine, "enforce_eager": not compiled})
    if prompt_tokens:
        parameters = replace(parameters, prompt_tokens=tuple(prompt_tokens))
    run = measure(parameters, progress)
    save(run, out)
    _show(run.results)
    console.out.print(f"\nwritten to {out}")


def _show(results: Any) -> None:
    console.out.print(_ratios(results["rows"]))
    console.out.print(_stages("Where the time to the first token goes (ms, medians)", results, "first_token"))
    console.out.print(
        _stages(
            "From the end of prefill to decode's first token (ms, medians; what prefill hides is 0)",
            results,
            "handover",
        )
    )
    for ledger in results["ledger"]:
        everything = ledger["first_token_ms_p50"] | ledger["handover_ms_p50"]
        dearest = sorted(everything, key=lambda stage: -everything[stage])[:4]
        console.out.print(
            f"{ledger['prompt_tokens']:>5} tokens: handover overhead "
            f"{ledger['handover_overhead_ms_p50']:.1f} ms, of which one decode step computes "
            f"{ledger['handover_ms_p50']['first_step']:.1f} ms; dearest: "
            + ", ".join(f"{stage} {everything[stage]:.1f}" for stage in dearest)
        )
        if ledger["ledger_error"] > LEDGER_TOLERANCE:
            console.err.print(
                f"the ledger does not add up: {ledger['ledger_error']:.1%} of the time to first token is "
                "unaccounted for",
                style="bold red",
            )
    idle = ", ".join(f"{name} {percent:.1f} %" for name, percent in results["idle_cpu_percent"].items())
    console.out.print(
        f"same answers: {results['outputs_equal']} of {results['outputs']}; CPU at rest: {idle} of a core; "
        f"the client itself takes {results['client_overhead_ms']:.2f} ms"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _ratios(rows: list[dict[str, Any]]) -> Table:
    title = "Handoff against undivided vLLM (medians; ratios are medians over pairs)"
    columns = ("system", "prompt tokens", "first token ms", "ratio", "per token ms", "ratio", "overhead ms")
    table = _table(title, *columns)
    for row in rows:
        overhead = row["handover_overhead_ms_p50"]
        table.add_row(
            row["system"],
            str(row["prompt_tokens"]),
            f"{row['ttft_ms_p50']:.1f}",
            f"{row['ttft_ratio']:.2f}",
            f"{row['tpot_ms_p50']:.2f}",
            f"{row['tpot_ratio']:.2f}",
            "" if overhead is None else f"{overhead:.1f}",
        )
    return table


def _stages(title: str, results: Any, chain: str) -> Table:
    ledgers = results["ledger"]
    table = _table(title, "stage", *(f"{ledger['prompt_tokens']} tokens" for ledger in ledgers))
    for stage in ledgers[0][f"{chain}_ms_p50"]:
        table.add_row(stage, *(f"{ledger[f'{chain}_ms_p50'][stage]:.2f}" for ledger in ledgers))
    return table
