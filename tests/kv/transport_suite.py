"""What every transport must do. A transport's test module subclasses `TransportSuite`.

`sender` publishes and releases, `receiver` fetches; a transport within one process may give one for both.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kv.chunk import Run
from kv.errors import PeerLost, TransferTimeout
from kv.transport import Ticket, Transport

WAIT_S = 10.0


def payload(seed: int, runs: int = 3, nbytes: int = 4096) -> list[Run]:
    """Runs of different lengths; no two seeds give the same bytes."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, nbytes + 7 * i, dtype=np.uint8) for i in range(runs)]


def same(left: list[Run], right: list[Run]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(one, other) for one, other in zip(left, right, strict=True)
    )


class TransportSuite:
    """Subclasses provide the fixtures `sender` and `receiver`, and the tickets that cannot be served."""

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
        assert same(receiver.fetch(sender.publish(sent), WAIT_S), sent)

    def test_views_of_larger_memory_can_be_published(self, sender: Transport, receiver: Transport) -> None:
        memory = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
        fetched = receiver.fetch(sender.publish([memory[2], memory[0]]), WAIT_S)
        assert same(fetched, [memory[2], memory[0]])

    def test_what_was_published_may_be_overwritten(self, sender: Transport, receiver: Transport) -> None:
        sent = payload(2)
        promised = [run.copy() for run in sent]
        ticket = sender.publish(sent)
        for run in sent:
            run[:] = 0
        assert same(receiver.fetch(ticket, WAIT_S), promised)

    def test_what_was_fetched_cannot_be_written(self, sender: Transport, receiver: Transport) -> None:
        for run in receiver.fetch(sender.publish(payload(3)), WAIT_S):
            with pytest.raises(ValueError, match="read-only"):
                run[0] = 1

    def test_payloads_do_not_mix(self, sender: Transport, receiver: Transport) -> None:
        tickets = {seed: sender.publish(payload(seed)) for seed in range(16)}
        for seed in reversed(range(16)):
            assert same(receiver.fetch(tickets[seed], WAIT_S), payload(seed))

    def test_threads_publish_fetch_and_release_at_once(self, sender: Transport, receiver: Transport) -> None:
        barrier = threading.Barrier(4, timeout=WAIT_S)

        def exchange(thread: int) -> bool:
            barrier.wait()
            right = True
            for i in range(25):
                sent = payload(1000 * thread + i)
                ticket = sender.publish(sent)
                right &= same(receiver.fetch(ticket, WAIT_S), sent)
                sender.release(ticket)
            return right

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(exchange, range(4), timeout=60))
        assert sender.live() == (0, 0)

    def test_a_payload_can_be_fetched_twice(self, sender: Transport, receiver: Transport) -> None:
        ticket = sender.publish(payload(4))
        assert same(receiver.fetch(ticket, WAIT_S), receiver.fetch(ticket, WAIT_S))

    def test_fetched_memory_outlives_the_release(self, sender: Transport, receiver: Transport) -> None:
        ticket = sender.publish(payload(5))
        fetched = receiver.fetch(ticket, WAIT_S)
        sender.release(ticket)
        del ticket
        for seed in range(100, 120):  # would land in memory that had been given back
            sender.release(sender.publish(payload(seed)))
        assert same(fetched, payload(5))

    def test_live_counts_what_is_not_released(self, sender: Transport) -> None:
        assert sender.live() == (0, 0)
        sizes = [sum(run.nbytes for run in payload(seed, runs=seed)) for seed in (1, 2)]
        first, second = sender.publish(payload(1, runs=1)), sender.publish(payload(2, runs=2))
        assert sender.live() == (2, sum(sizes))
        sender.release(first)
        assert sender.live() == (1, sizes[1])
        sender.release(second)
        assert sender.live() == (0, 0)

    def test_releasing_twice_is_once(self, sender: Transport) -> None:
        kept, ticket = sender.publish(payload(6)), sender.publish(payload(7))
        sender.release(ticket)
        sender.release(ticket)
        assert sender.live()[0] == 1
        sender.release(kept)

    def test_closing_releases_everything(self, sender: Transport) -> None:
        tickets = [sender.publish(payload(seed)) for seed in range(3)]
        sender.close()
        assert sender.live() == (0, 0)
        for ticket in tickets:
            sender.release(ticket)  # too late, and harmless
        assert sender.live() == (0, 0)

    def test_an_empty_payload_stays_empty(self, sender: Transport, receiver: Transport) -> None:
        ticket = sender.publish([])
        assert receiver.fetch(ticket, WAIT_S) == []
        assert sender.live() == (1, 0)

    def test_a_payload_that_is_gone(self, sender: Transport, receiver: Transport) -> None:
        ticket = self.lost_ticket(sender)
        with pytest.raises(PeerLost):
            receiver.fetch(ticket, WAIT_S)

    def test_a_payload_that_does_not_come_in_time(self, receiver: Transport) -> None:
        ticket = self.late_ticket()
        with pytest.raises(TransferTimeout, match=r"0\.2"):
            receiver.fetch(ticket, 0.2)
