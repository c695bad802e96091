"""`handoff bench load`: open-loop load on a server that runs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from handoff import console, interrupt

LATE_MS = 20.0


def load(
    url: Annotated[str, typer.Option(help="Of the server, without /v1.")] = "http://127.0.0.1:8000",
    rate: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Requests a second; several times: one load after the other. Default 2."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=2, help="Of each load.")] = 60,
    mix: Annotated[
        str, typer.Option(help="Lengths: prefill-heavy, decode-heavy, balanced or bursty.")
    ] = "balanced",
    prompt_tokens: Annotated[str | None, typer.Option(help="LEAST:MOST, instead of the mix's.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="LEAST:MOST, instead of the mix's.")] = None,
    bursts: Annotated[
        float | None, typer.Option(min=1, help="Burst arrivals at so many times the mean rate; 1: Poisson.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A trace in the Mooncake format instead of a mix.", exists=True, dir_okay=False),
    ] = None,
    shorter: Annotated[float, typer.Option(min=1, help="Divides the trace's lengths.")] = 1,
    most_prompt: Annotated[int, typer.Option(min=1, help="Cuts the trace's prompts, in tokens.")] = 3000,
    ttft_ms: Annotated[float, typer.Option(min=0, help="Objective of the time to first token.")] = 1500,
    tpot_ms: Annotated[float, typer.Option(min=0, help="Objective of the time per token.")] = 60,
    slo_class: Annotated[
        str | None, typer.Option(help="Sent as X-Handoff-Class: Handoff refuses what would miss it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the only one that the server has.")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Holds an API key; default: OPENAI_API_KEY.", exists=True, dir_okay=False),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Send only what OpenAI's API has: answers may end early.")
    ] = False,
    hourly: Annotated[
        float | None, typer.Option(min=0, help="Dollars an hour for one worker: cost of a request.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="How many are paid for.")] = 1,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 1,
    out: Annotated[Path, typer.Option(help="Where the run is written; the plot goes beside it.")] = Path(
        "results/bench-load.json"
    ),
) -> None:
    """Offer open-loop load to a running server: Handoff, or any other with OpenAI's /v1/completions.

    Requests are sent when they are due, however many are open, and times are counted from then: a server
    that stalls cannot look fast. Prompts are token ids.

    Examples: [bold]handoff bench load --rate 2 --rate 4 --rate 8[/bold],
    [bold]handoff bench load --url https://llm.example --trace trace.jsonl --hourly 2.5 --workers 4[/bold]
    """
    interrupt.end_in_order()
    from experiments.load_bench import Parameters, measure
    from experiments.load_plot import draw
    from experiments.open_loop import api_key
    from experiments.results import Run, save
    from experiments.workload import MIXES

    if mix not in MIXES:
        raise typer.BadParameter(f"{mix!r}; known: {', '.join(MIXES)}", param_hint="--mix")
    parameters = Parameters(
        url=url,
        model=model,
        rates=tuple(rate or (2.0,)),
        seconds=seconds,
        mix=mix,
        prompt_tokens=_bounds(prompt_tokens, "--prompt-tokens"),
        output_tokens=_bounds(output_tokens, "--output-tokens"),
        bursts=bursts,
        trace=None if trace is None else str(trace),
        shorter=shorter,
        most_prompt=most_prompt,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        slo_class=slo_class,
        plain=plain,
        hourly=hourly,
        workers=workers,
        seed=seed,
    )
    plot = out.with_suffix(".svg")

    def keep(run: Run) -> None:
        save(run, out)
        plot.write_text(draw(run.results["rows"]), "utf-8")

    run = measure(parameters, api_key(api_key_file), console.progress(), keep)
    _show(run.results["rows"])
    console.out.print(f"\nwritten to {out} and {plot}")


def _bounds(text: str | None, option: str) -> tuple[int, int] | None:
    if text is None:
        return None
    least, _, most = text.partition(":")
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least)):
        raise typer.BadParameter(f"{text!r}; wanted LEAST:MOST tokens, as in 200:1400", param_hint=option)
    return int(least), int(most or least)


def _show(rows: list[dict[str, Any]]) -> None:
    columns = ["offered/s", "good/s", "95 %", "refused", "errors"]
    columns += [f"{what} {share}" for what in ("TTFT", "TPOT", "ITL", "E2E") for share in ("p50", "p99 ms")]
    table = Table(title="What became of the load", title_justify="left", header_style="bold", box=None)
    for column in [*columns, "$ each"]:
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row["goodput_ci95"]
        figures = [f"{row['offered_rps']:.2f}", f"{row['goodput_rps']:.2f}", f"{low:.2f} to {high:.2f}"]
        figures += [str(row["refused"]), str(row["errors"])]
        for what in ("ttft", "tpot", "itl", "e2e"):
            times = (row[f"{what}_ms_p50"], row[f"{what}_ms_p99"])
            figures += ["" if ms is None else f"{ms:.0f}" for ms in times]
        usd = row["usd_per_request"]
        table.add_row(*figures, "" if usd is None else f"{usd:.2g}")
    console.out.print(table)
    for row in rows:
        for text, count in row["said"].items():
            console.err.print(f"{count} of {row['requests']}: {text}", style="yellow", markup=False)
        if (row["client_late_ms_p99"] or 0) > LATE_MS:
            console.err.print(
                f"at {row['offered_rps']:.2f}/s this client was {row['client_late_ms_p99']:.0f} ms late "
                "(p99), which counts as the server's time: give it a core, or offer less",
                style="yellow",
            )
