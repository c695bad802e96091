"""Chunk headers: what they prove and what they say when it is not so; errors that cross processes."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from kv.chunk import ChunkHeader, KVLayout, digest
from kv.errors import (
    ChunkCorrupt,
    KVError,
    LayoutMismatch,
    PeerLost,
    StoreFull,
    TransferError,
    TransferTimeout,
)

LAYOUT = KVLayout("m1", "torch.bfloat16", 8, 128, 4096, "amx:2x128x64")
RUNS = [np.arange(100, dtype=np.uint8), np.full(28, 7, np.uint8)]


def header() -> ChunkHeader:
    checksum, nbytes = digest(RUNS)
    return ChunkHeader("r1.0", LAYOUT, 3, (256, 384), (0, 8), nbytes, checksum)


def test_a_digest_covers_the_bytes_in_order_however_they_are_cut() -> None:
    whole = np.concatenate(RUNS)
    assert digest(RUNS) == digest([whole]) == digest([whole[:1], whole[1:64], whole[64:]])
    assert digest(RUNS) != digest(RUNS[::-1])
    assert digest([]) == (digest([np.empty(0, np.uint8)])[0], 0)


def test_the_promised_payload_passes() -> None:
    header().verify(RUNS)


@pytest.mark.parametrize("at", [0, 99, 127])
def test_one_wrong_bit_anywhere_is_found(at: int) -> None:
    wrong = np.concatenate(RUNS)
    wrong[at] ^= 1
    with pytest.raises(ChunkCorrupt) as caught:
        header().verify([wrong])
    error = caught.value
    assert error.request_id == "r1.0"
    assert error.field == "checksum of chunk 3 (tokens 256-384)"
    assert str(error) == f"KV of request r1.0: {error.field} is {error.found}, expected {error.expected}"


@pytest.mark.parametrize("runs", [RUNS[:1], [*RUNS, RUNS[0]], []], ids=["short", "long", "empty"])
def test_a_payload_of_another_size_is_found(runs: list[np.ndarray]) -> None:
    with pytest.raises(ChunkCorrupt) as caught:
        header().verify(runs)
    assert caught.value.field == "size of chunk 3"
    assert caught.value.expected == 128
    assert caught.value.found == sum(run.nbytes for run in runs)


def test_equal_layouts_pass() -> None:
    LAYOUT.require_equal(replace(LAYOUT))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model", "m2"), ("dtype", "torch.float16"), ("layers", 9), ("block_size", 64)),
        *(("block_bytes", 8192), ("order", "vec:2x128x64")),
    ],
)
def test_a_layout_that_differs_is_named_with_both_values(field: str, value: object) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        LAYOUT.require_equal(replace(LAYOUT, **{field: value}))
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (
        field,
        getattr(LAYOUT, field),
        value,
    )
    for part in (field, repr(getattr(LAYOUT, field)), repr(value)):
        assert part in str(caught.value)


def test_the_first_difference_is_the_one_that_is_named() -> None:
    with pytest.raises(LayoutMismatch, match="model is"):
        LAYOUT.require_equal(replace(LAYOUT, model="m2", order="x"))


@pytest.mark.parametrize(
    "error",
    [
        ChunkCorrupt("r1", "size", 3, 4),
        LayoutMismatch("dtype", "a", "b"),
        *(kind("what happened") for kind in (TransferTimeout, PeerLost, StoreFull)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: KVError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.args) == (type(error), str(error), error.args)
    assert isinstance(error, TransferError) is not isinstance(error, LayoutMismatch)
