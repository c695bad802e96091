"""Where a worker and the KV connector inside its engine meet.

vLLM constructs the connector itself, from configuration only. The worker registers a link
under the engine's id before it builds the engine; the connector finds it there. Both live
in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.decode import Receiver
from actors.marks import Marks
from actors.prefill import Post, Sender
from kv.chunk import KVLayout
from kv.paged import PagedCache
from kv.transport import Transport

if TYPE_CHECKING:
    import torch

_links: dict[str, Link] = {}


class Link:
    """The parts of a worker that its connector needs.

    Args:
        model_digest: fingerprint of the model files, part of the KV layout.
        transport: how payloads move.
        post: how deliveries reach another worker.
        wake: wakes the engine loop.
        on_failed: told (request id, reason) when a request's KV will not come.

    ``sender``, ``receiver``, ``cache`` and ``layout`` exist once vLLM has allocated its KV
    cache (``register_caches``), which is before the first request.

    """

    sender: Sender
    receiver: Receiver
    cache: PagedCache
    layout: KVLayout

    def __init__(
        self,
        model_digest: str,
        transport: Transport,
        post: Post,
        wake: Callable[[], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        self.model_digest, self.transport, self.wake = model_digest, transport, wake
        self._post, self._on_failed = post, on_failed
        self.marks = Marks()

    def register_caches(self, vllm_config: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        """Build both halves of the handover over the engine's cache tensors."""
        tensors = list(kv_caches.values())
        block_size = int(vllm_config.cache_config.block_size)
        self.cache, order = paged_view(tensors, block_size)
        self.layout = KVLayout(
            model=self.model_digest,
            dtype=str(tensors[0].dtype),
            layers=len(tensors),
            block_size=block_size,
            token_bytes=self.cache.token_nbytes,
            order=order,
        )
        self.sender = Sender(self.cache, self.layout, self.transport, self._post, self.wake)
        self.receiver = Receiver(
            self.cache, self.layout, self.transport, self.marks, self.wake, self._on_failed
        )

    def close(self) -> None:
        """Stop both halves."""
        self.receiver.stop()
        self.sender.close()


def register(engine_id: str, link: Link) -> None:
    """Make a link known to the connector that vLLM will build for this engine."""
    _links[engine_id] = link


def link_of(engine_id: str | None) -> Link:
    """Return the link registered for an engine of this process."""
    if engine_id is None or engine_id not in _links:
        raise RuntimeError(
            f"no worker of this process has engine id {engine_id!r}: the connector runs inside a Handoff "
            f"worker, in the worker's own process (tensor and pipeline parallel size 1)"
        )
    return _links[engine_id]


def paged_view(tensors: list[torch.Tensor], block_size: int) -> tuple[PagedCache, str]:
    """Return byte views over vLLM's cache tensors, and the order of a block's axes.

    Takes layers of shape ``[blocks, kv_heads, block_size, 2 * head_dim]`` (CPU backend, heads
    before tokens) or ``[blocks, block_size, kv_heads, 2 * head_dim]``, in host memory.
    """
    import torch

    first = tensors[0]
    if first.device.type != "cpu":
        raise NotImplementedError(
            f"KV caches on {first.device.type!r} are not handed over yet; use the CPU build"
        )
    if first.dim() != 4 or block_size not in first.shape[1:3]:
        raise NotImplementedError(f"KV cache of shape {tuple(first.shape)} with block size {block_size}")
    token_axis = 1 if first.shape[2] == block_size else 0
    if first.shape[1] == first.shape[2]:  # told apart by memory order: the outer axis is heads on CPU
        token_axis = 1
    views = [tensor.view(torch.uint8).numpy() for tensor in tensors]
    arrays: list[np.ndarray] = [view.view(np.uint8) for view in views]
    return PagedCache(arrays, token_axis, block_size), "heads,tokens" if token_axis else "tokens,heads"
