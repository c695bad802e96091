"""The file for `ray up` on AWS: Ray's schema and EC2's take it, and each machine starts as its node."""

import os
import subprocess
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.errors import ClusterFileError
from cluster.file import load
from cluster.kube import unexpressed
from cluster.preflight import hosts_notes, obstacles
from cluster.ray_up import ray_up, shown

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "aws.yaml"


@pytest.fixture(scope="module")
def rendered() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(shown(load(EXAMPLE), EXAMPLE))
    return content


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = EXAMPLE.read_text("utf-8")
    assert text.count(old) == 1
    path = tmp_path / "cluster.yaml"
    path.write_text(text.replace(old, new))
    return path


def test_what_is_rendered_stays_what_it_was() -> None:
    golden = EXAMPLE.parents[1] / "tests" / "cluster" / "aws.ray.yaml"
    assert shown(load(EXAMPLE), EXAMPLE) == golden.read_text("utf-8"), (
        "if this is meant: handoff render examples/aws.yaml --out tests/cluster/aws.ray.yaml"
    )


def test_rays_own_schema_takes_it(rendered: dict[str, Any]) -> None:
    prepared = prepare_config(rendered)
    validate_config(prepared)
    types = prepared["available_node_types"]
    assert {name: (each["min_workers"], each["max_workers"]) for name, each in types.items()} == {
        **{"head": (0, 0), "prefill-0": (1, 1), "decode-0": (1, 1), "decode-1": (1, 1)}
    }
    assert prepared["setup_commands"] == [], "Ray's default would install another Ray"


def refusals(machine: dict[str, Any]) -> str:
    """What EC2 has against starting such a machine, by its own description of the call."""
    model = botocore.session.get_session().get_service_model("ec2")
    shape = model.operation_model("RunInstances").input_shape
    subnets = machine.pop("SubnetIds", [None])  # Ray takes one of them
    one = {**machine, **({"SubnetId": subnets[0]} if subnets[0] else {}), "MinCount": 1, "MaxCount": 1}
    return str(ParamValidator().validate(one, shape).generate_report())


def test_ec2s_own_schema_takes_every_machine(rendered: dict[str, Any]) -> None:
    for name, each in rendered["available_node_types"].items():
        machine = dict(each["node_config"])
        assert refusals(dict(machine)) == ""
        assert machine["IamInstanceProfile"]["Arn"].endswith(":instance-profile/handoff")
        adapters = [card["InterfaceType"] for card in machine.get("NetworkInterfaces", [])]
        assert adapters == ([] if name == "head" else ["efa"])
        assert machine.get("Placement") == (None if name == "head" else {"GroupName": "handoff"})
    wrong = rendered["available_node_types"]["decode-0"]["node_config"]
    assert "Plcement" in refusals({**wrong, "Plcement": {}})
    assert "VolumeSize" in refusals({**wrong, "BlockDeviceMappings": [{"Ebs": {"VolumeSize": "big"}}]})


def test_every_adapter_is_on_a_card_of_its_own(tmp_path: Path) -> None:
    content = ray_up(load(changed(tmp_path, "efa: 1\n", "efa: 4\n")))
    cards = content["available_node_types"]["decode-0"]["node_config"]["NetworkInterfaces"]
    assert [(card["NetworkCardIndex"], card["DeviceIndex"]) for card in cards] == [
        *((0, 0), (1, 1), (2, 1), (3, 1)),
    ]


def test_each_machine_starts_as_its_node(tmp_path: Path, rendered: dict[str, Any]) -> None:
    (tmp_path / "ray").write_text('#!/bin/sh\nprintf "%s\\n" "$HANDOFF_NODE_NAME" "$@"\n')
    (tmp_path / "ray").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "RAY_HEAD_IP": "10.0.0.9",
    }

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=10
        )

    begin = rendered["worker_start_ray_commands"][-1]
    for name in ("prefill-0", "decode-1"):
        (setup,) = rendered["available_node_types"][name]["worker_setup_commands"]
        run(setup)
        words = run(begin).stdout.splitlines()
        assert words[0] == name
        assert {"--address=10.0.0.9:6379", f"--node-name={name}", "--num-cpus=96"} <= set(words)
        assert any(f'"at:{name}": 1000' in word for word in words)
    (tmp_path / ".handoff-node").write_text("stranger\n")
    stranger = run(begin)
    assert stranger.returncode == 1
    assert "names no node of the cluster file" in stranger.stderr


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (", decode: c7i.48xlarge}", "}", "aws.instances.decode: is missing: the type of machine of decode-0"),
        ("head: m7i.2xlarge, ", "", "aws.instances.head: is missing"),
        ("{head:", "{typo: m7i.large, head:", "aws.instances.typo: there is no such group or node"),
        ("ami-0123456789abcdef0", "ubuntu", "aws.image: 'ubuntu' is not valid"),
        ("efa: 1\n", "efa: 33\n", "aws.efa: 33"),
        ("efa: 1\n", "env: {AWS_SECRET_KEY: x}\n", "'AWS_SECRET_KEY' looks like a secret"),
        ("region:", "regoin:", "aws.regoin: unknown key; did you mean 'region'?"),
    ],
)
def test_mistakes_in_the_section_are_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(ClusterFileError) as error:
        load(changed(tmp_path, old, new))
    assert said in str(error.value)


def test_it_is_for_ray_up_only(tmp_path: Path) -> None:
    file = load(EXAMPLE)
    (line,) = obstacles(file)
    assert "`ray up` rents (in us-east-1)" in line
    assert "aws: is for `ray up` and left out" in unexpressed(file)
    assert any("aws.ssh_key: ~/.ssh/handoff.pem" in note for note in hosts_notes(file, tmp_path / "token"))
