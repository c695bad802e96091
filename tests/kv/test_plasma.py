"""Ray's object store as a transport, on real Ray nodes: within a process, and from one node to another."""

import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from transport_suite import WAIT_S, TransportSuite, fetched, nothing, payload, room, same, until

from cluster.connect import connect
from cluster.file import ClusterFile
from cluster.local import held
from kv.chunk import checksum
from kv.errors import PeerLost
from kv.plasma import PlasmaTransport
from kv.transport import Ticket, Transport

pytestmark = pytest.mark.cluster


class Holder:
    """An actor that publishes; it dies with what it owns."""

    def __init__(self) -> None:
        self.transport = PlasmaTransport()

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
        pid = ray.get(owner.pid.remote(), timeout=60)
        ray.kill(owner)  # returns before the process has ended, and until then it serves
        until(lambda: not Path(f"/proc/{pid}").exists(), "the owner ends")
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
