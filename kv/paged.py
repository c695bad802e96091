"""A paged KV cache seen as runs of bytes.

A cache is one array per layer whose first axis counts blocks. What is inside a block is the
attention kernel's own affair (the CPU kernels pack keys in tiles that depend on the
instruction set), so blocks are moved whole, and ``KVLayout.order`` names the packing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv.chunk import Run


class PagedCache:
    """Byte views over an engine's cache, host memory only.

    Args:
        layers: one array per layer, ``uint8``, shape ``[blocks, bytes per block]``, viewing the
            engine's own memory; every block contiguous.
        block_size: tokens per block.

    The memory stays the engine's. Callers read or write it only while the engine keeps
    the blocks for the request in question. The tail of a request's last block, past its
    last token, holds whatever was there before; it moves with the block and is never read.

    """

    def __init__(self, layers: Sequence[npt.NDArray[np.uint8]], block_size: int) -> None:
        for layer in layers:
            if layer.dtype != np.uint8 or layer.ndim != 2 or not layer[0].flags.c_contiguous:
                raise ValueError(f"a layer must be uint8 [blocks, bytes], not {layer.dtype} {layer.shape}")
        self._layers = list(layers)
        self.block_size = block_size
        self.num_layers = len(self._layers)
        self.block_nbytes = int(self._layers[0].shape[1])
        """Bytes of one block in one layer."""

    def memory(self) -> list[Run]:
        """Return all of the cache: each layer from its first block to its last, as one run."""
        return [
            np.lib.stride_tricks.as_strided(
                layer, ((len(layer) - 1) * layer.strides[0] + layer.shape[1],), (1,)
            )
            for layer in self._layers
        ]

    def runs(self, blocks: Sequence[int]) -> list[Run]:
        """Return the runs that hold these blocks: layer by layer, block by block within a layer."""
        return [layer[block] for layer in self._layers for block in blocks]

    def runs_within(
        self, blocks: Sequence[int], first: int, count: int, low: int, high: int
    ) -> list[Run | None]:
        """Return where the runs of a chunk go, None for those that are not wanted.

        Args:
            blocks: the request's blocks, from token 0.
            first: the request's block that the chunk starts with.
            count: how many blocks the chunk has.
            low: first block that is wanted, counted from the request's first.
            high: one past the last.

        """
        wanted = [low <= first + i < high for i in range(count)]
        return [
            layer[blocks[first + i]] if wanted[i] else None for layer in self._layers for i in range(count)
        ]

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self.block_size)
