"""vLLM's ``EngineClient``, with a cluster of workers as the engine.

The counterpart of vLLM's ``AsyncLLM``: the same input and output processors (tokenising,
detokenising, stop strings, logprobs, ``n`` > 1, statistics), but what lies between them is the
dispatcher instead of one engine core.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from copy import copy
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from cluster.fake import FAKE
from cluster.file import Limits
from deployments.dispatch import Dispatcher
from deployments.ledger import Ledger, Record, current
from deployments.refusals import AnswerTooLate, Overloaded, Unmeetable
from deployments.rendering import renderer_of
from deployments.router import POLICIES, Policy
from deployments.snapshot import Slo

logger = logging.getLogger(__name__)

TASKS = ("generate",)


class ClusterEngineClient(EngineClient):
    """Generates with the workers of a cluster.

    Args:
        vllm_config: the configuration of the engines, built by the gateway from the same
            model and options.
        limits: how many sequences a request may have at once, and for how long.

    """

    def __init__(self, vllm_config: Any, limits: Limits) -> None:
        self._limits = limits
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer = renderer_of(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.output_processor = OutputProcessor(self.renderer.tokenizer, log_stats=True)
        self.statistics = StatLoggerManager(vllm_config, engine_idxs=[0])
        self.dispatcher = Dispatcher(self._deliver, self._fail, seeded_alone(vllm_config))
        self.ledger = Ledger()

    # -- generation -----------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See the base class. Leaving the generator early aborts the request on all workers."""
        if isinstance(prompt, AsyncGenerator):
            raise VLLMValidationError("streaming input is not supported by a disaggregated engine")
        self._check(sampling_params, priority, data_parallel_rank)
        record = current.get() or Record(request_id)
        request = await self._prepare(
            prompt,
            sampling_params,
            request_id,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            session_id=session_id,
            kv_hints=kv_hints,
        )
        request.reasoning_ended = reasoning_ended
        request.reasoning_parser_kwargs = reasoning_parser_kwargs
        text = extract_prompt_components(self.model_config, prompt)[0]
        queue = RequestOutputCollector(request.params.output_kind, request.request_id)
        finished, late = False, None
        record.sequences += sampling_params.n
        try:
            check_sequences(record.sequences, self._limits.sequences)
            self._start(request, text, queue, record)
            late = asyncio.get_running_loop().call_later(
                self._limits.answer_s, queue.put, AnswerTooLate(self._limits.answer_s)
            )
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                record.passed += sum(len(part.token_ids) for part in output.outputs)
                yield output
        except Exception as error:
            if not isinstance(error, VLLMClientError) and getattr(error, "http_status", 500) >= 500:
                record.facts["error"] = type(error).__name__
            if isinstance(error, (Overloaded, Unmeetable)):
                record.facts["retry_after_s"] = error.retry_after_s
                record.facts["refused"] = (int(error.http_status), str(error))
            raise
        finally:
            record.sequences -= sampling_params.n
            if late is not None:
                late.cancel()
            if not finished:
                await self.abort(request.request_id, internal=True)

    def _check(self, params: SamplingParams, priority: int, data_parallel_rank: int | None) -> None:
        """Refuse what would silently do something else than asked."""
        policy = self.vllm_config.scheduler_config.policy
        if priority != 0 and policy != "priority":
            raise VLLMValidationError(
                "requests have no priority here: the engines serve them in order; set `scheduling_policy: "
                "priority` under `engine` in the cluster file",
                parameter="priority",
                value=priority,
            )
        if data_parallel_rank is not None:
            raise VLLMValidationError(
                "the gateway chooses the workers itself", parameter="X-data-parallel-rank"
            )
        if "kv_transfer_params" in (params.extra_args or {}):
            raise VLLMValidationError("handovers are arranged by the gateway", parameter="kv_transfer_params")

    async def _prepare(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> EngineCoreRequest:
        """Tokenise and validate, as vLLM does, and give the request its internal id."""
        options["supported_tasks"] = TASKS
        if isinstance(prompt, dict) and "type" in prompt:  # rendered: nothing left that could block
            request = self.input_processor.process_inputs(request_id, prompt, params, **options)
        else:
            request = await self.input_processor.process_inputs_async(request_id, prompt, params, **options)
        self.input_processor.assign_request_id(request)
        return request

    def _start(
        self, request: EngineCoreRequest, text: str | None, queue: RequestOutputCollector, record: Record
    ) -> None:
        """Send a request, or its ``n`` children, to the workers."""
        record.note("tokenized")
        record.facts.setdefault("prompt_tokens", len(request.prompt_token_ids or ()))
        self.ledger.keep(record)
        params, slo, policy = request.params, self._slo(record), self._policy(record)
        if params.n == 1:
            self.output_processor.add_request(request, text, None, 0, queue)
            self.dispatcher.submit(request, record, slo, policy)
            return
        parent = ParentRequest(request)
        for index in range(params.n):
            child_id, child_params = parent.get_child_info(index)
            child = copy(request)
            child.request_id, child.sampling_params = child_id, child_params
            self.output_processor.add_request(child, text, parent, index, queue)
            own = record if index == 0 else Record(child_id)
            self.dispatcher.submit(child, own, slo, policy, admitted=index > 0)

    def _slo(self, record: Record) -> Slo:
        """Return the objectives of a request's class."""
        name = record.facts.get("class")
        try:
            return self.dispatcher.planner.slo(None if name is None else str(name))
        except KeyError:
            known = ", ".join(self.dispatcher.planner.routing.classes) or "none"
            raise VLLMValidationError(
                f"X-Handoff-Class is {name!r}; the cluster file's slo.classes has: {known}"
            ) from None

    def _policy(self, record: Record) -> Policy | None:
        """Return the router mode that a request asks for by its header, if it does."""
        if (asked := record.facts.get("asked_mode")) is None:
            return None
        for policy in POLICIES:
            if asked == policy:
                return policy
        raise VLLMValidationError(f"X-Handoff-Router is {asked!r}; valid: {', '.join(POLICIES)}")

    def _deliver(self, outputs: list[EngineCoreOutput]) -> list[str]:
        """Detokenise and queue outputs; return requests that a stop string has ended."""
        statistics = IterationStats()
        processed = self.output_processor.process_outputs(outputs, time.monotonic(), statistics)
        self.statistics.record(scheduler_stats=None, iteration_stats=statistics)
        ended: list[str] = processed.reqs_to_abort
        return ended

    def _fail(self, request_id: str, error: Exception) -> None:
        state = self.output_processor.request_states.get(request_id)
        if state is not None and state.queue is not None:
            state.queue.put(error)
        self.output_processor.abort_requests([request_id], internal=True)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """See the base class; frees the request's blocks on both workers."""
        ids = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        self.dispatcher.abort(self.output_processor.abort_requests(ids, internal))

    # -- state ------------------------------------------------------------------------------------

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        """See the base class."""
        return TASKS

    async def check_health(self) -> None:
        """Raise if no worker could take a request."""
        self.dispatcher.require_worker()

    def report(self, engines: SchedulerStats) -> None:
        """Take statistics of the workers' engines together, for vLLM's own metrics."""
        self.statistics.record(scheduler_stats=engines, iteration_stats=None)

    async def do_log_stats(self) -> None:
        """See the base class."""
        self.statistics.log()

    async def is_tracing_enabled(self) -> bool:
        """See the base class."""
        return False

    @property
    def is_running(self) -> bool:
        """The gateway runs for as long as its process does."""
        return True

    @property
    def is_stopped(self) -> bool:
        """See ``is_running``."""
        return False

    @property
    def errored(self) -> bool:
        """A lost worker is not the gateway's end: requests go to others, or fail one by one."""
        return False

    @property
    def dead_error(self) -> BaseException:
        """See ``errored``."""
        return RuntimeError("the gateway is alive")

    async def is_paused(self) -> bool:
        """See the base class."""
        return False

    async def is_sleeping(self) -> bool:
        """See the base class."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """See the base class."""
        self.renderer.shutdown()

    # -- what a cluster of engines does not offer -------------------------------------------------

    async def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Pooling models have no decode phase to hand over to."""
        raise VLLMValidationError("pooling is not served; use vLLM itself for embedding models")
        yield

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """Clients do not take part in handovers."""

    async def reset_mm_cache(self) -> None:
        """Nothing is cached here."""

    async def reset_encoder_cache(self) -> None:
        """Nothing is cached here."""

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes on every worker."""
        return await self.dispatcher.reset_prefix_caches()

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        """See ``_refuse``."""
        self._refuse("profiling")

    async def stop_profile(self) -> None:
        """See ``_refuse``."""
        self._refuse("profiling")

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """See ``_refuse``."""
        self._refuse("sleeping")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """See ``_refuse``."""
        self._refuse("sleeping")
        return False

    async def release_kv_cache_memory(self) -> None:
        """See ``_refuse``."""
        self._refuse("releasing the KV cache")

    async def add_lora(self, lora_request: Any) -> bool:
        """See ``_refuse``."""
        self._refuse("loading LoRA adapters at run time")
        return False

    async def pause_generation(self, **kwargs: Any) -> None:
        """See ``_refuse``."""
        self._refuse("pausing")

    async def resume_generation(self) -> None:
        """See ``_refuse``."""
        self._refuse("pausing")

    def _refuse(self, what: str) -> None:
        raise VLLMValidationError(f"{what} is not supported by the Handoff gateway")


def seeded_alone(vllm_config: Any) -> int | None:
    """Return the longest prompt that an engine computes in one step even beside a full batch of decoding.

    None where any will do; see ``Dispatcher``.
    """
    if not current_platform.is_cpu() or FAKE in vllm_config.additional_config:
        return None
    scheduler = vllm_config.scheduler_config
    return max(1, int(scheduler.max_num_batched_tokens) - int(scheduler.max_num_seqs))


def check_sequences(count: int, most: int) -> None:
    """Raise ``VLLMValidationError`` if a request has too many sequences at once."""
    if count > most:
        raise VLLMValidationError(
            f"a request may have at most {most} sequences at once, its prompts times n "
            f"(gateway.limits.sequences)",
            parameter="n",
            value=count,
        )
