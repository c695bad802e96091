"""Components and overlays: what differs between Kubernetes clusters, as patches over the base.

A worker group is an entry of a list, which a strategic merge would replace as a whole. So patches are JSON
6902 ones, and each first tests the name of the group that it means: another base is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Manifest = dict[str, Any]
Operation = Mapping[str, Any]

CLUSTER: Final = "/spec/rayClusterConfig"
POD: Final = "template/spec"
CONTAINER: Final = f"{POD}/containers/0"


def components(
    cluster: str, names: Sequence[str], image: str, monitoring: Mapping[str, Any]
) -> dict[str, Manifest]:
    """`names`: of the nodes, in the order of their groups; the head first. See `cluster.kube.kustomize`."""
    service = {"kind": "RayService", "name": cluster}
    account = {"kind": "ServiceAccount", "name": cluster}
    return {
        "cpu/kustomization.yaml": _component(
            patches=[_patch(service, names, lambda group: [_set_image(group, f"{image}-cpu")])]
        ),
        "cuda/kustomization.yaml": _component(
            patches=[
                _patch(service, names, lambda group: [_set_image(group, f"{image}-cuda")]),
                _patch(
                    service,
                    names,
                    lambda group: [
                        {"op": "add", "path": f"{group}/{POD}/runtimeClassName", "value": "nvidia"},
                        {"op": "add", "path": f"{group}/{POD}/tolerations", "value": [_GPU_TAINT]},
                    ],
                    head=False,
                ),
            ]
        ),
        "rdma/kustomization.yaml": _component(
            patches=[
                _patch(
                    service,
                    names,
                    lambda group: [
                        {
                            "op": "add",
                            "path": f"{group}/{CONTAINER}/resources/limits/rdma~1hca",
                            "value": "1",
                        },
                        # RDMA pins memory, which the default limit of a container does not allow.
                        {
                            "op": "add",
                            "path": f"{group}/{CONTAINER}/securityContext/capabilities/add",
                            "value": ["IPC_LOCK"],
                        },
                    ],
                    head=False,
                )
            ]
        ),
        "s3-keys/kustomization.yaml": _component(
            patches=[
                _patch(
                    service,
                    names,
                    lambda group: [
                        _add_secret(group, "AWS_ACCESS_KEY_ID", f"{cluster}-s3", "access-key"),
                        _add_secret(group, "AWS_SECRET_ACCESS_KEY", f"{cluster}-s3", "secret-key"),
                    ],
                )
            ]
        ),
        "s3-web-identity/kustomization.yaml": _component(
            patches=[
                {
                    "target": account,
                    "patch": _operations(
                        [
                            {"op": "test", "path": "/metadata/name", "value": cluster},
                            {
                                "op": "add",
                                "path": "/metadata/annotations",
                                "value": {
                                    "eks.amazonaws.com/role-arn": "arn:aws:iam::000000000000:role/handoff"
                                },
                            },
                        ]
                    ),
                }
            ]
        ),
        "api-key/kustomization.yaml": _component(
            patches=[
                _patch(
                    service,
                    names[:1],
                    lambda group: [_add_secret(group, "VLLM_API_KEY", f"{cluster}-api-key", "key")],
                )
            ]
        ),
        "token/kustomization.yaml": _component(
            patches=[
                {
                    "target": service,
                    "patch": _operations(
                        [
                            {"op": "test", "path": f"{CLUSTER}/authOptions/mode", "value": "token"},
                            {
                                "op": "add",
                                "path": f"{CLUSTER}/authOptions/secretName",
                                "value": f"{cluster}-token",
                            },
                        ]
                    ),
                }
            ]
        ),
        "external-secrets/kustomization.yaml": _component(resources=["externalsecret.yaml"]),
        "external-secrets/externalsecret.yaml": _external_secret(cluster),
        "redis/kustomization.yaml": _component(
            patches=[
                {
                    "target": service,
                    "patch": _operations(
                        [
                            {"op": "test", "path": f"{CLUSTER}/authOptions/mode", "value": "token"},
                            {
                                "op": "add",
                                "path": f"{CLUSTER}/gcsFaultToleranceOptions",
                                "value": {
                                    "redisAddress": "redis:6379",
                                    "redisPassword": {
                                        "valueFrom": {
                                            "secretKeyRef": {"name": f"{cluster}-redis", "key": "password"}
                                        }
                                    },
                                },
                            },
                        ]
                    ),
                }
            ]
        ),
        "monitoring/kustomization.yaml": _component(
            resources=["configmap.yaml", "podmonitor.yaml", "prometheusrule.yaml"]
        ),
        "monitoring/podmonitor.yaml": _pod_monitor(cluster),
        "monitoring/prometheusrule.yaml": {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": cluster},
            "spec": monitoring["rules"],
        },
        "monitoring/configmap.yaml": {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{cluster}-dashboard", "labels": {"grafana_dashboard": "1"}},
            "data": {"handoff.json": monitoring["dashboard"]},
        },
    }


def overlays(cluster: str, names: Sequence[str]) -> dict[str, Manifest]:
    """See `components`."""
    small = _patch(
        {"kind": "RayService", "name": cluster},
        names,
        lambda group: [
            {"op": "replace", "path": f"{group}/{CONTAINER}/resources/requests/cpu", "value": "100m"},
            {"op": "replace", "path": f"{group}/{CONTAINER}/resources/requests/memory", "value": "256Mi"},
            {"op": "add", "path": f"{group}/{CONTAINER}/imagePullPolicy", "value": "Never"},
        ],
    )
    return {
        "cpu/kustomization.yaml": _overlay(["cpu"]),
        "gpu/kustomization.yaml": _overlay(["cuda"]),
        "kind/kustomization.yaml": {**_overlay(["cpu"]), "patches": [small]},
    }


_GPU_TAINT: Final = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def _component(**content: Any) -> Manifest:
    return {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", **content}


def _overlay(used: Sequence[str]) -> Manifest:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../../base"],
        "components": [f"../../components/{name}" for name in used],
    }


def _patch(target: Manifest, names: Sequence[str], change: Any, head: bool = True) -> Manifest:
    """Apply `change` to the group of each name; `change` takes the group's path and gives operations."""
    operations: list[Operation] = []
    for index, name in enumerate(names):
        if index == 0:
            if not head:
                continue
            group = f"{CLUSTER}/headGroupSpec"
            guard = {"op": "test", "path": f"{group}/labels/handoff.node", "value": name}
        else:
            group = f"{CLUSTER}/workerGroupSpecs/{index - 1}"
            guard = {"op": "test", "path": f"{group}/groupName", "value": name}
        operations += [guard, *change(group)]
    return {"target": target, "patch": _operations(operations)}


def _operations(operations: Sequence[Operation]) -> str:
    import yaml

    return str(yaml.safe_dump([dict(each) for each in operations], sort_keys=False, width=110))


def _set_image(group: str, image: str) -> Operation:
    return {"op": "replace", "path": f"{group}/{CONTAINER}/image", "value": image}


def _add_secret(group: str, name: str, secret: str, key: str) -> Operation:
    source = {"secretKeyRef": {"name": secret, "key": key}}
    return {"op": "add", "path": f"{group}/{CONTAINER}/env/-", "value": {"name": name, "valueFrom": source}}


def _external_secret(cluster: str) -> Manifest:
    def entry(secret: str, key: str) -> Manifest:
        return {"secretKey": key, "remoteRef": {"key": f"handoff/{secret}", "property": key}}

    return {
        "apiVersion": "external-secrets.io/v1",
        "kind": "ExternalSecret",
        "metadata": {"name": f"{cluster}-s3"},
        "spec": {
            "refreshInterval": "1h",
            "secretStoreRef": {"name": "handoff", "kind": "SecretStore"},
            "target": {"name": f"{cluster}-s3"},
            "data": [entry("s3", "access-key"), entry("s3", "secret-key")],
        },
    }


def _pod_monitor(cluster: str) -> Manifest:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": cluster},
        "spec": {
            "jobLabel": "app.kubernetes.io/name",  # the rules ask for the job `handoff`
            "selector": {
                "matchLabels": {"app.kubernetes.io/instance": cluster, "ray.io/node-type": "head"},
            },
            "podMetricsEndpoints": [{"port": "serve", "path": "/metrics", "interval": "15s"}],
        },
    }
