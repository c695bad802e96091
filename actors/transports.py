"""Which transports a worker has, by its part of the cluster file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from actors.errors import WorkerError
from actors.messages import WorkerSpec
from actors.secret import data_plane_key
from kv.nixl import NixlTransport
from kv.plasma import PlasmaTransport
from kv.tcp import TcpTransport
from kv.tls import TlsFiles
from kv.transport import Transport

if TYPE_CHECKING:
    from kv.bucket import Bucket

AUTO = ("tcp", "plasma")
"""The transports of a worker whose cluster file says ``auto``; and ``s3``, where it has a bucket."""


def open_bucket(spec: WorkerSpec) -> Bucket | None:
    """Return the bucket that a worker uses, as a transport, as a tier or as both; None if it uses none.

    Raises ``kv.errors.TransferError`` if its credentials cannot be had.
    """
    if spec.s3 is None or not (spec.transport == "auto" or spec.tier):
        return None
    from kv.bucket import Bucket  # pyarrow takes its time

    return Bucket(spec.s3)


def make_transports(spec: WorkerSpec, bucket: Bucket | None = None) -> dict[str, Transport]:
    """Return a worker's transports by name; the bucket, which stays the caller's, among them where it may be.

    Raises:
        WorkerError: one cannot be had on this node.
        kv.tls.TlsError: a certificate cannot be used; names the file.

    """
    names = AUTO if spec.transport == "auto" else (spec.transport,)
    if spec.tls is not None:
        names = ("tcp",)
    made = {name: make_transport(name, spec.tls) for name in names}
    if bucket is not None and spec.transport == "auto":
        from kv.s3 import S3Transport

        made["s3"] = S3Transport(bucket)
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
