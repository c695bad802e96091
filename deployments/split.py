"""How one request is divided between a prefill and a decode worker, so that nothing changes.

A pure function of the sampling parameters. The result must equal what one engine would
have produced:

- ``FIRST_TOKEN``: prefill samples the first token, which is streamed at once; decode goes
  on from it. Exact where sampling keeps no state from one token to the next.
- ``DECODE_SAMPLES``: prefill only fills the KV cache; decode computes the last prompt token
  again and samples every token itself. Right whatever the sampling keeps (seeds,
  penalties, grammars), at the price of one engine step before the first token. The last
  prompt token is computed alone, so bf16 rounds it differently from one engine's prefill: where
  two tokens are nearly tied, the other one can be taken.
- ``UNDIVIDED``: one worker does everything.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from vllm import SamplingParams

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

PLACEHOLDER_TOKEN = 0
"""Ends the decode worker's prompt until the first token arrives."""


class Mode(Enum):
    """How a request is divided; see the module's docstring."""

    FIRST_TOKEN = "first-token"
    DECODE_SAMPLES = "decode-samples"
    UNDIVIDED = "undivided"


@dataclass(frozen=True, slots=True)
class Split:
    """A mode and, in words, why it was chosen."""

    mode: Mode
    reason: str


def choose(request: EngineCoreRequest) -> Split:
    """Return how a request can be divided without changing its result."""
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None:
        return Split(Mode.UNDIVIDED, "not a token-id generation request")
    if request.mm_features or request.lora_request or request.prompt_embeds is not None:
        return Split(Mode.UNDIVIDED, "multi-modal inputs, LoRA and prompt embeddings are not handed over")
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        return Split(Mode.UNDIVIDED, "prompt logprobs need the whole prompt computed by the answering worker")
    if params.max_tokens == 1 and not seeded(params):
        return Split(Mode.UNDIVIDED, "one token: the prefill worker produces all of it")
    if (state := _sampling_state(params)) is None:
        return Split(Mode.FIRST_TOKEN, "sampling keeps no state between tokens")
    if len(request.prompt_token_ids) == 1:
        return Split(Mode.UNDIVIDED, f"{state}, and a prompt of one token leaves nothing to hand over")
    return Split(Mode.DECODE_SAMPLES, f"{state}: one worker must sample every token")


def seeded(params: SamplingParams) -> bool:
    """Return whether tokens are drawn from a generator that the request seeds."""
    return params.seed is not None and params.temperature > 0


def _sampling_state(params: SamplingParams) -> str | None:
    """Name the first parameter that makes a token depend on how earlier ones were sampled."""
    stateful = {
        "seed": seeded(params),
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        "structured_outputs": params.structured_outputs is not None,
        "bad_words": bool(params.bad_words),
        "thinking_token_budget": params.thinking_token_budget is not None,
        "repetition_detection": params.repetition_detection is not None,
        "watermarking": bool(params.watermarking),
        "extra_args": bool(params.extra_args),
    }
    return next((name for name, keeps in stateful.items() if keeps), None)


def repeatable(params: SamplingParams) -> bool:
    """Return whether the same request, computed again from its start, gives the same tokens."""
    return params.temperature == 0 or params.seed is not None


def prefill_part(request: EngineCoreRequest, mode: Mode) -> EngineCoreRequest:
    """Return what the prefill worker is asked: the prompt's KV, and one token."""
    part = copy(request)
    assert request.sampling_params is not None
    if mode is Mode.FIRST_TOKEN:
        params = request.sampling_params.clone()
        params.max_tokens, params.min_tokens = 1, min(1, params.min_tokens)
    else:
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    params.skip_reading_prefix_cache = request.sampling_params.skip_reading_prefix_cache
    part.sampling_params = params
    return part


def decode_part(request: EngineCoreRequest, mode: Mode) -> EngineCoreRequest:
    """Return what the decode worker is asked: the rest of the answer, or all of it."""
    if mode is not Mode.FIRST_TOKEN:
        return copy(request)
    assert request.prompt_token_ids is not None
    return continued(request, [PLACEHOLDER_TOKEN])


def continued(request: EngineCoreRequest, emitted: list[int]) -> EngineCoreRequest:
    """Return the request that goes on after ``emitted`` output tokens."""
    part = copy(request)
    assert request.prompt_token_ids is not None
    assert request.sampling_params is not None
    params = request.sampling_params.clone()
    assert params.max_tokens is not None
    part.prompt_token_ids = [*request.prompt_token_ids, *emitted]
    params.max_tokens -= len(emitted)
    params.min_tokens = max(0, params.min_tokens - len(emitted))
    part.sampling_params = params
    return part
