"""A paged KV cache seen as runs of bytes: which pieces of memory hold tokens ``[start, end)``.

A cache is one tensor per layer. Its axes are given by name, because backends differ:
vLLM's CPU backend has ``[blocks, heads, tokens, 2 * head_dim]``. Whole blocks are one run
per layer; of the last, partial block only the tokens in use are taken, which is one run
per head where heads come before tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kv.chunk import Run


class PagedCache:
    """Byte views over an engine's cache tensors, host memory only.

    Args:
        layers: one array per layer, ``uint8``, viewing the engine's own memory, with axes
            ``[blocks, *inner]``; every block contiguous.
        token_axis: the axis of a block (without the block axis) that counts tokens.
        block_size: tokens per block.

    The memory stays the engine's. Callers read or write it only while the engine keeps
    the blocks for the request in question.

    """

    def __init__(self, layers: Sequence[np.ndarray], token_axis: int, block_size: int) -> None:
        for layer in layers:
            if not layer[0].flags.c_contiguous:
                raise ValueError(f"a block of shape {layer.shape[1:]} is not contiguous in memory")
            if layer.shape[1 + token_axis] != block_size:
                raise ValueError(f"axis {token_axis} of a block has {layer.shape[1 + token_axis]} tokens")
        self._layers = list(layers)
        self._token_axis = token_axis
        self.block_size = block_size
        self.num_layers = len(self._layers)
        self.block_nbytes = int(self._layers[0][0].nbytes)
        self.token_nbytes = self.block_nbytes // block_size

    def runs(self, blocks: Sequence[int], start: int, end: int) -> list[Run]:
        """Return the runs that hold tokens ``[start, end)`` of a request.

        Args:
            blocks: the request's block ids, in order, from token 0.
            start: first token; a multiple of the block size.
            end: one past the last token.

        Order: layer by layer; within a layer block by block; within a partial block along
        the axes before the token axis. Two caches of equal layout give runs of equal sizes.

        """
        if start % self.block_size or not start < end <= len(blocks) * self.block_size:
            raise ValueError(
                f"tokens [{start}, {end}) do not start on a block of {self.block_size} "
                f"or pass the request's {len(blocks)} blocks"
            )
        first, whole, rest = start // self.block_size, end // self.block_size, end % self.block_size
        out: list[Run] = []
        for layer in self._layers:
            out.extend(layer[block].reshape(-1) for block in blocks[first:whole])
            if rest:
                out.extend(self._head_of(layer[blocks[whole]], rest))
        return out

    def _head_of(self, block: np.ndarray, tokens: int) -> Iterator[Run]:
        outer = block.shape[: self._token_axis]
        for index in np.ndindex(*outer):
            yield block[index][:tokens].reshape(-1)


def write(into: Sequence[Run], payload: Sequence[Run]) -> None:
    """Copy a payload into runs of the same sizes; the caller has verified it."""
    if len(into) != len(payload):
        raise ValueError(f"payload has {len(payload)} runs, the cache wants {len(into)}")
    for target, source in zip(into, payload, strict=True):
        target[:] = source
