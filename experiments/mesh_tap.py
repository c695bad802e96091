"""Counts what crosses a node's link, by connection, from packets that the kernel hands to a packet socket.

Runs in the node's network namespace (``main``), as root. Bytes are TCP payload: what is sent again counts
again, acknowledgements do not count. A turn is payload in the direction other than that before it.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from cluster.netns import DEVICE
from experiments.kv_station import serve

START: Final = "from experiments.mesh_tap import main; main()"
HEADERS: Final = 14 + 60 + 60
EVERYTHING, IPV4 = 3, 0x0800
BUFFER: Final = 64 << 20
TCP: Final = 6
_STATISTICS: Final = (263, 6)
"""SOL_PACKET, PACKET_STATISTICS."""
_BUFFER_FORCE: Final = 33


class Tap:
    """Public methods are commands."""

    def __init__(self, device: str = DEVICE) -> None:
        self._counts: dict[tuple[int, str, int], list[int]] = {}
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERYTHING))
        self._socket.setsockopt(socket.SOL_SOCKET, _BUFFER_FORCE, BUFFER)
        self._socket.bind((device, EVERYTHING))  # what leaves is shown to no other protocol
        self._lock = threading.Lock()
        self._dropped = 0
        threading.Thread(target=self._run, daemon=True).start()

    def counts(self) -> dict[tuple[int, str, int], tuple[int, int, int]]:
        """Return (bytes, turns, packets) of each connection so far; RuntimeError if any were missed."""
        time.sleep(0.05)  # what is in the socket's buffer is counted
        got = self._socket.getsockopt(*_STATISTICS, 8)
        self._dropped += struct.unpack("II", got)[1]
        if self._dropped:
            raise RuntimeError(f"{self._dropped} packets were not counted: this machine is too busy")
        with self._lock:
            return {name: (counts[0], counts[1], counts[2]) for name, counts in self._counts.items()}

    def link(self) -> tuple[int, int]:
        """Return the bytes that this namespace's link has received and sent since it was made."""
        for line in Path("/proc/self/net/dev").read_text("ascii").splitlines():
            name, _colon, counters = line.partition(":")
            if name.strip() == DEVICE:
                fields = counters.split()
                return int(fields[0]), int(fields[8])
        raise RuntimeError(f"there is no {DEVICE} in here")

    def _run(self) -> None:
        buffer = bytearray(HEADERS)
        while True:
            size, address = self._socket.recvfrom_into(buffer, HEADERS, socket.MSG_TRUNC)
            found = parsed(buffer, size, address[2] == socket.PACKET_OUTGOING)
            if found is not None:
                connection, nbytes, direction = found
                with self._lock:
                    counts = self._counts.setdefault(connection, [0, 0, 0, 0])
                    counts[0] += nbytes
                    counts[1] += counts[3] not in (0, direction)
                    counts[2] += 1
                    counts[3] = direction


def parsed(
    frame: bytes | bytearray, size: int, outgoing: bool
) -> tuple[tuple[int, str, int], int, int] | None:
    """Return (connection, payload bytes, direction) of an Ethernet frame of a size; None: no TCP payload.

    direction: 1 what leaves, 2 what comes.
    """
    if size < 54 or int.from_bytes(frame[12:14], "big") != IPV4 or frame[23] != TCP:
        return None
    ip = 4 * (frame[14] & 15)
    length = int.from_bytes(frame[16:18], "big") or size - 14
    tcp = 14 + ip
    payload = length - ip - 4 * (frame[tcp + 12] >> 4)
    if payload <= 0:
        return None
    source, target = socket.inet_ntoa(bytes(frame[26:30])), socket.inet_ntoa(bytes(frame[30:34]))
    ports = struct.unpack_from("!HH", frame, tcp)
    if outgoing:
        return (ports[0], target, ports[1]), payload, 1
    return (ports[1], source, ports[0]), payload, 2


def main() -> None:
    """Serve commands. Argument: an inherited socket."""
    serve(Connection(int(sys.argv[1])), Tap)
    os._exit(0)
