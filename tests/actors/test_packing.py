"""How the attention kernels pack blocks is learnt from them, and is then true of what they store."""

import re

import numpy as np
import pytest
import torch

from actors.link import block_bytes
from actors.packing import block_order, heads_of, learn
from kv.chunk import KVLayout
from kv.convert import Converter, decode
from kv.paged import PagedCache

pytestmark = pytest.mark.engine

HEADS, TOKENS = 3, 300
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def store(cache: torch.Tensor, blocks: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write tokens into blocks as vLLM's own attention layers do."""
    from vllm import _custom_ops as ops

    count, heads, size, width = cache.shape
    key_cache, value_cache = cache.view(count, heads, 2 * size, width // 2).chunk(2, dim=2)
    slots = torch.tensor([blocks[t // size] * size + t % size for t in range(len(keys))])
    isa = block_order(cache, size).split(":")[0]
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)


def layout_of(cache: torch.Tensor) -> KVLayout:
    size = cache.shape[2]
    heads, dim = heads_of([cache])
    nbytes = cache[0].nbytes
    packing = learn(cache.dtype, size, dim)
    assert packing
    return KVLayout("m", str(cache.dtype), 1, size, nbytes, block_order(cache, size), heads, dim, packing)


def empty(dtype: torch.dtype, size: int, dim: int) -> torch.Tensor:
    return torch.zeros(-(-TOKENS // size) + 2, HEADS, size, 2 * dim, dtype=dtype)


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, TOKENS, HEADS, 128, generator=generator)
    return keys, values


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("size", "dim"), [(16, 64), (32, 64), (128, 64), (64, 80), (96, 128), (128, 256)])
def test_the_kernel_stores_where_the_packing_says(dtype: torch.dtype, size: int, dim: int) -> None:
    cache = torch.zeros(2, HEADS, size, 2 * dim, dtype=dtype)
    keys, values = torch.randn(2, 2 * size, HEADS, dim).to(dtype)
    store(cache, [1, 0], keys, values)
    offsets = torch.from_numpy(decode(layout_of(cache)))
    found = cache.view(2, HEADS, -1)[:, :, offsets]  # [blocks, heads, 2, size, dim]
    for block, first in ((1, 0), (0, size)):
        assert torch.equal(found[block, :, 0].transpose(0, 1), keys[first : first + size])
        assert torch.equal(found[block, :, 1].transpose(0, 1), values[first : first + size])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("theirs", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("ours", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("dim", [64, 80])
def test_converted_blocks_are_what_the_kernel_would_have_stored(
    dtype: torch.dtype, theirs: int, ours: int, dim: int, tokens: tuple[torch.Tensor, torch.Tensor]
) -> None:
    keys, values = (part[:, :, :dim].to(dtype).contiguous() for part in tokens)
    source, target, expected = empty(dtype, theirs, dim), empty(dtype, ours, dim), empty(dtype, ours, dim)
    from_blocks = torch.randperm(len(source))[: -(-TOKENS // theirs)].tolist()
    to_blocks = torch.randperm(len(target))[: -(-TOKENS // ours)].tolist()
    store(source, from_blocks, keys, values)
    store(expected, to_blocks, keys, values)
    converter = Converter(layout_of(source), layout_of(target))
    payload = np.ascontiguousarray(block_bytes(source)[None, from_blocks])
    cache = PagedCache([block_bytes(target)], ours)
    converter.write(payload, 0, cache, to_blocks, (0, TOKENS))
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("damage", ["round", "share", "mix"])
def test_a_kernel_that_does_more_than_moving_is_found(
    damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm import _custom_ops as ops

    real = ops.cpu_attn_reshape_and_cache

    def damaged(
        keys: torch.Tensor,
        values: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *rest: object,
    ) -> None:
        if damage == "round":
            keys = (keys.float() * 1.01).to(keys.dtype)
        real(keys, values, key_cache, value_cache, *rest)
        if damage == "share":
            value_cache[0, 0, 0, 0] = value_cache[0, 0, 0, 1]
        if damage == "mix":
            value_cache[:, :, :2] = value_cache[:, [1, 0], :2].clone()

    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", damaged)
    assert learn(torch.bfloat16, 32, 64) == ""
    why = "each head in a part of its own" if damage == "mix" else "does not store elements as they are"
    assert re.search(why, caplog.text)
    assert "blocks of 32 tokens with heads of 64" in caplog.text


def test_a_quantised_cache_is_not_learnt(caplog: pytest.LogCaptureFixture) -> None:
    assert learn(torch.uint8, 32, 64) == ""
    assert "torch.uint8" in caplog.text


def test_packings_are_short() -> None:
    """They travel with every chunk."""
    assert all(len(learn(dtype, 128, 128)) < 100 for dtype in TYPES)


def test_caches_of_other_forms_have_no_heads() -> None:
    def layer(*shape: int) -> torch.Tensor:
        return torch.zeros(2, *shape)

    assert heads_of([layer(3, 16, 128), layer(3, 16, 128)]) == (3, 64)
    assert heads_of([layer(3, 16, 128), layer(3, 16, 64)]) == (0, 0)
    assert heads_of([layer(16, 576)]) == (0, 0)
