"""TCP as a transport: what every transport must do, and what a socket's other end may do wrong."""

import hmac
import itertools
import logging
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from transport_suite import WAIT_S, Read, TransportSuite, fetched, nothing, payload, room, same, until

import kv.tcp
from kv.chunk import Run
from kv.errors import ChunkCorrupt, PeerLost, TransferError, TransferTimeout
from kv.tcp import ANSWER, DENIED, GONE, HEAD, IOV_MAX, MAC_BYTES, NONCE_BYTES, OK, TcpTicket, TcpTransport
from kv.transport import Ticket, Transport

HERE = "127.0.0.1"
KEY = b"k" * 32
BIG = 32 << 20
"""More than the kernel's buffers hold for one connection."""
PATIENCE_S = 3.0
"""A deadline of some tenths of a second is kept within this, on a busy machine."""


@pytest.fixture
def sender() -> Iterator[TcpTransport]:
    with closing(TcpTransport(HERE, KEY)) as transport:
        yield transport


@pytest.fixture
def receiver() -> Iterator[TcpTransport]:
    with closing(TcpTransport(HERE, KEY)) as transport:
        yield transport


class TestTcp(TransportSuite):
    copies = False

    @pytest.fixture
    def sender(self) -> Iterator[Transport]:
        with closing(TcpTransport(HERE, KEY)) as transport:
            yield transport

    @pytest.fixture
    def receiver(self) -> Iterator[Transport]:
        with closing(TcpTransport(HERE, KEY)) as transport:
            yield transport

    @pytest.fixture(autouse=True)
    def deaf(self) -> Iterator[None]:
        """A server that the kernel accepts connections for, and nobody answers them."""
        with socket.create_server((HERE, 0)) as self.listener:
            yield

    def late_ticket(self) -> Ticket:
        return ticket_for(self.listener, payload(0))

    def lost_ticket(self, sender: Transport) -> Ticket:
        ticket = sender.publish(payload(0), nothing)
        sender.release(ticket)
        return ticket


# -- raw ends --------------------------------------------------------------------------------------


def ticket_for(listener: socket.socket, runs: list[Run]) -> TcpTicket:
    return TcpTicket(*listener.getsockname()[:2], b"p" * 16, tuple(run.nbytes for run in runs))


def exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Receive that many bytes, or what comes before the end."""
    data = bytearray()
    while len(data) < nbytes and (piece := connection.recv(min(nbytes - len(data), 1 << 20))):
        data += piece
    return bytes(data)


class RawServer:
    """Accepts one connection and does with it what a test says."""

    def __init__(self, talk: Callable[[socket.socket], None]) -> None:
        self._talk, self.stop = talk, threading.Event()
        self.listener = socket.create_server((HERE, 0))
        self.listener.settimeout(WAIT_S)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            self._talk(connection)

    def close(self) -> None:
        self.stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.listener.close()


class RawClient:
    """A receiver that is spoken by hand."""

    def __init__(self, server: TcpTransport) -> None:
        self.socket = socket.create_connection(server.address, timeout=WAIT_S)
        self.nonce = exactly(self.socket, NONCE_BYTES)
        assert len(self.nonce) == NONCE_BYTES

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def request(
        self, ticket: TcpTicket, runs: tuple[int, ...] = (0,), sequence: int = 0, key: bytes = KEY
    ) -> bytes:
        body = HEAD.pack(ticket.payload, len(runs)) + struct.pack(f"!{len(runs)}I", *runs)
        return body + hmac.digest(key, self.nonce + sequence.to_bytes(8, "big") + body, "sha256")

    def ask(self, request: bytes) -> tuple[int, int]:
        """Send a request; return the answer's status and size."""
        self.socket.sendall(request)
        return ANSWER.unpack(exactly(self.socket, ANSWER.size))

    def ended(self) -> bool:
        """Return whether the server says nothing more and closes."""
        return exactly(self.socket, 1) == b""


# -- who may read ----------------------------------------------------------------------------------


def test_another_clusters_receiver_is_refused(sender: TcpTransport, caplog: pytest.LogCaptureFixture) -> None:
    sent, into, read = payload(1), room(payload(1)), Read()
    ticket = sender.publish(sent, read)
    with closing(TcpTransport(HERE, b"x" * 32)) as stranger:
        with pytest.raises(TransferError, match="secrets differ") as caught:
            stranger.fetch(ticket, into, WAIT_S)
        assert not isinstance(caught.value, PeerLost | TransferTimeout)
        assert not any(run.any() for run in into)
        assert not stranger._idle[(ticket.host, ticket.port)]
    assert "was not authorised" in caplog.text
    until(lambda: not sender._busy, "the connection is closed")
    assert (sender.live()[0], read.calls) == (1, 0)
    sender.release(ticket)
    assert read.calls == 1  # the stranger holds nothing in place


def test_an_unknown_payload_does_not_tell_a_stranger_that_it_is_unknown(sender: TcpTransport) -> None:
    missing = TcpTicket(*sender.address, b"?" * 16, (8,))
    with RawClient(sender) as client:
        assert client.ask(client.request(missing, key=b"x" * 32)) == (DENIED, 0)


def test_a_request_counts_once_and_on_one_connection(sender: TcpTransport) -> None:
    sent = payload(2)
    ticket = sender.publish(sent, nothing)
    with RawClient(sender) as client, RawClient(sender) as other:
        assert client.nonce != other.nonce
        request = client.request(ticket)
        assert client.ask(request) == (OK, sent[0].nbytes)
        assert exactly(client.socket, sent[0].nbytes) == sent[0].tobytes()
        for connection in (client, other):
            assert connection.ask(request) == (DENIED, 0)
            assert connection.ended()
    with RawClient(sender) as client:  # the next in its sequence would have been right
        assert client.ask(client.request(ticket, sequence=0))[0] == OK
        exactly(client.socket, sent[0].nbytes)
        assert client.ask(client.request(ticket, (2, 0), sequence=1)) == (OK, sent[2].nbytes + sent[0].nbytes)
        assert exactly(client.socket, sent[2].nbytes) == sent[2].tobytes()
        assert exactly(client.socket, sent[0].nbytes) == sent[0].tobytes()


@pytest.mark.parametrize("part", ["payload", "count", "run", "code", "key", "sequence"])
def test_a_forged_request_is_refused(sender: TcpTransport, part: str) -> None:
    ticket = sender.publish(payload(3), nothing)
    with RawClient(sender) as client:
        forged = bytearray(client.request(ticket, (0, 1)))
        match part:
            case "payload":
                forged[0] ^= 1
            case "count":  # fewer runs, and as many bytes as that needs
                forged[16:24] = struct.pack("!II", 1, 0)
                del forged[24:28]
            case "run":
                forged[27] ^= 1
            case "code":
                forged[-1] ^= 1
            case "key":
                forged[:] = client.request(ticket, (0, 1), key=b"")
            case "sequence":
                forged[:] = client.request(ticket, (0, 1), sequence=1)
        assert client.ask(bytes(forged)) == (DENIED, 0)
        assert client.ended()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda client, ticket: HEAD.pack(ticket.payload, 0xFFFFFFFF),
        lambda client, ticket: client.request(ticket, (0, 3)),  # there are three runs
    ],
    ids=["absurd", "past the end"],
)
def test_what_makes_no_sense_ends_the_connection(
    sender: TcpTransport, receiver: TcpTransport, request_of: Callable[[RawClient, TcpTicket], bytes]
) -> None:
    sent, read = payload(4), Read()
    ticket = sender.publish(sent, read)
    with RawClient(sender) as client:
        client.socket.sendall(request_of(client, ticket))
        assert client.ended()
    until(lambda: not sender._busy, "the connection is closed")
    assert same(fetched(receiver, ticket, sent), sent)
    sender.release(ticket)
    until(lambda: read.calls, "read")
    assert read.calls == 1


@pytest.mark.parametrize("cut", [0, 1, HEAD.size, HEAD.size + 4, HEAD.size + 4 + MAC_BYTES - 1])
def test_half_a_request_holds_nothing(sender: TcpTransport, cut: int) -> None:
    read = Read()
    ticket = sender.publish(payload(5), read)
    with RawClient(sender) as client:
        client.socket.sendall(client.request(ticket)[:cut])
        sender.release(ticket)
        assert read.calls == 1
    until(lambda: not sender._busy, "the connection is closed")


# -- when memory may be reused ---------------------------------------------------------------------


@pytest.fixture
def large() -> Run:
    return np.tile(np.arange(256, dtype=np.uint8), BIG // 256)


def test_memory_is_kept_while_a_slow_receiver_reads(sender: TcpTransport, large: Run) -> None:
    read = Read()
    ticket = sender.publish([large], read)
    with RawClient(sender) as client:
        assert client.ask(client.request(ticket)) == (OK, BIG)
        sender.release(ticket)
        sender.release(ticket)
        time.sleep(0.2)
        assert (sender.live(), read.calls) == ((0, 0), 0)  # given up, and still being sent
        arrived = exactly(client.socket, BIG)
        until(lambda: read.calls, "read")
        assert arrived == large.tobytes()
        assert client.ask(client.request(ticket, sequence=1)) == (GONE, 0)
    sender.close()
    assert read.calls == 1


def test_memory_is_kept_until_the_last_receiver_has_read(sender: TcpTransport, large: Run) -> None:
    read = Read()
    ticket = sender.publish([large], read)
    with RawClient(sender) as first, RawClient(sender) as second:
        for client in (first, second):
            assert client.ask(client.request(ticket)) == (OK, BIG)
        sender.release(ticket)
        assert len(exactly(first.socket, BIG)) == BIG
        time.sleep(0.1)
        assert read.calls == 0
        assert len(exactly(second.socket, BIG)) == BIG
        until(lambda: read.calls, "read")
    assert read.calls == 1


def test_a_send_that_ends_before_the_release_does_not_read(sender: TcpTransport) -> None:
    sent, read = payload(6), Read()
    ticket = sender.publish(sent, read)
    with RawClient(sender) as client:
        assert client.ask(client.request(ticket)) == (OK, sent[0].nbytes)
        exactly(client.socket, sent[0].nbytes)
    until(lambda: not sender._busy, "the connection is closed")
    assert read.calls == 0
    sender.release(ticket)
    assert read.calls == 1


@pytest.mark.parametrize("how", ["the receiver goes away", "the sender closes", "nothing is taken any more"])
def test_memory_is_given_back_when_a_send_is_cut_short(
    sender: TcpTransport, large: Run, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Read()
    if how == "nothing is taken any more":
        monkeypatch.setattr(kv.tcp, "STALL_TIMEOUT_S", 0.5)
    ticket = sender.publish([large], read)
    with RawClient(sender) as client:
        assert client.ask(client.request(ticket)) == (OK, BIG)
        if how != "the sender closes":
            sender.release(ticket)
            assert read.calls == 0
        if how == "the receiver goes away":
            client.socket.close()
        if how == "the sender closes":
            sender.close()
        until(lambda: read.calls, "read")
        assert how == "the receiver goes away" or len(exactly(client.socket, BIG)) < BIG
    sender.close()
    sender.release(ticket)
    assert read.calls == 1


def test_a_closed_transport_publishes_nothing(sender: TcpTransport) -> None:
    sender.close()
    read = Read()
    with pytest.raises(PeerLost, match="has been closed"):
        sender.publish(payload(7), read)
    assert (read.calls, sender.live()) == (0, (0, 0))


# -- servers that fail -----------------------------------------------------------------------------

SENT = payload(20, runs=4, nbytes=50_000)
SIZE = sum(run.nbytes for run in SENT)
DATA = b"".join(run.tobytes() for run in SENT)
REQUEST_BYTES = HEAD.size + 4 * len(SENT) + MAC_BYTES
NONCE, ANSWERED = b"n" * NONCE_BYTES, ANSWER.pack(OK, SIZE)


def serve(before: bytes, after: bytes, then: Callable[[socket.socket], None]) -> RawServer:
    """A server that says ``before``, reads a request if it has greeted, says ``after``, and then ..."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(before)
        if len(before) == NONCE_BYTES:
            assert len(exactly(connection, REQUEST_BYTES)) == REQUEST_BYTES
        connection.sendall(after)
        then(connection)

    return RawServer(talk)


def wait_for(server: RawServer) -> None:
    server.stop.wait(WAIT_S)


STAGES = {
    "before its nonce": (b"", b""),
    "within its nonce": (NONCE[:5], b""),
    "before its answer": (NONCE, b""),
    "within its answer": (NONCE, ANSWERED[:4]),
    "before the payload": (NONCE, ANSWERED),
    "within the payload": (NONCE, ANSWERED + DATA[: SIZE // 2]),
    "one byte before the end": (NONCE, ANSWERED + DATA[:-1]),
}
stages = pytest.mark.parametrize("said", STAGES.values(), ids=STAGES.keys())


@stages
def test_a_server_that_closes(receiver: TcpTransport, said: tuple[bytes, bytes]) -> None:
    with closing(serve(*said, lambda connection: None)) as server:
        ticket = ticket_for(server.listener, SENT)
        with pytest.raises(PeerLost, match=f"{ticket.host}:{ticket.port} is gone"):
            receiver.fetch(ticket, room(SENT), WAIT_S)
        assert not receiver._idle[(ticket.host, ticket.port)]
        assert not receiver._busy


@stages
def test_a_server_that_stops_sending(receiver: TcpTransport, said: tuple[bytes, bytes]) -> None:
    with closing(serve(*said, lambda connection: wait_for(server))) as server:
        started = time.monotonic()
        with pytest.raises(TransferTimeout, match=rf"{SIZE} bytes from .* did not arrive in 0\.3 s"):
            receiver.fetch(ticket_for(server.listener, SENT), room(SENT), 0.3)
        assert time.monotonic() - started < PATIENCE_S
        assert not receiver._busy


@pytest.mark.parametrize("stage", ["before its nonce", "before its answer", "within the payload"])
def test_a_server_that_sends_drop_by_drop(receiver: TcpTransport, stage: str) -> None:
    """Something comes before any single wait is over, and still the deadline holds."""
    before, after = STAGES[stage]
    rest = {"before its nonce": NONCE, "before its answer": ANSWERED + DATA}.get(stage, DATA[SIZE // 2 :])

    def drip(connection: socket.socket) -> None:
        try:
            for byte in rest:
                connection.sendall(bytes([byte]))
                if server.stop.wait(0.2):
                    return
        except OSError:
            pass  # the receiver has had enough

    with closing(serve(before, after, drip)) as server:
        started = time.monotonic()
        with pytest.raises(TransferTimeout):
            receiver.fetch(ticket_for(server.listener, SENT), room(SENT), 0.5)
        assert 0.5 <= time.monotonic() - started < 0.5 + 1.0  # nine bytes of an answer would take 1.8


@pytest.mark.parametrize("claimed", [0, SIZE - 1, SIZE + 1, 2**63])
def test_an_answer_of_another_size(receiver: TcpTransport, claimed: int) -> None:
    into = room(SENT)
    with closing(serve(NONCE, ANSWER.pack(OK, claimed) + DATA, lambda _: None)) as server:
        with pytest.raises(ChunkCorrupt, match=rf"size is {claimed}, expected {SIZE}"):
            receiver.fetch(ticket_for(server.listener, SENT), into, WAIT_S)
        assert not any(run.any() for run in into)


def test_a_deadline_that_has_passed_is_a_timeout(sender: TcpTransport, receiver: TcpTransport) -> None:
    ticket = sender.publish(SENT, nothing)
    with pytest.raises(TransferTimeout):
        receiver.fetch(ticket, room(SENT), 0.0)
    assert same(fetched(receiver, ticket, SENT), SENT)


def test_an_unknown_payload_is_named(sender: TcpTransport, receiver: TcpTransport) -> None:
    missing = TcpTicket(*sender.address, bytes(range(16)), (8,))
    with pytest.raises(PeerLost, match=f"no longer has payload {bytes(range(16)).hex()}"):
        receiver.fetch(missing, [np.zeros(8, np.uint8)], WAIT_S)


def test_a_server_that_is_not_there(sender: TcpTransport, receiver: TcpTransport) -> None:
    ticket = sender.publish(SENT, nothing)
    sender.close()
    with pytest.raises(PeerLost, match=f"{ticket.host}:{ticket.port} is gone"):
        receiver.fetch(ticket, room(SENT), WAIT_S)


# -- close -----------------------------------------------------------------------------------------


@pytest.fixture
def cut_short(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Senders stop after the answer until the event is set."""
    go, send = threading.Event(), kv.tcp._send

    def hold(connection: socket.socket, head: bytes, runs: list[Run]) -> None:
        connection.sendall(head)
        assert go.wait(WAIT_S)
        send(connection, b"", runs)

    monkeypatch.setattr(kv.tcp, "_send", hold)
    yield go
    go.set()


def fetching(pool: ThreadPoolExecutor, receiver: TcpTransport, ticket: TcpTicket) -> "Future[None]":
    return pool.submit(receiver.fetch, ticket, room(SENT), 60.0)


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_closing_ends_the_fetches_in_flight(
    sender: TcpTransport, receiver: TcpTransport, cut_short: threading.Event, end: str
) -> None:
    read = Read()
    ticket = sender.publish(SENT, read)
    with ThreadPoolExecutor(3) as pool:
        fetches = [fetching(pool, receiver, ticket) for _ in range(3)]
        until(lambda: sender._payloads[ticket.payload].sending == 3, "three are in flight")
        {"sender": sender, "receiver": receiver}[end].close()
        for fetch in fetches:
            with pytest.raises(PeerLost, match="is gone"):
                fetch.result(timeout=WAIT_S)
    assert not receiver._busy
    assert not any(receiver._idle.values())
    assert read.calls == 0  # the sender's threads have not noticed yet
    cut_short.set()
    if end == "receiver":
        sender.release(ticket)
    until(lambda: read.calls, "read")
    until(lambda: not sender._busy, "the connections are closed")
    assert read.calls == 1


def test_closing_leaves_no_thread_and_no_socket(sender: TcpTransport, receiver: TcpTransport) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("kv-tcp")]

    ticket = sender.publish(SENT, nothing)
    fetched(receiver, ticket, SENT)
    assert len(threads()) >= 3  # two that accept, one that serves
    ours = threads()
    sender.close()
    receiver.close()
    until(lambda: not any(thread.is_alive() for thread in ours), "the threads end")
    assert not sender._busy
    assert not any(receiver._idle.values())


def test_a_connection_that_comes_as_the_sender_closes_is_closed(
    sender: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted before the close, its thread runs only after it."""
    entered, go, serve_one = threading.Event(), threading.Event(), sender._serve

    def late(connection: socket.socket) -> None:
        entered.set()
        assert go.wait(WAIT_S)
        serve_one(connection)

    monkeypatch.setattr(sender, "_serve", late)
    with socket.create_connection(sender.address, timeout=WAIT_S) as connection:
        assert entered.wait(WAIT_S)
        sender.close()
        go.set()
        assert exactly(connection, 1) == b""
    assert not sender._busy


def test_one_failed_accept_is_not_the_last(
    sender: TcpTransport,
    receiver: TcpTransport,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        """A listener with no file descriptor left, once."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener, self._errors = listener, iter([OSError(24, "Too many open files")])

        def accept(self) -> tuple[socket.socket, object]:
            if (error := next(self._errors, None)) is not None:
                raise error
            return self._listener.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self._listener, name)

    ticket = sender.publish(SENT, nothing)
    monkeypatch.setattr(sender, "_listener", Failing(sender._listener))
    with caplog.at_level(logging.WARNING):
        for other in range(2):  # the first is accepted by the call that was under way
            with closing(TcpTransport(HERE, KEY)) as transport:
                assert same(fetched(transport, ticket, SENT), SENT), other
    assert "Too many open files" in caplog.text


# -- connections -----------------------------------------------------------------------------------


def connections(receiver: TcpTransport, ticket: TcpTicket) -> int:
    return len(receiver._idle[(ticket.host, ticket.port)])


def test_one_connection_serves_one_fetch_after_another(sender: TcpTransport, receiver: TcpTransport) -> None:
    for seed in range(10):
        sent = payload(seed)
        ticket = sender.publish(sent, nothing)
        assert same(fetched(receiver, ticket, sent), sent)
        sender.release(ticket)
    assert connections(receiver, ticket) == len(sender._busy) == 1


def test_fetches_go_on_after_errors(sender: TcpTransport, receiver: TcpTransport) -> None:
    ticket = sender.publish(SENT, nothing)
    gone = sender.publish(SENT, nothing)
    sender.release(gone)
    bad: list[tuple[type[TransferError], TcpTicket, list[Run], float]] = [
        (PeerLost, gone, room(SENT), WAIT_S),
        (ChunkCorrupt, ticket, room(SENT[:1]), WAIT_S),
        (TransferTimeout, ticket, room(SENT), 0.0),
    ]
    for error, what, into, timeout_s in bad:
        assert same(fetched(receiver, ticket, SENT), SENT)
        with pytest.raises(error):
            receiver.fetch(what, into, timeout_s)
        assert same(fetched(receiver, ticket, SENT), SENT)
    assert connections(receiver, ticket) == 1
    until(lambda: len(sender._busy) == 1, "the others are closed")


def test_a_fetch_cut_off_by_its_deadline_leaves_nothing_in_the_way(
    sender: TcpTransport, receiver: TcpTransport, cut_short: threading.Event
) -> None:
    ticket = sender.publish(SENT, nothing)
    with pytest.raises(TransferTimeout):
        receiver.fetch(ticket, room(SENT), 0.2)
    cut_short.set()  # what was asked for comes now, on a connection that nobody uses any more
    other = sender.publish(payload(21, runs=4, nbytes=50_000), nothing)
    assert same(fetched(receiver, other, SENT), payload(21, runs=4, nbytes=50_000))


def test_a_connection_that_was_idle_too_long_is_replaced(
    sender: TcpTransport, receiver: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv.tcp, "IDLE_TIMEOUT_S", 0.1)
    ticket = sender.publish(SENT, nothing)
    for _ in range(2):
        assert same(fetched(receiver, ticket, SENT), SENT)
        until(lambda: not sender._busy, "the sender closes the idle connection")
    assert connections(receiver, ticket) == 1


def test_more_runs_than_one_system_call_takes(sender: TcpTransport, receiver: TcpTransport) -> None:
    memory = np.random.default_rng(8).integers(0, 256, 1 << 20, dtype=np.uint8)
    bounds = list(itertools.accumulate([0, *(1 + i % 97 for i in range(3 * IOV_MAX + 1))]))
    sent = [memory[start:end] for start, end in itertools.pairwise(bounds)]
    assert len(sent) > 1024  # Linux's own limit
    ticket = sender.publish(sent, nothing)
    assert same(fetched(receiver, ticket, sent), sent)
    into = room(sent)
    receiver.fetch(ticket, [None if i % 3 == 0 else run for i, run in enumerate(into)], WAIT_S)
    for i, (run, original) in enumerate(zip(into, sent, strict=True)):
        assert not run.any() if i % 3 == 0 else np.array_equal(run, original)


def test_large_payloads_on_several_connections_at_once(sender: TcpTransport, receiver: TcpTransport) -> None:
    """64 MB: in each of four threads two chunks of 8 MB, in blocks, scattered on both sides."""
    threads, chunks, blocks, nbytes = 4, 2, 64, 128 << 10
    random = np.random.default_rng(9)
    source = np.frombuffer(random.bytes(threads * chunks * blocks * nbytes), np.uint8)
    source = source.reshape(threads * chunks * blocks, nbytes)
    target = np.zeros_like(source)
    places, read = random.permutation(len(source)).reshape(threads, chunks, blocks), Read()
    barrier = threading.Barrier(threads, timeout=WAIT_S)

    def exchange(thread: int) -> None:
        barrier.wait()
        for chunk in places[thread]:
            ticket = sender.publish([source[place] for place in chunk], read)
            receiver.fetch(ticket, [target[place] for place in chunk], 60.0)
            sender.release(ticket)

    with ThreadPoolExecutor(threads) as pool:
        for task in [pool.submit(exchange, thread) for thread in range(threads)]:
            task.result(timeout=60)
    assert np.array_equal(source, target)
    until(lambda: read.calls >= threads * chunks, "all is read")
    assert read.calls == threads * chunks
    assert 1 <= len(sender._busy) <= threads


DIES_HALFWAY = """
import os, pickle, signal, sys, time
import numpy as np
import kv.tcp

def half(connection, head, runs):
    connection.sendall(head)
    connection.sendall(runs[0].data[: runs[0].nbytes // 2])
    os.kill(os.getpid(), signal.SIGKILL)

kv.tcp._send = half
transport = kv.tcp.TcpTransport("127.0.0.1", b"k" * 32)
ticket = transport.publish([np.ones(int(sys.argv[1]), np.uint8)], lambda: None)
print(pickle.dumps(ticket).hex(), flush=True)
time.sleep(60)
"""


def test_a_sender_that_is_killed_halfway(receiver: TcpTransport) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", DIES_HALFWAY, str(BIG)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        ticket = pickle.loads(bytes.fromhex(child.stdout.readline()))
        began = time.monotonic()
        with pytest.raises(PeerLost, match=str(ticket.port)):
            receiver.fetch(ticket, [np.zeros(BIG, np.uint8)], WAIT_S)
        assert time.monotonic() - began < WAIT_S
        assert child.wait(WAIT_S) == -signal.SIGKILL
        with pytest.raises(PeerLost, match=str(ticket.port)):
            receiver.fetch(ticket, [np.zeros(BIG, np.uint8)], WAIT_S)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
