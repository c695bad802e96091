"""The Kubernetes that tests use: a KUBECONFIG's, kind's, or one that this machine makes without either."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
LAB = Path(__file__).parent / "lab"
INSIDE = LAB / "inside.sh"
BUILT_WITHIN_S = 2400
UP_WITHIN_S = 300
OPERATOR = "https://github.com/ray-project/kuberay/ray-operator/config/default?ref=v1.6.1"
IMAGE = "HANDOFF_K8S_IMAGE"
MOUNTED = "HANDOFF_K8S_MOUNTED"
CLIENT = "client"
OWN_IMAGE = "handoff.test/handoff:1"


def run(argv: list[str | Path], within_s: float, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=within_s, check=False, **settings)


@dataclass(frozen=True)
class Lab:
    """A Kubernetes with KubeRay's operator, and a namespace of it.

    inside: comes before commands that are to see it. image: what pods run; `components/cpu` adds -cpu.
    mounted: its nodes are this machine, and pods mount packages and sources from it. models: the folder on
    its nodes that has the model; None: each pod makes it. cache: a folder there that pods may write to.
    """

    where: str
    namespace: str
    image: str
    inside: tuple[Path, ...] = ()
    mounted: bool = False
    models: Path | None = None
    cache: Path | None = None

    def command(self, *arguments: str | Path) -> list[str | Path]:
        return [*self.inside, "kubectl", "--namespace", self.namespace, *arguments]

    def kubectl(self, *arguments: str | Path, within_s: float = 60, **settings: Any) -> str:
        done = run(self.command(*arguments), within_s, **settings)
        assert done.returncode == 0, f"kubectl {' '.join(map(str, arguments))}: {done.stderr}"
        return done.stdout

    def apply(self, *manifests: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
        self.kubectl("apply", "-f", "-", input=json.dumps(listed))

    def refusal(self, *arguments: str | Path) -> str:
        """What a command that has to fail says."""
        done = run(self.command(*arguments), 60)
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

    def http(self, service: str, path: str) -> Any:
        """What a service answers, through the API server; an empty list while it does not."""
        url = f"/api/v1/namespaces/{self.namespace}/services/{service}/proxy{path}"
        done = run(self.command("get", "--raw", url, "--request-timeout=10s"), 20)
        return json.loads(done.stdout) if done.returncode == 0 and done.stdout else []

    def look(self) -> str:
        """What may explain a failure."""
        commands = (
            ("get", "pods,rayservices,rayclusters,rayjobs", "-o", "wide"),
            ("get", "rayservices,rayjobs", "-o", "jsonpath={.items[*].status}"),
            ("get", "events", "--field-selector", "type=Warning", "--sort-by", "lastTimestamp"),
        )
        return "\n".join(run(self.command(*command), 30).stdout[-4000:] for command in commands)


@contextlib.contextmanager
def up(models: Callable[[], Path], progress: Callable[[str], None]) -> Iterator[Lab]:
    """The KUBECONFIG's cluster, kind's where there is kind and Docker, or one that this machine alone makes.

    `models` makes the folder with the model, where nodes are this machine. Of none of them is anything left.
    """
    if os.environ.get("KUBECONFIG"):
        with _namespace(_given()) as lab:
            yield lab
    elif shutil.which("kind") and run(["docker", "info"], 30).returncode == 0:
        with _kind(progress) as lab, _namespace(lab):
            yield lab
    else:
        with _own(models, progress) as lab, _namespace(lab):
            yield lab


@contextlib.contextmanager
def _namespace(lab: Lab) -> Iterator[Lab]:
    lab.kubectl("create", "namespace", lab.namespace)
    try:
        yield lab
    finally:
        if not lab.inside:  # what is inside goes as a whole
            lab.kubectl("delete", "namespace", lab.namespace, "--timeout=120s", within_s=130)


def _given() -> Lab:
    image = os.environ.get(IMAGE)
    assert image, (
        f"KUBECONFIG is set, so the test would run on that cluster, and {IMAGE} does not say which image its "
        f"nodes can pull: build Dockerfile's target cpu as NAME:TAG-cpu and set {IMAGE}=NAME:TAG; or unset "
        f"KUBECONFIG"
    )
    context = run(["kubectl", "config", "current-context"], 30).stdout.strip()
    lab = Lab(
        where=f"{os.environ['KUBECONFIG']}, context {context}",
        namespace=f"handoff-test-{secrets.token_hex(3)}",
        image=image,
        mounted=os.environ.get(MOUNTED) == "1",
    )
    operator = run(["kubectl", "get", "crd", "rayservices.ray.io"], 60)
    assert operator.returncode == 0, (
        f"{lab.where}: no KubeRay operator there ({operator.stderr.strip()}); install it: "
        f"kubectl apply --server-side -k '{OPERATOR}'"
    )
    return lab


@contextlib.contextmanager
def _kind(progress: Callable[[str], None]) -> Iterator[Lab]:
    name = f"handoff-test-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kubeconfig"
        steps: tuple[list[str | Path], ...] = (
            ["docker", "build", "--target", "cpu", "--tag", f"{OWN_IMAGE}-cpu", PROJECT],
            ["kind", "create", "cluster", "--name", name, "--kubeconfig", config, "--wait", "120s"],
            ["kind", "load", "docker-image", f"{OWN_IMAGE}-cpu", "--name", name],
            ["kubectl", "apply", "--server-side", "-k", OPERATOR],
            ["kubectl", "wait", "--for=condition=Available", "deployment", "--all", "--timeout=300s"],
        )
        os.environ["KUBECONFIG"] = str(config)
        try:
            for step in steps:
                progress(" ".join(map(str, step)))
                subprocess.run(step, timeout=BUILT_WITHIN_S, check=True)
            yield Lab(where=f"kind's {name}", namespace="handoff-test", image=OWN_IMAGE)
        finally:
            del os.environ["KUBECONFIG"]
            subprocess.run(["kind", "delete", "cluster", "--name", name], timeout=120, check=True)


@contextlib.contextmanager
def _own(models: Callable[[], Path], progress: Callable[[str], None]) -> Iterator[Lab]:
    """Build what is not built yet, and bring it up: tests/k8s/lab."""
    assert os.geteuid() == 0, "make k8s-test makes namespaces and mounts: run it as root, or set KUBECONFIG"
    assert sys.version_info[:2] == (3, 11), (
        "the pods' Python is Debian's 3.11 and shares .venv: make .venv with 3.11"
    )
    for script in ("build.sh", "image.sh"):
        progress(script)
        built = subprocess.run([LAB / script], timeout=BUILT_WITHIN_S, check=False)
        assert built.returncode == 0, f"tests/k8s/lab/{script} failed; see above"
    lab = Lab(
        where="this machine's own, tests/k8s/lab",
        namespace="handoff-test",
        image=OWN_IMAGE,
        inside=(INSIDE,),
        mounted=True,
        models=models(),
        cache=Path(run(["bash", "-c", f". {LAB}/env.sh; echo $CACHE/vllm"], 10).stdout.strip()),
    )
    progress("up.sh")
    try:
        came = run([LAB / "up.sh"], UP_WITHIN_S)
        assert came.returncode == 0, came.stdout + came.stderr
        yield lab
    finally:
        ended = run([LAB / "down.sh"], 60)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def until(condition: Callable[[], object], what: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(1)


class Load:
    """Requests from a pod, one after the other, until the block ends; what came back is in `answers`."""

    def __init__(self, lab: Lab, url: str, model: str) -> None:
        source = (Path(__file__).parent / "asks.py").read_text("utf-8")
        argv = lab.command("exec", "-i", CLIENT, "--", "python", "-c", source, url, model)
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
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends by itself then, also where a kill would not reach
        try:
            self._process.wait(70)
        finally:
            self._process.kill()
            self._process.wait(10)
