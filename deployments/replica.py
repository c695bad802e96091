"""What Ray Serve starts, watches and replaces: a gateway, which imports vLLM only there.

vLLM's import takes some ten seconds of a core and a gigabyte: not in the processes that bring a cluster up.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.file import ClusterFile
from deployments.errors import StartError

DRAIN_S = 600
"""How long a replica that is being replaced goes on answering what it has taken."""


class Replica:
    """A Serve deployment; ``deployments/app.py`` wraps it. For its arguments see ``gateway.Gateway``."""

    def __init__(self, file: ClusterFile, workers: Sequence[str]) -> None:
        from deployments.gateway import Gateway

        self._gateway = Gateway(file, workers)

    async def reconfigure(self, _: Mapping[str, Any]) -> None:
        """Begin to serve. Called by Serve once the replica is made, and when its configuration changes."""
        await self._gateway.serve()

    async def check_health(self) -> None:
        """Serve's health check; raises RuntimeError."""
        self._gateway.check()

    async def __del__(self) -> None:
        """Called by Serve before it ends the replica."""
        await self._gateway.end()


def listen(host: str, port: int, shared: bool = True) -> socket.socket:
    """Return a socket that listens there.

    Args:
        host: address.
        port: port.
        shared: together with other replicas on the same node. Otherwise a gateway that is there is noticed.

    Raises:
        StartError: another program has the port.

    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048, reuse_port=shared)
    except OSError as error:
        raise StartError(
            f"the gateway cannot listen on {host}:{port}: {error.strerror}; set gateway.port to a free one"
        ) from error
