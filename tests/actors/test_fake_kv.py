"""The fake engine's cache: tokens follow from all of it, and from nothing else."""

import random

import numpy as np
import pytest

from actors.fake_kv import FakeKV, _mix, _mix_all
from cluster.fake import LAYERS

BLOCKS, SIZE = 64, 8


def tokens(count: int, seed: int = 0) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(4096) for _ in range(count)]


def table(count: int, size: int = SIZE, seed: int = 0) -> np.ndarray:
    """A request's blocks: any, in any order."""
    return np.array(random.Random(seed).sample(range(BLOCKS), -(-count // size)), np.intp)


def filled(
    prompt: list[int], size: int = SIZE, nbytes: int = 64, cuts: tuple[int, ...] = (), seed: int = 0
) -> tuple[FakeKV, np.ndarray]:
    """A cache that holds a prompt, computed in steps that end at ``cuts``."""
    kv, blocks = FakeKV(BLOCKS, size, nbytes), table(len(prompt), size, seed)
    for start, end in zip((0, *cuts), (*cuts, len(prompt)), strict=True):
        kv.write(blocks, start, prompt[start:end])
    return kv, blocks


PROMPT = tokens(4 * SIZE + 3)
KV, TABLE = filled(PROMPT)
RIGHT = KV.digest(TABLE, len(PROMPT))


def test_scalars_and_arrays_are_mixed_alike() -> None:
    values = [0, 1, 77 << 32 | 5, (1 << 64) - 1]
    assert _mix_all(np.array(values, np.uint64)).tolist() == [_mix(value) for value in values]


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("nbytes", [16, 32, 256])
def test_neither_steps_nor_blocks_nor_bytes_change_a_token(size: int, nbytes: int) -> None:
    for cuts in ((), (1,), (7, 8, 9, 30), tuple(range(1, len(PROMPT)))):
        kv, blocks = filled(PROMPT, size, nbytes, cuts, seed=size)
        assert kv.digest(blocks, len(PROMPT)) == RIGHT
        assert kv.flaw(blocks, len(PROMPT)) == 0


@pytest.mark.parametrize("at", range(len(PROMPT)))
def test_every_token_of_the_prompt_counts(at: int) -> None:
    other = [*PROMPT[:at], PROMPT[at] ^ 1, *PROMPT[at + 1 :]]
    kv, blocks = filled(other)
    assert kv.digest(blocks, len(PROMPT)) != RIGHT


def test_the_order_of_tokens_counts() -> None:
    kv, blocks = filled([PROMPT[1], PROMPT[0], *PROMPT[2:]])
    assert kv.digest(blocks, len(PROMPT)) != RIGHT


def test_every_byte_of_loaded_kv_counts_and_no_other() -> None:
    words, end = 3, SIZE + 3
    kv, blocks = filled(PROMPT[:end], nbytes=8 * words * LAYERS)
    right = kv.digest(blocks, end)
    assert kv.flaw(blocks, end) == 0
    view, drawn, counted = kv.layers.view(np.uint8), random.Random(1), 0
    for layer, block, byte in np.ndindex(*view.shape):
        if block not in blocks and drawn.random() > 0.01:
            continue
        word = byte // 8
        slot = word if word < SIZE else (word - SIZE) // (words - 1)
        used = block in blocks and list(blocks).index(block) * SIZE + slot < end
        bit = 1 << drawn.randrange(8)
        view[layer, block, byte] ^= bit
        assert (kv.digest(blocks, end) ^ kv.flaw(blocks, end) != right) == used, (layer, block, byte)
        view[layer, block, byte] ^= bit
        counted += used
    assert counted == end * 8 * words * LAYERS


def test_kv_that_is_written_on_top_of_wrong_kv_is_wrong() -> None:
    kv, blocks = filled(PROMPT[:SIZE])
    kv.layers[0, blocks[0], SIZE - 1] += np.uint64(1)
    blocks = table(len(PROMPT))
    blocks[0] = table(SIZE)[0]
    kv.write(blocks, SIZE, PROMPT[SIZE:])
    right, fine = filled(PROMPT)
    assert kv.layers[0, blocks[2], 0] != right.layers[0, fine[2], 0]


def test_blocks_can_be_moved_whole() -> None:
    """As a handover moves them: bytes to other blocks of another cache."""
    kv, blocks = FakeKV(BLOCKS, SIZE, 64), table(len(PROMPT), seed=9)
    kv.layers[:, blocks] = KV.layers[:, TABLE]
    assert kv.digest(blocks, len(PROMPT)) == RIGHT
    assert kv.flaw(blocks, len(PROMPT)) == 0
    kv.copy_block(int(blocks[0]), int(blocks[-1]))
    assert kv.digest(blocks, len(PROMPT)) != RIGHT
