"""What a TCP link carries, and how long a byte takes: our own probe, and iperf3 where it is installed.

One process listens (``Listener``), another measures (``round_trip_us``, ``rate_gbit_s``). Rates are counted
where the bytes arrive, by the clock there, between two looks: neither the start nor the end is in them.

    python -m experiments.probe_tcp listen ADDRESS           (prints HOST:PORT, ends with its standard input)
    python -m experiments.probe_tcp measure HOST:PORT STREAMS SECONDS
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Final

from cluster.network import free_ports

IPERF3: Final = "iperf3"
PINGS: Final = 50
WARM_S: Final = 0.25
"""Before the first look: connections have found their window by then."""
DEADLINE_S: Final = 20.0
"""For one answer of the other end."""
PIECE: Final = 1 << 20
_HELLO: Final = struct.Struct("!c16s")
_COUNT: Final = struct.Struct("!dQ")
_ECHO, _SINK, _LOOK = b"e", b"s", b"l"
_TIMEVAL: Final = struct.Struct("ll")


class ProbeError(RuntimeError):
    """Something could not be measured; the message says what, where and what to do."""


class Listener:
    """Answers probes at an address until ``close``.

    Attributes:
        port: that it listens on, chosen by the system.

    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        self._counts: dict[bytes, list[int]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="probe-accept", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; those that are open end with their clients."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), name="probe", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        _kernel_timeout(connection)
        with connection, contextlib.suppress(OSError):
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) < _HELLO.size:
                return
            kind, session = _HELLO.unpack(hello)
            if kind == _ECHO:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while byte := connection.recv(1):
                    connection.sendall(byte)
            elif kind == _LOOK:
                while connection.recv(1):
                    connection.sendall(_COUNT.pack(time.monotonic(), sum(self._counters(session))))
                with self._lock:
                    self._counts.pop(session, None)
            else:
                self._sink(connection, session)

    def _counters(self, session: bytes) -> list[int]:
        with self._lock:
            return list(self._counts.get(session, ()))

    def _sink(self, connection: socket.socket, session: bytes) -> None:
        with self._lock:
            counters = self._counts.setdefault(session, [])
            index = len(counters)
            counters.append(0)
        into = bytearray(PIECE)
        while got := connection.recv_into(into):
            counters[index] += got  # no other thread writes this one


def round_trip_us(host: str, port: int, pings: int = PINGS) -> float:
    """Return the median time of a byte there and back, in microseconds."""
    with _connected(host, port, _ECHO, bytes(16)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(pings):
            began = time.perf_counter()
            connection.sendall(b"p")
            if not connection.recv(1):
                raise ProbeError(f"{host}:{port} closed the connection while it was being timed")
            times.append(time.perf_counter() - began)
    return median(times) * 1e6


def rate_gbit_s(host: str, port: int, streams: int, seconds: float) -> float:
    """Return what arrives there over so many connections at once, in Gbit/s."""
    session, ended = secrets.token_bytes(16), threading.Event()
    data = memoryview(bytes(PIECE))

    def send(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not ended.is_set():
                connection.sendall(data)

    with contextlib.ExitStack() as stack:
        look = stack.enter_context(_connected(host, port, _LOOK, session))
        sockets = [stack.enter_context(_connected(host, port, _SINK, session)) for _ in range(streams)]
        threads = [threading.Thread(target=send, args=(one,), daemon=True) for one in sockets]
        try:
            for thread in threads:
                thread.start()
            time.sleep(WARM_S)
            began, first = _look(look, host, port)
            time.sleep(seconds)
            until, last = _look(look, host, port)
        finally:
            ended.set()
            for one in sockets:
                # What is still queued would be in the way of the next measurement.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(DEADLINE_S)
    if last <= first:
        raise ProbeError(f"no byte arrived at {host}:{port} in {seconds:g} s over {streams} connections")
    return (last - first) * 8 / (until - began) / 1e9


def _look(connection: socket.socket, host: str, port: int) -> tuple[float, int]:
    """Return the other end's clock and how many bytes it has received."""
    connection.sendall(b"?")
    answer = connection.recv(_COUNT.size, socket.MSG_WAITALL)
    if len(answer) < _COUNT.size:
        raise ProbeError(f"{host}:{port} did not say what arrived")
    at, count = _COUNT.unpack(answer)
    return float(at), int(count)


@contextlib.contextmanager
def _connected(host: str, port: int, kind: bytes, session: bytes) -> Iterator[socket.socket]:
    try:
        connection = socket.create_connection((host, port), timeout=DEADLINE_S)
    except OSError as error:
        raise ProbeError(
            f"{host}:{port} cannot be reached ({error}); probes use any free port: is one blocked in between?"
        ) from error
    with connection:
        connection.settimeout(None)
        _kernel_timeout(connection)
        try:
            connection.sendall(_HELLO.pack(kind, session))
            yield connection
        except OSError as error:
            raise ProbeError(f"{host}:{port}: {error or type(error).__name__}") from error


def _kernel_timeout(connection: socket.socket) -> None:
    """Let the kernel end a call that waits too long. Python's own way polls before every call."""
    limit = _TIMEVAL.pack(int(DEADLINE_S), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


# -- iperf3 -------------------------------------------------------------------------------------------


class IperfServer:
    """``iperf3 -s`` for one client, at an address."""

    def __init__(self, address: str) -> None:
        self.port = free_ports(1)[0]
        argv = [IPERF3, "-s", "-1", "-B", address, "-p", str(self.port), "--forceflush"]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        while "Server listening" not in (line := self._process.stdout.readline()):
            if not line:
                self.close()
                raise ProbeError(f"iperf3 -s ended before it listened on {address}:{self.port}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(DEADLINE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


def has_iperf3() -> bool:
    """Whether iperf3 is installed here."""
    return shutil.which(IPERF3) is not None


def iperf3_gbit_s(host: str, port: int, streams: int, seconds: int) -> float:
    """Return what arrives at an ``IperfServer``, in Gbit/s."""
    argv = [IPERF3, "-c", host, "-p", str(port), "-J", "-t", str(seconds), "-P", str(streams)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + DEADLINE_S)
    if done.returncode:
        raise ProbeError(f"iperf3 to {host}:{port} failed: {done.stdout.strip() or done.stderr.strip()}")
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 1e9)


def main(argv: list[str]) -> None:
    """See the top of this file."""
    if argv[0] == "listen":
        print(f"{argv[1]}:{Listener(argv[1]).port}", flush=True)
        sys.stdin.read()
        return
    host, _, port = argv[1].rpartition(":")
    rate = rate_gbit_s(host, int(port), int(argv[2]), float(argv[3]))
    print(json.dumps({"gbit_s": rate, "round_trip_us": round_trip_us(host, int(port))}))


if __name__ == "__main__":
    main(sys.argv[1:])
