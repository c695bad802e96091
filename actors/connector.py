"""vLLM's KV connector interface, delegating to the two halves of a handover.

vLLM builds this class twice in an engine's process: once beside its scheduler, once beside
its model runner. The scheduler side decides which tokens come from elsewhere and tells the
worker side, step by step, what became valid and what was allocated (``StepPlan``); the
worker side owns the threads that move bytes (``prefill.Sender``, ``decode.Receiver``).

A request's part in a handover (``SendTo`` or ``ReceiveFrom``) rides in its
``kv_transfer_params``, put there by the worker that accepted the request.

Where there is a tier (``tier.py``), requests that are computed here load from it what it holds, and what
was computed is kept there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

from actors.decode import Target
from actors.keep import Pages
from actors.link import Link, link_of
from actors.messages import Handover, ReceiveFrom, SendTo
from actors.steps import Work

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from actors.tier import Tier

SETTLE_TIMEOUT_S = 30.0
PARAM = "handover"
SENDER, KEEPER, LOADER = "sender", "keeper", "loader"
"""Who may hold the blocks of a finished request."""


def params_of(handover: Handover) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` that carry a handover to the connector."""
    return {PARAM: handover}


def _handover_of(request: Request) -> Handover | None:
    return (request.kv_transfer_params or {}).get(PARAM)


def _handover_in(extra: Mapping[str, Any] | None) -> Handover | None:
    """As ``_handover_of``, from the request's sampling parameters."""
    return ((extra or {}).get("kv_transfer_params") or {}).get(PARAM)


@dataclass
class StepPlan(KVConnectorMetadata):
    """What the scheduler side tells the worker side about one engine step."""

    valid: list[tuple[str, list[int], int]] = field(default_factory=list)
    opened: list[tuple[str, Target]] = field(default_factory=list)
    preempted: frozenset[str] = frozenset()
    recalls: list[tuple[str, list[int], tuple[int, int]]] = field(default_factory=list)
    keep: list[Pages] = field(default_factory=list)


@dataclass(slots=True)
class _Kept:
    """A request whose pages are kept in the tier; ``pages`` of them were, or are not ours to keep."""

    request: Request
    salt: bytes
    pages: int


class SchedulerSide:
    """Decides what is loaded from elsewhere and follows what has been computed."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._blocks: KVCacheManager | None = None
        self._sending: dict[str, Request] = {}
        self._loading: dict[str, tuple[Request, ReceiveFrom]] = {}
        self._loaded: set[str] = set()
        self._opened: list[tuple[str, Target]] = []
        self._kept: dict[str, _Kept] = {}
        self._recalled: set[str] = set()
        """Requests that the tier has nothing more for."""
        self._recalling: set[str] = set()
        self._recalls: list[tuple[str, list[int], tuple[int, int]]] = []
        self._recalled_tokens: dict[str, int] = {}

    def bind(self, blocks: KVCacheManager) -> None:
        """Take the manager that knows which blocks a request has."""
        self._blocks = blocks

    def on_new_request(self, request: Request) -> None:
        """Start following a request that is prefilled for another worker, or whose KV is kept."""
        handover = _handover_of(request)
        if (tier := self._link.tier) is not None and (salt := tier.salt_of(request)) is not None:
            self._follow(tier, request, handover, salt)
        if isinstance(handover, SendTo):
            self._sending[request.request_id] = request
            self._link.sender.open(request.request_id, handover.peer, handover.lease_s)

    def _follow(self, tier: Tier, request: Request, handover: Handover | None, salt: bytes) -> None:
        """Keep this request's pages, but for those that another worker has computed, and keeps."""
        theirs = handover.prompt_tokens if isinstance(handover, ReceiveFrom) else 0
        if theirs and tier.mixed:
            return  # after pages of another layout, nobody would find ours
        self._kept[request.request_id] = _Kept(request, salt, theirs // tier.page_tokens)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``computed`` come from elsewhere, and that they come later."""
        handover = _handover_of(request)
        if not isinstance(handover, ReceiveFrom):
            return self._in_tier(request, computed)
        if request.request_id in self._loaded:
            return 0, False
        wanted = handover.prompt_tokens - (0 if handover.first_token else 1)
        if wanted > computed:
            return wanted - computed, True
        if not handover.first_token:
            self._link.receiver.close(request.request_id)
            return 0, False
        # All KV is cached here already; only the first token is still to come.
        if (end := self._link.receiver.ended(request.request_id)) is None:
            return None, False
        self._loaded.add(request.request_id)
        seed_first_token(request, end.first_token)
        self._link.receiver.close(request.request_id)
        return 0, False

    def _in_tier(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """As ``matched_tokens``, for a request that is computed here. Asks the tier once."""
        request_id, tier = request.request_id, self._link.tier
        kept = self._kept.get(request_id)
        if tier is None or kept is None or request_id in self._recalled or request.skip_reading_prefix_cache:
            return 0, False
        if not tier.recall.asked(request_id):
            if tier.recall.ask(request_id, request.all_token_ids, kept.salt, computed):
                return None, False
            self._recalled.add(request_id)
            return 0, False
        if (found := tier.recall.answer(request_id)) is None:
            return None, False
        if not found.start <= computed < found.end:
            self._recalled.add(request_id)
            return 0, False
        return found.end - computed, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Blocks were allocated; ``external`` tokens of them come from elsewhere."""
        handover = _handover_of(request)
        if external == 0:
            return
        if not isinstance(handover, ReceiveFrom):
            self._recall(request.request_id, blocks.get_block_ids()[0], external)
            return
        end = handover.prompt_tokens - (0 if handover.first_token else 1)
        block_ids = blocks.get_block_ids()[0]
        self._loading[request.request_id] = (request, handover)
        self._opened.append((request.request_id, Target(block_ids, skip=end - external, end=end)))

    def _recall(self, request_id: str, block_ids: list[int], external: int) -> None:
        tier = self._link.tier
        assert tier is not None
        found = tier.recall.answer(request_id)
        assert found is not None
        self._recalled.add(request_id)
        self._recalling.add(request_id)
        self._recalled_tokens[request_id] = external
        self._recalls.append((request_id, block_ids, (found.end - external, found.end)))

    def plan(self, step: SchedulerOutput) -> StepPlan:
        """Say what this step makes valid and which loads can start."""
        plan = StepPlan(preempted=frozenset(step.preempted_req_ids or ()))
        plan.opened, self._opened = self._opened, []
        plan.recalls, self._recalls = self._recalls, []
        self._link.computed_tokens += step.total_num_scheduled_tokens
        for new in step.scheduled_new_reqs:
            params = new.sampling_params
            if not isinstance(_handover_in(params.extra_args if params else None), ReceiveFrom):
                recalled = self._recalled_tokens.pop(new.req_id, 0)
                self._link.prefixes.count(len(new.prompt_token_ids or ()), new.num_computed_tokens, recalled)
        assert self._blocks is not None
        before = _computed_before(step)
        self._link.meter.planned(_work(before, step.num_scheduled_tokens))
        for request_id, computed in before:
            self._link.marks.note(request_id, "scheduled")
            self._keep(plan, request_id, computed + step.num_scheduled_tokens[request_id])
            if (request := self._sending.get(request_id)) is None:
                continue
            end = min(computed + step.num_scheduled_tokens[request_id], request.num_prompt_tokens)
            if end < request.num_prompt_tokens:  # whole blocks only, until the last
                end -= end % self._link.cache.block_size
            if end:
                plan.valid.append((request_id, self._blocks.get_block_ids(request_id)[0], end))
        return plan

    def _keep(self, plan: StepPlan, request_id: str, end: int) -> None:
        """Add pages to the plan that are full of known tokens when the step has computed up to ``end``."""
        tier, kept = self._link.tier, self._kept.get(request_id)
        if tier is None or kept is None:
            return
        pages = min(end, kept.request.num_tokens) // tier.page_tokens
        if pages <= kept.pages:
            return
        assert self._blocks is not None
        blocks = self._blocks.get_block_ids(request_id)[0]
        tokens = kept.request.all_token_ids[: pages * tier.page_tokens]
        plan.keep.append(Pages(request_id, kept.salt, tokens, blocks, kept.pages))
        kept.pages = pages
        tier.keeper.promise(request_id)

    def loaded(self, request_ids: set[str]) -> None:
        """The worker side has written these requests' KV: put in the token that prefill sampled."""
        self._recalling -= request_ids
        for request_id in request_ids:
            if (loading := self._loading.pop(request_id, None)) is None:
                continue
            self._loaded.add(request_id)
            request, handover = loading
            end = self._link.receiver.ended(request_id)
            if handover.first_token and end is not None and not request.is_finished():
                seed_first_token(request, end.first_token)

    def finished(self, request: Request) -> bool:
        """Return whether the blocks must be kept until the worker side reports the request."""
        request_id, tier = request.request_id, self._link.tier
        loading = self._loading.pop(request_id, None) is not None or request_id in self._recalling
        self._loaded.discard(request_id)
        self._recalled.discard(request_id)
        self._recalling.discard(request_id)
        self._recalled_tokens.pop(request_id, None)
        self._kept.pop(request_id, None)
        if isinstance(_handover_of(request), ReceiveFrom):
            self._link.receiver.close(request_id)
        if tier is not None:
            tier.recall.forget(request_id)
        sending = self._sending.pop(request_id, None) is not None
        tokens = request.output_token_ids
        holders = {
            SENDER: sending and self._link.sender.finish(request_id, tokens[-1] if len(tokens) else None),
            KEEPER: tier is not None and tier.keeper.finish(request_id),
            LOADER: loading,
        }
        return self._link.holds.add(request_id, holders)


class WorkerSide:
    """Hands a step's plan to the sender and the receiver; reports what they have finished."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def start(self, plan: StepPlan) -> None:
        """Before the forward pass: blocks may be overwritten from here on."""
        if plan.preempted:
            self._link.sender.preempted(plan.preempted, SETTLE_TIMEOUT_S)
            if self._link.tier is not None:
                self._link.tier.keeper.preempted(plan.preempted, SETTLE_TIMEOUT_S)

    def load(self, plan: StepPlan) -> None:
        """Blocks were allocated for these requests: write what arrives into them."""
        for request_id, target in plan.opened:
            self._link.receiver.open(request_id, target)
        plan.opened = []
        if (tier := self._link.tier) is not None:
            for request_id, blocks, tokens in plan.recalls:
                tier.recall.load(request_id, blocks, tokens)
            plan.recalls = []

    def save(self, plan: StepPlan) -> None:
        """After the forward pass: what it computed is valid."""
        for request_id, blocks, end in plan.valid:
            self._link.marks.note(request_id, "computed", last=True)
            self._link.sender.valid(request_id, blocks, end)
        if (tier := self._link.tier) is not None:
            for pages in plan.keep:
                tier.keeper.keep(pages)
            plan.keep = []

    def take_finished(self) -> KVConnectorTransferResults:
        """Return requests that the scheduler may go on with, or whose blocks it may free."""
        link, tier = self._link, self._link.tier
        received, failed = link.receiver.take_finished(), set[str]()
        free, sent = link.holds.release(SENDER, link.sender.take_finished())
        free |= sent
        if tier is not None:
            recalled, failed = tier.recall.take_finished()
            received |= recalled
            free |= link.holds.release(KEEPER, tier.keeper.take_finished())[0]
        others, received = link.holds.release(LOADER, received)
        if free or others or received:
            link.wake()  # the scheduler acts on them in the next step
        return KVConnectorTransferResults(
            finished_sending=free | others, finished_recving=received, failed_recving=failed & received
        )


class HandoffConnector(KVConnectorBase_V1):
    """The adapter that vLLM loads; see the module's docstring."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._whole_prefixes = len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        self._link = link_of(self._kv_transfer_config.engine_id)
        self._scheduler_side = SchedulerSide(self._link) if role == KVConnectorRole.SCHEDULER else None
        self._worker_side = WorkerSide(self._link) if role == KVConnectorRole.WORKER else None

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_side is not None, "called on the worker side"
        return self._scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        assert self._worker_side is not None, "called on the scheduler side"
        return self._worker_side

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    # -- worker side ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the base class."""
        self.register_ranks([kv_caches])

    def register_ranks(self, kv_caches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take the caches of all ranks, the first one's first."""
        self._link.register_caches(self._vllm_config, kv_caches, self._whole_prefixes)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See the base class."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.start(self._plan())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        self._worker.load(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only once all its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """KV is published per step, not per layer."""

    def wait_for_save(self) -> None:
        """See the base class; the publisher thread reads the blocks while later steps run."""
        self._worker.save(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See the base class."""
        return self._worker.take_finished()

    # -- scheduler side ---------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """See the base class."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """See the base class."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See the base class."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See the base class."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See the base class."""
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        self._scheduler.loaded(connector_output.finished_recving or set())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        return self._scheduler.finished(request), None


@contextmanager
def around_step(connector: KVConnectorBase_V1, step: SchedulerOutput) -> Iterator[KVConnectorOutput]:
    """Call the worker side of a connector around an engine step, in the order of vLLM's model runner.

    Yields what goes into the step's output; it is complete at the end.
    """
    output, plan = KVConnectorOutput(), step.kv_connector_metadata
    connector.handle_preemptions(plan)
    connector.bind_connector_metadata(plan)
    yield output
    connector.start_load_kv(None)
    connector.wait_for_save()
    results = connector.get_transfer_results(step.finished_req_ids)
    output.finished_sending = results.finished_sending or None
    output.finished_recving = results.finished_recving or None
    output.failed_recving = results.failed_recving
    output.invalid_block_ids = connector.get_block_ids_with_load_errors()
    connector.clear_connector_metadata()


def seed_first_token(request: Request, token: int) -> None:
    """Replace the placeholder that ends the prompt by the token that prefill sampled.

    Done before the request is first scheduled, so that the engine's first step computes
    the second token. A block hash that covered the placeholder is computed again.
    """
    assert request.prompt_token_ids is not None
    request.prompt_token_ids[-1] = token
    request._all_token_ids[-1] = token
    if request.block_hashes:
        request.block_hashes.pop()
        request.update_block_hashes()


def _computed_before(step: SchedulerOutput) -> list[tuple[str, int]]:
    """Return (request, tokens computed before this step) for everything scheduled in it."""
    cached = step.scheduled_cached_reqs
    new = [(request.req_id, request.num_computed_tokens) for request in step.scheduled_new_reqs]
    return new + list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def _work(before: list[tuple[str, int]], scheduled: dict[str, int]) -> Work:
    """Return what a step computes. A prompt's part of one token counts as decoding: it costs the same."""
    decoding = context = tokens = 0
    token_context = 0.0
    for request_id, computed in before:
        if (count := scheduled[request_id]) == 1:
            decoding += 1
            context += computed
        else:
            tokens += count
            token_context += count * (computed + count / 2)
    return Work(decoding, context, tokens, token_context)
