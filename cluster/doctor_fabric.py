"""The doctor's judgement of GPUs, RDMA devices, and the settings of NCCL and UCX. Pure.

NCCL's settings are those without which, as a published bring-up of a RoCE cluster found, it silently stages
in host memory. Where one is missing NCCL decides itself, which may be right: a warning. What it really did is
in its log (`cluster/nccl_log.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.facts import Facts, RdmaDevice
from cluster.findings import EVERY, Finding, Level, not_applicable, passed
from cluster.nccl_log import NcclLog

ROCE: Final = "Ethernet"
ROCE_V2: Final = "RoCE v2"
BUFFER: Final = "8388608"
_WHERE: Final = "in the environment of Ray's processes (hosts.env in the cluster file; the pods' env)"
_RDMA_TRANSPORTS: Final = ("ib", "rc", "dc", "ud", "all")


Verdict = tuple[Level, str]
"""Level and what was found."""


@dataclass(frozen=True)
class Setting:
    """A variable: the value to recommend, how a value is judged, and whether it is about RDMA devices."""

    name: str
    recommended: str
    judge: Callable[[str, Facts], Verdict]
    rdma: bool = True


def fabric(nodes: Sequence[Facts], log: NcclLog | None) -> list[Finding]:
    """All findings of this module."""
    settings = [finding for setting in NCCL for finding in nccl(nodes, setting)]
    return [*rdma(nodes), *numa(nodes), *settings, *ucx(nodes), *gpudirect(nodes, log)]


def rdma(nodes: Sequence[Facts]) -> list[Finding]:
    """If one node has RDMA devices, all with GPUs have; and those that are there can be opened."""
    item = "RDMA devices"
    having = [node for node in nodes if node.rdma]
    if not having:
        return not_applicable(item, "no node has one in /sys/class/infiniband")
    remedy = "load its driver (rdma link), or give the pod the device; NCCL and UCX use TCP there"
    found = [
        Finding(item, "fail", node.node, f"none, but {having[0].node} has some", remedy)
        for node in nodes
        if node.gpus and not node.rdma
    ]
    remedy = "give the container /dev/infiniband (an RDMA device plugin, --device), or its user the rights"
    found += [
        Finding(item, "fail", node.node, "no /dev/infiniband/uverbs* that can be opened", remedy)
        for node in having
        if not node.verbs
    ]
    names = "; ".join(f"{node.node}: {', '.join(one.name for one in node.rdma)}" for node in having)
    return found or passed(item, names)


def numa(nodes: Sequence[Facts]) -> list[Finding]:
    """Every GPU has an RDMA device on its NUMA node: bytes cross between sockets otherwise."""
    item = "NUMA affinity"
    having = [node for node in nodes if node.gpus and node.rdma]
    if not having:
        return not_applicable(item, "no node has both a GPU and an RDMA device")
    found = list[Finding]()
    for node in having:
        near = {device.numa for device in node.rdma}
        places = ", ".join(f"{device.name} on {_place(device.numa)}" for device in node.rdma)
        for gpu in node.gpus if node.numa_nodes != 1 else ():
            if gpu.numa is None or near == {None}:
                told = f"sysfs does not say on which NUMA node GPU {gpu.pci} is, or {places}"
                remedy = "look at nvidia-smi topo -m; a virtual machine must be given the topology"
                found.append(Finding(item, "warn", node.node, told, remedy))
            elif gpu.numa not in near:
                told = f"GPU {gpu.pci} is on {_place(gpu.numa)}, and {places}"
                remedy = "put a network card on the GPU's socket, or use GPUs near the one there is"
                found.append(Finding(item, "warn", node.node, told, remedy))
    return found or passed(item, "each GPU has an RDMA device on its NUMA node")


def nccl(nodes: Sequence[Facts], setting: Setting) -> list[Finding]:
    """One variable, on the nodes where NCCL will look at it."""
    having = [node for node in nodes if node.gpus and (node.rdma or not setting.rdma)]
    if not having:
        lacking = "both a GPU and an RDMA device" if setting.rdma else "a GPU, and NCCL needs one"
        return not_applicable(setting.name, f"no node has {lacking}")
    if setting.name == "NCCL_IB_GID_INDEX" and not any(_roce(node) for node in having):
        return not_applicable(setting.name, "the RDMA devices are InfiniBand, which needs none")
    found = list[Finding]()
    for node in having:
        value = node.settings.get(setting.name)
        unset: Verdict = ("warn", "not set")
        level, told = unset if value is None else setting.judge(value, node)
        if level != "pass":
            remedy = f"set {setting.name}={setting.recommended} {_WHERE}, or in /etc/nccl.conf"
            found.append(Finding(setting.name, level, node.node, told, remedy))
    values = dict.fromkeys(node.settings.get(setting.name, "") for node in having)
    return found or passed(setting.name, ", ".join(values))


def ucx(nodes: Sequence[Facts]) -> list[Finding]:
    """What UCX, which NIXL moves KV with, may use."""
    having = [node for node in nodes if node.rdma]
    names = ("UCX_NET_DEVICES", "UCX_TLS")
    if not having:
        return [one for name in names for one in not_applicable(name, "no node has an RDMA device")]
    found = list[Finding]()
    for name, judge in zip(names, (_ucx_devices, _ucx_transports), strict=True):
        verdicts = [(node, *judge(node)) for node in having]
        bad = [
            Finding(name, level, node.node, told, remedy)
            for node, level, told, remedy in verdicts
            if level != "pass"
        ]
        found += bad or passed(name, ", ".join(dict.fromkeys(told for _, _, told, _ in verdicts)))
    return found


def gpudirect(nodes: Sequence[Facts], log: NcclLog | None) -> list[Finding]:
    """Proven by the channels of NCCL's log alone."""
    item = "GPUDirect RDMA"
    run = "run an all-reduce over all nodes with NCCL_DEBUG=INFO, and give its log: --nccl-log FILE"
    if log is None:
        having = [node.node for node in nodes if node.gpus and node.rdma]
        if not having:
            return not_applicable(
                item, "no node has both a GPU and an RDMA device, and no NCCL log was given"
            )
        return [Finding(item, "warn", ", ".join(having), "not proven: no NCCL log was given", run)]
    if log.proves:
        return passed(item, f"all {len(log.direct)} channels between nodes use it: {log.direct[0]}")
    if not log.staged:
        told = "the NCCL log has no channel between nodes (via NET/...), so it proves nothing"
        return [Finding(item, "fail", EVERY, told, run)]
    total = len(log.direct) + len(log.staged)
    why = f"; NCCL says: {log.reasons[0]}" if log.reasons else ""
    told = f"{len(log.staged)} of {total} channels do without, such as {log.staged[0]}{why}"
    remedy = (
        "load nvidia-peermem or use a kernel with DMA-BUF, turn ACS off, and see the NCCL settings above; "
        "figures of this run are those of staging in host memory"
    )
    return [Finding(item, "fail", EVERY, told, remedy)]


def _ib_disable(value: str, _: Facts) -> Verdict:
    return ("pass", value) if value == "0" else ("fail", f"{value}: NCCL uses TCP sockets")


def _gdr_level(value: str, _: Facts) -> Verdict:
    if value.upper() in ("5", "SYS"):
        return "pass", value
    if value.upper() in ("0", "LOC"):
        return "fail", f"{value} turns GPUDirect RDMA off"
    return "warn", f"{value}: GPUs farther from the network card than that are staged in host memory"


def _hca(value: str, node: Facts) -> Verdict:
    if not value or _chosen(value, node):
        return "pass", value
    names = ", ".join(device.name for device in node.rdma)
    return "fail", f"{value} matches none of {names}"


def _gid_index(value: str, node: Facts) -> Verdict:
    """The entry of that index is of RoCE v2 on every RoCE device that NCCL may choose."""
    try:
        index = int(value)
    except ValueError:
        return "fail", f"{value} is no number"
    for device in _chosen(node.settings.get("NCCL_IB_HCA", ""), node):
        if device.link != ROCE:
            continue
        kind = device.gids.get(index)
        if kind is None and device.gids:
            return "fail", f"{value}: {device.name} has no GID of that index; RoCE v2: {_v2(device)}"
        if kind is not None and kind != ROCE_V2:
            return "fail", f"{value}: that GID of {device.name} is {kind}; RoCE v2: {_v2(device)}"
        if kind is None:
            return "warn", f"{value}: the GID table of {device.name} cannot be read, so it is not known"
    return "pass", value


def _socket_interface(value: str, node: Facts) -> Verdict:
    if any(_matches(value, name) for name in node.interfaces):
        return "pass", value
    return "fail", f"{value} matches none of {', '.join(node.interfaces)}"


def _buffer(value: str, _: Facts) -> Verdict:
    return ("pass" if value == BUFFER else "warn"), value


def _debug(value: str, _: Facts) -> Verdict:
    if value.upper() in ("INFO", "TRACE"):
        return "pass", value
    return "warn", f"{value}: the log will not tell whether GPUDirect RDMA is used"


NCCL: Final = (
    Setting("NCCL_IB_DISABLE", "0", _ib_disable),
    Setting("NCCL_NET_GDR_LEVEL", "5", _gdr_level),
    Setting("NCCL_IB_HCA", "DEVICE (see `rdma link`)", _hca),
    Setting("NCCL_IB_GID_INDEX", "3 (that of RoCE v2, see `show_gids`)", _gid_index),
    Setting("NCCL_SOCKET_IFNAME", "INTERFACE of this node", _socket_interface, rdma=False),
    Setting("NCCL_BUFFSIZE", BUFFER, _buffer, rdma=False),
    Setting("NCCL_DEBUG", "INFO", _debug, rdma=False),
)


def _ucx_devices(node: Facts) -> tuple[Level, str, str]:
    value, names = node.settings.get("UCX_NET_DEVICES"), [device.name for device in node.rdma]
    remedy = f"set UCX_NET_DEVICES={names[0]}:1 {_WHERE}"
    if value is None:
        return "warn", "not set: UCX chooses among all devices itself", remedy
    given = [part.partition(":")[0] for part in value.split(",")]
    if "all" in given or any(name in names for name in given):
        return "pass", value, ""
    return "fail", f"{value}: has none of {', '.join(names)}, so NIXL goes without RDMA", remedy


def _ucx_transports(node: Facts) -> tuple[Level, str, str]:
    value = node.settings.get("UCX_TLS")
    if value is None:
        return "pass", "not set: all", ""
    given = {part.partition("_")[0] for part in value.removeprefix("^").split(",")}
    left_out = "ib" in given or {"rc", "dc"} <= given
    if left_out if value.startswith("^") else not given & set(_RDMA_TRANSPORTS):
        remedy = "leave UCX_TLS out, or let it have rc: UCX_TLS=rc,cuda,sm,self"
        return "fail", f"{value} leaves RDMA out, so NIXL goes without it", remedy
    return "pass", value, ""


def _chosen(value: str, node: Facts) -> list[RdmaDevice]:
    """The devices that NCCL_IB_HCA lets NCCL use; ports (`mlx5_0:1`) are not looked at."""
    parts = ",".join(part.partition(":")[0] for part in value.split(","))
    return [device for device in node.rdma if not value or _matches(parts, device.name)]


def _matches(value: str, name: str) -> bool:
    """NCCL's lists of names: prefixes, `=` for whole names, `^` for all but those."""
    negated, rest = value.startswith("^"), value.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    parts = [part for part in rest.split(",") if part]
    hit = any(name == part if exact else name.startswith(part) for part in parts)
    return hit != negated


def _roce(node: Facts) -> bool:
    return any(device.link == ROCE for device in node.rdma)


def _v2(device: RdmaDevice) -> str:
    return ", ".join(str(index) for index, kind in sorted(device.gids.items()) if kind == ROCE_V2) or "none"


def _place(numa: int | None) -> str:
    return "an unknown NUMA node" if numa is None else f"NUMA node {numa}"
