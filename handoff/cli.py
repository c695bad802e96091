"""The `handoff` command: one Typer application, made of the modules next to this one.

A sub-command lives in a module of its own. It either exposes `app`, a Typer application that becomes a group
(`handoff model make`), or a function `register(app)` that adds commands to the top level (`handoff up`):

    # handoff/hello.py
    def register(app: typer.Typer) -> None:
        app.command()(hello)

    def hello(name: str) -> None:
        "Say hello. An error of ours that escapes is printed as one line."
        console.out.print(f"hello {name}")

and is named once, in `_COMMANDS` or `_GROUPS` below. Heavy imports (ray, vllm) belong inside the functions.
"""

import os
import sys
from importlib import metadata
from typing import Annotated, Final

import typer

from handoff import (
    bench,
    chaos,
    compare,
    console,
    demo,
    doctor,
    experiment,
    model,
    nodes,
    plan,
    probe,
    render,
    report,
    serve,
    status,
    trace,
    verdict,
)

app = typer.Typer(
    name="handoff",
    help="Disaggregated LLM serving on Ray: prefill and decode on separate nodes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_COMMANDS: Final = (
    demo,
    nodes,
    status,
    render,
    serve,
    trace,
    chaos,
    probe,
    plan,
    verdict,
    compare,
    doctor,
    report,
)
_GROUPS: Final = {"model": model, "bench": bench, "experiment": experiment}


def _print_version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"handoff {metadata.version('handoff')}, ray {metadata.version('ray')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions.")
    ] = False,
) -> None:
    """Disaggregated LLM serving on Ray: prefill and decode on separate nodes."""


for _module in _COMMANDS:
    _module.register(app)
for _name, _group in _GROUPS.items():
    app.add_typer(_group.app, name=_name)


def main() -> None:
    """Run the command line. Errors end it with one clear message and exit code 1.

    HANDOFF_DEBUG=1 shows the traceback as well.
    """
    try:
        app()  # ends the process itself for wrong usage (2) and Ctrl-C (130)
    except Exception as error:
        if os.environ.get("HANDOFF_DEBUG") == "1":
            raise
        console.fail(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
