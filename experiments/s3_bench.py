"""How fast KV comes out of a bucket, against a plain client of the same server, in turns.

The plain client is the same library without anything of ours: ranged reads on several
connections into one piece of memory, nothing checked. Ours goes into scattered blocks and
verifies every checksum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
from pyarrow import fs

from kv.bucket import Bucket, S3Settings
from kv.chunk import ChunkHeader, KVLayout, Run, checksum
from kv.s3 import S3Transport
from kv.tier import KVTier

MB: Final = 1 << 20
LAYERS: Final = 32
BLOCK_BYTES: Final = 64 << 10
BLOCK_MB: Final = LAYERS * BLOCK_BYTES // MB
PLAIN: Final = {
    "plain 2x8": (2, 8 * MB),
    "plain 4x8": (4, 8 * MB),
    "plain 8x8": (8, 8 * MB),
    "plain 4x16": (4, 16 * MB),
}
"""Connections and bytes per request; the best of them is the limit."""
WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Rate:
    """One way of reading so many megabytes: GB/s of each round, and CPU seconds per GB of this process."""

    way: str
    mbytes: int
    gb_s: tuple[float, ...]
    cpu_s_per_gb: float

    @property
    def p50(self) -> float:
        """The median."""
        return median(self.gb_s)


def rates(settings: S3Settings, mbytes: int, rounds: int) -> list[Rate]:
    """Store so many megabytes, read them in every way in turns, and delete them."""
    blocks = max(1, mbytes // BLOCK_MB)
    nbytes = blocks * LAYERS * BLOCK_BYTES
    source = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8).reshape(LAYERS, blocks, -1)
    target = np.ones((LAYERS, blocks, BLOCK_BYTES), np.uint8)
    order = np.random.default_rng(1).permutation(blocks)
    flat = np.ones(nbytes, np.uint8)
    layout = KVLayout("bench", "torch.bfloat16", LAYERS, 16, BLOCK_BYTES, "bench")

    def runs(memory: Run) -> list[Run]:
        return [layer[block] for layer in memory for block in order]

    with closing(Bucket(settings)) as bucket, closing(S3Transport(bucket)) as transport:
        tier = KVTier(bucket, layout)
        keys = tier.keys(range(blocks * 16))
        per_block = [[source[layer, block] for layer in range(LAYERS)] for block in order]
        into = [[target[layer, block] for layer in range(LAYERS)] for block in order]
        tier.put(keys, per_block, 10 * WAIT_S)
        sent = runs(source)
        ticket = transport.publish(sent, lambda: None)
        header = ChunkHeader("bench", layout, 0, (0, 1), (0, LAYERS), tuple(map(checksum, sent)), nbytes)

        def ours() -> None:
            arrived = runs(target)
            transport.fetch(ticket, arrived, WAIT_S)
            header.verify(arrived)

        ways: dict[str, Callable[[], None]] = {
            "transport": ours,
            "tier": lambda: tier.load(keys, into, WAIT_S),
        }
        path = f"{settings.bucket}/{settings.prefix}/{ticket.name}"
        clients = {way: _Plain(settings, path, *PLAIN[way]) for way in PLAIN}
        ways |= {way: lambda client=client: client.read(flat) for way, client in clients.items()}  # type: ignore[misc]
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way, read in ways.items():
                began, cpu = time.perf_counter(), time.process_time()
                read()
                took = (time.perf_counter() - began, time.process_time() - cpu)
                if turn:  # the first is to warm up
                    found[way].append(took)
        for client in clients.values():
            client.close()
        for key in keys:
            bucket.delete(tier.name(key))
    return [
        Rate(
            way,
            blocks * BLOCK_MB,
            tuple(nbytes / seconds / 1e9 for seconds, _ in took),
            median(cpu / nbytes * 1e9 for _, cpu in took),
        )
        for way, took in found.items()
    ]


class _Plain:
    """A plain client."""

    def __init__(self, settings: S3Settings, path: str, connections: int, piece: int) -> None:
        self._fs = fs.S3FileSystem(
            region=settings.region, endpoint_override=settings.endpoint, scheme=settings.scheme
        )
        self._path, self._connections, self._piece = path, connections, piece
        self._pool = ThreadPoolExecutor(connections)

    def read(self, into: Run) -> None:
        starts = range(0, into.nbytes, self._piece)
        shares: Sequence[range] = [starts[i :: self._connections] for i in range(self._connections)]
        list(self._pool.map(lambda share: self._read(into, share), shares))

    def _read(self, into: Run, starts: range) -> None:
        if not starts:
            return
        file = self._fs.open_input_file(self._path)
        for start in starts:
            memory = into[start : start + self._piece]
            file.seek(start)
            if file.readinto(memory) != memory.nbytes:
                raise RuntimeError(f"{self._path} ended early")

    def close(self) -> None:
        self._pool.shutdown()
