"""`handoff up`, `handoff down`: a cluster on this machine, and what it serves."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cluster import preflight
from cluster.errors import NotRunningError
from cluster.file import ClusterFile, load
from cluster.local import LocalCluster, Progress, held, running
from cluster.local import down as end
from cluster.local import up as start
from cluster.network import accepts
from handoff import console, elsewhere, interrupt
from handoff.serve import Engine
from handoff.status import Name, the_one

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


def register(app: typer.Typer) -> None:
    """Add the commands to the top level."""
    app.command(no_args_is_help=True, epilog=_about_files())(up)
    app.command()(down)


def up(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The cluster file.")],
    nodes: Annotated[bool, typer.Option("--nodes", help="Nodes alone.")] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Only the nodes; stay, and take them down on Ctrl-C.")
    ] = False,
    engine: Engine = "vllm",
) -> None:
    """Bring a cluster file up on this machine; return when it serves.

    Each node is a Ray node of its own; on them are the workers and the OpenAI gateway. What is wrong with the
    file, or with this machine for it (ports, shared memory, the model, credentials), is said before anything
    starts. It serves once every worker has loaded the model and every prefill-decode pair has exchanged a
    test block of KV. `handoff status` shows it, `handoff down` ends it.

    Example: [bold]handoff up examples/local.yaml[/bold]
    """
    file = load(path).faked() if engine == "fake" else load(path)
    progress = console.progress()
    interrupt.end_in_order()
    if foreground:
        with held(file, progress) as cluster:
            _announce(cluster)
            _until_interrupted(cluster.name)
    elif nodes:
        _announce(start(file, progress))
    else:
        _require(file)
        _announce(start(file, progress, then=lambda cluster: _serve(cluster, file, progress)))


def down(
    name: Name = None,
    drain_s: Annotated[
        float, typer.Option(help="How long requests that are being answered may take; 0: no time.", min=0)
    ] = 60.0,
) -> None:
    """End a cluster on this machine: all its processes, its shared memory, its temporary files.

    Gateways take no new requests, and what is being answered comes to its end first. Of clusters of `ray up`
    and of KubeRay it says what ends them.

    Example: [bold]handoff down local[/bold]
    """
    name = elsewhere.named(name, "down") if name else the_one(None).name
    progress = console.progress()
    if drain_s and (cluster := running(name)) is not None:
        _drain(cluster, progress, drain_s)
    try:
        end(name, progress)
    except NotRunningError as error:
        raise NotRunningError(f"{error}. {elsewhere.MADE_BY['down']}") from None


def _require(file: ClusterFile) -> None:
    """Raise BringUpError for what would keep it from serving, the bucket last, which takes the longest."""
    if file.s3 is not None:
        from deployments import store

        preflight.require(file)
        store.require(file)


def _serve(cluster: LocalCluster, file: ClusterFile, progress: Progress) -> None:
    """Start workers and gateways, which stay."""
    from deployments.local import start_serving

    serving = start_serving(cluster, file, progress)
    console.out.print(f"[bold]{serving.model}[/] is served at {serving.url}/v1")


def _drain(cluster: LocalCluster, progress: Progress, within_s: float) -> None:
    """What cannot be ended in order, because the head is gone or deaf, is ended anyway."""
    if cluster.nodes[0].process.state != "alive" or not accepts(cluster.address):
        return
    import ray

    from cluster.connect import connect
    from deployments.drain import drain

    try:
        connect(cluster)
        drain({ask.name: ask.role for ask in cluster.file.asks(most=True)}, progress, within_s)
    except Exception as error:
        progress(f"could not wait for what is being answered: {type(error).__name__}: {error}")
    finally:
        ray.shutdown()


def _about_files() -> str:
    """What a cluster file is, for the end of the help; paragraphs of it are kept as they are."""
    lines = "\n\n".join(escape(line) for line in EXAMPLE.splitlines())
    return (
        f"[bold]A cluster file[/bold] with two groups of nodes, three nodes in all:\n\n{lines}\n\n"
        "A worker takes a slot of its role, and its CPUs, on a node. Sizes have units (8GiB, 500MB); those "
        "of times are in the key (ttft_ms, timeout_s). Also: gateway (host, port), transport, s3, tls, "
        "router, slo, roles, hosts, kubernetes. All keys, by example: docs/clusters.md."
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
