"""The cluster file: one YAML file from which every kind of bring-up is made.

`load` reads it into frozen models. Everything that can be wrong with a file alone is found there, so that
code below may take a `ClusterFile` for consistent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.aws import Aws
from cluster.consistent import mistakes
from cluster.errors import ClusterFileError
from cluster.explain import explain, listed
from cluster.fabric import FabricMap
from cluster.fabric import read as read_map
from cluster.fake import FAKE, FakeEngine
from cluster.names import AT_UNITS, HEAD, ROLES, GroupRole, Role, at, roles_of
from cluster.patterns import (
    BUCKET_PATTERN,
    ENDPOINT_PATTERN,
    LABEL_KEY_PATTERN,
    LABEL_VALUE_PATTERN,
    NAME_PATTERN,
    PREFIX_PATTERN,
    ROLE_PATTERN,
    URL_PATTERN,
    VARIABLE_PATTERN,
)
from cluster.placement import WorkerAsk
from cluster.pods import Kubernetes
from cluster.ranks import RANKS, ranks_of
from cluster.sizes import Size

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
LabelKey = Annotated[str, Field(pattern=LABEL_KEY_PATTERN)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE_PATTERN)]
Labels = Mapping[LabelKey, LabelValue]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Limits(_Model):
    """What a request to the gateway may take; beyond it clients get a 4xx that says so.

    head: bytes of its URL and headers. body: of its body.
    arrive_s: seconds for all of that to arrive. answer_s: seconds until its last token.
    sequences: that it may have generated at once: its prompts times its `n`.
    """

    head: Annotated[Size, Field(ge=1024)] = 64 * 2**10
    body: Annotated[Size, Field(ge=1024)] = 32 * 2**20
    arrive_s: Annotated[float, Field(gt=0)] = 60
    answer_s: Annotated[float, Field(gt=0)] = 600
    sequences: Annotated[int, Field(ge=1)] = 128


class Gateway(_Model):
    """Where the OpenAI API listens, and in how many replicas.

    api_keys_file: path, on the gateway's node, of a file with one key per line that only its owner can read;
    clients need one of them then.
    options: options of vLLM's server (chat_template, tool_call_parser, ...), passed on unchanged.
    otlp_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP) that is sent a trace of each request.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    replicas: Annotated[int, Field(ge=1)] = 1
    api_keys_file: Annotated[str, Field(min_length=1)] | None = None
    otlp_endpoint: Annotated[str, Field(pattern=URL_PATTERN)] | None = None
    limits: Limits = Limits()
    options: Mapping[str, Any] = {}


class NodeGroup(_Model):
    """`count` equal nodes. What they offer is per node.

    cpus, gpus: what Ray schedules with. memory: bytes that Ray accounts for, not a limit.
    object_store: bytes of shared memory, allocated when the node starts.
    slots: workers that one node takes, for each of its roles.
    model: path of the weights on these nodes, where it differs from the file's.
    engine: vLLM arguments that override the file's on these nodes.
    """

    role: GroupRole
    count: Annotated[int, Field(ge=1)] = 1
    cpus: Count = 1
    gpus: Count = 0
    memory: Size = 4 * 2**30
    object_store: Annotated[Size, Field(ge=75 * 2**20)] = 2**30
    slots: Annotated[int, Field(ge=1)] = 1
    labels: Labels = {}
    resources: Mapping[str, Count] = {}
    model: str | None = None
    engine: Mapping[str, Any] = {}

    @field_validator("resources")
    @classmethod
    def _resources_not_ours(cls, value: Mapping[str, int]) -> Mapping[str, int]:
        ours = {"CPU", "GPU", "memory", "object_store_memory", *ROLES}
        for name in value:
            if name in ours or name.startswith(("at:", "node:")):
                raise ValueError(f"{name!r} is set by handoff or Ray; use another resource name")
        return value

    @field_validator("labels")
    @classmethod
    def _labels_not_ours(cls, value: Labels) -> Labels:
        for key in value:
            if key.startswith(("ray.io/", "handoff.")):
                raise ValueError(f"{key!r} is set by handoff or Ray; use another label")
        return value


class WorkerGroup(_Model):
    """`count` workers of one role: what each asks for, and where it may go.

    most: so many while the load asks for more than `count` of them (see `roles`); by default no more.
    cpus, gpus: of each tensor-parallel rank of a worker's engine, which has one unless `engine` says more.
    node: name of the one node they may use. labels: labels that the node must carry.
    spread: put them on as many nodes as possible; otherwise fill one node before the next.
    engine: vLLM arguments that override the file's and the node group's.
    """

    count: Annotated[int, Field(ge=0)] = 1
    most: Annotated[int, Field(ge=1)] | None = None
    cpus: Share = 1
    gpus: Share = 0
    node: str | None = None
    labels: Labels = {}
    spread: bool = True
    engine: Mapping[str, Any] = {}


class Workers(_Model):
    """The workers of each role."""

    prefill: WorkerGroup = WorkerGroup()
    decode: WorkerGroup = WorkerGroup()

    def items(self) -> Iterator[tuple[Role, WorkerGroup]]:
        """The two roles with their groups."""
        yield "prefill", self.prefill
        yield "decode", self.decode


class S3(_Model):
    """A bucket that KV goes through when the direct path is down, and where it is kept for later.

    There is no key for a secret: credentials come from the environment of the nodes, or their machine's role.

    bucket: it must exist. prefix: clusters that share one share their KV.
    endpoint: host:port, if not AWS. scheme: https or http. ca_file: path of certificates to trust.
    role_arn: role to assume, with the external_id that its owner may ask for.
    expiry_s: objects older than this are deleted. size_limit: above it the oldest are deleted.
    timeout_s: deadline of uploads. connections: requests at once, per worker and direction.
    tier: keep the KV of prompts there, so that any worker can load what another has computed.
    """

    bucket: Annotated[str, Field(pattern=BUCKET_PATTERN)]
    prefix: Annotated[str, Field(pattern=PREFIX_PATTERN)] = "handoff"
    region: Annotated[str, Field(min_length=1)] = "us-east-1"
    endpoint: Annotated[str, Field(pattern=ENDPOINT_PATTERN)] | None = None
    scheme: Literal["https", "http"] = "https"
    ca_file: str | None = None
    role_arn: Annotated[str, Field(pattern=ROLE_PATTERN)] | None = None
    external_id: str | None = None
    expiry_s: Annotated[float, Field(gt=0)] = 86400
    size_limit: Size = 64 * 2**30
    timeout_s: Annotated[float, Field(gt=0)] = 30
    connections: Annotated[int, Field(ge=1, le=64)] = 8
    tier: bool = False


class Tls(_Model):
    """Encrypts KV on its way from worker to worker. Paths of PEM files, the same on every node.

    certificate, key: the node's own, without a passphrase. authority: the certificate that has signed every
    node's, and nobody else's: whoever it has signed may read KV.
    """

    certificate: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)]
    authority: Annotated[str, Field(min_length=1)]


class Hosts(_Model):
    """Machines that `ray up` reaches by ssh, one for each node of the file. Not needed on one machine.

    head: the address of the machine for Ray's services and the gateway, or a node that has them too.
    nodes: the address of each node. port: of Ray's control store. ssh_user, ssh_key: how to get in.
    env: variables of every Ray process. `ray` and `handoff` are on the path of a login shell there.
    """

    head: str
    nodes: Mapping[str, IPv4Address]
    port: Annotated[int, Field(ge=1, le=65535)] = 6379
    ssh_user: Annotated[str, Field(min_length=1)]
    ssh_key: Annotated[str, Field(min_length=1)] = "~/.ssh/id_ed25519"
    env: Mapping[Annotated[str, Field(pattern=VARIABLE_PATTERN)], str] = {}

    @property
    def head_address(self) -> str:
        """Address of the machine with Ray's services."""
        return str(self.nodes.get(self.head, self.head))

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name in value:
            if any(part in name.upper() for part in ("TOKEN", "SECRET", "PASSWORD")):
                raise ValueError(f"{name!r} looks like a secret, which does not belong in this file")
        return value


class Links(_Model):
    """The network between the nodes of a local cluster: each is a host of its own then. Needs root.

    gbit_s: of each node's link, in each direction; None: as fast as this machine. nodes: of single nodes.
    """

    gbit_s: Annotated[float, Field(gt=0, le=1000)] | None = None
    nodes: Mapping[str, Annotated[float, Field(gt=0, le=1000)]] = {}

    def of(self, node: str) -> float | None:
        """Gbit/s of a node's link."""
        return self.nodes.get(node, self.gbit_s)


class Roles(_Model):
    """When workers on nodes of `role: both` change between prefill and decode, by load and without a restart.

    Where no change helps, workers are added, up to `workers.ROLE.most`, and given up again.
    change: whether workers change their role.
    prompts_s: prefill is short of workers when prompts wait for more seconds than that at each; by default
    half of slo.ttft_ms, or 1. occupied: decode is when more than this share of its slots, its KV cache or of
    what slo.tpot_ms allows is taken. spare: the other role gives a worker if without it no more than this
    share of its limit would be used. smooth_s: time constant of all these figures. hold_s: a worker keeps a
    role for that long at least. idle_s: a worker that was added is given up when its role could have done
    without it for that long.
    """

    change: bool = True
    prompts_s: Annotated[float, Field(gt=0)] | None = None
    occupied: Annotated[float, Field(gt=0, le=1)] = 0.8
    spare: Annotated[float, Field(gt=0, lt=1)] = 0.7
    smooth_s: Annotated[float, Field(gt=0)] = 5
    hold_s: Annotated[float, Field(ge=0)] = 60
    idle_s: Annotated[float, Field(gt=0)] = 300


class Recompute(_Model):
    """How many prompt tokens decode workers may prefill for themselves, after handovers that failed.

    It protects the requests that they are decoding. Per gateway replica; beyond it clients get 503.
    tokens_per_s: sustained. burst_s: this many seconds' worth may come at once.
    """

    tokens_per_s: Annotated[float, Field(gt=0)] = 10_000
    burst_s: Annotated[float, Field(gt=0)] = 10


class Router(_Model):
    """Where requests go.

    mode: adaptive predicts what dividing a request and not dividing it would take, and does what is better.
    always divides whatever can be divided; never divides nothing; replicas neither, taking workers in turn.
    shadow: decide adaptively, tell it in records and metrics, and divide always.
    """

    mode: Literal["adaptive", "always", "never", "replicas"] = "adaptive"
    shadow: bool = False


class Objectives(_Model):
    """What requests should get. One that would not, as predicted, is refused at once with 429.

    ttft_ms: to the first token. tpot_ms: per token after it. None: no objective.
    """

    ttft_ms: Annotated[float, Field(gt=0)] | None = None
    tpot_ms: Annotated[float, Field(gt=0)] | None = None


class Slo(Objectives):
    """The objectives of requests without a class, and those of classes (header `X-Handoff-Class`)."""

    classes: Mapping[Name, Objectives] = {}


@dataclass(frozen=True)
class Node:
    """One node of the file: its name (`GROUP-INDEX`), its group's name and settings."""

    name: str
    group: str
    spec: NodeGroup


class ClusterFile(_Model):
    """A consistent cluster file: every role that workers ask for is offered, and named nodes exist.

    model: a local path (absolute once loaded) or a hub id. engine: vLLM arguments, passed on unchanged;
    a mapping under `fake` turns the fake engine on (`cluster/fake.py`).
    transport: how KV moves from prefill to decode workers: `auto` measures the ways there are and takes the
    fastest that works; otherwise only the one that is named: directly (tcp, nixl), or through Ray (plasma).
    s3: the bucket that they go through when no direct way works; none unless set.
    tls: certificates to encrypt KV with: it goes directly (tcp) then, or through the bucket, not through Ray.
    router: how requests are routed. slo: objectives, beyond which requests are refused; none unless set.
    roles: when workers on nodes of `role: both` change their role.
    map: path of what `handoff probe` wrote, from the file's folder; it holds for links between nodes until
    workers have measured them, and what they measure is held against it.
    hosts: the machines of the nodes, for `ray up`. aws: what it rents them with. kubernetes: what is needed
    where the nodes are pods. links: what links to emulate between nodes on this machine.
    """

    name: Name = "handoff"
    model: str
    served_model_name: str | None = None
    engine: Mapping[str, Any] = {}
    transport: Literal["auto", "tcp", "plasma", "nixl"] = "auto"
    s3: S3 | None = None
    tls: Tls | None = None
    hosts: Hosts | None = None
    aws: Aws | None = None
    kubernetes: Kubernetes | None = None
    links: Links | None = None
    recompute: Recompute = Recompute()
    router: Router = Router()
    slo: Slo = Slo()
    roles: Roles = Roles()
    map: FabricMap | None = None
    gateway: Gateway = Gateway()
    nodes: Annotated[Mapping[Name, NodeGroup], Field(min_length=1)]
    workers: Workers = Workers()

    @model_validator(mode="after")
    def _tls_can_be_kept(self) -> Self:
        if self.tls is not None and self.transport not in ("auto", "tcp"):
            raise ValueError(
                f"transport: {self.transport} cannot be encrypted, and the file has a `tls` section; "
                f"choose transport: tcp or auto, or leave tls out"
            )
        return self

    @model_validator(mode="after")
    def _roles_offered(self) -> Self:
        if HEAD in self.nodes:
            raise ValueError(f"nodes.{HEAD}: the name {HEAD!r} is taken by the node of Ray's own services")
        offered = {role for group in self.nodes.values() for role in roles_of(group.role)}
        for role, workers in self.workers.items():
            if workers.count and role not in offered:
                raise ValueError(
                    f"workers.{role} asks for {workers.count} worker(s), but no node group offers the role "
                    f"{role!r}; give a group under `nodes` role: {role} or role: both, "
                    f"or set workers.{role}.count to 0"
                )
        return self

    @model_validator(mode="after")
    def _some_workers_are_always_there(self) -> Self:
        for role, workers in self.workers.items():
            if workers.most is not None and not 1 <= workers.count <= workers.most:
                raise ValueError(
                    f"workers.{role}.most is {workers.most} and count is {workers.count}; give a count from "
                    f"1 to {workers.most}: so many are always there; or leave `most` out"
                )
        return self

    @model_validator(mode="after")
    def _names_unique_and_known(self) -> Self:
        names = [node.name for node in self.each_node()]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two nodes would be called {name!r}; rename one of the groups under `nodes`"
                )
        for role, workers in self.workers.items():
            if workers.node is not None and workers.node not in names:
                raise ValueError(
                    f"workers.{role}.node is {workers.node!r}, which is no node of this file; "
                    f"valid: {', '.join(names)}"
                )
        return self

    @model_validator(mode="after")
    def _hosts_are_those_of_the_nodes(self) -> Self:
        if self.hosts is None:
            return self
        names = [node.name for node in self.each_node()]
        for name in self.hosts.nodes:
            if name not in names:
                raise ValueError(
                    f"hosts.nodes.{name}: there is no such node in this file; valid: {', '.join(names)}"
                )
        if missing := [name for name in names if name not in self.hosts.nodes]:
            raise ValueError(f"hosts.nodes: the address of {', '.join(missing)} is missing")
        addresses = [str(address) for address in self.hosts.nodes.values()]
        if self.hosts.head not in names:
            try:
                addresses.append(str(IPv4Address(self.hosts.head)))
            except ValueError:
                raise ValueError(
                    f"hosts.head is {self.hosts.head!r}; give an IPv4 address, or one of the nodes: "
                    f"{', '.join(names)}"
                ) from None
        for address in addresses:
            if addresses.count(address) > 1:
                raise ValueError(
                    f"hosts: {address} is there twice; a machine takes one node, which may have more slots"
                )
        return self

    @model_validator(mode="after")
    def _aws_knows_the_nodes(self) -> Self:
        if self.aws is None:
            return self
        if self.hosts is not None:
            raise ValueError("aws: rents machines, and `hosts` names some that are there; leave one out")
        names = {HEAD, *self.nodes, *(node.name for node in self.each_node())}
        for name in self.aws.instances:
            if name not in names:
                raise ValueError(
                    f"aws.instances.{name}: there is no such group or node in this file; "
                    f"valid: {', '.join(sorted(names))}"
                )
        for name, group in ((HEAD, HEAD), *((node.name, node.group) for node in self.each_node())):
            if not {name, group} & self.aws.instances.keys():
                raise ValueError(f"aws.instances.{group}: is missing: the type of machine of {name}")
        return self

    @model_validator(mode="after")
    def _links_are_those_of_the_nodes(self) -> Self:
        names = [node.name for node in self.each_node()]
        for name in self.links.nodes if self.links is not None else ():
            if name not in names:
                raise ValueError(
                    f"links.nodes.{name}: there is no such node in this file; valid: {', '.join(names)}"
                )
        if self.links is not None and self.hosts is not None:
            raise ValueError(
                "links: are emulated on one machine, and `hosts` are many; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _map_knows_the_nodes(self) -> Self:
        names = {node.name for node in self.each_node()}
        if self.map is not None and len(names) > 1 and not self.map.nodes() & names:
            raise ValueError(
                f"map: has no node of this file, only {', '.join(sorted(self.map.nodes()))}; "
                f"leave the key out and make a map of this file: handoff probe FILE"
            )
        return self

    @model_validator(mode="after")
    def _pods_are_nodes(self) -> Self:
        names = {*self.nodes, *(node.name for node in self.each_node())}
        for name in self.kubernetes.pods if self.kubernetes is not None else ():
            if name not in names:
                raise ValueError(
                    f"kubernetes.pods.{name}: there is no such group or node in this file; "
                    f"valid: {', '.join(sorted(names))}"
                )
        return self

    @model_validator(mode="after")
    def _fake_options_valid(self) -> Self:
        for where, engine in self.engines():
            if FAKE in engine:
                _check_fake(f"{where}.{FAKE}", engine[FAKE])
        return self

    @model_validator(mode="after")
    def _ranks_valid(self) -> Self:
        for where, engine in self.engines():
            try:
                ranks_of(engine)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if RANKS in engine and where.startswith("nodes."):
                raise ValueError(
                    f"{where}: {RANKS} is {engine[RANKS]}, but what a worker asks its node for follows from "
                    f"it; give it under `engine` or under workers.ROLE.engine"
                )
        return self

    def engines(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Where engine options are, and which."""
        yield "engine", self.engine
        yield from ((f"nodes.{name}.engine", group.engine) for name, group in self.nodes.items())
        yield from ((f"workers.{role}.engine", workers.engine) for role, workers in self.workers.items())

    def faked(self) -> Self:
        """This file with the fake engine, and the options for it that the file has."""
        return self.model_copy(update={"engine": {FAKE: {}, **self.engine}})

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or Path(self.model).name

    def each_node(self) -> Iterator[Node]:
        """All nodes, in the order of the file. The head node is not among them."""
        for group, spec in self.nodes.items():
            for index in range(spec.count):
                yield Node(f"{group}-{index}", group, spec)

    def node(self, name: str) -> Node:
        """The node called `name`; raises KeyError for any other name."""
        for node in self.each_node():
            if node.name == name:
                return node
        raise KeyError(name)

    def ranks(self, role: Role) -> int:
        """How many tensor-parallel ranks the engine of each worker of a role has."""
        workers = self.workers.prefill if role == "prefill" else self.workers.decode
        return ranks_of({**self.engine, **workers.engine})

    def asks(self, most: bool = False) -> list[WorkerAsk]:
        """One ask for each worker, prefill first, named `ROLE-worker-INDEX`. All ranks go to one node.

        most: also for those that are there only while the load asks for them.
        """
        return [
            WorkerAsk(
                name=f"{role}-worker-{index}",
                role=role,
                cpus=workers.cpus * self.ranks(role),
                gpus=workers.gpus * self.ranks(role),
                node=workers.node,
                labels=dict(workers.labels),
                spread=workers.spread,
            )
            for role, workers in self.workers.items()
            for index in range(max(workers.count, workers.most or 0) if most else workers.count)
        ]

    def may_take(self, role: Role, node: str) -> bool:
        """Whether a worker on `node` may change to `role`. Raises KeyError for other names."""
        spec = self.node(node).spec
        workers = self.workers.prefill if role == "prefill" else self.workers.decode
        labelled = all(spec.labels.get(key) == value for key, value in workers.labels.items())
        return spec.role == "both" and workers.node in (None, node) and labelled

    def model_on(self, node: str) -> str:
        """Path or hub id of the weights on the node called `node`."""
        return self.node(node).spec.model or self.model

    def engine_for(self, role: Role, node: str) -> dict[str, Any]:
        """vLLM arguments of a worker of `role` on `node`.

        The worker group's override the node group's, which override the file's.
        """
        workers = self.workers.prefill if role == "prefill" else self.workers.decode
        return {**self.engine, **self.node(node).spec.engine, **workers.engine}

    def resources_of(self, node: Node) -> dict[str, int]:
        """Custom resources that Ray is told the node has."""
        slots: dict[str, int] = dict.fromkeys(roles_of(node.spec.role), node.spec.slots)
        return {**node.spec.resources, **slots, at(node.name): AT_UNITS}


def load(path: Path) -> ClusterFile:
    """Read and check the cluster file at `path`.

    Model paths that exist relative to the file's folder become absolute; anything else is kept as it is.
    Raises ClusterFileError, whose message has a line for each mistake: where, what is there, what is valid.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a safe one
    except OSError as error:
        raise ClusterFileError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ClusterFileError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ClusterFileError(f"{path}: holds no mapping; it needs at least the keys `model` and `nodes`")
    try:
        file = ClusterFile.model_validate(_with_paths(data, path.resolve().parent))
    except ClusterFileError as error:  # of the map
        raise ClusterFileError(f"{path}: {error}") from error
    except ValidationError as error:
        raise ClusterFileError(f"{path}: {explain(error, ClusterFile)}") from error
    if found := list(mistakes(file)):
        raise ClusterFileError(f"{path}: {listed(found)}")
    return file


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See the base class."""
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice; keep one of them", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check_fake(where: str, options: Any) -> None:
    try:
        FakeEngine.model_validate({} if options is None else options)
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error, FakeEngine)}") from error


def _with_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`data` with model paths made absolute and the map read; the models report wrong shapes."""

    def resolved(holder: Any) -> Any:
        if not isinstance(holder, dict) or not isinstance(holder.get("model"), str):
            return holder
        target = folder / Path(holder["model"]).expanduser()
        return {**holder, "model": str(target.resolve())} if target.exists() else holder

    if isinstance(data.get("map"), str):
        data = {**data, "map": read_map(folder / Path(data["map"]).expanduser())}
    nodes = data.get("nodes")
    if isinstance(nodes, dict):
        data = {**data, "nodes": {name: resolved(group) for name, group in nodes.items()}}
    return dict(resolved(data))
