"""Where the gateway listens, without a cluster: who may share its port."""

import socket

import pytest

from deployments.errors import StartError
from deployments.gateway import listen

HOST = "127.0.0.1"


def test_replicas_of_one_node_share_the_port() -> None:
    with listen(HOST, 0) as first, listen(HOST, first.getsockname()[1]) as second:
        assert first.getsockname() == second.getsockname()


@pytest.mark.parametrize("shared", [True, False])
def test_a_port_that_another_program_has(shared: bool) -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on {HOST}:{port}.*set gateway.port"):
            listen(HOST, port, shared)


def test_another_gateway_on_the_port_is_noticed_before_it_is_shared() -> None:
    """Two clusters on one port would each get half of the requests."""
    with listen(HOST, 0) as other, pytest.raises(StartError, match="in use"):
        listen(HOST, other.getsockname()[1], shared=False)
