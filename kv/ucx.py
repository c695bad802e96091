"""UCX, which NIXL moves bytes with: loading it, binding it, and asking it which way the bytes go.

NIXL has no call that tells. UCX writes the protocols that it chose to its log; the log goes to
a file in memory, where `path` finds them.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import logging
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from kv.chunk import Run
from kv.registered import address_of

logger = logging.getLogger(__name__)

RDMA_DEVICES = Path("/sys/class/infiniband")
WAKE_US = 10_000
"""How long an agent's thread sleeps unless there is something to do. NIXL's own default, 0, spins."""
TCP_SEGMENT = "256k"
"""How much UCX sends at once. With its own default, 8k, a read over TCP takes three times the CPU time."""
READ = "remote memory read by ucp_get*"
"""How UCX's table of protocols names one-sided reads."""


@functools.cache
def library() -> Any:
    """Load NIXL and UCX, once per process, and return the module ``nixl``.

    UCX reads where to log when it is loaded, so it must not have been loaded before: where it was, or
    where UCX_LOG_FILE is set, ``path`` does not know.

    Raises:
        ImportError: NIXL is not installed.

    """
    ours = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": f"/proc/self/fd/{_log()}"}
    added = [key for key in ours if key not in os.environ]
    os.environ.update({key: ours[key] for key in added})
    try:
        import nixl

        new_agent(nixl, "kv-load", "")  # NIXL loads UCX with the first agent that uses it
    finally:
        for key in added:  # not for child processes
            del os.environ[key]
    return nixl


def new_agent(nixl: Any, name: str, config: str) -> Any:
    """Return a NIXL agent with a thread that serves its peers. It ends with the last reference to it.

    Args:
        nixl: what ``library`` returned.
        name: unique, at most 31 characters.
        config: UCX settings, ``KEY=value,KEY=value`` without the prefix; UCX_KEY in the environment wins.

    """
    settings = nixl.nixlAgentConfig()
    settings.useProgThread = True
    settings.pthrDelay = WAKE_US
    settings.useListenThread = False
    settings.syncMode = nixl.NIXL_THREAD_SYNC_RW
    agent = nixl.nixlAgent(name, settings)
    agent.createBackend("UCX", {"engine_config": config})
    return agent


def new_name() -> str:
    """Return a name for an agent that no other has."""
    return f"kv-{os.getpid()}-{secrets.token_hex(6)}"


def regions(nixl: Any, kind: Any, memory: Sequence[Run]) -> Any:
    """Return NIXL's list of memory to register, of one kind."""
    return nixl.nixlRegDList(kind, [(address_of(run), run.nbytes, 0, "") for run in memory])


def errors(nixl: Any) -> tuple[type[Exception], ...]:
    """Return the errors that NIXL raises; they have no common base."""
    return tuple(
        value for key, value in vars(nixl).items() if key.startswith("nixl") and key.endswith("Error")
    )


def config_for(address: str) -> str:
    """Return UCX settings for a node's address: no other network interface than the one that has it.

    Where there is RDMA hardware UCX chooses among all devices itself; set UCX_NET_DEVICES to bind it.

    Raises:
        ValueError: no interface of this machine has the address.

    """
    settings = ["PROTO_INFO=y", f"TCP_TX_SEG_SIZE={TCP_SEGMENT}", f"TCP_RX_SEG_SIZE={TCP_SEGMENT}"]
    if not RDMA_DEVICES.is_dir() or not any(RDMA_DEVICES.iterdir()):
        settings.append(f"NET_DEVICES={_interface(address)}")
    return ",".join(settings)


def _interface(address: str) -> str:
    wanted = address
    if ipaddress.ip_address(address).is_loopback:
        wanted = "127.0.0.1"  # the interface has this one, and answers to all of 127.0.0.0/8
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == wanted for one in addresses):
            return name
    raise ValueError(
        f"address: no network interface of this machine has {address!r}; give the node's own address"
    )


def path(agent: str) -> str | None:
    """Return how an agent's large reads go, e.g. ``zero-copy cma/memory``; None before the first."""
    ctypes.CDLL(None).fflush(None)  # UCX leaves what it wrote in the C library's buffer
    lines = os.pread(_log(), os.fstat(_log()).st_size, 0).decode(errors="replace").splitlines()
    found = None
    for number, line in enumerate(lines):
        if READ in line and f"| {agent} " in lines[number - 1] and " self " not in lines[number - 1]:
            found = _last_row(lines[number + 4 :])
    return found


def _last_row(lines: list[str]) -> str | None:
    """Return description and configuration of a table's last row, which is for the largest sizes."""
    row = None
    for line in lines:
        cells = re.findall(r"\|([^|]*)(?=\|)", line)
        if len(cells) != 3:
            break
        row = f"{cells[1].strip()} {cells[2].strip()}"
    return row


@functools.cache
def _log() -> int:
    """Return the file in memory that UCX logs to."""
    return os.memfd_create("ucx-log")
