"""Nodes in network namespaces, joined by a bridge: a network on one machine that can be limited and cut.

Needs root on Linux, ``ip`` and ``tc`` (Debian: ``apt-get install iproute2``), ``unshare`` and ``nsenter``
(util-linux); ``missing`` says what is not there.

A namespace is held by a process of ours that waits for the end of its standard input. Namespaces have no
names, and the bridge is in one of its own: when this process ends, however it ends, the kernel takes down all
of it as soon as nobody runs in there any more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from cluster.errors import NetworkError

WAIT_S: Final = 20.0
"""How long a command of the set-up, or a namespace, may take."""
DEVICE: Final = "eth0"
"""What the link is called inside of a node."""
_TOOLS: Final = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_BURST_S: Final = 0.0005
"""How much of a second's bytes a limited link may send at once; but at least two of the kernel's largest
packets."""
_LEAST_BURST: Final = 128 << 10
_QUEUE: Final = "20ms"
"""How long a packet may wait in a limited link's queue before it is dropped."""


def missing() -> str | None:
    """Return why networks cannot be made here, and the remedy; None if they can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root: run as root, or with sudo"
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        packages = " ".join(sorted({_TOOLS[tool] for tool in absent}))
        return f"{', '.join(absent)} not found: apt-get install {packages}"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=WAIT_S)
    return f"network namespaces are not permitted here: {probe.stderr.strip()}" if probe.returncode else None


@dataclass(frozen=True, slots=True)
class Node:
    """One namespace.

    Attributes:
        index: from 0.
        address: its IPv4 address on the bridge.
        prefix: what comes before a command line that is to run in there.
        switch: what comes before one that is to run where the bridge is.

    """

    index: int
    address: str
    prefix: tuple[str, ...]
    switch: tuple[str, ...]

    def limit(self, gbit_s: float | None) -> None:
        """Limit what leaves this node (tbf); None lifts it."""
        _limit(self.prefix, DEVICE, gbit_s)

    def limit_arrivals(self, gbit_s: float | None) -> None:
        """Limit what comes to this node, where it leaves the bridge; None lifts it."""
        _limit(self.switch, f"port{self.index}", gbit_s)

    def buffers(self, most: int | None) -> None:
        """Let TCP sockets that are made from now on have up to so many bytes each way; None: as outside."""
        for way in ("wmem", "rmem"):
            setting = Path("/proc/sys/net/ipv4", f"tcp_{way}")
            least, first, outside = map(int, setting.read_text("ascii").split())
            sizes = (least, first, outside) if most is None else (least, min(first, most), most)
            _run(*self.prefix, "sh", "-c", f'echo "{" ".join(map(str, sizes))}" > {setting}')

    def cut(self) -> None:
        """Take this node's end of its link down: nothing leaves, nothing arrives, nobody is told."""
        _run(*self.prefix, "ip", "link", "set", DEVICE, "down")

    def drop(self, port: int) -> None:
        """Drop every TCP packet that comes here from a port or for it; nobody is told."""
        # What is for this node itself is looked up first of all, so that rule makes place.
        _run(*self.prefix, "ip", "rule", "add", "pref", "10", "lookup", "local")
        match = ("iif", DEVICE, "ipproto", "tcp")  # of packets that are sent, the sender would be told
        for end in ("dport", "sport"):
            _run(*self.prefix, "ip", "rule", "add", "pref", "5", *match, end, str(port), "blackhole")
        _run(*self.prefix, "ip", "rule", "delete", "pref", "0")

    def pass_all(self) -> None:
        """Undo ``drop``."""
        _run(*self.prefix, "ip", "rule", "add", "pref", "0", "lookup", "local")
        for pref in ("5", "5", "10"):
            _run(*self.prefix, "ip", "rule", "delete", "pref", pref)

    def mend(self) -> None:
        """Bring it up again."""
        _run(*self.prefix, "ip", "link", "set", DEVICE, "up")


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes on one bridge.

    Attributes:
        nodes: the namespaces.
        host: address of this process's own namespace on the bridge, None if it is not attached.

    """

    nodes: tuple[Node, ...]
    host: str | None

    def limit(self, gbit_s: float | None) -> None:
        """Limit every node's link, per direction; None lifts it."""
        for node in self.nodes:
            node.limit(gbit_s)


def free_net() -> str:
    """Return three parts of an address, such as ``198.18.7``, that no device of this machine has.

    198.18.0.0/15 is kept for benchmarks, RFC 2544.
    """
    taken = {address.address.rpartition(".")[0] for own in psutil.net_if_addrs().values() for address in own}
    return secrets.choice([net for n in range(256) if (net := f"198.18.{n}") not in taken])


@contextlib.contextmanager
def network(nodes: int = 2, *, attach_host: bool = False, net: str | None = None) -> Iterator[Network]:
    """Make namespaces on a bridge, for the length of the block.

    Whatever was started in them must have ended by then. Raises ``NetworkError``.

    Args:
        nodes: how many; their addresses are ``198.18.N.2``, ``.3`` and so on, N being random.
        attach_host: give this process's own namespace an address on the bridge too (``.1``), so that it
            reaches the nodes and is reached by them.
        net: the addresses' first three parts, from ``free_net``.

    """
    if (reason := missing()) is not None:
        raise NetworkError(reason)
    net = net or free_net()
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespace())
        inside = _prefix(switch)
        _run(*inside, "ip", "link", "add", "bridge", "type", "bridge")
        _run(*inside, "ip", "link", "set", "bridge", "up")
        made = []
        for index in range(nodes):
            pid = stack.enter_context(_namespace())
            node = Node(index, f"{net}.{index + 2}", _prefix(pid), inside)
            _plug(DEVICE, f"{node.address}/24", pid, node.prefix, switch, f"port{index}")
            _run(*node.prefix, "ip", "link", "set", "lo", "up")
            made.append(node)
        host = None
        if attach_host:
            host, name = f"{net}.1", f"ho{secrets.token_hex(4)}"
            _plug(name, f"{host}/24", os.getpid(), (), switch, "host")
            stack.callback(_remove, name)
        yield Network(tuple(made), host)


def _limit(prefix: Sequence[str], device: str, gbit_s: float | None) -> None:
    """Limit what a device sends."""
    if gbit_s is None:
        _run(*prefix, "tc", "qdisc", "delete", "dev", device, "root")
        return
    burst = max(_LEAST_BURST, int(gbit_s * 1e9 / 8 * _BURST_S))
    limited = ("tbf", "rate", f"{gbit_s * 1e3:.0f}mbit", "burst", f"{burst}b", "latency", _QUEUE)
    _run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", *limited)


def _plug(name: str, address: str, pid: int, prefix: Sequence[str], switch: int, port: str) -> None:
    """Join a namespace to the bridge by a pair of virtual Ethernet devices."""
    pair = ("type", "veth", "peer", "name", port, "netns", str(switch))
    _run("ip", "link", "add", name, "netns", str(pid), *pair)
    _run(*_prefix(switch), "ip", "link", "set", port, "master", "bridge", "up")
    _run(*prefix, "ip", "address", "add", address, "dev", name)
    _run(*prefix, "ip", "link", "set", name, "up")


def _remove(name: str) -> None:
    """Both ends of a pair go together; the bridge's namespace may have taken it along already."""
    with contextlib.suppress(NetworkError):
        _run("ip", "link", "delete", name)


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Hold a namespace; yields the id of the process that does."""
    argv = ["unshare", "--net", "sh", "-c", "echo made; exec cat"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as held:
        assert held.stdin is not None
        assert held.stdout is not None
        try:
            if held.stdout.readline() != b"made\n":
                raise NetworkError("a network namespace could not be made")
            yield held.pid
        finally:
            held.stdin.close()
            try:
                held.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                held.kill()


def _prefix(pid: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{pid}/ns/net", "--")


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode:
        raise NetworkError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")
