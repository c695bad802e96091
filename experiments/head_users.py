"""The KV of many users at once between two nodes: all of them in one process, or each in one of its own.

Each end starts its users (threads, or processes), joins them to the other end's, waits for a common moment
and lets all of them go. Nothing here knows a model: what moves is as large as a user's KV.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

import numpy as np

from experiments.children import die_with_parent
from experiments.head import PICKLE
from experiments.head_ways import WAIT_S, chunks, receive_framed, send_framed
from kv.chunk import Run, checksum
from kv.errors import TransferError

LAYERS: Final = 8
BEGIN_IN_S: Final = 0.3
"""From when both ends are ready."""
START: Final = "from experiments.head_users import main; main()"


@dataclass(frozen=True, slots=True)
class Asked:
    """One measurement's end.

    Attributes:
        way: by which.
        users: how many at once.
        apart: each in a process of its own.
        nbytes: of each user's KV.
        sends: this end has it.

    """

    way: str
    users: int
    apart: bool
    nbytes: int
    sends: bool


def one_end(asked: Asked, side: Connection, address: str, key: bytes) -> float:
    """Take part in a measurement; returns the clock's reading: of the sender at the start, else at the end.

    side: joins the two ends' parents.
    """
    with contextlib.ExitStack() as stack:
        group: Callable[..., Any] = _Processes if asked.apart else _Threads
        users = stack.enter_context(contextlib.closing(group(asked, address, key)))
        if asked.sends:
            ports = _of(side)
            users.connect(ports)
        else:
            side.send(users.ports)
            users.connect([])
        side.send("ready")
        _of(side)
        if asked.sends:
            began = time.monotonic() + BEGIN_IN_S
            side.send(began)
        else:
            began = float(_of(side))
        done: float = users.run(began)
        return began if asked.sends else done


def _of(side: Connection) -> Any:
    if not side.poll(WAIT_S):
        raise TimeoutError(f"the other end was not ready in {WAIT_S:g} s")
    return side.recv()


class _User:
    """One user at one end: a connection of its own, and the memory."""

    def __init__(self, asked: Asked, address: str, transport: Any) -> None:
        self._asked, self._transport = asked, transport
        words = np.random.default_rng(1).integers(0, 1 << 63, asked.nbytes // 8, np.uint64)
        memory = words.view(np.uint8) if asked.sends else np.ones(asked.nbytes, np.uint8)
        self._runs: Sequence[Run] = np.split(memory, LAYERS)
        self._listener = None if asked.sends else socket.create_server((address, 0))
        self._socket: socket.socket | None = None
        self.port = None if self._listener is None else self._listener.getsockname()

    def connect(self, to: tuple[str, int] | None) -> None:
        """Join the other end's user."""
        if to is not None:
            self._socket = socket.create_connection(to, WAIT_S)
        else:
            assert self._listener is not None
            self._listener.settimeout(WAIT_S)
            self._socket, _ = self._listener.accept()
            self._socket.settimeout(WAIT_S)

    def run(self, at: float) -> float:
        """Send, or receive, at a moment; returns when it was done."""
        time.sleep(max(0.0, at - time.monotonic()))
        assert self._socket is not None
        if self._asked.sends:
            (self._send_pickled if self._asked.way == PICKLE else self._publish)(self._socket)
        else:
            (self._receive_pickled if self._asked.way == PICKLE else self._fetch)(self._socket)
        return time.monotonic()

    def _send_pickled(self, connection: socket.socket) -> None:
        send_framed(connection, pickle.dumps(self._runs, 4))
        receive_framed(connection)

    def _receive_pickled(self, connection: socket.socket) -> None:
        found = pickle.loads(receive_framed(connection))
        if sum(one.nbytes for one in found) != self._asked.nbytes:
            raise TransferError("a user's KV arrived incomplete")
        send_framed(connection, b"k")

    def _publish(self, connection: socket.socket) -> None:
        tickets = []
        for part in chunks(self._runs):
            sums = [checksum(run) for run in part]
            tickets.append(self._transport.publish(part, _nothing))
            send_framed(connection, pickle.dumps((tickets[-1], sums)))
        receive_framed(connection)
        for ticket in tickets:
            self._transport.release(ticket)

    def _fetch(self, connection: socket.socket) -> None:
        for part in chunks(self._runs):
            ticket, sums = pickle.loads(receive_framed(connection))
            self._transport.fetch(ticket, part, WAIT_S)
            if [checksum(run) for run in part] != sums:
                raise TransferError("a user's KV arrived damaged")
        send_framed(connection, b"k")

    def close(self) -> None:
        """Close its sockets."""
        for one in (self._listener, self._socket):
            if one is not None:
                one.close()


def _transport(asked: Asked, address: str, key: bytes) -> Any:
    if asked.way == PICKLE:
        return None
    from kv.tcp import TcpTransport

    return TcpTransport(address, key)


class _Threads:
    """All users in this process."""

    def __init__(self, asked: Asked, address: str, key: bytes) -> None:
        self._made = _transport(asked, address, key)
        self._users = [_User(asked, address, self._made) for _ in range(asked.users)]
        self.ports = [user.port for user in self._users]

    def connect(self, ports: Sequence[tuple[str, int]]) -> None:
        """Join the users, to the ports of the other end's."""
        for index, user in enumerate(self._users):
            user.connect(ports[index] if ports else None)

    def run(self, at: float) -> float:
        """Let all of them go at a moment; returns when the last one was done."""
        done: list[float] = []
        failed: list[Exception] = []

        def one(user: _User) -> None:
            try:
                done.append(user.run(at))
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=one, args=(user,), daemon=True) for user in self._users]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        if failed or len(done) < len(threads):
            raise TransferError(f"{len(threads) - len(done)} of {len(threads)} users failed: {failed[:1]}")
        return max(done)

    def close(self) -> None:
        """Close what was opened."""
        for user in self._users:
            user.close()
        if self._made is not None:
            self._made.close()


class _Processes:
    """Each user in a process, which has one of ``_Threads`` with one user."""

    def __init__(self, asked: Asked, address: str, key: bytes) -> None:
        one = Asked(asked.way, 1, False, asked.nbytes, asked.sends)
        pairs = [socket.socketpair() for _ in range(asked.users)]
        theirs = [end.fileno() for _, end in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, theirs)],
            pass_fds=theirs,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        self._users = []
        for ours, end in pairs:
            end.close()
            self._users.append(Connection(ours.detach()))
        for connection in self._users:
            connection.send((one, address, key))
        self.ports = [self._answer(connection)[0] for connection in self._users]

    def connect(self, ports: Sequence[tuple[str, int]]) -> None:
        """See ``_Threads``."""
        for index, connection in enumerate(self._users):
            connection.send([ports[index]] if ports else [])
        for connection in self._users:
            self._answer(connection)

    def run(self, at: float) -> float:
        """See ``_Threads``."""
        for connection in self._users:
            connection.send(at)
        return max(float(self._answer(connection)) for connection in self._users)

    def _answer(self, connection: Connection) -> Any:
        if not connection.poll(WAIT_S):
            raise TimeoutError(f"a user's process did not answer in {WAIT_S:g} s")
        try:
            return connection.recv()
        except EOFError as error:
            raise TransferError("a user's process ended; see the log above") from error

    def close(self) -> None:
        """End the processes: each does when its socket is closed."""
        for connection in self._users:
            connection.close()
        try:
            self._process.wait(WAIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def main() -> None:
    """Fork a process for each inherited socket, which is a user's; nothing has threads yet."""
    sockets, forked = [int(number) for number in sys.argv[1:]], []
    for own in sockets:
        if (pid := os.fork()) == 0:
            for other in sockets:
                if other != own:
                    os.close(other)
            _user(Connection(own))
        forked.append(pid)
    for pid in forked:
        os.waitpid(pid, 0)
    os._exit(0)


def _user(parent: Connection) -> NoReturn:
    try:
        asked, address, key = parent.recv()
        users = _Threads(asked, address, key)
        parent.send(users.ports)
        users.connect(parent.recv())
        parent.send("joined")
        parent.send(users.run(parent.recv()))
        parent.recv()
    except EOFError:
        pass  # the measurement is over
    except Exception as error:
        print(f"a user failed: {error!r}", file=sys.stderr, flush=True)
    os._exit(0)


def _nothing() -> None:
    """Nobody waits for the memory."""
