"""`handoff render`: the cluster file as what other tools bring a cluster up from."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from handoff import console


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(no_args_is_help=True)(render)


def render(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The cluster file.")],
    to: Annotated[
        Literal["ray-up"], typer.Option(help="ray-up: machines that are reached by ssh.")
    ] = "ray-up",
    out: Annotated[
        Path | None, typer.Option(help="Where to write it; standard output, unless given.")
    ] = None,
) -> None:
    """Turn a cluster file into one that `ray up` reads. The file needs a `hosts` section.

    Examples:

        handoff render examples/hosts.yaml

        handoff render examples/hosts.yaml --out cluster.ray.yaml && ray up -y cluster.ray.yaml
    """
    from cluster.file import load
    from cluster.ray_up import shown

    text = shown(load(path), path)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, "utf-8")
        console.err.print(f"written to {out}; next: ray up -y {out}")
