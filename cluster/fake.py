"""Options of the fake engine: `engine: {fake: {...}}` in a cluster file.

The fake engine is vLLM's scheduler, block pool and KV connector around a model that is computed in
microseconds. Its KV cache is real memory, filled from the token ids, and every token follows from what the
cache holds: KV that did not arrive, or not right, shows as wrong tokens. See `actors/fake.py`.
"""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

FAKE: Final = "fake"
"""The key in a mapping of engine options that turns the fake engine on."""

LAYERS: Final = 2
WORD: Final = 8

Milliseconds = Annotated[float, Field(ge=0)]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Faults(_Options):
    """What goes wrong, in each start of the engine anew. Steps that compute tokens are counted, from 1.

    die_at_step: the engine raises in this step. die_after_s: in the first step so long after the start.
    slow_every, slow_ms: every so many steps, one takes so much longer.
    corrupt_at_step: one bit of the KV that this step computes is written wrong (no checksum can tell).
    """

    die_at_step: Annotated[int, Field(ge=1)] | None = None
    die_after_s: Annotated[float, Field(gt=0)] | None = None
    slow_every: Annotated[int, Field(ge=1)] | None = None
    slow_ms: Milliseconds = 0.0
    corrupt_at_step: Annotated[int, Field(ge=1)] | None = None


class FakeEngine(_Options):
    """How big the KV cache is, how long things take, and what goes wrong.

    kv_bytes_per_token: over all layers; a multiple of 16.
    kv_blocks: of the cache, unless vLLM's `kv_cache_memory_bytes` or `num_gpu_blocks_override` say how many.
    prefill_tokens_s: prompt tokens computed in a second; 0 takes no time.
    step_ms, step_ms_per_sequence: a step takes so long, and so much longer for each sequence that decodes.
    """

    kv_bytes_per_token: Annotated[int, Field(ge=LAYERS * WORD, multiple_of=LAYERS * WORD)] = 64
    kv_blocks: Annotated[int, Field(ge=2)] = 1024
    prefill_tokens_s: Annotated[float, Field(ge=0)] = 0.0
    step_ms: Milliseconds = 0.0
    step_ms_per_sequence: Milliseconds = 0.0
    faults: Faults = Faults()


def fake_of(options: Any) -> FakeEngine | None:
    """The fake engine's options among an engine's, or None; raises pydantic's ValidationError."""
    if FAKE not in options:
        return None
    return FakeEngine.model_validate(options[FAKE] or {})
