"""The operator's own schema takes every overlay: strictly, as the API server of a Kubernetes would."""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

PROJECT = Path(__file__).resolve().parents[2]
K8S = PROJECT / "k8s"
OPERATOR = "github.com/ray-project/kuberay/ray-operator@v1.6.1"

pytestmark = [
    pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program} on PATH: {why}")
    for program, why in (("go", "gets the operator's module"), ("kubectl", "builds what kustomize reads"))
]


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the operator's own resource definitions."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", OPERATOR],
        cwd=tmp_path_factory.mktemp("go"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        said = json.loads(done.stdout or "{}").get("Error", done.stderr)
        pytest.skip(f"{OPERATOR} cannot be had, set GOPROXY: {said}")
    return Path(json.loads(done.stdout)["Dir"]) / "config" / "crd" / "bases"


def validator_of(kind: str, folder: Path) -> jsonschema.Draft202012Validator:
    path = folder / f"ray.io_{kind.lower()}s.yaml"
    definition = yaml.load(path.read_text("utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    return jsonschema.Draft202012Validator(strict(version["schema"]["openAPIV3Schema"]))


@pytest.fixture(scope="module")
def validator(definitions: Path) -> jsonschema.Draft202012Validator:
    return validator_of("RayService", definitions)


def strict(schema: Any) -> Any:
    """The schema, by which fields that it does not know are mistakes."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields")
    rest = {key: strict(value) if key != "properties" else {} for key, value in schema.items()}
    if "properties" in schema and isinstance(schema["properties"], dict):
        rest["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if closed and "additionalProperties" not in schema:
            rest["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        rest.pop("pattern", None)  # of the text; numbers have none
    return rest


@cache
def services(overlay: str) -> dict[str, Any]:
    return service_of(K8S / "overlays" / overlay)


def service_of(folder: Path) -> dict[str, Any]:
    argv = ["kubectl", "kustomize", folder]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    (found,) = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "RayService"]
    return {**found, "metadata": {}}  # metadata is the API server's own


@pytest.mark.parametrize("overlay", sorted(path.name for path in (K8S / "overlays").iterdir()))
def test_the_schema_takes_the_overlay(validator: jsonschema.Draft202012Validator, overlay: str) -> None:
    assert [error.message for error in validator.iter_errors(services(overlay))] == []


@pytest.mark.parametrize("component", sorted(path.name for path in (K8S / "components").iterdir()))
def test_the_schema_takes_the_component(
    validator: jsonschema.Draft202012Validator, component: str, tmp_path: Path
) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    own = tmp_path / "k8s" / "overlays" / "own"
    own.mkdir()
    content = {"resources": ["../../base"], "components": [f"../../components/{component}"]}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(content))
    assert [error.message for error in validator.iter_errors(service_of(own))] == []


@pytest.mark.parametrize(
    ("kind", "path"),
    [("RayJob", "experiment/rayjob.yaml"), ("RayCluster", "experiments/raycluster.yaml")],
)
def test_the_schema_takes_experiments(definitions: Path, kind: str, path: str) -> None:
    manifest = yaml.safe_load((K8S / path).read_text("utf-8"))
    found = validator_of(kind, definitions).iter_errors({**manifest, "metadata": {}})
    assert [error.message for error in found] == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("rayStartParams", "rayStartParam"),
        ("readinessProbe", "readinesProbe"),
        ("authOptions", "authOption"),
        ("serveConfigV2", "serveConfig"),
        ('"replicas": 1', '"replicas": "one"'),
    ],
)
def test_the_schema_refuses_mistakes(
    validator: jsonschema.Draft202012Validator, right: str, wrong: str
) -> None:
    text = json.dumps(services("cpu"))
    assert right in text
    broken = json.loads(text.replace(right, wrong, 1))
    assert list(validator.iter_errors(broken))
