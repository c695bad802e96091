"""`handoff doctor`: is this machine, or are the nodes of a cluster, fit to serve? With what to do if not."""

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from handoff import console

if TYPE_CHECKING:
    from cluster.facts import Facts
    from cluster.file import ClusterFile
    from cluster.findings import Finding, Level

WIDE: Final = 200
_MARKS: Final = {
    "pass": "[green]pass[/]",
    "warn": "[yellow]warn[/]",
    "fail": "[bold red]fail[/]",
    "not applicable": "[dim]n/a[/]",
}


def register(app: typer.Typer) -> None:
    """Add the command to the top level."""
    app.command()(doctor)


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The cluster file: its model, bucket and running cluster."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Of Ray's control store, if not that of the file's cluster."),
    ] = None,
    nccl_log: Annotated[
        list[Path] | None,
        typer.Option(
            help="A log of NCCL_DEBUG=INFO, to prove GPUDirect RDMA; once for each file of the run.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
) -> None:
    """Check that nodes are fit to serve: pass, warn or fail for each item, with the remedy.

    Looks at every node of the file's cluster if it runs (or of that at --address), otherwise at this machine.

    Items: versions, model files, shared memory, limits, clocks, MTU, ports, the bucket, token authentication,
    RDMA devices, NUMA, settings of NCCL and UCX, GPUDirect RDMA: docs/doctor.md. Exit code 1 if one fails.

    Examples:

        handoff doctor

        handoff doctor cluster.yaml --nccl-log allreduce.log

        handoff doctor --address 10.0.0.1:6379 --json
    """
    from cluster.doctor import examine
    from cluster.file import load
    from cluster.nccl_log import read
    from experiments.doctor import read_logs

    file = None if path is None else load(path)
    where, facts, findings = _gathered(file, address)
    findings = [*findings, *examine(facts, read(read_logs(nccl_log)) if nccl_log else None)]
    if as_json:
        data = {
            "version": 1,
            "examined": where,
            "nodes": [asdict(one) for one in facts],
            "findings": [asdict(one) for one in findings],
        }
        console.out.print_json(json.dumps(data))
    else:
        _show(where, findings)
    if any(one.level == "fail" for one in findings):
        raise typer.Exit(1)


def _gathered(file: "ClusterFile | None", address: str | None) -> tuple[str, "list[Facts]", "list[Finding]"]:
    """What was examined, in words; facts; what was found before they were judged."""
    from cluster.findings import Finding
    from cluster.network import accepts
    from cluster.ray_start import HOSTS_TOKEN
    from cluster.running import clusters, running
    from experiments import doctor

    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or HOSTS_TOKEN)
    wanted = address
    if wanted is None and file is not None and file.hosts is not None:
        wanted = f"{file.hosts.head_address}:{file.hosts.port}"
    if wanted is None and file is not None and (cluster := running(file.name)) is not None:
        wanted = cluster.address
    if wanted is None:
        return "this machine", *doctor.here(file)
    token = next((one.token_path for one in clusters() if one.address == wanted), token)
    problem = None
    if not accepts(wanted, 3.0):
        problem = f"nothing answers at {wanted}, where the cluster's control store would be"
        remedy = "bring the cluster up, give its --address, or open that port"
    elif not token.is_file():
        problem = f"{token} is not here, which would hold the cluster's token"
        remedy = "run this on a machine of the cluster, or name the file in RAY_AUTH_TOKEN_PATH"
    if problem is not None:
        facts, findings = doctor.here(None)
        return "this machine", facts, [Finding("answer", "fail", wanted, problem, remedy), *findings]
    import ray

    from cluster.connect import join

    join(wanted, token)
    try:
        return f"the cluster at {wanted}", *doctor.nodes(wanted, file)
    finally:
        ray.shutdown()


def _show(where: str, findings: "list[Finding]") -> None:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("", "item", "node", "found"):
        table.add_column(column, overflow="fold", no_wrap=column == "")
    for one in findings:
        table.add_row(_MARKS[one.level], escape(one.item), escape(one.node), escape(one.found))
    out = console.out if console.out.is_terminal else Console(highlight=False, width=WIDE)
    out.print(f"examined: {escape(where)}\n")
    out.print(table)
    if wrong := [one for one in findings if one.remedy]:
        out.print("\n[bold]What to do[/]")
        for one in wrong:
            out.print(f"  {escape(one.item)} ({escape(one.node)}): {escape(one.remedy)}")
    counts = Counter(one.level for one in findings)
    order: tuple[Level, ...] = ("fail", "warn", "pass", "not applicable")
    out.print("\n" + ", ".join(f"{counts[level]} {level}" for level in order))
