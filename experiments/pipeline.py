"""A model in pipeline stages over Ray nodes: what is split how and why, the items of the check, claims. Pure.

The bring-up of a published report (R5 in ``published.json``): heads that do not divide by the number of
devices, layers that do, weights and KV of each stage, and the fabric's figures by themselves.
docs/experiments.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from experiments import plan, plan_costs
from experiments.conclusions import Conclusion, ms_p50
from experiments.plan_machines import Link, Machines
from experiments.plan_model import PlanError, Shape
from experiments.probe_map import EACH_NODE

KIND: Final = "pipeline"
PLANNED, EVEN = "as planned", "split evenly"
STREAMS: Final = (1, 8)
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_LAST: Final = ("lm_head.", "model.norm.")


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine and one state of its nodes: so many stages, and whether the last one's node is slow."""

    stages: int
    slow: bool = False
    split: str = PLANNED

    @property
    def name(self) -> str:
        """What it is called in the file."""
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        return f"{stages}, one slow, {self.split}" if self.slow else stages


def setups(sizes: Sequence[int], slow: float | None) -> list[Setup]:
    """Return everything there is to measure; the slow node is the last of two, or of the smallest size."""
    found = [Setup(size) for size in sorted(set(sizes))]
    several = [size for size in sizes if size > 1]
    if slow is not None and several:
        found += [Setup(min(several), True, split) for split in (EVEN, PLANNED)]
    return found


@dataclass(frozen=True, slots=True)
class Split:
    """Layers of each stage, and why; what tensor parallel of the same size would be."""

    layers: tuple[int, ...]
    reason: str
    tensor_parallel: bool
    tensor_reason: str


def machines(speeds: Sequence[float], memory: int, link: Link) -> Machines:
    """Return the planner's machines: nodes that differ in speed only; what the speeds are of, is assumed."""
    nodes = {
        f"stage-{index}": {
            "kind": "cpu",
            "memory": memory,
            "tflops": speed,
            "bandwidth_gbyte_s": 10 * speed,
        }
        for index, speed in enumerate(speeds)
    }
    return Machines.model_validate({"nodes": nodes, "links": {"between": link.model_dump()}})


def split(shape: Shape, speeds: Sequence[float], memory: int, link: Link, load: plan.Load) -> Split:
    """Ask the planner how layers go over nodes of these relative speeds. Raises PlanError if they cannot."""
    count = len(speeds)
    name = f"pipeline-{count}" if count > 1 else "single"
    found = plan.plan(shape, machines(speeds, memory, link), load)
    best = next((one for one in found.ranked if one.layout.name == name), None)
    if best is None:
        why = next(
            (one.reason for one in found.rejected if one.name == name), "the planner has no such layout"
        )
        raise PlanError(f"{shape.name} cannot go over {count} nodes: {why}")
    layers = tuple(stage.layers for stage in best.layout.decode[0].stages)
    return Split(layers, _why(shape, layers, speeds), *_tensor(shape, count, link, load))


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Return as equal shares as there are, the first ones larger: the split that asks nobody."""
    return tuple(layers // stages + (index < layers % stages) for index in range(stages))


def _why(shape: Shape, layers: Sequence[int], speeds: Sequence[float]) -> str:
    shares = "/".join(map(str, layers))
    if len(layers) == 1:
        return f"all {shape.layers} layers on one node"
    if len(set(speeds)) == 1:
        return f"{shape.layers} equal layers over {len(layers)} equally fast nodes: {shares}"
    slowest = max(count / speed for count, speed in zip(layers, speeds, strict=True))
    plain = even(shape.layers, len(layers))
    of_even = max(count / speed for count, speed in zip(plain, speeds, strict=True))
    return (
        f"{shape.layers} equal layers over nodes of speed {', '.join(f'{one:g}' for one in speeds)}: "
        f"{shares}; the slowest stage takes as long as {slowest:.3g} layers at speed 1, split evenly "
        f"({'/'.join(map(str, plain))}) {of_even:.3g}"
    )


def _tensor(shape: Shape, ranks: int, link: Link, load: plan.Load) -> tuple[bool, str]:
    if ranks == 1:
        return True, "one rank has all heads"
    if (why := plan.divisible(shape, ranks)) is not None:
        return False, f"impossible: {why}"
    count, size = plan_costs.all_reduces(shape), plan_costs.activation_bytes(shape, load.prompt)
    waited = count * plan_costs.all_reduce_seconds(size, ranks, link)
    return True, (
        f"possible: {shape.heads} attention and {shape.kv_heads} key-value heads divide by {ranks}; a prompt "
        f"of {load.prompt} tokens would wait for {count} all-reduces of {size / 1e6:.2f} MB, predicted "
        f"{waited * 1e3:.0f} ms on this link"
    )


def activations(shape: Shape, tokens: int) -> int:
    """Bytes that a stage sends the next for so many tokens: hidden states and the residual, 16 bit each."""
    return int(2 * plan_costs.activation_bytes(shape, tokens))


# -- weights


def tensors(folder: Path) -> dict[str, int]:
    """Return the bytes of every tensor in a model's safetensors files, by name."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        found |= {name: one["data_offsets"][1] - one["data_offsets"][0] for name, one in header.items()}
    return found


def weights(sizes: Mapping[str, int], stages: Sequence[Sequence[int]], tied: bool) -> list[int]:
    """Return the bytes of weights of each stage, which is given by its layers.

    Outside of layers, the last stage has the head and what is before it, the first one the rest; an
    embedding that is the head too is on both.
    """
    found = [0] * len(stages)
    holder = {layer: index for index, layers in enumerate(stages) for layer in layers}
    for name, size in sizes.items():
        if (match := _LAYER.search(name)) is not None:
            if (at := holder.get(int(match[1]))) is not None:
                found[at] += size
        elif name.startswith(_LAST):
            found[-1] += size
        else:
            found[0] += size
            if tied and len(stages) > 1 and "embed" in name:
                found[-1] += size
    return found


# -- rows


def rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each setup that has an engine and answers: times at the longest prompt, medians."""
    lines = []
    engines = {one["case"]: one for one in samples if one["what"] == "engine"}
    for name, engine in engines.items():
        given = [one for one in samples if one["what"] == "answer" and one["case"] == name]
        if not given:
            continue
        most = max(one["prompt_tokens"] for one in given)
        timed = [one for one in given if one["prompt_tokens"] == most]
        equal = sum(one["equal"] for one in given)
        wrong = [one for one in given if not one["equal"]]
        told = f"{equal} of {len(given)} answers equal the held-out ones, token by token"
        if wrong:
            first = wrong[0]
            told += (
                f"; at {first['prompt_tokens']} prompt tokens they differ from token {first['differs_at']} on"
            )
        outputs = {"item": "outputs", "ok": not wrong, "told": told}
        facts = {key: value for key, value in engine.items() if key not in ("what", "case", "checks")}
        lines.append(
            {
                "setup": name,
                **facts,
                "split": "/".join(map(str, engine["layers"])),
                "prompt_tokens": most,
                "ttft_ms_p50": ms_p50([one["ttft_s"] for one in timed]),
                "tpot_ms_p50": ms_p50([_tpot(one) for one in given]),
                "total_ms_p50": ms_p50([one["total_s"] for one in timed]),
                "outputs": len(given),
                "outputs_equal": equal,
                "checks": [*engine["checks"], outputs],
                "samples": len(timed),
            }
        )
    return sorted(lines, key=lambda one: (one["slow"], one["stages_count"]))


def _tpot(one: Mapping[str, Any]) -> float:
    return float((one["total_s"] - one["ttft_s"]) / max(1, one["output_tokens"] - 1))


# -- claims

OF_LINE: Final = 0.9
"""Of the line rate, for TCP. Published: 0.99; here the limit counts headers too."""
OF_BUS: Final = 0.8
"""Of the link, for all-reduce. Published: 0.92."""
SHARE: Final = 1.25
"""Of an equal share of the weights: what the stage with the most may have."""
GAIN: Final = 1.1
DIVIDED_BY: Final = 3


def conclusions(
    lines: Sequence[Mapping[str, Any]], fabric: Sequence[Mapping[str, Any]], gbit_s: float | None
) -> list[Conclusion]:
    """Return what was claimed, for which there are figures."""
    found = []
    plain = [one for one in lines if not one["slow"] and one["stages_count"] > 1]
    if three := next((one for one in plain if one["stages_count"] == DIVIDED_BY), None):
        whole = three["outputs_equal"] == three["outputs"]
        figures = f"{three['tensor_reason']}; layers as {three['split']}, " + (
            "and the answers are right" if whole else "but answers differ"
        )
        claim = (
            "Three devices share the layers of a model whose heads three does not divide (42/42/42 of 126)"
        )
        found.append(Conclusion(claim, figures, whole and not three["tensor_parallel"]))
    if plain:
        told, fits = list[str](), True
        for one in plain:
            own = [stage["weights_bytes"] for stage in one["stages"]]
            share = max(own) * len(own) / sum(own)
            fits &= share <= SHARE
            told.append(f"{len(own)} stages {'/'.join(f'{size / 1e6:.1f}' for size in own)} MB")
        claim = f"A stage holds its part of the weights (72 of 215 GB; here: up to {SHARE} equal shares)"
        found.append(Conclusion(claim, "; ".join(told), fits))
    if lines:
        equal, outputs = (sum(one[key] for one in lines) for key in ("outputs_equal", "outputs"))
        claim = "Answers of every pipeline equal those that an undivided engine gave before"
        found.append(Conclusion(claim, f"{equal} of {outputs}, token by token", equal == outputs))
    if gbit_s is not None:
        found += _of_the_line(fabric, gbit_s)
    by = {one["setup"].rpartition(", ")[2]: one for one in lines if one["slow"]}
    if {PLANNED, EVEN} <= by.keys():
        planned, plainly = by[PLANNED], by[EVEN]
        ratio = plainly["ttft_ms_p50"] / planned["ttft_ms_p50"]
        figures = (
            f"{planned['split']} {planned['ttft_ms_p50']:.0f} ms, {plainly['split']} "
            f"{plainly['ttft_ms_p50']:.0f} ms to the first token: {ratio:.2f} times"
        )
        claim = f"On unequal nodes the planner's split beats an even one (here: {GAIN} times or more)"
        found.append(Conclusion(claim, figures, ratio >= GAIN))
    return found


def _of_the_line(fabric: Sequence[Mapping[str, Any]], gbit_s: float) -> list[Conclusion]:
    found = []
    rates = [one for one in fabric if one["what"] in ("iperf3", "tcp") and one["streams"] == max(STREAMS)]
    if rates:
        least = min(one["p50"] for one in rates)
        tool = rates[0]["what"]
        figures = f"{tool}, slowest pair {least:.3g} of {gbit_s:g} Gbit/s, {least / gbit_s:.0%}"
        claim = f"TCP with {max(STREAMS)} streams reaches the line rate (99 %; here: {OF_LINE:.0%} or more)"
        found.append(Conclusion(claim, figures, least >= OF_LINE * gbit_s))
    bus = [one for one in fabric if one["what"] == "all-reduce"]
    if bus:
        least = min(one["p50"] for one in bus)
        figures = f"{least:.3g} GB/s of {gbit_s / 8:.3g}, {least * 8 / gbit_s:.0%}, by {bus[0]['how']}"
        claim = f"All-reduce bus bandwidth comes near the link's (92 %; here: {OF_BUS:.0%} or more)"
        found.append(Conclusion(claim, figures, least * 8 >= OF_BUS * gbit_s))
    return found


def recommendation(lines: Sequence[Mapping[str, Any]], fabric: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what to do, from the figures."""
    told = []
    failed = [(one["setup"], check) for one in lines for check in one["checks"] if not check["ok"]]
    told += [f"{setup}: {check['item']} failed: {check['told']}." for setup, check in failed]
    plain = {one["stages_count"]: one for one in lines if not one["slow"]}
    if 1 in plain and len(plain) > 1 and not failed:
        parts = [
            f"{count} stages {one['ttft_ms_p50'] / plain[1]['ttft_ms_p50']:.2f} and "
            f"{one['tpot_ms_p50'] / plain[1]['tpot_ms_p50']:.2f} times"
            for count, one in sorted(plain.items())
            if count > 1
        ]
        told.append(
            f"First token and time per token against one stage, one request at a time: {'; '.join(parts)}. "
            "Stages make room for weights and KV; take as few as the model fits on."
        )
    trips = [one["p50"] for one in fabric if one["what"] == "round trip"]
    if trips:
        told.append(
            f"A token passes every link between stages: half of {median(trips):.0f} us each, and its compute."
        )
    return told


def link_of(fabric: Sequence[Mapping[str, Any]], gbit_s: float | None) -> Link:
    """Return the planner's link: the slowest measured pair, one stream, and half its round trip."""
    rates = [one["p50"] for one in fabric if one["what"] in ("iperf3", "tcp") and one["streams"] == 1]
    trips = [one["p50"] for one in fabric if one["what"] == "round trip"]
    bus = [one["p50"] for one in fabric if one["what"] == "all-reduce" and one["source"] != EACH_NODE]
    return Link(
        gbit_s=min(rates, default=gbit_s or 10.0),
        latency_us=max(trips, default=100.0) / 2,
        collective_gbit_s=min(bus) * 8 if bus else None,
    )
