"""Clusters that `handoff up` has not made: what shows and ends them, by those that did."""

from pathlib import Path
from typing import Final, Literal

from cluster.errors import NotRunningError
from cluster.file import ClusterFile, load
from cluster.state import StateDir

MADE_BY: Final = {
    "status": (
        "Elsewhere, if made by `ray up`: ray exec RAY_FILE 'ray status'; "
        "by KubeRay: kubectl get rayservices,pods"
    ),
    "down": (
        "Elsewhere, if made by `ray up`: ray down RAY_FILE; "
        "by KubeRay: kubectl delete -k FOLDER/overlays/OVERLAY"
    ),
}
"""What to run for a cluster of which nothing is known here."""

Command = Literal["status", "down"]


def named(given: str, command: Command) -> str:
    """Return the name of the cluster that is meant: `given`, or that of the cluster file at this path.

    Raises NotRunningError, with what to run instead, if the file says that its nodes are elsewhere and there
    is no cluster of that name on this machine.
    """
    path = Path(given)
    if path.suffix not in (".yaml", ".yml"):
        return given
    file = load(path)
    if StateDir.of(file.name).plan() is None and (instead := _instead(file, path, command)):
        raise NotRunningError(f"no cluster called {file.name!r} runs on this machine; {instead}")
    return file.name


def _instead(file: ClusterFile, path: Path, command: Command) -> str:
    """What to run, as far as the file says who makes its nodes."""
    if file.hosts is not None:
        head, made = file.hosts.head_address, f"what `handoff render {path} --out RAY_FILE` wrote"
        if command == "down":
            return f"`hosts` names machines that `ray up` made: end them with: ray down RAY_FILE ({made})"
        return (
            f"`hosts` names machines that `ray up` made: ray exec RAY_FILE 'ray status' ({made}) shows "
            f"nodes, and workers are at http://{head}:{file.gateway.port}/handoff/workers while it serves"
        )
    if file.aws is not None:
        if command == "down":
            return "`aws` has machines that `ray up` rents: end them with: ray down RAY_FILE"
        return (
            f"`aws` has machines that `ray up` rents: ray exec RAY_FILE 'ray status' shows nodes, and "
            f"ray exec RAY_FILE 'curl -s localhost:{file.gateway.port}/handoff/workers' shows workers"
        )
    if file.kubernetes is None:
        return ""
    space = f" --namespace {file.kubernetes.namespace}" if file.kubernetes.namespace else ""
    if command == "down":
        return (
            f"`kubernetes` is for KubeRay: kubectl delete -k FOLDER/overlays/OVERLAY (what "
            f"`handoff render {path} --to kustomize --out FOLDER` wrote)"
        )
    return (
        f"`kubernetes` is for KubeRay: kubectl get{space} rayservice/{file.name}; kubectl get{space} pods -l "
        f"app.kubernetes.io/instance={file.name}; workers are at /handoff/workers of its service "
        f"{file.name}-serve-svc"
    )
