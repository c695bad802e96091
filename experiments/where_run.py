"""Where time goes, for real: two ranks of one vLLM engine, each in a network namespace, and their profiles.

Finished cells are kept in the file after each, and are not run again.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from cluster import netns
from experiments import plan_model, where
from experiments.children import child
from experiments.kv_station import Client
from experiments.local_pair import vocabulary
from experiments.results import Run, save
from experiments.suite import begun
from experiments.where import KIND, RANKS, Cell, link_name
from experiments.where_profile import together
from experiments.where_rank import START, Place, environment

Progress = Callable[[str], None]
FIRST_ORDINARY_ID: Final = 16
LOADED_WITHIN_S: Final = 240.0
LINK_BYTES: Final = 4 << 20
"""Of the all-reduce that a link is measured with."""


class WhereError(RuntimeError):
    """The experiment cannot run as it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured.

    Attributes:
        model: local path or hub id.
        prompt: length in tokens.
        links: Gbit/s of each node's link, each way; None: no limit.
        chunks: tokens that a step computes at most; buffers are tried with the middle one.
        buffers: most bytes of a socket's buffer, each way, beside the kernel's own.
        repeats: how often each cell is measured.
        seed: of prompts and order.

    """

    model: str
    prompt: int = 2048
    links: tuple[float | None, ...] = (None, 1.0, 0.2)
    chunks: tuple[int, ...] = (256, 512, 1024, 2048)
    buffers: tuple[int, ...] = (64 << 10, 16 << 20)
    repeats: int = 3
    seed: int = 0


def measure(parameters: Parameters, out: Path, progress: Progress, traces: Path | None = None) -> Run:
    """Measure what the file at ``out`` does not have yet, write it there after every cell, and return it.

    ``traces`` gets every profile, in Chrome's format.
    """
    _check(parameters)
    shape = plan_model.read(parameters.model)
    if shape.kv_heads % RANKS:
        raise WhereError(f"--model {parameters.model}: {shape.kv_heads} key-value heads, for {RANKS} ranks")
    run = begun(KIND, asdict(parameters), out, progress)
    wanted = where.cells(parameters.links, parameters.chunks, parameters.buffers)
    if not where.missing(run.samples, wanted, parameters.repeats):
        progress(f"{out} has all of it; delete it to measure again")
        return run
    with _ranks(parameters, traces, progress) as ranks:
        for repeat in range(parameters.repeats):
            todo = where.missing(run.samples, wanted, repeat + 1)
            random.Random(parameters.seed + repeat).shuffle(todo)
            todo.sort(key=lambda cell: (parameters.links.index(cell.gbit_s), cell.buffer or 0))
            for cell in todo:
                sample = {"cell": cell.name, "link": link_name(cell.gbit_s), **ranks.measure(cell)}
                progress(f"{cell.name}, {repeat + 1} of {parameters.repeats}: {_told(sample)}")
                run = _with(run, shape, [*run.samples, sample])
                save(run, out)
    return run


def _check(parameters: Parameters) -> None:
    if (reason := netns.missing()) is not None:
        raise WhereError(f"{reason}; each rank is on a host of its own, or there is no link to wait for")
    if parameters.prompt < max(parameters.chunks):
        raise WhereError(
            f"--chunk is {max(parameters.chunks)}, --prompt {parameters.prompt}: chunks are parts of prompts"
        )


def _with(run: Run, shape: plan_model.Shape, samples: Sequence[Mapping[str, Any]]) -> Run:
    lines = where.rows(samples, shape)
    results = {
        "rows": lines,
        "links": where.link_rows(samples),
        "layers": shape.layers,
        "hidden": shape.hidden,
        "conclusions": [asdict(one) for one in where.conclusions(lines, shape)],
    }
    return run.end(results, samples)


def _told(sample: Mapping[str, Any]) -> str:
    if sample["what"] == "link":
        return f"{sample['nbytes'] >> 20} MB reduced in {sample['seconds'] * 1e3:.1f} ms"
    reduced = sum(step["all_reduce_s"] for step in sample["steps"])
    plain, watched = (sample[name] * 1e3 for name in ("seconds", "profiled_s"))
    return f"{plain:.0f} ms; profiled {watched:.0f}, all-reduces {reduced * 1e3:.0f}"


class _Ranks:
    """Ranks that run, and the network between them."""

    def __init__(self, parameters: Parameters, network: netns.Network, clients: Sequence[Client]) -> None:
        self._parameters, self._network, self._clients = parameters, network, clients
        self._link: float | None = None
        self._buffer: int | None = None
        self._drawn, self._most = random.Random(parameters.seed), vocabulary(parameters.model)
        self._profiles = 0

    def warm(self) -> None:
        """Do once what takes longer the first time."""
        self._all("connect")
        for chunk in self._parameters.chunks:
            self._prefill(Cell(None, chunk))

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Measure a cell once."""
        if cell.gbit_s != self._link:
            self._network.limit(cell.gbit_s)
            self._link = cell.gbit_s
        if cell.buffer != self._buffer:
            for node in self._network.nodes:
                node.buffers(cell.buffer)
            self._all("connect")
            self._buffer = cell.buffer
        if cell.chunk is not None:
            return self._prefill(cell)
        times = self._all("all_reduce", LINK_BYTES)
        longest, empty = (max(of) for of in zip(*times, strict=True))
        return {"what": "link", "nbytes": LINK_BYTES, "seconds": longest, "empty_s": empty}

    def _prefill(self, cell: Cell) -> dict[str, Any]:
        prompt = [
            self._drawn.randrange(FIRST_ORDINARY_ID, self._most) for _ in range(self._parameters.prompt)
        ]
        self._profiles += 1
        plain = self._all("prefill", prompt, cell.chunk)
        if len({token for _, _, token in plain}) != 1:
            raise WhereError(
                f"{cell.name}: the ranks have different first tokens: they did not compute together"
            )
        watched = self._all("profile", prompt, cell.chunk, f"{self._profiles:03}")
        return {
            "what": "prefill",
            "gbit_s": cell.gbit_s,
            "chunk_tokens": cell.chunk,
            "buffer_bytes": cell.buffer,
            "prompt_tokens": len(prompt),
            "seconds": round(max(took for took, _, _ in plain), 6),
            "profiled_s": round(max(took for took, _ in watched), 6),
            "sent_bytes": max(sent for _, sent, _ in plain),
            "steps": together([steps for _, steps in watched]),
        }

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Have all ranks do the same, which none can do alone."""
        for client in self._clients:
            client.call(method, *arguments)
        return [client.result() for client in self._clients]


@contextlib.contextmanager
def _ranks(parameters: Parameters, traces: Path | None, progress: Progress) -> Iterator[_Ranks]:
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(netns.network(RANKS))
        if traces is None:
            traces = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="handoff-traces-")))
        traces.mkdir(parents=True, exist_ok=True)
        progress(f"starting vLLM with {parameters.model} on {RANKS} hosts, a rank each")
        clients = []
        place = Place(parameters.model, parameters.prompt, max(parameters.chunks), str(traces.resolve()))
        for node, cpus in zip(network.nodes, _cpus(), strict=True):
            ours, theirs = socket.socketpair()
            argv, inherited = ["-c", START, str(theirs.fileno())], [theirs.fileno()]
            told = environment(node.index, node.address, network.nodes[0].address, cpus)
            running = stack.enter_context(
                child(f"rank-{node.index}", argv, told, prefix=node.prefix, pass_fds=inherited)
            )
            theirs.close()
            commands = stack.enter_context(Connection(ours.detach()))
            clients.append(Client(f"rank {node.index}", commands, running.check))
            clients[-1].call("place", place)
        for client in clients:
            client.result(LOADED_WITHIN_S)
        ranks = _Ranks(parameters, network, clients)
        progress("warming up: every chunk once")
        ranks.warm()
        yield ranks


def _cpus() -> list[list[int]]:
    """Divide the CPUs of this process between the ranks; with fewer CPUs than ranks they share."""
    own = sorted(os.sched_getaffinity(0))
    each = max(1, len(own) // RANKS)
    return [own[rank * each : (rank + 1) * each] or own[-1:] for rank in range(RANKS)]
