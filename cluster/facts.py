"""What one node is like, as far as serving depends on it: read from /proc, /sys and the environment.

`gather` reads; `cluster/doctor.py` judges. Whatever cannot be read is None or empty, and judged as such.
"""

import os
import re
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import psutil

NVIDIA: Final = "0x10de"
DISPLAY: Final = "0x03"
"""First digits of the PCI class of GPUs."""
SETTINGS: Final = ("NCCL_", "UCX_")
_ROOT: Final = Path("/")


@dataclass(frozen=True)
class Gpu:
    """A GPU on the PCI bus; `numa`: the NUMA node that it hangs on, None if the system does not say."""

    pci: str
    numa: int | None


@dataclass(frozen=True)
class RdmaDevice:
    """An InfiniBand or RoCE device.

    link: `InfiniBand` or `Ethernet`. gids: the type of each entry of port 1's GID table that is used.
    """

    name: str
    numa: int | None
    link: str
    gids: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """One node, at one moment.

    machine: the same for nodes that share a kernel.
    shm: which shared memory it is (nodes on one machine may share it), shm_bytes: its size.
    object_store: bytes that Ray, or the cluster file, gives to its object store.
    memlock, files: soft limits of this process; None: unlimited; -1: unknown.
    clock_s: how far its clock is ahead of the asking machine's; clock_error_s: how wrong that may be.
    interfaces: names of all. interface, mtu: of the one that has the node's address.
    verbs: whether an RDMA device can be opened; containers see in /sys those that they do not have.
    settings: NCCL_* and UCX_*: from the environment, or from NCCL's own files.
    versions: of packages. model: digest of the model's files; model_error: why there is none;
    model_later: it is a hub model that has not been downloaded yet.
    s3: None: not tried; empty: written, read, listed, deleted; else what went wrong.
    reaches: for each other node, empty if its port can be reached, else what went wrong.
    auth: Ray's authentication mode; None: no cluster runs. token: whether the cluster's secret is there.
    open: whether Ray's control store answers who has no token; None: not tried.
    """

    node: str
    address: str
    machine: str = ""
    shm: str = ""
    shm_bytes: int | None = None
    object_store: int | None = None
    memlock: int | None = -1
    files: int | None = -1
    clock_s: float | None = None
    clock_error_s: float = 0.0
    interfaces: tuple[str, ...] = ()
    interface: str | None = None
    mtu: int | None = None
    gpus: tuple[Gpu, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    verbs: bool = False
    numa_nodes: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    model_error: str | None = None
    model_later: bool = False
    s3: str | None = None
    reaches: Mapping[str, str] = field(default_factory=dict)
    auth: str | None = None
    token: bool | None = None
    open: bool | None = None


def gather(node: str, address: str, environment: Mapping[str, str], root: Path = _ROOT) -> Facts:
    """What can be read on this machine; `root`: of the file system."""
    interface = interface_of(address)
    memory, size = _shared_memory(root / "dev/shm")
    return Facts(
        node=node,
        address=address,
        machine=_text(root / "proc/sys/kernel/random/boot_id") or socket.gethostname(),
        shm=memory,
        shm_bytes=size,
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        interfaces=tuple(_names(root / "sys/class/net")),
        interface=interface,
        mtu=_number(root / "sys/class/net" / interface / "mtu") if interface else None,
        gpus=_gpus(root),
        rdma=_rdma(root),
        verbs=_verbs(root / "dev/infiniband"),
        numa_nodes=_numa_nodes(root),
        settings=_settings(environment, root),
    )


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None if there is none on this machine."""
    try:
        loopback = ip_address(address).is_loopback
    except ValueError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # The loopback interface has 127.0.0.1 and answers to all of 127.0.0.0/8.
        if any(one.address == address or (loopback and one.address == "127.0.0.1") for one in addresses):
            return name
    return None


def _shared_memory(folder: Path) -> tuple[str, int | None]:
    try:
        found = os.statvfs(folder)
        return str(folder.stat().st_dev), found.f_frsize * found.f_blocks
    except OSError:
        return "", None


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _gpus(root: Path) -> tuple[Gpu, ...]:
    devices = root / "sys/bus/pci/devices"
    return tuple(
        Gpu(name, _numa(devices / name))
        for name in _names(devices)
        if _text(devices / name / "vendor") == NVIDIA
        and (_text(devices / name / "class") or "").startswith(DISPLAY)
    )


def _rdma(root: Path) -> tuple[RdmaDevice, ...]:
    folder = root / "sys/class/infiniband"
    found = []
    for name in _names(folder):
        port = folder / name / "ports/1"
        types = port / "gid_attrs/types"
        gids = {int(index): text for index in _names(types) if (text := _text(types / index))}
        link = _text(port / "link_layer") or "unknown"
        found.append(RdmaDevice(name, _numa(folder / name / "device"), link, gids))
    return tuple(found)


def _verbs(folder: Path) -> bool:
    names = [name for name in _names(folder) if name.startswith("uverbs")]
    return any(os.access(folder / name, os.R_OK | os.W_OK) for name in names)


def _numa(device: Path) -> int | None:
    number = _number(device / "numa_node")
    return None if number is None or number < 0 else number


def _numa_nodes(root: Path) -> int | None:
    """How many NUMA nodes there are, from a list such as `0-1,3`."""
    text = _text(root / "sys/devices/system/node/online")
    if not text or not re.fullmatch(r"[\d,-]+", text):
        return None
    ends = [part.split("-") for part in text.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in ends)


def _settings(environment: Mapping[str, str], root: Path) -> dict[str, str]:
    """The environment's win over those of NCCL's files."""
    own = environment.get("NCCL_CONF_FILE")
    home = environment.get("HOME")
    user = Path(own) if own else Path(home) / ".nccl.conf" if home else None
    found = dict[str, str]()
    for path in (root / "etc/nccl.conf", user):
        for line in (_text(path) or "").splitlines() if path is not None else ():
            name, equals, value = line.partition("=")
            if equals and not name.lstrip().startswith("#"):
                found[name.strip()] = value.strip()
    given = {**found, **environment}
    return {name: value for name, value in sorted(given.items()) if name.startswith(SETTINGS)}


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str | None:
    """A file's text; some of /sys can be listed and not be read."""
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None
