"""A handover between engines of different block sizes and ranks: real sender, receiver and transports."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

import actors.prefill
import kv.tier
from actors.decode import Receiver, Target
from actors.loading import Loader
from actors.marks import Marks
from actors.messages import Chunk, Delivery
from actors.peers import OnTaken
from actors.prefill import Sender
from actors.recall import Recall
from actors.rungs import Rungs
from actors.steps import Meter
from experiments.s3_server import S3Server
from kv.behind import WriteBehind
from kv.bucket import Bucket
from kv.chunk import ChunkHeader, KVLayout
from kv.memory import MemoryTransport
from kv.nixl import NixlTransport
from kv.paged import PagedCache
from kv.tcp import TcpTransport
from kv.transport import Transport

LAYERS, HEADS, DIM, PROMPT = 3, 4, 16, 150
WITHIN_S = 10.0
TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "memory": MemoryTransport,
    "tcp": lambda: TcpTransport("127.0.0.1", b"k" * 32),
    "nixl": lambda: NixlTransport("127.0.0.1"),
}


class Engine:
    """A cache whose keys lie with a token's first elements first, or values so; and how it reads a token.

    Of several ranks, each has its heads in memory of its own.
    """

    def __init__(self, size: int, across: bool, seed: int, ranks: int = 1) -> None:
        part, count = size * DIM, -(-PROMPT // size) + 2
        rows, columns = f"{part}*1", f"{size}*1 {DIM}*{size}"
        packing = f"0 {columns}, {part} {rows}" if across else f"0 {rows}, {part} {rows}"
        nbytes = HEADS * 2 * part * 2
        self.layout = KVLayout("m", "bf16", LAYERS, size, nbytes, str(across), HEADS, DIM, packing, ranks)
        random = np.random.default_rng(seed)
        shape = (count, nbytes // ranks)
        self.layers = [random.integers(0, 256, shape, np.uint8) for _ in range(LAYERS * ranks)]
        self.cache = PagedCache(self.layers, size, ranks)
        self.blocks = random.permutation(count)[: count - 2].tolist()
        self.across, self.size = across, size

    def heads(self, token: int) -> Iterator[npt.NDArray[np.uint16]]:
        """Of each layer and rank: the heads of the block that holds a token, ``[heads, 2, elements]``."""
        for layer in self.layers:
            share = layer[self.blocks[token // self.size]].view(np.uint16)
            yield share.reshape(-1, 2, self.size * DIM)

    def keys(self, token: int) -> list[list[int]]:
        """By layer and head."""
        at = token % self.size
        across, along = slice(at, None, self.size), slice(at * DIM, (at + 1) * DIM)
        return [
            head[0, across if self.across else along].tolist() for part in self.heads(token) for head in part
        ]

    def values(self, token: int) -> list[list[int]]:
        at = token % self.size * DIM
        return [head[1, at : at + DIM].tolist() for part in self.heads(token) for head in part]

    def tokens(self, *held: int) -> list[object]:
        return [(self.keys(token), self.values(token)) for token in held]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    try:
        made = TRANSPORTS[request.param]()
    except ImportError as error:
        pytest.skip(f"NIXL cannot be imported ({error}): pip install 'handoff[nixl]'")
    with closing(made):
        yield made


def hand_over(
    transport: Transport,
    source: Engine,
    target: Engine,
    skip: int,
    spoil: Callable[[Chunk], Chunk] = lambda chunk: chunk,
) -> list[tuple[str, str]]:
    """Prefill on one engine in steps of 64 tokens, load in the other; return failures."""
    failures: list[tuple[str, str]] = []

    def post(peer: str, delivery: Delivery, done: OnTaken) -> None:
        receiver.deliver(spoil(delivery) if isinstance(delivery, Chunk) else delivery, done)

    rungs = Rungs({transport.name: transport})
    rungs.register([*source.cache.memory(), *target.cache.memory()])
    sender = Sender("prefill-worker", source.cache, source.layout, rungs, post, lambda: None)
    receiver = Receiver(
        target.cache,
        target.layout,
        rungs,
        Marks(),
        lambda: None,
        lambda _, asked, timeout_s: sender.again(asked),
        lambda *failure: failures.append(failure),
    )
    receiver.expect("r", WITHIN_S)
    receiver.open("r", Target(target.blocks, skip, PROMPT))
    sender.open("r", "peer")
    for end in (64, 128, PROMPT):
        sender.valid("r", source.blocks, end - (end % source.size if end < PROMPT else 0))
    sender.finish("r", 7)
    deadline = time.monotonic() + WITHIN_S
    while not failures and "r" not in receiver.take_finished():
        assert time.monotonic() < deadline, f"not loaded within {WITHIN_S:g} s"
        time.sleep(0.002)
    receiver.stop()
    while not failures and transport.live() != (0, 0):
        assert time.monotonic() < deadline, f"chunks are live after {WITHIN_S:g} s: {transport.live()}"
        time.sleep(0.002)
    return failures


@pytest.mark.parametrize(("theirs", "ours"), [(32, 8), (8, 32), (24, 32), (32, 24), (16, 16)])
@pytest.mark.parametrize("blocks_held", [0, 2])
def test_every_token_arrives(
    transport: Transport, theirs: int, ours: int, blocks_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.prefill, "MAX_CHUNK_BYTES", 30_000)  # so that there are several chunks
    source, target = Engine(theirs, across=True, seed=1), Engine(ours, across=False, seed=2)
    skip = blocks_held * ours
    before = target.tokens(*range(skip))
    assert hand_over(transport, source, target, skip) == []
    assert target.tokens(*range(skip, PROMPT)) == source.tokens(*range(skip, PROMPT))
    assert target.tokens(*range(skip)) == before


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product((1, 2, 4), (1, 2, 4))))
@pytest.mark.parametrize(("size", "across"), [(16, False), (16, True), (32, False)])
def test_every_rank_gets_its_heads(
    transport: Transport, theirs: int, ours: int, size: int, across: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between equal blocks, and where they must be converted as well."""
    monkeypatch.setattr(actors.prefill, "MAX_CHUNK_BYTES", 30_000)
    source, target = Engine(size, across, 1, theirs), Engine(16, False, 2, ours)
    before = target.tokens(*range(16))
    assert hand_over(transport, source, target, 16) == []
    assert target.tokens(*range(16, PROMPT)) == source.tokens(*range(16, PROMPT))
    assert target.tokens(*range(16)) == before


def test_parts_of_what_one_rank_has_need_no_memory_aside() -> None:
    """From more ranks to fewer, where blocks are equal: a chunk is fetched to where it belongs."""
    source, target = Engine(16, False, 1, 4), Engine(16, False, 2, 2)
    loader = Loader(target.cache, target.layout, lambda memory: pytest.fail("memory aside was registered"))
    header = ChunkHeader("r", source.layout, 0, (0, 64), (0, LAYERS), (), 0)
    into = loader.landing(header, target.blocks, (0, 64)).into
    assert len(into) == LAYERS * 4 * 4
    assert all(
        run is not None and any(np.shares_memory(run, layer) for layer in target.layers) for run in into
    )


def test_what_was_damaged_is_not_converted() -> None:
    source, target = Engine(32, across=True, seed=1), Engine(8, across=False, seed=2)
    before = target.tokens(*range(PROMPT))

    def spoil(chunk: Chunk) -> Chunk:
        sums = (chunk.header.checksums[0] ^ 1, *chunk.header.checksums[1:])
        return replace(chunk, header=replace(chunk.header, checksums=sums))

    ((_, reason),) = hand_over(MemoryTransport(), source, target, 0, spoil)
    # whichever is seen first: the damage, or that its only rung is broken by it
    assert "checksum of run 0" in reason or "memory broken (corrupt)" in reason
    assert target.tokens(*range(PROMPT)) == before


def test_a_chunk_that_starts_within_a_block_is_refused() -> None:
    def spoil(chunk: Chunk) -> Chunk:
        return replace(chunk, header=replace(chunk.header, tokens=(5, 64)))

    source, target = Engine(32, across=True, seed=1), Engine(8, across=False, seed=2)
    ((_, reason),) = hand_over(MemoryTransport(), source, target, 0, spoil)
    assert "first token is 5, expected a multiple of 32" in reason


def test_another_model_is_refused() -> None:
    def spoil(chunk: Chunk) -> Chunk:
        return replace(chunk, header=replace(chunk.header, layout=replace(source.layout, model="n")))

    source, target = Engine(32, across=True, seed=1), Engine(8, across=False, seed=2)
    ((_, reason),) = hand_over(MemoryTransport(), source, target, 0, spoil)
    assert "model is 'm' here and 'n' there" in reason


@pytest.mark.parametrize(("from_ranks", "to_ranks"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_pages_in_a_bucket_are_converted(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, from_ranks: int, to_ranks: int
) -> None:
    """What an engine of other blocks has kept is loaded: but for what the engine has, and what is its own."""
    monkeypatch.setattr(kv.tier, "PAGE_TOKENS", 48)
    theirs, ours = Engine(16, True, 1, from_ranks), Engine(24, False, 2, to_ranks)
    prompt = list(range(PROMPT))
    before = ours.tokens(*range(24), *range(144, PROMPT))
    with closing(Bucket(replace(s3.settings, prefix="t/converted"))) as bucket:
        tier = kv.tier.KVTier(bucket, theirs.layout)
        pages = [theirs.cache.runs(theirs.blocks[3 * page : 3 * page + 3]) for page in range(3)]
        with closing(WriteBehind(tier, 1 << 20, WITHIN_S)) as behind:
            assert behind.put(tier.keys(prompt), pages)
        with closing(Recall(bucket, ours.layout, ours.cache, Meter(), lambda: None)) as recall:
            recall.learn(theirs.layout)
            recall.learn(replace(theirs.layout, dtype="float16"))  # cannot be converted: not looked for
            assert [tier.layout for tier in recall.tiers] == [ours.layout, theirs.layout]
            assert recall.ask("r", prompt, b"", 24)
            deadline = time.monotonic() + WITHIN_S
            while (found := recall.answer("r")) is None:
                assert time.monotonic() < deadline, "no answer"
                time.sleep(0.001)
            assert (found.start, found.end) == (24, 144)
            recall.load("r", ours.blocks, (24, 144))
            while not (finished := recall.take_finished())[0]:
                assert time.monotonic() < deadline, "not loaded"
                time.sleep(0.001)
            assert finished == ({"r"}, set())
    assert ours.tokens(*range(24, 144)) == theirs.tokens(*range(24, 144))
    assert ours.tokens(*range(24), *range(144, PROMPT)) == before
