"""What every transport must do. A transport's test module subclasses `TransportSuite`.

`sender` publishes and releases, `receiver` fetches; a transport within one process may give one for both.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kv.chunk import ChunkHeader, KVLayout, Run, checksum
from kv.errors import ChunkCorrupt, PeerLost, TransferError, TransferTimeout
from kv.faulty import Fault, FaultyTransport, Kind
from kv.transport import Ticket, Transport

WAIT_S = 10.0


def payload(seed: int, runs: int = 3, nbytes: int = 4096) -> list[Run]:
    """Runs of different lengths; no two seeds give the same bytes."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, nbytes + 7 * i, dtype=np.uint8) for i in range(runs)]


def same(left: Sequence[Run], right: Sequence[Run]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(one, other) for one, other in zip(left, right, strict=True)
    )


def room(like: Sequence[Run]) -> list[Run]:
    """Memory of the same sizes, all zero."""
    return [np.zeros(run.nbytes, np.uint8) for run in like]


def fetched(receiver: Transport, ticket: Ticket, like: Sequence[Run]) -> list[Run]:
    """Fetch a whole payload that has the sizes of ``like``."""
    into = room(like)
    receiver.fetch(ticket, into, WAIT_S)
    return into


def header_of(runs: Sequence[Run]) -> ChunkHeader:
    """What a sender promises of these runs."""
    layout = KVLayout("m", "torch.bfloat16", 1, 128, 1, "x")
    sums = tuple(checksum(run) for run in runs)
    return ChunkHeader("r", layout, 0, (0, 128), (0, 1), sums, sum(run.nbytes for run in runs))


def equal_runs(seed: int, runs: int = 3) -> list[Run]:
    """Runs of one length."""
    return list(np.random.default_rng(seed).integers(0, 256, (runs, 4096), dtype=np.uint8))


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.001)


def nothing() -> None:
    pass


class Read:
    """A `read` callback that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.calls += 1


class TransportSuite:
    """Subclasses provide the fixtures `sender` and `receiver`, and the tickets that cannot be served."""

    copies = True
    """Whether what was published may be overwritten at once, or only after its release."""

    @pytest.fixture
    def sender(self) -> Transport:
        raise NotImplementedError

    @pytest.fixture
    def receiver(self, sender: Transport) -> Transport:
        return sender

    def late_ticket(self) -> Ticket:
        """A ticket whose payload does not arrive; skip where publishing and arriving are one."""
        pytest.skip("a payload of this transport is there as soon as its ticket is")

    def lost_ticket(self, sender: Transport) -> Ticket:
        """A ticket whose payload is gone for good."""
        raise NotImplementedError

    def test_is_a_transport(self, sender: Transport) -> None:
        assert isinstance(sender, Transport)
        assert sender.name

    def test_runs_arrive_in_order_and_whole(self, sender: Transport, receiver: Transport) -> None:
        sent = payload(1)
        assert same(fetched(receiver, sender.publish(sent, nothing), sent), sent)

    def test_views_of_larger_memory_can_be_published(self, sender: Transport, receiver: Transport) -> None:
        memory = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
        views = [memory[2], memory[0]]
        assert same(fetched(receiver, sender.publish(views, nothing), views), views)

    def test_views_of_larger_memory_can_be_filled(self, sender: Transport, receiver: Transport) -> None:
        memory = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
        into = np.zeros((5, 64), np.uint8)
        receiver.fetch(sender.publish([memory[2], memory[1]], nothing), [into[4], into[1]], WAIT_S)
        assert same(into[[4, 1]], memory[[2, 1]])
        assert not into[[0, 2, 3]].any()  # nothing else was written

    # -- partial reads ------------------------------------------------------------------------

    @pytest.mark.parametrize("wanted", [[0], [3], [0, 3], [1, 2], [0, 2, 3], []], ids=str)
    def test_runs_that_are_not_wanted_are_left_out(
        self, sender: Transport, receiver: Transport, wanted: list[int]
    ) -> None:
        sent, into = payload(14, runs=4), room(payload(14, runs=4))
        ticket = sender.publish(sent, nothing)
        receiver.fetch(ticket, [run if i in wanted else None for i, run in enumerate(into)], WAIT_S)
        assert [i for i, run in enumerate(into) if run.any()] == wanted
        assert same([into[i] for i in wanted], [sent[i] for i in wanted])
        assert same(fetched(receiver, ticket, sent), sent)  # and all of it is still there

    @pytest.mark.parametrize("bad", ["few", "many", "small", "large", "swapped", "many, none of them wanted"])
    def test_memory_of_other_sizes_is_refused(self, sender: Transport, receiver: Transport, bad: str) -> None:
        sent = payload(15)
        ticket = sender.publish(sent, nothing)
        into: dict[str, list[Run | None]] = {
            "few": [*room(sent)[:-1]],
            "many": [*room(sent), np.zeros(8, np.uint8)],
            "small": [None, *room([sent[1][1:], sent[2]])],
            "large": [None, None, np.zeros(sent[2].nbytes + 1, np.uint8)],
            "swapped": [*room([sent[1], sent[0], sent[2]])],  # as many bytes as were published
            "many, none of them wanted": [None] * 4,
        }
        with pytest.raises(ChunkCorrupt, match=r"number of runs|size of a run"):
            receiver.fetch(ticket, into[bad], WAIT_S)
        assert same(fetched(receiver, ticket, sent), sent)

    # -- read ---------------------------------------------------------------------------------

    def test_read_is_called_exactly_once(self, sender: Transport, receiver: Transport) -> None:
        sent, read = payload(16), Read()
        ticket = sender.publish(sent, read)
        for _ in range(2):
            assert read.calls == self.copies
            assert same(fetched(receiver, ticket, sent), sent)
        assert read.calls == self.copies  # a fetch does not end it: there may be another
        sender.release(ticket)
        until(lambda: read.calls, "read")
        sender.release(ticket)
        sender.close()
        time.sleep(0.02)
        assert read.calls == 1

    def test_closing_reads_what_was_not_released(self, sender: Transport) -> None:
        reads = [Read() for _ in range(4)]
        tickets = [sender.publish(payload(seed), read) for seed, read in enumerate(reads)]
        sender.release(tickets[0])
        sender.close()
        until(lambda: all(read.calls for read in reads), "read")
        sender.close()
        for ticket in tickets:
            sender.release(ticket)
        assert [read.calls for read in reads] == [1] * 4

    def test_read_is_called_once_whoever_releases(self, sender: Transport, receiver: Transport) -> None:
        """Two releases, a fetch and a close at the same moment."""
        for seed in range(8):
            sent, read, barrier = payload(seed), Read(), threading.Barrier(3, timeout=WAIT_S)
            ticket = sender.publish(sent, read)

            def fetch(ticket: Ticket, sent: list[Run], barrier: threading.Barrier) -> bool:
                barrier.wait()
                try:
                    return same(fetched(receiver, ticket, sent), sent)
                except PeerLost:
                    return True

            def release(ticket: Ticket, sent: list[Run], barrier: threading.Barrier) -> bool:
                barrier.wait()
                sender.release(ticket)
                return True

            with ThreadPoolExecutor(3) as pool:
                tasks = [pool.submit(task, ticket, sent, barrier) for task in (fetch, release, release)]
                assert all(task.result(timeout=WAIT_S) for task in tasks)
            until(lambda read=read: read.calls, "read")  # type: ignore[misc]
            assert read.calls == 1

    def test_what_was_read_may_be_overwritten(self, sender: Transport, receiver: Transport) -> None:
        sent, read = payload(2), Read()
        promised = [run.copy() for run in sent]
        ticket = sender.publish(sent, read)
        early = fetched(receiver, ticket, sent)
        if not self.copies:
            sender.release(ticket)
        until(lambda: read.calls, "read")
        for run in sent:
            run[:] = 0
        assert same(early, promised)
        if self.copies:
            assert same(fetched(receiver, ticket, sent), promised)

    def test_what_was_fetched_is_the_receivers_own(self, sender: Transport, receiver: Transport) -> None:
        sent = payload(3)
        promised = [run.copy() for run in sent]
        ticket = sender.publish(sent, nothing)
        for run in fetched(receiver, ticket, sent):
            run[:] = 0
        assert same(sent, promised)
        assert same(fetched(receiver, ticket, sent), promised)

    # -- several at once ----------------------------------------------------------------------

    def test_payloads_do_not_mix(self, sender: Transport, receiver: Transport) -> None:
        tickets = {seed: sender.publish(payload(seed), nothing) for seed in range(16)}
        for seed in reversed(range(16)):
            assert same(fetched(receiver, tickets[seed], payload(seed)), payload(seed))

    def test_threads_publish_fetch_and_release_at_once(self, sender: Transport, receiver: Transport) -> None:
        barrier = threading.Barrier(4, timeout=WAIT_S)
        read = Read()

        def exchange(thread: int) -> bool:
            barrier.wait()
            right = True
            for i in range(25):
                sent = payload(1000 * thread + i)
                ticket = sender.publish(sent, read)
                right &= same(fetched(receiver, ticket, sent), sent)
                sender.release(ticket)
            return right

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(exchange, range(4), timeout=60))
        assert sender.live() == (0, 0)
        until(lambda: read.calls >= 100, "all are read")
        assert read.calls == 100

    def test_a_payload_can_be_fetched_twice(self, sender: Transport, receiver: Transport) -> None:
        sent = payload(4)
        ticket = sender.publish(sent, nothing)
        assert same(fetched(receiver, ticket, sent), sent)
        assert same(fetched(receiver, ticket, sent), sent)

    def test_fetched_memory_outlives_the_release(self, sender: Transport, receiver: Transport) -> None:
        sent = payload(5)
        ticket = sender.publish(sent, nothing)
        arrived = fetched(receiver, ticket, sent)
        sender.release(ticket)
        del ticket, sent
        for seed in range(100, 120):  # would land in memory that had been given back
            sender.release(sender.publish(payload(seed), nothing))
        assert same(arrived, payload(5))

    # -- what is live -------------------------------------------------------------------------

    def test_live_counts_what_is_not_released(self, sender: Transport) -> None:
        assert sender.live() == (0, 0)
        sizes = [sum(run.nbytes for run in payload(seed, runs=seed)) for seed in (1, 2)]
        first = sender.publish(payload(1, runs=1), nothing)
        second = sender.publish(payload(2, runs=2), nothing)
        assert sender.live() == (2, sum(sizes))
        sender.release(first)
        assert sender.live() == (1, sizes[1])
        sender.release(second)
        assert sender.live() == (0, 0)

    def test_releasing_twice_is_once(self, sender: Transport) -> None:
        kept, ticket = sender.publish(payload(6), nothing), sender.publish(payload(7), nothing)
        sender.release(ticket)
        sender.release(ticket)
        assert sender.live()[0] == 1
        sender.release(kept)

    def test_closing_releases_everything(self, sender: Transport) -> None:
        tickets = [sender.publish(payload(seed), nothing) for seed in range(3)]
        sender.close()
        assert sender.live() == (0, 0)
        for ticket in tickets:
            sender.release(ticket)  # too late, and harmless
        assert sender.live() == (0, 0)

    def test_an_empty_payload_stays_empty(self, sender: Transport, receiver: Transport) -> None:
        ticket = sender.publish([], nothing)
        receiver.fetch(ticket, [], WAIT_S)
        assert sender.live() == (1, 0)

    def test_empty_runs_stay_empty(self, sender: Transport, receiver: Transport) -> None:
        hole = np.empty(0, np.uint8)
        for sent in ([hole], [hole, *payload(8), hole, hole]):
            assert same(fetched(receiver, sender.publish(sent, nothing), sent), sent)

    # -- what cannot be fetched ---------------------------------------------------------------

    def test_a_payload_that_is_gone(self, sender: Transport, receiver: Transport) -> None:
        ticket = self.lost_ticket(sender)
        with pytest.raises(PeerLost):
            receiver.fetch(ticket, room(payload(0)), WAIT_S)

    def test_a_payload_that_does_not_come_in_time(self, receiver: Transport) -> None:
        ticket = self.late_ticket()
        with pytest.raises(TransferTimeout, match=r"0\.2"):
            receiver.fetch(ticket, room(payload(0)), 0.2)

    # -- transfers that are broken off --------------------------------------------------------

    @pytest.mark.parametrize("broken_off_by", ["release", "close"])
    def test_a_transfer_that_is_broken_off_is_whole_or_an_error(
        self, sender: Transport, receiver: Transport, broken_off_by: str
    ) -> None:
        """Fetches are under way on several threads when the sender takes the payload back."""
        sent, read = payload(20, nbytes=1 << 20), Read()
        ticket, outcomes = sender.publish(sent, read), list[str]()

        def fetch() -> None:
            for _ in range(50):
                try:
                    outcomes.append("whole" if same(fetched(receiver, ticket, sent), sent) else "damaged")
                except TransferError:
                    outcomes.append("error")
                    return

        with ThreadPoolExecutor(3) as pool:
            tasks = [pool.submit(fetch) for _ in range(3)]
            until(lambda: len(outcomes) > 3, "fetches are under way")
            sender.release(ticket) if broken_off_by == "release" else sender.close()
            for task in tasks:
                task.result(timeout=60)
        assert set(outcomes) <= {"whole", "error"}
        until(lambda: read.calls, "read")
        assert (read.calls, sender.live()) == (1, (0, 0))

    # -- damage is found by what the header promises --------------------------------------------

    @pytest.mark.parametrize("kind", ["corrupt", "truncated", "swapped"])
    def test_damage_on_the_way_is_found(self, sender: Transport, receiver: Transport, kind: Kind) -> None:
        sent, faulty = equal_runs(21), FaultyTransport(receiver)
        ticket, header = sender.publish(sent, nothing), header_of(sent)
        faulty.suffer(Fault(kind, times=1))
        arrived = fetched(faulty, ticket, sent)
        with pytest.raises(ChunkCorrupt, match="checksum of run"):
            header.verify(arrived)
        assert faulty.fired == {kind: 1}
        header.verify(fetched(faulty, ticket, sent))  # and what was published is still sound

    def test_the_payload_of_another_chunk_is_found(self, sender: Transport, receiver: Transport) -> None:
        one, other = equal_runs(22), equal_runs(23)
        sender.publish(one, nothing)
        arrived = fetched(receiver, sender.publish(other, nothing), one)
        with pytest.raises(ChunkCorrupt, match="checksum of run 0"):
            header_of(one).verify(arrived)

    def test_a_payload_of_another_chunk_in_part_is_found(
        self, sender: Transport, receiver: Transport
    ) -> None:
        """A chunk that came twice in place of two: its last run is not what the other one's is."""
        one, other = equal_runs(24), equal_runs(25)
        into = room(one)
        receiver.fetch(sender.publish(one, nothing), into, WAIT_S)
        receiver.fetch(sender.publish(other, nothing), [None, None, into[2]], WAIT_S)
        with pytest.raises(ChunkCorrupt, match="checksum of run 2"):
            header_of(one).verify(into)
