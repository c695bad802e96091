"""`handoff experiment`: the experiments of published reports, on this machine or in namespaces of it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from handoff import console, head, interrupt, mesh, pipeline, where
from handoff.status import WIDE

if TYPE_CHECKING:
    from experiments.placement import Medium
    from experiments.results import Run
    from experiments.suite import Step

app = typer.Typer(
    help="Published experiments again, with the published figures beside.", no_args_is_help=True
)
FOLDER = Path("results/experiments")


@app.callback()
def _group() -> None:
    """Published experiments again, with the published figures beside."""


@app.command()
def placement(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="A cluster file: its nodes are the pods; default: pods of our own."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Of Ray's control store: that cluster's nodes are the pods."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A folder with safetensors files; default: the file's, or the tiny random model."),
    ] = None,
    machines: Annotated[
        int, typer.Option(min=1, max=6, help="Of our own; cases with more are left out.")
    ] = 6,
    gbit_s: Annotated[float, typer.Option(min=0.01, help="Of each of our machines' links, each way.")] = 1.0,
    local: Annotated[
        bool, typer.Option("--local", help="No namespaces, no limits: all pods on loopback. Not root.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="How often each case is measured.")] = 3,
    medium: Annotated[list[str] | None, typer.Option(help="store or s3; default: both.")] = None,
    out: Annotated[Path, typer.Option(help="Finished cases in this file are not run again.")] = FOLDER
    / "placement.json",
) -> None:
    """Move a model from one actor to others, by Ray's object store and by S3, in every placement.

    Seven cases of a published report: loaders in the source's pod, in other pods of its machine, on one to
    five other machines, and mixes. Machines are network namespaces with limited links (root), pods are Ray
    nodes in them, and Ray's custom resources force each actor into its pod: docs/experiments.md. With a
    cluster file, or --address, its nodes are the pods, on whatever machines they are.

    Examples:

        handoff experiment placement

        handoff experiment placement --machines 3 --gbit-s 10 --medium store --out results/ten.json

        handoff experiment placement examples/local.yaml --repeats 5

        ray exec cluster.ray.yaml 'handoff experiment placement hosts.yaml'
    """
    interrupt.end_in_order()
    from experiments.local_pair import local_model
    from experiments.placement import MEDIA
    from experiments.placement_run import Parameters, PlacementError, measure

    media = tuple(one for one in MEDIA if medium is None or one in medium)
    if unknown := [one for one in medium or () if one not in MEDIA]:
        raise PlacementError(f"--medium is {unknown[0]!r}; one of {', '.join(MEDIA)}")
    progress = console.progress()
    if path is None and address is None:
        folder = local_model(model, progress)
        run = measure(
            Parameters(folder, machines, None if local else gbit_s, None, repeats, media), out, progress
        )
    else:
        run = _on_cluster(path, address, model, repeats, media, out, progress)
    _show_placement(run.results, run.parameters)
    console.out.print(f"\nin {out}; next: handoff report {out}")


app.command("head-to-head")(head.head_to_head)
app.command("mesh")(mesh.mesh)
app.command("where-time-goes")(where.where_time_goes)
app.command("pipeline")(pipeline.pipeline)


def _on_cluster(
    path: Path | None,
    address: str | None,
    model: str | None,
    repeats: int,
    media: "tuple[Medium, ...]",
    out: Path,
    progress: Callable[[str], None],
) -> "Run":
    from cluster.file import load
    from experiments.local_pair import local_model
    from experiments.placement_cluster import measure_here
    from handoff.probe import connected

    folder = None if model is None and path is not None else local_model(model, progress)
    with connected(None if path is None else load(path), address, progress) as file:
        name = file.name if file is not None else address
        return measure_here(file, name, folder, repeats, media, out, progress)


def _show_placement(results: Any, parameters: Mapping[str, Any]) -> None:
    gbit_s, cluster = parameters["gbit_s"], parameters["cluster"]
    own = "pods on one machine, no links" if gbit_s is None else f"links of {gbit_s:g} Gbit/s"
    links = own if cluster is None else f"cluster {cluster}"
    title = f"{results['model_bytes'] / 1e6:.0f} MB to every loader's own memory, {links} (seconds, medians)"
    table = Table(title=title, title_justify="left", header_style="bold", box=None)
    for column in ("case", "loaders in pods"):
        table.add_column(column)
    for column in ("seconds", "slowest"):
        table.add_column(column, justify="right")
    table.add_column("by machine")
    table.add_column("published, 564 MB")
    for row in results["rows"]:
        split = ", ".join(f"{name}: {value:.2f}" for name, value in row["by_machine_s_p50"].items())
        figures = (f"{row['seconds_p50']:.2f}", f"{row['slowest_s_p50']:.2f}")
        table.add_row(
            row["case"], " ".join(row["loaders"]), *figures, split, escape(row["published_s"] or "")
        )
    out = console.out if console.out.is_terminal else Console(highlight=False, width=WIDE)
    out.print(table)
    console.tell_conclusions(out, "What the report concluded", results["conclusions"])
    for one in results["not_measured"]:
        console.err.print(f"not measured: {one['case']}: {one['reason']}", style="yellow")


@app.command("all")
def run_everything(
    plan: Annotated[
        str | None, typer.Option(metavar="MODEL", help="What the planner plans for; default: no plan.")
    ] = None,
    machines: Annotated[Path, typer.Option(help="The planner's machines.")] = Path("examples/machines.yaml"),
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    folder: Annotated[Path, typer.Option(help="One file for each experiment.")] = FOLDER,
    page: Annotated[Path, typer.Option(help="The report.")] = Path("results/report.html"),
) -> None:
    """Run every experiment at a small size, and write one report: probe, placement, transports, ways
    against each other, mesh, where time goes, pipeline stages, plan.

    Each has its file in the folder; one whose file is there with the same parameters is not run again, and
    an interrupted one goes on where it was. Without root nothing is limited, and it says so.

    Example: [bold]handoff experiment all[/bold]
    """
    interrupt.end_in_order()
    from cluster import netns
    from experiments import report
    from experiments.suite import run_all

    progress = console.progress()
    if (reason := netns.missing()) is not None:
        progress(f"links have no limits and are no links: {reason}")
    steps = list(_steps(plan, machines, folder, repeats, limited=reason is None, progress=progress))
    failed = run_all(folder, steps, progress)
    files = sorted(folder.glob("*.json"))
    kinds = {path.stem for path in files}
    others = [path for path in sorted(Path("results").glob("*.json")) if path.stem not in kinds]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(report.page(report.read([*files, *others])), "utf-8")
    console.out.print(f"written to {page}: {', '.join(str(path) for path in [*files, *others])}")
    for kind, why in failed.items():
        console.err.print(f"failed: {kind}: {why}", style="bold red")
    if failed:
        console.err.print("run it again: what is done is not done again")
        raise typer.Exit(1)


def _steps(
    plan: str | None,
    machines: Path,
    folder: Path,
    repeats: int,
    *,
    limited: bool,
    progress: Callable[[str], None],
) -> "Iterator[Step]":
    from dataclasses import asdict

    from experiments import head_run, kv_bench, mesh_run, pipeline_run, placement_run, probe, where_run
    from experiments.local_pair import local_model
    from experiments.suite import Step

    model = local_model(None, progress)
    links = {"gbit_s": 1.0} if limited else None
    probing = probe.Parameters(rounds=repeats)
    cluster = {
        "name": "experiments",
        "model": model,
        "gateway": {"port": 0},
        "links": links,
        "nodes": {
            "fast": {"role": "prefill", "object_store": 256 * 2**20},
            "wide": {"role": "decode", "object_store": 256 * 2**20},
        },
    }
    yield Step("probe", asdict(probing), lambda _: _probed(cluster, probing, progress))
    placing = placement_run.Parameters(model, gbit_s=1.0 if limited else None, repeats=repeats)
    yield Step(
        "placement",
        asdict(placing),
        lambda path: placement_run.measure(placing, path, progress),
        resumes=True,
    )
    moving = kv_bench.Parameters(
        mbytes=(1, 16),
        concurrency=(1,),
        links=("same-node", "cross-node-1g") if limited else ("same-node",),
        rounds=repeats,
        budget_s=120.0,
        pieces=False,
    )
    yield Step("bench-kv", asdict(moving), lambda _: kv_bench.measure(moving, progress))
    against = head_run.Parameters(
        head.heavy_model(None, progress),
        links=(10.0, 1.0) if limited else (None,),
        repeats=repeats,
        device=head.which_device("auto"),
    )
    yield Step(
        "head-to-head",
        asdict(against),
        lambda path: head_run.measure(against, path, progress),
        resumes=True,
    )
    if limited:  # links that are none cannot be counted
        meshed = mesh_run.Parameters(model, repeats=repeats)
        yield Step(
            "mesh",
            asdict(meshed),
            lambda path: mesh_run.measure(meshed, path, progress),
            resumes=True,
        )
        apart = where_run.Parameters(model, chunks=(256, 2048), repeats=repeats)
        yield Step(
            "where-time-goes",
            asdict(apart),
            lambda path: where_run.measure(apart, path, progress),
            resumes=True,
        )
    staged = pipeline.parameters_of(model, 1.0 if limited else None, repeats=repeats)
    yield Step(
        "pipeline",
        asdict(staged),
        lambda path: pipeline_run.measure(staged, path, progress),
        resumes=True,
    )
    if plan is not None:
        probed = folder / "probe.json"
        given = {"model": plan, "machines": str(machines), "map": str(probed)}
        yield Step("plan", given, lambda _: _planned(plan, machines, probed, given))


def _probed(cluster: Mapping[str, Any], parameters: Any, progress: Callable[[str], None]) -> "Run":
    import ray

    from cluster.connect import connect
    from cluster.file import ClusterFile
    from cluster.local import held
    from cluster.nodes import snapshot
    from experiments.probe import measure, nodes_to_probe

    file = ClusterFile.model_validate(cluster)
    with held(file, progress) as running:
        connect(running)
        try:
            return measure(nodes_to_probe(snapshot()), file, parameters, progress)
        finally:
            ray.shutdown()


def _planned(model: str, machines: Path, probed: Path, given: Mapping[str, Any]) -> "Run":
    from experiments import plan
    from experiments.plan_machines import load
    from experiments.plan_map import with_map
    from experiments.plan_model import read
    from experiments.results import Run
    from handoff.plan import as_data

    run = Run.begin("plan", given)
    found = plan.plan(read(model), with_map(load(machines), probed), plan.Load())
    data = as_data(found)
    del data["version"]  # the run has one
    return run.end(data, [])
