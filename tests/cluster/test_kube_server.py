"""A real API server, with the operator's own definitions, takes every overlay and component; strictly."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from api_server import PROJECT, ApiServer, api_server, no_modules

K8S = PROJECT / "k8s"

pytestmark = [
    pytest.mark.timeout(1700),
    *(
        pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program} on PATH: {why}")
        for program, why in (
            ("go", "builds the API server"),
            ("etcd", "the API server's store; Debian: etcd-server"),
            ("kubectl", "asks it"),
        )
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if why := no_modules():
        pytest.skip(why)
    with api_server(tmp_path_factory.mktemp("api-server")) as running:
        yield running


def taken(done: subprocess.CompletedProcess[str], *names: str) -> None:
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"{name} created (server dry run)" in done.stdout


@pytest.mark.parametrize("overlay", sorted(path.name for path in (K8S / "overlays").iterdir()))
def test_it_takes_the_overlay(server: ApiServer, overlay: str) -> None:
    taken(server.judge("-k", K8S / "overlays" / overlay), "rayservice.ray.io/llama")


@pytest.mark.parametrize("component", sorted(path.name for path in (K8S / "components").iterdir()))
def test_it_takes_the_component(server: ApiServer, component: str, tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    own = tmp_path / "k8s" / "overlays" / "own"
    own.mkdir()
    used = {"resources": ["../../base"], "components": [f"../../components/{component}"]}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(used))
    done = server.judge("-k", own)
    taken(done, "rayservice.ray.io/llama")
    for manifest in (K8S / "components" / component).iterdir():
        assert manifest.name == "kustomization.yaml" or manifest.stem in done.stdout


@pytest.mark.parametrize(("folder", "kind"), [("experiment", "rayjob"), ("experiments", "raycluster")])
def test_it_takes_experiments(server: ApiServer, folder: str, kind: str) -> None:
    taken(server.judge("-k", K8S / folder), f"{kind}.ray.io/llama-{folder}")


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("rayStartParams:", "rayStartParam:", "rayStartParam"),
        ("readinessProbe:", "readinesProbe:", "readinesProbe"),
        ("authOptions:", "authOption:", "authOption"),
        ("serveConfigV2:", "serveConfig:", "serveConfig"),
        ("replicas: 1", "replicas: one", "replicas"),
    ],
)
def test_it_refuses_mistakes(server: ApiServer, tmp_path: Path, right: str, wrong: str, says: str) -> None:
    text = (K8S / "base" / "rayservice.yaml").read_text("utf-8")
    assert right in text
    (tmp_path / "wrong.yaml").write_text(text.replace(right, wrong, 1))
    done = server.judge("-f", tmp_path / "wrong.yaml")
    assert done.returncode != 0, done.stdout
    assert says in done.stderr
