"""`handoff experiment head-to-head`: the published ways against ours, phase by phase."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from handoff import console, interrupt
from handoff.status import WIDE

FOLDER = Path("results/experiments")


def head_to_head(
    model: Annotated[
        str | None,
        typer.Option(help="A folder or hub id that transformers reads; default: the kv-heavy random model."),
    ] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(help="Prompt tokens; repeat for more. Default: 256 and 871.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 17,
    gbit_s: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Of the link, each way; repeat for more. Default: 10 and 1."),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Both nodes on loopback, no limits. Not root.")
    ] = False,
    users: Annotated[
        list[int] | None,
        typer.Option(min=1, max=64, help="Users at once; repeat for more. Default: 1, 4 and 16."),
    ] = None,
    user_mbytes: Annotated[int, typer.Option(min=1, max=1024, help="KV of each of those.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps; auto: what is there.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    out: Annotated[Path, typer.Option(help="Finished cells in this file are not run again.")] = FOLDER
    / "head-to-head.json",
) -> None:
    """Prefill here, decode there: pickles over TCP, Ray's object store, our transports, each node alone.

    A published report's table, phase by phase, with its figures beside: the same model, prompts and link
    for all, iperf3 on that link in the same run, every answer compared with that of one node alone. Then
    encodings without a network, and many users in one process against a process each: docs/experiments.md.

    Examples:

        handoff experiment head-to-head

        handoff experiment head-to-head --gbit-s 25 --prompt 4000 --users 8 --out results/head.json

        handoff experiment head-to-head --local --model /srv/models/llama --device cuda
    """
    interrupt.end_in_order()
    from experiments.head_run import Parameters, measure

    progress = console.progress()
    links: tuple[float | None, ...] = (None,) if local else tuple(gbit_s or (10.0, 1.0))
    parameters = Parameters(
        model=heavy_model(model, progress),
        prompts=tuple(prompt or (256, 871)),
        tokens=tokens,
        links=links,
        users=tuple(users or (1, 4, 16)),
        user_mbytes=user_mbytes,
        repeats=repeats,
        device=which_device(device),
    )
    run = measure(parameters, out, progress)
    show(run.results)
    console.out.print(f"\nin {out}; next: handoff report {out}")


def heavy_model(model: str | None, progress: Any) -> str:
    """Return the model: what was given, or one whose KV is as large as a 7B model's, made if need be."""
    if model is None:
        from experiments.models import make

        return str(make(Path("models/kv-heavy"), "kv-heavy", progress))
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def which_device(asked: str) -> str:
    """Return the device of both nodes; raises ``HeadError`` if it is not there."""
    import torch

    from experiments.head_run import HeadError

    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked == "auto":
        return next((name for name in ("cuda", "mps") if there[name]), "cpu")
    if not there.get(asked, False):
        known = ", ".join(name for name, is_there in there.items() if is_there)
        raise HeadError(f"--device is {asked!r}; there is: {known}")
    return asked


def show(results: Mapping[str, Any]) -> None:
    """Print tables, what the report concluded, and what to do."""
    from experiments.head import ALONE, COLUMNS, PUBLISHED, WAYS, sums

    out = console.out if console.out.is_terminal else Console(highlight=False, width=WIDE)
    rows = results["rows"]
    for link, prompt in dict.fromkeys((row["link"], row["prompt_tokens"]) for row in rows):
        here = [row for row in rows if (row["link"], row["prompt_tokens"]) == (link, prompt)]
        here.sort(key=lambda row: (*ALONE, *WAYS).index(row["case"]))
        size = max(row["kv_bytes"] for row in here) / 1e6
        title = f"{link}, {prompt} prompt tokens, {size:.0f} MB of KV (ms, medians; shares of iperf3 in %)"
        table = console.figures(title, "way", *(name for name, _ in COLUMNS))
        for row in here:
            table.add_row(row["case"], *(_figure(sums(row)[key]) for _, key in COLUMNS))
        for name, figures in PUBLISHED.items():
            table.add_row(f"[dim]published: {name}[/]", *(_figure(figures.get(key)) for _, key in COLUMNS))
        out.print(table)
    table = console.figures(
        "\nEncodings of the longest prompt's KV", "encoding", "encode ms", "decode ms", "MB"
    )
    for one in results["encodings"]:
        numbers = (one["encode_ms_p50"], one["decode_ms_p50"], one["bytes"] / 1e6)
        table.add_row(one["case"], *(_figure(number) for number in numbers))
    out.print(table)
    table = console.figures(
        "\nMany users at once: Gbit/s", "way", "users", "one process", "a process each", "ratio"
    )
    for one in results["users"]:
        rates = (one["one_gbit_s_p50"], one["several_gbit_s_p50"], one["several_by_one"])
        table.add_row(one["case"], str(one["users"]), *(_figure(rate) for rate in rates))
    out.print(table)
    for one in results["links"]:
        out.print(f"iperf3 on {one['link']}, {one['streams']} streams: {one['gbit_s_p50']:.2f} Gbit/s")
    console.tell_conclusions(out, "What the report concluded", results["conclusions"])
    console.tell_advice(out, results["recommendation"])
    for one in results["not_measured"]:
        console.err.print(f"not measured: {one['case']}: {one['reason']}", style="yellow")


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
