"""How fast KV comes out of a bucket, against a plain client of the same server, in turns.

The plain client is the same library without anything of ours: ranged reads on several
connections into one piece of memory, nothing checked. Ours goes into scattered blocks and
verifies every checksum, in chunks of a page each (`kv/tier.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

import numpy as np
from pyarrow import fs

from cluster import netns
from experiments.s3_server import S3Server, s3_server
from kv.bucket import Bucket, S3Settings
from kv.chunk import ChunkHeader, KVLayout, Run, checksum
from kv.paged import PagedCache
from kv.s3 import S3Transport
from kv.tier import KVTier

MB: Final = 1 << 20
LAYERS: Final = 32
BLOCK_BYTES: Final = 64 << 10
BLOCK_TOKENS: Final = 16
BLOCK_MB: Final = LAYERS * BLOCK_BYTES // MB
PLAIN: Final = {
    "plain 2x8": (2, 8 * MB),
    "plain 4x8": (4, 8 * MB),
    "plain 8x8": (8, 8 * MB),
    "plain 4x16": (4, 16 * MB),
}
"""Connections and bytes per request; the best of them is the limit."""
ROUNDS: Final = 7
FETCHERS: Final = 4
"""Chunks that are fetched at once."""
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
    memory = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8).reshape(LAYERS, blocks, -1)
    source = PagedCache(list(memory), BLOCK_TOKENS)
    target = PagedCache(list(np.ones_like(memory)), BLOCK_TOKENS)
    # Blocks of a cache that has been in use for a while lie anywhere.
    order: list[int] = np.random.default_rng(1).permutation(blocks).tolist()
    flat = np.ones(nbytes, np.uint8)
    layout = KVLayout("bench", "torch.bfloat16", LAYERS, BLOCK_TOKENS, BLOCK_BYTES, "bench")
    with closing(Bucket(settings)) as bucket, closing(S3Transport(bucket)) as transport:
        tier = KVTier(bucket, layout)
        keys = tier.keys(range(blocks * BLOCK_TOKENS))
        size = tier.page_blocks
        parts = [order[start : start + size] for start in range(0, blocks, size)]
        tier.put(keys, [source.runs(part) for part in parts[: len(keys)]], 10 * WAIT_S)
        into = [target.runs(part) for part in parts[: len(keys)]]
        whole = transport.publish([memory.reshape(-1)], _nothing)
        chunks = [_chunk(transport, layout, source.runs(part), target.runs(part)) for part in parts]
        pool = ThreadPoolExecutor(FETCHERS)
        ways: dict[str, Callable[[], object]] = {
            "transport": lambda: [*pool.map(lambda fetch: fetch(), chunks)],
            "tier": lambda: tier.load(keys, into, WAIT_S),
        }
        path = f"{settings.bucket}/{settings.prefix}/{whole.name}"
        clients = {way: _Plain(settings, path, *PLAIN[way]) for way in PLAIN}
        plain: dict[str, Callable[[], object]] = {
            way: partial(client.read, flat) for way, client in clients.items()
        }
        ways |= plain
        moved = dict.fromkeys(ways, nbytes) | {"tier": len(keys) * tier.page_nbytes}
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
        pool.shutdown()
        for key in keys:
            bucket.delete(tier.name(key))
    return [
        Rate(
            way,
            blocks * BLOCK_MB,
            tuple(moved[way] / seconds / 1e9 for seconds, _ in took),
            median(cpu / moved[way] * 1e9 for _, cpu in took),
        )
        for way, took in found.items()
    ]


def _chunk(transport: S3Transport, layout: KVLayout, sent: list[Run], into: list[Run]) -> Callable[[], None]:
    """Publish a chunk; return what fetches and verifies it."""
    ticket = transport.publish(sent, _nothing)
    nbytes = sum(run.nbytes for run in sent)
    header = ChunkHeader("bench", layout, 0, (0, 1), (0, LAYERS), tuple(map(checksum, sent)), nbytes)

    def fetch() -> None:
        transport.fetch(ticket, into, WAIT_S)
        header.verify(into)

    return fetch


def _nothing() -> None:
    pass


def main() -> None:
    """Print the rates for the given megabytes, on this machine and over limited links."""
    sizes = [int(argument) for argument in sys.argv[1:]] or [16, 109]
    with s3_server() as server:
        _show("unlimited", server, sizes)
    if (reason := netns.missing()) is not None:
        print(f"limited links are not measured: {reason}")
        return
    with netns.network(1, attach_host=True) as network:
        (node,) = network.nodes
        with s3_server(host=node.address, prefix=node.prefix) as server:
            for gbit_s in (10.0, 1.0):
                node.limit(gbit_s)
                _show(f"{gbit_s:g} Gbit/s", server, sizes)


def _show(link: str, server: S3Server, sizes: Sequence[int]) -> None:
    for mbytes in sizes:
        found = rates(server.settings, mbytes, ROUNDS)
        limit = max(rate.p50 for rate in found if rate.way in PLAIN)
        for rate in found:
            print(
                f"{link:>10} {server.kind} {rate.mbytes:4d} MB {rate.way:10} {rate.p50 * 8:6.2f} Gbit/s "
                f"ratio {rate.p50 / limit:.2f} CPU s/GB {rate.cpu_s_per_gb:.2f}",
                flush=True,
            )


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


if __name__ == "__main__":
    main()
