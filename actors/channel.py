"""A direct connection between two members of the cluster: gateway to worker, worker to worker.

Requests, aborts, tokens and announcements of KV go this way. A Ray actor call costs each of
them milliseconds and CPU time that a token of a small model takes to compute; starting,
finding and watching workers stays with Ray.

Only members of the cluster get in: both sides prove that they hold a key derived from the
cluster's secret (``actors/secret.py``) before anything is read, and every frame carries a MAC
of a key made for this connection, so that frames can be neither forged, replayed nor put in
another order. They are not encrypted. Authenticated frames are pickles.

On the wire, integers big-endian. Handshake: 16 bytes nonce each way, then
HMAC-SHA256(key, role | both nonces) each way. Frame: u32 length, 16 bytes MAC (keyed BLAKE2b), body.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import pickle
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from actors.errors import WorkerError

logger = logging.getLogger(__name__)

NONCE_BYTES, PROOF_BYTES, MAC_BYTES = 16, 32, 16
LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 256 << 20
READ_BYTES = 1 << 18
HANDSHAKE_TIMEOUT_S = 10.0
MAX_UNSENT_BYTES = 512 << 20
"""A peer that takes nothing while this much waits for it is given up."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
UNACKNOWLEDGED_MS = 15_000
"""A peer whose host has vanished is noticed after about this long."""

Address = tuple[str, int]


class ChannelError(WorkerError):
    """The other side could not be reached, or did not prove that it belongs to the cluster."""


class Channel:
    """One end of a connection. Reads on its event loop; sends from any thread.

    Args:
        sock: connected, non-blocking; owned by the channel from here on.
        session: key of this connection's frames, both directions.
        dialled: whether this end opened the connection.

    """

    def __init__(self, sock: socket.socket, session: bytes, dialled: bool) -> None:
        self._socket, self._session = sock, session
        self._out, self._in = (b"c", b"s") if dialled else (b"s", b"c")
        self._sent = self._received = 0
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._on_message: Callable[[Any], None] | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    def open(self, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        """Start reading on the running event loop.

        Args:
            on_message: called with each message, in order, on the loop.
            on_lost: called once with a reason, on the loop, when the connection ends other
                than by ``close`` on this side.

        """
        self._on_message, self._on_lost = on_message, on_lost
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def send(self, *messages: object) -> None:
        """Send messages without waiting; to a channel that has ended, they are dropped. Any thread.

        Several at once take one system call.
        """
        bodies = [pickle.dumps(message, protocol=5) for message in messages]
        with self._lock:
            if self.closed:
                return
            pieces: list[bytes] = []
            for body in bodies:
                mac = _mac(self._session, self._out, self._sent, body)
                self._sent += 1
                pieces += (LENGTH.pack(len(body)), mac, body)
            frame = memoryview(b"".join(pieces))
            if not self._unsent:
                try:
                    frame = frame[self._socket.send(frame) :]
                except (BlockingIOError, InterruptedError):
                    pass
                except OSError as error:
                    self._end_soon(f"it could not be sent to: {error}")
                    return
            if not frame.nbytes:
                return
            first = not self._unsent
            self._unsent.append(frame)
            self._unsent_bytes += frame.nbytes
            if self._unsent_bytes > MAX_UNSENT_BYTES:
                self._end_soon(f"it has not taken {self._unsent_bytes} bytes")
            elif first and self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._watch_writable)

    def close(self) -> None:
        """End the connection; ``on_lost`` is not called. On the loop's thread."""
        self._on_lost = None
        self._end("closed here")

    # -- event loop -----------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(f"the connection broke: {error}")
            return
        if not data:
            self._end("the connection was closed")
            return
        self._buffer += data
        self._take_frames()

    def _take_frames(self) -> None:
        head = LENGTH.size + MAC_BYTES
        while not self.closed and len(self._buffer) >= head:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                self._end(f"it announced a message of {length} bytes")
                return
            if len(self._buffer) < head + length:
                return
            mac = bytes(self._buffer[LENGTH.size : head])
            body = bytes(self._buffer[head : head + length])
            del self._buffer[: head + length]
            if not hmac.compare_digest(mac, _mac(self._session, self._in, self._received, body)):
                self._end("a message was forged or damaged")
                return
            self._received += 1
            assert self._on_message is not None
            try:
                self._on_message(pickle.loads(body))
            except Exception:
                logger.exception("a message could not be handled")

    def _watch_writable(self) -> None:
        if not self.closed and self._loop is not None:
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        with self._lock:
            try:
                while self._unsent:
                    done = self._socket.send(self._unsent[0])
                    self._unsent_bytes -= done
                    if done < self._unsent[0].nbytes:
                        self._unsent[0] = self._unsent[0][done:]
                    else:
                        self._unsent.popleft()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end_soon(f"it could not be sent to: {error}")
                return
            if not self.closed and self._loop is not None:
                self._loop.remove_writer(self._socket.fileno())

    def _end_soon(self, reason: str) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._end, reason)

    def _end(self, reason: str) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
                self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._unsent.clear()
        if self._on_lost is not None:
            self._on_lost(reason)


class Listener:
    """Accepts channels on one address until it is closed.

    Args:
        host: the node's address that the other members reach it by; the port is chosen freely.
        key: the cluster's key (``data_plane_key``).
        opened: called on the loop with every channel whose other end has proved itself; it
            calls the channel's ``open``.

    """

    def __init__(self, host: str, key: bytes, opened: Callable[[Channel], None]) -> None:
        self._key, self._opened = key, opened
        self._socket = socket.create_server((host, 0), backlog=256)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()[:2]
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept(), name="accept channels")

    def close(self) -> None:
        """Accept nothing more; channels that are open stay."""
        self._accepting.cancel()
        for handshake in self._handshakes:
            handshake.cancel()
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._socket)
            except OSError as error:
                logger.warning("a channel could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            handshake = loop.create_task(self._welcome(sock, peer))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _welcome(self, sock: socket.socket, peer: Address) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                session = await _handshake(sock, self._key, dialled=False)
        except BaseException as error:
            sock.close()
            if not isinstance(error, Exception):
                raise
            logger.warning("a channel from %s was refused: %s", peer[0], error or type(error).__name__)
            return
        self._opened(Channel(sock, session, dialled=False))


async def dial(address: Address, key: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Channel:
    """Connect to a ``Listener``; the caller opens the channel.

    Raises:
        ChannelError: nobody is there, or not a member of this cluster, or it took too long.

    """
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    where = f"{address[0]}:{address[1]}"
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, address)
            session = await _handshake(sock, key, dialled=True)
    except TimeoutError:
        sock.close()
        raise ChannelError(f"no connection to {where} within {timeout_s:.0f} s") from None
    except OSError as error:
        sock.close()
        raise ChannelError(f"no connection to {where}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return Channel(sock, session, dialled=True)


async def _handshake(sock: socket.socket, key: bytes, dialled: bool) -> bytes:
    """Prove that this side has the key, check that the other has; return the session's key."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
    loop = asyncio.get_running_loop()
    mine = secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(sock, mine)
    theirs = await _receive(sock, NONCE_BYTES)
    nonces = mine + theirs if dialled else theirs + mine
    roles = (b"dialled", b"accepted") if dialled else (b"accepted", b"dialled")
    if dialled:  # whoever dials proves itself first
        await loop.sock_sendall(sock, hmac.digest(key, roles[0] + nonces, "sha256"))
    proof = await _receive(sock, PROOF_BYTES)
    if not hmac.compare_digest(proof, hmac.digest(key, roles[1] + nonces, "sha256")):
        raise ChannelError("the other side does not hold this cluster's secret")
    if not dialled:
        await loop.sock_sendall(sock, hmac.digest(key, roles[0] + nonces, "sha256"))
    return hmac.digest(key, b"session" + nonces, "sha256")


async def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not piece:
            raise ChannelError("the other side closed the connection before it proved itself")
        data += piece
    return data


def _mac(session: bytes, direction: bytes, number: int, body: bytes) -> bytes:
    """Keyed BLAKE2b: a third of the time that HMAC-SHA256 takes for a message of a few tokens."""
    mac = hashlib.blake2b(direction + number.to_bytes(8, "big"), key=session, digest_size=MAC_BYTES)
    mac.update(body)
    return mac.digest()
