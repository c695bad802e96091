"""Which layout a model should have on given machines: all that come into question, predicted and ranked.

Pure: from a model's shape, a machines file and a load to a `Plan`. Times are of a closed system: as many
requests as `Load.concurrency` are always in it, so throughput times latency is that number (Little's law).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final, Literal

from experiments import plan_costs as costs
from experiments.plan_machines import Device, Link, Machines
from experiments.plan_model import PlanError, Shape

Goal = Literal["latency", "ttft", "tpot", "throughput"]
GOALS: Final = ("latency", "ttft", "tpot", "throughput")


@dataclass(frozen=True, slots=True)
class Load:
    """Prompt and output tokens of each request, and how many requests there are at once."""

    prompt: int = 4096
    output: int = 256
    concurrency: int = 8

    @property
    def context(self) -> int:
        """Tokens of a request when it is done."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on devices that share each of them (tensor parallel, if there are several)."""

    devices: tuple[Device, ...]
    layers: int


@dataclass(frozen=True, slots=True)
class Engine:
    """One copy of the model: stages in order."""

    stages: tuple[Stage, ...]

    @property
    def devices(self) -> list[Device]:
        """All of them."""
        return [device for stage in self.stages for device in stage.devices]

    @property
    def nodes(self) -> set[str]:
        """Where they are."""
        return {device.node for device in self.devices}


@dataclass(frozen=True, slots=True)
class Layout:
    """Engines that serve whole requests, or prefill and decode apart, if `prefill` has any."""

    name: str
    decode: tuple[Engine, ...]
    prefill: tuple[Engine, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a layout is expected to do. Seconds; `parts` lead to the first token."""

    layout: Layout
    ttft: float
    tpot: float
    latency: float
    tokens_s: float
    longest: int
    memory: Sequence[Mapping[str, Any]]
    parts: Mapping[str, float]
    notes: Sequence[str] = ()

    @property
    def largest(self) -> str:
        """The greatest part of the time to the first token."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that cannot be, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Of KV that goes from one node to another.

    tokens: see `costs.break_even_tokens`. needed_gbit_s: at which KV moves as fast as it is made.
    """

    source: str
    target: str
    gbit_s: float
    transfer: float
    prefill: float
    tokens: float | None
    needed_gbit_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Layouts, best first; those that cannot be; links; and what all that rests on."""

    shape: Shape
    load: Load
    goal: Goal
    ranked: Sequence[Prediction]
    rejected: Sequence[Rejected]
    links: Sequence[BreakEven]
    assumptions: Sequence[str] = field(default_factory=tuple)


def plan(shape: Shape, machines: Machines, load: Load, goal: Goal = "latency") -> Plan:
    """Predict every layout and rank them by `goal`; what takes fewer devices is first among equals."""
    if shape.longest is not None and load.context > shape.longest:
        raise PlanError(
            f"--prompt {load.prompt} and --output {load.output} are {load.context} tokens together, and "
            f"{shape.name} has positions for {shape.longest} (max_position_embeddings); lower them"
        )
    scale = _Predictor(shape, machines, load)
    ranked, rejected = list[Prediction](), list[Rejected]()
    for layout in _layouts(shape, machines, scale, rejected):
        try:
            ranked.append(scale.predict(layout))
        except PlanError as error:
            rejected.append(Rejected(layout.name, str(error)))
    ranked.sort(key=lambda one: _rank(one, goal))
    best = {one.layout.name: one for one in reversed(ranked)}  # of layouts on different devices
    ranked = [one for one in ranked if best[one.layout.name] is one]
    kept = {one.name: one for one in rejected if one.name not in best}
    assumptions = (*machines.assumed(), *shape.notes)
    return Plan(shape, load, goal, ranked, list(kept.values()), scale.links(), assumptions)


def _rank(one: Prediction, goal: Goal) -> tuple[float, int]:
    value = {"latency": one.latency, "ttft": one.ttft, "tpot": one.tpot, "throughput": -one.tokens_s}[goal]
    used = sum(len(engine.devices) for engine in (*one.layout.decode, *one.layout.prefill))
    return float(f"{value:.6g}"), used


def divisible(shape: Shape, ranks: int) -> str | None:
    """Why a layer cannot be divided between `ranks` devices; None if it can.

    Each rank takes whole heads (Shoeybi et al. 2019, section 3). Fewer key-value heads than ranks
    are copied to several, evenly, as vLLM does.
    """
    if shape.heads % ranks:
        return (
            f"{shape.heads} attention heads do not divide by {ranks} ({shape.heads} = {ranks} x "
            f"{shape.heads // ranks} + {shape.heads % ranks}): a head cannot be shared between ranks"
        )
    if max(shape.kv_heads, ranks) % min(shape.kv_heads, ranks):
        return f"{shape.kv_heads} key-value heads do not divide by {ranks}: ranks would get unequal shares"
    return None


def split_layers(layers: int, speeds: Sequence[float], room: Sequence[int]) -> list[int] | None:
    """How many layers each stage gets, so that the slowest takes the least time; None if there is no room.

    Layers are equal, so giving each to the stage that will then be done first is optimal. speeds: layers a
    second. room: layers that a stage's memory has room for.
    """
    given = [0] * len(speeds)
    for _ in range(layers):
        open_stages = [i for i, most in enumerate(room) if given[i] < most]
        if not open_stages:
            return None
        best = min(open_stages, key=lambda i: ((given[i] + 1) / speeds[i], given[i], i))
        given[best] += 1
    return given if min(given) else None


def _layouts(
    shape: Shape, machines: Machines, scale: "_Predictor", rejected: list[Rejected]
) -> Iterator[Layout]:
    devices = machines.devices()
    total = len(devices)
    singles = [Engine((Stage((device,), shape.layers),)) for device in devices]
    for engine in {(e.devices[0].group): e for e in singles}.values():
        yield Layout("single", (engine,))
    if total > 1:
        yield Layout(f"replicas-{total}", tuple(singles))
        yield from _divided("split", singles, scale)
    for ranks in range(2, total + 1):
        groups = [tuple(devices[i : i + ranks]) for i in range(0, total - ranks + 1, ranks)]
        if why := divisible(shape, ranks):
            rejected.append(Rejected(f"tensor-{ranks}", why))
        else:
            engines = [Engine((Stage(group, shape.layers),)) for group in groups]
            yield from _copies(f"tensor-{ranks}", engines)
            yield from _divided(f"split-tensor-{ranks}", engines, scale)
        if ranks > shape.layers:
            rejected.append(Rejected(f"pipeline-{ranks}", f"{shape.layers} layers are fewer than stages"))
            continue
        try:
            engines = [scale.pipeline([(device,) for device in group]) for group in groups]
            yield from _copies(f"pipeline-{ranks}", engines)
        except PlanError as error:
            rejected.append(Rejected(f"pipeline-{ranks}", str(error)))
    yield from _mixed(shape, devices, scale, rejected)


def _copies(name: str, engines: Sequence[Engine]) -> Iterator[Layout]:
    for engine in {tuple(d.group for d in e.devices): e for e in engines}.values():
        yield Layout(name, (engine,))
    if len(engines) > 1:
        yield Layout(f"{name}-x{len(engines)}", tuple(engines))


def _divided(name: str, engines: Sequence[Engine], scale: "_Predictor") -> Iterator[Layout]:
    """Prefill goes to the engines whose compute is greatest against their memory bandwidth."""
    inclined = sorted(engines, key=scale.inclination, reverse=True)
    for prefill in range(1, len(inclined)):
        decode = len(inclined) - prefill
        yield Layout(
            f"{name}-{prefill}p{decode}d", tuple(inclined[prefill:]), prefill=tuple(inclined[:prefill])
        )


def _mixed(
    shape: Shape, devices: Sequence[Device], scale: "_Predictor", rejected: list[Rejected]
) -> Iterator[Layout]:
    """Tensor parallel inside nodes, pipeline parallel between them, over all devices."""
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    most = max(len(inside) for inside in nodes.values())
    for ranks in range(2, most + 1):
        groups = [
            tuple(n[i : i + ranks]) for n in nodes.values() for i in range(0, len(n) - ranks + 1, ranks)
        ]
        name = f"tensor-{ranks}-pipeline-{len(groups)}"
        if len(groups) < 2 or len(groups) > shape.layers or divisible(shape, ranks):
            continue
        try:
            yield Layout(name, (scale.pipeline(groups),))
        except PlanError as error:
            rejected.append(Rejected(name, str(error)))


class _Predictor:
    """Formulas of `plan_costs` applied to layouts, for one model, file and load."""

    def __init__(self, shape: Shape, machines: Machines, load: Load) -> None:
        self.shape, self.machines, self.load = shape, machines, load
        self.chunks = ceil(load.prompt / machines.assume.chunk_tokens)

    def predict(self, layout: Layout) -> Prediction:
        """Raises PlanError if a device has not enough memory."""
        engines = (*layout.decode, *layout.prefill)
        memory = [row for engine in engines for row in self.memory(engine)]
        room = {engine: self.room(engine) for engine in engines}
        longest = min(room.values())
        if self.shape.longest is not None:
            longest = min(longest, self.shape.longest)
        if layout.prefill:
            return self._divided(layout, memory, longest, room)
        return self._whole(layout, memory, longest, room)

    def pipeline(self, groups: Sequence[tuple[Device, ...]]) -> Engine:
        """The engine whose stages are `groups`; layers by speed. Raises PlanError without room."""
        speeds = [len(g) / max(self._compute((d,), 1.0) for d in g) for g in groups]
        ends = [self._embedding(i, len(groups)) for i in range(len(groups))]
        room = [
            int((min(map(self._usable, group)) * len(group) - end) // self.shape.layer_bytes)
            for group, end in zip(groups, ends, strict=True)
        ]
        layers = split_layers(self.shape.layers, speeds, [max(0, most) for most in room])
        if layers is None:
            raise PlanError(
                f"weights of {_gb(self.shape.weights)}: there is room for {sum(max(0, r) for r in room)} of "
                f"{self.shape.layers} layers ({'/'.join(str(max(0, r)) for r in room)} by stage)"
            )
        return Engine(tuple(Stage(g, n) for g, n in zip(groups, layers, strict=True)))

    def memory(self, engine: Engine) -> Iterator[Mapping[str, Any]]:
        """Of each device: weights, room for KV, layers. Raises PlanError where weights do not fit."""
        for index, stage in enumerate(engine.stages):
            end = self._embedding(index, len(engine.stages))
            weights = (stage.layers * self.shape.layer_bytes + end) / len(stage.devices)
            for device in stage.devices:
                left = self._usable(device) - weights
                if left <= 0:
                    raise PlanError(
                        f"{_gb(weights)} of weights do not fit on {device.node}: "
                        f"{_gb(self._usable(device))} of "
                        f"its {_gb(device.spec.memory)} per device can be used"
                    )
                yield {
                    "device": f"{device.node}/{device.index}",
                    "layers": stage.layers,
                    "weights_bytes": round(weights),
                    "kv_bytes": round(left),
                    "kv_bytes_per_token": self._kv(stage),
                }

    def room(self, engine: Engine) -> int:
        """Tokens whose KV fits. Raises PlanError unless one request of the load does."""
        room = int(min(row["kv_bytes"] // row["kv_bytes_per_token"] for row in self.memory(engine)))
        if room < self.load.context:
            raise PlanError(
                f"KV of one request of {self.load.context} tokens does not fit: weights leave room for {room}"
            )
        return room

    def inclination(self, engine: Engine) -> float:
        """How much an engine is made for prefill: its prefill speed by its decode speed."""
        return self._step(engine, 1) / sum(self.prefill(engine).values())

    def prefill(self, engine: Engine) -> dict[str, float]:
        """Parts of the seconds that a prompt takes: compute, and what parallelism adds to it."""
        shape, prompt = self.shape, self.load.prompt
        compute = [self._compute(stage.devices, stage.layers / shape.layers) for stage in engine.stages]
        size = costs.activation_bytes(shape, prompt / self.chunks)
        reduce = [
            self.chunks
            * costs.all_reduces(shape, stage.layers)
            * costs.all_reduce_seconds(size, len(stage.devices), self._slowest(stage.devices))
            for stage in engine.stages
        ]
        parts = {"compute": sum(compute)}
        if any(reduce):
            parts["all-reduce wait"] = sum(reduce)
        if len(engine.stages) > 1:
            hops = self._hops(engine, prompt / self.chunks)
            stages = [(c + r) / self.chunks for c, r in zip(compute, reduce, strict=True)]
            total = costs.pipeline_seconds(stages, hops, self.chunks)
            least = (
                max(stages) * self.chunks
            )  # what the slowest stage does; the bubble is waiting for the others
            share = sum(compute) / (sum(compute) + sum(reduce))
            behind = sum(hops) + (self.chunks - 1) * max(0.0, max(hops) - max(stages))
            parts = {"compute": least * share, "pipeline bubble": total - least - behind}
            parts["hops between stages"] = behind
            if any(reduce):
                parts["all-reduce wait"] = least * (1 - share)
        return parts

    def links(self) -> list[BreakEven]:
        """One for each kind of link: a group of nodes, the group that KV goes to, and the rate."""
        found: dict[tuple[str, str, float], BreakEven] = {}
        devices = {device.node: device for device in self.machines.devices()}
        for source in devices.values():
            for target in devices.values():
                if source.node == target.node and source.spec.devices == 1:
                    continue
                rate = self.machines.kv_rate(self.machines.link(source.node, target.node))
                prefill = self._compute((target,), 1.0)
                move = costs.move_seconds(self.shape, self.load.prompt, rate, self.machines.handover, 0, 1)
                tokens_s = self.load.prompt / prefill
                found.setdefault(
                    (source.group, target.group, rate),
                    BreakEven(
                        source.node,
                        target.node,
                        rate * 8 / 1e9,
                        move.wire + move.copies + move.fixed,
                        prefill,
                        costs.break_even_tokens(self.shape, rate, self.machines.handover, tokens_s),
                        self.shape.kv_per_token * tokens_s * 8 / 1e9,
                    ),
                )
        return list(found.values())

    def _whole(
        self, layout: Layout, memory: Sequence[Mapping[str, Any]], longest: int, room: Mapping[Engine, int]
    ) -> Prediction:
        """Engines whose decoding stands still while they prefill.

        An engine with b requests takes b prefills and `output` steps to serve them all. Each request goes
        to the engine that would be done first.
        """
        load, steps = self.load, max(1, self.load.output - 1)
        parts_of = [self.prefill(engine) for engine in layout.decode]
        prefills = [sum(parts.values()) for parts in parts_of]

        def lasts(index: int, batch: int) -> float:
            return batch * prefills[index] + steps * self._step(layout.decode[index], batch)

        batches = [0] * len(layout.decode)
        for _ in range(load.concurrency):
            free = [i for i, e in enumerate(layout.decode) if batches[i] < room[e] // load.context]
            if not free:
                break
            batches[min(free, key=lambda i: lasts(i, batches[i] + 1))] += 1
        rows = []
        for index, batch in enumerate(batches):
            if batch:
                rest = lasts(index, batch) - prefills[index]
                rows.append((batch, prefills[index], rest / steps, parts_of[index]))
        _, prefill, tpot, parts = max(rows, key=lambda row: row[1] + row[2] * steps)
        rate = sum(row[0] / (row[1] + row[2] * steps) for row in rows)
        held = sum(row[0] for row in rows)
        queue = (load.concurrency - held) / rate
        if queue:
            parts = {**parts, "queue": queue}
        latency = prefill + queue + tpot * steps
        notes = [*self._notes(layout.decode[0], parts), *_capped(held, load)]
        return Prediction(
            layout, prefill + queue, tpot, latency, rate * load.output, longest, memory, parts, notes
        )

    def _divided(
        self, layout: Layout, memory: Sequence[Mapping[str, Any]], longest: int, room: Mapping[Engine, int]
    ) -> Prediction:
        """Prefill engines take prompts one by one; decode engines only decode."""
        load, how = self.load, self.machines.handover
        steps = max(1, load.output - 1)
        parts = max((self.prefill(e) for e in layout.prefill), key=lambda p: sum(p.values()))
        prefill = sum(parts.values())
        wanted = ceil(load.concurrency / len(layout.decode))
        batches = [min(wanted, room[engine] // load.context) for engine in layout.decode]
        step = max(self._step(e, b) for e, b in zip(layout.decode, batches, strict=True))
        chunks = self.chunks if how.overlap else 1
        rate = min(
            self.machines.kv_rate(self.machines.link(one.node, other.node))
            for one in (d for e in layout.prefill for d in e.devices)
            for other in (d for e in layout.decode for d in e.devices)
        )
        move = costs.move_seconds(self.shape, load.prompt, rate, how, prefill, chunks)
        late = how.first_token == "decode"
        after = 0.0 if late else move.exposed / steps
        parts = dict(parts)
        if late:
            parts |= {"KV transfer": move.exposed, "decode's first step": step}
        capacity = min(
            sum(1 / sum(self.prefill(e).values()) for e in layout.prefill),
            sum(batches) / (steps * step),
            len(layout.prefill) / (move.wire + move.copies),
        )
        latency = max(sum(parts.values()) + (step + after) * steps, load.concurrency / capacity)
        ttft = latency - (step + after) * steps
        if ttft > sum(parts.values()) * 1.000001:
            parts["queue"] = ttft - sum(parts.values())
        note = (
            f"KV {move.size / 1e6:.1f} MB at {rate * 8 / 1e9:.3g} Gbit/s: "
            f"{_s(move.wire + move.copies)} to move "
            f"against {_s(prefill)} of prefill, {_s(move.exposed)} of it seen"
        )
        notes = [note, *self._notes(layout.prefill[0], parts), *_capped(sum(batches), load)]
        tokens_s = load.concurrency / latency * load.output
        return Prediction(layout, ttft, step + after, latency, tokens_s, longest, memory, parts, notes)

    def _notes(self, engine: Engine, parts: Mapping[str, float]) -> Iterator[str]:
        ranks = max(len(stage.devices) for stage in engine.stages)
        if ranks > 1:
            size = costs.activation_bytes(self.shape, self.load.prompt / self.chunks)
            wait = parts["all-reduce wait"]
            times = "" if self.chunks == 1 else f"{self.chunks} x "
            yield (
                f"{times}{costs.all_reduces(self.shape)} all-reduces of {size / 1e6:.1f} MB a prefill: "
                f"{_s(wait)} of "
                f"waiting, {wait / sum(parts.values()):.0%} of the time to the first token"
            )
        if len(engine.stages) > 1:
            layers = "/".join(str(stage.layers) for stage in engine.stages)
            idle = costs.bubble(len(engine.stages), self.chunks)
            yield f"layers {layers}; bubble {idle:.0%} of a prefill in {self.chunks} chunks"

    def _compute(self, devices: Sequence[Device], share: float) -> float:
        """Seconds of a prompt on devices that share the work evenly: the slowest decides."""
        flops = costs.prefill_flops(self.shape, self.load.prompt) * share / len(devices)
        assume, prompt = self.machines.assume, self.load.prompt
        return max(flops / costs.flops_rate(self.shape, d.spec, assume, prompt) for d in devices)

    def _step(self, engine: Engine, batch: float) -> float:
        """Seconds from one token of a sequence to its next, with `batch` sequences in the engine.

        Stages of a pipeline work on different sequences, an equal part of them each.
        """
        load, part = self.load, max(1.0, batch / len(engine.stages))
        context = load.prompt + load.output / 2
        total = sum(self._hops(engine, part))
        for stage in engine.stages:
            share = stage.layers / self.shape.layers / len(stage.devices)
            total += max(
                costs.step_seconds(self.shape, d, self.machines.assume, share, part, context, load.prompt)
                for d in stage.devices
            )
            size = costs.activation_bytes(self.shape, part)
            total += costs.all_reduces(self.shape, stage.layers) * costs.all_reduce_seconds(
                size, len(stage.devices), self._slowest(stage.devices)
            )
        return total

    def _hops(self, engine: Engine, tokens: float) -> list[float]:
        """Seconds of the activations of `tokens` from each stage to the next."""
        size = costs.activation_bytes(self.shape, tokens)
        pairs = zip(engine.stages, engine.stages[1:], strict=False)
        links = [self.machines.link(a.devices[0].node, b.devices[0].node) for a, b in pairs]
        return [size / (link.gbit_s * 1e9 / 8) + link.latency_us * 1e-6 for link in links]

    def _slowest(self, devices: Sequence[Device]) -> Link:
        nodes = [device.node for device in devices]
        pairs = [(one, two) for i, one in enumerate(nodes) for two in nodes[i + 1 :]] or [
            (nodes[0], nodes[0])
        ]
        return min((self.machines.link(*pair) for pair in pairs), key=lambda link: link.collective)

    def _usable(self, device: Device) -> float:
        return device.spec.memory * self.machines.assume.memory

    def _kv(self, stage: Stage) -> float:
        """Bytes of KV that a token takes on each device of a stage; copied key-value heads count twice."""
        heads = max(1.0, self.shape.kv_heads / len(stage.devices))
        return self.shape.kv_per_token * stage.layers / self.shape.layers * heads / self.shape.kv_heads

    def _embedding(self, index: int, stages: int) -> float:
        """Bytes of embedding and head on a stage; a tied head is kept on the last stage as well."""
        if stages == 1:
            return self.shape.embedding_bytes * (2 - self.shape.tied)
        return self.shape.embedding_bytes if index in (0, stages - 1) else 0


def _capped(held: int, load: Load) -> Iterator[str]:
    if held < load.concurrency:
        yield f"memory holds the KV of {held} of {load.concurrency} requests at once; the rest wait"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _s(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds >= 10
        else f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.1f} ms"
    )
