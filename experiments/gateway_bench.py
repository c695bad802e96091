"""What the gateway costs: CPU time for a request and for a token, added latency, and the router's decisions.

Two systems in one run, in turns: Handoff (`handoff serve` on the fake engine) and vLLM's own server with the
same fake engine in its engine core. It computes prompts in no time, so that serving is what is left. CPU time
is that of the process that listens; neighbours make it dearer, for both: ratios are of the same round.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import httpx
import psutil
import uvloop

from cluster.fake import FAKE, FakeEngine
from cluster.network import free_ports
from experiments.children import Child, child
from experiments.http_load import Load, offer
from experiments.results import Run
from experiments.router_bench import decisions
from experiments.undivided import options

KIND: Final = "bench-gateway"
HANDOFF, VLLM = "handoff", "vllm"
STARTED_WITHIN_S: Final = 240.0
PROMPT: Final = "def main():\n    return the sum of all numbers from one to ten"
PATH: Final = "/v1/completions"
SERVED_NAME: Final = "m"
ENGINE: Final[Mapping[str, Any]] = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 256,
}
FAKE_ENGINE: Final[Mapping[str, Any]] = {"kv_blocks": 8192, "step_ms_per_sequence": 0.2}
"""Prompts take no time. Tokens after the first come no faster than a gateway can take them: of those that
come faster, vLLM puts several into one event, and what a token costs would depend on how many."""
IDLE_S: Final = 3.0
LEAST_STREAMS: Final = 24
SHORT, LONG = 8, 72
"""Tokens of the streams whose difference in CPU time is that of the tokens between."""

Progress = Callable[[str], None]


class GatewayBenchError(RuntimeError):
    """The benchmark could not be run; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured.

    Attributes:
        model: local path or hub id, for tokenizer and configuration.
        rounds: how often each case is measured.
        requests: in each measurement of requests.
        connections: at once, in those.
        streams: numbers of streams at once.
        alone: requests, one after the other, in each measurement of the latency.
        workers: numbers of workers that the router decides among.
        decisions: for each.

    """

    model: str
    rounds: int = 5
    requests: int = 600
    connections: int = 16
    streams: tuple[int, ...] = (1, 16, 64, 256)
    alone: int = 40
    workers: tuple[int, ...] = (10, 100, 1000)
    decisions: int = 2000


@dataclass(frozen=True, slots=True)
class System:
    """A server that is up: its address, and the process that listens there."""

    name: str
    url: str
    process: psutil.Process
    child: Child

    def cpu_s(self) -> float:
        """Return the CPU time that the process has taken."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def idle_share(self, seconds: float) -> float:
        """Return what share of a core the process takes while nothing is asked."""
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds


def measure(parameters: Parameters, progress: Progress) -> Run:
    """Bring both systems up, measure them in turns, then the router; return the run."""
    run = Run.begin(KIND, {**asdict(parameters), "prompt": PROMPT})
    samples: list[dict[str, Any]] = []
    with _handoff(parameters, progress) as ours, _vllm(parameters, progress) as theirs:
        systems = (ours, theirs)
        for system in systems:
            uvloop.run(_requests(system, parameters, stream=True))  # warm
        idle = {system.name: round(system.idle_share(IDLE_S), 4) for system in systems}
        for turn in range(parameters.rounds):
            samples += _round(systems if turn % 2 == 0 else systems[::-1], parameters, idle, turn)
            progress(f"round {turn + 1} of {parameters.rounds}: {_told(samples, turn)}")
    routed = decisions(parameters.workers, parameters.decisions)
    rows = rows_of(samples)
    return run.end({"rows": rows, "ratios": ratios_of(samples), "idle_cpu": idle, "router": routed}, samples)


# -- the systems --------------------------------------------------------------------------------------


def cluster_file(parameters: Parameters) -> dict[str, Any]:
    """Return the cluster file: a prefill and a decode worker with fake engines that take no time."""
    return {
        "name": f"gateway-{free_ports(1)[0]}",
        "model": parameters.model,
        "served_model_name": SERVED_NAME,
        "engine": {**ENGINE, FAKE: FAKE_ENGINE},
        "gateway": {"port": free_ports(1)[0]},
        "nodes": {"all": {"role": "both", "slots": 2, "cpus": 3, "object_store": "256MiB"}},
        "workers": {"prefill": {"count": 1}, "decode": {"count": 1}},
    }


@contextmanager
def _handoff(parameters: Parameters, progress: Progress) -> Iterator[System]:
    data = cluster_file(parameters)
    progress("starting handoff serve, with the fake engine")
    with child(
        HANDOFF, ["-m", "handoff", "serve", "{folder}/cluster.yaml"], {}, {"cluster.yaml": json.dumps(data)}
    ) as up:
        yield _ready(HANDOFF, up, data["gateway"]["port"], progress)


@contextmanager
def _vllm(parameters: Parameters, progress: Progress) -> Iterator[System]:
    """Run vLLM's own server; its engine core, in a process of its own, has our fake executor."""
    (port,) = free_ports(1)
    engine = {
        **ENGINE,
        "model": parameters.model,
        "served_model_name": SERVED_NAME,
        "host": "127.0.0.1",
        "port": port,
        "distributed_executor_backend": "actors.fake.FakeExecutor",
        "additional_config": {FAKE: FakeEngine.model_validate(FAKE_ENGINE).model_dump()},
        "async_scheduling": False,
        "disable_uvicorn_access_log": True,
    }
    argv = ["-m", "vllm.entrypoints.launchers.api_server.entry"]
    argv += [option for option in options(engine) if option != "--no-disable-uvicorn-access-log"]
    progress("starting vLLM's own server, with the same fake engine")
    with child(VLLM, argv, {}) as up:
        yield _ready(VLLM, up, port, progress)


def _ready(name: str, up: Child, port: int, progress: Progress) -> System:
    url = f"http://127.0.0.1:{port}"
    progress(f"{name} serves after {up.serves(url, STARTED_WITHIN_S):.0f} s")
    return System(name, url, _listener(name, port), up)


def _listener(name: str, port: int) -> psutil.Process:
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
        if listens and connection.pid:
            return psutil.Process(connection.pid)
    raise GatewayBenchError(f"no process of {name} is seen to listen on port {port}; run as the same user")


# -- one round ----------------------------------------------------------------------------------------


def _round(
    systems: Sequence[System], parameters: Parameters, idle: Mapping[str, float], turn: int
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for stream in (False, True):
        for system in systems:
            load, cpu_s = uvloop.run(_requests(system, parameters, stream))
            found.append(
                {
                    "case": "stream" if stream else "request",
                    "system": system.name,
                    "round": turn,
                    "cpu_us": round(cpu_s / parameters.requests * 1e6, 1),
                    "rps": round(parameters.requests / load.seconds, 1),
                    "handed_over": load.handed_over,
                }
            )
    for system in systems:
        alone = uvloop.run(_alone(system, parameters.alone))
        found += [{"case": "latency", "system": system.name, "round": turn, **one} for one in alone]
    for count in parameters.streams:
        for system in systems:
            one = uvloop.run(_tokens(system, count, idle[system.name]))
            found.append({"case": "token", "system": system.name, "round": turn, "streams": count, **one})
    for system in systems:
        system.child.check()
    return found


def body_of(tokens: int, stream: bool) -> bytes:
    """Return a request for exactly so many tokens."""
    asked = {"model": SERVED_NAME, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}
    return json.dumps({**asked, "temperature": 0.0, "stream": stream}).encode()


async def _requests(system: System, parameters: Parameters, stream: bool) -> tuple[Load, float]:
    before = system.cpu_s()
    load = await offer(system.url, PATH, body_of(1, stream), parameters.requests, parameters.connections)
    return load, system.cpu_s() - before


async def _alone(system: System, count: int) -> list[dict[str, float]]:
    """Return latencies of requests one after the other, Handoff's with what of it was the engine's."""
    found = []
    async with httpx.AsyncClient(base_url=system.url) as client:
        for _ in range(count):
            load = await offer(system.url, PATH, body_of(1, stream=False), 1, 1)
            one = {"ms": round(load.latencies[0] * 1e3, 4)}
            if system.name == HANDOFF:
                record = (await client.get(f"/handoff/requests/{load.request_ids[0]}")).json()
                ledger = record["ledger_ms"]
                one["engine_ms"] = round(ledger["queue"] + ledger["prefill"], 4)
            found.append(one)
    return found


async def _tokens(system: System, streams: int, idle: float) -> dict[str, float]:
    """Return what a token costs: the difference between long and short streams, less the CPU time at rest."""
    cpu, events, count = [], [], max(streams, LEAST_STREAMS)
    for tokens in (SHORT, LONG):
        before = system.cpu_s()
        load = await offer(system.url, PATH, body_of(tokens, stream=True), count, streams)
        cpu.append(system.cpu_s() - before - idle * load.seconds)
        events.append(load.events)
    tokens = (LONG - SHORT) * count
    return {
        "cpu_us": round((cpu[1] - cpu[0]) / tokens * 1e6, 2),
        "tokens_per_event": round(tokens / max(1, events[1] - events[0]), 2),
    }


# -- what came of it ----------------------------------------------------------------------------------


def rows_of(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each case and system: medians over the rounds."""
    engine_ms = median(one["engine_ms"] for one in samples if "engine_ms" in one)
    rows: list[dict[str, Any]] = []
    for case, streams, system in dict.fromkeys(
        (one["case"], one.get("streams"), one["system"]) for one in samples
    ):
        ours = [
            one
            for one in samples
            if (one["case"], one.get("streams"), one["system"]) == (case, streams, system)
        ]
        row: dict[str, Any] = {"case": case, "system": system, "samples": len(ours)}
        if case == "latency":
            row["ms_p50"] = round(median(one["ms"] for one in ours), 3)
            beside = [one["ms"] - one.get("engine_ms", engine_ms) for one in ours]
            row["added_ms_p50"] = round(median(beside), 3)
        else:
            row["cpu_us_p50"] = round(median(one["cpu_us"] for one in ours), 1)
        if case == "token":
            row["streams"] = streams
            row["tokens_per_event"] = round(median(one["tokens_per_event"] for one in ours), 2)
        if case in ("request", "stream"):
            row["per_cpu_s"] = round(1e6 / row["cpu_us_p50"], 1)
            row["rps_p50"] = round(median(one["rps"] for one in ours), 1)
        rows.append(row)
    return rows


def ratios_of(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return Handoff's CPU time by that of vLLM's server in the same round: medians over the rounds."""
    by: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for one in samples:
        if "cpu_us" in one:
            pair = by.setdefault((one["case"], one.get("streams")), {HANDOFF: [], VLLM: []})
            pair[one["system"]].append(one["cpu_us"])
    return [
        {
            "case": case,
            **({} if streams is None else {"streams": streams}),
            "cpu_ratio": round(median(a / b for a, b in zip(pair[HANDOFF], pair[VLLM], strict=True)), 3),
        }
        for (case, streams), pair in by.items()
    ]


def _told(samples: Sequence[Mapping[str, Any]], turn: int) -> str:
    cpu = {
        one["system"]: one["cpu_us"] for one in samples if one["round"] == turn and one["case"] == "request"
    }
    return ", ".join(f"{name} {us / 1e3:.2f} ms of CPU per request" for name, us in cpu.items())
