"""KV between engines of different tensor-parallel sizes: which heads of whose blocks go where."""

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kv.chunk import KVLayout, Run, copy_runs
from kv.convert import Converter
from kv.errors import LayoutMismatch
from kv.paged import PagedCache

RANKS = (1, 2, 4)
LAYERS, HEADS, DIM, TOKENS = 3, 4, 2, 21
EITHER_WAY = list(itertools.product(RANKS, RANKS))


class Engine:
    """Ranks with a share of the heads each, in memory of their own. Every byte has been drawn.

    A head's part of a block is one token after the other, keys then values, so that a token's bytes can be
    read without what is tested here.
    """

    def __init__(self, ranks: int, size: int, seed: int) -> None:
        part, random = size * DIM, np.random.default_rng(seed)
        nbytes = HEADS * 2 * part
        packing = f"0 {part}*1, {part} {part}*1"
        self.layout = KVLayout("m", "u8", LAYERS, size, nbytes, str(size), HEADS, DIM, packing, ranks)
        count = -(-TOKENS // size) + 2
        self.layers = [
            random.integers(0, 256, (count, nbytes // ranks), np.uint8) for _ in range(LAYERS * ranks)
        ]
        self.cache = PagedCache(self.layers, size, ranks)
        self.blocks: list[int] = random.permutation(count)[:-2].tolist()
        self.spare = sorted(set(range(count)) - set(self.blocks))

    def tokens(self) -> npt.NDArray[np.uint8]:
        """``[layers, heads, 2, tokens, dim]``, read rank by rank."""
        size, ranks = self.layout.block_size, self.layout.ranks
        held = np.stack([layer[self.blocks] for layer in self.layers])
        shape = (LAYERS, ranks, len(self.blocks), HEADS // ranks, 2, size, DIM)
        heads = held.reshape(shape).transpose(0, 1, 3, 4, 2, 5, 6)
        return heads.reshape(LAYERS, HEADS, 2, -1, DIM)[:, :, :, :TOKENS]

    def untouched(self) -> npt.NDArray[np.uint8]:
        return np.stack([layer[self.spare] for layer in self.layers])


def whole(engine: Engine) -> npt.NDArray[np.uint8]:
    """An engine's blocks as its runs hold them, in a row: ``[layers, blocks, bytes per block]``."""
    runs = engine.cache.runs(engine.blocks)
    return np.concatenate(runs).reshape(LAYERS, len(engine.blocks), engine.layout.block_bytes)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_ranks_runs_make_up_a_block_of_one_rank(ranks: int) -> None:
    engine, alone = Engine(ranks, 8, 1), Engine(1, 8, 2)
    runs = engine.cache.runs(engine.blocks)
    assert len(runs) == LAYERS * len(engine.blocks) * ranks
    assert all(np.shares_memory(run, layer) for run, layer in zip(runs[:ranks], engine.layers, strict=False))
    for blocks, layer in zip(whole(engine), alone.layers, strict=True):
        layer[alone.blocks] = blocks
    assert np.array_equal(alone.tokens(), engine.tokens())


@pytest.mark.parametrize(("theirs", "ours"), [(a, b) for a, b in EITHER_WAY if a % b == 0])
@pytest.mark.parametrize(("low", "high"), [(0, 3), (1, 2), (2, 3), (0, 0)])
def test_parts_of_a_block_are_fetched_to_where_they_belong(
    theirs: int, ours: int, low: int, high: int
) -> None:
    source, target = Engine(theirs, 8, 1), Engine(ours, 8, 2)
    before, spare = target.tokens().copy(), target.untouched().copy()
    into = target.cache.runs_within(target.blocks, 0, 3, low, high, theirs)
    assert [run is None for run in into] == [
        not low <= block < high for _ in range(LAYERS) for block in range(3) for _ in range(theirs)
    ]
    copy_runs("t", source.cache.runs(source.blocks), into)
    start, end = 8 * low, min(TOKENS, 8 * high)
    before[:, :, :, start:end] = source.tokens()[:, :, :, start:end]
    assert np.array_equal(target.tokens(), before)
    assert np.array_equal(target.untouched(), spare)


@pytest.mark.parametrize(("theirs", "ours"), EITHER_WAY)
@pytest.mark.parametrize(("their_size", "our_size"), [(8, 8), (8, 4), (4, 16), (12, 8)])
def test_every_rank_gets_its_heads(theirs: int, ours: int, their_size: int, our_size: int) -> None:
    source, target = Engine(theirs, their_size, 1), Engine(ours, our_size, 2)
    spare = target.untouched().copy()
    converter = Converter(source.layout, target.layout)
    converter.write(whole(source), 0, target.cache, target.blocks, (0, TOKENS))
    assert np.array_equal(target.tokens(), source.tokens())
    assert np.array_equal(target.untouched(), spare)


@pytest.mark.parametrize(("theirs", "ours"), EITHER_WAY)
def test_only_the_wanted_tokens_are_written(theirs: int, ours: int) -> None:
    source, target = Engine(theirs, 8, 1), Engine(ours, 8, 2)
    expected = target.tokens().copy()
    Converter(source.layout, target.layout).write(whole(source), 0, target.cache, target.blocks, (3, 18))
    expected[:, :, :, 3:18] = source.tokens()[:, :, :, 3:18]
    assert np.array_equal(target.tokens(), expected)


def test_equal_blocks_are_given_out_head_by_head() -> None:
    """What makes giving out heads nearly a copy."""
    unit, take, _ = Converter(Engine(1, 8, 1).layout, Engine(2, 8, 1).layout)._moves(0, 0, 8)
    assert (unit, len(take)) == (2 * 8 * DIM, HEADS // 2)


def test_blocks_that_cannot_be_cut_are_refused() -> None:
    cache = Engine(2, 8, 1).cache
    with pytest.raises(ValueError, match="2 runs of 64 bytes cannot be cut into 3"):
        cache.runs([0], 3)
    with pytest.raises(ValueError, match="2 runs of 64 bytes cannot be cut into 1"):
        cache.runs_within([0], 0, 1, 0, 1, 1)


def test_unequal_shares_are_refused() -> None:
    layers: list[Run] = [np.zeros((2, 8), np.uint8), np.zeros((2, 16), np.uint8)]
    with pytest.raises(ValueError, match=r"2 ranks must have equal shares of every layer, not \[8, 16\]"):
        PagedCache(layers, 4, 2)
    with pytest.raises(ValueError, match="2 ranks must have equal shares"):
        PagedCache(layers[:1], 4, 2)


@pytest.mark.parametrize(("theirs", "ours"), EITHER_WAY)
def test_ranks_that_share_the_heads_are_compatible(theirs: int, ours: int) -> None:
    Engine(ours, 8, 1).layout.require_compatible(Engine(theirs, 4, 1).layout)


def test_ranks_that_do_not_share_the_heads_are_refused() -> None:
    layout = Engine(2, 8, 1).layout
    with pytest.raises(LayoutMismatch, match="ranks is '2 for 4 heads' here and '3 for 4 heads' there"):
        layout.require_compatible(replace(layout, ranks=3))
    with pytest.raises(LayoutMismatch, match="ranks is '8 for 4 heads' here and '2 for 4 heads' there"):
        replace(layout, ranks=8).require_compatible(layout)


def test_blocks_that_are_not_known_to_be_divided_into_heads_are_refused() -> None:
    unknown = replace(Engine(1, 8, 1).layout, packing="", heads=0, head_dim=0)
    unknown.require_compatible(unknown)
    with pytest.raises(LayoutMismatch, match="ranks is 1 here and 2 there"):
        unknown.require_compatible(replace(unknown, ranks=2))
