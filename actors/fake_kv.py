"""The fake engine's KV cache: what is in it, and which token follows from it.

The *state* at a position is the sum of a hash of (token, position) over all tokens up to there, modulo 2^64.
In each layer, the KV of a token is one word that holds the state, disguised by layer, and then words that
follow from it. A block holds the states of all its tokens first, then the rest, token by token.

The next token follows from the states of every position and layer, read anew each time; and, for blocks that
a sequence did not compute itself (they were loaded, or cached), from every byte. So it is right only if all
KV is. Neither the block size nor how the prompt was cut into steps changes a token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from cluster.fake import LAYERS, WORD

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_A, _B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class FakeKV:
    """A paged cache of ``LAYERS`` arrays, ``uint64 [blocks, words of a block]``.

    Args:
        blocks: how many.
        block_size: tokens in each.
        bytes_per_token: over all layers.

    """

    def __init__(self, blocks: int, block_size: int, bytes_per_token: int) -> None:
        self._size, self._words = block_size, bytes_per_token // (LAYERS * WORD)
        # Fresh pages come from the system when they are first written.
        self.layers: Words = np.zeros((LAYERS, blocks, block_size * self._words), np.uint64)
        self._states = self.layers[:, :, :block_size]
        self._rest = self.layers[:, :, block_size:].reshape(LAYERS, blocks, block_size, self._words - 1)
        self._disguise = np.array([_mix(layer) for layer in range(1, LAYERS)], np.uint64)[:, None]

    def write(self, blocks: npt.NDArray[np.intp], start: int, tokens: list[int]) -> None:
        """Compute the KV of ``tokens``, the first of which is at ``start``, from the KV before it."""
        before = self._state(blocks, start - 1) if start else 0
        if len(tokens) == 1:  # as below, without arrays
            states = np.array([(before + _mix(tokens[0] << 32 | start)) & _MASK], np.uint64)
        else:
            positions = np.arange(start, start + len(tokens), dtype=np.uint64)
            hashes = _mix_all(np.array(tokens, np.uint64) << np.uint64(32) | positions)
            states = np.cumsum(hashes, dtype=np.uint64) + np.uint64(before)
        at = np.arange(start, start + len(tokens))
        block, slot = blocks[at // self._size], at % self._size
        self._states[0, block, slot] = states
        for layer in range(1, LAYERS):
            self._states[layer, block, slot] = states ^ self._disguise[layer - 1]
        if self._words > 1:
            for layer in range(LAYERS):
                self._rest[layer, block, slot] = self._rest_of(self._states[layer, block, slot])

    def flaw(self, blocks: npt.NDArray[np.intp], end: int) -> int:
        """Return a hash of what is wrong in tokens ``[0, end)`` beyond the states; 0 if nothing is."""
        if self._words == 1 or end == 0:
            return 0
        at = np.arange(end)
        block, slot = blocks[at // self._size], at % self._size
        found = 0
        for layer in range(LAYERS):
            rest, right = self._rest[layer, block, slot], self._rest_of(self._states[layer, block, slot])
            if not np.array_equal(rest, right):
                found ^= xxhash.xxh3_64_intdigest((rest ^ right).data, seed=layer)
        return found

    def digest(self, blocks: npt.NDArray[np.intp], end: int) -> int:
        """Return a hash of the states of tokens ``[0, end)`` in all layers, as the cache holds them now."""
        held, found = blocks[: -(-end // self._size)], 0
        for layer in range(LAYERS):
            states = np.ascontiguousarray(self._states[layer, held]).reshape(-1)[:end]
            found = xxhash.xxh3_64_intdigest(states.data, seed=found)
        return found

    def flip_a_bit(self, block: int, slot: int) -> None:
        """Damage the KV of one token."""
        self._states[-1, block, slot] ^= np.uint64(1 << 17)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block."""
        self.layers[:, target] = self.layers[:, source]

    def _state(self, blocks: npt.NDArray[np.intp], position: int) -> int:
        return int(self._states[0, blocks[position // self._size], position % self._size])

    def _rest_of(self, states: Words) -> Words:
        """``[tokens]`` to ``[tokens, words - 1]``."""
        return states[:, None] ^ np.arange(1, self._words, dtype=np.uint64)


def continuation(prompt: list[int], count: int, vocab: int) -> list[int]:
    """Return the ``count`` tokens that the fake engine answers to a prompt, for a vocabulary of that size."""
    total = len(prompt) + count
    kv, block = FakeKV(1, total, LAYERS * WORD), np.zeros(1, np.intp)
    tokens, computed = list(prompt), 0
    while len(tokens) < total:
        kv.write(block, computed, tokens[computed:])
        computed = len(tokens)
        tokens.append(token_of(kv.digest(block, computed), vocab))
    return tokens[len(prompt) :]


def token_of(digest: int, vocab: int) -> int:
    """Return the token that follows, of ``vocab``."""
    return digest % vocab


def _mix(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * _A & _MASK
    value = (value ^ value >> 27) * _B & _MASK
    return value ^ value >> 31


def _mix_all(values: Words) -> Words:
    """``_mix`` of each."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(_A)
    values = (values ^ values >> np.uint64(27)) * np.uint64(_B)
    return values ^ values >> np.uint64(31)
