"""The machines file of `handoff plan`: devices and links, as measured, or by an assumption that is said."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.explain import explain
from cluster.patterns import NAME_PATTERN
from cluster.sizes import Size
from experiments.plan_model import PlanError

Positive = Annotated[float, Field(gt=0)]
Portion = Annotated[float, Field(gt=0, le=1)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(_Model):
    """`count` equal nodes; memory and speeds are those of each device.

    tflops: dense, 16 bit, as specified. bandwidth_gbyte_s: of its memory, as specified.
    prefill_tokens_s: measured with this very model, one device as if it held all of it; replaces tflops.
    prefill_at: prompt tokens of that measurement; those that are planned for, unless set.
    decode_tokens_s: measured the same way, one sequence; replaces bandwidth_gbyte_s.
    cpus: of the node, for the cluster file. kind: cpu is a node without an accelerator, one device each.
    """

    count: Annotated[int, Field(ge=1)] = 1
    devices: Annotated[int, Field(ge=1)] = 1
    kind: Literal["gpu", "cpu"] = "gpu"
    memory: Size = 24 * 10**9
    tflops: Positive = 100
    bandwidth_gbyte_s: Positive = 1000
    prefill_tokens_s: Positive | None = None
    prefill_at: Annotated[int, Field(ge=1)] | None = None
    decode_tokens_s: Positive | None = None
    cpus: Annotated[int, Field(ge=1)] | None = None


class Link(_Model):
    """gbit_s: one stream of large messages each way, as measured. latency_us: one way.

    collective_gbit_s: measured bus bandwidth of all-reduce; gbit_s, unless set.
    kv_gbit_s: measured rate of KV, cache to cache; `assume.kv_share` of gbit_s, unless set.
    """

    gbit_s: Positive
    latency_us: Annotated[float, Field(ge=0)] = 50
    collective_gbit_s: Positive | None = None
    kv_gbit_s: Positive | None = None

    @property
    def collective(self) -> float:
        """Bytes a second of an all-reduce's ring."""
        return (self.collective_gbit_s or self.gbit_s) * 1e9 / 8


class Pair(Link):
    """The link between two nodes, where it differs from `between`."""

    nodes: tuple[str, str]


class Links(_Model):
    """inside: between devices of a node. between: of nodes, except those in pairs."""

    inside: Link = Link(gbit_s=256, latency_us=10)
    between: Link = Link(gbit_s=10)
    pairs: tuple[Pair, ...] = ()


class Handover(_Model):
    """How KV gets from prefill to decode.

    ms: fixed time of each. overlap: it moves while prefill runs, chunk by chunk.
    first_token: who samples it; from prefill, it waits for no KV.
    encode_gbit_s, decode_gbit_s: rates of copies before and after the wire, if they take their own time.
    """

    ms: Annotated[float, Field(ge=0)] = 20
    overlap: bool = True
    first_token: Literal["prefill", "decode"] = "prefill"
    encode_gbit_s: Positive | None = None
    decode_gbit_s: Positive | None = None


class Assume(_Model):
    """Shares of what is specified that are reached, and what engines are told.

    compute: of tflops. bandwidth: of bandwidth_gbyte_s. memory: of a device's, for weights and KV.
    kv_share: of a link's gbit_s. chunk_tokens: prompt tokens of a step.
    """

    compute: Portion = 0.5
    bandwidth: Portion = 0.7
    memory: Portion = 0.9
    kv_share: Portion = 0.9
    chunk_tokens: Annotated[int, Field(ge=1)] = 2048


WHY: Final = {
    "assume.compute": "about what large models reach (PaLM trained at 46 % of peak)",
    "assume.bandwidth": "weights are read at less than the specified rate",
    "assume.memory": "of each device's memory for weights and KV; vLLM's gpu_memory_utilization",
    "assume.kv_share": "of a link for KV; Handoff's TCP had 0.945 of iperf3 at 10 Gbit/s",
    "assume.chunk_tokens": "prompt tokens in a step; vLLM's max_num_batched_tokens",
    "handover.ms": "fixed time of a handover; Handoff had 18 to 29 ms on two CPU cores",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One device: the node it is in, its index there, and what the file says of it."""

    node: str
    group: str
    index: int
    spec: Machine


class Machines(_Model):
    """The whole file."""

    nodes: Annotated[Mapping[Annotated[str, Field(pattern=NAME_PATTERN)], Machine], Field(min_length=1)]
    links: Links = Links()
    handover: Handover = Handover()
    assume: Assume = Assume()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = {device.node for device in self.devices()}
        for index, pair in enumerate(self.links.pairs):
            for node in pair.nodes:
                if node not in names:
                    raise ValueError(
                        f"links.pairs.{index}.nodes: there is no node {node!r}; "
                        f"valid: {', '.join(sorted(names))}"
                    )
        for name, machine in self.nodes.items():
            if machine.kind == "cpu" and machine.devices != 1:
                raise ValueError(
                    f"nodes.{name}.devices is {machine.devices}, and kind is cpu; such a node is one device"
                )
        return self

    def devices(self) -> list[Device]:
        """All devices, node by node, in the order of the file. Nodes are called GROUP-INDEX."""
        return [
            Device(f"{group}-{node}", group, index, spec)
            for group, spec in self.nodes.items()
            for node in range(spec.count)
            for index in range(spec.devices)
        ]

    def link(self, one: str, other: str) -> Link:
        """The link between two nodes, or inside one."""
        if one == other:
            return self.links.inside
        found = (pair for pair in self.links.pairs if set(pair.nodes) == {one, other})
        return next(found, self.links.between)

    def _between_is_used(self) -> bool:
        """Whether there are two nodes whose link no entry of `pairs` gives."""
        nodes = {device.node for device in self.devices()}
        given = {frozenset(pair.nodes) for pair in self.links.pairs}
        return any(frozenset((one, other)) not in given for one in nodes for other in nodes - {one})

    def kv_rate(self, link: Link) -> float:
        """Bytes of KV a second on the wire."""
        return (link.kv_gbit_s or link.gbit_s * self.assume.kv_share) * 1e9 / 8

    def assumed(self) -> Iterator[str]:
        """A line for each figure that the file does not give and a prediction may rest on."""
        for name, machine in self.nodes.items():
            given = machine.model_fields_set
            for field, unit, instead in (
                ("memory", "bytes", None),
                ("tflops", "TFLOP/s", "prefill_tokens_s"),
                ("bandwidth_gbyte_s", "GB/s", "decode_tokens_s"),
            ):
                if field not in given and instead not in given:
                    yield f"nodes.{name}.{field}: {getattr(machine, field):g} {unit}; give the device's"
            if machine.prefill_tokens_s and machine.prefill_at is None:
                yield f"nodes.{name}.prefill_at: prefill_tokens_s was measured at the planned prompt length"
        for kind in ("inside", "between"):
            link: Link = getattr(self.links, kind)
            if kind not in self.links.model_fields_set:
                if kind == "between" and not self._between_is_used():
                    continue
                yield f"links.{kind}: {link.gbit_s:g} Gbit/s, {link.latency_us:g} us; measure it"
            elif "latency_us" not in link.model_fields_set:
                yield f"links.{kind}.latency_us: {link.latency_us:g} us"
        for where, why in WHY.items():
            section, field = where.split(".")
            holder = getattr(self, section)
            if field not in holder.model_fields_set:
                yield f"{where}: {getattr(holder, field):g}; {why}"


def load(path: Path) -> Machines:
    """Read a machines file, YAML or JSON. Raises PlanError: where, what is there, what is valid."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"--cluster: {path} cannot be read ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"--cluster: {path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"--cluster: {path} holds no mapping; it needs at least the key `nodes`")
    try:
        return Machines.model_validate(data)
    except ValidationError as error:
        raise PlanError(f"--cluster: {path}: {explain(error, Machines)}") from error
