"""Where a worker and the KV connector inside its engine meet.

vLLM constructs the connector itself, from configuration only. The worker registers a link
under the engine's id before it builds the engine; the connector finds it there. Both live
in one process, also where the engine's ranks have processes of their own (``actors/ranks.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actors.decode import AskAgain, Receiver
from actors.holds import Holds
from actors.marks import Marks
from actors.messages import PrefixCounts
from actors.packing import block_order, heads_of, learn
from actors.prefill import Post, Sender
from actors.rungs import Rungs
from actors.steps import Meter
from cluster.fake import FAKE
from kv.chunk import KVLayout
from kv.paged import PagedCache

if TYPE_CHECKING:
    import torch

    from actors.tier import Tier
    from kv.bucket import Bucket

logger = logging.getLogger(__name__)

_links: dict[str, Link] = {}


class Link:
    """The parts of a worker that its connector needs.

    Args:
        name: the worker's.
        model_digest: fingerprint of the model files, part of the KV layout.
        rungs: how payloads move.
        post: how deliveries reach another worker.
        again: how another worker is asked for a chunk over another rung.
        wake: wakes the engine loop.
        on_failed: told (request id, reason) when a request's KV will not come.
        bucket: of the tier; None: there is none. It stays the caller's.

    ``sender``, ``receiver``, ``cache``, ``layout`` and ``tier`` exist once vLLM has allocated its KV
    cache (``register_caches``), which is before the first request.

    """

    sender: Sender
    receiver: Receiver
    cache: PagedCache
    layout: KVLayout
    tier: Tier | None = None

    def __init__(
        self,
        name: str,
        model_digest: str,
        rungs: Rungs,
        post: Post,
        again: AskAgain,
        wake: Callable[[], None],
        on_failed: Callable[[str, str], None],
        bucket: Bucket | None = None,
    ) -> None:
        self.name, self.model_digest, self.rungs, self.wake = name, model_digest, rungs, wake
        self._post, self._again, self._on_failed, self._bucket = post, again, on_failed, bucket
        self.marks, self.meter, self.holds = Marks(), Meter(), Holds()
        self.computed_tokens = 0
        self.prefixes = PrefixCounts()

    def register_caches(
        self,
        vllm_config: Any,
        kv_caches: Sequence[Mapping[str, torch.Tensor]],
        whole_prefixes: bool = True,
    ) -> None:
        """Build both halves of the handover over the engine's cache tensors, by rank and layer; and the tier.

        Without ``whole_prefixes`` the engine does not keep all blocks of a request, and there is no tier.
        """
        tensors, ranks = list(kv_caches[0].values()), len(kv_caches)
        block_size = int(vllm_config.cache_config.block_size)
        fake = FAKE in vllm_config.additional_config
        heads, head_dim = (0, 0) if fake else heads_of(tensors)
        memory = [block_bytes(rank[name]) for name in kv_caches[0] for rank in kv_caches]
        self.cache = PagedCache(memory, block_size, ranks)
        self.layout = KVLayout(
            model=self.model_digest,
            dtype=str(tensors[0].dtype),
            layers=len(tensors),
            block_size=block_size,
            block_bytes=self.cache.block_nbytes,
            order=FAKE if fake else block_order(tensors[0], block_size, ranks),
            heads=heads * ranks,
            head_dim=head_dim,
            packing=learn(tensors[0].dtype, block_size, head_dim) if heads else "",
            ranks=ranks,
        )
        self.rungs.register(self.cache.memory())
        self.sender = Sender(self.name, self.cache, self.layout, self.rungs, self._post, self.wake)
        self.receiver = Receiver(
            self.cache, self.layout, self.rungs, self.marks, self.wake, self._again, self._on_failed
        )
        if self._bucket is not None and not whole_prefixes:
            logger.warning(
                "no KV is kept in %s: this model forgets tokens, or has several caches", self._bucket
            )
        elif self._bucket is not None:
            from actors.tier import Tier, computed_as  # pyarrow takes its time

            salt = computed_as(vllm_config)
            self.tier = Tier(self._bucket, self.layout, self.cache, salt, self.meter, self.wake)

    def close(self) -> None:
        """Stop both halves, and the tier."""
        if self.tier is not None:
            self.tier.close()
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
            f"worker, in the worker's own process"
        )
    return _links[engine_id]


def block_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a layer of vLLM's cache, ``[blocks, ...]`` in host memory, as ``[blocks, bytes]``. No copy."""
    import torch

    if tensor.device.type != "cpu":
        raise NotImplementedError(
            f"KV caches on {tensor.device.type!r} cannot be handed over yet; use the CPU build"
        )
    if not tensor.is_contiguous():
        raise NotImplementedError(f"KV cache with strides {tensor.stride()} and shape {tuple(tensor.shape)}")
    array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy()
    return array
