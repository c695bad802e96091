"""The bucket's tier as one worker uses it: what it keeps there (``keep.py``) and loads (``recall.py``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actors.keep import Keeper
from actors.recall import Recall
from actors.steps import Meter
from cluster.fake import FAKE
from kv.bucket import Bucket
from kv.chunk import KVLayout
from kv.paged import PagedCache

if TYPE_CHECKING:
    from vllm.v1.request import Request

COUNTERS = (
    *("written_bytes", "dropped_bytes", "failed_bytes", "waiting_bytes", "loaded_bytes", "loaded_tokens"),
    *("hits", "misses", "slower", "corrupt", "gone", "failures"),
)
"""What ``Tier.counters`` tells; ``waiting_bytes`` goes up and down.

Of requests that could have used the tier: ``hits`` had KV there, ``misses`` had none, and for ``slower``
computing was expected to be faster. Loads that did not succeed found a page ``corrupt`` or ``gone``;
``failures`` are answers and loads that did not come, or not in time.
"""


class Tier:
    """Keeps and loads the KV of one engine.

    Args:
        bucket: where to; it stays the caller's.
        layout: the engine's.
        cache: its paged cache.
        salt: what else the content of its KV depends on (``computed_as``).
        meter: of the engine's steps.
        wake: wakes the engine loop.

    """

    def __init__(
        self,
        bucket: Bucket,
        layout: KVLayout,
        cache: PagedCache,
        salt: bytes,
        meter: Meter,
        wake: Callable[[], None],
    ) -> None:
        self._salt = salt
        self.recall = Recall(bucket, layout, cache, meter, wake)
        self._pages = self.recall.tiers[0]
        self.keeper = Keeper(self._pages, cache, wake)
        self.page_tokens = self._pages.page_tokens

    @property
    def mixed(self) -> bool:
        """Whether other workers keep KV in another layout."""
        return len(self.recall.tiers) > 1

    def salt_of(self, request: Request) -> bytes | None:
        """Return what a request's keys depend on beside its tokens; None if its KV is not shared.

        An adapter's or an image's name may mean something else tomorrow, and pages outlive all workers.
        """
        if request.mm_features or request.lora_request is not None or request.prompt_embeds is not None:
            return None
        return self._salt + (request.cache_salt or "").encode()

    def counters(self) -> dict[str, int]:
        """Return the counters of ``COUNTERS``."""
        counts, size = self.keeper.behind.counts(), self._pages.page_nbytes
        return dict.fromkeys(COUNTERS, 0) | {
            "written_bytes": counts.written * size,
            "dropped_bytes": counts.dropped * size,
            "failed_bytes": counts.failed * size,
            "waiting_bytes": counts.waiting * size,
            **self.recall.counts.copy(),
        }

    def close(self) -> None:
        """Stop; what waits to be uploaded is given some seconds."""
        self.recall.close()
        self.keeper.close()


def computed_as(vllm_config: Any) -> bytes:
    """Return a hash of what makes equal model files compute different KV: options that change the numbers.

    Weights and layout are in the keys already (``KVLayout``).
    """
    import vllm

    if FAKE in vllm_config.additional_config:
        return b"fake"
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_dict()
    for key in ("_name_or_path", "transformers_version"):  # where the files are, and who reads them
        config.pop(key, None)
    said = {
        "config": config,  # with overrides applied: rope scaling, for instance
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "random": model.seed if str(vllm_config.load_config.load_format) == "dummy" else None,
        "vllm": vllm.__version__,
    }
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
