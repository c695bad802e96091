"""NIXL as a transport: what every transport must do, and what one-sided reads add to that."""

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_suite import WAIT_S, Read, TransportSuite, fetched, nothing, payload, same, until

import kv.nixl
from kv import ucx
from kv.chunk import Run
from kv.errors import ChunkCorrupt, PeerLost, StoreFull, TransferTimeout
from kv.nixl import NixlTicket, NixlTransport
from kv.transport import Ticket, Transport

pytest.importorskip("nixl", reason="NIXL is not installed: pip install -e '.[nixl]'")

HERE = "127.0.0.1"
BIG = 64 << 20
SPAWN = multiprocessing.get_context("spawn")


class Registering(NixlTransport):
    """Registers whatever it is given: the suite makes its memory as it goes."""

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> NixlTicket:
        self.register([_whole(run) for run in runs])
        return super().publish(runs, read)

    def fetch(self, ticket: NixlTicket, into: Sequence[Run | None], timeout_s: float) -> None:
        self.register([_whole(run) for run in into if run is not None])
        super().fetch(ticket, into, timeout_s)


def _whole(run: Run) -> Run:
    base = run.base if isinstance(run.base, np.ndarray) else run
    return base.reshape(-1).view(np.uint8)


class Peer:
    """A sender in a process of its own, which publishes one payload."""

    def __init__(self, nbytes: int, environment: dict[str, str]) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        with pytest.MonkeyPatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            self.process = SPAWN.Process(target=_publish, args=(theirs, nbytes), daemon=True)
            self.process.start()
        self.ticket: NixlTicket = self.ask(None)

    def ask(self, what: object) -> Any:
        if what is not None:
            self.pipe.send(what)
        assert self.pipe.poll(60), "the peer does not answer"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


def _publish(pipe: Connection, nbytes: int) -> None:
    transport, memory, read = NixlTransport(HERE), np.full(nbytes, 1, np.uint8), Read()
    transport.register([memory])
    ticket = transport.publish([memory], read)
    pipe.send(ticket)
    while (what := pipe.recv()) != "end":
        if what == "release":
            transport.release(ticket)
            memory[:] = 2
        pipe.send((read.calls, int(memory[-1])))
    transport.close()
    pipe.send("closed")


def _fetch(pipe: Connection, ticket: NixlTicket) -> None:
    """Fetch again and again, until killed."""
    transport, memory = NixlTransport(HERE), np.zeros(ticket.nbytes, np.uint8)
    transport.register([memory])
    for i in range(1 << 30):
        transport.fetch(ticket, [memory], 60)
        if i == 0:
            pipe.send("fetching")


@pytest.fixture(params=["", "tcp"], ids=["best", "tcp"])
def tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """UCX's own choice of transports, and TCP alone."""
    environment = {"UCX_TLS": request.param} if request.param else {}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    return environment


@pytest.fixture
def peer(tls: dict[str, str]) -> Iterator[Peer]:
    with closing(Peer(BIG, tls)) as peer:
        yield peer


@pytest.fixture
def receiver(tls: dict[str, str]) -> Iterator[NixlTransport]:
    with closing(NixlTransport(HERE)) as transport:
        yield transport


@pytest.fixture
def memory(receiver: NixlTransport) -> Run:
    memory = np.zeros(BIG, np.uint8)
    receiver.register([memory])
    return memory


class TestNixl(TransportSuite):
    copies = False

    @pytest.fixture
    def sender(self, tls: dict[str, str]) -> Iterator[Transport]:
        with closing(Registering(HERE)) as transport:
            yield transport

    @pytest.fixture
    def receiver(self, tls: dict[str, str]) -> Iterator[Transport]:
        with closing(Registering(HERE)) as transport:
            yield transport

    def late_ticket(self) -> Ticket:
        pytest.skip("see test_a_frozen_peer: here both ends are one process")

    def lost_ticket(self, sender: Transport) -> Ticket:
        ticket = sender.publish(payload(0), nothing)
        sender.release(ticket)
        return ticket


# -- two processes ---------------------------------------------------------------------------------


def test_a_payload_crosses_processes(peer: Peer, receiver: NixlTransport, memory: Run) -> None:
    receiver.fetch(peer.ticket, [memory], WAIT_S)
    assert (memory == 1).all()
    assert peer.ask("release") == (1, 2)
    with pytest.raises(PeerLost, match=f"no longer has payload {peer.ticket.mark.hex()}"):
        receiver.fetch(peer.ticket, [memory], WAIT_S)
    assert peer.ask("end") == "closed"
    with pytest.raises(PeerLost, match="is gone"):
        receiver.fetch(peer.ticket, [memory], WAIT_S)


def test_a_release_in_the_middle_is_noticed(peer: Peer, receiver: NixlTransport, memory: Run) -> None:
    """Memory that changes while it is read must not pass for the payload."""
    outcomes = []
    for _ in range(200):
        try:
            receiver.fetch(peer.ticket, [memory], WAIT_S)
        except PeerLost:
            outcomes.append("lost")
            break
        outcomes.append("whole" if (memory == 1).all() else "torn")
        if len(outcomes) == 2:
            peer.pipe.send("release")
    assert set(outcomes[:-1]) == {"whole"}
    assert outcomes[-1] == "lost"


def test_a_killed_sender(peer: Peer, receiver: NixlTransport, memory: Run, tls: dict[str, str]) -> None:
    with closing(Peer(4096, tls)) as other:
        receiver.fetch(peer.ticket, [memory], WAIT_S)
        killer = threading.Timer(0.05, peer.signal, [signal.SIGKILL])
        killer.start()
        started = time.monotonic()

        def fetch_until_it_fails() -> None:
            while time.monotonic() < started + WAIT_S:
                receiver.fetch(peer.ticket, [memory], 5.0)

        with pytest.raises((PeerLost, TransferTimeout)):
            fetch_until_it_fails()
        assert time.monotonic() < started + WAIT_S
        killer.join()
        receiver.fetch(other.ticket, [memory[:4096]], WAIT_S)


def test_a_killed_receiver_does_not_disturb_the_sender(tls: dict[str, str]) -> None:
    with closing(NixlTransport(HERE)) as sender:
        sent, read = np.full(BIG, 3, np.uint8), Read()
        sender.register([sent])
        ticket = sender.publish([sent], read)
        for _ in range(2):
            pipe, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_fetch, args=(theirs, ticket), daemon=True)
            process.start()
            assert pipe.poll(60)
            assert pipe.recv() == "fetching"
            process.kill()
            process.join(WAIT_S)
        assert sender.live() == (1, BIG)
        sender.release(ticket)
        assert read.calls == 1


def test_a_frozen_peer(peer: Peer, receiver: NixlTransport, memory: Run, tls: dict[str, str]) -> None:
    """A read that was given up writes nothing later, and the peer can be read again if it is still there."""
    with closing(Peer(4096, tls)) as other:
        peer.signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(TransferTimeout, match=r"67108864 bytes from 127.0.0.1 .* 0\.5 s"):
            receiver.fetch(peer.ticket, [memory], 0.5)
        assert time.monotonic() < started + WAIT_S
        receiver.fetch(other.ticket, [memory[:4096]], WAIT_S)
        memory[:] = 9
        peer.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert (memory == 9).all()


def test_a_frozen_peer_does_not_hold_up_the_close(peer: Peer, receiver: NixlTransport, memory: Run) -> None:
    peer.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        fetches = [pool.submit(receiver.fetch, peer.ticket, [memory], 60.0) for _ in range(2)]
        until(lambda: any(reader.users == 2 for reader in receiver._readers.values()), "both are under way")
        receiver.close()
        for fetch in fetches:
            with pytest.raises(PeerLost, match="closed"):
                fetch.result(timeout=WAIT_S)
    memory[:] = 9
    peer.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert (memory == 9).all()


# -- which way -------------------------------------------------------------------------------------


def test_it_says_which_way_the_bytes_go(
    peer: Peer, receiver: NixlTransport, memory: Run, tls: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert receiver.paths() == {}
    with caplog.at_level(logging.INFO):
        receiver.fetch(peer.ticket, [memory], WAIT_S)
    (path,) = receiver.paths().values()
    assert receiver.paths() == {peer.ticket.agent: path}
    (record,) = [record for record in caplog.records if "by way of UCX" in record.message]
    assert path in record.message
    if tls:
        assert "tcp/lo" in path
        assert record.levelno == logging.WARNING
        assert "the tcp transport is faster and safer" in record.message
    else:
        assert any(way in path for way in ("cma", "xpmem", "knem", "sysv", "posix", "tcp", "rc", "dc", "ud"))


def test_the_listener_is_bound_to_the_address(tls: dict[str, str]) -> None:
    def listening() -> set[str]:
        inodes = {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        }
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}

    before = listening()
    with closing(NixlTransport(HERE)):
        ours = listening() - before
        assert ours
        assert {address.split(":")[0] for address in ours} == {"0100007F"}


def test_any_loopback_address_will_do() -> None:
    """The nodes of a local cluster have addresses of their own, 127.0.0.2 and so on."""
    memory = np.ones(64, np.uint8)
    with closing(NixlTransport("127.0.0.2")) as one, closing(NixlTransport("127.0.0.3")) as other:
        for transport in (one, other):
            transport.register([memory])
        other.fetch(one.publish([memory], nothing), [memory], WAIT_S)


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(ValueError, match=r"address: .*'203\.0\.113\.9'"):
        NixlTransport("203.0.113.9")


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def sender() -> Iterator[NixlTransport]:
    with closing(NixlTransport(HERE)) as transport:
        yield transport


def test_memory_that_is_not_registered_is_refused(sender: NixlTransport) -> None:
    memory, elsewhere, read = np.zeros(4096, np.uint8), np.zeros(64, np.uint8), Read()
    with pytest.raises(ValueError, match="run 0 of 4096 bytes does not lie in registered memory"):
        sender.publish([memory], read)
    sender.register([memory])
    with pytest.raises(ValueError, match="run 1 of 64 bytes"):
        sender.publish([memory[:10], elsewhere], read)
    assert sender.live() == (0, 0)
    assert read.calls == 0
    ticket = sender.publish([memory[:64]], read)
    with closing(NixlTransport(HERE)) as receiver, pytest.raises(ValueError, match="announce it"):
        receiver.fetch(ticket, [elsewhere], WAIT_S)


def test_memory_registered_later_can_be_used(sender: NixlTransport) -> None:
    with closing(NixlTransport(HERE)) as receiver:
        for seed in range(3):
            source, target = payload(seed, runs=1)[0], np.zeros(4096, np.uint8)
            sender.register([source, source[5:9]])
            receiver.register([target])
            receiver.fetch(sender.publish([source], nothing), [target], WAIT_S)
            assert same([source], [target])


def test_adjacent_runs_are_read_as_one(sender: NixlTransport) -> None:
    source, target = np.zeros((16, 512), np.uint8), np.zeros((16, 512), np.uint8)
    source[:] = np.random.default_rng(3).integers(0, 256, source.shape)
    with closing(NixlTransport(HERE)) as receiver:
        sender.register([source[:8].reshape(-1), source[8:].reshape(-1)])  # adjacent, but two pieces
        receiver.register([target.reshape(-1)])
        blocks, places = [2, 3, 4, 9, 7, 8], [5, 6, 7, 8, 11, 12]
        ticket = sender.publish([source[block] for block in blocks], nothing)
        into: list[Run | None] = [target[place] for place in places]
        theirs, ours = receiver._pieces(ticket, into)
        assert [int(size) // 512 for _, size, _ in ours] == [3, 1, 1, 1]
        assert theirs.shape == ours.shape == (4, 3)
        receiver.fetch(ticket, into, WAIT_S)
        assert same(target[places], source[blocks])
        assert not np.delete(target, places, axis=0).any()


def test_no_more_payloads_than_slots(sender: NixlTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, read = np.zeros(8, np.uint8), Read()
    sender.register([memory])
    tickets = [sender.publish([memory], read) for _ in range(kv.nixl.SLOTS)]
    with pytest.raises(StoreFull, match=f"{kv.nixl.SLOTS} payloads are live"):
        sender.publish([memory], read)
    assert read.calls == 0
    sender.release(tickets[5])
    sender.release(sender.publish([memory], read))
    assert read.calls == 2


def test_tickets_are_plain_data(sender: NixlTransport) -> None:
    memory = np.zeros(64, np.uint8)
    sender.register([memory])
    ticket = sender.publish([memory[:32], memory[32:]], nothing)
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    assert ticket.nbytes == 64


def test_wrong_sizes_are_refused_before_anything_is_read(sender: NixlTransport) -> None:
    memory = np.zeros(64, np.uint8)
    sender.register([memory])
    ticket = sender.publish([memory], nothing)
    with pytest.raises(ChunkCorrupt, match="size of a run"):
        sender.fetch(ticket, [memory[:63]], WAIT_S)
    assert not sender._readers


# -- the end ---------------------------------------------------------------------------------------


def test_closing_leaves_no_thread_and_no_file() -> None:
    def open_files() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    ucx.library()
    for _ in range(2):  # what UCX opens once for a process is open after the first
        threads, files = len(os.listdir("/proc/self/task")), open_files()
        sender, receiver = Registering(HERE), Registering(HERE)
        fetched(receiver, sender.publish(payload(1), nothing), payload(1))
        assert len(os.listdir("/proc/self/task")) > threads
        sender.close()
        receiver.close()
    until(lambda: len(os.listdir("/proc/self/task")) <= threads, "the threads end")
    assert len(open_files()) <= len(files)


def test_agents_of_peers_that_are_not_read_any_more_end(
    sender: NixlTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.zeros(64, np.uint8)
    with closing(NixlTransport(HERE)) as other, closing(NixlTransport(HERE)) as receiver:
        for transport in (sender, other, receiver):
            transport.register([memory])
        tickets = [transport.publish([memory], nothing) for transport in (sender, other)]
        for ticket in tickets:
            receiver.fetch(ticket, [memory], WAIT_S)
        assert set(receiver._readers) == {ticket.agent for ticket in tickets}
        monkeypatch.setattr(kv.nixl, "IDLE_S", 0.0)
        with closing(NixlTransport(HERE)) as third:
            third.register([memory])
            receiver.fetch(third.publish([memory], nothing), [memory], WAIT_S)
            assert len(receiver._readers) == 1
        receiver.fetch(tickets[0], [memory], WAIT_S)  # and can be read again


def test_idle_agents_do_not_spin(receiver: NixlTransport, peer: Peer, memory: Run) -> None:
    receiver.fetch(peer.ticket, [memory], WAIT_S)
    spent = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - spent < 0.2  # a thread that spins takes 0.5, and there are two agents


def test_a_closed_transport_fetches_and_publishes_nothing(sender: NixlTransport) -> None:
    memory = np.zeros(64, np.uint8)
    sender.register([memory])
    ticket = sender.publish([memory], nothing)
    sender.close()
    with pytest.raises(PeerLost, match="closed"):
        sender.publish([memory], nothing)
    with pytest.raises(PeerLost, match="closed"):
        sender.fetch(ticket, [memory], WAIT_S)
