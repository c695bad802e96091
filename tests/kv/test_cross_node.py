"""Transports between two processes in two network namespaces, also with the link limited.

Sender and receiver are the product's own, over paged caches; see ``experiments/kv_station.py``.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from cluster import netns
from cluster.netns import Network
from experiments.kv_bench import Case, Ends, Found, Parameters, ends_at, transfer

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing())),
]

TRANSPORTS = ("tcp", "plasma", "nixl")


@dataclass
class TwoNodes:
    network: Network
    ends: Ends


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    parameters = Parameters(
        mbytes=(32,), concurrency=(1, 3), transports=TRANSPORTS, baselines=(), pieces=False
    )
    found = Found()
    with ExitStack() as stack:
        network = stack.enter_context(netns.network(2))
        places = [(node.address, node.prefix) for node in network.nodes]
        ends = stack.enter_context(ends_at(places, "cross-node", parameters, found, print))
        assert not found.missing
        yield TwoNodes(network, ends)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kv_arrives_as_it_was_sent(two_nodes: TwoNodes, transport: str, concurrency: int) -> None:
    ends = two_nodes.ends
    for mbytes in (1, 32):
        transfer(ends, Case(transport, "cross-node", mbytes, concurrency))
        sent, received = ends.sender("digests"), ends.receiver("digests")
        assert len(sent) == concurrency
        assert sent == received
        assert len({tuple(digests) for digests in sent.values()}) == concurrency


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_on_a_limited_link_kv_takes_as_long_as_it_must(two_nodes: TwoNodes, transport: str) -> None:
    """It crosses the link, and not by some other way; Ray's own traffic may be on it too."""
    two_nodes.network.limit(1.0)
    try:
        sample = transfer(two_nodes.ends, Case(transport, "cross-node-1g", 32, 1))
    finally:
        two_nodes.network.limit(None)
    assert sample.gbit_s < 1.05
    assert two_nodes.ends.sender("digests") == two_nodes.ends.receiver("digests")
