"""Direct TCP from worker to worker, out of one paged cache and into the other.

The sender listens on its node's address and serves payloads straight from the engine's
memory with scatter-gather I/O; the receiver reads straight into its own. Connections are
kept and reused; several chunks in flight use several connections, which is how more than
one core and more than one TCP window are put to work.

Only members of the cluster can read. Both sides derive a key from the cluster's secret
(`actors/secret.py`). A server opens every connection with a fresh nonce; each request carries
HMAC-SHA256(key, nonce | sequence number | request), so a request can be neither forged nor
replayed. Payload bytes are encrypted only if TLS is asked for (`kv/tls.py`); what arrives is checked
against the checksums in the chunk's header, which came over Ray's authenticated channel.

A request on the wire, integers big-endian: 16 bytes payload id, u32 number of runs wanted,
that many u32 run indices, 32 bytes HMAC. The answer: u8 status (0: data follows), u64 bytes, data.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kv.chunk import Run, require_sizes
from kv.errors import ChunkCorrupt, PeerLost, TransferError, TransferTimeout
from kv.tls import TlsFiles, contexts

logger = logging.getLogger(__name__)

NONCE_BYTES, ID_BYTES, MAC_BYTES = 16, 16, 32
HEAD = struct.Struct(f"!{ID_BYTES}sI")
ANSWER = struct.Struct("!BQ")
TIMEVAL = struct.Struct("@ll")
OK, GONE, DENIED = 0, 1, 2
IOV_MAX = 512
"""Pieces per system call; Linux takes 1024."""
STRANGER_TIMEOUT_S = 10.0
"""A connection that has not made its first authorised request by then is closed."""
IDLE_TIMEOUT_S = 600.0
"""How long a server waits for the next request on a connection."""
STALL_TIMEOUT_S = 20.0
"""How long a server waits for a receiver that takes nothing: it holds the engine's blocks meanwhile."""
ACCEPT_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class TcpTicket:
    """Where a payload can be fetched, and the sizes of its runs."""

    host: str
    port: int
    payload: bytes
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return sum(self.sizes)


@dataclass(slots=True)
class _Payload:
    """Published runs. ``sending`` and ``released`` are guarded by the transport's lock."""

    runs: list[Run]
    nbytes: int
    read: Callable[[], None]
    sending: int = 0
    released: bool = False


class TcpTransport:
    """Serves what it published, and fetches what others published.

    Args:
        address: the node's address that other nodes reach it by; the port is chosen freely.
        key: the cluster's data-plane key, equal on all members.
        tls: this member's certificate; all members have one, or none.

    """

    name = "tcp"

    def __init__(self, address: str, key: bytes, tls: TlsFiles | None = None) -> None:
        self._key = key
        self._server_tls: ssl.SSLContext | None = None
        self._client_tls: ssl.SSLContext | None = None
        if tls is not None:
            self._server_tls, self._client_tls = contexts(tls)
        self._payloads: dict[bytes, _Payload] = {}
        self._idle: dict[tuple[str, int], list[_Connection]] = defaultdict(list)
        self._busy: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._listener = socket.create_server((address, 0), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True).start()

    def register(self, memory: Sequence[Run]) -> None:
        """See ``Transport.register``. Any memory will do."""

    # -- the sender's side ------------------------------------------------------------------------

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> TcpTicket:
        """See ``Transport.publish``. Nothing is copied: ``read`` is called on release."""
        ticket = TcpTicket(*self.address, secrets.token_bytes(ID_BYTES), tuple(run.nbytes for run in runs))
        with self._lock:
            if self._closed:
                raise PeerLost("this transport has been closed")
            self._payloads[ticket.payload] = _Payload(list(runs), ticket.nbytes, read)
        return ticket

    def release(self, ticket: TcpTicket) -> None:
        """See ``Transport.release``."""
        with self._lock:
            payload = self._payloads.pop(ticket.payload, None)
        if payload is not None:
            self._withdraw(payload)

    def live(self) -> tuple[int, int]:
        """See ``Transport.live``."""
        with self._lock:
            return len(self._payloads), sum(payload.nbytes for payload in self._payloads.values())

    def close(self) -> None:
        """See ``Transport.close``. Ends what is being sent and fetched here."""
        with self._lock:
            self._closed = True
            payloads, self._payloads = list(self._payloads.values()), {}
            busy = list(self._busy)
            idle = [connection.socket for pool in self._idle.values() for connection in pool]
            self._idle.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in busy:  # wakes the threads that use them, which close them
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS's own would drop its state first
        for connection in idle:
            connection.close()
        for payload in payloads:
            self._withdraw(payload)

    def _withdraw(self, payload: _Payload) -> None:
        """Give a payload's memory back as soon as nothing is being sent from it."""
        with self._lock:
            payload.released = True
            unused = payload.sending == 0
        if unused:
            payload.read()

    @contextlib.contextmanager
    def _sending(self, payload_id: bytes) -> Iterator[_Payload | None]:
        """Keep a payload's memory in place while it is being sent; None if it is not here."""
        with self._lock:
            payload = self._payloads.get(payload_id)
            if payload is not None:
                payload.sending += 1
        try:
            yield payload
        finally:
            if payload is not None:
                with self._lock:
                    payload.sending -= 1
                    unused = payload.released and payload.sending == 0
                if unused:
                    payload.read()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("a KV connection could not be accepted: %s", error)
                time.sleep(ACCEPT_RETRY_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="kv-tcp-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._server_tls is not None:
                connection = _wrap(self._server_tls, connection, server_side=True)
            self._use(connection)
            _tune(connection)
            _shake_hands(connection, STRANGER_TIMEOUT_S)
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(nonce)
            sequence = 0
            while self._answer(connection, nonce, sequence):
                sequence += 1
        except (OSError, TransferError) as error:
            logger.debug("a KV connection ended: %s", error)
        finally:
            with self._lock:
                self._busy.discard(connection)
            connection.close()

    def _use(self, connection: socket.socket) -> None:
        """Let ``close`` end what is done with a connection."""
        with self._lock:
            if self._closed:
                raise ConnectionError("this transport has been closed")
            self._busy.add(connection)

    def _answer(self, connection: socket.socket, nonce: bytes, sequence: int) -> bool:
        """Serve one request; return whether to go on."""
        _limit(connection, IDLE_TIMEOUT_S if sequence else STRANGER_TIMEOUT_S)
        head = _receive(connection, HEAD.size)
        _limit(connection, STALL_TIMEOUT_S)
        payload_id, count = HEAD.unpack(head)
        if count > 1 << 20:
            return False
        wanted = _receive(connection, 4 * count)
        mac = _receive(connection, MAC_BYTES)
        if not hmac.compare_digest(mac, _mac(self._key, nonce, sequence, head + wanted)):
            logger.warning("a KV request from %s was not authorised", connection.getpeername())
            connection.sendall(ANSWER.pack(DENIED, 0))
            return False
        with self._sending(payload_id) as payload:
            if payload is None:
                connection.sendall(ANSWER.pack(GONE, 0))
                return True
            indices = struct.unpack(f"!{count}I", wanted)
            if any(index >= len(payload.runs) for index in indices):
                return False
            runs = [payload.runs[index] for index in indices]
            _send(connection, ANSWER.pack(OK, sum(run.nbytes for run in runs)), runs)
        return True

    # -- the receiver's side ----------------------------------------------------------------------

    def fetch(self, ticket: TcpTicket, into: Sequence[Run | None], timeout_s: float) -> None:
        """See ``Transport.fetch``."""
        deadline = time.monotonic() + timeout_s
        require_sizes(ticket.payload.hex(), ticket.sizes, into)
        wanted = [index for index, run in enumerate(into) if run is not None]
        targets = [run for run in into if run is not None]
        try:
            with self._connection((ticket.host, ticket.port), deadline) as connection:
                connection.fetch(ticket, wanted, targets, self._key, deadline)
        except ssl.SSLCertVerificationError as error:
            raise TransferError(
                f"{ticket.host}:{ticket.port} has a certificate that tls.authority has not signed: {error}"
            ) from error
        except (TimeoutError, BlockingIOError) as error:
            raise TransferTimeout(
                f"{ticket.nbytes} bytes from {ticket.host}:{ticket.port} did not arrive in {timeout_s:.1f} s"
            ) from error
        except OSError as error:
            raise PeerLost(f"{ticket.host}:{ticket.port} is gone: {error}") from error

    @contextlib.contextmanager
    def _connection(self, peer: tuple[str, int], deadline: float) -> Iterator[_Connection]:
        """Yield a connection of the pool; one that failed is closed, never reused."""
        connection = self._idle_connection(peer)
        if connection is None:
            connection = self._connect(peer, deadline)
        keep = False
        try:
            self._use(connection.socket)
            connection.shake_hands(deadline)
            yield connection
            keep = True
        finally:
            with self._lock:
                self._busy.discard(connection.socket)
                keep = keep and not self._closed
                if keep:
                    self._idle[peer].append(connection)
            if not keep:
                connection.socket.close()

    def _connect(self, peer: tuple[str, int], deadline: float) -> _Connection:
        connected = socket.create_connection(peer, timeout=_left(deadline))
        if self._client_tls is not None:
            connected = _wrap(self._client_tls, connected, server_side=False)
        return _Connection(connected)

    def _idle_connection(self, peer: tuple[str, int]) -> _Connection | None:
        """Take a connection from the pool that its peer has not closed meanwhile."""
        while True:
            with self._lock:
                pool = self._idle[peer]
                connection = pool.pop() if pool else None
            if connection is None or connection.alive():
                return connection
            connection.socket.close()


class _Connection:
    """A receiver's connection to one sender."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        _tune(self.socket)
        self._nonce = b""
        self._sequence = 0

    def alive(self) -> bool:
        """Return whether an idle connection can be used: nothing to read, not even its end."""
        self.socket.setblocking(False)
        try:
            socket.socket.recv(self.socket, 1, socket.MSG_PEEK)  # of the bytes on the wire, TLS or not
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self.socket.setblocking(True)
        return False

    def shake_hands(self, deadline: float) -> None:
        """Before a connection's first request."""
        if not self._nonce:
            _shake_hands(self.socket, _left(deadline))

    def fetch(
        self, ticket: TcpTicket, wanted: Sequence[int], targets: Sequence[Run], key: bytes, deadline: float
    ) -> None:
        """Ask for runs and read them into ``targets``."""
        if not self._nonce:
            self._nonce = _receive(self.socket, NONCE_BYTES, deadline)
        _limit(self.socket, _left(deadline))
        request = HEAD.pack(ticket.payload, len(wanted)) + struct.pack(f"!{len(wanted)}I", *wanted)
        self.socket.sendall(request + _mac(key, self._nonce, self._sequence, request))
        self._sequence += 1
        status, nbytes = ANSWER.unpack(_receive(self.socket, ANSWER.size, deadline))
        if status == GONE:
            raise PeerLost(f"{ticket.host}:{ticket.port} no longer has payload {ticket.payload.hex()}")
        if status == DENIED:
            raise TransferError(f"{ticket.host}:{ticket.port} refused: the clusters' secrets differ")
        expected = sum(run.nbytes for run in targets)
        if nbytes != expected:
            raise ChunkCorrupt(ticket.payload.hex(), "size", expected, nbytes)
        _read_into(self.socket, targets, deadline)


def _mac(key: bytes, nonce: bytes, sequence: int, request: bytes) -> bytes:
    return hmac.digest(key, nonce + sequence.to_bytes(8, "big") + request, "sha256")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not isinstance(connection, ssl.SSLSocket):
        connection.settimeout(None)  # see _limit


def _limit(connection: socket.socket, seconds: float) -> None:
    """Bound every later call on a connection, which raises TimeoutError (TLS) or BlockingIOError.

    The kernel waits, and not Python: so one call moves all there is to move, however long that takes to come.
    """
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    microseconds = max(1, int(seconds * 1e6))  # none at all would be for ever
    limit = TIMEVAL.pack(*divmod(microseconds, 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _wrap(context: ssl.SSLContext, connection: socket.socket, server_side: bool) -> socket.socket:
    """Return the socket with TLS on it, before any of it has been spoken; the one given is spent."""
    return context.wrap_socket(connection, server_side=server_side, do_handshake_on_connect=False)


def _shake_hands(connection: socket.socket, seconds: float) -> None:
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        connection.do_handshake()


def _receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Return exactly ``size`` bytes; a connection that ends before is an error."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            _limit(connection, _left(deadline))
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)


def _send(connection: socket.socket, head: bytes, runs: Sequence[Run]) -> None:
    """Send head and runs with as few system calls and no copies."""
    pieces: list[memoryview] = [memoryview(head), *(run.data for run in runs)]
    if isinstance(connection, ssl.SSLSocket):
        for piece in pieces:
            connection.sendall(piece)
        return
    for start in range(0, len(pieces), IOV_MAX):
        batch = pieces[start : start + IOV_MAX]
        while batch:
            batch = _advance(batch, connection.sendmsg(batch))


def _read_into(connection: socket.socket, targets: Sequence[Run], deadline: float) -> None:
    pieces: list[memoryview] = [run.data for run in targets if run.nbytes]
    if isinstance(connection, ssl.SSLSocket):
        for piece in pieces:
            _decrypt_into(connection, piece, deadline)
        return
    for start in range(0, len(pieces), IOV_MAX):
        batch = pieces[start : start + IOV_MAX]
        while batch:
            _limit(connection, _left(deadline))
            read = connection.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
            if read == 0:
                raise ConnectionError("the connection was closed in the middle of a payload")
            batch = _advance(batch, read)


def _decrypt_into(connection: ssl.SSLSocket, piece: memoryview, deadline: float) -> None:
    while piece:
        connection.settimeout(_left(deadline))
        if not (read := connection.recv_into(piece)):
            raise ConnectionError("the connection was closed in the middle of a payload")
        piece = piece[read:]


def _advance(pieces: list[memoryview], done: int) -> list[memoryview]:
    """Drop the first ``done`` bytes of the pieces."""
    for index, piece in enumerate(pieces):
        if done < piece.nbytes:
            return [piece[done:], *pieces[index + 1 :]]
        done -= piece.nbytes
    return []
