"""`handoff bench load`: open-loop load on a server that runs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from handoff import console, interrupt

LATE_MS = 20.0


def load(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the server, without /v1. Several, as NAME=URL: each gets every load, in turn. "
            "Default http://127.0.0.1:8000."
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Requests a second; several times: one load after the other. Default 2."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=2, help="Of each load.")] = 60,
    mix: Annotated[
        list[str] | None,
        typer.Option(
            help="Lengths: prefill-heavy, decode-heavy, balanced, bursty or trace. Several: one after the "
            "other. MIX=0.5 takes half of each rate for it. Default balanced."
        ),
    ] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="LEAST:MOST, instead of the mix's.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="LEAST:MOST, instead of the mix's.")] = None,
    bursts: Annotated[
        float | None, typer.Option(min=1, help="Burst arrivals at so many times the mean rate; 1: Poisson.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="In the Mooncake format, for --mix trace, which is then the default.",
            exists=True,
            dir_okay=False,
        ),
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
    rest: Annotated[float, typer.Option(min=0, help="Seconds before each load in which nobody asks.")] = 0,
    apart: Annotated[
        bool,
        typer.Option(
            "--apart",
            help="Systems of this machine: stop the others while one is asked. Each is started with "
            "HANDOFF_BENCH_SYSTEM=NAME in its environment.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 1,
    out: Annotated[Path, typer.Option(help="Where the run is written; the plot goes beside it.")] = Path(
        "results/bench-load.json"
    ),
) -> None:
    """Offer open-loop load to running servers: Handoff, or any other with OpenAI's /v1/completions.

    Requests are sent when they are due, however many are open, and times are counted from then: a server
    that stalls cannot look fast. Prompts are token ids.

    Examples: [bold]handoff bench load --rate 2 --rate 4 --rate 8[/bold],
    [bold]handoff bench load --url https://llm.example --trace trace.jsonl --hourly 2.5 --workers 4[/bold],
    [bold]handoff bench load --url a=http://a:8000 --url b=http://b:8000 --mix bursty --mix trace=0.8[/bold]
    """
    interrupt.end_in_order()
    from experiments.load_bench import TRACE, Parameters, measure
    from experiments.load_plot import draw
    from experiments.open_loop import api_key
    from experiments.results import Run, save
    from experiments.workload import MIXES

    parameters = Parameters(
        systems=_systems(url or ["http://127.0.0.1:8000"]),
        model=model,
        rates=tuple(rate or (2.0,)),
        seconds=seconds,
        mixes=_mixes(mix or [TRACE if trace else "balanced"], (*MIXES, TRACE)),
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
        rest_s=rest,
        apart=apart,
        seed=seed,
    )
    plot = out.with_suffix(".svg")

    def keep(run: Run) -> None:
        save(run, out)
        plot.write_text(draw(run.results["rows"]), "utf-8")

    run = measure(parameters, api_key(api_key_file), console.progress(), keep)
    _show(run.results["rows"])
    console.out.print(f"\nwritten to {out} and {plot}")


def _systems(given: list[str]) -> dict[str, str]:
    """Return addresses by name; one that has no name is called after its host and port."""
    found: dict[str, str] = {}
    for text in given:
        name, named, url = text.partition("=")
        if not named or "/" in name:
            name, url = text.split("://")[-1].rstrip("/"), text
        if not name or name in found:
            raise typer.BadParameter(
                f"{text!r}: wanted NAME=URL, each name once (there are: {', '.join(found) or 'none'})",
                param_hint="--url",
            )
        found[name] = url
    return found


def _mixes(given: list[str], known: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in given:
        name, _, times = text.partition("=")
        try:
            share = float(times or 1)
        except ValueError:
            share = 0.0
        if name not in known or name in found or not 0 < share < float("inf"):
            raise typer.BadParameter(
                f"{text!r}; wanted MIX or MIX=NUMBER above 0, each mix once; known: {', '.join(known)}",
                param_hint="--mix",
            )
        found[name] = share
    return found


def _bounds(text: str | None, option: str) -> tuple[int, int] | None:
    if text is None:
        return None
    least, _, most = text.partition(":")
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least)):
        raise typer.BadParameter(f"{text!r}; wanted LEAST:MOST tokens, as in 200:1400", param_hint=option)
    return int(least), int(most or least)


def _show(rows: list[dict[str, Any]]) -> None:
    columns = ["system", "mix", "offered/s", "good/s", "95 %", "refused", "errors"]
    columns += [f"{what} {share}" for what in ("TTFT", "TPOT", "ITL", "E2E") for share in ("p50", "p99 ms")]
    table = Table(title="What became of the load", title_justify="left", header_style="bold", box=None)
    for place, column in enumerate([*columns, "$ each"]):
        table.add_column(column, justify="left" if place < 2 else "right")
    for row in rows:
        low, high = row["goodput_ci95"]
        figures = [
            row["system"],
            row["mix"],
            f"{row['offered_rps']:.2f}",
            f"{row['goodput_rps']:.2f}",
            f"{low:.2f} to {high:.2f}",
        ]
        figures += [str(row["refused"]), str(row["errors"])]
        for what in ("ttft", "tpot", "itl", "e2e"):
            times = (row[f"{what}_ms_p50"], row[f"{what}_ms_p99"])
            figures += ["" if ms is None else f"{ms:.0f}" for ms in times]
        usd = row["usd_per_request"]
        table.add_row(*figures, "" if usd is None else f"{usd:.2g}")
    console.out.print(table)
    for row in rows:
        for text, count in row["said"].items():
            said = f"{row['system']}, {row['mix']}: {count} of {row['requests']}: {text}"
            console.err.print(said, style="yellow", markup=False)
        if (row["client_late_ms_p99"] or 0) > LATE_MS:
            console.err.print(
                f"at {row['offered_rps']:.2f}/s this client was {row['client_late_ms_p99']:.0f} ms late "
                "(p99), which counts as the server's time: give it a core, or offer less",
                style="yellow",
            )
