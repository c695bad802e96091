"""The cache of a rank, moved into memory that two processes map; in one process here."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.ranks import share_cache

pytestmark = pytest.mark.engine

LAYERS, SHAPE = 3, (5, 2, 4, 6)


def rank(views: list[torch.Tensor]) -> Any:
    """What `share_cache` sees of vLLM's worker."""
    names = [f"layer.{number}" for number in range(len(views))]
    tensors = [SimpleNamespace(layers=names)]
    context = {name: SimpleNamespace(kv_cache=view) for name, view in zip(names, views, strict=True)}
    return SimpleNamespace(
        model_runner=SimpleNamespace(
            kv_cache_config=SimpleNamespace(kv_cache_tensors=tensors), kv_caches=views
        ),
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context)),
    )


def allocated(dtype: torch.dtype) -> list[torch.Tensor]:
    """As vLLM does: one allocation, of which each layer is a view."""
    count = torch.Size(SHAPE).numel() * dtype.itemsize
    buffer = torch.zeros(LAYERS * count, dtype=torch.int8)
    return [part.view(dtype).view(SHAPE) for part in buffer.split(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_what_one_side_writes_the_other_reads(dtype: torch.dtype) -> None:
    ours = allocated(dtype)
    shared = share_cache(rank(ours))
    theirs = shared.map()
    os.close(shared.fd)  # the mappings hold the memory
    assert list(theirs) == [f"layer.{number}" for number in range(LAYERS)]
    for number, (own, other) in enumerate(zip(ours, theirs.values(), strict=True)):
        assert (other.shape, other.dtype) == (SHAPE, dtype)
        assert other.data_ptr() != own.data_ptr()
        own[number] = 1.0
        other[4] = 2.0
    for number, (own, other) in enumerate(zip(ours, theirs.values(), strict=True)):
        expected = torch.zeros(SHAPE)
        expected[number], expected[4] = 1.0, 2.0
        assert torch.equal(own.float(), expected)
        assert torch.equal(other.float(), expected)


def test_what_cannot_be_shared_is_refused() -> None:
    apart = [torch.zeros(SHAPE), torch.zeros(SHAPE)]
    with pytest.raises(NotImplementedError, match=r"layer layer\.1"):
        share_cache(rank(apart))
    across = [torch.zeros(SHAPE).transpose(1, 2)]
    with pytest.raises(NotImplementedError, match=r"layer layer\.0: shape .*, strides"):
        share_cache(rank(across))
    with pytest.raises(NotImplementedError, match="'meta'"):
        share_cache(rank([torch.zeros(SHAPE, device="meta")]))
