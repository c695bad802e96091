"""`handoff probe`: what the links between the nodes of a cluster can do, and each node itself."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from handoff import console, interrupt
from handoff.status import WIDE, the_one

if TYPE_CHECKING:
    from cluster.file import ClusterFile
    from experiments.probe_map import Drift

OUT = Path("results/probe.json")


def register(app: typer.Typer) -> None:
    """Add the command to the top level."""
    app.command()(probe)


def probe(
    path: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The cluster file; without one, what runs here.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Of Ray's control store, for any other Ray cluster."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement of TCP.")] = 1.0,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Connections at once; several times; default 1, 4, 8.")
    ] = None,
    mbytes: Annotated[int, typer.Option(min=1, help="Of objects, copies, collectives; 2**20 bytes.")] = 64,
    iperf: Annotated[bool, typer.Option(help="Measure with iperf3 too, where it is installed.")] = True,
    budget: Annotated[
        float, typer.Option(min=1, help="No round begins that would end later. Seconds.")
    ] = 600,
    out: Annotated[Path, typer.Option(help="Where the map is written; the heat map goes beside it.")] = OUT,
    against: Annotated[
        Path | None, typer.Option(help="The map to report drift against; default: the one at --out.")
    ] = None,
) -> None:
    """Measure every pair of nodes and each node, and write a map: a table, a heat map, JSON.

    A cluster file whose cluster does not run is brought up for it, without engines, and ended after it. With
    `links:` in the file its nodes are network namespaces with links of those rates (root).

    Measured: round trip, TCP with 1, 4 and 8 connections (and iperf3), Ray's object store, NIXL and the way
    that UCX takes, the file's S3 bucket, memory, GPUs, all-reduce: docs/probe.md.

    Examples:

        handoff probe examples/local.yaml

        handoff probe --address 10.0.0.1:6379 --rounds 3 --no-iperf

        handoff plan ./llama --cluster machines.yaml --map results/probe.json
    """
    interrupt.end_in_order()
    from cluster.file import load
    from experiments.probe import Parameters, measure, nodes_to_probe
    from experiments.probe_map import drift, heat_map, read, too_few
    from experiments.results import save

    file = None if path is None else load(path)
    last = against or (out if out.exists() else None)
    before = None if last is None else read(last)  # before anything starts: it may be no map
    parameters = Parameters(rounds, seconds, tuple(streams or (1, 4, 8)), mbytes, int(iperf), budget)
    progress = console.progress()
    from cluster.nodes import snapshot

    with connected(file, address, progress) as known:
        run = measure(nodes_to_probe(snapshot()), known, parameters, progress)
    save(run, out)
    plot = out.with_suffix(".svg")
    plot.write_text(heat_map(run), "utf-8")
    _show(run.results)
    if before is not None:
        _show_drift(drift(before, run), too_few(before, run), str(last), before.started)
    console.out.print(f"\nwritten to {out} and {plot}")
    console.err.print(f"next: handoff plan MODEL --cluster MACHINES --map {out}")


@contextlib.contextmanager
def connected(
    file: "ClusterFile | None", address: str | None, progress: Callable[[str], None]
) -> "Iterator[ClusterFile | None]":
    """Be a driver of the cluster that is meant; one that does not run lasts as long as the block."""
    import ray

    from cluster.connect import connect
    from cluster.errors import NotRunningError
    from cluster.local import held
    from cluster.running import clusters, running

    with contextlib.ExitStack() as stack:
        if address is not None or (file is not None and file.hosts is not None):
            _join(address, file, progress)
        else:
            if file is None and not clusters():
                raise NotRunningError(
                    "no cluster runs here; give a cluster file, which is brought up for it, or --address"
                )
            cluster = the_one(None) if file is None else running(file.name)
            if cluster is None:
                assert file is not None
                cluster = stack.enter_context(held(file, progress))
            file = cluster.file
            connect(cluster)
        stack.callback(ray.shutdown)
        yield file


def _join(address: str | None, file: "ClusterFile | None", progress: Callable[[str], None]) -> None:
    """Connect to a cluster that was brought up by others, or by `ray up`, once the file's nodes are there."""
    import os

    from cluster.connect import join
    from cluster.errors import NotRunningError
    from cluster.network import accepts
    from cluster.nodes import wait_for_nodes
    from cluster.ray_start import HOSTS_TOKEN

    if address is None:
        assert file is not None
        assert file.hosts is not None
        address = f"{file.hosts.head_address}:{file.hosts.port}"
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or HOSTS_TOKEN)
    if not accepts(address, 3.0):
        raise NotRunningError(
            f"nothing answers at {address}, where the cluster's control store would be; bring it up (docs/"
            f"clusters.md), or give another --address"
        )
    if not token.is_file():
        raise NotRunningError(
            f"{token} is not here, which would hold the cluster's token; run this on a machine of the "
            f"cluster, or name the file in RAY_AUTH_TOKEN_PATH"
        )
    join(address, token)
    if file is not None:
        wait_for_nodes(file, progress)


def _show(results: Any) -> None:
    from experiments.probe_map import SHOWN, UNITS

    table = Table(
        title="What was found (medians; lowest and highest)",
        title_justify="left",
        header_style="bold",
        box=None,
    )
    for column in ("what", "from", "to", "streams"):
        table.add_column(column)
    for column in ("median", "lowest", "highest"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    table.add_column("way", overflow="fold")
    order = list(UNITS)
    for row in sorted(results["rows"], key=lambda row: order.index(row["what"])):
        table.add_row(
            escape(row["what"]),
            escape(row["source"]),
            escape(row["target"] or row["device"] or ""),
            str(row["streams"] or ""),
            *(f"{row[name]:.3g}" for name in ("p50", "low", "high")),
            SHOWN[row["unit"]],
            escape(row["how"] or ""),
        )
    (console.out if console.out.is_terminal else Console(highlight=False, width=WIDE)).print(table)
    for one in results["not_measured"]:
        console.err.print(f"not measured: {one['what']}, {one['where']}: {one['reason']}", style="yellow")


def _show_drift(found: "Sequence[Drift]", too_few: int, file: str, started: str) -> None:
    from experiments.probe_map import SHOWN

    say = console.out.print
    say(f"\n[bold]Against {escape(file)}[/] ({started})")
    for one in found:
        unit = SHOWN[one.unit]
        say(f"  {escape(one.row)}: {one.before:.3g} {unit}, now {one.now:.3g} {unit} ({one.ratio:.2f} times)")
    if not found:
        say("  nothing changed by more than its noise")
    if too_few:
        say(f"  {too_few} rows have fewer than 3 samples, too few to say")
