"""`handoff serve`: workers and gateway on a cluster, until Ctrl-C."""

import contextlib
import threading
from pathlib import Path
from typing import Annotated, Literal

import typer

from handoff import console, interrupt


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(no_args_is_help=True)(serve)


def serve(
    file: Annotated[Path, typer.Argument(help="The cluster file.", exists=True, dir_okay=False)],
    engine: Annotated[
        Literal["vllm", "fake"],
        typer.Option(help="fake: vLLM's scheduler and our KV handover around a model that takes no time."),
    ] = "vllm",
) -> None:
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
    from deployments.local import served  # imports vLLM: some seconds

    with contextlib.suppress(KeyboardInterrupt), served(cluster_file, console.progress()) as serving:
        console.out.print(f"[bold]{serving.model}[/] is served at {serving.url}/v1; press Ctrl-C to stop")
        threading.Event().wait()
