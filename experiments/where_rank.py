"""The process of one rank, told by a parent when to prefill and to profile (``kv_station.Client``)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Final

import psutil

from cluster import netns
from experiments.kv_station import serve
from experiments.where import RANKS
from experiments.where_profile import STEP, RankStep, rank_steps

START: Final = "from experiments.where_rank import main; main()"
PORT: Final = 29500
"""Where ranks meet: on the first one's node, whose network is its own."""
EMPTY_BYTES: Final = 4
EMPTY_REPEATS: Final = 15


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank is told first.

    Attributes:
        model: local path or hub id.
        longest: prompt in tokens.
        chunk: the largest.
        traces: a folder for profiles.

    """

    model: str
    longest: int
    chunk: int
    traces: str


def environment(rank: int, address: str, master: str, cpus: Sequence[int]) -> dict[str, str]:
    """Return what a rank's process starts with.

    Args:
        rank: from 0.
        address: of its node.
        master: address of the first one's.
        cpus: of its threads.

    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": netns.DEVICE,
        "HF_HUB_OFFLINE": "1",  # a node of its own reaches nobody
        "VLLM_HOST_IP": address,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "OMP_NUM_THREADS": str(len(cpus)),
        "TORCHDYNAMO_DISABLE": "1",  # as workers of eager engines: ``actors.worker.engine_env``
    }


class Rank:
    """Public methods are commands; all ranks get the same ones."""

    def __init__(self, place: Place) -> None:
        from actors.profiled import ProfiledRank

        self._rank = ProfiledRank(place.model, RANKS, place.longest, place.chunk)
        self._traces = Path(place.traces)

    def connect(self) -> None:
        """Reduce over new connections from now on."""
        self._rank.connect()
        self._rank.all_reduce_s(EMPTY_BYTES)

    def all_reduce(self, nbytes: int) -> tuple[float, float]:
        """Return seconds of an all-reduce of so many bytes, and of one of 4 bytes (median)."""
        empty = [self._rank.all_reduce_s(EMPTY_BYTES) for _ in range(EMPTY_REPEATS)]
        return self._rank.all_reduce_s(nbytes), median(empty)

    def prefill(self, prompt: Sequence[int], chunk: int) -> tuple[float, int, int]:
        """Return seconds of a prefill in chunks, the bytes that left the node, and the first token."""
        sent = _sent_bytes()
        seconds, token = self._rank.prefill(prompt, chunk)
        return seconds, _sent_bytes() - sent, token

    def profile(self, prompt: Sequence[int], chunk: int, name: str) -> tuple[float, list[RankStep]]:
        """Return seconds of a prefill that is watched, and its steps; the profile is kept."""
        path = self._traces / f"{name}-rank{os.environ['RANK']}.json"
        seconds = self._rank.profile(prompt, chunk, STEP, path)
        return seconds, rank_steps(json.loads(path.read_text("utf-8")))


def _sent_bytes() -> int:
    return int(psutil.net_io_counters(pernic=True)[netns.DEVICE].bytes_sent)


def main() -> None:
    """Serve commands until the parent closes its end. Argument: an inherited socket."""
    serve(Connection(int(sys.argv[1])), Rank)
    os._exit(0)  # nothing here is worth waiting for
