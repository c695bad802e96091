"""`handoff experiment pipeline`: bring vLLM up in pipeline stages over Ray nodes, and check every item."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape

from handoff import console, interrupt
from handoff.status import WIDE

FOLDER = Path("results/experiments")
PUBLISHED: Final = (
    "126 layers, 128 heads, 3 GPUs on 2 nodes: 42/42/42, no tensor parallel by 3; 72 GB of weights and 24 GB "
    "of KV for each GPU; TCP 198 of 200 Gbit/s with 8 streams; all-reduce 23.0 of 25 GB/s"
)


def pipeline(
    model: Annotated[
        str | None,
        typer.Option(help="A local folder in the Hugging Face layout; default: the tiny random model."),
    ] = None,
    stages: Annotated[
        list[int] | None, typer.Option(min=1, max=16, help="Repeat for more sizes. Default: 1, 2 and 3.")
    ] = None,
    gbit_s: Annotated[float, typer.Option(min=0.01, help="Of each node's link, each way.")] = 1.0,
    local: Annotated[
        bool, typer.Option("--local", help="All nodes on loopback, no limits. Not root.")
    ] = False,
    slow: Annotated[
        float,
        typer.Option(
            min=0.05, max=1.0, help="Share of its time that the slow node computes; 1: no slow node."
        ),
    ] = 0.33,
    prompt: Annotated[
        list[int] | None, typer.Option(min=2, help="Held-out prompts, tokens. Default: 16, 256 and 1500.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of each held-out answer.")] = 17,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Held-out prompts and answers; default: made once, by an undivided engine."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    out: Annotated[Path, typer.Option(help="Finished engines in this file are not run again.")] = FOLDER
    / "pipeline.json",
) -> None:
    """Bring vLLM up in pipeline stages, one on each Ray node, and check it item by item.

    The planner says how layers are split and why; vLLM's Ray executor runs a stage on each node (network
    namespaces with limited links: root); greedy answers are compared, token by token, with those that an
    undivided engine gave before. TCP, round trip and all-reduce between the nodes are reported apart. Then
    the last node is made slow: the planner's uneven split against an even one. Exit code 1 if an item fails:
    docs/experiments.md.

    Examples:

        handoff experiment pipeline

        handoff experiment pipeline --stages 2 --gbit-s 10 --model /srv/models/llama --out results/llama.json

        handoff experiment pipeline --local --slow 1
    """
    interrupt.end_in_order()
    from experiments.local_pair import local_model
    from experiments.pipeline_run import measure

    progress = console.progress()
    parameters = parameters_of(
        local_model(model, progress),
        None if local else gbit_s,
        tuple(stages or (1, 2, 3)),
        slow if slow < 1 else None,
        tuple(prompt or (16, 256, 1500)),
        tokens,
        reference,
        repeats,
    )
    run = measure(parameters, out, progress)
    show(run.results)
    console.out.print(f"\nin {out}; next: handoff report {out}")
    if not all(check["ok"] for row in run.results["rows"] for check in row["checks"]):
        raise typer.Exit(1)


def parameters_of(
    model: str,
    gbit_s: float | None,
    sizes: tuple[int, ...] = (1, 2, 3),
    slow: float | None = 0.33,
    prompts: tuple[int, ...] = (16, 256, 1500),
    tokens: int = 17,
    reference: Path | None = None,
    repeats: int = 3,
) -> Any:
    """Return the experiment's parameters; held-out answers have a file for each model and lengths."""
    from experiments.pipeline_run import Parameters

    lengths = "-".join(map(str, prompts))
    file = reference or Path("results/experiments/references") / f"{Path(model).name}-{lengths}-{tokens}.json"
    return Parameters(model, sizes, gbit_s, slow, prompts, tokens, str(file), repeats)


def show(results: Mapping[str, Any]) -> None:
    """Print the items, times, the fabric, what was claimed, and what to do."""
    out = console.out if console.out.is_terminal else Console(highlight=False, width=WIDE)
    for row in results["rows"]:
        out.print(f"[bold]{escape(row['setup'])}: layers {row['split']}[/] (up after {row['start_s']:.0f} s)")
        for check in row["checks"]:
            mark = "[green]pass[/]" if check["ok"] else "[bold red]FAIL[/]"
            out.print(f"  {mark} {check['item']}: {escape(check['told'])}")
        if row["stages_count"] > 1 and not row["slow"]:
            out.print(f"       tensor parallel {row['stages_count']}: {escape(row['tensor_reason'])}")
    title = "\nOne request at a time (medians; first token and all: longest prompt)"
    columns = ("layers", "weights MB", "KV MB", "KV tokens", "first token ms", "per token ms", "all ms")
    table = console.figures(title, "stages", *columns)
    for row in results["rows"]:
        table.add_row(
            row["setup"],
            row["split"],
            "/".join(f"{stage['weights_bytes'] / 1e6:.1f}" for stage in row["stages"]),
            f"{row['kv_mb_least']:.0f}",
            str(row["kv_tokens"]),
            *(f"{row[f'{name}_ms_p50']:.1f}" for name in ("ttft", "tpot", "total")),
        )
    out.print(table)
    if results["fabric"]:
        title = "\nThe fabric, nothing else running"
        table = console.figures(title, "what", "median", "lowest", "highest", "unit", "way")
        units = {"us": "us", "gbit_s": "Gbit/s", "gbyte_s": "GB/s"}
        for line in results["fabric"]:
            figures = (f"{line[name]:.3g}" for name in ("p50", "low", "high"))
            table.add_row(line["row"], *figures, units[line["unit"]], line["how"] or "")
        out.print(table)
    out.print(f"[dim]published: {PUBLISHED}[/]")
    console.tell_conclusions(out, "What was claimed", results["conclusions"])
    console.tell_advice(out, results["recommendation"])
    for one in results["not_measured"]:
        console.err.print(f"not measured: {one['what']}: {one['reason']}", style="yellow")
