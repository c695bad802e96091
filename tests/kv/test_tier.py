"""KV in a bucket: keys, sharing, and that nothing but the right bytes ever comes out; a real server."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transport_suite import WAIT_S, same, until

from experiments.s3_server import S3Server
from kv.behind import WriteBehind
from kv.bucket import Bucket, Gate, Stored
from kv.chunk import KVLayout, Run
from kv.errors import ChunkCorrupt, PeerLost, TransferError
from kv.sweep import MARK, Sweeper, doomed, sweep
from kv.tier import PAGES, KVTier, blocks_per_page, page_keys

LAYOUT = KVLayout("model", "torch.bfloat16", layers=3, block_size=256, block_bytes=512, order="x")
RUNS = 6
"""A page has two blocks, because they hold 512 tokens."""
TOKENS = list(range(7 * 512 + 2))
"""Seven full pages and two tokens."""


def pages(count: int, seed: int = 0) -> list[list[Run]]:
    random = np.random.default_rng(seed)
    return [
        [random.integers(0, 256, LAYOUT.block_bytes, dtype=np.uint8) for _ in range(RUNS)]
        for _ in range(count)
    ]


def room(count: int) -> list[list[Run]]:
    return [[np.zeros(LAYOUT.block_bytes, np.uint8) for _ in range(RUNS)] for _ in range(count)]


def loaded(tier: KVTier, keys: Sequence[bytes]) -> list[list[Run]]:
    into = room(len(keys))
    tier.load(keys, into, WAIT_S)
    return into


def equal(left: Sequence[Sequence[Run]], right: Sequence[Sequence[Run]]) -> bool:
    return len(left) == len(right) and all(same(one, other) for one, other in zip(left, right, strict=True))


@pytest.fixture
def tier(bucket: Bucket) -> KVTier:
    return KVTier(bucket, LAYOUT)


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_stands_for_all_tokens_up_to_the_pages_end() -> None:
    keys = page_keys(LAYOUT, TOKENS)
    assert len(keys) == len(set(keys)) == 7
    assert page_keys(LAYOUT, TOKENS[:-2]) == keys
    assert page_keys(LAYOUT, TOKENS[:-3]) == keys[:6]
    for changed in range(0, 7 * 512, 73):
        other = page_keys(LAYOUT, [*TOKENS[:changed], 7777, *TOKENS[changed + 1 :]])
        assert [one == two for one, two in zip(keys, other, strict=True)] == [
            i < changed // 512 for i in range(7)
        ]
    assert not set(page_keys(LAYOUT, TOKENS[512:])) & set(keys)  # the same tokens in another place


@pytest.mark.parametrize(
    ("block_size", "mbytes", "expected"),
    [(16, 2, 4), (16, 16, 1), (128, 2, 4), (128, 1, 4), (16, 1, 8), (1024, 1, 1), (16, 3, 3)],
)
def test_a_page_has_some_megabytes_or_512_tokens(block_size: int, mbytes: int, expected: int) -> None:
    layout = replace(LAYOUT, layers=32, block_size=block_size, block_bytes=mbytes << 15)
    assert blocks_per_page(layout) == expected


@pytest.mark.parametrize("field", KVLayout.__slots__)
def test_another_layout_has_other_keys(field: str) -> None:
    value = getattr(LAYOUT, field)
    other = replace(LAYOUT, **{field: value * 2 or type(value)(1)})
    tokens = list(range(2048))
    assert not set(page_keys(other, tokens)) & set(page_keys(LAYOUT, tokens))


def test_a_salt_keeps_equal_prefixes_apart() -> None:
    assert not set(page_keys(LAYOUT, TOKENS, b"tenant")) & set(page_keys(LAYOUT, TOKENS))


def test_keys_stay_what_they_are() -> None:
    """A change of this would make everybody's stored KV useless: change VERSION and say so."""
    assert page_keys(LAYOUT, TOKENS)[6].hex().startswith("7dbc383c381a1e90fb103a36394ecc86")
    assert page_keys(LAYOUT, TOKENS, b"s")[0].hex().startswith("e3f71ae974ea1848658847aab1a45c6f")


def test_fewer_tokens_than_a_page_have_no_key() -> None:
    assert page_keys(LAYOUT, TOKENS[:511]) == page_keys(LAYOUT, []) == []


# -- put, has, load ----------------------------------------------------------------------------------


def test_what_was_put_is_found_and_loaded(tier: KVTier) -> None:
    keys, sent = tier.keys(TOKENS), pages(7)
    assert tier.has(keys, WAIT_S) == 0
    assert tier.put(keys, sent, WAIT_S) == 7
    assert tier.has(keys, WAIT_S) == 7
    assert equal(loaded(tier, keys), sent)
    assert equal(loaded(tier, [keys[5], keys[2]]), [sent[5], sent[2]])
    tier.load([], [], WAIT_S)


def test_equal_prefixes_share_objects(tier: KVTier, bucket: Bucket) -> None:
    first, second = tier.keys(TOKENS), tier.keys([*TOKENS[: 4 * 512], *range(3 * 512)])
    tier.put(first, pages(7), WAIT_S)
    with closing(Bucket(bucket.settings)) as elsewhere:
        other = KVTier(elsewhere, LAYOUT)
        assert other.has(second, WAIT_S) == 4
        assert other.put(second, pages(7), WAIT_S) == 3
        assert other.put(second, pages(7), WAIT_S) == 0
    assert len(bucket.list()) == 7 + 3
    assert equal(loaded(tier, second), pages(7))


def test_has_counts_up_to_the_first_gap(tier: KVTier, bucket: Bucket) -> None:
    keys = page_keys(LAYOUT, range(512 * 20))
    tier.put(keys, pages(20), WAIT_S)
    for missing in (19, 12, 8, 7, 0):
        bucket.delete(tier.name(keys[missing]))
        assert tier.has(keys, WAIT_S) == missing


def test_a_missing_page_is_named(tier: KVTier) -> None:
    keys = tier.keys(TOKENS)
    tier.put(keys[:2], pages(2), WAIT_S)
    with pytest.raises(PeerLost, match=f"{keys[2].hex()}: not in s3://.*has expired or was swept"):
        loaded(tier, keys[:3])


def test_another_layout_finds_nothing(tier: KVTier, bucket: Bucket) -> None:
    tier.put(tier.keys(TOKENS), pages(7), WAIT_S)
    other = KVTier(bucket, replace(LAYOUT, model="other"))
    assert other.has(other.keys(TOKENS), WAIT_S) == 0
    with pytest.raises(PeerLost):
        loaded(other, tier.keys(TOKENS))


def test_concurrent_writers_of_one_key_are_harmless(tier: KVTier, bucket: Bucket) -> None:
    keys, sent = tier.keys(TOKENS), pages(7)
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            tiers = [KVTier(bucket, LAYOUT) for _ in range(4)]
            puts = [pool.submit(one.put, keys, sent, WAIT_S) for one in tiers]
            until(lambda: tier.has(keys, WAIT_S) == 7, "all are stored")
            assert equal(loaded(tier, keys), sent)
            assert sum(put.result(timeout=WAIT_S) for put in puts) >= 7
            for key in keys:
                bucket.delete(tier.name(key))
            tier._known.clear()


@pytest.mark.parametrize("what", ["runs", "bytes"])
def test_pages_of_another_shape_are_refused(tier: KVTier, what: str) -> None:
    keys, bad = tier.keys(TOKENS)[:1], pages(1)
    bad[0] = bad[0][:-1] if what == "runs" else [run[:-1] for run in bad[0]]
    with pytest.raises(ChunkCorrupt):
        tier.put(keys, bad, WAIT_S)
    with pytest.raises(ChunkCorrupt):
        tier.load(keys, bad, WAIT_S)
    assert tier.has(keys, WAIT_S) == 0


# -- corruption --------------------------------------------------------------------------------------


@pytest.fixture
def stored(tier: KVTier, files: Path) -> tuple[list[bytes], list[Path]]:
    """Two pages: their keys, and their objects as files."""
    keys = tier.keys(TOKENS)[:2]
    tier.put(keys, pages(2), WAIT_S)
    return keys, [files / tier.name(key) for key in keys]


def refused(tier: KVTier, key: bytes, file: Path, content: bytes, bucket: Bucket | None = None) -> bool:
    """Whether a page with that content is refused, deleted, and stored anew by the next put.

    The content is put into the file, where the store's own checksum betrays it, or stored in order.
    """
    good = file.read_bytes()
    assert content != good
    if bucket is None:
        file.write_bytes(content)
    else:
        bucket.put(tier.name(key), [np.frombuffer(content, np.uint8)], Gate())
    try:
        loaded(tier, [key])
    except ChunkCorrupt:
        until(lambda: not file.exists(), "what is corrupt is deleted")
        tier.put([key], pages(1), WAIT_S)
        return file.read_bytes() == good
    return False


@pytest.mark.parametrize("how", ["on disk", "when it was stored"])
def test_any_flipped_bit_is_found(
    tier: KVTier, bucket: Bucket, stored: tuple[list[bytes], list[Path]], how: str
) -> None:
    (key, _), (file, _) = stored
    good, header = file.read_bytes(), tier._head
    random = np.random.default_rng(0)
    places = [*range(0, header, 5), header - 1, header, len(good) - 1, *random.integers(0, len(good), 30)]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << int(random.integers(8))
        assert refused(tier, key, file, bytes(bad), None if how == "on disk" else bucket), f"byte {place}"


@pytest.mark.parametrize("nbytes", [0, 1, 40, 147, 148, 1000, -1])
def test_a_truncated_object_is_found(
    tier: KVTier, stored: tuple[list[bytes], list[Path]], nbytes: int
) -> None:
    (key, _), (file, _) = stored
    assert refused(tier, key, file, file.read_bytes()[:nbytes])


def test_an_object_that_is_too_long_is_found(tier: KVTier, stored: tuple[list[bytes], list[Path]]) -> None:
    (key, _), (file, _) = stored
    assert refused(tier, key, file, file.read_bytes() + b"\0")


def test_a_swapped_object_is_found(
    tier: KVTier, bucket: Bucket, stored: tuple[list[bytes], list[Path]]
) -> None:
    """Whole and sound, but another page."""
    (key, _), (file, other) = stored
    assert refused(tier, key, file, other.read_bytes())
    assert refused(tier, key, file, other.read_bytes(), bucket)


def test_an_object_of_another_layout_is_found(
    tier: KVTier, bucket: Bucket, files: Path, stored: tuple[list[bytes], list[Path]]
) -> None:
    (key, _), (file, _) = stored
    alike = KVTier(bucket, replace(LAYOUT, order="y"))  # of the same size
    alike.put([key], pages(1), WAIT_S)
    assert refused(tier, key, file, (files / alike.name(key)).read_bytes(), bucket)


def test_swapped_layers_and_zeros_are_found(
    tier: KVTier, bucket: Bucket, stored: tuple[list[bytes], list[Path]]
) -> None:
    (key, _), (file, _) = stored
    good, at, size = file.read_bytes(), tier._head, LAYOUT.block_bytes
    swapped = good[:at] + good[at + size : at + 2 * size] + good[at : at + size] + good[at + 2 * size :]
    assert refused(tier, key, file, swapped, bucket)
    assert refused(tier, key, file, bytes(len(good)), bucket)
    assert refused(tier, key, file, good[:at] + bytes(len(good) - at), bucket)


# -- the sweeper -------------------------------------------------------------------------------------


def test_what_is_deleted_is_expired_or_the_oldest_above_the_limit() -> None:
    objects = [
        Stored("pages/new", 10, 99.0),
        Stored("handover/old", 10, 1.0),
        Stored("pages/mid", 10, 50.0),
        Stored("handover/mid", 10, 49.0),
        Stored("pages/old", 10, 2.0),
    ]

    def names(expiry_s: float, size_limit: int) -> list[str]:
        return [stored.name for stored in doomed(objects, 100.0, expiry_s, size_limit)]

    assert names(1000, 50) == []
    assert names(60, 1000) == ["handover/old", "pages/old"]
    assert names(1000, 49) == ["pages/old"]
    assert names(1000, 25) == ["pages/old", "pages/mid", "pages/new"]
    assert names(60, 20) == ["handover/old", "pages/old", "pages/mid"]
    assert names(1000, 0) == ["pages/old", "pages/mid", "pages/new"]  # payloads on their way are spared


def age(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))


def test_expired_objects_are_swept(
    tier: KVTier, bucket: Bucket, stored: tuple[list[bytes], list[Path]]
) -> None:
    keys, (old, _) = stored
    age(old, bucket.settings.expiry_s + 60)
    bucket.put("handover/left", [np.zeros(8, np.uint8)], Gate())
    swept = sweep(bucket)
    assert (swept.deleted, swept.kept) == (1, 2)
    assert swept.kept_nbytes == swept.deleted_nbytes + 8
    assert tier.has(keys, WAIT_S) == 0
    assert tier.has(keys[1:], WAIT_S) == 1
    with pytest.raises(PeerLost, match="expired"):
        loaded(tier, keys)


def test_a_page_in_use_is_renewed_before_it_expires(
    tier: KVTier, bucket: Bucket, stored: tuple[list[bytes], list[Path]]
) -> None:
    keys, (old, recent) = stored
    age(old, bucket.settings.expiry_s * 0.6)
    age(recent, bucket.settings.expiry_s * 0.4)
    assert KVTier(bucket, LAYOUT).put(keys, pages(2), WAIT_S) == 1
    assert time.time() - old.stat().st_mtime < 60


def test_the_oldest_pages_make_room(tier: KVTier, bucket: Bucket, files: Path) -> None:
    keys = tier.keys(TOKENS)
    tier.put(keys, pages(7), WAIT_S)
    for place, key in enumerate(keys):
        age(files / tier.name(key), 1000 - 10 * place)
    size = (files / tier.name(keys[0])).stat().st_size
    with closing(Bucket(replace(bucket.settings, size_limit=3 * size + 1))) as limited:
        with ThreadPoolExecutor(3) as pool:  # as many as like to
            sweeps = [pool.submit(sweep, limited) for _ in range(3)]
            assert all(each.result(timeout=60).kept <= 7 for each in sweeps)
        assert sweep(limited).kept == 3
    assert [(files / tier.name(key)).exists() for key in keys] == [False] * 4 + [True] * 3


def test_the_sweeper_sweeps_until_it_is_closed(bucket: Bucket) -> None:
    bucket.put(f"{PAGES}x", [np.zeros(9, np.uint8)], Gate())
    with closing(Bucket(replace(bucket.settings, size_limit=8))) as limited:
        with closing(Sweeper(limited, interval_s=0.05)) as sweeper:
            until(lambda: [s.name for s in bucket.list()] == [MARK], "it is swept")
        assert not sweeper._thread.is_alive()


def test_of_several_sweepers_one_sweeps(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []

    def noting(of: Bucket, *args: Any) -> Any:
        time.sleep(1.1)  # the server's clock tells whole seconds
        swept.append(of.settings.connections)
        return sweep(of, *args)

    monkeypatch.setattr("kv.sweep.sweep", noting)
    with closing(Bucket(replace(bucket.settings, connections=3))) as other:
        first = Sweeper(bucket, interval_s=3600)
        second = Sweeper(other, interval_s=3600)
        for sweeper in (first, second, second, first, first, second):
            sweeper.turn()
        for sweeper in (first, second):
            sweeper.close()
    # The second finds a mark that it had not seen, then the same again: nobody has swept since, so it does.
    assert swept == [bucket.settings.connections, 3, bucket.settings.connections]


def test_a_sweep_of_a_server_that_is_down_says_so(own: S3Server, bucket: Bucket) -> None:
    own.stop()
    try:
        with pytest.raises(TransferError, match=f"at {own.settings.endpoint}"):
            sweep(bucket, 2.0)
    finally:
        own.start()


# -- write-behind ------------------------------------------------------------------------------------


@pytest.fixture
def behind(tier: KVTier) -> Iterator[WriteBehind]:
    with closing(WriteBehind(tier, 4 * tier.page_nbytes, timeout_s=1.0)) as behind:
        yield behind


def test_pages_are_stored_after_they_were_given_back(tier: KVTier, behind: WriteBehind) -> None:
    keys, sent = tier.keys(TOKENS)[:4], pages(4)
    behind.put(keys, sent)
    for run in sent[0] + sent[1] + sent[2] + sent[3]:
        run[:] = 0  # the engine has other plans
    assert behind.flush(WAIT_S)
    assert equal(loaded(tier, keys), pages(4))
    behind.put(keys, pages(4))
    assert behind.counts().waiting == 0  # known to be stored: not even copied
    assert behind.counts().stored == 4


def test_a_store_that_is_down_costs_pages_and_no_time(
    own: S3Server, tier: KVTier, behind: WriteBehind, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tier.keys(TOKENS)
    os.kill(own.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        behind.put(keys, pages(7))  # there is memory for four
        assert time.monotonic() - started < 0.9  # an upload's deadline
        assert behind.flush(WAIT_S)
    finally:
        os.kill(own.pid, signal.SIGCONT)
    counts = behind.counts()
    assert (counts.stored, counts.dropped, counts.failed, counts.waiting) == (0, 3, 4, 0)
    assert "KV is not kept for later" in caplog.text

    def stored_now() -> bool:
        behind.put(keys[:4], pages(4))
        return behind.flush(WAIT_S) and behind.counts().stored >= 4

    until(stored_now, "all are stored again")
    assert equal(loaded(tier, keys[:4]), pages(4))


def test_what_comes_after_the_end_is_dropped(tier: KVTier, behind: WriteBehind) -> None:
    behind.put(tier.keys(TOKENS)[:2], pages(2))
    behind.close()
    behind.put(tier.keys(TOKENS)[2:4], pages(2))
    counts = behind.counts()
    assert (counts.stored, counts.dropped, counts.waiting) == (2, 2, 0)
