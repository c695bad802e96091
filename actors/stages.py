"""One engine in pipeline stages on several nodes: vLLM's own Ray executor, made to run where there is no GPU.

``StagesExecutor`` is given to vLLM as ``distributed_executor_backend`` and ``WORKER`` as ``worker_cls``. On
accelerators vLLM needs neither: "ray" and its own worker do.

vLLM 0.32 does not run its CPU backend so, for three reasons (docs/experiments.md has the places):

- its Ray executors ask the platform which Ray resource a device is, and the CPU platform names none. Here it
  is ``GPU``: a node offers one for each stage that it takes, whatever that computes with;
- its CPU communicator hands tensors from stage to stage through ``/dev/shm`` if all ranks have the same
  ``VLLM_DIST_IDENT``, which the worker takes from the end of the rendezvous' address, so always. Hosts share
  no memory. Here each rank's address ends differently, and tensors go by gloo, over the network;
- a stage's buffer for what the one before sends is made in the profiling run, which the CPU worker leaves out
  for eager engines with a given size of KV. Here it is made when the stage has been loaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psutil
import ray
from vllm import SamplingParams
from vllm.distributed import get_pp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
from vllm.v1.worker.cpu_worker import CPUWorker

from actors.ranks import take_names_away
from cluster.facts import interface_of

DEVICE: Final = "GPU"
WORKER: Final = "actors.stages.StageWorker"

# A stage's actor imports this with the configuration, which names the executor, before it is asked.
if not current_platform.ray_device_key:
    current_platform.ray_device_key = DEVICE


class StagesExecutor(RayExecutorV2):
    """vLLM's Ray executor; importing it has told the platform its Ray resource."""


class StageWorker(CPUWorker):
    """vLLM's CPU worker as a stage on a node of its own."""

    distributed_init_method: str

    def init_device(self) -> None:
        """See the base class."""
        if (interface := interface_of(ray.util.get_node_ip_address())) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # torch.distributed passes over a query that it does not know.
        self.distributed_init_method = f"{self.distributed_init_method}?stage={self.rank}"
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """See the base class."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        if not get_pp_group().is_first_rank:
            runner = self.model_runner
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    def stage(self) -> dict[str, Any]:
        """Say what this stage is: where, which layers, KV and memory in bytes, bytes its link has sent."""
        cache = self.model_runner.kv_cache_config
        layers = self.model_runner.model.model.layers
        address = ray.util.get_node_ip_address()
        counters = psutil.net_io_counters(pernic=True).get(interface_of(address) or "")
        return {
            "rank": self.rank,
            "node_id": ray.get_runtime_context().get_node_id(),
            "address": address,
            "pid": os.getpid(),
            "layers": [i for i, one in enumerate(layers) if not isinstance(one, PPMissingLayer)],
            "kv_bytes": sum(tensor.size for tensor in cache.kv_cache_tensors),
            "kv_tokens": cache.num_blocks * self.cache_config.block_size,
            "resident_bytes": psutil.Process().memory_info().rss,
            "sent_bytes": 0 if counters is None else counters.bytes_sent,
        }


def build(model: str, stages: int, options: Mapping[str, Any]) -> LLMEngine:
    """Build an engine whose stages take the bundles of this actor's placement group, in their order.

    ``VLLM_PP_LAYER_PARTITION`` and ``VLLM_RAY_BUNDLE_INDICES`` of the environment say what each takes.
    """
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            pipeline_parallel_size=stages,
            distributed_executor_backend=StagesExecutor,
            worker_cls=WORKER,
            **options,
        )
    )
    take_names_away()
    return engine


def answer(engine: LLMEngine, name: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """Answer greedily, alone; returns the token ids and seconds until the first and until the last."""
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began, first, found = time.perf_counter(), 0.0, list[int]()
    engine.add_request(name, {"prompt_token_ids": list(prompt)}, greedy)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids:
                first = first or time.perf_counter()
                found = list(output.outputs[0].token_ids)
    ended = time.perf_counter()
    return {"tokens": found, "ttft_s": first - began, "total_s": ended - began}
