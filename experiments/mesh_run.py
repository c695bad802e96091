"""The mesh for real: two workers on hosts of their own, a tap on each link, and one node made slow.

Hosts are network namespaces of this machine. Finished cells are kept in the file after each, and are not run
again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil

from cluster import netns
from cluster.launch import NODE_NAME
from cluster.names import HEAD
from cluster.processes import marked
from cluster.state import StateDir
from experiments import mesh, mesh_tap
from experiments.children import child
from experiments.client import Client as Asking
from experiments.kv_station import Client
from experiments.local_pair import local_pair, vocabulary
from experiments.mesh import CHOICES, KIND, PAIRS, Choice
from experiments.results import Run, save
from experiments.suite import begun

Progress = Callable[[str], None]
PREFILL, DECODE = "prefill-0", "decode-0"
REST_S: Final = 5.0
PERIOD_S: Final = 0.03
"""A slow node is stopped and let go again so often."""
FIRST_ORDINARY_ID: Final = 16
ROUTER: Final = "X-Handoff-Router"


class MeshError(RuntimeError):
    """The experiment cannot run as it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured.

    Attributes:
        model: local path or hub id.
        gbit_s: of each node's link, each way.
        prompts: lengths in tokens of the prompts whose traffic is counted.
        answers: two lengths in tokens of their answers.
        requests: so many one after the other are counted together.
        speed: share of its time that a slow node may compute.
        repeats: how often everything is measured.
        seed: of the prompts.

    """

    model: str
    gbit_s: float = 1.0
    prompts: tuple[int, ...] = (256, 2048)
    answers: tuple[int, int] = (9, 65)
    requests: int = 3
    speed: float = 0.33
    repeats: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure, ``repeats`` times."""

    what: str
    case: str
    prompt: int
    tokens: int
    choice: Choice | None = None


def cells(parameters: Parameters) -> list[Cell]:
    """Return everything there is to measure."""
    found = [
        Cell("traffic", f"{prompt} tokens in, {tokens} out", prompt, tokens)
        for prompt in parameters.prompts
        for tokens in parameters.answers
    ]
    prompt, tokens = max(parameters.prompts), max(parameters.answers)
    return [*found, *(Cell("choice", choice.name, prompt, tokens, choice) for choice in CHOICES)]


def measure(parameters: Parameters, out: Path, progress: Progress) -> Run:
    """Measure what the file at ``out`` does not have yet, write it there after every cell, and return it."""
    if (reason := netns.missing()) is not None:
        raise MeshError(f"{reason}; what crosses a link is counted where the link is")
    if len(set(parameters.answers)) < 2:
        raise MeshError(
            "--tokens: two different lengths of the answer are needed: their difference is a token's"
        )
    run = begun(KIND, asdict(parameters), out, progress)

    def missing(repeats: int) -> list[Cell]:
        done = [one["case"] for one in run.samples]
        return [cell for cell in cells(parameters) if done.count(cell.case) < repeats]

    if not missing(parameters.repeats):
        progress(f"{out} has all of it; delete it to measure again")
        return run
    with _serving(parameters, progress) as nodes:
        for repeat in range(parameters.repeats):
            todo = missing(repeat + 1)
            random.Random(repeat).shuffle(todo)
            for cell in todo:
                sample = {"what": cell.what, "case": cell.case, **nodes.measure(cell)}
                progress(f"{cell.case}, {repeat + 1} of {parameters.repeats}: {_told(sample)}")
                run = _with(run, parameters, [*run.samples, sample], nodes)
                save(run, out)
    return run


def _with(run: Run, parameters: Parameters, samples: Sequence[Mapping[str, Any]], nodes: Nodes) -> Run:
    traffic, choices = mesh.traffic_rows(samples), mesh.choice_rows(samples)
    weights = sum(path.stat().st_size for path in Path(parameters.model).glob("*.safetensors"))
    results = {
        "rows": traffic,
        "choices": choices,
        "weights_bytes": weights,
        "links": nodes.links,
        "conclusions": [
            asdict(one) for one in mesh.conclusions(traffic, nodes.links if weights else [], weights, choices)
        ],
        "recommendation": mesh.recommendation(choices, parameters.speed),
    }
    return run.end(results, samples)


def _told(sample: Mapping[str, Any]) -> str:
    if sample["what"] == "choice":
        return f"first token {sample['ttft_s'] * 1e3:.0f} ms, {sample['total_s'] * 1e3:.0f} ms in all"
    return ", ".join(f"{pair} {sample['total'][pair]['bytes'] / 1e3:.0f} kB" for pair in PAIRS)


@dataclass(frozen=True, slots=True)
class Nodes:
    """What runs.

    Attributes:
        parameters: of the experiment.
        url, model: of the gateway.
        taps: on the links of the prefill and the decode node.
        addresses: of the nodes, by name.
        processes: of each node, by name.
        links: bytes that had crossed each node's link when it served.
        resting: what the taps counted in ``REST_S`` in which nothing was asked.

    """

    parameters: Parameters
    url: str
    model: str
    taps: Mapping[str, Client]
    addresses: Mapping[str, str]
    processes: Mapping[str, Sequence[psutil.Process]]
    links: Sequence[Mapping[str, Any]]
    resting: Mapping[str, mesh.Totals]
    drawn: random.Random

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Measure a cell once."""
        return self._traffic(cell) if cell.choice is None else self._choice(cell, cell.choice)

    def _ask(self, cell: Cell, mode: str) -> tuple[Any, Mapping[str, Any]]:
        prompt = [
            self.drawn.randrange(FIRST_ORDINARY_ID, vocabulary(self.parameters.model))
            for _ in range(cell.prompt)
        ]
        name = f"mesh-{self.drawn.randrange(1 << 40):x}"
        with Asking(self.url, self.model, {ROUTER: mode}) as client:
            timing = client.complete(prompt, cell.tokens, name)
            return timing, client.record(name)

    def _traffic(self, cell: Cell) -> dict[str, Any]:
        before, began = self._counts(), time.monotonic()
        kv_bytes = 0
        for _ in range(self.parameters.requests):
            _, record = self._ask(cell, "always")
            if not record.get("kv_bytes"):
                raise MeshError(f"{cell.case}: no KV was handed over ({record.get('mode')!r})")
            kv_bytes += int(record["kv_bytes"])
        after, seconds = self._counts(), time.monotonic() - began
        parts: dict[str, dict[str, Any]] = {"of_requests": {}, "services_above_rest": {}, "total": {}}
        for pair, node, peer in self._pairs():
            counted = mesh.since(before[node], after[node])
            between = {one: counts for one, counts in counted.items() if one[1] == self.addresses[peer]}
            found = mesh.divided(between, self.resting[node], seconds / REST_S)
            for part, counts in zip(parts, found, strict=True):
                parts[part][pair] = counts
        return {
            "prompt_tokens": cell.prompt,
            "output_tokens": cell.tokens,
            "requests": self.parameters.requests,
            "kv_bytes": kv_bytes,
            "seconds": round(seconds, 3),
            **parts,
        }

    def _pairs(self) -> list[tuple[str, str, str]]:
        """(pair, the node whose tap counts it, the other one)."""
        return list(zip(PAIRS, (PREFILL, DECODE, PREFILL), (HEAD, HEAD, DECODE), strict=True))

    def _counts(self) -> dict[str, mesh.Totals]:
        return {name: tap("counts") for name, tap in self.taps.items()}

    def _choice(self, cell: Cell, choice: Choice) -> dict[str, Any]:
        name = {None: None, "prefill": PREFILL, "decode": DECODE, "gateway": HEAD}[choice.slow]
        with contextlib.ExitStack() as stack:
            if name is not None:
                stack.enter_context(slow(self.processes[name], self.parameters.speed))
            timing, record = self._ask(cell, choice.mode)
        handed = bool(record.get("kv_bytes"))
        if handed != (choice.mode == "always"):
            raise MeshError(f"{choice.name}: asked for router mode {choice.mode}, got {record.get('mode')!r}")
        return {
            "ttft_s": round(timing.ttft_ms / 1e3, 6),
            "tpot_s": round(timing.tpot_ms / 1e3, 6),
            "total_s": round(timing.arrivals[-1].at - timing.sent, 6),
        }


@contextlib.contextmanager
def slow(processes: Sequence[psutil.Process], share: float) -> Iterator[None]:
    """Let processes compute only a share of the time: they are stopped and continued, all at once."""
    over = threading.Event()

    def told(number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def run() -> None:
        while not over.wait(share * PERIOD_S):
            told(signal.SIGSTOP)
            over.wait((1 - share) * PERIOD_S)
            told(signal.SIGCONT)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        told(signal.SIGCONT)


@contextlib.contextmanager
def _serving(parameters: Parameters, progress: Progress) -> Iterator[Nodes]:
    from deployments.local import served

    file = local_pair("mesh", parameters.model, links={"gbit_s": parameters.gbit_s})
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(served(file, progress))
        plan = StateDir.of(file.name).plan()
        assert plan is not None, "it has just been brought up"
        processes = _by_node(marked(plan.marker))
        taps = {name: _tap(stack, name, processes[name][0].pid) for name in (PREFILL, DECODE)}
        links = []
        for name, tap in taps.items():
            received, sent = tap("link")
            links.append({"node": name, "received_bytes": received, "sent_bytes": sent})
        addresses = {node.name: node.address for node in plan.nodes}
        drawn = random.Random(parameters.seed)
        workers = {name: _workers(found) for name, found in processes.items()}
        nodes = Nodes(parameters, serving.url, serving.model, taps, addresses, workers, links, {}, drawn)
        progress("warming up")
        for cell in cells(parameters):
            if cell.what == "traffic":
                for mode in ("always", "never"):
                    nodes._ask(cell, mode)
        progress(f"counting what crosses the links while nothing is asked: {REST_S:g} s")
        before = nodes._counts()
        time.sleep(REST_S)
        after = nodes._counts()
        resting = {name: mesh.since(before[name], after[name]) for name in taps}
        yield Nodes(parameters, serving.url, serving.model, taps, addresses, workers, links, resting, drawn)


def _by_node(processes: Sequence[psutil.Process]) -> dict[str, list[psutil.Process]]:
    """Processes of a cluster by the name of their node."""
    found: dict[str, list[psutil.Process]] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            name = process.environ().get(NODE_NAME)
            if name is not None:
                found.setdefault(name, []).append(process)
    return found


def _workers(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that Ray runs actors in: a node whose raylet stood still would be called dead."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if (process.cmdline() or [""])[0].startswith("ray::"):
                found.append(process)
    return found


def _tap(stack: contextlib.ExitStack, name: str, pid: int) -> Client:
    ours, theirs = socket.socketpair()
    prefix = ("nsenter", f"--net=/proc/{pid}/ns/net", "--")
    argv = ["-c", mesh_tap.START, str(theirs.fileno())]
    running = stack.enter_context(child(f"tap-{name}", argv, {}, prefix=prefix, pass_fds=[theirs.fileno()]))
    theirs.close()
    tap = Client(f"tap of {name}", stack.enter_context(Connection(ours.detach())), running.check)
    tap("place")
    if os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
        raise MeshError(f"{name} is in this process's own network: its link cannot be told from others")
    return tap
