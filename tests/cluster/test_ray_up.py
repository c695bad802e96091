"""The file for `ray up`: Ray's own schema takes it, and each machine starts as the node that it is."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.errors import ClusterFileError
from cluster.file import ClusterFile, load
from cluster.launch import HEAD_MEMORY
from cluster.ray_up import ray_up, shown

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hosts.yaml"


def hosts(**changes: Any) -> dict[str, Any]:
    """A file's content, with two nodes and a head of their own."""
    return {
        "model": "m",
        "nodes": {
            "a": {"role": "prefill", "labels": {"zone": "x"}},
            "b": {"role": "decode", "gpus": 2},
        },
        "hosts": {
            "head": "10.9.0.1",
            "nodes": {"a-0": "10.9.0.2", "b-0": "10.9.0.3"},
            "ssh_user": "me",
            **changes,
        },
    }


def test_rays_own_schema_takes_the_example() -> None:
    config = yaml.safe_load(shown(load(EXAMPLE), EXAMPLE))
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["available_node_types"]["local.cluster.node"]["min_workers"] == 1
    assert config["provider"] == {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}


def test_what_is_rendered_stays_what_it_was() -> None:
    golden = EXAMPLE.parents[1] / "tests" / "cluster" / "hosts.ray.yaml"
    assert shown(load(EXAMPLE), EXAMPLE) == golden.read_text("utf-8"), (
        "if this is meant: handoff render examples/hosts.yaml --out tests/cluster/hosts.ray.yaml"
    )


def run_as(tmp_path: Path, command: str, addresses: str) -> subprocess.CompletedProcess[str]:
    """Run a start command by a real shell on a machine with these addresses, where `ray` prints its words."""
    for name, script in {
        "hostname": f"echo '{addresses} '",
        "ray": 'printf "%s\\n" "$HANDOFF_NODE_NAME" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=10
    )


def test_each_machine_starts_as_its_node(tmp_path: Path) -> None:
    rendered = ray_up(ClusterFile.model_validate(hosts()))
    start = rendered["worker_start_ray_commands"][-1]
    first = run_as(tmp_path, start, "172.17.0.1 10.9.0.2").stdout.splitlines()
    assert first[0] == "a-0"
    assert "--address=10.9.0.1:6379" in first
    assert '--resources={"prefill": 1, "at:a-0": 1000}' in first
    assert "--labels=handoff.node=a-0,handoff.group=a,handoff.role=prefill,zone=x" in first
    second = run_as(tmp_path, start, "10.9.0.3").stdout.splitlines()
    assert second[0] == "b-0"
    assert "--num-gpus=2" in second
    stranger = run_as(tmp_path, start, "10.9.0.33")
    assert stranger.returncode == 1
    assert "10.9.0.33" in stranger.stderr


def test_a_head_of_its_own_takes_no_workers(tmp_path: Path) -> None:
    rendered = ray_up(ClusterFile.model_validate(hosts(env={"FOO": "it's"})))
    words = run_as(tmp_path, rendered["head_start_ray_commands"][-1], "10.9.0.1").stdout
    assert '--resources={"gateway": 2}' in words.splitlines()
    assert f"--memory={HEAD_MEMORY}" in words.splitlines()
    assert "FOO='it'\"'\"'s'" in rendered["head_start_ray_commands"][-1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": {"a-0": "10.9.0.2"}}, "address of b-0 is missing"),
        (
            {"nodes": {"a-0": "10.9.0.2", "b-0": "10.9.0.3", "c-0": "10.9.0.4"}},
            "hosts.nodes.c-0: there is no such",
        ),
        ({"nodes": {"a-0": "10.9.0.2", "b-0": "10.9.0.2"}}, "10.9.0.2 is there twice"),
        ({"head": "10.9.0.2"}, "10.9.0.2 is there twice"),
        (
            {"head": "somewhere"},
            "hosts.head is 'somewhere'; give an IPv4 address, or one of the nodes: a-0, b-0",
        ),
        ({"nodes": {"a-0": "ten", "b-0": "10.9.0.2"}}, "hosts.nodes.a-0"),
        ({"ssh_user": ""}, "hosts.ssh_user"),
        ({"env": {"RAY_AUTH_TOKEN": "x"}}, "looks like a secret"),
        ({"port": 70000}, "hosts.port"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(hosts(**changes)))
    with pytest.raises(ClusterFileError) as error:
        load(path)
    assert said in str(error.value)


def test_a_file_without_hosts_is_refused() -> None:
    content = hosts()
    del content["hosts"]
    with pytest.raises(ClusterFileError, match=r"hosts: is missing.*a-0, b-0"):
        ray_up(ClusterFile.model_validate(content))
