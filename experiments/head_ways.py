"""Ways to bring the tensors of a KV cache from one node to another, each with its phases timed.

A clock reading (``at``) is ``time.monotonic`` of one machine: both ends must be on it, in namespaces or not.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import numpy as np

from actors.decode import FETCH_THREADS
from actors.prefill import MAX_CHUNK_BYTES
from experiments.head import OURS, PICKLE, STORE
from experiments.kv_baselines import dumps
from kv.chunk import Run, checksum
from kv.errors import TransferError
from kv.transport import Transport

WAIT_S: Final = 120.0
_SIZE = struct.Struct("!Q")
Tensors = list[Any]


@dataclass(frozen=True, slots=True)
class Sent:
    """What the sender says: seconds, and when the network's part began."""

    to_host_s: float
    encode_s: float
    at: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Got:
    """What the receiver says: when everything was here, and seconds from then on."""

    tensors: Tensors
    at: float
    decode_s: float
    to_device_s: float


class Way(Protocol):
    """One way, at one end."""

    port: int

    def send(self, tensors: Tensors) -> Sent:
        """Send; return when the other end has them."""

    def receive(self, device: str) -> Got:
        """Take what is sent, onto a device."""

    def close(self) -> None:
        """End threads and sockets."""


def to_host(tensors: Tensors) -> tuple[Tensors, float]:
    """Return tensors in host memory, and the seconds it took: 0 where they are there already."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tensors, 0.0
    began = time.monotonic()
    return [tensor.to("cpu") for tensor in tensors], time.monotonic() - began


def to_device(tensors: Tensors, device: str) -> tuple[Tensors, float]:
    """Return tensors on a device, and the seconds it took: 0 for the host."""
    if device == "cpu":
        return tensors, 0.0
    import torch

    began = time.monotonic()
    moved = [tensor.to(device) for tensor in tensors]
    getattr(torch, device).synchronize()
    return moved, time.monotonic() - began


def arrays(tensors: Tensors) -> list[Run]:
    """Return the memory of tensors, as bytes; nothing is copied where they are contiguous."""
    import torch

    return [tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in tensors]


def tensors_of(runs: Sequence[Run], shapes: Sequence[tuple[int, ...]], dtype: Any) -> Tensors:
    """Return tensors in the memory of runs."""
    import torch

    with warnings.catch_warnings():  # the object store's memory is read-only, and is only read
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return [
            torch.from_numpy(run).view(dtype).reshape(shape) for run, shape in zip(runs, shapes, strict=True)
        ]


def described(tensors: Tensors) -> tuple[list[tuple[int, ...]], Any]:
    """Return shapes and element type."""
    return [tuple(tensor.shape) for tensor in tensors], tensors[0].dtype


class Pickled:
    """Pickled tensors over one socket, as published."""

    def __init__(self, address: str, peer: str) -> None:
        self._socket: socket.socket | None = None
        self._listener: socket.socket | None = None
        self.port = 0
        if peer:
            host, _colon, port = peer.rpartition(":")
            self._socket = socket.create_connection((host, int(port)), WAIT_S)
        else:
            self._listener = socket.create_server((address, 0))
            self._listener.settimeout(WAIT_S)
            self.port = self._listener.getsockname()[1]

    def send(self, tensors: Tensors) -> Sent:
        """See ``Way``."""
        assert self._socket is not None
        held, copied = to_host(tensors)
        began = time.monotonic()
        data = pickle.dumps(held)
        at = time.monotonic()
        send_framed(self._socket, data)
        receive_exactly(self._socket, 1)
        return Sent(copied, at - began, at, len(data))

    def receive(self, device: str) -> Got:
        """See ``Way``."""
        if self._socket is None:
            assert self._listener is not None
            self._socket, _ = self._listener.accept()
            self._socket.settimeout(WAIT_S)
        data = receive_framed(self._socket)
        at = time.monotonic()
        tensors = pickle.loads(data)
        decoded = time.monotonic() - at
        tensors, copied = to_device(tensors, device)
        self._socket.sendall(b"k")
        return Got(tensors, at, decoded, copied)

    def close(self) -> None:
        """See ``Way``."""
        for one in (self._socket, self._listener):
            if one is not None:
                one.close()


class Store:
    """``ray.put`` of the tensors' memory, ``ray.get`` at the other end; the reference by a side channel."""

    port = 0

    def __init__(self, side: Connection) -> None:
        import ray

        self._ray, self._side = ray, side

    def send(self, tensors: Tensors) -> Sent:
        """See ``Way``."""
        held, copied = to_host(tensors)
        began = time.monotonic()
        runs = arrays(held)
        reference = self._ray.put(runs)
        at = time.monotonic()
        self._side.send_bytes(dumps(([reference], described(held))))
        _answered(self._side, "the receiver got no object")
        return Sent(copied, at - began, at, sum(run.nbytes for run in runs))

    def receive(self, device: str) -> Got:
        """See ``Way``."""
        (reference,), (shapes, dtype) = pickle.loads(_taken(self._side, "no reference came"))
        ready, _ = self._ray.wait([reference], timeout=WAIT_S, fetch_local=True)
        if not ready:
            raise TimeoutError(f"the object did not arrive in {WAIT_S:g} s")
        at = time.monotonic()
        tensors = tensors_of(self._ray.get(reference, timeout=WAIT_S), shapes, dtype)
        decoded = time.monotonic() - at
        tensors, copied = to_device(tensors, device)
        self._side.send_bytes(b"k")
        return Got(tensors, at, decoded, copied)

    def close(self) -> None:
        """See ``Way``: the store is Ray's."""


class Ours:
    """A transport of Handoff: chunks, checksums on both sides, threads as the product has them.

    Chunks are announced one by one, so what the sender does for the second overlaps with the first one's way:
    all but the first checksum is within the network's part, and so is what the receiver verifies.
    """

    port = 0

    def __init__(self, transport: Transport, side: Connection, near: bool) -> None:
        self._transport, self._side, self._near = transport, side, near
        self._pool = ThreadPoolExecutor(FETCH_THREADS)
        self._memory: Run = np.zeros(0, np.uint8)

    def send(self, tensors: Tensors) -> Sent:
        """See ``Way``."""
        held, copied = to_host(tensors)
        began = time.monotonic()
        runs, at, tickets = arrays(held), 0.0, []
        parts = chunks(runs)
        for index, part in enumerate(parts):
            sums = [checksum(run) for run in part]
            ticket = self._transport.publish(part, _nothing, self._near)
            tickets.append(ticket)
            at = at or time.monotonic()
            head = (*described(held), len(parts)) if index == 0 else None
            self._side.send_bytes(dumps((head, ticket, sums)))
        _answered(self._side, "the receiver did not fetch")
        for ticket in tickets:
            self._transport.release(ticket)
        return Sent(copied, at - began, at, sum(run.nbytes for run in runs))

    def receive(self, device: str) -> Got:
        """See ``Way``."""
        head, ticket, sums = pickle.loads(_taken(self._side, "no chunk came"))
        shapes, dtype, count = head
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape in shapes]
        if sum(sizes) > self._memory.nbytes:
            self._memory = np.zeros(sum(sizes), np.uint8)
            self._memory.fill(1)  # an engine's cache has its pages
        ends = np.cumsum(sizes)
        runs = [self._memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        waiting = []
        for index, part in enumerate(chunks(runs)):
            if index:
                _, ticket, sums = pickle.loads(_taken(self._side, f"chunk {index} of {count} did not come"))
            waiting.append(self._pool.submit(self._fetch, ticket, part, sums))
        for one in waiting:
            one.result(WAIT_S)
        at = time.monotonic()
        tensors = tensors_of(runs, shapes, dtype)
        decoded = time.monotonic() - at
        tensors, copied = to_device(tensors, device)
        self._side.send_bytes(b"k")
        return Got(tensors, at, decoded, copied)

    def close(self) -> None:
        """See ``Way``."""
        self._pool.shutdown()
        self._transport.close()

    def _fetch(self, ticket: Any, into: Sequence[Run], sums: Sequence[int]) -> None:
        self._transport.fetch(ticket, into, WAIT_S)
        if [checksum(run) for run in into] != list(sums):
            raise TransferError("a chunk arrived damaged")


def chunks(runs: Sequence[Run]) -> list[list[Run]]:
    """Return runs in groups of at most the product's chunk size, one run at least."""
    found: list[list[Run]] = [[]]
    for run in runs:
        if found[-1] and sum(one.nbytes for one in found[-1]) + run.nbytes > MAX_CHUNK_BYTES:
            found.append([])
        found[-1].append(run)
    return found


def make(name: str, address: str, peer: str, key: bytes, side: Connection) -> Way:
    """Return one end of a way; ``peer`` is HOST:PORT of the other one where it listens."""
    if name == PICKLE:
        return Pickled(address, peer)
    if name == STORE:
        return Store(side)
    if name == OURS[0]:
        from kv.tcp import TcpTransport

        return Ours(TcpTransport(address, key), side, near=False)
    from kv.plasma import PlasmaTransport

    return Ours(PlasmaTransport(), side, near=False)


# -- encodings, without a network


def encoded(name: str, tensors: Tensors) -> Mapping[str, Any]:
    """Encode and decode tensors once; raises RuntimeError if they are not what they were."""
    import torch

    runs, (shapes, dtype) = arrays(tensors), described(tensors)
    began = time.monotonic()
    data, nbytes = _encode(name, tensors, runs)
    encode_s = time.monotonic() - began
    began = time.monotonic()
    found = _decode(name, data)
    if name not in ("pickle, tensors", "torch.save"):
        found = tensors_of(found, shapes, dtype)
    decode_s = time.monotonic() - began
    if not all(torch.equal(one, other) for one, other in zip(tensors, found, strict=True)):
        raise RuntimeError(f"{name}: what was decoded is not what was encoded")
    return {"encode_s": encode_s, "decode_s": max(decode_s, 1e-7), "bytes": nbytes}


def _encode(name: str, tensors: Tensors, runs: Sequence[Run]) -> tuple[Any, int]:
    whole = sum(run.nbytes for run in runs)
    if name == "pickle, tensors":
        data = pickle.dumps(tensors)
        return data, len(data)
    if name == "torch.save":
        import io

        import torch

        file = io.BytesIO()
        torch.save(tensors, file)
        return file, file.tell()
    if name == "pickle, arrays":
        data = pickle.dumps(list(runs), 4)
        return data, len(data)
    if name == "pickle5, out of band":
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(list(runs), 5, buffer_callback=buffers.append)
        return (data, [bytearray(one) for one in buffers]), len(data) + whole  # as what came over a network
    if name == "arrow ipc":
        import pyarrow

        sink = pyarrow.BufferOutputStream()
        for run in runs:
            pyarrow.ipc.write_tensor(pyarrow.Tensor.from_numpy(run), sink)
        value = sink.getvalue()
        return (value, len(runs)), value.size
    if name == "ray put and get":
        import ray

        return ray.put(list(runs)), whole
    return [run.copy() for run in runs], whole


def _decode(name: str, data: Any) -> Any:
    if name in ("pickle, tensors", "pickle, arrays"):
        return pickle.loads(data)
    if name == "torch.save":
        import torch

        data.seek(0)
        return torch.load(data)
    if name == "pickle5, out of band":
        return pickle.loads(data[0], buffers=data[1])
    if name == "arrow ipc":
        import pyarrow

        reader = pyarrow.BufferReader(data[0])
        return [pyarrow.ipc.read_tensor(reader).to_numpy() for _ in range(data[1])]
    if name == "ray put and get":
        import ray

        return ray.get(data, timeout=WAIT_S)
    return [run.copy() for run in data]


# -- sockets


def send_framed(connection: socket.socket, data: bytes) -> None:
    """Send bytes, their number first."""
    connection.sendall(_SIZE.pack(len(data)))
    connection.sendall(data)


def receive_framed(connection: socket.socket) -> bytearray:
    """Return bytes that were sent so."""
    return receive_exactly(connection, _SIZE.unpack(receive_exactly(connection, _SIZE.size))[0])


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """Return so many bytes."""
    data = bytearray(size)
    left = memoryview(data)
    while left:
        if not (read := connection.recv_into(left)):
            raise ConnectionError("the other end closed the connection")
        left = left[read:]
    return data


def _taken(side: Connection, otherwise: str) -> bytes:
    if not side.poll(WAIT_S):
        raise TimeoutError(f"{otherwise} within {WAIT_S:g} s")
    return side.recv_bytes()


def _answered(side: Connection, otherwise: str) -> None:
    _taken(side, otherwise)


def _nothing() -> None:
    """Nobody waits for the memory."""
