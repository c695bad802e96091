"""`handoff model`: models to try things with."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from handoff import console

app = typer.Typer(help="Make small models to try things with.", no_args_is_help=True)


class Preset(StrEnum):
    """Shapes that `experiments.models` can make."""

    TINY = "tiny"
    KV_HEAVY = "kv-heavy"


@app.callback()
def _group() -> None:
    """Make small models to try things with."""


@app.command()
def make(
    path: Annotated[Path, typer.Argument(help="Folder to write; must not exist, unless --force.")],
    preset: Annotated[Preset, typer.Option(help="Shape of the model.")] = Preset.TINY,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in the folder.")] = False,
) -> None:
    """Write a model with random weights, and its tokenizer, in the Hugging Face layout.

    The text it generates means nothing; its speed is that of a trained model of the same shape.

    Example: [bold]handoff model make examples/models/tiny --preset tiny[/bold]
    """
    from experiments import models

    models.make(path, preset.value, progress=console.progress(), force=force)
    console.out.print(str(path))
