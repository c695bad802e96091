"""The run of `handoff verdict`: a real engine's steps, the model's KV, the link, and every contender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from experiments import verdict, verdict_engine
from experiments.local_pair import CPUS, ENGINE, OBJECT_STORE
from experiments.plan_file import shown
from experiments.plan_machines import Assume
from experiments.plan_model import read
from experiments.probe_map import read as read_map
from experiments.probe_map import ways
from experiments.results import Run
from experiments.simulate import Plant
from experiments.verdict import KIND, Parameters, VerdictError

SLOTS = 16
"""Sequences at once in an engine; what was measured ends at 8."""
Progress = Callable[[str], None]


def measure(parameters: Parameters, progress: Progress) -> Run:
    """Measure one engine, judge every contender, and return the run."""
    run = Run.begin(KIND, asdict(parameters))
    kv = read(parameters.model).kv_per_token
    measured = verdict_engine.measure(parameters.model, progress)
    if measured.missing is not None:
        progress(f"no energy: {measured.missing}")
    plant = Plant(
        chunk=int(ENGINE["max_num_batched_tokens"]),
        slots=SLOTS,
        kv_bytes=round(kv),
        handover_s=parameters.handover_ms / 1e3,
        link_rate=parameters.gbit_s * 1e9 / 8,
    )
    found = verdict.judged(parameters, measured.step, plant, progress, measured.watts)
    watts = None if measured.watts is None else asdict(measured.watts)
    energy = {"watts": watts, "missing": measured.missing}
    head = {"step_s": asdict(measured.step), "kv_bytes_per_token": round(kv), "energy": energy}
    return run.end({**head, **found}, measured.samples)


def link_gbit_s(path: Path) -> float:
    """Return KV's rate on the slowest link of a map: a share of TCP's, as the planner has it."""
    found = ways(read_map(path))
    if not found:
        raise VerdictError(f"--map: {path} has no pair of nodes; probe a cluster with two or more")
    return min(way.gbit_s for way in found) * Assume().kv_share


def cluster_file(parameters: Parameters, contender: str, mix: str) -> str:
    """Return the text of a cluster file for a contender, on this machine, a core for each worker."""
    one = next(one for one in verdict.contenders(parameters.workers) if one.name == contender)
    node = {"cpus": CPUS, "object_store": OBJECT_STORE}
    content = {
        "name": "verdict",
        "model": parameters.model,
        "engine": {**ENGINE, "max_num_seqs": SLOTS},
        "router": {"mode": one.policy},
        "nodes": {
            "prefill": {"role": "prefill", "count": one.prefills, **node},
            "decode": {"role": "decode", "count": one.decodes, **node},
        },
        "workers": {"prefill": {"count": one.prefills}, "decode": {"count": one.decodes}},
    }
    return shown(content, f"{contender} by `handoff verdict`, for the mix {mix}: docs/verdict.md.")
