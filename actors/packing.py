"""How vLLM's CPU attention kernels pack a block, asked of the kernels themselves.

Which tiles a kernel (vLLM ``csrc/cpu/cpu_attn_*.hpp``) keeps keys and values in depends on the
instruction set, the block size and the element type. Instead of knowing all of them, we have the kernel
store numbered elements, and see where each ends up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv.convert import encode

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

DIGIT_BITS = 14
"""Of an element's number, per pass. As a bfloat16 or float16 that is a finite, positive number."""
BLOCKS, HEADS = 2, 2
"""As many as it takes to see that all are packed alike."""


def heads_of(layers: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return key-value heads and head size of layers ``[blocks, heads, block_size, 2 * head_dim]``.

    Zeros for a cache of another form, as MLA's, or whose layers differ.
    """
    shape = layers[0].shape
    alike = len(shape) == 4 and all(layer.shape[1:] == shape[1:] for layer in layers)
    return (shape[1], shape[3] // 2) if alike else (0, 0)


def block_order(cache: torch.Tensor, block_size: int, ranks: int = 1) -> str:
    """Name how a block of the CPU backend is packed: the kernel's instruction set, and the block's shape.

    ``cache`` is a layer of one rank; the shape is that of all ranks' parts together.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(cache.dtype, block_size, cache.shape[-1] // 2)
    shape = (cache.shape[1] * ranks, *cache.shape[2:])
    return f"{isa}:{'x'.join(map(str, shape))}"


def learn(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """Return how this process's kernel packs a block, as ``KVLayout.packing``.

    Empty, with a warning, if the kernel does more than moving elements, as with an FP8 cache.
    """
    import torch

    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return _unknown(dtype, block_size, head_dim, "it does not store elements as they are")
    numbers = torch.arange(2 * BLOCKS * block_size * HEADS * head_dim).view(2, -1, HEADS, head_dim)
    found = torch.zeros(BLOCKS, HEADS, 2 * block_size * head_dim, dtype=torch.int64)
    for shift in range(0, (numbers.numel() - 1).bit_length(), DIGIT_BITS):
        digits = (numbers >> shift) & ((1 << DIGIT_BITS) - 1)
        found |= _stored(digits, dtype, block_size).view_as(found) << shift
    if not torch.equal(found.flatten().sort().values, numbers.flatten()):
        return _unknown(dtype, block_size, head_dim, "it does not store elements as they are")
    places = torch.empty_like(numbers).flatten()
    places[found.flatten()] = torch.arange(numbers.numel())
    # Of each element: its place, as if its block and head were the only ones.
    by_head = places.view(2, BLOCKS, block_size, HEADS, head_dim).permute(1, 3, 0, 2, 4)
    size = 2 * block_size * head_dim
    first = torch.arange(BLOCKS * HEADS).view(BLOCKS, HEADS, 1, 1, 1) * size
    offsets = (by_head - first).reshape(BLOCKS * HEADS, 2, block_size, head_dim)
    if not torch.equal(offsets, offsets[:1].expand_as(offsets)):
        return _unknown(dtype, block_size, head_dim, "it does not keep each head in a part of its own")
    packing = encode(offsets[0].numpy())
    return packing or _unknown(dtype, block_size, head_dim, "its tiles are not regular")


def _stored(digits: torch.Tensor, dtype: torch.dtype, block_size: int) -> torch.Tensor:
    """Have the kernel store keys and values with these bit patterns; return its memory's."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    pattern = torch.int16 if dtype.itemsize == 2 else torch.int32
    keys, values = digits.to(pattern).view(dtype)
    head_dim = digits.shape[-1]
    cache = torch.zeros(BLOCKS, HEADS, 2 * block_size, head_dim, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(BLOCKS * block_size)
    isa = _get_attn_isa(dtype, block_size, head_dim)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    return cache.view(pattern).to(torch.int64)


def _unknown(dtype: torch.dtype, block_size: int, head_dim: int, why: str) -> str:
    logger.warning(
        "how the attention kernel packs %s blocks of %d tokens with heads of %d is not known (%s): "
        "KV can only be exchanged with engines of the same block size and instruction set",
        dtype,
        block_size,
        head_dim,
        why,
    )
    return ""
