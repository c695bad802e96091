"""A cluster file as a file for `ray up` on AWS: a node type for the head and one for each node of the file.

Ray knows one start command for all workers; each machine is told which node it is when it is set up.
"""

from typing import Any, Final

from cluster.aws import PORT, Aws
from cluster.file import ClusterFile, Node
from cluster.launch import gateway_units, head_offer, offer
from cluster.names import GATEWAY, HEAD
from cluster.ray_start import HEAD_ADDRESS, TOKEN, start

WHICH: Final = "~/.handoff-node"
"""Holds the name of the node that a machine is."""


def aws_up(file: ClusterFile, aws: Aws) -> dict[str, Any]:
    """What `ray up` reads."""
    types = {HEAD: _head(file, aws), **{node.name: _type(file, aws, node) for node in file.each_node()}}
    return {
        "cluster_name": file.name,
        "max_workers": len(types) - 1,
        "provider": {
            "type": "aws",
            "region": aws.region,
            "availability_zone": aws.availability_zone,
            "cache_stopped_nodes": False,
            "use_internal_ips": True,  # machines with several adapters get no public address
        },
        "auth": {"ssh_user": aws.ssh_user, "ssh_private_key": aws.ssh_key},
        "available_node_types": types,
        "head_node_type": HEAD,
        "file_mounts": {TOKEN: TOKEN},
        # Ray would install itself, in another version.
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": ["ray stop", _start_head(file, aws)],
        "worker_start_ray_commands": ["ray stop", _start_worker(file, aws)],
    }


def _head(file: ClusterFile, aws: Aws) -> dict[str, Any]:
    units = gateway_units(file)
    return {
        "resources": {"CPU": units, GATEWAY: units},
        "min_workers": 0,
        "max_workers": 0,
        "node_config": _machine(aws, aws.instances[HEAD], adapters=0, group=None),
    }


def _type(file: ClusterFile, aws: Aws, node: Node) -> dict[str, Any]:
    instance = aws.instances.get(node.name) or aws.instances[node.group]
    gpus = {"GPU": node.spec.gpus} if node.spec.gpus else {}
    return {
        "resources": {"CPU": node.spec.cpus, **gpus, **file.resources_of(node)},
        "min_workers": 1,
        "max_workers": 1,
        "node_config": _machine(aws, instance, aws.efa, aws.placement_group),
        "worker_setup_commands": [f"echo {node.name} > {WHICH}"],
    }


def _machine(aws: Aws, instance: str, adapters: int, group: str | None) -> dict[str, Any]:
    """What EC2 is asked for. adapters: EFA's; 0: an ordinary one. group: of its placement."""
    machine: dict[str, Any] = {
        "InstanceType": instance,
        "ImageId": aws.image,
        "KeyName": aws.key_name,
        "IamInstanceProfile": {"Arn": aws.instance_profile},
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": aws.disk_gib, "VolumeType": "gp3"}}
        ],
        "MetadataOptions": {"HttpTokens": "required"},
        **({"Placement": {"GroupName": group}} if group else {}),
    }
    if adapters:
        machine["NetworkInterfaces"] = [
            {
                "DeviceIndex": min(card, 1),
                "NetworkCardIndex": card,
                "InterfaceType": "efa",
                "SubnetId": aws.subnet,
                "Groups": [aws.security_group],
                "DeleteOnTermination": True,
            }
            for card in range(adapters)
        ]
    else:
        machine |= {"SubnetIds": [aws.subnet], "SecurityGroupIds": [aws.security_group]}
    return machine


def _start_head(file: ClusterFile, aws: Aws) -> str:
    argv = (
        "--head",
        f"--port={PORT}",
        "--include-dashboard=false",
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
        *head_offer(file),
    )
    return start(HEAD, argv, aws.env)


def _start_worker(file: ClusterFile, aws: Aws) -> str:
    cases = [
        f"{node.name}) {start(node.name, (*offer(file, node), f'{HEAD_ADDRESS}{PORT}'), aws.env)};;"
        for node in file.each_node()
    ]
    unknown = f'echo "{WHICH} names no node of the cluster file" >&2; exit 1'
    return f'case "$(cat {WHICH})" in {" ".join(cases)} *) {unknown};; esac'
