"""A paged cache as runs of bytes."""

import numpy as np
import numpy.typing as npt
import pytest

from kv.chunk import Run, copy_runs
from kv.errors import ChunkCorrupt
from kv.paged import PagedCache

LAYERS, BLOCKS, NBYTES, SIZE = 3, 6, 32, 4


@pytest.fixture
def layers() -> list[npt.NDArray[np.uint8]]:
    """Every block of every layer holds bytes of its own: 16 * layer + block."""
    return [
        np.repeat((16 * layer + np.arange(BLOCKS, dtype=np.uint8))[:, None], NBYTES, axis=1)
        for layer in range(LAYERS)
    ]


def test_runs_go_layer_by_layer_and_view_the_cache(layers: list[npt.NDArray[np.uint8]]) -> None:
    runs = PagedCache(layers, SIZE).runs([5, 0, 2])
    assert [int(run[0]) for run in runs] == [5, 0, 2, 21, 16, 18, 37, 32, 34]
    assert all(run.shape == (NBYTES,) for run in runs)
    layers[1][0, 3] = 99
    assert runs[4][3] == 99


def write(
    target: list[npt.NDArray[np.uint8]],
    payload: list[Run],
    blocks: list[int],
    first: int,
    low: int,
    high: int,
) -> None:
    """Put a chunk of three blocks where `runs_within` says it goes."""
    copy_runs("t", payload, PagedCache(target, SIZE).runs_within(blocks, first, 3, low, high))


def test_a_chunk_goes_into_its_places_and_no_other(layers: list[npt.NDArray[np.uint8]]) -> None:
    source = PagedCache(layers, SIZE)
    target = [np.full((BLOCKS, NBYTES), 255, np.uint8) for _ in range(LAYERS)]
    write(target, source.runs([5, 0, 2]), [4, 1, 3], 0, 0, 3)
    for layer in range(LAYERS):
        assert [int(block[0]) for block in target[layer]] == [
            *(255, 16 * layer + 0, 255, 16 * layer + 2, 16 * layer + 5, 255)
        ]
        assert all((block == block[0]).all() for block in target[layer])


def test_a_later_chunk_goes_into_later_blocks(layers: list[npt.NDArray[np.uint8]]) -> None:
    source = PagedCache(layers, SIZE)
    target = [np.full((BLOCKS, NBYTES), 255, np.uint8) for _ in range(LAYERS)]
    write(target, source.runs([5, 0, 2]), [4, 1, 3, 0, 2], 2, 0, 5)
    assert [int(block[0]) for block in target[1]] == [16, 255, 18, 21, 255, 255]


@pytest.mark.parametrize(
    ("low", "high", "written"),
    [
        (0, 9, [3, 0, 2]),
        (2, 5, [3, 0, 2]),
        (3, 5, [0, 2]),
        (0, 4, [3, 0]),
        (3, 4, [0]),
        (5, 9, []),
        (0, 2, []),
    ],
)
def test_only_the_wanted_blocks_are_written(
    layers: list[npt.NDArray[np.uint8]], low: int, high: int, written: list[int]
) -> None:
    source = PagedCache(layers, SIZE)
    target = [np.full((BLOCKS, NBYTES), 255, np.uint8) for _ in range(LAYERS)]
    write(target, source.runs([5, 0, 2]), [4, 1, 3, 0, 2], 2, low, high)
    right = dict(zip([3, 0, 2], [5, 0, 2], strict=True))
    for number, layer in enumerate(target):
        assert [int(block[0]) for block in layer] == [
            16 * number + right[block] if block in written else 255 for block in range(BLOCKS)
        ]


def test_blocks_that_were_not_allocated_need_no_place(layers: list[npt.NDArray[np.uint8]]) -> None:
    """The last prompt token may open a block that decode has not."""
    cache = PagedCache(layers, SIZE)
    runs = cache.runs_within([4, 1], 1, 2, 0, 2)
    assert [run is None for run in runs] == [False, True] * LAYERS
    with pytest.raises(IndexError):
        cache.runs_within([4, 1], 1, 2, 0, 3)


def test_a_payload_and_its_targets_must_be_as_many(layers: list[npt.NDArray[np.uint8]]) -> None:
    cache = PagedCache(layers, SIZE)
    with pytest.raises(ChunkCorrupt, match="number of runs is 9, expected 6"):
        copy_runs("t", cache.runs([5, 0, 2]), cache.runs_within([0, 1], 0, 2, 0, 2))


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (SIZE - 1, 1), (SIZE, 1), (SIZE + 1, 2), (10 * SIZE, 10)]
)
def test_blocks_of(layers: list[npt.NDArray[np.uint8]], tokens: int, blocks: int) -> None:
    assert PagedCache(layers, SIZE).blocks_of(tokens) == blocks


@pytest.mark.parametrize(
    "layer",
    [
        np.zeros((2, 8), np.int8),
        np.zeros((2, 4, 2), np.uint8),
        np.zeros((2, 16), np.uint8)[:, ::2],
    ],
    ids=["dtype", "dimensions", "strides"],
)
def test_memory_that_cannot_be_viewed_as_blocks_is_refused(layer: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="a layer must be uint8"):
        PagedCache([layer], SIZE)


def test_memory_spans_every_block_and_is_the_engines_own() -> None:
    whole = np.arange(6 * 64, dtype=np.uint8).reshape(6, 64)
    one, other = PagedCache([whole, whole[::2]], SIZE).memory()  # blocks side by side, and apart
    assert np.array_equal(one, whole.reshape(-1))
    assert np.array_equal(other, whole.reshape(-1)[: 4 * 64 + 64])
    whole[4] = 7
    assert (one[4 * 64 : 5 * 64] == 7).all()
    assert (other[4 * 64 :] == 7).all()
