"""Every item of the doctor: a mistake is found by name, on its node, with a remedy; sound nodes pass."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import nccl_log
from cluster.doctor import examine
from cluster.facts import Facts, Gpu, RdmaDevice, gather, interface_of
from cluster.findings import Finding, differing

GIB = 2**30
V2 = {0: "IB/RoCE v1", 1: "RoCE v2", 2: "IB/RoCE v1", 3: "RoCE v2"}
CARD = RdmaDevice("mlx5_0", 0, "Ethernet", V2)
SETTINGS = {
    "NCCL_IB_DISABLE": "0",
    "NCCL_NET_GDR_LEVEL": "5",
    "NCCL_IB_HCA": "mlx5_0",
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_SOCKET_IFNAME": "ens1",
    "NCCL_BUFFSIZE": "8388608",
    "NCCL_DEBUG": "INFO",
    "UCX_NET_DEVICES": "mlx5_0:1",
}


def node(name: str, other: str, number: int) -> Facts:
    return Facts(
        node=name,
        address=f"10.0.0.{number}",
        machine=f"boot-{number}",
        shm="25",
        shm_bytes=64 * GIB,
        object_store=8 * GIB,
        memlock=None,
        files=65536,
        clock_s=0.001 * number,
        clock_error_s=0.002,
        interfaces=("lo", "ens1f0"),
        interface="ens1f0",
        mtu=9000,
        gpus=(Gpu("0000:17:00.0", 0),),
        rdma=(CARD,),
        verbs=True,
        numa_nodes=2,
        settings=SETTINGS,
        versions={"ray": "2.60.0", "vllm": "0.32.0", "torch": "2.13.0", "nixl": "1.5.1"},
        model="8d5f0c",
        s3="",
        reaches={other: ""},
        auth="token",
        token=True,
        open=False if number == 1 else None,
    )


A, B = node("a", "b", 1), node("b", "a", 2)
GOOD_LOG = """
host-a:12:34 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB ens1f0:10.0.0.1<0>
host-a:12:34 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
host-a:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""
STAGED_LOG = """
host-a:12:34 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'
host-a:12:34 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0
host-a:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""
LOADED_LOG = "nvidia_peermem 16384 0\nhost-a:12:34 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via P2P/IPC\n"


def judged(nodes: list[Facts], log: str | None = GOOD_LOG) -> dict[str, list[Finding]]:
    found = dict[str, list[Finding]]()
    for finding in examine(nodes, None if log is None else nccl_log.read([log])):
        found.setdefault(finding.item, []).append(finding)
    return found


def setting(**changed: str | None) -> dict[str, Any]:
    given = {name: value for name, value in {**SETTINGS, **changed}.items() if value is not None}
    return {"settings": given}


ITEMS = {
    *("version of ray", "version of vllm", "version of torch", "version of nixl", "model files"),
    *("shared memory", "locked memory limit", "open files limit", "clock", "MTU", "ports", "bucket"),
    *("token authentication", "RDMA devices", "NUMA affinity", "GPUDirect RDMA", "UCX_TLS", *SETTINGS),
}


def test_sound_nodes_pass_every_item() -> None:
    found = judged([A, B])
    assert set(found) == ITEMS
    assert {item: ones[0].level for item, ones in found.items() if ones[0].level != "pass"} == {}
    assert all(len(ones) == 1 and ones[0].found and not ones[0].remedy for ones in found.values())


# What node b has, the item that must say so, the level, and a part of what it says.
WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"versions": {**B.versions, "ray": "2.59.0"}}, "version of ray", "fail", "2.59.0 on b"),
    ({"versions": {**B.versions, "vllm": "0.31.0"}}, "version of vllm", "fail", "0.32.0 on a"),
    ({"versions": {**B.versions, "torch": "2.12.0"}}, "version of torch", "fail", "2.12.0"),
    ({"versions": {**B.versions, "nixl": "none"}}, "version of nixl", "fail", "none on b"),
    ({"model": "77aa"}, "model files", "fail", "77aa on b"),
    (
        {"model": None, "model_error": "/m is no folder on this node"},
        "model files",
        "fail",
        "/m is no folder",
    ),
    ({"model": None, "model_later": True}, "model files", "warn", "not in the cache"),
    ({"shm_bytes": 64 << 20}, "shared memory", "fail", "64 MiB, object stores take 8 GiB"),
    ({"shm_bytes": int(8.5 * GIB)}, "shared memory", "warn", "8.5 GiB, object stores take 8 GiB"),
    ({"shm_bytes": 64 << 20, "object_store": None}, "shared memory", "warn", "64 MiB"),
    ({"memlock": 8 << 20}, "locked memory limit", "fail", "8 MiB"),
    ({"memlock": -1}, "locked memory limit", "fail", "unknown"),
    ({"files": 1024}, "open files limit", "fail", "1024"),
    ({"files": 5000}, "open files limit", "warn", "5000"),
    ({"files": -1}, "open files limit", "warn", "unknown"),
    ({"clock_s": 0.5}, "clock", "warn", "0.50 s ahead of a"),
    ({"clock_s": 3600.0}, "clock", "fail", "3600.00 s ahead of a"),
    ({"clock_s": None}, "clock", "warn", "not known"),
    ({"mtu": 1500}, "MTU", "fail", "1500 on b"),
    ({"mtu": None}, "MTU", "warn", "10.0.0.2"),
    ({"reaches": {"a": "10.0.0.1:40001: timed out"}}, "ports", "fail", "a cannot be reached: 10.0.0.1:40001"),
    ({"s3": "s3://kv at AWS refused: ACCESS_DENIED"}, "bucket", "fail", "ACCESS_DENIED"),
    ({"auth": "disabled"}, "token authentication", "fail", "disabled"),
    ({"token": False}, "token authentication", "fail", "no token"),
    ({"open": True}, "token authentication", "fail", "answers who has no token"),
    ({"rdma": ()}, "RDMA devices", "fail", "none, but a has some"),
    ({"verbs": False}, "RDMA devices", "fail", "can be opened"),
    ({"gpus": (Gpu("0000:ca:00.0", 1),)}, "NUMA affinity", "warn", "0000:ca:00.0 is on NUMA node 1"),
    ({"gpus": (Gpu("0000:ca:00.0", None),)}, "NUMA affinity", "warn", "does not say"),
    *(({**setting(**{name: None})}, name, "warn", "not set") for name in SETTINGS),
    (setting(NCCL_IB_DISABLE="1"), "NCCL_IB_DISABLE", "fail", "TCP sockets"),
    (setting(NCCL_NET_GDR_LEVEL="LOC"), "NCCL_NET_GDR_LEVEL", "fail", "off"),
    (setting(NCCL_NET_GDR_LEVEL="PIX"), "NCCL_NET_GDR_LEVEL", "warn", "PIX"),
    (setting(NCCL_IB_HCA="mlx4"), "NCCL_IB_HCA", "fail", "matches none of mlx5_0"),
    (setting(NCCL_IB_HCA="^mlx5_0"), "NCCL_IB_HCA", "fail", "matches none of mlx5_0"),
    (setting(NCCL_IB_GID_INDEX="2"), "NCCL_IB_GID_INDEX", "fail", "IB/RoCE v1; RoCE v2: 1, 3"),
    (setting(NCCL_IB_GID_INDEX="7"), "NCCL_IB_GID_INDEX", "fail", "no GID of that index"),
    (setting(NCCL_IB_GID_INDEX="three"), "NCCL_IB_GID_INDEX", "fail", "no number"),
    ({"rdma": (replace(CARD, gids={}),)}, "NCCL_IB_GID_INDEX", "warn", "cannot be read"),
    (setting(NCCL_SOCKET_IFNAME="=ens1"), "NCCL_SOCKET_IFNAME", "fail", "matches none of lo, ens1f0"),
    (setting(NCCL_BUFFSIZE="4194304"), "NCCL_BUFFSIZE", "warn", "4194304"),
    (setting(NCCL_DEBUG="WARN"), "NCCL_DEBUG", "warn", "WARN"),
    (setting(UCX_NET_DEVICES="ens1f0"), "UCX_NET_DEVICES", "fail", "none of mlx5_0"),
    (setting(UCX_TLS="tcp,sm,self"), "UCX_TLS", "fail", "leaves RDMA out"),
    (setting(UCX_TLS="^ib"), "UCX_TLS", "fail", "leaves RDMA out"),
]


@pytest.mark.parametrize(
    ("wrong", "item", "level", "told"), WRONG, ids=[f"{one[1]}-{i}" for i, one in enumerate(WRONG)]
)
def test_a_misconfiguration_is_found_by_name(wrong: dict[str, Any], item: str, level: str, told: str) -> None:
    found = judged([A, replace(B, **wrong)])
    bad = [one for one in found[item] if one.level != "pass"]
    assert [one.level for one in bad] == [level]
    assert told in bad[0].found
    assert "b" in bad[0].node.split(", ")
    assert bad[0].remedy
    others = {one.item for ones in found.values() for one in ones if one.level in ("warn", "fail")} - {item}
    assert not others, "one mistake, one finding"


@pytest.mark.parametrize(
    ("log", "level", "told"),
    [
        (
            STAGED_LOG,
            "fail",
            "1 of 2 channels do without, such as NET/IB/0; NCCL says: GPU Direct RDMA Disabled",
        ),
        (LOADED_LOG, "fail", "proves nothing"),
        (GOOD_LOG.replace("NET/IB/0/GDRDMA", "NET/Socket/0"), "fail", "2 of 2 channels"),
        (None, "warn", "not proven"),
        (GOOD_LOG, "pass", "all 2 channels"),
    ],
)
def test_gpudirect_is_judged_from_the_log_of_nccl(log: str | None, level: str, told: str) -> None:
    (found,) = judged([A, B], log)["GPUDirect RDMA"]
    assert (found.level, bool(found.remedy)) == (level, level != "pass")
    assert told in found.found


def test_what_a_machine_lacks_is_not_applicable_and_why() -> None:
    """One CPU node without a cluster: nothing about GPUs, RDMA, other nodes, a bucket or Ray is judged."""
    bare = Facts("here", "10.0.0.9", shm_bytes=GIB, memlock=8 << 20, files=65536, mtu=1500, interface="eth0")
    found = {item: ones[0] for item, ones in judged([bare], None).items()}
    assert {item for item, one in found.items() if one.level == "pass"} == {
        *("shared memory", "open files limit", "MTU")
    }
    rest = {item: one for item, one in found.items() if one.level != "pass"}
    assert {one.level for one in rest.values()} == {"not applicable"}
    assert all(one.found for one in rest.values())
    assert {*SETTINGS, "UCX_TLS", "GPUDirect RDMA", "locked memory limit", "clock"} <= set(rest)


def test_gpus_without_rdma_have_the_settings_of_sockets_alone() -> None:
    found = judged([replace(one, rdma=(), settings={}) for one in (A, B)], None)
    levels = {item: {one.level for one in found[item]} for item in SETTINGS}
    sockets = {"NCCL_SOCKET_IFNAME", "NCCL_BUFFSIZE", "NCCL_DEBUG"}
    assert {item for item, level in levels.items() if level == {"warn"}} == sockets
    assert {item for item, level in levels.items() if level == {"not applicable"}} == set(SETTINGS) - sockets


def test_infiniband_needs_no_gid_index() -> None:
    card = RdmaDevice("mlx5_0", 0, "InfiniBand")
    nodes = [replace(one, rdma=(card,), **setting(NCCL_IB_GID_INDEX=None)) for one in (A, B)]
    assert judged(nodes)["NCCL_IB_GID_INDEX"][0].level == "not applicable"


def test_nodes_of_one_machine_share_its_memory_and_its_clock() -> None:
    nodes = [replace(one, machine="boot-1", shm_bytes=12 * GIB) for one in (A, B)]
    found = judged(nodes)
    assert "object stores take 16 GiB" in found["shared memory"][0].found
    assert (found["shared memory"][0].level, found["shared memory"][0].node) == ("fail", "a, b")
    assert found["clock"][0].level == "not applicable"
    pods = [replace(one, shm=str(i)) for i, one in enumerate(nodes)]
    assert judged(pods)["shared memory"][0].level == "pass", "each has a /dev/shm of its own"


def test_the_clock_is_not_blamed_for_the_round_trip() -> None:
    assert judged([A, replace(B, clock_s=0.5, clock_error_s=0.45)])["clock"][0].level == "pass"


def test_of_three_nodes_the_odd_one_is_named() -> None:
    (found,) = differing("MTU", {"a": "9000", "b": "1500", "c": "9000"}, "fail", "")
    assert (found.node, found.found) == ("b", "9000 on a, c; 1500 on b")
    assert differing("MTU", {"a": "1", "b": "2", "c": "3"}, "fail", "")[0].node == "a, b, c"


# -- gathering ----------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", "utf-8")


def test_a_machine_is_read_from_proc_and_sys(tmp_path: Path) -> None:
    loopback = interface_of("127.0.0.5")
    assert loopback is not None
    gpu, disk = "sys/bus/pci/devices/0000:17:00.0", "sys/bus/pci/devices/0000:02:00.0"
    card = "sys/class/infiniband/mlx5_0"
    write(
        tmp_path,
        {
            "proc/sys/kernel/random/boot_id": "9d3c",
            f"sys/class/net/{loopback}/mtu": "65536",
            "sys/class/net/ens1f0/mtu": "9000",
            f"{gpu}/vendor": "0x10de",
            f"{gpu}/class": "0x030200",
            f"{gpu}/numa_node": "1",
            f"{disk}/vendor": "0x1af4",
            f"{disk}/class": "0x010000",
            f"{disk}/numa_node": "0",
            f"{card}/device/numa_node": "-1",
            f"{card}/ports/1/link_layer": "Ethernet",
            f"{card}/ports/1/gid_attrs/types/3": "RoCE v2",
            "sys/devices/system/node/online": "0-1,4",
            "etc/nccl.conf": "# NCCL_DEBUG=TRACE\nNCCL_IB_HCA=mlx5_1\nNCCL_BUFFSIZE = 8388608",
            "dev/shm/x": "",
            "dev/infiniband/uverbs0": "",
        },
    )
    environment = {"NCCL_IB_HCA": "mlx5_0", "UCX_TLS": "rc", "AWS_SECRET_ACCESS_KEY": "secret"}
    found = gather("a", "127.0.0.5", environment, tmp_path)
    assert (found.machine, found.interface, found.mtu) == ("9d3c", loopback, 65536)
    assert found.gpus == (Gpu("0000:17:00.0", 1),)
    assert found.rdma == (RdmaDevice("mlx5_0", None, "Ethernet", {3: "RoCE v2"}),)
    assert found.numa_nodes == 3
    assert found.settings == {"NCCL_BUFFSIZE": "8388608", "NCCL_IB_HCA": "mlx5_0", "UCX_TLS": "rc"}
    assert found.shm_bytes
    assert found.verbs
    assert "secret" not in repr(found)


def test_a_machine_without_any_of_it_is_read_too(tmp_path: Path) -> None:
    found = gather("a", "192.0.2.77", {}, tmp_path)
    assert (found.interface, found.mtu, found.gpus, found.rdma, found.numa_nodes) == (
        None,
        None,
        (),
        (),
        None,
    )
    assert (found.shm_bytes, found.settings, found.verbs) == (None, {}, False)
