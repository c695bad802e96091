"""`handoff verdict`: should I disaggregate?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from handoff import console, interrupt

if TYPE_CHECKING:
    from experiments.verdict import Parameters

OUT = Path("results/verdict.json")


def register(app: typer.Typer) -> None:
    """Add the command to the top level."""
    app.command()(verdict)


def verdict(
    model: Annotated[
        str | None, typer.Argument(help="Local folder or hub id; default: the tiny random model.")
    ] = None,
    workers: Annotated[int, typer.Option(min=2, max=8, help="Engines, however they are divided.")] = 2,
    mix: Annotated[
        list[str] | None, typer.Option(help="prefill-heavy, decode-heavy, balanced, bursty; default: all.")
    ] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(min=1, help="Objective; default: 5 times that of an idle engine.")
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(min=0.1, help="Objective; default: 2 times that of an idle engine.")
    ] = None,
    gbit_s: Annotated[
        float, typer.Option(min=0.001, help="Of the link between workers, without --map.")
    ] = 10,
    measured: Annotated[
        Path | None,
        typer.Option("--map", metavar="MAP", help="What `handoff probe` found: its slowest link."),
    ] = None,
    handover_ms: Annotated[float, typer.Option(min=0, help="Fixed time of a handover.")] = 20,
    seconds: Annotated[float, typer.Option(min=2, help="Of each load, on the simulated clock.")] = 20,
    out: Annotated[Path, typer.Option(help="Where the run is written.")] = OUT,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a cluster file here if it pays.")
    ] = None,
) -> None:
    """Should I disaggregate? Equal workers, undivided against every split, by requests served in time.

    Measures the steps of one real engine on this machine (about a minute), then serves the same loads by
    every contender on simulated engines that take such steps, with the real router: docs/verdict.md. Ends
    with a cluster file, or with "don't".

    Examples:

        handoff verdict ./llama --workers 4 --map results/probe.json

        handoff verdict ./llama --mix balanced --ttft-ms 500 --tpot-ms 50 --cluster cluster.yaml
    """
    interrupt.end_in_order()
    from experiments.local_pair import local_model
    from experiments.results import save
    from experiments.verdict import Parameters, VerdictError
    from experiments.verdict_run import cluster_file, link_gbit_s, measure
    from experiments.workload import MIXES

    if unknown := [one for one in mix or () if one not in MIXES]:
        raise VerdictError(f"--mix is {unknown[0]!r}; one of {', '.join(MIXES)}")
    progress = console.progress()
    rate = gbit_s if measured is None else link_gbit_s(measured)
    chosen = Parameters(
        local_model(model, progress),
        workers,
        tuple(mix or MIXES),
        ttft_ms,
        tpot_ms,
        rate,
        handover_ms,
        seconds,
    )
    run = measure(chosen, progress)
    save(run, out)
    _show(run.results, chosen)
    told = [one for one in run.results["verdicts"] if one["disaggregate"]]
    console.out.print(f"\nwritten to {out}")
    if cluster is not None and told:
        best = max(told, key=lambda one: one["ratio"])
        cluster.write_text(cluster_file(chosen, best["contender"], best["mix"]), "utf-8")
        console.out.print(f"{best['contender']} for {best['mix']}: written to {cluster}")
        console.err.print(f"next: handoff serve {cluster}")
    elif cluster is not None:
        console.out.print(f"{cluster} is not written: no mix is served better by a split")


def _show(results: Any, chosen: "Parameters") -> None:
    from experiments.energy import power_told

    step = results["step_s"]
    say = console.out.print
    say(
        f"a step takes {step['base'] * 1e3:.2f} ms, {step['sequence'] * 1e3:.2f} ms more for each sequence "
        f"that decodes, {step['token'] * 1e6:.0f} µs for each prompt token; "
        f"KV {results['kv_bytes_per_token'] / 1e3:.1f} kB a token at {chosen.gbit_s:.3g} Gbit/s"
    )
    say(f"{power_told(results['energy'])}\n")
    energy = results["energy"]["watts"] is not None
    each = ", and joules of each" if energy else ""
    title = f"Requests a second in time, by {chosen.workers} engines{each}"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("mix", "contender"):
        table.add_column(column)
    used = ("joules",) if energy else ()
    for column in ("goodput/s", "95 %", "offered/s", *used, "TTFT ms", "TPOT ms"):
        table.add_column(column, justify="right")
    for row in results["rows"]:
        bounds = row["goodput_rps_ci95"]
        interval = "" if bounds is None else f"{bounds[0]:.2f} to {bounds[1]:.2f}"
        joules = row["joules_per_request_p50"]
        told = () if not energy else ("–" if joules is None else f"{joules:.1f}",)
        figures = (f"{row['goodput_rps_p50']:.2f}", interval, f"{row['offered_rps']:.2f}", *told)
        slo = row["slo"]
        table.add_row(
            row["mix"], row["contender"], *figures, f"{slo['ttft_ms']:.0f}", f"{slo['tpot_ms']:.1f}"
        )
    say(table)
    say("\n[bold]Should I disaggregate?[/] (simulated engines, measured steps)")
    for one in results["verdicts"]:
        say(f"  {one['mix']}: {one['answer']}")
