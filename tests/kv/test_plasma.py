"""Ray's object store as a transport, on real Ray nodes: within a process, and from one node to another."""

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transport_suite import WAIT_S, TransportSuite, fetched, nothing, payload, room, same, until

from cluster.connect import connect
from cluster.file import ClusterFile
from cluster.local import held
from kv import plasma
from kv.chunk import Run, checksum
from kv.errors import PeerLost
from kv.plasma import PlasmaTransport, SegmentTicket
from kv.transport import Ticket, Transport, needs_ray

pytestmark = pytest.mark.cluster


class Near(PlasmaTransport):
    """All its receivers are on this node."""

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = True) -> Ticket:
        return super().publish(runs, read, True)


class Holder:
    """An actor that publishes; it dies with what it owns."""

    def __init__(self, near: bool = False) -> None:
        self.transport = Near() if near else PlasmaTransport()

    def publish(self, seed: int, nbytes: int = 4096) -> Ticket:
        return self.transport.publish(payload(seed, nbytes=nbytes), nothing)

    def release(self, ticket: Ticket) -> tuple[int, int]:
        self.transport.release(ticket)
        return self.transport.live()

    def fetch(self, ticket: Ticket, nbytes: int) -> list[int]:
        arrived = fetched(self.transport, ticket, payload(0, nbytes=nbytes))
        return [checksum(run) for run in arrived]

    def stall(self) -> None:
        time.sleep(600)

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two Ray nodes, a-0 and b-0, and a head to which this process is attached."""
    node = {"role": "both", "cpus": 1, "object_store": "80MiB", "memory": "500MB"}
    file = ClusterFile.model_validate(
        {
            "name": f"k{secrets.token_hex(4)}",
            "model": "none",
            "nodes": {"a": node, "b": node},
            "workers": {"prefill": {"count": 0}, "decode": {"count": 0}},
        }
    )
    home: Path = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home))
        with held(file) as cluster:
            connect(cluster)
            for module in (sys.modules[__name__], sys.modules["transport_suite"]):
                ray.cloudpickle.register_pickle_by_value(module)  # workers cannot import these files
            yield
            ray.shutdown()


def holder(node: str) -> Any:
    return ray.remote(Holder).options(num_cpus=0.1, resources={f"at:{node}": 0.001}).remote()


def neighbour() -> Any:
    """A process on this node, which publishes for its neighbours."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Holder).options(num_cpus=0, scheduling_strategy=here).remote(near=True)


def killed(owner: Any) -> None:
    pid = ray.get(owner.pid.remote(), timeout=60)
    ray.kill(owner)  # returns before the process has ended, and until then it serves
    until(lambda: not Path(f"/proc/{pid}").exists(), "the owner ends")


@pytest.mark.usefixtures("nodes")
class TestPlasma(TransportSuite):
    @pytest.fixture
    def sender(self) -> Iterator[Transport]:
        transport = PlasmaTransport()
        yield transport
        transport.close()

    def lost_ticket(self, sender: Transport) -> Ticket:
        owner = holder("a-0")
        ticket = ray.get(owner.publish.remote(0), timeout=60)
        killed(owner)
        return ticket

    def late_ticket(self) -> Ticket:
        self.stalled = holder("a-0")
        return [self.stalled.stall.remote()]

    def test_a_payload_crosses_nodes(self, sender: Transport) -> None:
        there = holder("b-0")
        sent = payload(11, nbytes=3 << 20)
        arrived = ray.get(there.fetch.remote(sender.publish(sent, nothing), 3 << 20), timeout=60)
        assert arrived == [checksum(run) for run in sent]
        back = ray.get(there.publish.remote(12, 3 << 20), timeout=60)
        assert same(fetched(sender, back, sent), payload(12, nbytes=3 << 20))

    def test_a_ticket_in_hand_outlives_the_release(self, sender: Transport) -> None:
        """What has been released can still be fetched by whoever holds the ticket: never half of it."""
        owner = holder("a-0")
        ticket = ray.get(owner.publish.remote(13), timeout=60)
        assert ray.get(owner.release.remote(ticket), timeout=60) == (0, 0)
        assert same(fetched(sender, ticket, payload(13)), payload(13))

    def test_a_lost_payload_is_named(self, sender: Transport) -> None:
        ticket = self.lost_ticket(sender)
        with pytest.raises(PeerLost, match=ticket[0].hex()):
            sender.fetch(ticket, room(payload(0)), WAIT_S)


@pytest.mark.usefixtures("nodes")
class TestSegments(TransportSuite):
    """Payloads for receivers on the same node."""

    @pytest.fixture
    def sender(self) -> Iterator[Transport]:
        transport = Near()
        yield transport
        transport.close()

    @pytest.fixture
    def receiver(self) -> Iterator[Transport]:
        transport = PlasmaTransport()
        yield transport
        transport.close()

    def lost_ticket(self, sender: Transport) -> Ticket:
        owner = neighbour()
        ticket = ray.get(owner.publish.remote(0), timeout=60)
        assert isinstance(ticket, SegmentTicket)
        ray.get(owner.release.remote(ticket), timeout=60)  # its owner's death may show later
        return ticket

    def test_a_payload_goes_from_process_to_process(self, receiver: Transport) -> None:
        owner = neighbour()
        for seed in range(3):
            ticket = ray.get(owner.publish.remote(seed, 1 << 20), timeout=60)
            assert isinstance(ticket, SegmentTicket)
            assert not needs_ray(ticket)
            like = payload(seed, nbytes=1 << 20)
            assert same(fetched(receiver, ticket, like), like)
            assert ray.get(owner.release.remote(ticket), timeout=60) == (0, 0)
            with pytest.raises(PeerLost, match="has been released"):
                receiver.fetch(ticket, room(like), WAIT_S)
        ray.kill(owner)

    def test_what_was_opened_outlives_its_owner(self, receiver: Transport) -> None:
        owner = neighbour()
        ticket = ray.get(owner.publish.remote(1), timeout=60)
        assert same(fetched(receiver, ticket, payload(1)), payload(1))
        killed(owner)
        assert same(fetched(receiver, ticket, payload(1)), payload(1))

    def test_a_segment_of_another_node_is_refused(self, sender: Transport) -> None:
        ticket, there = sender.publish(payload(2), nothing), holder("b-0")
        with pytest.raises(PeerLost, match="this is node"):
            ray.get(there.fetch.remote(ticket, 4096), timeout=60)

    def test_a_segment_that_is_full_gives_way_to_objects(
        self, sender: Transport, receiver: Transport
    ) -> None:
        sent = payload(7, nbytes=1 << 20)
        tickets = [sender.publish(sent, nothing) for _ in range(6)]  # of a segment of 10 MiB
        assert {needs_ray(ticket) for ticket in tickets} == {False, True}
        for ticket in tickets:
            assert same(fetched(receiver, ticket, sent), sent)
            sender.release(ticket)
        assert sender.live() == (0, 0)
        assert not needs_ray(sender.publish(sent, nothing))

    def test_a_payload_that_is_withdrawn_while_it_is_read_is_not_taken(
        self, sender: Transport, receiver: Transport
    ) -> None:
        sent, other = payload(8), payload(9)
        ticket = sender.publish(sent, nothing)

        class Withdrawing(np.ndarray[Any, np.dtype[np.uint8]]):
            """Memory in which the first write finds the payload replaced."""

            def __setitem__(self, key: Any, value: Any) -> None:
                sender.release(ticket)
                assert sender.publish(other, nothing).offset == ticket.offset
                super().__setitem__(key, value)

        into = room(sent)
        into[0] = into[0].view(Withdrawing)
        with pytest.raises(PeerLost, match="has been released"):
            receiver.fetch(ticket, into, WAIT_S)

    def test_a_segment_that_is_not_in_use_is_let_go(
        self, sender: Transport, receiver: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent = payload(10)
        ticket = sender.publish(sent, nothing)
        assert same(fetched(receiver, ticket, sent), sent)
        assert isinstance(receiver, PlasmaTransport)
        assert len(receiver._theirs) == 1
        assert receiver.live() == (0, 0)
        assert len(receiver._theirs) == 1
        monkeypatch.setattr(plasma, "FORGET_S", 0.0)
        receiver.live()
        assert not receiver._theirs
        assert same(fetched(receiver, ticket, sent), sent)  # and is opened again
