"""A real Kubernetes runs what `handoff render` makes: `make k8s-test`. Each test goes on from the last."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_manifests import kubernetes, write
from kubernetes_lab import CLIENT, PROJECT, Lab, Load, run, until

from experiments.report import page, read
from experiments.results import check

NAME = "lab"
SERVICE = f"{NAME}-serve-svc"
READY_WITHIN_S = 600.0
BACK_WITHIN_S = 180.0
GONE_WITHIN_S = 120.0
JOB_LOG = "/tmp/ray/session_latest/logs/job-driver-*"
VLLM = {"max_model_len": 4096, "max_num_batched_tokens": 512, "enforce_eager": True, "dtype": "bfloat16"}
K8S = PROJECT / "k8s"
OTHERS = {
    "monitoring": "podmonitors.monitoring.coreos.com",
    "external-secrets": "externalsecrets.external-secrets.io",
}
"""Components that need definitions of others than KubeRay."""


def content(lab: Lab, **changes: Any) -> dict[str, Any]:
    node = {"memory": "3GiB", "object_store": "100MiB"}
    return {
        "name": NAME,
        "model": "/models/tiny",
        "engine": {**VLLM, "fake": {"step_ms": 20}},
        "router": {"mode": "always"},
        "gateway": {"limits": {"answer_s": 15}},
        "kubernetes": kubernetes(lab),
        "nodes": {
            "prefill": {"role": "prefill", **node},
            "decode": {"role": "decode", "count": 2, **node},
        },
        "workers": {"decode": {"count": 2}},
        **changes,
    }


def small(lab: Lab, **changes: Any) -> dict[str, Any]:
    """Two nodes."""
    smaller = content(lab, **changes)
    smaller["nodes"]["decode"]["count"] = smaller["workers"]["decode"]["count"] = 1
    return smaller


def growing(lab: Lab, **changes: Any) -> dict[str, Any]:
    """vLLM's engines; a third node comes with the load, one has more memory and both roles."""
    edited = small(lab, engine={**VLLM, "kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 4}, **changes)
    edited["nodes"]["prefill"] |= {"memory": "3.5GiB", "role": "both"}
    edited["nodes"]["decode"]["count"] = edited["workers"]["decode"]["most"] = 2
    return edited


def workers(lab: Lab) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in lab.http(f"{SERVICE}:serve", "/handoff/workers")}


def asking(lab: Lab) -> Load:
    return Load(lab, f"http://{SERVICE}:8000", "tiny")


def active(lab: Lab) -> str:
    (service,) = lab.get("rayservices")
    return str(service.get("status", {}).get("activeServiceStatus", {}).get("rayClusterName", ""))


def ready(lab: Lab) -> bool:
    """Whether it serves. An application that could not be built never will: its reason fails the test."""
    status = lab.get("rayservices", "--field-selector", f"metadata.name={NAME}")[0].get("status", {})
    for cluster in ("pendingServiceStatus", "activeServiceStatus"):
        for application in status.get(cluster, {}).get("applicationStatuses", {}).values():
            assert application["status"] != "DEPLOY_FAILED", application["message"]
    return any((each["type"], each["status"]) == ("Ready", "True") for each in status.get("conditions", []))


def uids(lab: Lab) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in lab.pods().items()}


@pytest.fixture(scope="module")
def applied(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What serves is applied first, and comes up while manifests are judged."""
    folder = tmp_path_factory.mktemp("manifests") / "m"
    lab.kubectl("apply", "-k", write(content(lab), lab, folder) / "test", "--validate=strict")
    return folder


def dry_run(lab: Lab, folder: Path) -> str:
    return lab.kubectl("apply", "-k", folder, "--dry-run=server", "--validate=strict")


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("overlay", sorted(path.name for path in (K8S / "overlays").iterdir()))
def test_the_server_takes_every_overlay(lab: Lab, overlay: str) -> None:
    assert "rayservice.ray.io/llama created (server dry run)" in dry_run(lab, K8S / "overlays" / overlay)


@pytest.mark.parametrize(("folder", "kind"), [("experiment", "rayjob"), ("experiments", "raycluster")])
def test_the_server_takes_experiments(lab: Lab, folder: str, kind: str) -> None:
    assert f"{kind}.ray.io/llama-{folder} created (server dry run)" in dry_run(lab, K8S / folder)


@pytest.mark.parametrize("component", sorted(path.name for path in (K8S / "components").iterdir()))
def test_the_server_takes_every_component(lab: Lab, tmp_path: Path, component: str) -> None:
    needed = OTHERS.get(component)
    if needed and run(lab.command("get", "crd", needed), 60).returncode != 0:
        pytest.skip(f"{lab.where} does not know {needed}: install its operator there")
    shutil.copytree(K8S, tmp_path / "k8s")
    own = tmp_path / "k8s" / "overlays" / "own"
    own.mkdir()
    used = {"resources": ["../../base"], "components": [f"../../components/{component}"]}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(used))
    taken = dry_run(lab, own)
    assert "rayservice.ray.io/llama created (server dry run)" in taken
    for manifest in (K8S / "components" / component).iterdir():
        if manifest.name != "kustomization.yaml":
            assert f"{manifest.stem}" in taken


@pytest.mark.parametrize(
    ("word", "misspelt"),
    [
        ("rayStartParams", "rayStartParam"),
        ("readinessProbe", "readinesProbe"),
        ("serveConfigV2", "serveConfig"),
        ("sizeLimit", "sizelimits"),
        ("authOptions", "authOption"),
    ],
)
def test_a_misspelt_field_is_refused(lab: Lab, tmp_path: Path, word: str, misspelt: str) -> None:
    text = (PROJECT / "k8s" / "base" / "rayservice.yaml").read_text("utf-8")
    assert f"{word}:" in text
    (tmp_path / "wrong.yaml").write_text(text.replace(f"{word}:", f"{misspelt}:", 1))
    said = lab.refusal("apply", "-f", tmp_path / "wrong.yaml", "--dry-run=server", "--validate=strict")
    assert misspelt in said


def test_a_broken_manifest_does_not_pass(lab: Lab, tmp_path: Path) -> None:
    """What the other tests rest on: a group without its resources is refused by the operator, and says so."""
    text = (PROJECT / "k8s" / "base" / "rayservice.yaml").read_text("utf-8")
    service = yaml.safe_load(text)
    service["metadata"]["name"] = "broken"
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] = "1"
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(service))
    lab.kubectl("apply", "-f", tmp_path / "broken.yaml")
    try:
        until(lambda: "resource fields should not be set in both" in lab.look(), "the operator says why", 30)
    finally:
        lab.kubectl("delete", "-f", tmp_path / "broken.yaml", within_s=60)


@pytest.mark.usefixtures("applied")
def test_it_serves_and_pods_are_what_the_file_says(lab: Lab) -> None:
    until(lambda: ready(lab), "the RayService is ready", READY_WITHIN_S)
    until(lambda: workers(lab), "the gateway answers", 30)
    with asking(lab) as load:
        load.wait(20, 60)
        assert load.lost() == []
        assert {answer["path"].split(";")[0].split(">")[0] for answer in load.answers} == {"prefill-worker-0"}
        assert all(">decode-worker-" in answer["path"] for answer in load.answers)
    told = workers(lab)
    assert {name: worker["node"].rstrip("01") for name, worker in told.items()} == {
        **{"prefill-worker-0": "prefill-", "decode-worker-0": "decode-", "decode-worker-1": "decode-"}
    }
    assert len({worker["node"] for worker in told.values()}) == 3
    pods = lab.pods()
    assert set(pods) == {"head", "prefill-0", "decode-0", "decode-1"}
    for name, pod in pods.items():
        (container,) = pod["spec"]["containers"]  # no autoscaler where nothing can grow
        assert pod["spec"]["serviceAccountName"] == NAME
        assert container["resources"]["limits"]["memory"] == ("4736Mi" if name == "head" else "3684Mi")
        identity, shm = lab.kubectl(
            "exec", pod["metadata"]["name"], "--", "sh", "-c", "id -u; df --output=size -m /dev/shm | tail -1"
        ).split()
        assert identity == "1000"
        assert int(shm) == (640 if name == "head" else 612)
    assert pods["decode-1"]["metadata"]["labels"]["handoff.role"] == "decode"
    assert lab.get("poddisruptionbudgets")[0]["status"]["currentHealthy"] >= 1


def test_a_lost_pod_and_new_gateways_cost_no_request(lab: Lab, applied: Path) -> None:
    """Gateways are replaced while the lost pod's worker comes back; the new ones find it."""
    before, cluster = uids(lab), active(lab)
    with asking(lab) as load:
        load.wait(3, 60, ">")
        worker = load.answers[-1]["path"].split(";")[0].split(">")[1]
        lost = workers(lab)[worker]["node"]
        pod = lab.pods()[lost]["metadata"]["name"]
        lab.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
        load.wait(30, 60)
        edited = content(lab, router={"mode": "replicas"})
        lab.kubectl("apply", "-k", write(edited, lab, applied) / "test")
        load.wait(3, BACK_WITHIN_S, "undivided")
        load.wait(3, BACK_WITHIN_S, f"{worker}; undivided")  # all take turns
        assert load.lost() == []
    assert active(lab) == cluster
    after = uids(lab)
    assert {name for name in before if after[name] != before[name]} == {lost}


def test_what_workers_are_made_from_makes_a_new_cluster_and_nothing_is_lost(lab: Lab, applied: Path) -> None:
    """From fake engines to vLLM's, from three nodes to two."""
    cluster = active(lab)
    with asking(lab) as load:
        load.wait(3, 30)
        lab.kubectl("apply", "-k", write(growing(lab), lab, applied) / "test")
        until(lambda: active(lab) != cluster, "the new cluster serves", READY_WITHIN_S)
        until(lambda: set(workers(lab)) == {"prefill-worker-0", "decode-worker-0"}, "requests go there", 60)
        load.wait(5, 60, "always")
        until(lambda: len(lab.get("rayclusters")) == 1, "the old cluster is gone", GONE_WITHIN_S)
        load.wait(20, 60)
        assert load.lost() == []
    pods = lab.pods()
    assert set(pods) == {"head", "prefill-0", "decode-0"}
    more = pods["prefill-0"]
    assert more["spec"]["containers"][0]["resources"]["limits"]["memory"] == "4196Mi"
    assert more["metadata"]["labels"]["handoff.role"] == "both"


def test_a_worker_comes_with_the_load_in_a_pod_of_its_own(lab: Lab, applied: Path) -> None:
    """Ray's autoscaler has its pod made, and gives it back when the worker has left."""
    cluster = active(lab)
    eager = {"occupied": 0.05, "smooth_s": 1, "idle_s": 3}  # share of a worker's slots
    lab.kubectl("apply", "-k", write(growing(lab, roles=eager), lab, applied) / "test")
    with asking(lab) as load, asking(lab) as beside:
        until(lambda: "decode-worker-1" in workers(lab), "a decode worker is added", BACK_WITHIN_S)
        assert workers(lab)["decode-worker-1"]["node"] == "decode-1"
        assert lab.pods()["decode-1"]["metadata"]["labels"]["handoff.role"] == "decode"
        beside.wait(3, 60, ">decode-worker-1")
        assert load.lost() == beside.lost() == []
    until(lambda: "decode-worker-1" not in workers(lab), "it is given up", 60)
    until(lambda: set(lab.pods()) == {"head", "prefill-0", "decode-0"}, "its pod is gone", GONE_WITHIN_S)
    assert active(lab) == cluster


def test_experiments_run_on_nodes_that_come_and_go(lab: Lab, applied: Path, tmp_path: Path) -> None:
    """Ray's autoscaler has nodes made when an experiment asks for them, and gives them back afterwards.

    Placement runs as a RayJob; serving on the cluster that stays, where a second command runs it.
    """
    lab.kubectl("delete", "-k", applied / "overlays" / "test", "--wait=false")
    edited = small(lab, kubernetes={**kubernetes(lab), "experiment": "placement"})
    for node in edited["nodes"].values():
        node["object_store"] = "160MiB"  # twice the model and more
    overlays = write(edited, lab, applied)
    for name in ("experiment", "experiments"):
        lab.kubectl("apply", "-k", overlays / name, "--validate=strict")

    def status() -> str:
        (job,) = lab.get("rayjobs")
        return str(job.get("status", {}).get("jobStatus", ""))

    def nodes(of: str) -> set[str]:
        found = lab.get("pods", "-l", f"ray.io/is-ray-node=yes,app.kubernetes.io/instance={NAME}-{of}")
        return {pod["metadata"]["labels"]["handoff.node"] for pod in found}

    def on_head(of: str, *command: str, within_s: float = 60) -> str:
        selector = f"app.kubernetes.io/instance={NAME}-{of},handoff.node=head"
        (head,) = lab.get("pods", "-l", selector)
        name = head["metadata"]["name"]
        return lab.kubectl("exec", name, "-c", "ray", "--", *command, within_s=within_s)

    everyone = {"head", "prefill-0", "decode-0"}
    until(lambda: nodes("experiment") == everyone, "nodes come", READY_WITHIN_S)
    # The cluster that stays has made no node, because nobody has asked for one.
    ready = ("--for=condition=HeadPodReady", f"raycluster/{NAME}-experiments", "--timeout=60s")
    lab.kubectl("wait", *ready, within_s=70)
    assert nodes("experiments") == {"head"}
    until(lambda: status() in ("SUCCEEDED", "FAILED"), "the job has ended", READY_WITHIN_S)
    assert status() == "SUCCEEDED", on_head("experiment", "sh", "-c", f"cat {JOB_LOG}")
    out = tmp_path / "placement.json"
    out.write_text(on_head("experiment", "sh", "-c", f"grep -h rows {JOB_LOG}"))
    run = check(out)
    assert set(run.results["pods"].values()) == {"decode-0", "prefill-0"}
    assert "0b" in run.results["pods"] or not lab.mounted, "pods of one machine are taken for two"
    assert {"store 3 x1", "store 3 x2"} < {row["case"] for row in run.results["rows"]}
    assert "store 3 x2" in page(read([out]))
    until(lambda: nodes("experiment") == {"head"}, "idle nodes are given back", GONE_WITHIN_S)

    serving = on_head("experiments", "python", "-m", "experiments.on_cluster", within_s=READY_WITHIN_S)
    (line,) = [line for line in serving.splitlines() if line.startswith('{"experiment"')]
    rows = json.loads(line)["rows"]
    assert [row["prompt_tokens"] for row in rows] == [128, 512, 1024]
    assert {path for row in rows for path in row["paths"]} == {"prefill-worker-0>decode-worker-0"}
    until(lambda: nodes("experiments") == {"head"}, "idle nodes are given back", GONE_WITHIN_S)


def test_deleting_leaves_nothing(lab: Lab, applied: Path) -> None:
    for name in ("experiment", "experiments"):
        lab.kubectl("delete", "-k", applied / "overlays" / name, within_s=GONE_WITHIN_S)

    def left() -> list[str]:
        kinds = "pods,services,rayservices,rayclusters,rayjobs,secrets,configmaps"
        kinds += ",serviceaccounts,networkpolicies,poddisruptionbudgets,roles,rolebindings"
        own = {"ServiceAccount/default", "ConfigMap/kube-root-ca.crt", f"Pod/{CLIENT}"}
        return sorted({f"{item['kind']}/{item['metadata']['name']}" for item in lab.get(kinds)} - own)

    until(lambda: not left(), "nothing is left", GONE_WITHIN_S)
