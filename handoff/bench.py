"""`handoff bench`: measurements, each one recorded run."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from handoff import console, interrupt
from handoff.load import load as _load

app = typer.Typer(help="Measure on this machine, and record the run.", no_args_is_help=True)
app.command("load")(_load)

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


@app.command()
def kv(
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="same-node, cross-node, cross-node-10g or cross-node-1g; may be given several times."
        ),
    ] = None,
    mbytes: Annotated[
        list[int] | None, typer.Option(min=1, help="KV of one request, 2**20 bytes; several times.")
    ] = None,
    transport: Annotated[
        list[str] | None, typer.Option(help="tcp, plasma ...; may be given several times.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is measured.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="1, 16 and 109 MB, two rounds.")] = False,
    out: Annotated[Path, typer.Option(help="Where the run is written; the plot goes beside it.")] = Path(
        "results/bench-kv.json"
    ),
) -> None:
    """Measure how fast KV crosses from one paged cache into another, against what the link can do.

    Cross-node links are network namespaces of this machine: they need root, iproute2 and iperf3.

    Example: [bold]handoff bench kv --quick --link cross-node[/bold]
    """
    interrupt.end_in_order()
    from experiments.kv_bench import Parameters, measure
    from experiments.kv_plot import draw
    from experiments.results import save

    parameters = Parameters(rounds=rounds)
    if quick:
        parameters = replace(parameters, mbytes=(1, 16, 109), rounds=2, pieces=False)
    if link:
        parameters = replace(parameters, links=tuple(link))
    if mbytes:
        parameters = replace(parameters, mbytes=tuple(mbytes))
    if transport:
        parameters = replace(parameters, transports=tuple(transport))
    run = measure(parameters, console.progress())
    save(run, out)
    plot = out.with_suffix(".svg")
    plot.write_text(draw(run.results["rows"]), "utf-8")
    _show_rates(run.results)
    console.out.print(f"\nwritten to {out} and {plot}")


@app.command()
def goodput(
    engine: Annotated[
        list[str] | None, typer.Option(help="fake or simulated; may be given several times; default: fake.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=4, help="Of each load.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Loads for each system and mix.")] = 2,
    mix: Annotated[list[str] | None, typer.Option(help="A mix; may be given several times.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A trace in the Mooncake format; default: synthetic.", exists=True, dir_okay=False),
    ] = None,
    shorter: Annotated[float, typer.Option(min=1, help="Divides the trace's lengths.")] = 6,
    threshold: Annotated[
        list[int] | None,
        typer.Option(
            help="Also route by dividing longer prompts; may be given several times; default: 1000."
        ),
    ] = None,
    overload: Annotated[bool, typer.Option(help="Offer adaptive 1.5 and 3 times as much as well.")] = True,
    seed: Annotated[int, typer.Option(help="Of the loads.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what the file at --out has, and measure the rest.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where the run is written.")] = Path("results/bench-goodput.json"),
) -> None:
    """Compare router modes under open-loop load: requests a second that meet their objectives.

    Engines are fake ones behind the real gateway, or simulated; no model is computed. The file is written
    after each mix: what was interrupted goes on with --resume.

    Examples: [bold]handoff bench goodput --mix bursty[/bold], [bold]handoff bench goodput --resume[/bold]
    """
    interrupt.end_in_order()
    from experiments.goodput_bench import KIND, Parameters, measure
    from experiments.results import load, save

    progress = console.progress()
    parameters = Parameters(
        seconds=seconds,
        rounds=rounds,
        shorter=shorter,
        trace=None if trace is None else str(trace),
        overload=overload,
        seed=seed,
    )
    if engine:
        parameters = replace(parameters, engines=tuple(engine))
    if mix:
        parameters = replace(parameters, mixes=tuple(mix))
    if threshold:
        parameters = replace(parameters, thresholds=tuple(threshold))
    if "fake" in parameters.engines:
        from experiments.local_pair import local_model

        parameters = replace(parameters, model=local_model(None, progress))
    earlier = load(out, KIND) if resume and out.exists() else None
    run = measure(parameters, progress, earlier, lambda run: save(run, out))
    _show_goodput(run.results)
    console.out.print(f"\nwritten to {out}")


@app.command()
def gateway(
    model: Annotated[
        str | None, typer.Option(help="Local folder or hub id; default: the tiny random model.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is measured.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds, fewer requests.")] = False,
    out: Annotated[Path, typer.Option(help="Where the run is written.")] = Path("results/bench-gateway.json"),
) -> None:
    """Measure what the gateway costs beside the engines: CPU time, latency, the router's decisions.

    The engines are fake and take no time. vLLM's own server, on the same fake engine, is measured in turns
    with it; CPU time is that of the process which listens.

    Example: [bold]handoff bench gateway --quick[/bold]
    """
    interrupt.end_in_order()
    from experiments.gateway_bench import Parameters, measure
    from experiments.local_pair import local_model
    from experiments.results import save

    progress = console.progress()
    parameters = Parameters(local_model(model, progress), rounds=rounds)
    if quick:
        parameters = replace(parameters, rounds=2, requests=200, streams=(1, 64), alone=10, decisions=300)
    run = measure(parameters, progress)
    save(run, out)
    _show_gateway(run.results)
    console.out.print(f"\nwritten to {out}")


def _show_gateway(results: Any) -> None:
    ratios = {(ratio["case"], ratio.get("streams")): ratio["cpu_ratio"] for ratio in results["ratios"]}
    columns = ("case", "streams", "system", "CPU us", "by vLLM's", "1/CPU s", "p50 ms", "added ms")
    table = console.figures("What serving costs beside the engine (medians)", *columns)
    for row in results["rows"]:
        streams = row.get("streams")
        ratio = ratios.get((row["case"], streams)) if row["system"] == "handoff" else None
        figures = (streams, row["system"], row.get("cpu_us_p50"), ratio, row.get("per_cpu_s"))
        times = (row.get("ms_p50"), row.get("added_ms_p50"))
        table.add_row(row["case"], *("" if one is None else str(one) for one in (*figures, *times)))
    console.out.print(table)
    for routed in results["router"]:
        console.out.print(
            f"router, {routed['workers']:>4} workers: a decision takes {routed['decision_us_p50']:.0f} us "
            f"(p99 {routed['decision_us_p99']:.0f}), of which the choice {routed['choice_us_p50']:.0f} us"
        )


def _show_goodput(results: Any) -> None:
    columns = ("mix", "system", "goodput/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "refused")
    for engine in dict.fromkeys(row["engine"] for row in results["rows"]):
        table = console.figures(f"Requests a second in time, {engine} engines", *columns)
        for row in sorted(results["rows"], key=lambda row: row["mix"]):
            if row["engine"] == engine:
                times = [row[f"{what}_ms_{share}"] for what in ("ttft", "tpot") for share in ("p50", "p99")]
                figures = [f"{row['goodput_rps']:.2f}", *("" if ms is None else f"{ms:.0f}" for ms in times)]
                table.add_row(row["mix"], row["system"], *figures, str(row["refused"]))
        console.out.print(table)
    for ratio in results["ratios"]:
        console.out.print(
            f"{ratio['engine']}, {ratio['mix']}: adaptive by the best of the others ({ratio['best']}) "
            f"{ratio['by_best']} {ratio['by_best_ci95']}; adaptive by itself {ratio['again']} "
            f"{ratio['again_ci95']}"
        )
    for row in results["overload"]:
        console.out.print(
            f"{row['engine']}, {row['mix']} at {row['times']:g} times the rate: {row['goodput_rps']:.2f}/s, "
            f"{row['of_peak']} of the peak; {row['refused']} of {row['requests']} refused"
        )


def _show_rates(results: Any) -> None:
    title = "KV from paged cache to paged cache (medians; MB = 2**20 bytes)"
    columns = (
        "link",
        "transport",
        "MB",
        "at once",
        "Gbit/s",
        "limit",
        "ratio",
        "CPU s/GB",
        "peak MB",
        "checked",
    )
    table = console.figures(title, *columns)
    for row in sorted(results["rows"], key=lambda row: (row["link"], row["mbytes"], row["concurrency"])):
        table.add_row(
            row["link"],
            row["transport"],
            str(row["mbytes"] or ""),
            str(row["concurrency"]),
            f"{row['gbit_s_p50']:.2f}",
            "" if row["limit_gbit_s"] is None else f"{row['limit_gbit_s']:.2f}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            "" if row["cpu_s_per_gb"] is None else f"{row['cpu_s_per_gb']:.2f}",
            str(row.get("peak_mbytes", "")),
            "yes" if row["checksum"] else "",
        )
    console.out.print(table)
    for missing in results["not_measured"]:
        reason = missing["reason"].strip().splitlines()[-1]
        console.err.print(f"not measured: {missing['what']} on {missing['link']}: {reason}", style="yellow")


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


def _ratios(rows: list[dict[str, Any]]) -> Table:
    title = "Handoff against undivided vLLM (medians; ratios are medians over pairs)"
    columns = ("system", "prompt tokens", "first token ms", "ratio", "per token ms", "ratio", "overhead ms")
    table = console.figures(title, *columns)
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
    table = console.figures(title, "stage", *(f"{ledger['prompt_tokens']} tokens" for ledger in ledgers))
    for stage in ledgers[0][f"{chain}_ms_p50"]:
        table.add_row(stage, *(f"{ledger[f'{chain}_ms_p50'][stage]:.2f}" for ledger in ledgers))
    return table
