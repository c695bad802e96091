"""Which transports a worker has, by its part of the cluster file."""

from __future__ import annotations

import ray

from actors.errors import WorkerError
from actors.messages import WorkerSpec
from actors.secret import data_plane_key
from kv.nixl import NixlTransport
from kv.plasma import PlasmaTransport
from kv.tcp import TcpTransport
from kv.tls import TlsFiles
from kv.transport import Transport

AUTO = ("tcp", "plasma")
"""The transports of a worker whose cluster file says ``auto``; and ``s3``, where it has a bucket."""


def make_transports(spec: WorkerSpec) -> dict[str, Transport]:
    """Return a worker's transports by name.

    Raises:
        WorkerError: one cannot be had on this node.
        kv.errors.TransferError: the bucket's credentials cannot be had.
        kv.tls.TlsError: a certificate cannot be used; names the file.

    """
    names = AUTO if spec.transport == "auto" else (spec.transport,)
    if spec.tls is not None:
        names = ("tcp",)
    made = {name: make_transport(name, spec.tls) for name in names}
    if spec.s3 is not None and spec.transport == "auto":
        from kv.bucket import Bucket  # pyarrow takes its time
        from kv.s3 import SweptS3Transport

        made["s3"] = SweptS3Transport(Bucket(spec.s3))
    return made


def make_transport(name: str, tls: TlsFiles | None = None) -> Transport:
    """Return the transport of that name."""
    if name == "plasma":
        return PlasmaTransport()
    if name == "tcp":
        return TcpTransport(ray.util.get_node_ip_address(), data_plane_key(), tls)
    if name == "nixl":
        try:
            return NixlTransport(ray.util.get_node_ip_address())
        except ImportError as error:
            raise WorkerError(
                f"transport: nixl needs NIXL on every node, and it cannot be imported ({error}): "
                f"pip install 'handoff[nixl]', or choose transport: tcp"
            ) from error
    raise WorkerError(f"unknown transport {name!r}; there are: nixl, plasma, tcp")
