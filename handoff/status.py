"""`handoff status`: nodes, workers, the ways between them, and the KV that is on its way."""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from cluster.errors import NotRunningError
from cluster.local import LocalCluster, clusters, running
from cluster.network import accepts
from cluster.report import NodeReport, report
from cluster.sizes import show
from handoff import console, elsewhere, interrupt

Name = Annotated[
    str | None,
    typer.Argument(help="Name of the cluster, or its cluster file; not needed if only one runs."),
]
WIDE = 200
_STYLES = {"alive": "green", "ready": "green", "dead": "red", "lost": "red", "absent": "dim"}


def register(app: typer.Typer) -> None:
    """Add the command to the top level."""
    app.command()(status)


def status(
    name: Name = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and show it anew, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two views of --watch.", min=0.1)] = 1.0,
) -> None:
    """Show the running clusters: nodes, workers, the ways that KV takes between them, and what is on its way.

    Of those that `handoff up` or `handoff serve` made on this machine; of others it says what shows them.

    Examples:

        handoff status

        handoff status local --watch
    """
    if watch:
        _watch(the_one(name), every)
        return
    found = [the_one(name)] if name else clusters()
    if not found:
        console.out.print("no cluster runs here; start one with: handoff up FILE")
    for cluster in found:
        with _connected(cluster) as connected:
            _print(_view(cluster, connected))


def _print(view: Group) -> None:
    """Where it is not a terminal, nothing is cut off at a width that nobody has chosen."""
    (console.out if console.out.is_terminal else Console(highlight=False, width=WIDE)).print(view)


def the_one(name: str | None) -> LocalCluster:
    """The cluster called `name`, or that of a cluster file; without a name, the only one that runs."""
    name = None if name is None else elsewhere.named(name, "status")
    found = clusters()
    names = ", ".join(cluster.name for cluster in found) or "none"
    chosen = [cluster for cluster in found if name in (None, cluster.name)]
    if name is None and len(chosen) > 1:
        raise NotRunningError(f"several clusters run here, so say which: {names}")
    if not chosen:
        raise NotRunningError(
            f"no cluster{f' called {name!r}' if name else ''} runs here; running: {names}. "
            f"{elsewhere.MADE_BY['status']}"
        )
    return chosen[0]


def _watch(cluster: LocalCluster, every_s: float) -> None:
    interrupt.end_in_order()
    with contextlib.suppress(KeyboardInterrupt), _connected(cluster) as connected:
        with contextlib.ExitStack() as stack:
            show_it: Any = _print  # one below the other, where it is not a terminal
            if console.out.is_terminal:
                live = stack.enter_context(Live(console=console.out, auto_refresh=False, screen=True))
                show_it = partial(live.update, refresh=True)
            while (now := running(cluster.name)) is not None:
                show_it(_view(now, connected))
                time.sleep(every_s)
        console.out.print(f"{cluster.name} runs no more")


@contextlib.contextmanager
def _connected(cluster: LocalCluster) -> Iterator[bool]:
    """Be a driver of the cluster, if it is far enough for that."""
    if cluster.nodes[0].process.state != "alive" or not accepts(cluster.address):
        yield False
        return
    import ray

    from cluster.connect import connect

    connect(cluster)
    try:
        yield True
    finally:
        ray.shutdown()


def _view(cluster: LocalCluster, connected: bool) -> Group:
    tables: list[Table | str] = [_nodes(cluster, report(cluster))]
    if connected:
        from actors.overview import overview
        from deployments.members import waits

        always = {ask.name for ask in cluster.file.asks()}
        workers = overview({ask.name: ask.role for ask in cluster.file.asks(most=True)})
        workers = [one for one in workers if one.state != "absent" or one.name in always]
        if all(worker.state == "absent" for worker in workers):
            return Group(*tables, "nothing is served; start workers and gateway with: handoff serve FILE\n")
        table = _table("worker", "role", "node", "state", "requests", "waiting", "KV blocks", "KV in flight")
        ways = _table("from", "to", "ways for KV, the best first")
        for worker in workers:
            figures = ["-"] * 4
            if (stats := worker.stats) is not None:
                figures = [str(stats.requests), str(stats.waiting), str(stats.kv_blocks_used)]
                figures += [
                    f"{stats.live_chunks} chunks, {show(stats.live_bytes)}" if stats.live_chunks else "none"
                ]
            table.add_row(worker.name, worker.role, worker.node, _styled(worker.state), *figures)
            for peer, rungs in worker.ways().items():
                ways.add_row(worker.name, peer, _ways(rungs, worker.mapped(peer)))
        lines = (line if name in line else f"{name}: {line}" for name, line in waits().items())
        tables += [table, ways, *lines]
    return Group(*tables)


def _ways(rungs: dict[str, float], mapped: dict[str, float]) -> str:
    """Rates by rung, and what share that is of the map's, where there is one."""
    found = []
    for rung, rate in sorted(rungs.items(), key=lambda rung: -rung[1]):
        share = f" ({rate / mapped[rung]:.2g} of the map)" if rate and rung in mapped else ""
        found.append(f"{rung} {show(rate)}/s{share}" if rate else f"{rung} broken")
    return ", ".join(found)


def _nodes(cluster: LocalCluster, nodes: list[NodeReport]) -> Table:
    table = _table("node", "role", "address", "state", "cpus", "gpus", "slots", "store")
    table.title = f"{cluster.name}  {cluster.address}  supervisor {cluster.supervisor_pid}  (free/total)"
    table.title_justify = "left"
    for node in nodes:
        shares = (node.share("CPU"), node.share("GPU"), node.slots(), node.store())
        table.add_row(node.name, node.role, node.address, _styled(node.state), *shares)
    return table


def _table(*columns: str) -> Table:
    table = Table(header_style="bold", box=None)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _styled(state: str) -> str:
    style = _STYLES.get(state, "yellow")
    return f"[{style}]{state}[/{style}]"
