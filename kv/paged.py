"""A paged KV cache seen as runs of bytes.

A cache is one array per layer whose first axis counts blocks. What is inside a block is the
attention kernel's own affair (the CPU kernels pack keys in tiles that depend on the
instruction set), so blocks are moved whole, and ``KVLayout.order`` names the packing.

The ranks of a tensor-parallel engine have an array per layer each, with the same blocks. Each holds an
equal share of a block's heads; one rank's after the other's, they are a block as one rank would have it.
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
            engine's own memory; every block contiguous. Of several ranks: one per layer and rank, the
            ranks of a layer next to each other.
        block_size: tokens per block.
        ranks: how many there are.

    The memory stays the engine's. Callers read or write it only while the engine keeps
    the blocks for the request in question. The tail of a request's last block, past its
    last token, holds whatever was there before; it moves with the block and is never read.

    """

    def __init__(self, layers: Sequence[npt.NDArray[np.uint8]], block_size: int, ranks: int = 1) -> None:
        for layer in layers:
            if layer.dtype != np.uint8 or layer.ndim != 2 or not layer[0].flags.c_contiguous:
                raise ValueError(f"a layer must be uint8 [blocks, bytes], not {layer.dtype} {layer.shape}")
        if len(layers) % ranks or len({layer.shape[1] for layer in layers}) > 1:
            sizes = [layer.shape[1] for layer in layers]
            raise ValueError(
                f"{ranks} ranks must have equal shares of every layer, not {sizes} bytes per block"
            )
        self._layers = list(layers)
        self.block_size, self.ranks = block_size, ranks
        self.num_layers = len(self._layers) // ranks
        self.run_nbytes = int(self._layers[0].shape[1])
        """Bytes of one block in one layer and rank."""
        self.block_nbytes = self.run_nbytes * ranks
        """Bytes of one block in one layer."""

    def memory(self) -> list[Run]:
        """Return all of the cache: each rank's layer from its first block to its last, as one run."""
        return [
            np.lib.stride_tricks.as_strided(
                layer, ((len(layer) - 1) * layer.strides[0] + layer.shape[1],), (1,)
            )
            for layer in self._layers
        ]

    def runs(self, blocks: Sequence[int], pieces: int | None = None) -> list[Run]:
        """Return the runs that hold these blocks: layer by layer, block by block, rank by rank.

        Args:
            blocks: which.
            pieces: into how many runs each block is cut, a multiple of the ranks; their number unless given.

        """
        cuts = 1 if pieces is None else self._cuts(pieces)
        return [
            run
            for layer in range(self.num_layers)
            for block in blocks
            for run in self._block(layer, block, cuts)
        ]

    def runs_within(
        self, blocks: Sequence[int], first: int, count: int, low: int, high: int, pieces: int | None = None
    ) -> list[Run | None]:
        """Return where the runs of a chunk go, None for those that are not wanted.

        Args:
            blocks: the request's blocks, from token 0.
            first: the request's block that the chunk starts with.
            count: how many blocks the chunk has.
            low: first block that is wanted, counted from the request's first.
            high: one past the last.
            pieces: how many runs a block of the chunk is; see ``runs``.

        """
        pieces = self.ranks if pieces is None else pieces
        cuts, nothing = self._cuts(pieces), [None] * pieces
        wanted = [low <= first + i < high for i in range(count)]
        return [
            run
            for layer in range(self.num_layers)
            for i in range(count)
            for run in (self._block(layer, blocks[first + i], cuts) if wanted[i] else nothing)
        ]

    def _cuts(self, pieces: int) -> int:
        """Return into how many runs each rank's part of a block is cut."""
        cuts, left = divmod(pieces, self.ranks)
        if left or self.run_nbytes % cuts:
            raise ValueError(
                f"blocks of {self.ranks} runs of {self.run_nbytes} bytes cannot be cut into {pieces}"
            )
        return cuts

    def _block(self, layer: int, block: int, cuts: int) -> list[Run]:
        parts = [rank[block] for rank in self._layers[layer * self.ranks : (layer + 1) * self.ranks]]
        return parts if cuts == 1 else [run for part in parts for run in part.reshape(cuts, -1)]

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self.block_size)
