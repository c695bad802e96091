"""`handoff render`: the cluster file as what other tools bring a cluster up from."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.file import ClusterFile, load
from handoff import console


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(no_args_is_help=True)(render)


def render(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The cluster file.")],
    to: Annotated[
        Literal["ray-up", "kustomize"],
        typer.Option(help="ray-up: machines, yours or Amazon's. kustomize: pods, by KubeRay."),
    ] = "ray-up",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write it: a file (standard output, unless given), or kustomize's folder."
        ),
    ] = None,
) -> None:
    """Turn a cluster file into one that `ray up` reads, or into manifests for Kubernetes with KubeRay.

    The file needs a `hosts` section (machines that are there) or an `aws` section (machines that `ray up`
    rents) for the first, a `kubernetes` section for the second.

    Examples:

        handoff render examples/hosts.yaml

        handoff render examples/hosts.yaml --out cluster.ray.yaml && ray up -y cluster.ray.yaml

        handoff render examples/kube.yaml --to kustomize --out k8s && kubectl apply -k k8s/overlays/cpu
    """
    if to == "kustomize":
        if out is None:
            raise typer.BadParameter("kustomize reads a folder; give one", param_hint="--out")
        _kustomize(load(path), path, out)
        return
    from cluster.preflight import hosts_notes
    from cluster.ray_start import HOSTS_TOKEN
    from cluster.ray_up import shown

    file = load(path)
    text = shown(file, path)
    for note in hosts_notes(file, HOSTS_TOKEN):
        console.err.print(f"note: {note}", style="yellow")
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, "utf-8")
        console.err.print(f"written to {out}; next: ray up -y {out}")


def manifests(file: ClusterFile, path: Path) -> dict[str, str]:
    """Return the text of each of kustomize's files for a cluster file read from `path`."""
    import yaml

    import deployments
    from cluster.kube import kustomize, shown

    folder = Path(deployments.__file__).parent / "monitoring"
    monitoring = {
        "rules": yaml.safe_load((folder / "rules.yml").read_text("utf-8")),
        "dashboard": (folder / "grafana.json").read_text("utf-8"),
    }
    return {name: shown(content, path.name) for name, content in kustomize(file, monitoring).items()}


def _kustomize(file: ClusterFile, path: Path, out: Path) -> None:
    from cluster.kube import unexpressed

    for name, text in manifests(file, path).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, "utf-8")
    for line in unexpressed(file):
        console.err.print(f"[yellow]not expressed:[/] {line}")
    console.err.print(f"written to {out}; next: kubectl apply -k {out}/overlays/cpu")
