"""A real Kubernetes runs what `handoff render` makes: `make k8s-test`. Each test goes on from the last."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_lab import PROJECT, Lab, Load, run, until, up, write

from experiments import models as made

NAME = "lab"
URL = f"http://{NAME}-serve-svc.default.svc.cluster.local:8000"
READY_WITHIN_S = 300.0
BACK_WITHIN_S = 180.0
GONE_WITHIN_S = 120.0
VLLM = {"max_model_len": 4096, "max_num_batched_tokens": 512, "enforce_eager": True, "dtype": "bfloat16"}
OVERLAYS = ("cpu", "gpu", "kind")


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    with up() as running:
        yield running


@pytest.fixture(scope="session")
def models() -> Path:
    """A folder with the model `tiny`, which pods mount."""
    folder = PROJECT / "models"
    if not (folder / "tiny" / "config.json").exists():
        made.make(folder / "tiny", "tiny", progress=print, force=False)
    return folder


@pytest.fixture(autouse=True)
def explained(lab: Lab, request: pytest.FixtureRequest) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(lab.look())


def content(models: Path, **changes: Any) -> dict[str, Any]:
    node = {"memory": "3GiB", "object_store": "100MiB"}
    return {
        "name": NAME,
        "model": "/models/tiny",
        "engine": {**VLLM, "fake": {"step_ms": 20}},
        "router": {"mode": "always"},
        "gateway": {"limits": {"answer_s": 15}},
        "kubernetes": {"image": "handoff.test/handoff:1", "volume": {"hostPath": {"path": str(models)}}},
        "nodes": {
            "prefill": {"role": "prefill", **node},
            "decode": {"role": "decode", "count": 2, **node},
        },
        "workers": {"decode": {"count": 2}},
        **changes,
    }


def small(models: Path) -> dict[str, Any]:
    """Two nodes, and vLLM's own engines."""
    smaller = content(models, engine={**VLLM, "kv_cache_memory_bytes": 1 << 30})
    smaller["nodes"]["decode"]["count"] = smaller["workers"]["decode"]["count"] = 1
    return smaller


def workers(lab: Lab) -> dict[str, dict[str, Any]]:
    told = lab_get(lab, "/handoff/workers")
    return {worker["name"]: worker for worker in told}


def lab_get(lab: Lab, path: str) -> Any:
    done = run([lab.inside, "curl", "-sf", "-m", "10", f"{URL}{path}"], 20)
    return json.loads(done.stdout) if done.returncode == 0 and done.stdout else []


def active(lab: Lab) -> str:
    (service,) = lab.get("rayservices")
    return str(service.get("status", {}).get("activeServiceStatus", {}).get("rayClusterName", ""))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_operators_own_schema_takes_every_overlay(lab: Lab, overlay: str) -> None:
    folder = PROJECT / "k8s" / "overlays" / overlay
    taken = lab.kubectl("apply", "-k", folder, "--dry-run=server", "--validate=strict")
    assert "rayservice.ray.io/llama created (server dry run)" in taken


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


def test_it_serves_and_pods_are_what_the_file_says(lab: Lab, models: Path, tmp_path: Path) -> None:
    lab.kubectl("apply", "-k", write(content(models), tmp_path / "m"), "--validate=strict")
    lab.kubectl(
        *("wait", "--for=condition=Ready", f"rayservice/{NAME}", f"--timeout={READY_WITHIN_S:.0f}s"),
        within_s=READY_WITHIN_S + 10,
    )
    until(lambda: workers(lab), "the gateway answers", 30)
    with Load(lab, URL, "tiny") as load:
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
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["serviceAccountName"] == NAME
        assert container["resources"]["limits"]["memory"] == ("4736Mi" if name == "head" else "3684Mi")
        identity, shm = lab.kubectl(
            "exec", pod["metadata"]["name"], "--", "sh", "-c", "id -u; df --output=size -m /dev/shm | tail -1"
        ).split()
        assert identity == "1000"
        assert int(shm) == (640 if name == "head" else 612)
    assert pods["decode-1"]["metadata"]["labels"]["handoff.role"] == "decode"
    assert lab.get("poddisruptionbudgets")[0]["status"]["currentHealthy"] >= 1


def test_a_lost_pod_costs_no_request_and_its_worker_comes_back(lab: Lab) -> None:
    before = lab.pods()
    lost = "decode-0"
    worker = next(name for name, each in workers(lab).items() if each["node"] == lost)
    with Load(lab, URL, "tiny") as load:
        load.wait(3, 60, f">{worker}")
        lab.kubectl("delete", "pod", before[lost]["metadata"]["name"], "--grace-period=0", "--force")
        load.wait(30, 60)
        load.wait(3, BACK_WITHIN_S, f">{worker}")
        assert load.lost() == []
    after = lab.pods()
    assert after[lost]["metadata"]["uid"] != before[lost]["metadata"]["uid"]
    assert {name for name in before if after[name]["metadata"]["uid"] != before[name]["metadata"]["uid"]} == {
        lost
    }


def test_what_gateways_are_made_from_changes_in_place(lab: Lab, models: Path, tmp_path: Path) -> None:
    cluster, before = active(lab), lab.pods()
    with Load(lab, URL, "tiny") as load:
        load.wait(3, 30, "always")
        lab.kubectl("apply", "-k", write(content(models, router={"mode": "never"}), tmp_path / "m"))
        load.wait(3, BACK_WITHIN_S, "never")
        assert load.lost() == []
    assert active(lab) == cluster
    assert {pod["metadata"]["uid"] for pod in lab.pods().values()} == {
        pod["metadata"]["uid"] for pod in before.values()
    }


def test_what_workers_are_made_from_makes_a_new_cluster_and_nothing_is_lost(
    lab: Lab, models: Path, tmp_path: Path
) -> None:
    """From fake engines to vLLM's, and from three nodes to two."""
    cluster = active(lab)
    with Load(lab, URL, "tiny") as load:
        load.wait(3, 30)
        lab.kubectl("apply", "-k", write(small(models), tmp_path / "m"))
        until(lambda: active(lab) != cluster, "the new cluster serves", READY_WITHIN_S)
        until(lambda: set(workers(lab)) == {"prefill-worker-0", "decode-worker-0"}, "requests go there", 60)
        load.wait(5, 60, "always")
        until(lambda: len(lab.get("rayclusters")) == 1, "the old cluster is gone", GONE_WITHIN_S)
        load.wait(20, 60)
        assert load.lost() == []
    assert set(lab.pods()) == {"head", "prefill-0", "decode-0"}


def test_deleting_leaves_nothing(lab: Lab, models: Path, tmp_path: Path) -> None:
    lab.kubectl("delete", "-k", write(content(models), tmp_path / "m"), within_s=GONE_WITHIN_S)

    def left() -> list[str]:
        kinds = "pods,rayservices,rayclusters,secrets,configmaps,serviceaccounts,networkpolicies"
        own = {"ServiceAccount/default", "ConfigMap/kube-root-ca.crt"}
        found = {f"{item['kind']}/{item['metadata']['name']}" for item in lab.get(kinds)}
        services = {f"Service/{item['metadata']['name']}" for item in lab.get("services")} - {
            "Service/kubernetes"
        }
        return sorted((found - own) | services)

    until(lambda: not left(), "nothing is left", GONE_WITHIN_S)


def test_an_experiment_runs_as_a_job(lab: Lab, models: Path, tmp_path: Path) -> None:
    write(small(models), tmp_path / "m")
    overlay = tmp_path / "m" / "overlays" / "experiment"
    lab.kubectl("apply", "-k", overlay, "--validate=strict")

    def status() -> str:
        (job,) = lab.get("rayjobs")
        return str(job.get("status", {}).get("jobStatus", ""))

    until(lambda: status() in ("SUCCEEDED", "FAILED"), "the job has ended", READY_WITHIN_S)
    head = lab.pods()["head"]["metadata"]["name"]
    log = lab.kubectl("exec", head, "--", "sh", "-c", "cat /tmp/ray/session_latest/logs/job-driver-*")
    assert status() == "SUCCEEDED", log
    (line,) = [line for line in log.splitlines() if line.startswith('{"experiment"')]
    rows = json.loads(line)["rows"]
    assert [row["prompt_tokens"] for row in rows] == [128, 512, 1024]
    assert {path for row in rows for path in row["paths"]} == {"prefill-worker-0>decode-worker-0"}
    lab.kubectl("delete", "-k", overlay, within_s=GONE_WITHIN_S)
    until(lambda: not lab.get("pods"), "its pods are gone", GONE_WITHIN_S)


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
