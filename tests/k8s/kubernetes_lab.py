"""A Kubernetes of one node with KubeRay on this machine, and a cluster file's manifests applied to it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.file import load
from handoff.render import manifests

PROJECT = Path(__file__).resolve().parents[2]
LAB = Path(__file__).parent / "lab"
BUILT_WITHIN_S = 2400
UP_WITHIN_S = 300
POD = "template/spec"


def run(argv: Sequence[str | Path], within_s: float, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=within_s, check=False, **settings)


@dataclass(frozen=True)
class Lab:
    """A running one. `inside` goes before a command that is to see its network."""

    inside: Path = LAB / "inside.sh"

    def kubectl(self, *arguments: str | Path, within_s: float = 60) -> str:
        done = run([self.inside, "kubectl", *arguments], within_s)
        assert done.returncode == 0, f"kubectl {' '.join(map(str, arguments))}: {done.stderr}"
        return done.stdout

    def refusal(self, *arguments: str | Path) -> str:
        """What a command that has to fail says."""
        done = run([self.inside, "kubectl", *arguments], 60)
        assert done.returncode != 0, f"was not refused: {done.stdout}"
        return done.stderr

    def get(self, kind: str, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "-o", "json", *arguments))["items"]
        return found

    def pods(self) -> dict[str, dict[str, Any]]:
        """Ray's pods by the name of their node, but for those that are being ended."""
        found = self.get("pods", "-l", "ray.io/is-ray-node=yes")
        return {
            pod["metadata"]["labels"]["handoff.node"]: pod
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
        }

    def look(self) -> str:
        """What may explain a failure."""
        commands = (
            ("get", "pods,rayservices,rayclusters", "-o", "wide"),
            ("get", "rayservices", "-o", "jsonpath={.items[*].status}"),
            ("get", "events", "--field-selector", "type=Warning", "--sort-by", "lastTimestamp"),
        )
        return "\n".join(run([self.inside, "kubectl", *command], 30).stdout[-4000:] for command in commands)


@contextlib.contextmanager
def up() -> Iterator[Lab]:
    """Build what is not built yet, and bring it up. Nothing of it is left afterwards."""
    assert os.geteuid() == 0, "make k8s-test makes namespaces and mounts: run it as root"
    assert sys.version_info[:2] == (3, 11), (
        "the pods' Python is Debian's 3.11 and shares .venv: make .venv with 3.11"
    )
    for script in ("build.sh", "image.sh"):
        print(f"k8s-test: {script}", flush=True)
        built = subprocess.run([LAB / script], timeout=BUILT_WITHIN_S, check=False)
        assert built.returncode == 0, f"tests/k8s/lab/{script} failed; see above"
    try:
        came = run([LAB / "up.sh"], UP_WITHIN_S)
        assert came.returncode == 0, came.stdout + came.stderr
        yield Lab()
    finally:
        ended = run([LAB / "down.sh"], 60)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def write(content: Mapping[str, Any], folder: Path) -> Path:
    """Render a cluster file; return an overlay whose pods mount packages and sources from this machine."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(dict(content)))
    for name, text in manifests(load(file), file).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    patched("test", "../kind", "base/rayservice.yaml", "rayClusterConfig", folder, [])
    small = [
        {
            "op": "replace",
            "path": "containers/0/resources/requests",
            "value": {"cpu": "100m", "memory": "256Mi"},
        },
        {"op": "add", "path": "containers/0/imagePullPolicy", "value": "Never"},
    ]
    patched("experiment", "../../experiment", "experiment/rayjob.yaml", "rayClusterSpec", folder, small)
    return folder / "overlays" / "test"


def patched(
    name: str, base: str, manifest: str, field: str, folder: Path, more: Sequence[Mapping[str, Any]]
) -> None:
    """Write an overlay over `base`, whose `field` describes a cluster."""
    resource = yaml.safe_load((folder / manifest).read_text())
    groups = resource["spec"][field]["workerGroupSpecs"]
    paths = ["headGroupSpec", *(f"workerGroupSpecs/{index}" for index in range(len(groups)))]
    operations = []
    for path in paths:
        pod = f"/spec/{field}/{path}/{POD}"
        for mounted, source in (("packages", sysconfig.get_path("purelib")), ("project", str(PROJECT))):
            operations += _mount(pod, mounted, source)
        operations += [{**operation, "path": f"{pod}/{operation['path']}"} for operation in more]
    overlay = folder / "overlays" / name
    overlay.mkdir()
    patch = {"target": {"kind": resource["kind"]}, "patch": yaml.safe_dump(operations)}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump({"resources": [base], "patches": [patch]}))


def _mount(pod: str, name: str, source: str) -> Iterator[dict[str, Any]]:
    volume = {"name": name, "hostPath": {"path": source, "type": "Directory"}}
    mount = {"name": name, "mountPath": f"/mnt/{name}", "readOnly": True}
    yield {"op": "add", "path": f"{pod}/volumes/-", "value": volume}
    yield {"op": "add", "path": f"{pod}/containers/0/volumeMounts/-", "value": mount}


def until(condition: Callable[[], object], what: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(1)


class Load:
    """Requests, one after the other, for as long as the block lasts; what came back is in `answers`."""

    def __init__(self, lab: Lab, url: str, model: str) -> None:
        argv = [lab.inside, sys.executable, Path(__file__).parent / "asks.py", url, model]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self.answers: list[dict[str, Any]] = []

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.answers.append(json.loads(line))

    def wait(self, count: int, within_s: float, path: str = "") -> None:
        """Wait for `count` more answers that are complete and have `path` in what they tell of their way."""
        start, deadline = len(self.answers), time.monotonic() + within_s
        while True:
            fitting = [each for each in self.answers[start:] if "error" not in each and path in each["path"]]
            if len(fitting) >= count:
                return
            assert self._reader.is_alive(), "what asks has ended"
            assert time.monotonic() < deadline, (
                f"not {count} answers with {path!r} within {within_s:g} s; the last: {self.answers[-3:]}"
            )
            time.sleep(0.1)

    def lost(self) -> list[dict[str, Any]]:
        """The answers that were not complete."""
        return [answer for answer in self.answers if "error" in answer]

    def __enter__(self) -> "Load":
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
