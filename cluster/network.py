"""Ports on this machine."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """`count` different ports that nothing listens on, at any address of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def accepts(address: str, within_s: float = 0.2) -> bool:
    """Whether something accepts connections at `address` (HOST:PORT)."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=within_s):
            return True
    except OSError:
        return False
