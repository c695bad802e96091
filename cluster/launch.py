"""What has to be started for a cluster file on one machine: commands and environments, as plain values.

Ray's own services, Serve's controller and the gateway get a node of their own, the head. It has a small
object store, and CPUs and `gateway` units for the gateway's replicas. So no worker competes with
them for the CPUs of its node, and the death of any node of the file leaves the cluster standing.

Every node has an address of its own in 127.0.0.0/8 (all of which is local on Linux). `ray start` replaces
127.0.0.1 by the machine's outer address, and distinct addresses keep `node:ADDRESS` resources and logs as
telling as on a real cluster.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from cluster.file import ClusterFile, Node
from cluster.names import GATEWAY, HEAD, LABEL_GROUP, LABEL_NODE, LABEL_ROLE

FIRST_ADDRESS: Final = IPv4Address("127.0.0.2")
HEAD_OBJECT_STORE: Final = 128 * 2**20
HEAD_MEMORY: Final = 2 * 2**30

MARKER: Final = "HANDOFF_CLUSTER"
"""Environment variable that every process of a local cluster carries: `NAME:ID`."""

RAY_ENVIRONMENT: Final[Mapping[str, str]] = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise an object written to a fresh piece of the store pays for its page faults: a tenth of the
    # speed.
    "RAY_preallocate_plasma_memory": "1",
    # Ray would give its workers, the engines and the gateway, the lowest priority but four.
    "RAY_worker_niceness": "0",
    # Idle Python workers cost CPU at start and nothing here would use them.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
"""Of every Ray process, wherever it runs."""

NODE_NAME: Final = "HANDOFF_NODE_NAME"


AGENT_PORTS: Final[Mapping[str, str]] = {
    "dashboard-agent-listen-port": "dashboard_agent_listen_port",
    "dashboard-agent-grpc-port": "metrics_agent_port",
    "runtime-env-agent-port": "runtime_env_agent_port",
    "metrics-export-port": "metrics_export_port",
}
"""Ports of a node's agents: options of `ray start`, and the names by which the agents tell the raylet."""


@dataclass(frozen=True)
class Ports:
    """Free ports: for services that only the head has, and for the agents of each node, the head first."""

    gcs: int
    client: int
    dashboard: int
    agents: tuple[tuple[int, ...], ...]

    def of_node(self, index: int) -> dict[str, int]:
        """The agents' ports of the node at `index`, the head being 0."""
        return dict(zip(AGENT_PORTS.values(), self.agents[index], strict=True))

    @staticmethod
    def needed(nodes: int) -> int:
        """How many ports a cluster of `nodes` nodes needs, the head counted."""
        return 3 + len(AGENT_PORTS) * nodes

    @classmethod
    def of(cls, free: Sequence[int]) -> "Ports":
        """Deal out `free`, as many as `needed` says."""
        size = len(AGENT_PORTS)
        agents = tuple(tuple(free[start : start + size]) for start in range(3, len(free), size))
        return cls(free[0], free[1], free[2], agents)


@dataclass(frozen=True)
class NodeLaunch:
    """One node to start.

    argv: arguments of `ray start`. env: environment on top of the cluster's. agents: the ports of its agents,
    by the names of `AGENT_PORTS`.
    """

    name: str
    group: str
    role: str
    address: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    agents: Mapping[str, int]


def launches(
    file: ClusterFile, temp_dir: Path, ports: Ports, cores: Sequence[int], net: str | None = None
) -> list[NodeLaunch]:
    """All nodes to start, the head first.

    cores: the CPUs that this process may run on. net: see `address_of`.
    """
    gcs = f"{address_of(0, net)}:{ports.gcs}"
    binds = cpu_binds(file, cores)
    nodes = [_head(file, address_of(0, net), temp_dir, ports)]
    for index, node in enumerate(file.each_node(), start=1):
        env = {NODE_NAME: node.name, "VLLM_CPU_OMP_THREADS_BIND": binds[node.name]}
        address = address_of(index, net)
        common = _common(node.name, index, address, temp_dir, ports)
        argv = (f"--address={gcs}", *offer(file, node), *common)
        role, agents = node.spec.role, ports.of_node(index)
        nodes.append(NodeLaunch(node.name, node.group, role, address, argv, env, agents))
    return nodes


def cpu_binds(file: ClusterFile, cores: Sequence[int]) -> dict[str, str]:
    """vLLM's `VLLM_CPU_OMP_THREADS_BIND` for each node.

    Disjoint CPU lists where `cores` suffice for the `cpus` of all nodes, otherwise `nobind` everywhere: two
    engines pinned to one core are slower than two that the kernel may move.
    """
    nodes = list(file.each_node())
    if sum(node.spec.cpus for node in nodes) > len(cores):
        return {node.name: "nobind" for node in nodes}
    binds, rest = {}, list(cores)
    for node in nodes:
        mine, rest = rest[: node.spec.cpus], rest[node.spec.cpus :]
        binds[node.name] = ",".join(map(str, mine)) or "nobind"
    return binds


def shared_memory(file: ClusterFile) -> int:
    """Bytes of shared memory that the object stores of all nodes take."""
    return HEAD_OBJECT_STORE + sum(node.spec.object_store for node in file.each_node())


def cluster_environment(marker: str, token_path: Path, project: Path) -> dict[str, str]:
    """Environment of every process of the cluster, on top of the caller's.

    `project` is the folder our packages are imported from.
    """
    return {
        MARKER: marker,
        # Ray's process titles would overwrite the environment that other processes see, and the marker in it.
        "SPT_NOENV": "1",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        **RAY_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(project), os.environ.get("PYTHONPATH")])),
    }


UNWANTED: Final = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR", "RAY_NAMESPACE", "RAY_OVERRIDE_RESOURCES")
"""Variables of the caller that would redirect the nodes to another cluster."""


def _head(file: ClusterFile, address: str, temp_dir: Path, ports: Ports) -> NodeLaunch:
    argv = (
        "--head",
        f"--port={ports.gcs}",
        f"--ray-client-server-port={ports.client}",
        f"--dashboard-port={ports.dashboard}",
        # Turns off the web pages, the job and the state API, not the metrics or Serve; saves CPU.
        "--include-dashboard=false",
        "--no-monitor",  # the autoscaler has nothing to scale here
        *head_offer(file),
        *_common(HEAD, 0, address, temp_dir, ports),
    )
    return NodeLaunch(HEAD, HEAD, GATEWAY, address, argv, {NODE_NAME: HEAD}, ports.of_node(0))


def offer(file: ClusterFile, node: Node, gateways: int = 0) -> tuple[str, ...]:
    """What a node of the file brings, as arguments of `ray start`. `gateways`: room for replicas."""
    spec = node.spec
    labels = {LABEL_NODE: node.name, LABEL_GROUP: node.group, LABEL_ROLE: spec.role, **spec.labels}
    resources = file.resources_of(node) | ({GATEWAY: gateways} if gateways else {})
    return (
        f"--num-cpus={spec.cpus + gateways}",
        f"--num-gpus={spec.gpus}",
        f"--memory={spec.memory}",
        f"--object-store-memory={spec.object_store}",
        f"--resources={json.dumps(resources)}",
        f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}",
    )


def gateway_units(file: ClusterFile) -> int:
    """Room on the head: for the gateway's replicas, and one more, so that they can be replaced one by one."""
    return file.gateway.replicas + 1


def head_offer(file: ClusterFile) -> tuple[str, ...]:
    """What a head brings that is no node of the file: room for the gateway's replicas."""
    units = gateway_units(file)
    return (
        f"--num-cpus={units}",
        "--num-gpus=0",
        f"--memory={HEAD_MEMORY}",
        f"--object-store-memory={HEAD_OBJECT_STORE}",
        f"--resources={json.dumps({GATEWAY: units})}",
        f"--labels={LABEL_NODE}={HEAD},{LABEL_ROLE}={GATEWAY}",
    )


def address_of(index: int, net: str | None) -> str:
    """Address of a node, the head being 0. `net`: the first three parts, where each is a host of its own."""
    return str(FIRST_ADDRESS + index) if net is None else f"{net}.{index + 1}"


def _common(name: str, index: int, address: str, temp_dir: Path, ports: Ports) -> Iterator[str]:
    yield "--block"
    yield f"--node-name={name}"
    yield f"--node-ip-address={address}"
    # One folder for each node: raylets that start at the same moment in one folder choose the same socket
    # names.
    yield f"--temp-dir={temp_dir / str(index)}"
    # 0 is any free port; the default is one fixed range for all nodes.
    yield "--min-worker-port=0"
    yield "--max-worker-port=0"
    for option, port in zip(AGENT_PORTS, ports.of_node(index).values(), strict=True):
        yield f"--{option}={port}"
    yield "--include-log-monitor=false"
    yield "--disable-usage-stats"
    yield "--log-style=record"
