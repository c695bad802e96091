"""The fake engine: everything of vLLM's engine core but the model.

Scheduler, block pool, prefix cache and KV connector are the real ones; this executor takes the place of
vLLM's workers. It keeps a real KV cache in host memory (``actors/fake_kv.py``), calls the connector as
vLLM's model runner does, and samples from a distribution that has all its weight on one token, which follows
from the KV of the request's blocks: temperature, seeds, penalties and biases change nothing. Grammars,
``allowed_token_ids`` and ``min_tokens`` do: then the next token that they allow is taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import (
    KVConnectorOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)

from actors.connector import around_step
from actors.fake_kv import FakeKV, token_of
from cluster.fake import FAKE, LAYERS, FakeEngine

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

logger = logging.getLogger(__name__)

IMPOSSIBLE = -9999.0
"""The logprob of every token but one; what vLLM's API puts in place of minus infinity."""


class FakeEngineDied(RuntimeError):
    """The fault that was asked for."""


@dataclass(slots=True)
class _Sequence:
    """A request as the model runner knows it.

    Attributes:
        tokens: prompt and output, as far as they are known here.
        prompt: how many of them are the prompt.
        blocks: of the cache, from token 0.
        params: vLLM's sampling parameters.
        flaw: what is wrong with KV that it did not compute itself; changes its tokens. None: not yet known.

    """

    tokens: list[int]
    prompt: int
    blocks: npt.NDArray[np.intp]
    params: Any
    flaw: int | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """What ``execute_model`` leaves for ``sample_tokens``: requests in order, and where each now ends."""

    ends: dict[str, int]
    connector: KVConnectorOutput | None


class FakeExecutor(Executor):
    """Stands in for vLLM's executor and the workers below it. One request is one row; no tensors."""

    def _init_executor(self) -> None:
        self._options = FakeEngine.model_validate(self.vllm_config.additional_config[FAKE])
        self._vocab = int(self.model_config.get_vocab_size())
        self._sequences: dict[str, _Sequence] = {}
        self._step: _Step | None = None
        self._steps = 0
        self._started = time.monotonic()

    # -- start ----------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """See the base class."""
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            head_size=self._options.kv_bytes_per_token // LAYERS // 2,
            dtype=torch.uint8,
        )
        return [{f"fake.{layer}": spec for layer in range(LAYERS)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """See the base class."""
        return [["LBNHC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        """See the base class."""

    def determine_available_memory(self) -> list[int]:
        """See the base class."""
        per_block = self._options.kv_bytes_per_token * self.cache_config.block_size
        return [self.cache_config.kv_cache_memory_bytes or self._options.kv_blocks * per_block]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Allocate the cache and give it to the connector."""
        (config,) = kv_cache_configs
        size = self.cache_config.block_size
        self._kv = FakeKV(config.num_blocks, size, self._options.kv_bytes_per_token)
        self._connector = None
        if self.vllm_config.kv_transfer_config is None:  # vLLM's own server, to compare with
            return
        self._connector = KVConnectorFactory.create_connector(
            self.vllm_config, KVConnectorRole.WORKER, config
        )
        self._connector.register_kv_caches(
            {
                f"fake.{layer}": torch.from_numpy(self._kv.layers[layer].view(np.uint8))
                for layer in range(LAYERS)
            }
        )

    def compile_or_warm_up_model(self) -> None:
        """See the base class."""

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        """See the base class."""
        return []

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """See the base class."""
        return ("generate",)

    # -- a step ---------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Compute the KV of what is scheduled. Returns None if ``sample_tokens`` is to follow."""
        output = self._execute(scheduler_output)
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """Sample for every request whose known tokens have all been computed."""
        output = self._sample(grammar_output)
        return _done(output) if non_block else output

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        began = time.monotonic()
        for request_id in step.finished_req_ids:
            self._sequences.pop(request_id, None)
        with nullcontext() if self._connector is None else around_step(self._connector, step) as connector:
            if step.total_num_scheduled_tokens:
                self._steps += 1
                self._die_if_asked()
                for copy in step.kv_cache_block_copies or ():
                    self._kv.copy_block(copy.src_block_id, copy.dst_block_id)
                ends = self._compute(step)
                self._take_time(step, began)
        if not step.total_num_scheduled_tokens:
            return ModelRunnerOutput.with_kv_conn_output_only(connector)
        self._step = _Step(ends, connector)
        return None

    def _compute(self, step: SchedulerOutput) -> dict[str, int]:
        """Write the KV of everything scheduled; return where each request's KV now ends."""
        starts, ends = self._update(step), dict[str, int]()
        # In the scheduler's order: a request may start from blocks that one before it computes in this step.
        for request_id, count in step.num_scheduled_tokens.items():
            sequence, start = self._sequences[request_id], starts[request_id]
            if sequence.flaw is None:
                sequence.flaw = self._kv.flaw(sequence.blocks, start)
            self._kv.write(sequence.blocks, start, sequence.tokens[start : start + count])
            ends[request_id] = start + count
        if self._steps == self._options.faults.corrupt_at_step:
            request_id, end = next(iter(ends.items()))
            size = self.cache_config.block_size
            self._kv.flip_a_bit(int(self._sequences[request_id].blocks[(end - 1) // size]), (end - 1) % size)
        return ends

    def _update(self, step: SchedulerOutput) -> dict[str, int]:
        """Take over what the scheduler says; return how many tokens of each request have KV already."""
        starts: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            tokens, prompt = list(new.prefill_token_ids or new.prompt_token_ids or ()), new.prompt_len
            table = np.array(new.block_ids[0], np.intp)
            self._sequences[new.req_id] = _Sequence(tokens, prompt, table, new.sampling_params)
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                sequence.tokens = list(cached.all_token_ids.get(request_id, sequence.tokens))
                sequence.blocks, sequence.flaw = np.array(blocks[0], np.intp), None
            elif blocks is not None and blocks[0]:
                sequence.blocks = np.append(sequence.blocks, np.array(blocks[0], np.intp))
            starts[request_id] = computed
        return starts

    def _sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        step, self._step = self._step, None
        assert step is not None, "sample_tokens follows execute_model"
        masks = _allowed_by_grammar(grammar, self._vocab)
        sampled: list[list[int]] = []
        for request_id, end in step.ends.items():
            sequence = self._sequences[request_id]
            if end < len(sequence.tokens):  # a part of the prompt
                sampled.append([])
                continue
            token = self._next(sequence, end, masks.get(request_id))
            sequence.tokens.append(token)
            sampled.append([token])
        ids = list(step.ends)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(ids, sampled),
            prompt_logprobs_dict=self._prompt_logprobs(step),
            kv_connector_output=step.connector,
        )

    def _next(self, sequence: _Sequence, end: int, mask: npt.NDArray[np.intp] | None) -> int:
        """Return the token that follows the first ``end``, among those that the parameters allow."""
        params = sequence.params
        token = token_of(self._kv.digest(sequence.blocks, end) ^ (sequence.flaw or 0), self._vocab)
        allowed = params.allowed_token_ids if mask is None else mask
        if allowed is not None:
            token = _nearest(token, allowed)
        if len(sequence.tokens) - sequence.prompt < params.min_tokens:
            while token in params.all_stop_token_ids:
                token = (token + 1) % self._vocab
        return token

    # -- logprobs -------------------------------------------------------------------------------

    def _logprobs(self, ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> LogprobsLists | None:
        """Return logprobs of a distribution with all its weight on the sampled token."""
        wanted = [self._sequences[request_id].params.num_logprobs for request_id in ids]
        if all(count is None for count in wanted):
            return None
        width = max(self._vocab if count == -1 else count or 0 for count in wanted)
        tokens = np.array([token[0] if token else 0 for token in sampled], np.int32)
        return LogprobsLists(*_certain(tokens, width, self._vocab))

    def _prompt_logprobs(self, step: _Step) -> dict[str, LogprobsTensors | None]:
        """Return logprobs of whole prompts: each token was certain."""
        found: dict[str, LogprobsTensors | None] = {}
        for request_id, end in step.ends.items():
            sequence = self._sequences[request_id]
            count = sequence.params.prompt_logprobs
            if count is not None and end == sequence.prompt:
                tokens = np.array(sequence.tokens[1:end], np.int32)
                width = self._vocab if count == -1 else count
                found[request_id] = LogprobsTensors(
                    *(torch.from_numpy(array) for array in _certain(tokens, width, self._vocab))
                )
        return found

    # -- time and faults --------------------------------------------------------------------------

    def _take_time(self, step: SchedulerOutput, began: float) -> None:
        """Sleep until the step has taken as long as the timing model says."""
        options, faults = self._options, self._options.faults
        decoding = sum(count == 1 for count in step.num_scheduled_tokens.values())
        seconds = (options.step_ms + options.step_ms_per_sequence * decoding) / 1000
        if options.prefill_tokens_s:
            seconds += (step.total_num_scheduled_tokens - decoding) / options.prefill_tokens_s
        if faults.slow_every is not None and self._steps % faults.slow_every == 0:
            seconds += faults.slow_ms / 1000
        if seconds and (left := began + seconds - time.monotonic()) > 0:
            time.sleep(left)

    def _die_if_asked(self) -> None:
        faults, lived = self._options.faults, time.monotonic() - self._started
        if self._steps == faults.die_at_step:
            raise FakeEngineDied(f"the fake engine dies in step {self._steps}, as it was asked to")
        if faults.die_after_s is not None and lived > faults.die_after_s:
            raise FakeEngineDied(f"the fake engine dies after {lived:.1f} s, as it was asked to")

    # -- the rest of the interface ----------------------------------------------------------------

    def collective_rpc(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """There are no workers to call."""
        raise NotImplementedError(f"the fake engine has no workers that could do {method!r}")

    def reset_mm_cache(self) -> None:
        """See the base class: there is none."""

    def check_health(self) -> None:
        """See the base class."""

    def shutdown(self) -> None:
        """See the base class."""


def _done(output: ModelRunnerOutput | None) -> Future[ModelRunnerOutput | None]:
    future: Future[ModelRunnerOutput | None] = Future()
    future.set_result(output)
    return future


def _allowed_by_grammar(grammar: GrammarOutput | None, vocab: int) -> dict[str, npt.NDArray[np.intp]]:
    """Return the token ids that grammars allow, by request."""
    if grammar is None:
        return {}
    bits = np.unpackbits(grammar.grammar_bitmask.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    rows = zip(grammar.structured_output_request_ids, bits, strict=True)
    return {request_id: np.flatnonzero(row) for request_id, row in rows}


def _nearest(token: int, allowed: Sequence[int] | npt.NDArray[np.intp]) -> int:
    """Return the first allowed token from ``token`` on, going round."""
    ordered = np.sort(np.asarray(allowed))
    return int(ordered[np.searchsorted(ordered, token) % len(ordered)])


def _certain(
    tokens: npt.NDArray[np.int32], width: int, vocab: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return (ids, logprobs, ranks) of ``width`` best tokens beside each token, which is certain itself."""
    ids = (tokens[:, None] + np.arange(width + 1, dtype=np.int32)) % vocab
    ids[:, 1:] -= 1  # the best is the token itself
    ids[:, 1:] %= vocab
    logprobs = np.full(ids.shape, IMPOSSIBLE, np.float32)
    logprobs[:, :2] = 0.0
    return ids.astype(np.int32), logprobs, np.ones(len(tokens), np.int32)
