"""A cluster file's manifests, and what the tests change of them for the Kubernetes that they have."""

import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from kubernetes_lab import CLIENT, PROJECT, Lab

from cluster.file import load
from handoff.render import manifests

POD = "template/spec"
PYTHON = "/opt/venv/bin"
"""Of the image of Dockerfile, and of tests/k8s/lab."""
CACHE = "/mnt/vllm"
SHORT_S = 5
FOUND_OUT = {"VLLM_CACHE_ROOT": CACHE}
"""What vLLM found out about models, which takes a process with PyTorch each time."""

Operation = dict[str, Any]


def kubernetes(lab: Lab) -> dict[str, Any]:
    """The section of a cluster file."""
    volume = {"hostPath": {"path": str(lab.models)}} if lab.models else {"emptyDir": {}}
    return {"image": lab.image, "volume": volume, "env": FOUND_OUT if lab.cache else {}}


def write(content: Mapping[str, Any], lab: Lab, folder: Path) -> Path:
    """Render a cluster file; return the folder of overlays: `test`, `experiment`, `experiments`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(dict(content)))
    for name, text in manifests(load(file), file).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    own = {"op": "replace", "path": "containers/0/imagePullPolicy", "value": "IfNotPresent"}
    rayservice = folder / "base" / "rayservice.yaml"
    service = _patches(rayservice, "/spec/rayClusterConfig", lab, [own])
    if "autoscalerOptions" in yaml.safe_load(rayservice.read_text())["spec"]["rayClusterConfig"]:
        service += _quick_autoscaler("/spec/rayClusterConfig/autoscalerOptions", lab)
    _overlay(folder, "test", "../kind", "RayService", service)
    small = {"cpu": "100m", "memory": "256Mi"}
    requests = {"op": "replace", "path": "containers/0/resources/requests", "value": small}
    for name, manifest, kind, cluster in (
        ("experiment", "rayjob.yaml", "RayJob", "/spec/rayClusterSpec"),
        ("experiments", "raycluster.yaml", "RayCluster", "/spec"),
    ):
        operations = _patches(folder / name / manifest, cluster, lab, [requests])
        operations += _quick_autoscaler(f"{cluster}/autoscalerOptions", lab)
        _overlay(folder, name, f"../../{name}", kind, operations)
    return folder / "overlays"


def _overlay(folder: Path, name: str, base: str, kind: str, operations: list[Operation]) -> None:
    (folder / "overlays" / name).mkdir()
    patch = {"target": {"kind": kind}, "patch": yaml.safe_dump(operations)}
    text = yaml.safe_dump({"resources": [base], "patches": [patch]})
    (folder / "overlays" / name / "kustomization.yaml").write_text(text)


def _patches(manifest: Path, cluster: str, lab: Lab, more: list[Operation]) -> list[Operation]:
    """For each pod of the cluster that is described at `cluster`."""
    spec = yaml.safe_load(manifest.read_text())
    for key in cluster.strip("/").split("/"):
        spec = spec[key]
    groups = range(len(spec["workerGroupSpecs"]))
    operations: list[Operation] = []
    for path in ("headGroupSpec", *(f"workerGroupSpecs/{index}" for index in groups)):
        pod = f"{cluster}/{path}/{POD}"
        for volume, mount in _mounts(lab):
            operations.append({"op": "add", "path": f"{pod}/volumes/-", "value": volume})
            operations.append({"op": "add", "path": f"{pod}/containers/0/volumeMounts/-", "value": mount})
        operations += [{**operation, "path": f"{pod}/{operation['path']}"} for operation in more]
        if lab.models is None:
            operations.append({"op": "add", "path": f"{pod}/initContainers", "value": [_maker(lab)]})
    return operations


def _mounts(lab: Lab) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Volumes, and where they are mounted."""
    if not lab.mounted:
        return
    for name, path in (("packages", sysconfig.get_path("purelib")), ("project", str(PROJECT))):
        volume = {"name": name, "hostPath": {"path": path, "type": "Directory"}}
        yield volume, {"name": name, "mountPath": f"/mnt/{name}", "readOnly": True}
    if lab.cache is not None:
        volume = {"name": "vllm", "hostPath": {"path": str(lab.cache), "type": "Directory"}}
        yield volume, {"name": "vllm", "mountPath": CACHE}


def _maker(lab: Lab) -> dict[str, Any]:
    """A container that makes the model, where nodes have no folder with it."""
    return {
        "name": "model",
        "image": f"{lab.image}-cpu",
        "command": [f"{PYTHON}/handoff", "model", "make", "/models/tiny"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "models", "mountPath": "/models"}, *(mount for _, mount in _mounts(lab))],
    }


def _quick_autoscaler(options: str, lab: Lab) -> list[Operation]:
    mounts = [mount for volume, mount in _mounts(lab)]
    return [
        {"op": "replace", "path": f"{options}/idleTimeoutSeconds", "value": SHORT_S},
        {
            "op": "add",
            "path": f"{options}/env",
            "value": [{"name": "AUTOSCALER_UPDATE_INTERVAL_S", "value": "1"}],
        },
        {"op": "add", "path": f"{options}/volumeMounts", "value": mounts},
    ]


def client(lab: Lab) -> dict[str, Any]:
    """A pod that asks for completions; it is no part of a cluster."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": CLIENT},
        "spec": {
            "containers": [
                {
                    "name": "client",
                    "image": f"{lab.image}-cpu",
                    "command": ["sleep", "infinity"],
                    "volumeMounts": [mount for _, mount in _mounts(lab)],
                }
            ],
            "volumes": [volume for volume, _ in _mounts(lab)],
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
        },
    }
