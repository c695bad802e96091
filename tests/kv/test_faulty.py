"""The transport that misbehaves on request: sound while nothing is asked of it, and what it does if it is."""

import threading
import time

import pytest
from transport_suite import WAIT_S, TransportSuite, fetched, nothing, payload, room, same

from kv.errors import PeerLost, StoreFull, TransferTimeout
from kv.faulty import DAMAGES, Damage, Fault, FaultyTransport
from kv.memory import MemoryTransport
from kv.transport import Ticket, Transport


class TestFaulty(TransportSuite):
    @pytest.fixture
    def sender(self) -> Transport:
        return FaultyTransport(MemoryTransport())

    def lost_ticket(self, sender: Transport) -> Ticket:
        ticket = sender.publish(payload(0), nothing)
        sender.release(ticket)
        return ticket

    def late_ticket(self) -> Ticket:
        pytest.skip("see test_a_stalled_fetch_keeps_its_deadline")


@pytest.fixture
def faulty() -> FaultyTransport:
    return FaultyTransport(MemoryTransport())


def test_a_fault_happens_as_often_as_it_was_asked_for(faulty: FaultyTransport) -> None:
    sent = payload(1)
    ticket = faulty.publish(sent, nothing)
    faulty.suffer(Fault("lost", times=2))
    for _ in range(2):
        with pytest.raises(PeerLost):
            fetched(faulty, ticket, sent)
    assert same(fetched(faulty, ticket, sent), sent)
    assert faulty.fired == {"lost": 2}


def test_a_share_of_the_fetches_is_lost(faulty: FaultyTransport) -> None:
    sent = payload(1)
    ticket = faulty.publish(sent, nothing)
    faulty.suffer(Fault("lost", share=0.25))
    lost = 0
    for _ in range(40):
        try:
            fetched(faulty, ticket, sent)
        except PeerLost:
            lost += 1
    assert lost == 10


def test_a_stalled_fetch_keeps_its_deadline(faulty: FaultyTransport) -> None:
    ticket = faulty.publish(payload(1), nothing)
    faulty.suffer(Fault("stalled"))
    began = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"0\.2"):
        faulty.fetch(ticket, room(payload(1)), 0.2)
    assert time.monotonic() - began >= 0.2


def test_a_full_store_is_full_for_publishing_only(faulty: FaultyTransport) -> None:
    sent = payload(1)
    ticket = faulty.publish(sent, nothing)
    faulty.suffer(Fault("full", times=1))
    with pytest.raises(StoreFull):
        faulty.publish(sent, nothing)
    assert same(fetched(faulty, ticket, sent), sent)
    faulty.release(faulty.publish(sent, nothing))


def test_latency_and_rate_take_their_time(faulty: FaultyTransport) -> None:
    sent = payload(1, runs=1, nbytes=10_000)
    ticket = faulty.publish(sent, nothing)
    faulty.latency_s, faulty.s_per_byte = 0.05, 1e-5
    began = time.monotonic()
    assert same(fetched(faulty, ticket, sent), sent)
    assert time.monotonic() - began >= 0.15
    with pytest.raises(TransferTimeout):
        faulty.fetch(ticket, room(sent), 0.1)
    faulty.latency_s = faulty.s_per_byte = 0.0
    faulty.fetch(ticket, room(sent), WAIT_S)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_counted_only_where_it_changes_something(faulty: FaultyTransport, kind: Damage) -> None:
    alike, unlike = payload(2, runs=1), payload(3, runs=1) + payload(4, runs=1)
    tickets = faulty.publish(alike, nothing), faulty.publish(unlike, nothing)
    faulty.suffer(Fault(kind, times=1))
    rounds = [not same(fetched(faulty, tickets[0], alike), alike) for _ in range(2)]
    rounds += [not same(fetched(faulty, tickets[1], unlike), unlike) for _ in range(2)]
    assert sum(rounds) == faulty.fired[kind] == 1
    assert rounds[0] == (kind in ("corrupt", "truncated"))


def test_a_held_fetch_goes_on_when_it_is_let(faulty: FaultyTransport) -> None:
    sent = payload(1)
    ticket, into = faulty.publish(sent, nothing), room(sent)
    faulty.suffer(Fault("held"))
    thread = threading.Thread(target=faulty.fetch, args=(ticket, into, WAIT_S))
    thread.start()
    while not faulty.fired["held"]:
        time.sleep(0.01)
    assert thread.is_alive()
    assert not same(into, sent)
    faulty.suffer()
    thread.join(WAIT_S)
    assert same(into, sent)
    faulty.suffer(Fault("held"))
    with pytest.raises(TransferTimeout):
        faulty.fetch(ticket, into, 0.1)
