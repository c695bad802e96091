"""One rank of a tensor-parallel engine whose steps are profiled: vLLM itself, in this process.

Every rank is an engine of its own, as vLLM's ``external_launcher`` has it: all are asked the same and
schedule the same, so that nothing but collectives crosses between them. The environment says which rank this
is, as torchrun's does. Methods are called on all ranks at once: each takes part in all collectives.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from vllm import LLM, SamplingParams
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import get_tp_group

BEYOND_PROMPT: Final = 16
"""Tokens; an answer has one."""
KV_BYTES: Final = 2**28


class ProfiledRank:
    """An engine of one rank, with a group of connections to the others that can be made anew."""

    def __init__(self, model: str, ranks: int, longest: int, chunk: int) -> None:
        # Ranks of one machine would reduce in shared memory. Machines, for which these stand, have none.
        communicator: Any = CpuCommunicator
        communicator._all_group_ranks_share_shm_group_name = lambda _: False
        self._engine: Any = LLM(
            model=model,
            tensor_parallel_size=ranks,
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=longest + BEYOND_PROMPT,
            max_num_batched_tokens=chunk,
            max_num_seqs=1,
            kv_cache_memory_bytes=KV_BYTES,
        ).llm_engine
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._ids = itertools.count()
        self._group: Any = None

    def connect(self) -> None:
        """Reduce over new connections from now on: a socket has the buffers that hold when it is made."""
        group, tensor_parallel = dist.new_group(backend="gloo"), get_tp_group()
        communicator: Any = tensor_parallel.device_communicator
        tensor_parallel.device_group = communicator.device_group = group
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = group

    def all_reduce_s(self, nbytes: int) -> float:
        """Return seconds of an all-reduce of so many bytes, in 32-bit floats."""
        data = torch.ones(nbytes // 4)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data, group=self._group)
        took = time.perf_counter() - began
        if not float(data[0]) == float(data[-1]) == dist.get_world_size():
            raise ValueError(f"the sum over {dist.get_world_size()} ranks is {float(data[0])}")
        return took

    def prefill(self, prompt: Sequence[int], chunk: int) -> tuple[float, int]:
        """Return seconds of a prefill in chunks of so many tokens, and the first token."""
        self._add(prompt, chunk)
        dist.barrier()
        began = time.perf_counter()
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
        return time.perf_counter() - began, outputs[-1].outputs[0].token_ids[0]

    def profile(self, prompt: Sequence[int], chunk: int, step: str, path: Path) -> float:
        """Return seconds of a prefill that is watched; the profile goes to a file, in Chrome's format.

        In it, steps are called ``step`` and a number.
        """
        self._add(prompt, chunk)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as watched:
            dist.barrier()  # to start a profiler takes unequal time
            began = time.perf_counter()
            for number in itertools.count():
                with record_function(f"{step} {number}"):
                    self._engine.step()
                if not self._engine.has_unfinished_requests():
                    break
            took = time.perf_counter() - began
        watched.export_chrome_trace(str(path))
        return took

    def _add(self, prompt: Sequence[int], chunk: int) -> None:
        """Give the engine a request, and chunks of a size, which its options set for good otherwise."""
        self._scheduler.max_num_scheduled_tokens = chunk
        given = {"prompt_token_ids": list(prompt)}
        greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        self._engine.add_request(f"prefill-{next(self._ids)}", given, greedy)
