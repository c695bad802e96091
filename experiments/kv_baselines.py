"""What a handover is compared with: the ways that published experiments moved a KV cache. No checksums."""

from __future__ import annotations

import io
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kv.chunk import Run

if TYPE_CHECKING:
    from kv.bucket import S3Settings

TIMEOUT_S = 120.0
S3_CONNECTIONS, S3_RANGE_BYTES = 8, 8 << 20
_SIZE = struct.Struct("!Q")


class Plain(Protocol):
    """One way, at one end."""

    port: int

    def send(self, runs: Sequence[Run]) -> None:
        """Send runs; return when the other end has them in its cache."""

    def receive(self, runs: Sequence[Run]) -> None:
        """Fill runs with what arrives."""


class TorchSave:
    """``torch.save`` of the gathered cache, over one socket, ``torch.load`` at the other end.

    Args:
        address: of this end.
        peer: HOST:PORT of the other, empty for the one that listens.

    """

    def __init__(self, address: str, peer: str, _: Connection) -> None:
        import torch

        self._torch: Any = torch
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None
        if peer:
            host, _colon, port = peer.rpartition(":")
            self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
            self.port = 0
        else:
            self._listener = socket.create_server((address, 0))
            self._listener.settimeout(TIMEOUT_S)
            self.port = self._listener.getsockname()[1]

    def send(self, runs: Sequence[Run]) -> None:
        """See ``Plain``."""
        assert self._socket is not None
        out = io.BytesIO()
        self._torch.save(self._torch.from_numpy(np.concatenate(runs)), out)
        data = out.getbuffer()
        self._socket.sendall(_SIZE.pack(data.nbytes))
        self._socket.sendall(data)
        if self._socket.recv(1) != b"k":
            raise ConnectionError("the receiver closed the connection")

    def receive(self, runs: Sequence[Run]) -> None:
        """See ``Plain``."""
        if self._socket is None:
            assert self._listener is not None
            self._socket, _ = self._listener.accept()
            self._socket.settimeout(TIMEOUT_S)
        size = _SIZE.unpack(self._exactly(_SIZE.size))[0]
        tensor = self._torch.load(io.BytesIO(self._exactly(size)))
        _scatter(tensor.numpy(), runs)
        self._socket.sendall(b"k")

    def _exactly(self, size: int) -> bytearray:
        assert self._socket is not None
        data = bytearray(size)
        left = memoryview(data)
        while left:
            if not (read := self._socket.recv_into(left)):
                raise ConnectionError("the sender closed the connection")
            left = left[read:]
        return data


class RayWhole:
    """``ray.put`` of the gathered cache, ``ray.get`` at the other end: two drivers of one Ray cluster."""

    port = 0

    def __init__(self, address: str, peer: str, connection: Connection) -> None:
        import ray

        self._ray, self._connection = ray, connection

    def send(self, runs: Sequence[Run]) -> None:
        """See ``Plain``."""
        held = self._ray.put(np.concatenate(runs))
        self._connection.send_bytes(dumps([held]))
        if not self._connection.poll(TIMEOUT_S):
            raise TimeoutError(f"the receiver did not get the object in {TIMEOUT_S:g} s")
        self._connection.recv_bytes()

    def receive(self, runs: Sequence[Run]) -> None:
        """See ``Plain``."""
        if not self._connection.poll(TIMEOUT_S):
            raise TimeoutError(f"the sender did not put its object in {TIMEOUT_S:g} s")
        held = pickle.loads(self._connection.recv_bytes())
        _scatter(self._ray.get(held[0], timeout=TIMEOUT_S), runs)
        self._connection.send_bytes(b"k")


class S3Plain:
    """The gathered cache as one object of a bucket, and ranged reads of it: pyarrow, and nothing of ours."""

    port = 0

    def __init__(self, settings: S3Settings | None, peer: str, connection: Connection) -> None:
        from pyarrow import fs

        assert settings is not None
        self._fs = fs.S3FileSystem(
            region=settings.region, endpoint_override=settings.endpoint, scheme=settings.scheme
        )
        self._path, self._connection = f"{settings.bucket}/plain", connection
        self._pool = ThreadPoolExecutor(S3_CONNECTIONS)

    def send(self, runs: Sequence[Run]) -> None:
        """See ``Plain``."""
        with self._fs.open_output_stream(self._path, compression=None) as stream:
            stream.write(np.concatenate(runs))
        self._connection.send_bytes(b"k")
        if not self._connection.poll(TIMEOUT_S):
            raise TimeoutError(f"the receiver did not get the object in {TIMEOUT_S:g} s")
        self._connection.recv_bytes()

    def receive(self, runs: Sequence[Run]) -> None:
        """See ``Plain``."""
        if not self._connection.poll(TIMEOUT_S):
            raise TimeoutError(f"the sender did not store its object in {TIMEOUT_S:g} s")
        self._connection.recv_bytes()
        data = np.empty(sum(run.nbytes for run in runs), np.uint8)
        starts = range(0, data.nbytes, S3_RANGE_BYTES)
        list(self._pool.map(lambda i: self._read(data, starts[i::S3_CONNECTIONS]), range(S3_CONNECTIONS)))
        _scatter(data, runs)
        self._connection.send_bytes(b"k")

    def _read(self, data: Run, starts: range) -> None:
        if not starts:
            return
        file = self._fs.open_input_file(self._path)
        for start in starts:
            piece = data[start : start + S3_RANGE_BYTES]
            file.seek(start)
            if file.readinto(piece) != piece.nbytes:
                raise ConnectionError("the object ended early")


def _scatter(data: Run, runs: Sequence[Run]) -> None:
    start = 0
    for run in runs:
        run[:] = data[start : start + run.nbytes]
        start += run.nbytes


def dumps(message: object) -> bytes:
    """Pickle a message as Ray does for an actor call, object references included.

    Pickled outside of Ray's own context, a reference would keep its object for good.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    context = ray._private.worker.global_worker.get_serialization_context()
    context.set_in_band_serialization()
    try:
        pickled: bytes = ray.cloudpickle.dumps(message)
        return pickled
    finally:
        context.get_and_clear_contained_object_refs()
        context.set_out_of_band_serialization()
