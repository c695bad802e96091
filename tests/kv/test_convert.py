"""Blocks of one engine brought into another's form: pure memory, packings made up here."""

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kv.chunk import KVLayout
from kv.convert import Converter, Offsets, decode, encode
from kv.errors import LayoutMismatch
from kv.paged import PagedCache

LAYERS, HEADS, DIM = 2, 3, 8
SPARE = 3
"""Blocks of a cache that are not the request's."""

Elements = npt.NDArray[np.uint16]


def plain(size: int) -> Offsets:
    """One token after the other."""
    return np.arange(2 * size * DIM).reshape(2, size, DIM)


def tiled(size: int, tokens: int = 4) -> Offsets:
    """Keys in tiles of so many tokens, each with its first dimensions first; values with pairs of tokens."""
    tiles = np.arange(size * DIM).reshape(size // tokens, DIM, tokens).transpose(0, 2, 1)
    pairs = np.arange(size * DIM).reshape(size // 2, DIM, 2).transpose(0, 2, 1)
    return np.stack([tiles.reshape(size, DIM), pairs.reshape(size, DIM) + size * DIM])


PACKINGS = {
    **{f"plain-{size}": plain(size) for size in (4, 8, 12, 16)},
    **{f"tiled-{size}": tiled(size) for size in (4, 8, 12, 16)},
    "tiled-16-of-8": tiled(16, 8),
}


def layout(name: str, itemsize: int = 2) -> KVLayout:
    offsets = PACKINGS[name]
    size = offsets.shape[1]
    packing = encode(offsets)
    assert packing is not None
    nbytes = HEADS * offsets.size * itemsize
    return KVLayout("m", f"{itemsize} bytes", LAYERS, size, nbytes, name, HEADS, DIM, packing)


class Held:
    """A cache in which every byte has been drawn, and the blocks that a request has in it."""

    def __init__(self, name: str, tokens: int, seed: int, itemsize: int = 2) -> None:
        self.layout, self.offsets = layout(name, itemsize), PACKINGS[name]
        self.itemsize, random = itemsize, np.random.default_rng(seed)
        count = -(-tokens // self.layout.block_size) + SPARE
        shape = (count, self.layout.block_bytes)
        self.layers = [random.integers(0, 256, shape, np.uint8) for _ in range(LAYERS)]
        self.cache = PagedCache(self.layers, self.layout.block_size)
        self.blocks = random.permutation(count)[: count - SPARE].tolist()

    def tokens(self, count: int) -> npt.NDArray[np.generic]:
        """What an attention kernel reads: ``[layers, tokens, heads, 2, dim]``, one by one."""
        heads = [layer.view(f"u{self.itemsize}").reshape(len(layer), HEADS, -1) for layer in self.layers]
        size = self.layout.block_size
        return np.array(
            [
                [head[self.blocks[t // size]][:, self.offsets[:, t % size]] for t in range(count)]
                for head in heads
            ]
        )

    def payload(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        """The blocks that hold these tokens, as they are sent."""
        size = self.layout.block_size
        held = self.blocks[start // size : -(-end // size)]
        return np.stack([layer[held] for layer in self.layers])


@pytest.mark.parametrize("name", PACKINGS)
def test_packings_are_written_and_read(name: str) -> None:
    assert np.array_equal(decode(layout(name)), PACKINGS[name])


def test_packings_as_they_are_written() -> None:
    assert layout("plain-16").packing == "0 128*1, 128 128*1"
    assert layout("tiled-16").packing == "0 4*32 4*1 8*4, 128 8*16 2*1 8*2"


def test_a_packing_without_tiles_is_not_written() -> None:
    random = np.random.default_rng(1).permutation(2 * 8 * DIM).reshape(2, 8, DIM)
    assert encode(random) is None
    swapped = plain(8).copy()
    swapped[0, 3], swapped[0, 5] = plain(8)[0, 5], plain(8)[0, 3]
    assert encode(swapped) is None


@pytest.mark.parametrize(
    "packing",
    [
        *("0 128*1", "0 127*1, 128 127*1", "0 128*1, 0 128*1", "0 128*2, 1 128*1", "1 128*1, 129 128*1"),
        "0 1000000000*1, 128 128*1",
    ],
)
def test_a_packing_that_is_no_order_is_refused(packing: str) -> None:
    with pytest.raises(ValueError, match="is no order of"):
        decode(replace(layout("plain-16"), packing=packing))


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(PACKINGS, PACKINGS)))
def test_every_token_arrives_and_nothing_else_changes(theirs: str, ours: str) -> None:
    tokens = 45
    source, target = Held(theirs, tokens, 1), Held(ours, tokens, 2)
    before = target.tokens(len(target.blocks) * target.layout.block_size)
    others = [b for b in range(len(target.layers[0])) if b not in target.blocks]
    spare = [layer[others].copy() for layer in target.layers]
    step = 2 * source.layout.block_size  # in chunks, as a sender does
    converter = Converter(source.layout, target.layout)
    for start in range(0, tokens, step):
        end = min(tokens, start + step)
        converter.write(source.payload(start, end), start, target.cache, target.blocks, (start, end))
    after = target.tokens(before.shape[1])
    assert np.array_equal(after[:, :tokens], source.tokens(tokens))
    assert np.array_equal(after[:, tokens:], before[:, tokens:])
    for layer, kept in zip(target.layers, spare, strict=True):
        assert np.array_equal(layer[others], kept)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("theirs", "ours"), [("tiled-16", "tiled-4"), ("tiled-12", "plain-16")])
def test_there_and_back(theirs: str, ours: str, itemsize: int) -> None:
    tokens = 48
    here, there = Held(theirs, tokens, 1, itemsize), Held(ours, tokens, 2, itemsize)
    back = Held(theirs, tokens, 3, itemsize)
    Converter(here.layout, there.layout).write(
        here.payload(0, tokens), 0, there.cache, there.blocks, (0, tokens)
    )
    Converter(there.layout, here.layout).write(
        there.payload(0, tokens), 0, back.cache, back.blocks, (0, tokens)
    )
    assert np.array_equal(back.payload(0, tokens), here.payload(0, tokens))


@pytest.mark.parametrize(("low", "high"), [(16, 41), (24, 32), (17, 18), (31, 45)])
def test_only_the_wanted_tokens_are_written(low: int, high: int) -> None:
    source, target = Held("tiled-16", 45, 1), Held("plain-8", 45, 2)
    before = target.tokens(45)
    Converter(source.layout, target.layout).write(
        source.payload(16, 45), 16, target.cache, target.blocks, (low, high)
    )
    expected = before.copy()
    expected[:, low:high] = source.tokens(45)[:, low:high]
    assert np.array_equal(target.tokens(45), expected)


def test_equal_tiles_move_as_one() -> None:
    """What makes a conversion between block sizes nearly a copy: found, not known."""
    converter = Converter(layout("tiled-16"), layout("tiled-8"))
    unit, take, put = converter._moves(8, 0, 8)
    assert unit == 8 * DIM * 2  # the keys, or values, of all eight tokens of a head, 2 bytes each
    assert len(take) == len(put) == 2 * HEADS


def test_other_models_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="heads is 3 here and 6 there"):
        Converter(replace(layout("plain-8"), heads=6), layout("plain-8"))
