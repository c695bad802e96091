"""`handoff serve`: workers and gateway on a cluster, until Ctrl-C. `handoff update`: new gateways."""

import contextlib
import threading
from pathlib import Path
from typing import Annotated, Literal

import typer

from handoff import console, interrupt


def register(app: typer.Typer) -> None:
    """Add the command."""
    for command in (serve, update):
        app.command(no_args_is_help=True)(command)


File = Annotated[Path, typer.Argument(help="The cluster file.", exists=True, dir_okay=False)]
Engine = Annotated[
    Literal["vllm", "fake"],
    typer.Option(help="fake: vLLM's scheduler and our KV handover around a model that takes no time."),
]


def serve(file: File, engine: Engine = "vllm") -> None:
    """Serve a cluster file's model: start its workers and the OpenAI gateway, until Ctrl-C.

    Uses the cluster if it is up (`handoff up`), else brings it up and takes it down again at the end.

    Examples:

        handoff serve examples/local.yaml

        handoff serve examples/local.yaml --engine fake

        curl localhost:8000/v1/completions -H 'content-type: application/json' \\
            -d '{"model": "tiny", "prompt": "def main", "max_tokens": 16}'
    """
    from cluster.file import load

    cluster_file = load(file).faked() if engine == "fake" else load(file)
    interrupt.end_in_order()
    from deployments.local import served  # imports Ray

    with contextlib.suppress(KeyboardInterrupt), served(cluster_file, console.progress()) as serving:
        console.out.print(f"[bold]{serving.model}[/] is served at {serving.url}/v1; press Ctrl-C to stop")
        threading.Event().wait()


def update(file: File, engine: Engine = "vllm") -> None:
    """Replace the gateways of a model that is being served, one by one: nothing is lost.

    A new gateway listens before an old one takes no more, and that one answers what it has taken. The workers
    stay as they are; `handoff serve` goes on.

    Example: handoff update examples/local.yaml
    """
    from cluster.file import load

    cluster_file = load(file).faked() if engine == "fake" else load(file)
    interrupt.end_in_order()
    from deployments.local import replace_gateways  # imports Ray

    replace_gateways(cluster_file, console.progress())
