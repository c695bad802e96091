"""What crosses a process boundary: gateway to worker, worker to gateway, worker to worker.

Every message is frozen. Engine requests and outputs travel as vLLM's own msgpack frames.
A stream of chunks ends with an explicit ``HandoverEnd``; one cut short is an error, never
a success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kv.chunk import ChunkHeader, KVLayout
from kv.transport import Ticket

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to start a worker.

    Attributes:
        name: unique in the cluster; also the Ray actor's name.
        role: what the router asks of it first; every worker can do both.
        model: local path or hub id, read from the worker's own disk.
        engine: options passed to vLLM unchanged.
        transport: name of the KV transport.

    """

    name: str
    role: Role
    model: str
    engine: Mapping[str, Any]
    transport: str = "plasma"


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
    """What a started worker tells about itself. ``address`` is where it takes channels."""

    name: str
    role: Role
    node: str
    pid: int
    model_files: ModelFiles
    layout: KVLayout
    max_model_len: int
    kv_blocks: int
    transport: str
    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class SendTo:
    """Prefill side of a handover: publish this request's KV to ``peer``."""

    peer: str


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
    """A chunk was published: its header, and the ticket to fetch its payload with."""

    header: ChunkHeader
    ticket: Ticket
    published_at: float


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
class Announce:
    """A delivery from worker to worker; answered by ``Taken`` with its number."""

    number: int
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Taken:
    """The payload of a delivery has been written, or will never be wanted."""

    number: int


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """What a worker has for one gateway after an engine step.

    Attributes:
        frame: msgpack of vLLM's ``EngineCoreOutputs`` (``actors/frames.py``); empty when there are none.
        failures: request id to reason, for requests whose handover failed.
        marks: request id to (stage, seconds on a monotonic clock) pairs, with a request's first
            output. Stages named ``peer.*`` are on the clock of the prefill worker.
        kv_bytes: request id to bytes of KV that were handed over to it, with its first output.

    """

    frame: tuple[bytes, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    kv_bytes: Mapping[str, int] = field(default_factory=dict)


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
        steps: engine steps since the start.

    """

    requests: int
    engine_requests: int
    kv_blocks_used: int
    sending: int
    receiving: int
    live_chunks: int
    live_bytes: int
    steps: int
