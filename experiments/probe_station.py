"""One node's end of the fabric probe: an actor that measures its own node, and links to other such actors.

Every public method but ``close`` measures or prepares one thing and returns plain values. Rates that take
both ends are asked of the one that receives; the parent (``experiments/probe.py``) brings them together.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from cluster.facts import interface_of
from cluster.network import free_ports
from experiments.probe_tcp import IperfServer, Listener, has_iperf3, iperf3_gbit_s, rate_gbit_s, round_trip_us
from kv.bucket import Bucket, S3Settings

WAIT_S: Final = 60.0
RUNS: Final = 8
"""A payload for NIXL is in so many pieces."""


class Station:
    """On a node, for as long as it is probed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener: Listener | None = None
        self._iperf: IperfServer | None = None
        self._nixl: Any = None
        self._memory = np.zeros((2, 0), np.uint8)
        self._ticket: Any = None

    def facts(self) -> dict[str, Any]:
        """Return what this node can measure, and which machine and network it is on."""
        return {
            "cpus": os.cpu_count(),
            "iperf3": has_iperf3(),
            "nixl": find_spec("nixl") is not None,
            "devices": _devices(),
            "machine": Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
            if Path("/proc/sys/kernel/random/boot_id").exists()
            else self._address,
            "network": os.readlink("/proc/self/ns/net") if Path("/proc/self/ns/net").exists() else "",
        }

    def close(self) -> None:
        """Give everything back."""
        for one in (self._listener, self._iperf, self._nixl):
            if one is not None:
                one.close()

    # -- links: TCP -----------------------------------------------------------------------------------

    def listen(self) -> int:
        """Answer probes over TCP; returns the port."""
        self._listener = self._listener or Listener(self._address)
        return self._listener.port

    def round_trip_us(self, host: str, port: int) -> float:
        """Return the round-trip time to another's listener."""
        return round_trip_us(host, port)

    def rate_gbit_s(self, host: str, port: int, streams: int, seconds: float) -> float:
        """Return what another's listener receives from here."""
        return rate_gbit_s(host, port, streams, seconds)

    def iperf_listen(self) -> int:
        """Serve one client of iperf3; returns the port."""
        if self._iperf is not None:
            self._iperf.close()
        self._iperf = IperfServer(self._address)
        return self._iperf.port

    def iperf_gbit_s(self, host: str, port: int, streams: int, seconds: int) -> float:
        """Return what another's iperf3 receives from here."""
        return iperf3_gbit_s(host, port, streams, seconds)

    def sent_bytes(self) -> int:
        """Return how many bytes have left this node over the interface of its address."""
        name = interface_of(self._address)
        counters = psutil.net_io_counters(pernic=True)
        return int(counters[name].bytes_sent) if name in counters else 0

    # -- links: Ray's object store, NIXL --------------------------------------------------------------

    def put(self, nbytes: int) -> list[Any]:
        """Put an object of that size into this node's store. Held by whoever holds the list."""
        import ray

        return [ray.put(np.full(nbytes, 7, np.uint8))]

    def get(self, held: list[Any], nbytes: int) -> float:
        """Return the seconds until another's object is in this node's store and mapped."""
        import ray

        began = time.perf_counter()
        data = ray.get(held[0], timeout=WAIT_S)
        took = time.perf_counter() - began
        if data.nbytes != nbytes or data[0] != 7 or data[-1] != 7:
            raise ValueError(f"the object of {nbytes} bytes arrived with {data.nbytes} other ones")
        return took

    def nixl_publish(self, nbytes: int, tcp_only: bool) -> Any:
        """Publish a payload of that size; returns its ticket, which is good until the next one."""
        transport = self._nixl_ready(nbytes, tcp_only)
        if self._ticket is not None:
            transport.release(self._ticket)
        self._memory[0] = 7
        self._ticket = transport.publish(np.array_split(self._memory[0], RUNS), _nothing)
        return self._ticket

    def nixl_fetch(self, ticket: Any, nbytes: int, tcp_only: bool) -> tuple[float, str]:
        """Return the seconds of reading another's payload, and the way that UCX chose for it."""
        transport = self._nixl_ready(nbytes, tcp_only)
        into = self._memory[1]
        into[:] = 0
        began = time.perf_counter()
        transport.fetch(ticket, np.array_split(into, RUNS), WAIT_S)
        took = time.perf_counter() - began
        if not (into == 7).all():
            raise ValueError(f"a payload of {nbytes} bytes arrived damaged")
        return took, str(transport.paths().get(ticket.agent, "not told by UCX's log"))

    def _nixl_ready(self, nbytes: int, tcp_only: bool) -> Any:
        if self._nixl is None:
            if tcp_only:  # UCX would read the other process's memory on this machine, past the link
                os.environ["UCX_TLS"] = "tcp"
            from kv.nixl import NixlTransport

            self._memory = np.zeros((2, nbytes), np.uint8)
            self._nixl = NixlTransport(self._address)
            self._nixl.register(list(self._memory))
        return self._nixl

    # -- this node ------------------------------------------------------------------------------------

    def copy_s(self, nbytes: int) -> float:
        """Return the seconds of copying so many bytes within memory, both sides being in use already."""
        source, target = np.ones(nbytes, np.uint8), np.full(nbytes, 2, np.uint8)  # zeros would have no pages
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    def device_s(self, device: str, nbytes: int) -> tuple[float, float]:
        """Return the seconds of a copy to a device, and of one back; from and to pinned memory if CUDA's."""
        import torch

        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
        there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        wait = torch.cuda.synchronize if device.startswith("cuda") else torch.mps.synchronize
        times = []
        for target, source in ((there, host), (there, host), (host, there)):  # the first one warms up
            wait()
            began = time.perf_counter()
            target.copy_(source)
            wait()
            times.append(time.perf_counter() - began)
        return times[1], times[2]

    def s3_s(self, settings: S3Settings, nbytes: int) -> tuple[float, float]:
        """Return the seconds of putting so many bytes into a bucket, and of getting them back."""
        from kv.s3 import S3Transport

        bucket = Bucket(settings)
        transport = S3Transport(bucket)
        try:
            data, into = np.full(nbytes, 7, np.uint8), np.zeros(nbytes, np.uint8)
            began = time.perf_counter()
            ticket = transport.publish([data], _nothing)
            stored = time.perf_counter()
            transport.fetch(ticket, [into], WAIT_S)
            took = time.perf_counter() - stored
            transport.release(ticket)
            if not (into == 7).all():
                raise ValueError(f"an object of {nbytes} bytes came back damaged")
            return stored - began, took
        finally:
            transport.close()
            bucket.close()

    # -- collectives ----------------------------------------------------------------------------------

    def free_port(self) -> int:
        """Return a port that nothing listens on here."""
        return free_ports(1)[0]

    def meet(self, master: str, rank: int, world: int) -> str:
        """Join a group for collectives, whose rank 0 listens at ``master`` (HOST:PORT); returns the backend.

        NCCL if this node has a GPU, one of them; else gloo, over the interface of this node's address.
        """
        import torch
        import torch.distributed as dist

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if (name := interface_of(self._address)) is not None:
            os.environ.setdefault(f"{backend.upper()}_SOCKET_IFNAME", name)
        dist.init_process_group(
            backend,
            init_method=f"tcp://{master}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=WAIT_S),
        )
        return backend

    def all_reduce_s(self, nbytes: int) -> float:
        """Return the seconds of summing so many bytes over the group, in 32-bit floats; all ranks call it."""
        import torch
        import torch.distributed as dist

        cuda = dist.get_backend() == "nccl"
        device = "cuda" if cuda else "cpu"
        data = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        if cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        if float(data[0]) != dist.get_world_size() or float(data[-1]) != dist.get_world_size():
            raise ValueError(f"the sum over {dist.get_world_size()} ranks is {float(data[0])}")
        return took

    def part(self) -> None:
        """Leave the group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _devices() -> list[str]:
    """Accelerators that this process may use."""
    if find_spec("torch") is None:
        return []
    import torch

    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return found + (["mps"] if torch.backends.mps.is_available() else [])


def _nothing() -> None:
    """Nobody waits for the payload's memory."""
