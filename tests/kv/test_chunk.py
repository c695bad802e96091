"""Chunk headers: what they prove and what they say when it is not so; errors that cross processes."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from kv.chunk import ChunkHeader, KVLayout, Run, checksum, copy_runs
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
    checksums = tuple(checksum(run) for run in RUNS)
    return ChunkHeader("r1.0", LAYOUT, 3, (256, 384), (0, 8), checksums, sum(run.nbytes for run in RUNS))


def test_a_checksum_covers_the_bytes_in_order_wherever_they_lie() -> None:
    memory = np.tile(RUNS[0], (3, 1))
    assert checksum(memory[1]) == checksum(RUNS[0]) == checksum(RUNS[0].copy())
    assert checksum(RUNS[0]) != checksum(np.ascontiguousarray(RUNS[0][::-1]))
    assert checksum(RUNS[0]) != checksum(RUNS[0][:-1])
    assert checksum(np.empty(0, np.uint8)) == 0x2D06800538D394C2  # XXH3-64 of nothing, as published


def test_the_promised_payload_passes() -> None:
    header().verify(RUNS)


@pytest.mark.parametrize("wanted", [(), (0,), (1,)], ids=str)
def test_the_promised_part_passes(wanted: tuple[int, ...]) -> None:
    header().verify([run if i in wanted else None for i, run in enumerate(RUNS)])


@pytest.mark.parametrize(("run", "at"), [(0, 0), (0, 99), (1, 0), (1, 27)])
@pytest.mark.parametrize("partial", [False, True])
def test_one_wrong_bit_anywhere_is_found(run: int, at: int, partial: bool) -> None:
    wrong: list[Run | None] = [None if partial and i != run else part.copy() for i, part in enumerate(RUNS)]
    wrong[run][at] ^= 1  # type: ignore[index]
    with pytest.raises(ChunkCorrupt) as caught:
        header().verify(wrong)
    error = caught.value
    assert error.request_id == "r1.0"
    assert error.field == f"checksum of run {run} of chunk 3 (tokens 256-384)"
    assert str(error) == f"KV of request r1.0: {error.field} is {error.found}, expected {error.expected}"


@pytest.mark.parametrize("runs", [RUNS[:1], [*RUNS, RUNS[0]], []], ids=["short", "long", "empty"])
def test_a_payload_of_another_size_is_found(runs: list[np.ndarray]) -> None:
    with pytest.raises(ChunkCorrupt) as caught:
        header().verify(runs)
    assert caught.value.field == "runs of chunk 3"
    assert (caught.value.expected, caught.value.found) == (2, len(runs))


@pytest.mark.parametrize(
    "runs",
    [[RUNS[0][:-1], RUNS[1]], [RUNS[0], np.append(RUNS[1], RUNS[1][:1])], RUNS[::-1]],
    ids=["short", "long", "swapped"],
)
def test_runs_of_another_size_are_found(runs: list[np.ndarray]) -> None:
    with pytest.raises(ChunkCorrupt, match=r"checksum of run [01] of chunk 3"):
        header().verify(runs)


def test_copying_into_memory_of_another_size_writes_nothing() -> None:
    into = [np.zeros(100, np.uint8), np.zeros(29, np.uint8)]
    with pytest.raises(ChunkCorrupt, match="KV of request t: size of a run is 28, expected 29"):
        copy_runs("t", RUNS, into)
    with pytest.raises(ChunkCorrupt, match="KV of request t: number of runs is 2, expected 1"):
        copy_runs("t", RUNS, into[:1])
    assert not any(run.any() for run in into)


def test_equal_layouts_pass() -> None:
    LAYOUT.require_compatible(replace(LAYOUT))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("model", "m2"), ("dtype", "torch.float16"), ("layers", 9), ("block_size", 64)),
        *(("block_bytes", 8192), ("order", "vec:2x128x64")),
    ],
)
def test_a_layout_that_differs_is_named_with_both_values(field: str, value: object) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        LAYOUT.require_compatible(replace(LAYOUT, **{field: value}))
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (
        field,
        getattr(LAYOUT, field),
        value,
    )
    for part in (field, repr(getattr(LAYOUT, field)), repr(value)):
        assert part in str(caught.value)


def test_the_first_difference_is_the_one_that_is_named() -> None:
    with pytest.raises(LayoutMismatch, match="model is"):
        LAYOUT.require_compatible(replace(LAYOUT, model="m2", order="x"))


KNOWN = replace(LAYOUT, heads=2, head_dim=8, packing="0 1024*1, 1024 1024*1")


def test_blocks_of_known_packings_may_differ_in_size_and_order() -> None:
    other = replace(KNOWN, block_size=64, block_bytes=4096, order="amx", packing="0 512*1, 512 512*1")
    KNOWN.require_compatible(other)
    other.require_compatible(KNOWN)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "m2"), ("dtype", "torch.float16"), ("layers", 9), ("heads", 4), ("head_dim", 16)],
)
def test_nothing_else_may_differ(field: str, value: object) -> None:
    other = replace(KNOWN, **{"block_size": 64, "packing": "0 512*1, 512 512*1", field: value})
    with pytest.raises(LayoutMismatch) as caught:
        KNOWN.require_compatible(other)
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (
        field,
        getattr(KNOWN, field),
        value,
    )


@pytest.mark.parametrize("unknown", [0, 1])
def test_both_packings_must_be_known(unknown: int) -> None:
    pair = [KNOWN, replace(KNOWN, block_size=64, packing="0 512*1, 512 512*1")]
    pair[unknown] = replace(pair[unknown], packing="")
    with pytest.raises(LayoutMismatch, match="block_size is 128 here and 64 there"):
        pair[0].require_compatible(pair[1])


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
