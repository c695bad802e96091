"""One end of a measured transfer: a paged cache, and the product's own sender or receiver over it.

Runs in a process of its own (``main``), in the network namespace that it is started in. A parent gives it
commands over one inherited socket (``Client``); a second one joins the two ends and stands in for the actor
calls that carry announcements between workers; a third is for the baselines.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from actors import prefill
from actors.decode import Receiver, Target
from actors.marks import Marks
from actors.messages import Again, Chunk, Delivery
from actors.peers import OnTaken
from actors.prefill import Sender
from actors.rungs import Rungs
from cluster import netns
from experiments.kv_baselines import Plain, RayWhole, S3Plain, TorchSave, dumps
from kv.chunk import KVLayout, checksum
from kv.errors import TransferError
from kv.paged import PagedCache
from kv.transport import Transport, needs_ray

if TYPE_CHECKING:
    from kv.bucket import S3Settings

LAYERS: Final = 8
BLOCK_BYTES: Final = 128 << 10
BLOCK_TOKENS: Final = 128
MB: Final = LAYERS * BLOCK_BYTES
"""Bytes of one block in all layers; blocks are as large as those of the demo's model."""
WINDOW: Final = 256 << 20
"""Bytes that are published and not fetched at most. Prefill publishes as it computes, which is slower."""
WAIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where an end is, and what it needs there.

    Attributes:
        address: its IP address on the link.
        peer: the other end's.
        key: of the data plane.
        ray: HOST:PORT of the Ray cluster it belongs to, if there is one.
        blocks: of its paged cache.
        seed: of the cache's content.
        s3: a bucket, if there is one.

    """

    address: str
    peer: str
    key: bytes
    ray: str | None
    blocks: int
    seed: int
    s3: S3Settings | None = None


def _tcp(place: Place) -> Transport:
    from kv.tcp import TcpTransport

    return TcpTransport(place.address, place.key)


def _plasma(place: Place) -> Transport:
    from kv.plasma import PlasmaTransport

    return PlasmaTransport()


def _nixl(place: Place) -> Transport:
    from kv.nixl import NixlTransport

    return NixlTransport(place.address)


def _s3(place: Place) -> Transport:
    from kv.bucket import Bucket
    from kv.s3 import S3Transport

    assert place.s3 is not None
    return S3Transport(Bucket(place.s3))


TRANSPORTS: Final[Mapping[str, Callable[[Place], Transport]]] = {
    "tcp": _tcp,
    "plasma": _plasma,
    "nixl": _nixl,
    "s3": _s3,
}
"""What is measured. Imports belong inside: an end loads only what it uses."""
BASELINES: Final[Mapping[str, Callable[[Place, str, Connection], Plain]]] = {
    "torch.save": lambda place, peer, side: TorchSave(place.address, peer, side),
    "ray whole": lambda place, peer, side: RayWhole(place.address, peer, side),
    "s3 plain": lambda place, peer, side: S3Plain(place.s3, peer, side),
}
NEEDS_RAY: Final = frozenset({"plasma", "ray whole"})
NEEDS_S3: Final = frozenset({"s3", "s3 plain"})


@dataclass(frozen=True, slots=True)
class Spent:
    """What one end says about one measurement: a clock reading common to all processes, and its costs."""

    at: float
    cpu_s: float
    peak_bytes: int


class _Meter:
    """CPU time and peak memory of this process from the moment it is made."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now
        self._rss = _status("VmRSS")
        self._cpu = _cpu_s()

    def spent(self, at: float) -> Spent:
        return Spent(at, _cpu_s() - self._cpu, max(0, _status("VmHWM") - self._rss))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise KeyError(field)


class End:
    """What both ends have. Public methods are commands; see ``Client``."""

    def __init__(self, peer: Connection, side: Connection, place: Place) -> None:
        self.place, self._peer, self._side = place, peer, side
        memory = np.zeros((LAYERS, place.blocks, BLOCK_BYTES), np.uint8)
        if place.seed:
            words = np.random.default_rng(place.seed)
            for layer in memory:
                layer.view(np.uint64)[:] = words.integers(0, 1 << 63, layer.nbytes // 8, np.uint64).reshape(
                    place.blocks, -1
                )
        else:
            memory.fill(1)  # a cache in use has its pages
        self.memory = memory
        self.cache = PagedCache(list(memory), BLOCK_TOKENS)
        self.layout = KVLayout("bench", "torch.bfloat16", LAYERS, BLOCK_TOKENS, BLOCK_BYTES, "bench")
        # Blocks of a cache that has been in use for a while lie anywhere.
        self._free = _forever(np.random.default_rng(1).permutation(place.blocks).tolist())
        self._baselines: dict[str, Plain] = {}
        self._blocks: dict[str, list[int]] = {}
        """Of the requests of the latest transfer."""
        if place.ray is not None:
            _join(place)

    def take(self, count: int) -> list[int]:
        """Return the next blocks; it goes around, so that they are no longer in the processor's caches."""
        return [next(self._free) for _ in range(count)]

    def link_bytes(self) -> int:
        """Return how many bytes have left this namespace over its link."""
        for line in Path("/proc/self/net/dev").read_text("ascii").splitlines():
            name, _colon, counters = line.partition(":")
            if name.strip() == netns.DEVICE:
                return int(counters.split()[8])
        raise RuntimeError(f"there is no {netns.DEVICE} in here")

    def copy_rate(self, mbytes: int) -> tuple[float, float]:
        """Return (seconds for a copy of that size within the cache, seconds for its checksums).

        Of memory that is there: hosts take pages away that have not been used for a while.
        """
        source, target = (self.cache.runs(self.take(mbytes)) for _ in range(2))
        for run in (*source, *target):
            run[:: mmap.PAGESIZE] = run[:: mmap.PAGESIZE]
        began = time.perf_counter()
        for one, other in zip(source, target, strict=True):
            other[:] = one
        copied = time.perf_counter()
        for run in self.cache.runs(self.take(mbytes)):
            checksum(run)
        return copied - began, time.perf_counter() - copied

    def digests(self) -> dict[str, list[int]]:
        """Return the checksums of all runs of each request of the latest transfer."""
        return {
            request: [checksum(run) for run in self.cache.runs(blocks)]
            for request, blocks in self._blocks.items()
        }

    def plain(self, name: str, peer: str) -> int:
        """Prepare a baseline; returns a port to connect to, or 0."""
        self._baselines[name] = BASELINES[name](self.place, peer, self._side)
        return self._baselines[name].port


class SendingEnd(End):
    """Publishes."""

    def __init__(self, peer: Connection, side: Connection, place: Place) -> None:
        super().__init__(peer, side, place)
        self._senders: dict[str, Sender] = {}
        self._rungs: dict[str, Rungs] = {}
        self._done: dict[int, Callable[[], None]] = {}
        self._posted = 0
        self._lock = threading.Condition()
        self._unread = 0

    def open(self, transport: str, piece: int | None = None) -> None:
        """Prepare a transport; ``piece`` overrides the size of chunks from now on."""
        if piece is not None:
            prefill.MAX_CHUNK_BYTES = piece
        if transport not in self._senders:
            made = TRANSPORTS[transport](self.place)
            made.register(self.cache.memory())
            rungs = Rungs({transport: made}, self.place.address)
            rungs.meet("receiver", self.place.peer, (transport,))
            self._senders[transport] = Sender("sender", self.cache, self.layout, rungs, self._post, _nothing)
            self._rungs[transport] = rungs
            if len(self._senders) == 1:
                threading.Thread(target=self._acknowledged, daemon=True).start()

    def send(self, transport: str, requests: Sequence[str], mbytes: int) -> tuple[float, Spent]:
        """Hand requests over, each of that size; returns when the other end needs nothing more of them."""
        sender = self._senders[transport]
        blocks = self._blocks = {request: self.take(mbytes) for request in requests}
        step = max(1, prefill.MAX_CHUNK_BYTES // MB)
        meter, began = _Meter(), time.monotonic()
        for request in requests:
            sender.open(request, "receiver")
        for start in range(0, mbytes, step):
            end = min(mbytes, start + step)
            for request in requests:
                self._wait_for(lambda: self._unread < WINDOW)
                with self._lock:
                    self._unread += (end - start) * MB
                sender.valid(request, blocks[request], end * BLOCK_TOKENS)
        for request in requests:
            sender.finish(request, 0)
        self._wait_for(lambda: self._unread == 0)
        spent = meter.spent(time.monotonic())
        deadline = time.monotonic() + WAIT_S
        while sender.open_requests():  # ended, and read
            if time.monotonic() > deadline:
                raise TimeoutError(f"{transport} did not end {sender.open_requests()} in {WAIT_S:g} s")
            time.sleep(0.001)
        sender.take_finished()
        if spare := self._rungs[transport].live()[0]:
            raise RuntimeError(f"{transport} still holds {spare} payloads of a transfer that has ended")
        return began, spent

    def baseline(self, name: str, mbytes: int) -> tuple[float, Spent]:
        """Send one request's KV the other way."""
        runs = self.cache.runs(self.take(mbytes))
        meter, began = _Meter(), time.monotonic()
        self._baselines[name].send(runs)
        return began, meter.spent(time.monotonic())

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._lock:
            if not self._lock.wait_for(condition, WAIT_S):
                raise TimeoutError(f"{self._unread} bytes are still to be fetched after {WAIT_S:g} s")

    def _post(self, _: str, delivery: Delivery, done: OnTaken) -> None:
        nbytes = delivery.header.nbytes if hasattr(delivery, "header") else 0

        def read() -> None:
            done(None)
            with self._lock:
                self._unread -= nbytes
                self._lock.notify_all()

        with self._lock:
            self._posted += 1
            number = self._posted
            self._done[number] = read
        by_ray = isinstance(delivery, Chunk) and needs_ray(delivery.ticket)
        self._peer.send_bytes((dumps if by_ray else pickle.dumps)((number, delivery)))

    def _acknowledged(self) -> None:
        while True:
            try:
                number = int.from_bytes(self._peer.recv_bytes(), "big")
            except (EOFError, OSError):
                return
            with self._lock:
                done = self._done.pop(number)
            done()


class ReceivingEnd(End):
    """Fetches and verifies."""

    def __init__(self, peer: Connection, side: Connection, place: Place) -> None:
        super().__init__(peer, side, place)
        self._receivers: dict[str, Receiver] = {}
        self._failed: list[str] = []
        self._arrived = threading.Condition()
        self._began: _Meter | None = None
        self._sending = threading.Lock()
        self._current: Receiver | None = None

    def open(self, transport: str, piece: int | None = None) -> None:
        """Prepare a transport."""
        if transport not in self._receivers:
            made = TRANSPORTS[transport](self.place)
            made.register(self.cache.memory())
            self._receivers[transport] = Receiver(
                self.cache,
                self.layout,
                Rungs({transport: made}),
                Marks(),
                self._woken,
                _no_other,
                self._on_failed,
            )
            if len(self._receivers) == 1:
                threading.Thread(target=self._delivered, daemon=True).start()

    def expect(self, transport: str, requests: Sequence[str], mbytes: int) -> None:
        """Give requests blocks, and spoil what those hold."""
        receiver = self._current = self._receivers[transport]
        self._failed = []
        self._blocks = {request: self.take(mbytes) for request in requests}
        for request, blocks in self._blocks.items():
            for run in self.cache.runs(blocks):
                run[0] ^= 0xFF
                run[-1] ^= 0xFF
            receiver.expect(request, WAIT_S)
            receiver.open(request, Target(blocks, 0, mbytes * BLOCK_TOKENS))
        self._began = _Meter()

    def received(self) -> Spent:
        """Wait until everything that is expected has been written and verified."""
        receiver, left = self._current, set(self._blocks)
        assert receiver is not None
        assert self._began is not None
        with self._arrived:
            while left:
                done = receiver.take_finished()
                if self._failed:
                    raise RuntimeError(f"transfers failed: {self._failed}")
                left -= done
                if left and not done and not self._arrived.wait(WAIT_S):
                    raise TimeoutError(f"{len(left)} requests did not arrive in {WAIT_S:g} s")
        spent = self._began.spent(time.monotonic())
        for request in self._blocks:
            receiver.close(request)
        return spent

    def baseline(self, name: str, mbytes: int) -> Spent:
        """Receive one request's KV the other way."""
        runs = self.cache.runs(self.take(mbytes))
        meter = _Meter()
        self._baselines[name].receive(runs)
        return meter.spent(time.monotonic())

    def _woken(self) -> None:
        with self._arrived:
            self._arrived.notify_all()

    def _on_failed(self, request_id: str, reason: str) -> None:
        self._failed.append(f"{request_id}: {reason}")
        self._woken()

    def _delivered(self) -> None:
        while True:
            try:
                data = self._peer.recv_bytes()
            except (EOFError, OSError):
                return
            number, delivery = pickle.loads(data)
            assert self._current is not None
            self._current.deliver(delivery, partial(self._acknowledge, number))

    def _acknowledge(self, number: int, _: float | None) -> None:
        with self._sending:
            self._peer.send_bytes(number.to_bytes(8, "big"))


def _nothing() -> None:
    pass


def _no_other(source: str, asked: Again, timeout_s: float) -> Chunk:
    raise TransferError("only one transport is measured at a time")


def _forever(blocks: list[int]) -> Iterator[int]:
    while True:
        yield from blocks


def _join(place: Place) -> None:
    import ray

    ray.init(
        place.ray,
        _node_ip_address=place.address,
        log_to_driver=False,
        configure_logging=False,
        namespace="bench",
    )


class Client:
    """Calls an end's methods from the parent. ``call`` starts one, ``result`` waits for what it returns."""

    def __init__(self, name: str, connection: Connection, check: Callable[[], None]) -> None:
        self._name, self._connection, self._check = name, connection, check

    def call(self, method: str, *arguments: Any) -> None:
        """Start a call; its ``result`` must be taken before the next."""
        self._connection.send((method, arguments))

    def result(self, timeout_s: float = WAIT_S + 30) -> Any:
        """Return what the call returned, or raise what it raised."""
        deadline = time.monotonic() + timeout_s
        while not self._connection.poll(0.5):
            self._check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the {self._name} did not answer in {timeout_s:g} s")
        try:
            fine, value = self._connection.recv()
        except EOFError:
            self._check()
            raise RuntimeError(f"the {self._name} ended") from None
        if not fine:
            raise RuntimeError(f"the {self._name} failed: {value}")
        return value

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Call and wait."""
        self.call(method, *arguments)
        return self.result()


def serve(commands: Connection, make: Callable[..., Any]) -> None:
    """Answer a ``Client`` until it closes its end: ``place`` makes the object that has the other methods."""
    end = None
    while True:
        try:
            method, arguments = commands.recv()
        except EOFError:
            return
        try:
            if method == "place":
                end = make(*arguments)
                commands.send((True, None))
            else:
                commands.send((True, getattr(end, method)(*arguments)))
        except Exception:
            commands.send((False, traceback.format_exc()))


def main() -> None:
    """Serve commands until the parent closes its end. Arguments: role, and three inherited sockets."""
    role, (commands, peer, side) = sys.argv[1], (Connection(int(number)) for number in sys.argv[2:5])
    kind = {"sender": SendingEnd, "receiver": ReceivingEnd}[role]
    serve(commands, lambda place: kind(peer, side, place))
    os._exit(0)  # nothing here is worth waiting for
