"""The head to head for real: two nodes on a limited link, every way in turn, and what each takes.

Both nodes are processes of this machine, in network namespaces whose link is limited, or, without root, on
loopback. Finished cells are kept in the file after each, and are not run again.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from cluster import netns
from experiments import head, kv_bench
from experiments.children import child
from experiments.head import ALONE, KIND, SEVERAL, WAYS, Cell, link_name
from experiments.head_station import START, Place
from experiments.head_users import Asked
from experiments.kv_station import Client
from experiments.local_pair import vocabulary
from experiments.ray_nodes import ray_nodes
from experiments.results import Run, save
from experiments.suite import begun

Progress = Callable[[str], None]
OBJECT_STORE: Final = 512 << 20
LEAST_PROMPT: Final = 2
FIRST_ORDINARY_ID: Final = 16
"""Token ids below are special ones in many vocabularies."""


class HeadError(RuntimeError):
    """The experiment cannot run as it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured.

    Attributes:
        model: folder or hub id, read by transformers.
        prompts: lengths in tokens.
        tokens: of each answer.
        links: Gbit/s, each way; None: loopback, no limit.
        users: numbers of users at once, on the first link.
        user_mbytes: KV of each, in 2**20 bytes.
        repeats: how often each cell is measured.
        device: cpu, cuda or mps; both nodes'.
        seed: of prompts and order.

    """

    model: str
    prompts: tuple[int, ...] = (256, 871)
    tokens: int = 17
    links: tuple[float | None, ...] = (10.0, 1.0)
    users: tuple[int, ...] = (1, 4, 16)
    user_mbytes: int = 8
    repeats: int = 3
    device: str = "cpu"
    seed: int = 0
    ways: tuple[str, ...] = field(default=WAYS)


def measure(parameters: Parameters, out: Path, progress: Progress) -> Run:
    """Measure what the file at ``out`` does not have yet, write it there after every cell, and return it."""
    _check(parameters)
    run = begun(KIND, asdict(parameters), out, progress)
    iperf = shutil.which(kv_bench.IPERF3) is not None
    wanted = [
        cell
        for cell in head.cells(parameters.links, parameters.prompts, parameters.users, iperf)
        if cell.what != "request" or cell.case in (*ALONE, *parameters.ways)
    ]
    if not head.missing(run.samples, wanted, parameters.repeats):
        progress(f"{out} has all of it; delete it to measure again")
        return run
    reasons = [] if iperf else [{"case": "iperf3", "reason": "not installed: apt-get install iperf3"}]
    if parameters.links[0] is None:
        reasons.append({"case": "links", "reason": "no namespaces: both nodes are on loopback, unlimited"})
    if parameters.device == "cpu":
        reasons.append(
            {"case": "copies between device and host", "reason": "there is no device: KV is in host memory"}
        )
    with _nodes(parameters, progress) as nodes:
        for repeat in range(parameters.repeats):
            todo = head.missing(run.samples, wanted, repeat + 1)
            random.Random(parameters.seed + repeat).shuffle(todo)
            todo.sort(key=lambda cell: parameters.links.index(cell.gbit_s) if cell.what != "encoding" else -1)
            for cell in todo:
                sample = {"cell": cell.name, "what": cell.what, "case": cell.case, **nodes.measure(cell)}
                progress(f"{cell.name}, {repeat + 1} of {parameters.repeats}: {_told(sample)}")
                run = _with(run, [*run.samples, sample], reasons)
                save(run, out)
    return run


def _check(parameters: Parameters) -> None:
    if unknown := [way for way in parameters.ways if way not in WAYS]:
        raise HeadError(f"--way is {unknown[0]!r}; one of {', '.join(WAYS)}")
    if short := [length for length in parameters.prompts if length < LEAST_PROMPT]:
        raise HeadError(
            f"--prompt is {short[0]}; {LEAST_PROMPT} tokens are the least: the last is the decode node's"
        )
    if parameters.tokens < LEAST_PROMPT:
        raise HeadError(f"--tokens is {parameters.tokens}; tokens a second take {LEAST_PROMPT} or more")
    limited = any(gbit_s is not None for gbit_s in parameters.links)
    if limited and (reason := netns.missing()) is not None:
        raise HeadError(f"{reason}; or give --local: both nodes on loopback, without limits")


def _with(run: Run, samples: Sequence[Mapping[str, Any]], reasons: Sequence[Mapping[str, str]]) -> Run:
    lines, users = head.rows(samples), head.user_rows(samples)
    encodings, even = head.encoding_rows(samples), head.break_even(lines)
    results = {
        "rows": lines,
        "links": head.link_rows(samples),
        "encodings": encodings,
        "users": users,
        "break_even": even,
        "conclusions": [asdict(one) for one in head.conclusions(lines, encodings, users)],
        "recommendation": head.recommendation(lines, even),
        "not_measured": list(reasons),
    }
    return run.end(results, samples)


def _told(sample: Mapping[str, Any]) -> str:
    if sample["what"] == "iperf3":
        return f"{sample['gbit_s']:.2f} Gbit/s"
    if sample["what"] == "encoding":
        return f"{sample['encode_s'] * 1e3:.1f} ms, back {sample['decode_s'] * 1e3:.2f} ms"
    if sample["what"] == "users":
        return f"{sample['seconds'] * 1e3:.0f} ms until the last one has it"
    moved = sum(sample["phases_s"][name] for name in head.TRANSFER)
    return f"first token {sample['ttft_s'] * 1e3:.0f} ms, of which transfer {moved * 1e3:.0f} ms"


class _Nodes:
    """Two nodes that run, and the link between them."""

    def __init__(
        self,
        parameters: Parameters,
        clients: Sequence[Client],
        places: Sequence[tuple[str, Sequence[str]]],
        limit: Callable[[float | None], None],
    ) -> None:
        self._parameters, self._clients, self._places = parameters, clients, places
        self._limit, self._limited = limit, None  # type: tuple[Callable[[float | None], None], float | None]
        drawn, most = random.Random(parameters.seed), vocabulary(parameters.model)
        self._prompts = {
            length: [drawn.randrange(FIRST_ORDINARY_ID, most) for _ in range(length)]
            for length in parameters.prompts
        }
        self._right: dict[int, list[int]] = {}

    def warm(self) -> None:
        """Do everything once that the first time takes longer, and learn the right answers."""
        for length, prompt in self._prompts.items():
            for client in self._clients:
                ids = client("alone", prompt, self._parameters.tokens)["ids"]
                if ids != self._right.setdefault(length, ids):
                    raise HeadError("both nodes alone answer differently: are models and versions the same?")
            for way in self._parameters.ways:
                self._request(way, length)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Measure a cell once."""
        if cell.what == "encoding":
            return dict(self._clients[0]("encode", cell.case, self._prompts[max(self._prompts)]))
        if cell.gbit_s != self._limited:
            self._limit(cell.gbit_s)
            self._limited = cell.gbit_s
        link = {"link": link_name(cell.gbit_s)}
        if cell.what == "iperf3":
            streams = int(cell.case.rpartition("x")[2])
            return {**link, "streams": streams, "gbit_s": kv_bench.iperf3_gbit_s(self._places, streams)}
        if cell.what == "users":
            return {**link, **self._users(cell)}
        return {**link, **self._request(cell.case, cell.prompt)}

    def _request(self, case: str, length: int) -> dict[str, Any]:
        prompt, tokens = self._prompts[length], self._parameters.tokens
        phases = dict.fromkeys(head.PHASES, 0.0)
        nbytes = 0
        if case in ALONE:
            found = self._clients[ALONE.index(case)]("alone", prompt, tokens)
            began = found["began"]
            phases["prefill"] = found["filled"] - began
        else:
            sender, receiver = self._clients
            receiver.call("take_over", case, prompt[-1], tokens)
            try:
                began, filled, sent = sender("hand_over", case, prompt)
            except RuntimeError:
                with contextlib.suppress(RuntimeError):
                    receiver.result()
                raise
            found, nbytes = receiver.result(), sent.nbytes
            phases |= {"prefill": filled - began, "to_host": sent.to_host_s, "encode": sent.encode_s}
            phases |= {"network": found["at"] - sent.at, "decode_bytes": found["decode_s"]}
            phases |= {"to_device": found["to_device_s"]}
        if length in self._right and found["ids"] != self._right[length]:
            raise HeadError(f"{case}, {length} tokens: the answer is not that of one node alone")
        return {
            "prompt_tokens": length,
            "output_tokens": tokens,
            "kv_bytes": nbytes,
            "phases_s": {name: round(seconds, 7) for name, seconds in phases.items()},
            "ttft_s": round(found["first_at"] - began, 6),
            "decode_s": round(found["done_at"] - found["first_at"], 6),
        }

    def _users(self, cell: Cell) -> dict[str, Any]:
        way, _, how = cell.case.partition(", ")
        nbytes = self._parameters.user_mbytes << 20
        sender, receiver = self._clients
        receiver.call("users", Asked(way, cell.users, how == SEVERAL, nbytes, False))
        sender.call("users", Asked(way, cell.users, how == SEVERAL, nbytes, True))
        done, began = receiver.result(), sender.result()
        return {"users": cell.users, "kv_bytes": nbytes, "seconds": round(done - began, 6)}


@contextlib.contextmanager
def _nodes(parameters: Parameters, progress: Progress) -> Iterator[_Nodes]:
    with contextlib.ExitStack() as stack:
        limited = parameters.links[0] is not None
        network = stack.enter_context(netns.network(2, attach_host=True)) if limited else None
        places: list[tuple[str, Sequence[str]]] = [("127.0.1.1", ()), ("127.0.1.2", ())]
        if network is not None:
            places = [(node.address, node.prefix) for node in network.nodes]
        progress("starting two Ray nodes")
        ray = stack.enter_context(ray_nodes(places, OBJECT_STORE))
        progress(f"starting two nodes with {parameters.model}, on {parameters.device}")
        key, sides = secrets.token_bytes(32), socket.socketpair()
        threads = max(1, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else 1)
        clients = []
        for index, (address, prefix) in enumerate(places):
            ours, theirs = socket.socketpair()
            inherited = [theirs.fileno(), sides[index].fileno()]
            argv = ["-c", START, *map(str, inherited)]
            environment = {**ray.environment, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
            running = stack.enter_context(
                child(f"node-{index}", argv, environment, prefix=prefix, pass_fds=inherited)
            )
            theirs.close()
            commands = stack.enter_context(Connection(ours.detach()))
            clients.append(Client(f"node {index}", commands, running.check))
            clients[-1].call("place", Place(address, key, ray.address, threads, parameters.device))
        for side in sides:
            side.close()
        for client in clients:
            client.result()
            client("load", parameters.model)
        for way in parameters.ways:
            port = clients[1]("open", way, "")
            clients[0]("open", way, f"{places[1][0]}:{port}")
        nodes = _Nodes(parameters, clients, places, network.limit if network is not None else _no_limit)
        progress("warming up: every way once, and the right answers by each node alone")
        nodes.warm()
        yield nodes


def _no_limit(_: float | None) -> None:
    """Loopback has none."""
