"""Manifests for Kubernetes: those in `k8s/` are the example's, all build, and patches know their group.

That a real Kubernetes takes and runs them: `make k8s-test`.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.errors import ClusterFileError, PlacementError
from cluster.file import ClusterFile, load
from cluster.kube import CLUSTER_FILE, HEAD_POD_MEMORY, kustomize, unexpressed
from cluster.names import LABEL_NODE, ROLES
from cluster.placement import NodeOffer, place
from handoff.render import manifests

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLE = PROJECT / "examples" / "kube.yaml"
K8S = PROJECT / "k8s"
OVERLAYS = ("cpu", "gpu", "kind")
MONITORING = {"rules": {"groups": []}, "dashboard": "{}"}

kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl on PATH; it builds what kustomize reads"
)


def pods(**changes: Any) -> dict[str, Any]:
    """A file's content, with a prefill node with two GPUs, and two decode nodes."""
    return {
        "name": "x",
        "model": "org/model",
        "kubernetes": {"image": "registry/handoff:1"},
        "nodes": {
            "a": {"role": "prefill", "gpus": 2, "labels": {"zone": "z"}, "resources": {"disk": 3}},
            "b": {
                "role": "decode",
                "count": 2,
                "slots": 2,
                "cpus": 4,
                "memory": "1GiB",
                "object_store": "1GiB",
            },
        },
        **changes,
    }


def rendered(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return kustomize(ClusterFile.model_validate(content), MONITORING)


def cluster_of(content: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = rendered(content)["base/rayservice.yaml"]["spec"]["rayClusterConfig"]
    return spec


def built(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def service(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == "RayService"]
    return found


def test_what_is_rendered_stays_what_it_was() -> None:
    there = {str(path.relative_to(K8S)): path.read_text("utf-8") for path in K8S.rglob("*.yaml")}
    assert there == manifests(load(EXAMPLE), EXAMPLE), (
        "if this is meant: rm -r k8s; handoff render examples/kube.yaml --to kustomize --out k8s"
    )


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_builds(overlay: str) -> None:
    documents = built(K8S / "overlays" / overlay)
    assert {document["kind"] for document in documents} == {
        *("NetworkPolicy", "PodDisruptionBudget", "RayService", "ServiceAccount"),
    }
    groups = service(documents)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    image = groups[0]["template"]["spec"]["containers"][0]["image"]
    assert image.endswith("-cuda" if overlay == "gpu" else "-cpu")


@kubectl
@pytest.mark.parametrize(
    ("folder", "kind", "field"),
    [("experiment", "RayJob", "rayClusterSpec"), ("experiments", "RayCluster", None)],
)
def test_experiments_build_and_their_nodes_come_on_demand(folder: str, kind: str, field: str | None) -> None:
    documents = {document["kind"]: document for document in built(K8S / folder)}
    assert set(documents) == {"NetworkPolicy", kind, "ServiceAccount"}
    spec = documents[kind]["spec"]
    cluster = spec[field] if field else spec
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["version"] == "v2"
    for group in cluster["workerGroupSpecs"]:
        assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (0, 0, 1)
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    (content,) = [each["value"] for each in container["env"] if each["name"] == CLUSTER_FILE]
    assert ClusterFile.model_validate_json(content).name == f"llama-{folder}"


@pytest.mark.parametrize("experiment", ["serving", "placement"])
def test_the_job_runs_what_the_file_says_without_links(experiment: str) -> None:
    """Links would make each pod a machine of its own."""
    kubernetes = {"image": "registry/handoff:1", "experiment": experiment}
    job = rendered(pods(kubernetes=kubernetes, links={"gbit_s": 1}))["experiment/rayjob.yaml"]["spec"]
    assert job["entrypoint"] == f"python -m experiments.on_cluster {experiment}"
    (container,) = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    (content,) = [each["value"] for each in container["env"] if each["name"] == CLUSTER_FILE]
    assert ClusterFile.model_validate_json(content).links is None


@kubectl
@pytest.mark.parametrize("component", sorted(path.name for path in (K8S / "components").iterdir()))
def test_every_component_changes_the_base(component: str, tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    own = tmp_path / "k8s" / "overlays" / "own"
    own.mkdir()
    content = {"resources": ["../../base"], "components": [f"../../components/{component}"]}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(content))
    assert built(own) != built(K8S / "base")


@kubectl
def test_a_patch_for_another_group_is_refused(tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    base = tmp_path / "k8s" / "base" / "rayservice.yaml"
    base.write_text(base.read_text().replace("groupName: decode-0", "groupName: renamed"))
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "k8s" / "overlays" / "cpu"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "workerGroupSpecs/2/groupName" in done.stderr


def unplaced(service: dict[str, Any]) -> str:
    """Why the workers that the application asks for do not fit what the groups offer; empty: they do."""
    (application,) = json.loads(service["spec"]["serveConfigV2"])["applications"]
    file = ClusterFile.model_validate(application["args"]["cluster"])
    offers = {}
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        total = {name: float(units) for name, units in group["resources"].items()}
        roles = frozenset(role for role in ROLES if role in total)
        name = group["labels"][LABEL_NODE]
        offers[name] = NodeOffer(name, name, "", roles, total, total, group["labels"])
    try:
        placed = place(file.asks(), list(offers.values()))
    except PlacementError as error:
        return str(error)
    wanting = [each for each in placed if not each.resources.keys() <= offers[each.node_name].total.keys()]
    return f"offered by no group: {wanting}" if wanting else ""


@kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_groups_offer_what_the_application_asks_for(overlay: str) -> None:
    assert unplaced(service(built(K8S / "overlays" / overlay))) == ""


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('"decode": "1"', '"decod": "1"', "fits on no node"),
        ('"CPU": "8"', '"CPU": "4"', "CPU: 4 free of 4, 8 needed"),
        ('"at:prefill-1"', '"at:prefill-2"', "offered by no group"),
    ],
)
def test_a_manifest_that_offers_something_else_is_found(right: str, wrong: str, said: str) -> None:
    """What no schema can see: names and amounts of Ray's resources."""
    text = json.dumps(yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text("utf-8")))
    assert unplaced(json.loads(text)) == ""
    assert right in text
    assert said in unplaced(json.loads(text.replace(right, wrong)))


def test_every_node_is_a_group_that_offers_what_the_node_does() -> None:
    groups = {group["groupName"]: group for group in cluster_of(pods())["workerGroupSpecs"]}
    assert list(groups) == ["a-0", "b-0", "b-1"]
    assert groups["a-0"]["resources"] == {
        **{"CPU": "1", "memory": str(4 << 30)},
        **{"disk": "3", "prefill": "1", "at:a-0": "1000"},
    }
    assert groups["b-1"]["resources"]["decode"] == "2"
    assert groups["a-0"]["labels"] == {
        **{"handoff.node": "a-0", "handoff.group": "a", "handoff.role": "prefill", "zone": "z"}
    }
    assert {group["replicas"] for group in groups.values()} == {1}
    pod = groups["a-0"]["template"]["spec"]["containers"][0]
    assert pod["resources"]["limits"]["nvidia.com/gpu"] == "2"
    # memory, object store, and room in /dev/shm
    assert groups["b-0"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"memory": "2560Mi"}
    shm = groups["b-0"]["template"]["spec"]["volumes"][0]
    assert shm == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1536Mi"}}
    assert HEAD_POD_MEMORY > 2 << 30


def test_nodes_of_workers_that_are_not_always_there_come_on_demand() -> None:
    workers = {"decode": {"count": 2, "most": 4, "spread": False}}
    cluster = cluster_of(pods(workers=workers))
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["version"] == "v2"
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    replicas = {name: (g["replicas"], g["minReplicas"], g["maxReplicas"]) for name, g in groups.items()}
    assert replicas == {"a-0": (1, 1, 1), "b-0": (1, 1, 1), "b-1": (0, 0, 1)}
    fixed = cluster_of(pods(workers={"decode": {"count": 4, "most": 4}}))
    assert "enableInTreeAutoscaling" not in fixed


def test_no_pod_is_root_or_holds_a_token_of_kubernetes() -> None:
    cluster = cluster_of(pods())
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert cluster["authOptions"] == {"mode": "token"}


def test_the_application_is_told_the_file() -> None:
    content = pods(gateway={"port": 9000}, slo={"ttft_ms": 5}, hosts=None)
    config = json.loads(rendered(content)["base/rayservice.yaml"]["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(config)
    told = ClusterFile.model_validate(config["applications"][0]["args"]["cluster"])
    expected = ClusterFile.model_validate(
        {**content, "kubernetes": None, "gateway": {"port": 9000, "host": "0.0.0.0"}}
    )
    assert told == expected


def test_only_what_workers_are_made_from_makes_a_new_cluster() -> None:
    before = cluster_of(pods())
    assert cluster_of(pods(router={"mode": "always"}, slo={"ttft_ms": 5}, recompute={"burst_s": 1})) == before
    assert cluster_of(pods(engine={"max_model_len": 100})) != before
    assert cluster_of(pods(workers={"decode": {"cpus": 2}})) != before


def test_pods_go_where_the_file_says() -> None:
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
    places = {
        "a": {"affinity": apart},
        "b": {"node_selector": {"disk": "fast"}, "tolerations": [{"key": "k", "operator": "Exists"}]},
        "b-1": {"node_name": "machine"},
    }
    groups = cluster_of(pods(kubernetes={"image": "i:1", "pods": places}))["workerGroupSpecs"]
    first, second, third = (group["template"]["spec"] for group in groups)
    assert {"nodeName", "nodeSelector", "tolerations"}.isdisjoint(first)
    assert first["affinity"] == apart
    assert "affinity" not in second
    assert second["nodeSelector"] == {"disk": "fast"}
    assert second["tolerations"] == [{"key": "k", "operator": "Exists"}]
    assert third["nodeName"] == "machine"
    assert "nodeSelector" not in third


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kubernetes": {"image": "no-tag"}}, "kubernetes.image: 'no-tag' is not valid"),
        (
            {"kubernetes": {"image": "i:1", "pods": {"c": {}}}},
            "kubernetes.pods.c: there is no such group or node",
        ),
        ({"kubernetes": {"image": "i:1", "env": {"AWS_SECRET": "x"}}}, "looks like a secret"),
        ({"kubernetes": {"image": "i:1", "mount": "models"}}, "kubernetes.mount: 'models' is not valid"),
        ({"kubernetes": {"imagee": "i:1"}}, "kubernetes.imagee: unknown key; did you mean 'image'?"),
    ],
)
def test_mistakes_in_the_section_are_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(pods(**changes)))
    with pytest.raises(ClusterFileError) as error:
        load(path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kubernetes": None}, "kubernetes: is missing"),
        ({"name": "1x"}, "name: '1x' names a Service"),
        ({"gateway": {"port": 0}}, r"gateway\.port: 0 is any free port"),
    ],
)
def test_what_pods_cannot_be_made_from_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterFileError, match=said):
        rendered(pods(**changes))


def test_what_pods_do_not_get_is_told() -> None:
    tls = {"certificate": "c", "key": "k", "authority": "a"}
    content = pods(model="/m", tls=tls, gateway={"host": "10.0.0.1", "api_keys_file": "/keys"})
    told = unexpressed(ClusterFile.model_validate(content))
    assert [line.split(":")[0] for line in told] == [
        *("gateway.host", "gateway.api_keys_file", "tls", "kubernetes.volume"),
    ]
    assert unexpressed(load(EXAMPLE)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("map", {"made": "2026-01-01", "gbit_s": {"a-0 > b-0": {"tcp": 9.4}}}), ("links", {"gbit_s": 5})],
)
def test_what_is_known_of_links_here_does_not_reach_pods(key: str, value: dict[str, Any]) -> None:
    """Nor does it make KubeRay build a new cluster: what is rendered is the same."""
    content = pods(**{key: value})
    assert rendered(content) == rendered(pods())
    (told,) = [
        line for line in unexpressed(ClusterFile.model_validate(content)) if line.startswith(f"{key}: ")
    ]
    assert "left out" in told
