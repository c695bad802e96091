"""What is started for a cluster file, as plain values."""

import json
from pathlib import Path

import pytest

from cluster.file import ClusterFile
from cluster.launch import Ports, cpu_binds, launches, shared_memory


def file(**nodes: dict[str, object]) -> ClusterFile:
    return ClusterFile.model_validate({"model": "m", "nodes": nodes})


TWO = file(a={"role": "both", "count": 2, "cpus": 2, "object_store": "1GiB", "labels": {"zone": "x"}})

PORTS = Ports.of(range(1, 1 + Ports.needed(3)))


def option(argv: tuple[str, ...], name: str) -> str:
    (value,) = [part.partition("=")[2] for part in argv if part.startswith(f"--{name}=")]
    return value


def test_the_head_comes_first_and_takes_no_workers() -> None:
    head = launches(TWO, Path("/t"), PORTS, [0])[0]
    assert (head.name, head.address) == ("head", "127.0.0.2")
    assert json.loads(option(head.argv, "resources")) == {"gateway": 2}  # one more than replicas
    assert option(head.argv, "port") == "1"


def test_every_node_has_its_own_name_address_folder_and_resources() -> None:
    _, first, second = launches(TWO, Path("/t"), PORTS, [0])
    assert [first.name, second.name] == ["a-0", "a-1"]
    assert [first.address, second.address] == ["127.0.0.3", "127.0.0.4"]
    assert [option(node.argv, "temp-dir") for node in (first, second)] == ["/t/1", "/t/2"]
    assert json.loads(option(second.argv, "resources")) == {"prefill": 1, "decode": 1, "at:a-1": 1000}
    assert option(second.argv, "labels") == "handoff.node=a-1,handoff.group=a,handoff.role=both,zone=x"
    assert [option(node.argv, "metrics-export-port") for node in (first, second)] == ["11", "15"]
    assert second.env["HANDOFF_NODE_NAME"] == "a-1"


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([0, 1, 4, 5], {"a-0": "0,1", "a-1": "4,5"}),
        ([0, 1, 4, 5, 6], {"a-0": "0,1", "a-1": "4,5"}),
        ([0, 1, 4], {"a-0": "nobind", "a-1": "nobind"}),
    ],
)
def test_engines_are_pinned_to_disjoint_cpus_where_there_are_enough(
    cores: list[int], expected: dict[str, str]
) -> None:
    assert cpu_binds(TWO, cores) == expected


def test_a_node_without_cpus_is_not_pinned() -> None:
    binds = cpu_binds(file(a={"role": "both", "cpus": 0}, b={"role": "both"}), [3])
    assert binds == {"a-0": "nobind", "b-0": "3"}


def test_shared_memory_is_that_of_all_object_stores() -> None:
    assert shared_memory(TWO) == 2 * 2**30 + 128 * 2**20
