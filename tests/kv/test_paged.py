"""A paged cache as runs of bytes."""

import numpy as np
import numpy.typing as npt
import pytest

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


def test_writing_puts_every_block_in_its_place_and_touches_no_other(
    layers: list[npt.NDArray[np.uint8]],
) -> None:
    source = PagedCache(layers, SIZE)
    target = [np.full((BLOCKS, NBYTES), 255, np.uint8) for _ in range(LAYERS)]
    PagedCache(target, SIZE).write([4, 1, 3], source.runs([5, 0, 2]), slice(None))
    for layer in range(LAYERS):
        assert [int(block[0]) for block in target[layer]] == [
            *(255, 16 * layer + 0, 255, 16 * layer + 2, 16 * layer + 5, 255)
        ]
        assert all((block == block[0]).all() for block in target[layer])


def test_only_the_blocks_to_keep_are_written(layers: list[npt.NDArray[np.uint8]]) -> None:
    source = PagedCache(layers, SIZE)
    target = [np.full((BLOCKS, NBYTES), 255, np.uint8) for _ in range(LAYERS)]
    PagedCache(target, SIZE).write([0], source.runs([5, 0, 2]), slice(1, 2))
    assert [int(block[0]) for block in target[2]] == [32, *[255] * 5]


def test_a_payload_and_its_targets_must_be_as_many(layers: list[npt.NDArray[np.uint8]]) -> None:
    cache = PagedCache(layers, SIZE)
    with pytest.raises(ValueError, match="zip"):
        cache.write([0, 1], cache.runs([5, 0, 2]), slice(None))


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
