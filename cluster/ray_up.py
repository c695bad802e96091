"""A cluster file as a file for `ray up`: machines that are reached by ssh, one Ray node on each.

Ray's provider for machines that are there knows one kind of worker and one start command for all. What a node
brings follows from its address, so the command looks up the machine's own.
"""

import json
from pathlib import Path
from typing import Any, Final

from cluster.aws_up import aws_up
from cluster.errors import ClusterFileError
from cluster.file import ClusterFile, Hosts, Node
from cluster.launch import gateway_units, head_offer, offer
from cluster.names import HEAD
from cluster.ray_start import TOKEN, start

FIRST_AUTOSCALER: Final = {"RAY_enable_autoscaler_v2": "0"}
"""The second version of Ray's autoscaler does not start the machines of this provider."""


def ray_up(file: ClusterFile) -> dict[str, Any]:
    """What `ray up` reads. Raises ClusterFileError for a file with neither `hosts` nor `aws`."""
    if file.aws is not None:
        return aws_up(file, file.aws)
    if file.hosts is None:
        raise ClusterFileError(
            "hosts: is missing, and `ray up` needs the machines: head, nodes (an address for each of "
            f"{', '.join(node.name for node in file.each_node())}) and ssh_user; or, for machines that are "
            f"rented, the section `aws`"
        )
    hosts = file.hosts
    workers = [node for node in file.each_node() if node.name != hosts.head]
    return {
        "cluster_name": file.name,
        "provider": {
            "type": "local",
            "head_ip": hosts.head_address,
            "worker_ips": [str(hosts.nodes[node.name]) for node in workers],
        },
        "auth": {"ssh_user": hosts.ssh_user, "ssh_private_key": hosts.ssh_key},
        "file_mounts": {TOKEN: TOKEN},
        "head_start_ray_commands": ["ray stop", _start_head(file, hosts)],
        "worker_start_ray_commands": ["ray stop", _start_worker(file, hosts, workers)],
    }


def _start_head(file: ClusterFile, hosts: Hosts) -> str:
    nodes = [node for node in file.each_node() if node.name == hosts.head]
    argv = (
        "--head",
        f"--port={hosts.port}",
        "--include-dashboard=false",
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
        *(offer(file, nodes[0], gateway_units(file)) if nodes else head_offer(file)),
    )
    return _start(hosts, nodes[0].name if nodes else HEAD, hosts.head_address, argv)


def _start_worker(file: ClusterFile, hosts: Hosts, workers: list[Node]) -> str:
    """One command for all: the case of the machine that it runs on."""
    cases = []
    for node in workers:
        address = str(hosts.nodes[node.name])
        argv = (f"--address={hosts.head_address}:{hosts.port}", *offer(file, node))
        cases.append(f'*" {address} "*) {_start(hosts, node.name, address, argv)};;')
    unknown = 'echo "none of the addresses $(hostname -I)is in the cluster file" >&2; exit 1'
    return f'case " $(hostname -I) " in {" ".join(cases)} *) {unknown};; esac'


def _start(hosts: Hosts, name: str, address: str, argv: tuple[str, ...]) -> str:
    return start(name, argv, {**FIRST_AUTOSCALER, **hosts.env}, address)


def shown(file: ClusterFile, path: Path) -> str:
    """The text of the file, and what to do with it."""
    import yaml

    head = (
        f"# From {path.name} by `handoff render --to ray-up`; change that one instead.\n"
        f"#\n"
        f"#   ray get-auth-token --generate    (once: the cluster's secret, {TOKEN})\n"
        f"#   ray up -y THIS_FILE\n"
        f"#   ray exec THIS_FILE 'handoff serve {path.name}'    (with the cluster file on the head)\n"
        f"#   ray down -y THIS_FILE\n"
    )
    return head + yaml.safe_dump(json.loads(json.dumps(ray_up(file))), sort_keys=False, width=110)
