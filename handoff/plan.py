"""`handoff plan`: which layout a model should have on given machines, before anything is deployed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from cluster.sizes import parse
from experiments import plan_file
from experiments.plan import Load, Plan, Prediction
from experiments.plan import plan as planned
from experiments.plan_machines import load as load_machines
from experiments.plan_map import with_map
from experiments.plan_model import PlanError, read
from handoff import console


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(no_args_is_help=True)(plan)


def plan(
    model: Annotated[str, typer.Argument(help="A model folder, a config.json, or a hub id in the cache.")],
    cluster: Annotated[
        Path, typer.Option(metavar="FILE", help="The machines: devices and links; see docs/planning.md.")
    ],
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")] = 4096,
    output: Annotated[int, typer.Option(min=2, help="Tokens that a request generates.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that are always in the system.")] = 8,
    goal: Annotated[
        Literal["latency", "ttft", "tpot", "throughput"],
        typer.Option(help="What to rank by; latency: of a whole request."),
    ] = "latency",
    weights: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of the weight files, such as 215GB.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--map", metavar="MAP", help="What `handoff probe` found: its rates replace the links'."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write a cluster file for the first layout here.")] = None,
    layout: Annotated[str | None, typer.Option(help="Write the cluster file for this one instead.")] = None,
) -> None:
    """Predict which layout suits a model: single node, tensor, pipeline, or prefill/decode apart.

    Nothing is downloaded or started: the model's config.json and a file about the machines are enough.

    Examples:

        handoff plan ./llama --cluster machines.yaml

        handoff plan ./llama --cluster machines.yaml --prompt 16384 --output 64 --goal ttft

        handoff plan ./llama --cluster machines.yaml --map results/probe.json

        handoff plan ./llama --cluster machines.yaml --layout split-1p1d --out cluster.yaml
    """
    shape, machines = read(model), load_machines(cluster)
    if measured is not None:
        machines = with_map(machines, measured)
    if weights is not None:
        try:
            shape = shape.weighing(parse(weights))
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"--weights is {weights!r}: {error}") from error
    result = planned(shape, machines, Load(prompt, output, concurrency), goal)
    if as_json:
        console.out.print_json(json.dumps(as_data(result)))
    else:
        _show(result)
        if measured is not None:
            console.out.print(f"\nLinks between nodes are those of {measured}, where it has them.")
    if layout is not None and out is None:
        raise PlanError(f"--layout is {layout!r}, and there is no --out; give the path of the cluster file")
    if out is not None:
        one = _chosen(result, layout)
        content = plan_file.cluster_file(one, machines, model, machines.assume.chunk_tokens)
        note = f"{one.layout.name} by `handoff plan`: predicted, not measured. See docs/planning.md."
        out.write_text(plan_file.shown(content, note), "utf-8")
        console.err.print(f"written to {out}; next: handoff serve {out}")


def as_data(result: Plan) -> dict[str, Any]:
    """The whole plan, as JSON has it: seconds, bytes, tokens."""
    shape, load = result.shape, result.load
    return {
        "version": 1,
        "model": {
            "name": shape.name,
            "parameters": shape.parameters,
            "weights_bytes": round(shape.weights),
            "kv_bytes_per_token": shape.kv_per_token,
        },
        "load": {"prompt": load.prompt, "output": load.output, "concurrency": load.concurrency},
        "goal": result.goal,
        "ranked": [
            {
                "layout": one.layout.name,
                "ttft_s": one.ttft,
                "tpot_s": one.tpot,
                "latency_s": one.latency,
                "tokens_s": one.tokens_s,
                "longest_context": one.longest,
                "largest_part": one.largest,
                "ttft_parts_s": dict(one.parts),
                "engines": {
                    role: [
                        [
                            {
                                "layers": stage.layers,
                                "devices": [f"{device.node}/{device.index}" for device in stage.devices],
                            }
                            for stage in engine.stages
                        ]
                        for engine in engines
                    ]
                    for role, engines in (("prefill", one.layout.prefill), ("decode", one.layout.decode))
                },
                "memory": [dict(row) for row in one.memory],
                "notes": list(one.notes),
                "cluster_file": plan_file.inexpressible(one) or "yes",
            }
            for one in result.ranked
        ],
        "rejected": [asdict(one) for one in result.rejected],
        "links": [asdict(one) for one in result.links],
        "assumptions": list(result.assumptions),
    }


def _chosen(result: Plan, layout: str | None) -> Prediction:
    if not result.ranked:
        raise PlanError("--out: no layout fits, so there is none to write; the reasons are above")
    if layout is None:
        first = result.ranked[0]
        other = next((one for one in result.ranked if plan_file.inexpressible(one) is None), None)
        if (why := plan_file.inexpressible(first)) and other is not None:
            raise PlanError(
                f"--out: the first layout, {first.layout.name}, cannot be a cluster file: {why}; the best "
                f"that can is --layout {other.layout.name}"
            )
        return first
    names = [one.layout.name for one in result.ranked]
    if layout not in names:
        raise PlanError(f"--layout is {layout!r}; possible here: {', '.join(names) or 'none'}")
    return result.ranked[names.index(layout)]


def _show(result: Plan) -> None:
    say, shape, load = console.out.print, result.shape, result.load
    say(
        f"[bold]{escape(shape.name)}[/]: {shape.parameters / 1e9:.2f} B parameters, "
        f"{shape.weights / 1e9:.1f} GB of weights, {shape.kv_per_token / 1e3:.1f} kB of KV a token"
    )
    say(f"{load.prompt} tokens in, {load.output} out, {load.concurrency} requests at once\n")
    if result.ranked:
        say(_layouts(result))
        for one in result.ranked:
            for note in one.notes:
                say(f"[bold]{one.layout.name}[/]: {escape(note)}")
    else:
        say("[bold red]no layout fits[/]")
    if result.rejected:
        say("")
        table = console.figures("Rejected", "layout", "why")
        table.columns[1].justify = "left"
        for no in result.rejected:
            table.add_row(no.name, escape(no.reason))
        say(table)
    if result.links:
        say("")
        say(_links(result))
    say("\n[bold]Assumed, because the files do not say[/]")
    for line in result.assumptions:
        say(f"  {escape(line)}", style="yellow")
    if not result.assumptions:
        say("  nothing")


def _layouts(result: Plan) -> Table:
    columns = (
        *("layout", "TTFT s", "TPOT ms", "latency s", "tokens/s"),
        *("weights GB", "KV GB", "longest", "largest part of TTFT"),
    )
    table = console.figures(f"Layouts, best {result.goal} first (predicted)", *columns)
    table.columns[0].min_width = max(len(one.layout.name) for one in result.ranked)
    table.columns[4].min_width = len("tokens/s")
    for one in result.ranked:
        table.add_row(
            one.layout.name,
            f"{one.ttft:.3f}",
            f"{one.tpot * 1e3:.1f}",
            f"{one.latency:.2f}",
            f"{one.tokens_s:.1f}",
            f"{max(row['weights_bytes'] for row in one.memory) / 1e9:.1f}",
            f"{min(row['kv_bytes'] for row in one.memory) / 1e9:.1f}",
            str(one.longest),
            f"{one.largest} {one.parts[one.largest] / one.ttft:.0%}",
        )
    return table


def _links(result: Plan) -> Table:
    columns = (
        "KV from",
        "to",
        "Gbit/s",
        "move s",
        "prefill there s",
        "pays from tokens",
        "hidden from Gbit/s",
    )
    table = console.figures(f"Moving the KV of {result.load.prompt} tokens against computing it", *columns)
    for link in result.links:
        table.add_row(
            link.source,
            link.target,
            f"{link.gbit_s:.3g}",
            f"{link.transfer:.3f}",
            f"{link.prefill:.3f}",
            "never" if link.tokens is None else f"{link.tokens:.0f}",
            f"{link.needed_gbit_s:.3g}",
        )
    return table
