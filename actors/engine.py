"""A vLLM engine core and the thread that steps it.

The engine is built and stepped by one thread, because the CPU backend binds its OpenMP
threads to whichever thread builds it. The thread sleeps when there is nothing to compute,
also while requests wait for their KV cache; commands, arriving KV and finished sends wake it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from actors.errors import EngineStartError
from cluster.engine_options import UNDIVIDED
from cluster.fake import FAKE, fake_of
from cluster.ranks import RANKS, cpus_of_ranks, ranks_of, require_divisible

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.core import EngineCore

logger = logging.getLogger(__name__)

IDLE_TICK_S = 1.0
"""A waiting engine looks around this often even if nothing wakes it."""


class Outputs(Protocol):
    """Where the loop puts what a step produced. Called on the engine thread."""

    def produced(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Outputs of one step, by client."""
        ...

    def stepped(self, unfinished: int) -> None:
        """All steps that were scheduled, but so many, have been computed."""
        ...

    def died(self, error: BaseException) -> None:
        """The engine cannot go on."""
        ...


class EngineLoop:
    """Steps an engine core in a thread of its own.

    Args:
        build: makes the engine core; called on the engine thread.
        outputs: receives what steps produce.

    ``call`` may be used from any thread; the command runs between two steps.

    """

    def __init__(self, build: Callable[[], EngineCore], outputs: Outputs) -> None:
        self._build, self._outputs = build, outputs
        self._commands: deque[Callable[[EngineCore], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self.steps = 0
        self.last_step = time.monotonic()
        self.started: threading.Event = threading.Event()
        self.error: BaseException | None = None
        self._core: EngineCore | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; ``started`` is set when the engine is ready or has failed."""
        self._thread.start()

    def wake(self) -> None:
        """Make the loop look for work now."""
        self._wake.set()

    def call(self, command: Callable[[EngineCore], None]) -> None:
        """Run a command on the engine thread before the next step."""
        self._commands.append(command)
        self._wake.set()

    def held(self) -> tuple[int, int]:
        """Return how many requests the scheduler knows and how many KV blocks they hold. Any thread."""
        if self._core is None:
            return 0, 0
        pool = self._core.scheduler.kv_cache_manager.block_pool
        # One block is never given away; vLLM points at it where a block is not needed.
        return len(self._core.scheduler.requests), pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def scheduled(self) -> tuple[int, int]:
        """Return how many requests the engine steps and how many wait, for a step or for KV. Any thread."""
        if self._core is None:
            return 0, 0
        scheduler = self._core.scheduler
        return len(scheduler.running), len(scheduler.waiting)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop stepping and shut the engine down."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        core = None
        try:
            core = self._core = self._build()
            self.started.set()
            while not self._stopping:
                self._wake.clear()
                if not self._step(core):
                    self._wake.wait(IDLE_TICK_S)
        except BaseException as error:
            self.error = error
            if self.started.is_set():
                logger.exception("the engine died")
                self._outputs.died(error)
            self.started.set()
        finally:
            if core is not None:
                with contextlib.suppress(Exception):
                    core.shutdown()

    def _step(self, core: EngineCore) -> bool:
        """Run commands and one engine step; return whether there may be more to do at once."""
        while self._commands:
            self._commands.popleft()(core)
        if not (core.scheduler.has_requests() or core.batch_queue):
            return False
        outputs, executed = core.step_fn()
        core.post_step(executed)
        self.steps, self.last_step = self.steps + 1, time.monotonic()
        self._outputs.stepped(len(core.batch_queue or ()))
        if outputs:
            self._outputs.produced(outputs)
        return executed or bool(core.batch_queue)


def build_core(
    model: str, options: dict[str, Any], engine_id: str, rank_died: Callable[[], None] | None = None
) -> EngineCore:
    """Build a vLLM engine core whose KV connector is ours.

    Args:
        model: local path or hub id.
        options: vLLM engine options, passed on unchanged; ``fake`` turns the fake engine on
            (``cluster/fake.py``).
        engine_id: under which the worker registered its ``Link``.
        rank_died: called on a thread when one of several ranks has died; the engine is of no use then.

    Raises:
        EngineStartError: with vLLM's own message, if it refuses the options; or they divide the model in a
            way that is not handed over.

    """
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.core import EngineCore

    transfer = KVTransferConfig(
        kv_connector="HandoffConnector",
        kv_connector_module_path="actors.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",  # what does not come out of the tier
        engine_id=engine_id,
    )
    config = engine_config(model, {**options, "kv_transfer_config": transfer})
    if (ranks := config.parallel_config.world_size) > 1:
        _give_ranks_their_cpus(ranks)
    return EngineCore(config, executor_class(config), log_stats=False, executor_fail_callback=rank_died)


def executor_class(config: Any) -> Any:
    """Return vLLM's executor for a configuration, or the fake engine's, or that of several ranks."""
    if FAKE in config.additional_config:
        from actors.fake import FakeExecutor

        return FakeExecutor
    if config.parallel_config.world_size > 1:
        from actors.ranks import RanksExecutor

        return RanksExecutor
    from vllm.v1.executor import Executor

    return Executor.get_class(config)


def engine_config(model: str, options: dict[str, Any]) -> Any:
    """Return vLLM's configuration for a model and engine options; see ``build_core``."""
    from vllm.engine.arg_utils import EngineArgs

    ranks = _ranks(options)
    defaults: dict[str, Any] = {"distributed_executor_backend": "uni"}
    if ranks > 1:  # processes on this node; KV is loaded and published between steps, so one at a time
        options = {**options, "distributed_executor_backend": "mp", "async_scheduling": False}
    try:
        if (fake := fake_of(options)) is not None:
            options = {key: value for key, value in options.items() if key != FAKE}
            defaults["additional_config"] = {FAKE: fake.model_dump()}
            defaults["async_scheduling"] = False  # nothing to overlap with
        config = EngineArgs(model=model, **{**defaults, **options}).create_engine_config()
    except (TypeError, ValueError) as error:
        raise EngineStartError(f"vLLM refused the engine options {options}: {error}") from error
    if ranks > 1:
        _require_heads(config.model_config, ranks)
    return config


def _ranks(options: dict[str, Any]) -> int:
    """Return how many ranks there will be; raises ``EngineStartError`` for what cannot be handed over."""
    for key in UNDIVIDED:
        if options.get(key, 1) != 1:
            raise EngineStartError(
                f"{key} is {options[key]}: the KV of an engine that is divided so cannot be handed over; "
                f"set it to 1, and divide the model with {RANKS} or give the cluster more workers"
            )
    try:
        ranks = ranks_of(options)
    except ValueError as error:
        raise EngineStartError(str(error)) from error
    if ranks > 1 and FAKE in options:
        raise EngineStartError(f"{RANKS} is {ranks}: the fake engine has one rank; leave {RANKS} out")
    return ranks


def _require_heads(model: Any, ranks: int) -> None:
    """Raise ``EngineStartError`` unless the ranks share the heads of a model's KV cache."""
    if model.use_mla:
        raise EngineStartError(
            f"{RANKS} is {ranks}, and the KV of {model.model} (MLA) has no heads: each rank would keep all "
            f"of it, which is not handed over; set it to 1"
        )
    try:
        require_divisible(model.model, model.get_total_num_kv_heads(), ranks)
    except ValueError as error:
        raise EngineStartError(str(error)) from error


def _give_ranks_their_cpus(ranks: int) -> None:
    """Divide what this process has: the ranks inherit its environment."""
    bind, threads = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"
    os.environ[bind] = cpus_of_ranks(os.environ.get(bind), ranks)
    if count := os.environ.get(threads):  # Ray sets it to the CPUs of the worker
        os.environ[threads] = str(max(1, int(count) // ranks))


def add_request(core: EngineCore, request: EngineCoreRequest) -> None:
    """Give a request to the engine core, as vLLM's own in-process client does."""
    prepared, wave = core.preprocess_add_request(request)
    core.add_request(prepared, wave)
