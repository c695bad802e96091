"""What crosses a process boundary: gateway to worker, worker to gateway, worker to worker.

Every message is frozen. Engine requests and outputs travel as vLLM's own msgpack frames.
A stream of chunks ends with an explicit ``HandoverEnd``; one cut short is an error, never
a success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from actors.steps import StepModel
from kv.chunk import ChunkHeader, KVLayout
from kv.ladder import Cost
from kv.tls import TlsFiles
from kv.transport import Ticket

if TYPE_CHECKING:
    from kv.bucket import S3Settings

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to start a worker.

    Attributes:
        name: unique in the cluster; also the Ray actor's name.
        role: what the router asks of it first, until it is told another; every worker can do both.
        model: local path or hub id, read from the worker's own disk.
        engine: options passed to vLLM unchanged.
        transport: name of the KV transport; ``auto`` for all there are, and a ladder over them.
        s3: the bucket that is one of them, if there is one.
        tier: whether KV is kept in the bucket, and loaded from it.
        tls: this node's certificates; with them, nothing that cannot be encrypted is a transport.
        mapped: what a map says of the links out of its node, by the other node and transport: seconds, and
            seconds per byte.

    """

    name: str
    role: Role
    model: str
    engine: Mapping[str, Any]
    transport: str = "auto"
    s3: S3Settings | None = None
    tier: bool = False
    tls: TlsFiles | None = None
    mapped: Mapping[str, Mapping[str, Cost]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Which model files a worker read: equal values mean an equal model.

    Attributes:
        digest: hash over config, safetensors index and a sample of every weight file.
        path: where they were found on that node.

    """

    digest: str
    path: str


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a started worker tells about itself.

    ``address`` is where it takes channels, ``slots`` how many sequences it runs at once, ``chunk`` how many
    tokens a step computes at most.
    """

    name: str
    role: Role
    node: str
    pid: int
    model_files: ModelFiles
    layout: KVLayout
    max_model_len: int
    kv_blocks: int
    transports: tuple[str, ...]
    address: tuple[str, int]
    slots: int = 256
    chunk: int = 2048


@dataclass(frozen=True, slots=True)
class SendTo:
    """Prefill side of a handover: publish this request's KV to ``peer``.

    Attributes:
        peer: name of the decode worker.
        lease_s: what is published for the request is withdrawn after this long, whatever happens.

    """

    peer: str
    lease_s: float = 150.0


@dataclass(frozen=True, slots=True)
class ReceiveFrom:
    """Decode side of a handover: this request's KV comes from ``peer``.

    Attributes:
        peer: name of the prefill worker.
        prompt_tokens: length of the prompt whose KV arrives.
        first_token: the request's prompt ends with a placeholder that the first token,
            sampled by prefill, replaces on arrival. Otherwise decode computes the last
            prompt token itself and samples the first token.
        timeout_s: how long to wait for the whole KV cache.

    """

    peer: str
    prompt_tokens: int
    first_token: bool
    timeout_s: float


Handover = SendTo | ReceiveFrom


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk was published: its header, and the ticket to fetch its payload with.

    Attributes:
        rung: the transport that it was published through.
        source: the worker that published it, and can be asked for it ``Again``.
        timeout_s: how long a fetch may take before the rung counts as broken.
        cause: why this rung: ``first``, or what went wrong with the one before, in one word.
        reason: why this rung, for people.

    """

    header: ChunkHeader
    ticket: Ticket
    published_at: float
    rung: str
    source: str
    timeout_s: float
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class HandoverEnd:
    """Prefill is complete.

    Attributes:
        request_id: the engine request.
        chunks: how many chunks it was published in.
        tokens: how many prompt tokens they cover.
        first_token: the token that prefill sampled.
        nbytes: payload bytes in all chunks.

    """

    request_id: str
    chunks: int
    tokens: int
    first_token: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class HandoverFailed:
    """The KV will not come: prefill was aborted or could not publish."""

    request_id: str
    reason: str


Delivery = Chunk | HandoverEnd | HandoverFailed


@dataclass(frozen=True, slots=True)
class Again:
    """A chunk could not be fetched: its receiver asks for it over another rung.

    Attributes:
        request_id: the engine request.
        index: the chunk's position in it.
        rung: where it could not be fetched.
        cause: why, in one word (``kv.ladder.cause_of``).
        detail: why, for people.

    """

    request_id: str
    index: int
    rung: str
    cause: str
    detail: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A payload of one run, published to measure a rung; the peer answers with the seconds its fetch took."""

    rung: str
    ticket: Ticket
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Handed:
    """How a request's KV came.

    Attributes:
        nbytes: payload bytes in all chunks.
        rungs: the transports that chunks came over, in the order of their first use; none if decode had
            all of it cached.
        reason: why the last of them was used, for people.

    """

    nbytes: int
    rungs: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a worker loaded from the bucket's tier for a request, instead of computing it.

    Attributes:
        tokens: how many; the worker had those before them, and computed those after them.
        nbytes: of the pages that were read.
        reason: why, for people.

    """

    tokens: int
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Hello:
    """A gateway's first message to a worker.

    Attributes:
        client: the gateway's number, which its requests carry: outputs for it go to this channel.

    """

    client: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A request for a worker: a msgpack frame of vLLM's ``EngineCoreRequest``, and its part in a handover."""

    frame: tuple[bytes, ...]
    handover: Handover | None


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget these requests and free their blocks."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SenderLost:
    """The prefill worker of these requests is gone: what it has not announced will not come."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """A delivery from worker to worker; answered by ``Taken`` with its number."""

    number: int
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Taken:
    """The payload of a delivery has been written, or will never be wanted.

    ``seconds`` is what the fetch took, None if there was none.
    """

    number: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at a worker: prompt tokens not computed yet, sequences that decode or will, their context."""

    tokens: int = 0
    running: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker tells each gateway several times a second.

    Attributes:
        step: what its steps take, as estimated now.
        others: requests that other gateways have sent.
        rates: estimated bytes per second of KV to peers, by name; empty: as before.
        role: which it has now; None: as before.

    """

    step: StepModel
    others: Load = Load()
    rates: Mapping[str, float] = field(default_factory=dict)
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class Burden:
    """What the role of a worker is decided from.

    Attributes:
        role: which it has now.
        node: where it is.
        pid: of its process; another one has been started anew.
        prompts_s: what the prompts that wait there will take, or what is left of them.
        prompting_s: what steps took that computed prompts, since the start.
        decoding: sequences that it decodes; those that wait for their KV are not among them.
        context: tokens of those.
        slots: sequences that it runs at once.
        kv_tokens: tokens that its KV cache has room for.
        step: what its steps take.

    """

    role: Role
    node: str
    pid: int
    prompts_s: float
    prompting_s: float
    decoding: int
    context: int
    slots: int
    kv_tokens: int
    step: StepModel


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """What a worker has for one gateway after an engine step.

    Attributes:
        frame: msgpack of vLLM's ``EngineCoreOutputs`` (``actors/frames.py``); empty when there are none.
        failures: request id to reason, for requests whose handover failed.
        marks: request id to (stage, seconds on a monotonic clock) pairs, with a request's first
            output. Stages named ``peer.*`` are on the clock of the prefill worker.
        handed: request id to how its KV came, with its first output.
        load: the worker's state, several times a second.
        recalled: request id to what came from the tier, with its first output.

    """

    frame: tuple[bytes, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    handed: Mapping[str, Handed] = field(default_factory=dict)
    load: LoadReport | None = None
    recalled: Mapping[str, Recalled] = field(default_factory=dict)


@dataclass(slots=True)
class PrefixCounts:
    """Of the prompts that a worker has begun to compute, since the start; not those that were handed to it.

    Attributes:
        requests: how many.
        queries: their tokens.
        hits: those whose KV was in this worker's cache.
        tier_hits: those whose KV was loaded from the bucket's tier.

    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    tier_hits: int = 0

    def count(self, prompt: int, computed: int, recalled: int) -> None:
        """Count a prompt: its tokens, those that need not be computed, and those of them from the tier."""
        self.requests += 1
        self.queries += prompt
        self.hits += computed - recalled
        self.tier_hits += recalled

    def since(self, before: PrefixCounts | None) -> PrefixCounts:
        """Return what came after those of before; all of it if the worker was started anew."""
        if before is None or self.queries < before.queries:
            return replace(self)
        return PrefixCounts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Counters and gauges of a worker.

    Attributes:
        requests: requests accepted and not finished.
        engine_requests: those that the scheduler knows; finished ones too, while it keeps their blocks.
        kv_blocks_used: blocks of the KV cache that a request holds.
        sending: handovers being published.
        receiving: handovers being loaded.
        live_chunks: payloads published and not yet taken by the peer.
        live_bytes: their bytes.
        orphan_bytes: those of them that belong to no live request.
        expired_leases: payloads withdrawn because their lease ran out, since the start.
        steps: engine steps since the start.
        taken_chunks: chunks that came here by ``rung cause``, since the start.
        taken_bytes: their bytes by rung.
        failed: publications and fetches that failed here, by ``rung cause``, since the start.
        rates: estimated bytes per second by ``peer rung``; 0 while a rung is broken.
        mapped: the same as the cluster file's map has it, where it has one.
        computed_tokens: tokens whose KV this engine has computed itself, since the start.
        prefixes: what was found in caches, since the start.
        tier: counters of the bucket's tier by name (``actors/tier.py``), since the start; empty without one.
        stepped: requests that the engine steps.
        waiting: those that wait there, for a step or for KV.
        role: which it has now.
        role_changes: how often it got a role, by ``role reason``, since the start.

    """

    requests: int
    engine_requests: int
    kv_blocks_used: int
    sending: int
    receiving: int
    live_chunks: int
    live_bytes: int
    orphan_bytes: int
    expired_leases: int
    steps: int
    taken_chunks: Mapping[str, int] = field(default_factory=dict)
    taken_bytes: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    mapped: Mapping[str, float] = field(default_factory=dict)
    computed_tokens: int = 0
    prefixes: PrefixCounts = field(default_factory=PrefixCounts)
    tier: Mapping[str, int] = field(default_factory=dict)
    stepped: int = 0
    waiting: int = 0
    role: Role = "prefill"
    role_changes: Mapping[str, int] = field(default_factory=dict)
