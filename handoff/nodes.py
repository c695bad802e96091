"""`handoff up`, `handoff status`, `handoff down`: the nodes of a cluster on this machine."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from cluster.errors import NotRunningError
from cluster.file import load
from cluster.local import LocalCluster, clusters, held, running
from cluster.local import down as end
from cluster.local import up as start
from cluster.report import NodeReport, report
from handoff import console

EXAMPLE = """\
name: two-groups
model: ../models/tiny       # a folder, or a hub id
engine: {max_model_len: 4096}
nodes:
  prefill: {role: prefill, cpus: 4, memory: 8GiB}
  decode: {role: decode, count: 2, cpus: 2, slots: 2}
workers:
  prefill: {count: 1, cpus: 4}
  decode: {count: 4, cpus: 1}
"""

Name = Annotated[str | None, typer.Argument(help="Name of the cluster; not needed if only one runs.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the top level."""
    app.command(no_args_is_help=True, epilog=_about_files())(up)
    for command in (status, down):
        app.command()(command)


def up(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The cluster file.")],
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay, and take the nodes down on Ctrl-C.")
    ] = False,
) -> None:
    """Start the nodes of a cluster file on this machine, and return when all are alive.

    Each node is a Ray node of its own. What is wrong with the file, or with this machine for it (ports,
    shared memory, the model, credentials), is said before anything starts. Then `handoff serve FILE` starts
    workers and gateway on them, and `handoff down` ends all.

    Example: [bold]handoff up examples/local.yaml[/bold]
    """
    file = load(path)
    progress = console.progress()
    if foreground:
        with held(file, progress) as cluster:
            _announce(cluster)
            _until_interrupted(cluster.name)
    else:
        _announce(start(file, progress))


def status(name: Name = None) -> None:
    """Show the nodes of the running clusters: roles, addresses, what they have and what is free.

    Example: [bold]handoff status local[/bold]
    """
    found = [_the_one(name)] if name else clusters()
    if not found:
        console.out.print("no cluster runs here; start one with: handoff up FILE")
    for cluster in found:
        console.out.print(_table(cluster, report(cluster)))


def down(name: Name = None) -> None:
    """End a cluster on this machine: all its processes, its shared memory, its temporary files.

    Example: [bold]handoff down local[/bold]
    """
    end(name or _the_one(None).name, console.progress())


def _about_files() -> str:
    """What a cluster file is, for the end of the help; paragraphs of it are kept as they are."""
    lines = "\n\n".join(escape(line) for line in EXAMPLE.splitlines())
    return (
        f"[bold]A cluster file[/bold] with two groups of nodes, three nodes in all:\n\n{lines}\n\n"
        "A worker takes a slot of its role, and its CPUs, on a node. Sizes have units (8GiB, 500MB); those "
        "of times are in the key (ttft_ms, timeout_s). Also: gateway (host, port), transport, s3, tls, "
        "router, slo, hosts, kubernetes. All keys, by example: docs/clusters.md."
    )


def _announce(cluster: LocalCluster) -> None:
    console.out.print(f"{cluster.name} is up at {cluster.address}; end it with: handoff down {cluster.name}")


def _until_interrupted(name: str) -> None:
    console.err.print("Ctrl-C ends it", style="dim")
    try:
        while running(name) is not None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        return
    raise NotRunningError(f"cluster {name!r} ended by itself or by `handoff down`; see `handoff status`")


def _the_one(name: str | None) -> LocalCluster:
    """The cluster called `name`; without a name, the only one that runs."""
    found = clusters()
    names = ", ".join(cluster.name for cluster in found) or "none"
    chosen = [cluster for cluster in found if name in (None, cluster.name)]
    if name is None and len(chosen) > 1:
        raise NotRunningError(f"several clusters run here, so say which: {names}")
    if not chosen:
        raise NotRunningError(f"no cluster{f' called {name!r}' if name else ''} runs here; running: {names}")
    return chosen[0]


def _table(cluster: LocalCluster, nodes: list[NodeReport]) -> Table:
    table = Table(
        title=f"{cluster.name}  {cluster.address}  supervisor {cluster.supervisor_pid}  (free/total)",
        title_justify="left",
        header_style="bold",
        box=None,
    )
    for column in ("node", "role", "address", "state", "cpus", "gpus", "slots", "store"):
        table.add_column(column, no_wrap=True)
    for node in nodes:
        style = {"alive": "green", "dead": "red"}.get(node.state, "yellow")
        table.add_row(
            node.name,
            node.role,
            node.address,
            f"[{style}]{node.state}[/{style}]",
            node.share("CPU"),
            node.share("GPU"),
            node.slots(),
            node.store(),
        )
    return table
