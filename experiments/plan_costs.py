"""What the planner's predictions are made of. Seconds, bytes, FLOPs; each formula names where it is from."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.plan_machines import Assume, Device, Handover, Link, Machine
from experiments.plan_model import Shape


def prefill_flops(shape: Shape, tokens: int) -> float:
    """FLOPs of reading a prompt.

    2 for each parameter and token (Kaplan et al. 2020, section 2.1: C_forward = 2N), and for attention
    2 x layers x heads x head_dim x tokens^2: half of PaLM's 4 (Chowdhery et al. 2022, appendix B, forward
    only), because a token sees only those before it.
    """
    return 2 * shape.active * tokens + 2 * shape.layers * shape.heads * shape.head_dim * tokens**2


def flops_rate(shape: Shape, machine: Machine, assume: Assume, prompt: int) -> float:
    """FLOPs a second of a device: what its measured prefill rate comes to, else a share of the specified.

    The share is PaLM's model FLOPs utilization (Chowdhery et al. 2022, section 4.1).
    """
    if machine.prefill_tokens_s is not None:
        at = machine.prefill_at or prompt
        return machine.prefill_tokens_s * prefill_flops(shape, at) / at
    return machine.tflops * 1e12 * assume.compute


def weights_read(shape: Shape, sequences: float) -> float:
    """Bytes of weights that a step of decoding reads.

    Each weight is read once a step however many sequences there are (Pope et al. 2022). Of
    routed experts 1 - (1 - k/E)^n are used by n sequences, if tokens choose evenly.
    """
    experts: float = shape.layer_experts * (1 - (1 - shape.expert_share) ** max(1.0, sequences))
    return shape.layers * (shape.layer_shared + experts) * shape.bits / 8 + shape.embedding_bytes


def bytes_rate(shape: Shape, machine: Machine, assume: Assume) -> float:
    """Bytes a second that a device's decoding reads: from its measured rate, else a share of the specified.

    Decoding one sequence is bound by reading the weights (Pope et al. 2022), so that a measured
    rate of tokens is a rate of bytes.
    """
    if machine.decode_tokens_s is not None:
        return machine.decode_tokens_s * weights_read(shape, 1)
    return machine.bandwidth_gbyte_s * 1e9 * assume.bandwidth


def step_seconds(
    shape: Shape, device: Device, assume: Assume, share: float, sequences: float, context: float, prompt: int
) -> float:
    """One step of decoding of `share` of the model: reading weights and KV, or computing, what takes longer.

    The roofline (Williams et al. 2009). KV: `context` tokens of each sequence.
    """
    read = weights_read(shape, sequences) + sequences * context * shape.kv_per_token
    compute = 2 * shape.active * sequences / flops_rate(shape, device.spec, assume, prompt)
    return share * max(read / bytes_rate(shape, device.spec, assume), compute)


def all_reduce_seconds(size: float, ranks: int, link: Link) -> float:
    """Seconds of one all-reduce of `size` bytes by a ring.

    Every rank sends 2(n-1)/n of the bytes (nccl-tests, doc/PERFORMANCE.md: bus bandwidth), in 2(n-1) steps,
    each of which waits for the link's latency (Thakur et al. 2005).
    """
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * size / link.collective + 2 * (ranks - 1) * link.latency_us * 1e-6


def all_reduces(shape: Shape, layers: int | None = None) -> int:
    """How many a forward pass has: 2 a layer, after attention and after the MLP (Megatron: Shoeybi 2019)."""
    return 2 * (shape.layers if layers is None else layers)


def activation_bytes(shape: Shape, tokens: float) -> float:
    """Bytes of a layer's output, 16 bit: what an all-reduce sums, and one pipeline stage sends the next."""
    return tokens * shape.hidden * 2


def bubble(stages: int, chunks: int) -> float:
    """Share of time that stages stand idle: (p-1)/(m+p-1) (Huang et al. 2019, GPipe, section 2.3)."""
    return (stages - 1) / (chunks + stages - 1)


def pipeline_seconds(stages: Sequence[float], hops: Sequence[float], chunks: int) -> float:
    """Seconds in which `chunks` pass all stages, if each takes `stages[i]`, and `hops[i]` to the next.

    The first takes every stage and hop; each other one comes as much later as the slowest of these
    takes. With p equal stages and no hops it is (m+p-1) stages long, GPipe's schedule.
    """
    return sum(stages) + sum(hops) + (chunks - 1) * max(*stages, *hops, 0.0)


@dataclass(frozen=True, slots=True)
class Move:
    """One handover: bytes, seconds on the wire, in copies beside it, fixed, and those that nothing hides."""

    size: float
    wire: float
    copies: float
    fixed: float
    exposed: float


def move_seconds(shape: Shape, tokens: int, rate: float, how: Handover, prefill: float, chunks: int) -> Move:
    """The handover of `tokens` of KV at `rate` bytes a second, beside `prefill` seconds of prefill.

    Overlapped, all but the last chunk can go while the next is computed: a pipeline of two stages. So it ends
    when the wire has had everything that was ready, at the earliest one chunk after prefill.
    """
    size = shape.kv_per_token * tokens
    wire, fixed = size / rate, how.ms / 1e3
    copies = sum(size / (gbit * 1e9 / 8) for gbit in (how.encode_gbit_s, how.decode_gbit_s) if gbit)
    moving = wire + copies
    hidden = min(prefill, moving) * (chunks - 1) / chunks if how.overlap else 0.0
    return Move(size, wire, copies, fixed, moving - hidden + fixed)


def break_even_tokens(shape: Shape, rate: float, how: Handover, prefill_tokens_s: float) -> float | None:
    """Prompt tokens from which moving KV takes less than computing it where it is needed; None: never.

    The handover's fixed seconds over what each token saves: 1 / (tokens a second) - KV bytes / rate.
    """
    moved = move_seconds(shape, 1, rate, how, 0, 1)
    saved = 1 / prefill_tokens_s - moved.wire - moved.copies
    return moved.fixed / saved if saved > 0 else None
