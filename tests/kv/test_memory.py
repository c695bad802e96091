"""The reference transport."""

import pytest
from transport_suite import Read, TransportSuite, fetched, nothing, payload, room, same

from kv.errors import PeerLost, StoreFull
from kv.memory import MemoryTransport
from kv.transport import Ticket, Transport


class TestMemory(TransportSuite):
    @pytest.fixture
    def sender(self) -> Transport:
        return MemoryTransport()

    def lost_ticket(self, sender: Transport) -> Ticket:
        ticket = sender.publish(payload(0), nothing)
        sender.release(ticket)
        return ticket


def test_a_full_store_says_how_full_and_takes_more_after_a_release() -> None:
    transport, refused = MemoryTransport(capacity=10_000), Read()
    first = transport.publish(payload(1, runs=1, nbytes=8_000), nothing)
    with pytest.raises(StoreFull, match="3000 bytes does not fit: 8000 of 10000 in use"):
        transport.publish(payload(2, runs=1, nbytes=3_000), refused)
    assert transport.live() == (1, 8_000)
    transport.release(first)
    sent = payload(2, runs=1, nbytes=3_000)
    assert same(fetched(transport, transport.publish(sent, nothing), sent), sent)
    transport.close()
    assert refused.calls == 0  # what was not taken is never read


def test_nothing_can_be_fetched_after_close() -> None:
    transport = MemoryTransport()
    ticket = transport.publish(payload(1), nothing)
    transport.close()
    with pytest.raises(PeerLost, match=ticket):
        transport.fetch(ticket, room(payload(1)), 1)
