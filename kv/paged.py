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
        self.num_blocks = int(self._layers[0].shape[0])
        self.block_nbytes = int(self._layers[0].shape[1])
        """Bytes of one block in one layer."""

    def runs(self, blocks: Sequence[int]) -> list[Run]:
        """Return the runs that hold these blocks: layer by layer, block by block within a layer."""
        return [layer[block] for layer in self._layers for block in blocks]

    def write(self, blocks: Sequence[int], payload: Sequence[Run], keep: slice) -> None:
        """Copy a verified payload into blocks.

        Args:
            blocks: target of each block in the payload that ``keep`` selects.
            payload: runs in the order of ``runs``.
            keep: which of the payload's blocks to write; the others are left alone.

        """
        per_layer = len(payload) // self.num_layers
        for index, layer in enumerate(self._layers):
            sources = payload[index * per_layer : (index + 1) * per_layer][keep]
            for block, source in zip(blocks, sources, strict=True):
                layer[block] = source

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self.block_size)
