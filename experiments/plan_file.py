"""A planned layout as a cluster file, where a cluster file can say it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.consistent import mistakes
from cluster.explain import explain, listed
from cluster.file import ClusterFile
from experiments.plan import Engine, Prediction
from experiments.plan_machines import Machines
from experiments.plan_model import PlanError


def inexpressible(one: Prediction) -> str | None:
    """Why a cluster file cannot say this layout; None if it can."""
    for engine in (*one.layout.decode, *one.layout.prefill):
        if len(engine.stages) > 1:
            return "a worker's engine has no pipeline stages (pipeline_parallel_size must be 1)"
        if len(engine.nodes) > 1:
            return "all ranks of a worker's engine are on one node"
    for engines in (one.layout.decode, one.layout.prefill):
        if len({device.spec.kind for engine in engines for device in engine.devices}) > 1:
            return "workers of one role are all on GPUs or all on CPUs"
    return None


def cluster_file(one: Prediction, machines: Machines, model: str, prompt_chunk: int) -> dict[str, Any]:
    """The content of a cluster file; raises PlanError if the layout cannot be said there."""
    if why := inexpressible(one):
        raise PlanError(
            f"--out: {one.layout.name} cannot be a cluster file: {why}; choose another by --layout"
        )
    if Path(model).is_file() and Path(model).name != "config.json":
        raise PlanError(f"--out: MODEL is the file {model}; a cluster file needs a model folder or a hub id")
    where = Path(model).expanduser()
    if where.exists():
        model = str((where.parent if where.is_file() else where).resolve())
    ranks = len(one.layout.decode[0].devices)
    content: dict[str, Any] = {
        "name": one.layout.name,
        "model": model,
        "engine": {"max_model_len": one.longest, "max_num_batched_tokens": prompt_chunk},
        "router": {"mode": "adaptive" if one.layout.prefill else "replicas"},
        "nodes": _nodes(one, machines),
        "workers": {
            "prefill": _workers(one.layout.prefill),
            "decode": _workers(one.layout.decode),
        },
    }
    if ranks > 1:
        content["engine"]["tensor_parallel_size"] = ranks
    if any(device.spec.kind == "cpu" for engine in one.layout.decode for device in engine.devices):
        content["engine"]["kv_cache_memory_bytes"] = min(row["kv_bytes"] for row in one.memory)
    else:
        content["engine"]["gpu_memory_utilization"] = machines.assume.memory
    return content


def shown(content: Mapping[str, Any], note: str) -> str:
    """The file's text, with `note` on top; raises PlanError if `handoff serve` would refuse it."""
    try:
        file = ClusterFile.model_validate(content)
    except ValidationError as error:
        raise PlanError(f"--out: {explain(error, ClusterFile)}") from error
    if found := list(mistakes(file)):
        raise PlanError(f"--out: {listed(found)}")
    head = "".join(f"# {line}\n" for line in note.splitlines())
    return head + yaml.safe_dump(dict(content), sort_keys=False)


def _workers(engines: tuple[Engine, ...]) -> dict[str, Any]:
    if not engines:
        return {"count": 0}
    return {"count": len(engines), "gpus": int(engines[0].devices[0].spec.kind == "gpu")}


def _nodes(one: Prediction, machines: Machines) -> dict[str, Any]:
    """Groups of nodes with the same devices and the same workers; nodes without workers are left out."""
    taken: dict[str, tuple[str, int, int]] = {}
    for device in machines.devices():
        prefill, decode = (
            sum(device.node in engine.nodes for engine in engines)
            for engines in (one.layout.prefill, one.layout.decode)
        )
        if prefill or decode:
            taken[device.node] = (device.group, prefill, decode)
    groups: dict[str, Any] = {}
    kinds = list(taken.values())
    for group, prefill, decode in dict.fromkeys(kinds):
        spec = machines.nodes[group]
        role = "both" if prefill and decode else "prefill" if prefill else "decode"
        alone = len({kind for kind in kinds if kind[0] == group}) == 1
        name = group if alone else f"{group}-{role}-{max(prefill, decode)}"
        groups[name] = {
            "role": role,
            "count": kinds.count((group, prefill, decode)),
            "cpus": max(spec.cpus or 0, spec.devices, prefill + decode),
            "gpus": spec.devices if spec.kind == "gpu" else 0,
            "slots": max(prefill, decode),
        }
    return groups
