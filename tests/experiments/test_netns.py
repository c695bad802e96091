"""Networks of namespaces: what they join, limit and cut, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import netns

needs_network = pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 20):
                pass
            connection.sendall(b"done")
"""

SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3])) as connection:
    began = time.monotonic()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(4)
    print(time.monotonic() - began)
"""


def seconds(prefix: tuple[str, ...], address: str, nbytes: int, timeout_s: float = 20) -> float:
    """How long bytes take from inside a namespace to a server; raises when they do not arrive."""
    argv = [*prefix, sys.executable, "-c", SEND, address, str(nbytes), str(timeout_s)]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout)


@needs_network
def test_what_is_joined_is_reached_and_can_be_limited_and_cut() -> None:
    with netns.network(2, attach_host=True) as network:
        one, other = network.nodes
        argv = [*other.prefix, sys.executable, "-c", SERVE, other.address]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == "ready\n"
                assert seconds((), other.address, 1000) < 20  # from the host
                network.limit(0.1)
                assert seconds(one.prefix, other.address, 5_000_000) > 0.3  # 0.4 s at 100 Mbit/s
                network.limit(None)
                other.cut()
                with pytest.raises(subprocess.CalledProcessError):
                    seconds(one.prefix, other.address, 1000, timeout_s=1)
                other.mend()
                assert seconds(one.prefix, other.address, 1000) < 20
            finally:
                server.kill()


MAKE = """
import signal, time
from cluster import netns
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has put in the background
with netns.network(2, attach_host=True) as network:
    print(*(node.prefix[1].split("/")[2] for node in network.nodes), network.host, flush=True)
    time.sleep(600)
"""


@needs_network
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_is_left_of_a_network_whose_maker_has_ended(end: signal.Signals) -> None:
    argv = [sys.executable, "-c", MAKE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as maker:
        assert maker.stdout is not None
        *holders, host = maker.stdout.readline().split()
        assert host in links()
        os.kill(maker.pid, end)
        maker.wait(30)
    deadline = time.monotonic() + 30
    while host in links() or any(Path(f"/proc/{pid}").exists() for pid in holders):
        assert time.monotonic() < deadline, "the namespaces are still there"
        time.sleep(0.05)


def links() -> str:
    return subprocess.run(["ip", "address"], capture_output=True, text=True, check=True, timeout=20).stdout


def test_why_there_can_be_no_network_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns.sys, "platform", "linux")
    monkeypatch.setattr(netns.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: None if tool in ("ip", "tc") else tool)
    assert netns.missing() == "ip, tc not found: apt-get install iproute2"
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    with pytest.raises(netns.NetworkError, match="need root"), netns.network():
        pass
