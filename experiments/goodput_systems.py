"""What `bench goodput` compares: routers, in front of simulated workers or of served fake engines.

Every system is offered its loads through a ``Serve``; one bring-up serves all of them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from cluster.network import free_ports
from deployments.router import Policy
from deployments.snapshot import Slo
from experiments.children import child
from experiments.open_loop import Target, offer
from experiments.simulate import PLANT, simulate
from experiments.workload import MIXES, Arrival, Served, arrivals

STARTED_WITHIN_S: Final = 240.0
ANSWERED_WITHIN_S: Final = 90.0
CLASS: Final = "bench"
"""Of the requests that have objectives."""

Progress = Callable[[str], None]


class GoodputError(RuntimeError):
    """The benchmark could not be run; the message says why."""


@dataclass(frozen=True, slots=True)
class System:
    """What routes: a mode of the router; prompts that are no longer than a threshold are not divided."""

    name: str
    mode: Policy
    threshold: int = 0

    def policy(self, arrival: Arrival) -> Policy:
        """Return how a request is routed."""
        return self.mode if arrival.prompt > self.threshold else "never"


Serve = Callable[[Sequence[Arrival], System], list[Served]]
"""Offers a load to a system, and waits for all of its answers."""


@contextmanager
def simulated(objectives: Slo) -> Iterator[Serve]:
    """Offer loads to a model of the workers; only ``adaptive`` is told the objectives."""

    def serve(load: Sequence[Arrival], system: System) -> list[Served]:
        adaptive = system.mode == "adaptive"
        return simulate(load, system.policy, slo=objectives if adaptive else Slo(), admit=adaptive)

    yield serve


@contextmanager
def fake(file: Mapping[str, Any], seed: int, progress: Progress) -> Iterator[Serve]:
    """Serve a cluster file, and offer loads to it; a header says how each request is routed.

    Args:
        file: content of a cluster file, see ``cluster_file``.
        seed: of the load that warms it up.
        progress: told when it serves.

    """
    url = f"http://127.0.0.1:{file['gateway']['port']}"
    argv = ["-m", "handoff", "serve", "{folder}/cluster.yaml"]
    with child("goodput", argv, {}, {"cluster.yaml": json.dumps(file)}) as server:
        progress(f"{server.name} serves after {server.serves(url, STARTED_WITHIN_S):.0f} s")

        def serve(load: Sequence[Arrival], system: System) -> list[Served]:
            def routed(arrival: Arrival) -> Mapping[str, str]:
                mode = system.policy(arrival)
                return {"X-Handoff-Router": mode} | ({"X-Handoff-Class": CLASS} if mode == "adaptive" else {})

            salt = secrets.token_hex(8)  # nothing is cached of what another system was asked
            target = Target(url, "m", body={"cache_salt": salt})
            served = asyncio.run(offer(target, load, ANSWERED_WITHIN_S, own=routed))
            server.check()
            return served

        serve(arrivals(MIXES["balanced"], 2.0, 6.0, seed), System("adaptive", "adaptive"))
        yield serve


def cluster_file(model: str, slower: float, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """Return the cluster file: the simulated workers, so many times slower; one class has objectives."""
    plant = PLANT
    return {
        "name": f"goodput-{free_ports(1)[0]}",
        "model": model,
        "served_model_name": "m",
        "engine": {
            "max_model_len": 4096,
            "max_num_batched_tokens": plant.chunk,
            "max_num_seqs": plant.slots,
            "block_size": plant.block,
            "fake": {
                "kv_bytes_per_token": plant.kv_bytes,
                "kv_blocks": plant.kv_blocks,
                "prefill_tokens_s": 1 / (plant.step.token * slower),
                "step_ms": plant.step.base * 1e3 * slower,
                "step_ms_per_sequence": plant.step.sequence * 1e3 * slower,
            },
        },
        "slo": {"classes": {CLASS: {"ttft_ms": ttft_s * 1e3, "tpot_ms": tpot_s * 1e3}}},
        "gateway": {"port": free_ports(1)[0]},
        "nodes": {
            "all": {
                "role": "both",
                "slots": max(plant.prefills, plant.decodes),
                "cpus": plant.prefills + plant.decodes,
                "object_store": "256MiB",
            }
        },
        "workers": {"prefill": {"count": plant.prefills}, "decode": {"count": plant.decodes}},
        "roles": {"change": False},  # as simulated, and the same for each mode
    }
