"""The doctor's judgement of all nodes' facts: pass, warn or fail for each item, and the remedy. Pure.

fail: something will not work, or is not what it seems. warn: it works, slower or less safely than it could.
Thresholds are named below. `docs/doctor.md` lists the items.
"""

from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Final

from cluster.doctor_fabric import fabric
from cluster.facts import Facts
from cluster.findings import Finding, Level, differing, listed, not_applicable, passed
from cluster.nccl_log import NcclLog
from cluster.sizes import show

FILES_LEAST: Final = 4096
"""Open files below which Ray warns of connection errors;"""
FILES_WANTED: Final = 8192
"""and those that it recommends."""
CLOCK_WARN_S: Final = 0.1
"""Times in logs and traces of several nodes do not line up any more."""
CLOCK_FAIL_S: Final = 30.0
"""S3 refuses clocks that are 15 minutes off; nobody whose clock is 30 s off keeps it by NTP."""
SHM_SHARE: Final = 0.9
"""Of shared memory, for object stores: ranks and Arrow need some as well."""
SHM_LEAST: Final = 2**30
"""Where it is not known how much is asked of it: the default object store of one node."""


def examine(nodes: Sequence[Facts], log: NcclLog | None = None) -> list[Finding]:
    """All findings. `log`: what a log of NCCL says, if one was given."""
    checks: tuple[Callable[[Sequence[Facts]], list[Finding]], ...] = (
        *(versions, model_files, shared_memory, locked_memory, open_files, clocks, mtu),
        *(ports, bucket, authentication),
    )
    return [finding for check in checks for finding in check(nodes)] + fabric(nodes, log)


def versions(nodes: Sequence[Facts]) -> list[Finding]:
    """Equal on all nodes. NIXL may be missing everywhere: it is an option."""
    found = list[Finding]()
    for package in dict.fromkeys(name for node in nodes for name in node.versions):
        item = f"version of {package}"
        values = {node.node: node.versions.get(package, "unknown") for node in nodes}
        if set(values.values()) != {"none"}:
            remedy = "install the same version everywhere (requirements/)"
            found += differing(item, values, "fail", remedy)
        elif package == "nixl":
            found += not_applicable(item, "NIXL is not installed; only `transport: nixl` needs it")
        else:
            remedy = f"install {package} (requirements/)"
            found.append(Finding(item, "fail", ", ".join(values), "not installed", remedy))
    return found


def model_files(nodes: Sequence[Facts]) -> list[Finding]:
    """Every node that takes workers reads the same model."""
    item = "model files"
    asked = [node for node in nodes if node.model or node.model_error]
    later = [node.node for node in nodes if node.model_later]
    if later:
        told = "a hub model that is not in the cache yet: the start downloads it, so it cannot be compared"
        return [Finding(item, "warn", ", ".join(later), told, "download it first: hf download MODEL")]
    if not asked:
        return not_applicable(item, "no model was named; give the cluster file")
    remedy = "copy the model there, or correct `model` of the node group"
    missing = [
        Finding(item, "fail", node.node, node.model_error, remedy) for node in asked if node.model_error
    ]
    digests = {node.node: node.model[:12] for node in asked if node.model}
    if missing and len(set(digests.values())) < 2:
        return missing
    remedy = "copy the same model to all nodes, or point `model` of their node groups at equal folders"
    return missing + differing(item, digests, "fail", remedy)


def shared_memory(nodes: Sequence[Facts]) -> list[Finding]:
    """Object stores fit into /dev/shm; nodes on one machine share it."""
    item = "shared memory"
    groups = dict[tuple[str, str], list[Facts]]()
    for node in nodes:
        if node.shm_bytes is not None:
            groups.setdefault((node.machine, node.shm), []).append(node)
    if not groups:
        return not_applicable(item, "there is no /dev/shm")
    found, fine = list[Finding](), list[str]()
    for group in groups.values():
        names, size = ", ".join(node.node for node in group), group[0].shm_bytes or 0
        needed = sum(node.object_store or 0 for node in group)
        told = f"/dev/shm has {show(size)}, object stores take {show(needed)}"
        if not needed:
            told = f"/dev/shm has {show(size)}"
        least = "enlarge /dev/shm (mount -o remount,size=SIZE, or the pod's emptyDir), or lower object_store"
        if needed > size:
            found.append(Finding(item, "fail", names, f"{told}: Ray puts the rest on disk", least))
        elif needed > size * SHM_SHARE or (not needed and size < SHM_LEAST):
            found.append(Finding(item, "warn", names, told, least))
        else:
            fine.append(told)
    return found or passed(item, "; ".join(dict.fromkeys(fine)))


def locked_memory(nodes: Sequence[Facts]) -> list[Finding]:
    """RDMA registers memory, which locks it."""
    item = "locked memory limit"
    having = [node for node in nodes if node.rdma]
    if not having:
        return not_applicable(item, "no node has an RDMA device, which would have to lock memory")
    remedy = "ulimit -l unlimited before Ray starts (memlock in limits.conf, LimitMEMLOCK, IPC_LOCK for pods)"
    found = [
        Finding(item, "fail", node.node, f"{_amount(node.memlock, show)}, not unlimited", remedy)
        for node in having
        if node.memlock is not None
    ]
    return found or passed(item, "unlimited where there are RDMA devices")


def open_files(nodes: Sequence[Facts]) -> list[Finding]:
    """Every connection, and every process of Ray, takes some."""
    item = "open files limit"
    remedy = "ulimit -n 65536 before Ray starts (nofile in limits.conf, LimitNOFILE)"
    found = list[Finding]()
    for node in nodes:
        if node.files is not None and node.files < FILES_WANTED:
            level: Level = "fail" if 0 <= node.files < FILES_LEAST else "warn"
            told = f"{_amount(node.files, str)}; at least {FILES_WANTED} are recommended"
            found.append(Finding(item, level, node.node, told, remedy))
    return found or passed(item, listed(_amount(node.files, str) for node in nodes))


def clocks(nodes: Sequence[Facts]) -> list[Finding]:
    """Clocks of different machines agree, as far as the round trip lets it be known."""
    item = "clock"
    known = {node.node: node.clock_s for node in nodes if node.clock_s is not None}
    if len({node.machine for node in nodes}) < 2:
        return not_applicable(item, "all nodes are on one machine")
    if not known:
        return not_applicable(item, "no node has told its time")
    middle = median_low(known.values())
    reference = next(name for name, clock in known.items() if clock == middle)
    error = next(node.clock_error_s for node in nodes if node.node == reference)
    found, most = list[Finding](), 0.0
    for node in nodes:
        if node.clock_s is None:
            told = "its time is not known"
            found.append(Finding(item, "warn", node.node, told, "see why the node did not answer"))
            continue
        off = node.clock_s - middle
        sure = abs(off) - error - node.clock_error_s
        most = max(most, abs(off))
        if sure > CLOCK_WARN_S:
            told = f"{abs(off):.2f} s {'ahead of' if off > 0 else 'behind'} {reference}"
            level: Level = "fail" if sure > CLOCK_FAIL_S else "warn"
            remedy = "set the clock by NTP: chronyc makestep, or timedatectl set-ntp true"
            found.append(Finding(item, level, node.node, told, remedy))
    return found or passed(item, f"at most {most * 1e3:.0f} ms off {reference}")


def mtu(nodes: Sequence[Facts]) -> list[Finding]:
    """Equal on the interfaces that the nodes' addresses are on: large packets vanish otherwise."""
    item = "MTU"
    known = {node.node: str(node.mtu) for node in nodes if node.mtu is not None}
    unknown = [
        Finding(
            *(item, "warn", node.node, f"no interface has {node.address}, so its MTU is not known"),
            "give the node an address of its own (--node-ip-address)",
        )
        for node in nodes
        if node.mtu is None
    ]
    where = listed(f"{node.interface} {node.mtu}" for node in nodes if node.mtu is not None)
    if len(set(known.values())) > 1:
        remedy = f"ip link set INTERFACE mtu N, the same everywhere and on the switches; now: {where}"
        return unknown + differing(item, known, "fail", remedy)
    return unknown or passed(item, where)


def ports(nodes: Sequence[Facts]) -> list[Finding]:
    """Each node reaches a fresh port of each other: workers listen on any free one."""
    item = "ports"
    if not any(node.reaches for node in nodes):
        return not_applicable(item, "there is no other node to be reached")
    remedy = "open all TCP ports between the nodes (firewall, security group, network policy)"
    found = [
        Finding(item, "fail", node.node, f"{other} cannot be reached: {why}", remedy)
        for node in nodes
        for other, why in node.reaches.items()
        if why
    ]
    return found or passed(
        item, f"all {sum(len(node.reaches) for node in nodes)} ways between nodes are open"
    )


def bucket(nodes: Sequence[Facts]) -> list[Finding]:
    """A small object was written, read, listed and deleted from every node."""
    item = "bucket"
    tried = [node for node in nodes if node.s3 is not None]
    if not tried:
        return not_applicable(item, "the cluster file has no `s3` section, or was not given")
    remedy = "correct `s3` in the cluster file, or the credentials in the nodes' environment (docs/s3.md)"
    found = [Finding(item, "fail", node.node, node.s3, remedy) for node in tried if node.s3]
    return found or passed(item, "written, read, listed and deleted")


def authentication(nodes: Sequence[Facts]) -> list[Finding]:
    """Ray lets nobody in without the cluster's token, and our channels derive their keys from it."""
    item = "token authentication"
    remedy = "start Ray with RAY_AUTH_MODE=token, and a token: ray get-auth-token --generate"
    asked = [node for node in nodes if node.auth is not None]
    if not asked:
        return not_applicable(item, "no cluster runs; handoff up makes a token and turns it on")
    found = list[Finding]()
    for node in asked:
        if node.open:
            told = "Ray's control store answers who has no token"
            found.append(Finding(item, "fail", node.node, told, remedy))
        if node.auth != "token":
            found.append(Finding(item, "fail", node.node, f"Ray's mode is {node.auth}", remedy))
        elif node.token is False:
            told = "no token in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
            found.append(Finding(item, "fail", node.node, told, remedy))
    if found:
        return found
    refused = any(node.open is False for node in asked)
    return passed(item, "on" + (", and who has no token was refused" if refused else ""))


def _amount(limit: int | None, shown: Callable[[int], str]) -> str:
    return "unlimited" if limit is None else "unknown" if limit < 0 else shown(limit)
