"""A cluster file as manifests for Kubernetes with KubeRay: a kustomize base, components and overlays.

Each node of the file is a worker group of one pod. So nodes keep their names and what they offer, whichever
pod is there: Ray starts a lost pod's workers again on the one that KubeRay puts in its place. Serving is a
RayService whose application makes workers and gateways from the file (`deployments/kube.py`).
"""

import hashlib
import json
import math
from collections.abc import Mapping, Set
from importlib.metadata import version
from typing import Any, Final

from cluster.consistent import nodes_at_first
from cluster.errors import ClusterFileError
from cluster.file import ClusterFile, Node
from cluster.kube_parts import components, overlays
from cluster.launch import HEAD_MEMORY, HEAD_OBJECT_STORE, NODE_NAME, RAY_ENVIRONMENT, gateway_units
from cluster.names import GATEWAY, HEAD, LABEL_GROUP, LABEL_NODE, LABEL_ROLE
from cluster.pods import Kubernetes, PodPlace

Manifest = dict[str, Any]

GPU: Final = "nvidia.com/gpu"
HEAD_POD_MEMORY: Final = 2 * HEAD_MEMORY
"""Ray's services, its dashboard and the gateway, which has vLLM without an engine."""
SHM_ROOM: Final = 512 * 2**20
"""Of /dev/shm, beside the object store: segments of neighbours, and what PyTorch's ranks share."""
AGENT_PORT: Final = 52365
WORKERS: Final = "handoff.workers"
"""Annotation: changes with whatever workers are made from, so that KubeRay makes a new cluster then."""
GATEWAYS_OWN: Final = {"gateway", "router", "slo", "roles", "recompute", "served_model_name", "name"}
"""What no worker is made from: gateways, and the actor that changes roles, are replaced where they are."""
RUN_AS: Final = 1000
KEPT_S: Final = 3600
"""So long the head of an experiment that has ended stays, for its logs."""
IDLE_S: Final = 60
"""On demand, a node that has been idle so long is given back."""
CLUSTER_FILE: Final = "HANDOFF_CLUSTER_FILE"
"""Variable of such a head: the cluster file's content, for `python -m experiments.on_cluster`."""


def kustomize(file: ClusterFile, monitoring: Mapping[str, Any]) -> dict[str, Manifest]:
    """All files, by their paths. Raises ClusterFileError for what pods cannot be made from.

    monitoring: `rules`, as Prometheus reads them, and `dashboard`, Grafana's JSON as text.
    """
    kubernetes = _section(file)
    base: dict[str, Manifest] = {
        "rayservice.yaml": _ray_service(file, kubernetes),
        "serviceaccount.yaml": _service_account(file),
        "networkpolicy.yaml": _network_policy(file),
        "poddisruptionbudget-head.yaml": _budget(file, "head", 1),
        "poddisruptionbudget-workers.yaml": _budget(file, "worker", len(list(file.each_node())) - 1),
    }
    base["kustomization.yaml"] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **({"namespace": kubernetes.namespace} if kubernetes.namespace else {}),
        "labels": [{"pairs": {"app.kubernetes.io/part-of": "handoff"}}],
        "resources": sorted(base),
    }
    files = {f"base/{path}": content for path, content in base.items()}
    names = [HEAD, *(node.name for node in file.each_node())]
    parts = components(file.name, names, kubernetes.image, monitoring)
    files |= {f"components/{path}": content for path, content in parts.items()}
    files |= {f"overlays/{path}": content for path, content in overlays(file.name, names).items()}
    variant = "cuda" if any(node.spec.gpus for node in file.each_node()) else "cpu"
    kubernetes = kubernetes.model_copy(update={"image": f"{kubernetes.image}-{variant}"})
    job, stay = (
        file.model_copy(update={"name": f"{file.name}-{name}"}) for name in ("experiment", "experiments")
    )
    files |= _alone("experiment", "rayjob.yaml", _ray_job(job, kubernetes), job, kubernetes)
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": stay.name},
        "spec": _for_experiments(stay, kubernetes),
    }
    return files | _alone("experiments", "raycluster.yaml", cluster, stay, kubernetes)


def _ray_job(file: ClusterFile, kubernetes: Kubernetes) -> Manifest:
    """A run of `experiments.on_cluster` on a cluster of its own, whose nodes go when the run has ended."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": file.name},
        "spec": {
            "entrypoint": f"python -m experiments.on_cluster {kubernetes.experiment}",
            "submissionMode": "HTTPMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEPT_S,
            "rayClusterSpec": _for_experiments(file, kubernetes),
        },
    }


def _alone(
    folder: str, name: str, manifest: Manifest, file: ClusterFile, kubernetes: Kubernetes
) -> dict[str, Manifest]:
    """A folder that can be applied as it is, around one manifest."""
    content = {
        name: manifest,
        "serviceaccount.yaml": _service_account(file),
        "networkpolicy.yaml": _network_policy(file),
    }
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **({"namespace": kubernetes.namespace} if kubernetes.namespace else {}),
        "resources": sorted(content),
    }
    return {
        f"{folder}/{path}": each for path, each in {**content, "kustomization.yaml": kustomization}.items()
    }


def unexpressed(file: ClusterFile) -> list[str]:
    """What of the file pods do not get, one line each, and what to do about it."""
    told = []
    if file.gateway.host not in ("0.0.0.0", "::", "127.0.0.1"):
        told.append(f"gateway.host: {file.gateway.host} is replaced by 0.0.0.0, all addresses of the pod")
    if file.gateway.api_keys_file is not None:
        told.append(
            f"gateway.api_keys_file: {file.gateway.api_keys_file} is no file of the pod; Kubernetes cannot "
            "mount one that its owner alone can read: use components/api-key"
        )
    if file.tls is not None:
        told.append("tls: mount its files in every pod, at the same paths (a patch of yours)")
    if file.map is not None:
        told.append("map: is left out; pods measure the links between them when they start")
    if file.links is not None:
        told.append("links: are emulated on one machine, and left out")
    told += [
        f"{section}: is for `ray up` and left out"
        for section in ("hosts", "aws")
        if getattr(file, section) is not None
    ]
    if file.kubernetes is not None and file.kubernetes.volume is None and file.model.startswith("/"):
        told.append(f"kubernetes.volume: is missing, so the image has to have the model at {file.model}")
    return told


def _section(file: ClusterFile) -> Kubernetes:
    if file.kubernetes is None:
        raise ClusterFileError(
            "kubernetes: is missing, and pods need an image: kubernetes: {image: NAME:TAG}; "
            "see examples/kube.yaml"
        )
    if file.name[0].isdigit():
        raise ClusterFileError(f"name: {file.name!r} names a Service there, which begins with a letter")
    if file.gateway.port == 0:
        raise ClusterFileError("gateway.port: 0 is any free port; pods need one that is known, such as 8000")
    return file.kubernetes


def _ray_service(file: ClusterFile, kubernetes: Kubernetes) -> Manifest:
    port = {"name": "serve", "port": file.gateway.port, "targetPort": "serve"}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": file.name},
        "spec": {
            # Only the head has a port of that name, so that no worker is taken for a gateway.
            "serveService": {"spec": {"ports": [port]}},
            # An old cluster has this long to answer what it has taken.
            "rayClusterDeletionDelaySeconds": math.ceil(file.gateway.limits.answer_s),
            "serveConfigV2": json.dumps(_serve_config(file), indent=2) + "\n",
            "rayClusterConfig": ray_cluster(file, kubernetes),
        },
    }


def _serve_config(file: ClusterFile) -> Manifest:
    return {
        "proxy_location": "Disabled",  # gateways listen themselves
        "applications": [
            {
                "name": "handoff",
                "route_prefix": "/",
                "import_path": "deployments.kube:app",
                "args": {"cluster": _content(file)},
            }
        ],
    }


def _content(file: ClusterFile) -> Manifest:
    """What of the file the pods are told."""
    content = file.model_dump(
        mode="json", exclude_defaults=True, exclude={"hosts", "aws", "kubernetes", "links", "map"}
    )
    gateway = {**content.get("gateway", {}), "host": "0.0.0.0", "port": file.gateway.port}
    gateway.pop("api_keys_file", None)
    return {**content, "gateway": gateway}


def _workers_digest(file: ClusterFile) -> str:
    made_from = {key: value for key, value in _content(file).items() if key not in GATEWAYS_OWN}
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]


def ray_cluster(file: ClusterFile, kubernetes: Kubernetes) -> Manifest:
    """The specification of a RayCluster; nodes for workers that are not always there are made on demand."""
    cluster = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},  # the operator makes the secret, unless it is told of one
        "headGroupSpec": _head(file, kubernetes),
        "workerGroupSpecs": [_worker_group(file, kubernetes, node) for node in file.each_node()],
    }
    later = {node.name for node in file.each_node()} - nodes_at_first(file)
    return _on_demand(cluster, later) if later and file.asks(most=True) != file.asks() else cluster


def _for_experiments(file: ClusterFile, kubernetes: Kubernetes) -> Manifest:
    """A RayCluster all of whose nodes are made on demand, and whose head knows the cluster file."""
    cluster = ray_cluster(file, kubernetes)
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    container["env"].append({"name": CLUSTER_FILE, "value": json.dumps(_content(file))})
    return _on_demand(cluster, {node.name for node in file.each_node()})


def _on_demand(cluster: Manifest, nodes: Set[str]) -> Manifest:
    """Ray's autoscaler has these nodes made when they are asked for, and gives idle ones back."""
    pod = cluster["headGroupSpec"]["template"]["spec"]
    pod["automountServiceAccountToken"] = True  # the autoscaler changes the number of pods
    (container,) = pod["containers"]
    for group in cluster["workerGroupSpecs"]:
        if group["groupName"] in nodes:
            group.update(replicas=0, minReplicas=0)
    autoscaler = {
        "version": "v2",
        "idleTimeoutSeconds": IDLE_S,
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": container["securityContext"],
    }
    return {**cluster, "enableInTreeAutoscaling": True, "autoscalerOptions": autoscaler}


def _head(file: ClusterFile, kubernetes: Kubernetes) -> Manifest:
    units = gateway_units(file)
    container = _container(kubernetes, HEAD, units, 0, HEAD_POD_MEMORY + HEAD_OBJECT_STORE + SHM_ROOM)
    container["ports"] = [
        {"name": "gcs-server", "containerPort": 6379},
        {"name": "dashboard", "containerPort": 8265},
        {"name": "serve", "containerPort": file.gateway.port},
    ]
    template = _template(file, kubernetes, container, HEAD_OBJECT_STORE, PodPlace())
    template["metadata"]["annotations"] = {WORKERS: _workers_digest(file)}
    return {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "object-store-memory": str(HEAD_OBJECT_STORE)},
        "resources": {"CPU": str(units), "memory": str(HEAD_MEMORY), GATEWAY: str(units)},
        "labels": {LABEL_NODE: HEAD, LABEL_ROLE: GATEWAY},
        "template": template,
    }


def _worker_group(file: ClusterFile, kubernetes: Kubernetes, node: Node) -> Manifest:
    spec = node.spec
    custom = {name: str(units) for name, units in file.resources_of(node).items()}
    memory = spec.memory + spec.object_store + SHM_ROOM
    container = _container(kubernetes, node.name, spec.cpus, spec.gpus, memory)
    place = kubernetes.pods.get(node.name) or kubernetes.pods.get(node.group) or PodPlace()
    return {
        "groupName": node.name,
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "rayStartParams": {"object-store-memory": str(spec.object_store)},
        # GPUs are counted from the container's limits.
        "resources": {"CPU": str(spec.cpus), "memory": str(spec.memory), **custom},
        "labels": {
            LABEL_NODE: node.name,
            LABEL_GROUP: node.group,
            LABEL_ROLE: spec.role,
            **spec.labels,
        },
        "template": _template(file, kubernetes, container, spec.object_store, place),
    }


def _container(kubernetes: Kubernetes, name: str, cpus: int, gpus: int, memory: int) -> Manifest:
    # Operators set the mode where they set the token.
    ray_environment = {key: value for key, value in RAY_ENVIRONMENT.items() if key != "RAY_AUTH_MODE"}
    # No cores of a pod are its own: threads that are bound to some would share them with a neighbour's.
    own = {NODE_NAME: name, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HOME": "/home/handoff"}
    gpu = {GPU: str(gpus)} if gpus else {}
    mounts: list[Manifest] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "home", "mountPath": "/home/handoff"},
    ]
    if kubernetes.volume is not None:
        mounts.append({"name": "models", "mountPath": kubernetes.mount, "readOnly": True})
    return {
        "name": "ray",
        "image": kubernetes.image,
        "env": [
            {"name": key, "value": value}
            for key, value in {**ray_environment, **own, **kubernetes.env}.items()
        ],
        # No limit of CPU: it stops an engine for the rest of each 100 ms in which it has used its share.
        "resources": {
            "requests": {"cpu": str(max(1, cpus)), "memory": _mebibytes(memory)},
            "limits": {"memory": _mebibytes(memory), **gpu},
        },
        "readinessProbe": _probe(period=5, failures=3),
        "livenessProbe": _probe(period=5, failures=24),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": mounts,
    }


def _probe(period: int, failures: int) -> Manifest:
    """Ask the node's agent. Busy cores may keep it from answering for a while, which is no death."""
    return {
        "httpGet": {"path": "/api/healthz", "port": AGENT_PORT},
        "initialDelaySeconds": 5,
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _template(
    file: ClusterFile, kubernetes: Kubernetes, container: Manifest, object_store: int, place: PodPlace
) -> Manifest:
    shm = {"medium": "Memory", "sizeLimit": _mebibytes(object_store + SHM_ROOM)}
    volumes: list[Manifest] = [
        {"name": "shm", "emptyDir": shm},
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
    ]
    if kubernetes.volume is not None:
        volumes.append({"name": "models", **kubernetes.volume})
    return {
        "metadata": {"labels": _labels(file)},
        "spec": {
            "serviceAccountName": file.name,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": RUN_AS,
                "runAsGroup": RUN_AS,
                "fsGroup": RUN_AS,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **({"nodeName": place.node_name} if place.node_name else {}),
            **({"nodeSelector": dict(place.node_selector)} if place.node_selector else {}),
            **({"affinity": dict(place.affinity)} if place.affinity else {}),
            **({"tolerations": [dict(each) for each in place.tolerations]} if place.tolerations else {}),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _labels(file: ClusterFile) -> dict[str, str]:
    return {"app.kubernetes.io/name": "handoff", "app.kubernetes.io/instance": file.name}


def _mebibytes(size: int) -> str:
    return f"{math.ceil(size / 2**20)}Mi"


def _service_account(file: ClusterFile) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": file.name},
        "automountServiceAccountToken": False,
    }


def _network_policy(file: ClusterFile) -> Manifest:
    """Only pods of the cluster reach its ports, but for the API; the operator reaches what it asks."""
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": file.name},
        "spec": {
            "podSelector": {"matchLabels": _labels(file)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": _labels(file)}}]},
                {"ports": [{"port": "serve"}]},
                {"from": [operator], "ports": [{"port": "dashboard"}, {"port": AGENT_PORT}]},
            ],
        },
    }


def _budget(file: ClusterFile, kind: str, available: int) -> Manifest:
    """How many pods stay while machines are emptied: the head, and all other nodes but one."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"{file.name}-{kind}"},
        "spec": {
            "minAvailable": available,
            "selector": {"matchLabels": {**_labels(file), "ray.io/node-type": kind}},
        },
    }


def shown(content: Mapping[str, Any], source: str) -> str:
    """The text of one file."""
    import yaml

    head = f"# From {source} by `handoff render --to kustomize`; change that one instead.\n"
    return head + yaml.dump(dict(content), Dumper=_dumper(), sort_keys=False, width=110)


def _dumper() -> Any:
    """PyYAML's, but text of several lines stays readable, and nothing is written as a reference to itself."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return Dumper
