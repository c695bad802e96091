"""An engine of several tensor-parallel ranks, whose KV cache is this process's memory too.

vLLM runs each rank in a process of its own. Ours run without a KV connector: their caches are moved into
shared memory, which this process maps. So both halves of a handover, their transports, and everything that
accounts for them work here as with one rank, on the ranks' memory and without a copy; a rank only computes.

Nothing that is shared has a name: it is gone with the last process that maps it. The ranks end with the
thread that started them, and this process with the first of them that dies.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import mmap
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from actors.connector import around_step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Shared:
    """A rank's KV cache in shared memory.

    Attributes:
        pid: the rank's process.
        fd: its file descriptor of the memory.
        nbytes: of all of it.
        layers: name, byte offset, shape and element type of each layer.

    """

    pid: int
    fd: int
    nbytes: int
    layers: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]

    def map(self) -> dict[str, torch.Tensor]:
        """Return the layers as tensors of this process."""
        # The rank is alive and ours, so its descriptor can be opened like a file.
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR)
        try:
            memory = mmap.mmap(fd, self.nbytes)
        finally:
            os.close(fd)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)  # keeps it mapped
        return {name: _view(buffer, offset, shape, dtype) for name, offset, shape, dtype in self.layers}


def _view(buffer: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return buffer[offset : offset + nbytes].view(dtype).view(*shape)


# -- in a rank's process ------------------------------------------------------------------------------------


def end_with_parent(worker: Any, parent: int) -> None:
    """Have the kernel end this process with the thread that started it.

    vLLM's own watch over its parent cannot end a rank that waits for another one within a kernel.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def share_cache(worker: Any) -> Shared:
    """Move a rank's KV cache, which nothing has been written to yet, into shared memory.

    Raises:
        NotImplementedError: the cache is not in host memory, or is not made of equal views of one allocation.

    """
    runner = worker.model_runner
    context = worker.vllm_config.compilation_config.static_forward_context
    names = [name for tensor in runner.kv_cache_config.kv_cache_tensors for name in tensor.layers]
    caches: dict[str, torch.Tensor] = {name: context[name].kv_cache for name in names}
    # vLLM holds some views twice: by layer, and in a list.
    views = {id(view): view for view in (*caches.values(), *runner.kv_caches)}
    old = next(iter(caches.values())).untyped_storage()
    for name, view in caches.items():
        if view.device.type != "cpu":
            raise NotImplementedError(
                f"KV caches on {view.device.type!r} cannot be handed over yet; use the CPU build"
            )
        if view.untyped_storage().data_ptr() != old.data_ptr() or not view.is_contiguous():
            raise NotImplementedError(
                f"KV cache of layer {name}: shape {tuple(view.shape)}, strides {view.stride()}"
            )
    fd = os.memfd_create("handoff-kv")
    os.ftruncate(fd, old.nbytes())
    new = torch.frombuffer(mmap.mmap(fd, old.nbytes()), dtype=torch.uint8).untyped_storage()
    for view in views.values():
        view.set_(new, view.storage_offset(), view.size(), view.stride())
    take_names_away()
    layers = tuple(
        (name, view.data_ptr() - new.data_ptr(), tuple(view.shape), view.dtype)
        for name, view in caches.items()
    )
    return Shared(os.getpid(), fd, old.nbytes(), layers)


def take_names_away() -> None:
    """Unlink the shared memory and semaphores of vLLM's ranks: all have opened them, and nobody else will.

    vLLM removes them when a rank ends in peace, Python's resource tracker after a death; but Ray ends that
    together with a worker.
    """
    prefixes = ("psm_", "sem.mp-", os.environ.get("VLLM_DIST_IDENT", "psm_"))
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, name = line.partition("/dev/shm/")
        if name.startswith(prefixes) and not name.endswith(" (deleted)"):
            Path("/dev/shm", name).unlink(missing_ok=True)


# -- in the engine's process --------------------------------------------------------------------------------


class _FirstRanks:
    """Takes the first rank's output, when all ranks have answered."""

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:
        return outputs[output_rank]


class RanksExecutor(MultiprocExecutor):
    """vLLM's executor of several processes, around which the KV connector is called here, not in them."""

    vllm_config: Any

    def _init_executor(self) -> None:
        whole = self.vllm_config
        self.vllm_config = copy.copy(whole)
        self.vllm_config.kv_transfer_config = None
        try:
            super()._init_executor()
        finally:
            self.vllm_config = whole
        self._transferred: KVConnectorOutput | None = None
        for queue in self.response_mqs:
            # It would look for answers in a busy loop with Python's lock held: other threads would wait.
            queue._spin_condition.busy_loop_s = 0
        self.collective_rpc(end_with_parent, args=(os.getpid(),))

    def start_worker_monitor(self, inline: bool = False) -> None:
        """See the base class. Says at once that a rank has died, without waiting for the others to end."""

        def watch() -> None:
            multiprocessing.connection.wait([worker.proc.sentinel for worker in self.workers])
            if getattr(self, "shutting_down", False):
                return
            dead = [worker.rank for worker in self.workers if not worker.proc.is_alive()]
            logger.error("rank %s died", dead)
            self.is_failed = True
            if (callback := self.failure_callback) is not None:
                callback()
            else:  # while the engine is built; wakes whoever waits for the rank's answer
                self.shutdown()

        threading.Thread(target=watch, name="rank-monitor", daemon=True).start()

    def init_kv_output_aggregator(self, connector: Any) -> None:
        """See the base class. A step has been computed when all ranks have answered."""
        self.kv_output_aggregator = _FirstRanks()

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """See the base class. Gives the connector all ranks' caches."""
        super().initialize_from_config(kv_cache_configs)
        shared: list[Shared] = self.collective_rpc(share_cache)
        self._connector = KVConnectorFactory.create_connector(
            self.vllm_config, KVConnectorRole.WORKER, kv_cache_configs[0]
        )
        self._connector.register_ranks([cache.map() for cache in shared])

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        """See the base class."""
        return []

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """See the base class."""
        with around_step(self._connector, scheduler_output) as transferred:
            scheduler_output.kv_connector_metadata = None  # is not for the ranks
            output = super().execute_model(scheduler_output)
        if output is None:  # ``sample_tokens`` is to follow
            self._transferred = transferred
        else:
            output.kv_connector_output = transferred
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """See the base class."""
        output = super().sample_tokens(grammar_output)
        output.kv_connector_output, self._transferred = self._transferred, None
        return _done(output) if non_block else output


def _done(output: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(output)
    return future
