"""A sender and a receiver back to back: real threads, real bytes, no Ray and no engine.

`Wire` stands between them. It delivers in the order and at the moment that a test says, and may change
what it delivers.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

import actors.decode
import actors.prefill
from actors.decode import Receiver, Target
from actors.marks import Marks
from actors.messages import Chunk, Delivery, HandoverEnd, HandoverFailed
from actors.prefill import Sender
from kv.chunk import KVLayout, Run
from kv.memory import MemoryTransport
from kv.paged import PagedCache

LAYERS, BLOCKS, SIZE, NBYTES = 3, 16, 4, 64
BLOCK_PAYLOAD = LAYERS * NBYTES
FIRST_TOKEN = 4711
RID = "r.0"
PROMPT = 4 * SIZE + 2  # five blocks, the last one not full
SOURCE, TARGET = [7, 3, 9, 1, 5], [2, 8, 4, 11, 6]
WITHIN_S = 5.0


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WITHIN_S:g} s: {what}"
        time.sleep(0.001)


class Gate(MemoryTransport):
    """A transport whose fetches wait until they are let through."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        super().__init__(capacity)
        self.open = threading.Event()
        self.open.set()
        self.waiting = 0

    def fetch(self, ticket: object, timeout_s: float) -> list[Run]:
        self.waiting += 1
        assert self.open.wait(WITHIN_S)
        return super().fetch(ticket, timeout_s)

    def payload(self, ticket: str) -> list[Run]:
        """The stored runs themselves, for tests that damage them."""
        return self._payloads[ticket]


@dataclass
class Wire:
    """What the sender has posted and the receiver has not been given yet."""

    posted: list[tuple[Delivery, Callable[[], None]]] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    taken: list[Callable[[], None]] = field(default_factory=list)

    def post(self, peer: str, delivery: Delivery, taken: Callable[[], None]) -> None:
        self.peers.append(peer)
        self.posted.append((delivery, taken))

    def chunks(self) -> list[Chunk]:
        return [delivery for delivery, _ in self.posted if isinstance(delivery, Chunk)]


class Pair:
    """Two engines' caches, the sender over one and the receiver over the other."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        random = np.random.default_rng(0)
        self.source = [random.integers(0, 256, (BLOCKS, NBYTES), np.uint8) for _ in range(LAYERS)]
        self.target = [np.zeros((BLOCKS, NBYTES), np.uint8) for _ in range(LAYERS)]
        self.layout = KVLayout("m", "torch.bfloat16", LAYERS, SIZE, NBYTES, "vec:1")
        self.transport, self.wire, self.marks = Gate(capacity), Wire(), Marks()
        self.failures: list[tuple[str, str]] = []
        self.received: list[str] = []
        self.sent: list[str] = []
        self.sender = Sender(
            PagedCache(self.source, SIZE), self.layout, self.transport, self.wire.post, lambda: None
        )
        self.receiver = Receiver(
            PagedCache(self.target, SIZE),
            self.layout,
            self.transport,
            self.marks,
            lambda: None,
            lambda request_id, reason: self.failures.append((request_id, reason)),
        )

    # -- prefill's engine --------------------------------------------------------------------

    def prefill(
        self,
        ends: Sequence[int] = (2 * SIZE, 4 * SIZE, PROMPT),
        request_id: str = RID,
        first_token: int | None = FIRST_TOKEN,
    ) -> None:
        """Compute a prompt in steps, and wait until all of it has been posted."""
        self.sender.open(request_id, "decode-worker")
        for end in ends:
            self.sender.valid(request_id, SOURCE, end)
        assert self.sender.finish(request_id, first_token)
        self.settle()

    def settle(self) -> None:
        self.sender.settle(WITHIN_S)
        self.sent += self.sender.take_finished()

    # -- the wire ----------------------------------------------------------------------------

    def deliver(self, *order: int) -> None:
        """Deliver what has been posted, all of it or the given positions; it stays taken until `release`."""
        posted, self.wire.posted = self.wire.posted, []
        for index in order or range(len(posted)):
            self.receiver.deliver(posted[index][0])
        self.wire.taken += [taken for _, taken in posted]

    def release(self) -> None:
        """The peer has taken everything."""
        for taken in self.wire.taken:
            taken()

    # -- decode's engine ---------------------------------------------------------------------

    def expect(self, timeout_s: float = 60.0, request_id: str = RID) -> None:
        self.receiver.expect(request_id, timeout_s)

    def open(self, skip: int = 0, end: int = PROMPT, request_id: str = RID) -> None:
        self.receiver.open(request_id, Target(TARGET, skip, end))

    def finished(self) -> list[str]:
        self.received += self.receiver.take_finished()
        return self.received

    def loaded(self) -> None:
        """Wait until the request is loaded; check that it is so once, and without a failure."""
        until(lambda: self.finished() or self.failures, "loaded or failed")
        assert (self.finished(), self.failures) == ([RID], [])

    def failed(self) -> str:
        """Wait for the failure, which is said once; return the reason."""
        until(lambda: self.failures, "a failure")
        ((request_id, reason),) = self.failures
        assert request_id == RID
        assert self.finished() == []
        return reason

    def close(self, request_id: str = RID) -> None:
        self.receiver.close(request_id)

    def written(self) -> list[int]:
        """Positions in TARGET that hold what SOURCE holds there; all other blocks are untouched."""
        right = []
        for position, block in enumerate(TARGET):
            blocks = [layer[block] for layer in self.target]
            if all((a == b[SOURCE[position]]).all() for a, b in zip(blocks, self.source, strict=True)):
                right.append(position)
            else:
                assert not any(block.any() for block in blocks), f"block {position} is neither"
        others = [block for block in range(BLOCKS) if block not in TARGET]
        assert not any(layer[others].any() for layer in self.target), "written outside the request's blocks"
        return right

    def quiet(self) -> None:
        """Nothing is left of any request."""
        self.release()
        until(lambda: self.transport.live() == (0, 0), "payloads are released")
        assert self.receiver.waiting() == 0
        assert list(self.sender.open_requests()) == []


@contextmanager
def connected(capacity: int = 1 << 30) -> Iterator[Pair]:
    pair = Pair(capacity)
    try:
        yield pair
    finally:
        pair.transport.open.set()
        pair.receiver.stop()
        pair.sender.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with connected() as pair:
        yield pair


ALL = [0, 1, 2, 3, 4]


# -- what goes over ------------------------------------------------------------------------------


def test_the_steps_of_prefill_become_chunks_and_an_end(pair: Pair) -> None:
    pair.prefill()
    *chunks, end = [delivery for delivery, _ in pair.wire.posted]
    assert [(c.header.index, c.header.tokens, c.header.nbytes) for c in chunks] == [
        (0, (0, 2 * SIZE), 2 * BLOCK_PAYLOAD),
        (1, (2 * SIZE, 4 * SIZE), 2 * BLOCK_PAYLOAD),
        (2, (4 * SIZE, PROMPT), BLOCK_PAYLOAD),
    ]
    assert {(c.header.request_id, c.header.layout, c.header.layers) for c in chunks} == {
        (RID, pair.layout, (0, LAYERS))
    }
    assert end == HandoverEnd(RID, 3, PROMPT, FIRST_TOKEN, 5 * BLOCK_PAYLOAD)
    assert set(pair.wire.peers) == {"decode-worker"}
    assert pair.transport.live() == (3, 5 * BLOCK_PAYLOAD)
    assert pair.sent == [RID]


def test_a_long_range_is_split_on_block_boundaries(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.prefill, "MAX_CHUNK_BYTES", 2 * BLOCK_PAYLOAD)
    pair.prefill(ends=[PROMPT])
    tokens = [chunk.header.tokens for chunk in pair.wire.chunks()]
    assert tokens == [(0, 2 * SIZE), (2 * SIZE, 4 * SIZE), (4 * SIZE, PROMPT)]


def test_a_step_that_adds_nothing_publishes_nothing(pair: Pair) -> None:
    pair.prefill(ends=[2 * SIZE, 2 * SIZE, PROMPT, PROMPT])
    assert [chunk.header.tokens for chunk in pair.wire.chunks()] == [(0, 2 * SIZE), (2 * SIZE, PROMPT)]


def test_blocks_are_kept_until_they_have_been_read(pair: Pair) -> None:
    entered, go = threading.Event(), threading.Event()
    publish = pair.transport.publish

    def slow(runs: Sequence[Run]) -> object:
        entered.set()
        assert go.wait(WITHIN_S)
        return publish(runs)

    pair.transport.publish = slow  # type: ignore[method-assign, assignment]
    pair.sender.open(RID, "decode-worker")
    pair.sender.valid(RID, SOURCE, PROMPT)
    assert pair.sender.finish(RID, FIRST_TOKEN)
    assert entered.wait(WITHIN_S)
    assert pair.sender.take_finished() == set()
    with pytest.raises(TimeoutError, match=r"did not catch up within 0\.05 s"):
        pair.sender.settle(0.05)
    go.set()
    pair.sender.settle(WITHIN_S)
    assert pair.sender.take_finished() == {RID}
    assert pair.sender.take_finished() == set()


def test_finishing_an_unknown_request_keeps_no_blocks(pair: Pair) -> None:
    assert pair.sender.finish("other", 1) is False


# -- orders --------------------------------------------------------------------------------------


def test_chunks_after_the_blocks(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    pair.deliver()
    pair.loaded()
    assert pair.written() == ALL
    end = pair.receiver.ended(RID)
    assert end is not None
    assert (end.first_token, end.nbytes) == (FIRST_TOKEN, 5 * BLOCK_PAYLOAD)
    pair.close()
    assert pair.receiver.take_finished() == set()
    pair.quiet()


def test_chunks_before_the_blocks_and_before_the_request(pair: Pair) -> None:
    pair.prefill()
    pair.deliver()
    until(lambda: pair.transport.waiting == 3, "fetched")
    assert pair.written() == []
    pair.expect()
    assert pair.finished() == []
    pair.open()
    pair.loaded()
    assert pair.written() == ALL


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (3, 0, 1, 2), (2, 3, 0, 1)], ids=str)
@pytest.mark.parametrize("opened", ["before", "after"])
def test_any_order(pair: Pair, order: tuple[int, ...], opened: str) -> None:
    pair.expect()
    if opened == "before":
        pair.open()
    pair.prefill()
    pair.deliver(*order)
    if opened == "after":
        pair.open()
    pair.loaded()
    assert pair.written() == ALL
    pair.close()
    pair.quiet()


def test_not_loaded_while_a_chunk_is_missing(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    posted = list(pair.wire.posted)
    pair.deliver(0, 2, 3)
    until(lambda: pair.written() == [0, 1, 4], "two chunks are written")
    assert pair.finished() == []
    pair.receiver.deliver(posted[1][0])
    pair.loaded()


def test_not_loaded_without_an_end(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    pair.deliver(0, 1, 2)
    until(lambda: pair.written() == ALL, "all chunks are written")
    time.sleep(0.05)
    assert pair.finished() == []


@pytest.mark.parametrize(("skip", "right"), [(SIZE, [1, 2, 3, 4]), (3 * SIZE, [3, 4]), (4 * SIZE, [4])])
def test_blocks_that_are_cached_already_are_left_alone(pair: Pair, skip: int, right: list[int]) -> None:
    pair.expect()
    pair.open(skip=skip)
    pair.prefill()
    pair.deliver()
    pair.loaded()
    assert pair.written() == right


def test_a_block_that_decode_computes_itself_is_left_alone(pair: Pair) -> None:
    """The last prompt token opens a block of its own, and decode computes that token."""
    pair.expect()
    pair.open(end=4 * SIZE)
    pair.prefill(ends=[4 * SIZE + 1])
    pair.deliver()
    pair.loaded()
    assert pair.written() == [0, 1, 2, 3]


def test_several_requests_at_once_do_not_mix(pair: Pair) -> None:
    ids = [f"q{i}.0" for i in range(4)]
    for index, request_id in enumerate(ids):
        pair.expect(request_id=request_id)
        pair.receiver.open(request_id, Target([TARGET[index]], 0, SIZE))
        pair.sender.open(request_id, f"peer{index}")
    for index, request_id in enumerate(ids):
        pair.sender.valid(request_id, [SOURCE[index]], SIZE)
    for index, request_id in enumerate(ids):
        pair.sender.finish(request_id, index)
    pair.settle()
    assert pair.wire.peers == [f"peer{i}" for i in (0, 1, 2, 3, 0, 1, 2, 3)]
    pair.deliver()
    until(lambda: len(pair.finished()) == 4, "all are loaded")
    assert sorted(pair.received) == ids
    assert pair.written() == [0, 1, 2, 3]
    ends = [pair.receiver.ended(request_id) for request_id in ids]
    assert [end.first_token for end in ends if end] == [0, 1, 2, 3]


# -- what is wrong is found, and said ------------------------------------------------------------


def damaged(pair: Pair, damage: Callable[[Chunk], Chunk]) -> str:
    """Deliver a prompt whose second chunk is damaged; return the reason of the failure."""
    pair.expect()
    pair.open()
    pair.prefill()
    for delivery, taken in pair.wire.posted:
        second = isinstance(delivery, Chunk) and delivery.header.index == 1
        pair.receiver.deliver(damage(delivery) if second else delivery)  # type: ignore[arg-type]
        pair.wire.taken.append(taken)
    reason = pair.failed()
    until(lambda: pair.written() == [0, 1, 4], "the sound chunks are written")
    pair.close()
    until(lambda: pair.finished() == [RID], "the blocks are given back")
    pair.quiet()
    return reason


def test_a_flipped_bit(pair: Pair) -> None:
    def flip(chunk: Chunk) -> Chunk:
        run = pair.transport.payload(chunk.ticket)[4]
        run.flags.writeable = True
        run[11] ^= 1
        return chunk

    assert "checksum of chunk 1 (tokens 8-16) is" in damaged(pair, flip)


def test_a_run_too_few(pair: Pair) -> None:
    def cut(chunk: Chunk) -> Chunk:
        pair.transport.payload(chunk.ticket).pop()
        return chunk

    assert "size of chunk 1 is 320, expected 384" in damaged(pair, cut)


def test_the_payload_of_another_request(pair: Pair) -> None:
    other = pair.transport.publish([np.full(NBYTES, 9, np.uint8)] * (2 * LAYERS))
    pair.wire.taken.append(lambda: pair.transport.release(other))
    assert "checksum of chunk 1" in damaged(pair, lambda chunk: replace(chunk, ticket=other))


def test_a_payload_that_is_gone(pair: Pair) -> None:
    def lose(chunk: Chunk) -> Chunk:
        pair.transport.release(chunk.ticket)
        return chunk

    assert "has been released" in damaged(pair, lose)


def test_another_layout(pair: Pair) -> None:
    layout = replace(pair.layout, order="amx:1")
    reason = damaged(pair, lambda chunk: replace(chunk, header=replace(chunk.header, layout=layout)))
    assert "layout is" in reason
    assert "amx:1" in reason


def test_more_tokens_promised_than_sent(pair: Pair) -> None:
    def stretch(chunk: Chunk) -> Chunk:
        return replace(chunk, header=replace(chunk.header, tokens=(2 * SIZE, 5 * SIZE)))

    reason = damaged(pair, stretch)
    assert "number of runs" in reason


def test_a_chunk_that_comes_twice_counts_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    pair.deliver(0, 0, 1, 3, 0)
    until(lambda: pair.written() == [0, 1, 2, 3], "two chunks are written")
    time.sleep(0.05)
    assert pair.finished() == []  # three deliveries are not three chunks
    assert "chunk 0 came twice" in caplog.text


def test_chunks_with_a_hole_between_them_are_not_a_prompt(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    for delivery, taken in pair.wire.posted:
        pair.wire.taken.append(taken)
        if isinstance(delivery, Chunk) and delivery.header.index == 1:
            pair.receiver.deliver(
                replace(delivery, header=replace(delivery.header, tokens=(0, 2 * SIZE)))
            )  # a sound payload that says it is the first part once more
        else:
            pair.receiver.deliver(delivery)
    assert "tokens" in pair.failed()


def test_a_prompt_that_ends_too_early_is_not_loaded(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill(ends=[2 * SIZE, 4 * SIZE])
    pair.deliver()
    assert "tokens" in pair.failed()


def test_an_aborted_prefill(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill(ends=[2 * SIZE], first_token=None)
    assert pair.sent == [RID]
    pair.deliver()
    assert pair.failed() == "prefill was aborted"


def test_a_full_store_fails_the_request_with_its_reason() -> None:
    with connected(capacity=3 * BLOCK_PAYLOAD) as pair:
        pair.expect()
        pair.open()
        pair.prefill()
        assert pair.sent == [RID]
        kinds = [type(delivery) for delivery, _ in pair.wire.posted]
        assert kinds == [Chunk, HandoverFailed]  # no end, and no chunk after the gap
        pair.deliver()
        assert "does not fit" in pair.failed()


def test_a_request_that_was_never_expected(pair: Pair) -> None:
    pair.open()
    until(lambda: pair.failures, "a failure")
    assert pair.failures == [(RID, "no handover is under way for it")]
    assert pair.finished() == [RID]


# -- deadlines -----------------------------------------------------------------------------------


def test_a_deadline_says_what_has_arrived_and_is_said_once(pair: Pair) -> None:
    pair.expect(timeout_s=0.2)
    pair.open()
    pair.prefill()
    pair.deliver(0, 3)
    until(lambda: pair.written() == [0, 1], "one chunk is written")
    pair.receiver.sweep()
    assert pair.failures == []
    time.sleep(0.25)
    pair.receiver.sweep()
    pair.receiver.sweep()
    assert pair.failed() == "waited too long for its KV: 1 of 3 chunks arrived"
    pair.close()
    assert pair.finished() == [RID]


def test_a_deadline_without_an_end(pair: Pair) -> None:
    pair.expect(timeout_s=0.0)
    time.sleep(0.01)
    pair.receiver.sweep()
    assert "0 of an unknown number chunks" in pair.failed()


def test_a_loaded_request_has_no_deadline(pair: Pair) -> None:
    pair.expect(timeout_s=0.3)
    pair.open()
    pair.prefill()
    pair.deliver()
    pair.loaded()
    time.sleep(0.35)
    pair.receiver.sweep()
    assert pair.failures == []


def test_a_prompt_that_decode_had_cached_has_no_deadline_once_all_has_come(pair: Pair) -> None:
    """Then no blocks are opened, and the request may decode for longer than a handover may take."""
    pair.expect(timeout_s=0.2)
    pair.prefill()
    pair.deliver()
    time.sleep(0.25)
    pair.receiver.sweep()
    assert pair.failures == []
    pair.close()
    pair.quiet()


@pytest.mark.parametrize("deliveries", [(0, 1), (0, 1, 2, 3)], ids=["some", "all"])
def test_chunks_nobody_asks_for_are_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, deliveries: tuple[int, ...]
) -> None:
    monkeypatch.setattr(actors.decode, "UNCLAIMED_LEASE_S", 0.05)
    pair.prefill()
    pair.deliver(*deliveries)
    time.sleep(0.1)
    pair.receiver.sweep()
    assert "waited too long" in pair.failed()
    pair.close()
    pair.quiet()


# -- aborts --------------------------------------------------------------------------------------


def test_closing_while_chunks_are_fetched_reports_the_blocks_once_and_late(pair: Pair) -> None:
    pair.transport.open.clear()
    pair.expect()
    pair.open()
    pair.prefill()
    pair.deliver()
    until(lambda: pair.transport.waiting == 3, "fetching")
    pair.close()
    assert pair.receiver.waiting() == 0
    time.sleep(0.05)
    assert pair.finished() == []  # a thread may still write
    pair.transport.open.set()
    until(lambda: pair.finished(), "the blocks are given back")
    time.sleep(0.05)
    assert pair.finished() == [RID]
    assert pair.written() == []
    assert pair.failures == []
    pair.quiet()


def test_the_end_is_known_after_the_close(pair: Pair) -> None:
    """A request that ends with its first output is closed before that output is told to the gateway."""
    pair.expect()
    pair.open()
    pair.prefill()
    pair.deliver()
    pair.loaded()
    pair.close()
    pair.close()
    end = pair.receiver.ended(RID)
    assert end is not None
    assert end.nbytes == 5 * BLOCK_PAYLOAD


def test_closing_a_request_without_blocks_reports_nothing(pair: Pair) -> None:
    pair.expect()
    pair.prefill()
    pair.deliver()
    until(lambda: pair.transport.waiting == 3, "fetched")
    pair.close()
    pair.close()
    time.sleep(0.05)
    assert pair.finished() == []
    pair.quiet()


def test_what_comes_after_the_close_is_dropped(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.close()
    assert pair.finished() == [RID]
    pair.prefill()
    pair.deliver()
    pair.quiet()
    assert pair.transport.waiting == 0  # not even fetched
    assert pair.written() == []
    assert pair.failures == []
    assert pair.finished() == [RID]


def test_closing_at_any_moment_leaves_nothing(pair: Pair) -> None:
    """Random interleavings of delivery, allocation and abort."""
    random = np.random.default_rng(1)
    for turn in range(100):
        request_id = f"t{turn}.0"
        steps = {
            "expect": lambda rid=request_id: pair.expect(request_id=rid),
            "open": lambda rid=request_id: pair.open(request_id=rid),
            "deliver": pair.deliver,
            "close": lambda rid=request_id: pair.close(rid),
        }
        pair.prefill(request_id=request_id)
        order = random.permutation(["open", "deliver", "close"])
        for step in ["expect", *order]:
            steps[step]()
            time.sleep(float(random.random()) * 0.002)
        until(lambda rid=request_id: rid in pair.finished(), "the blocks are given back")
        assert pair.received.count(request_id) == 1
        for layer in pair.target:
            layer[:] = 0
    pair.quiet()
