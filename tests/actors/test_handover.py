"""A sender and a receiver back to back: real threads, real bytes, no Ray and no engine.

`Wire` stands between them. It delivers in the order and at the moment that a test says, and may change
what it delivers.
"""

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

import actors.decode
import actors.prefill
import kv.ladder
import kv.tcp
from actors.decode import Receiver, Target
from actors.marks import Marks
from actors.messages import Again, Chunk, Delivery, HandoverEnd, HandoverFailed, Probe
from actors.peers import OnTaken
from actors.prefill import Sender
from actors.rungs import Rungs
from kv.chunk import KVLayout, Run
from kv.errors import PeerLost, TransferError
from kv.faulty import Fault, FaultyTransport
from kv.memory import MemoryTransport
from kv.nixl import NixlTransport
from kv.paged import PagedCache
from kv.tcp import TcpTransport
from kv.transport import Ticket, Transport

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


class Gate:
    """A transport whose fetches wait until they are let through."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.name = inner, inner.name
        self.release, self.live, self.close = inner.release, inner.live, inner.close
        self.register = inner.register
        self.open = threading.Event()
        self.open.set()
        self.waiting = 0

    def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> Ticket:
        return self.inner.publish(runs, read, near)

    def fetch(self, ticket: Ticket, into: Sequence[Run | None], timeout_s: float) -> None:
        self.waiting += 1
        assert self.open.wait(WITHIN_S)
        self.inner.fetch(ticket, into, timeout_s)

    def payload(self, ticket: str) -> list[Run]:
        """The stored runs themselves, for tests that damage them."""
        assert isinstance(self.inner, MemoryTransport)
        return self.inner._payloads[ticket]


class Done:
    """What a delivery calls when its payload is not needed any more; counts the calls."""

    def __init__(self, then: OnTaken = lambda _: None) -> None:
        self._then, self.calls = then, 0
        self.seconds: float | None = None

    def __call__(self, seconds: float | None = None) -> None:
        self.calls, self.seconds = self.calls + 1, seconds
        self._then(seconds)


@dataclass
class Wire:
    """What the sender has posted and the receiver has not been given yet; and what it has been given."""

    posted: list[tuple[Delivery, OnTaken]] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    given: list[tuple[Delivery, Done]] = field(default_factory=list)

    def post(self, peer: str, delivery: Delivery, done: OnTaken) -> None:
        self.peers.append(peer)
        self.posted.append((delivery, done))

    def dones(self, kind: type[Delivery] = Chunk) -> list[int]:
        """How often each delivery of a kind that was given is done."""
        return [done.calls for delivery, done in self.given if isinstance(delivery, kind)]

    def chunks(self) -> list[Chunk]:
        return [delivery for delivery, _ in self.posted if isinstance(delivery, Chunk)]


class Pair:
    """Two engines' caches, the sender over one and the receiver over the other."""

    def __init__(self, transport: Transport, *others: Transport) -> None:
        random = np.random.default_rng(0)
        self.source = [random.integers(0, 256, (BLOCKS, NBYTES), np.uint8) for _ in range(LAYERS)]
        self.target = [np.zeros((BLOCKS, NBYTES), np.uint8) for _ in range(LAYERS)]
        self.layout = KVLayout("m", "torch.bfloat16", LAYERS, SIZE, NBYTES, "vec:1")
        self.transport, self.wire, self.marks = Gate(transport), Wire(), Marks()
        self.rungs = Rungs(
            {self.transport.name: self.transport, **{other.name: other for other in others}},
            ask_probe=lambda _, probe, timeout_s: self.rungs.answer(probe, timeout_s),
        )
        self.asked: list[Again] = []
        self.failures: list[tuple[str, str]] = []
        self.received: list[str] = []
        self.sent: list[str] = []
        source, target = PagedCache(self.source, SIZE), PagedCache(self.target, SIZE)
        self.rungs.register([*source.memory(), *target.memory()])
        self.sender = Sender("prefill-worker", source, self.layout, self.rungs, self.wire.post, lambda: None)
        self.receiver = Receiver(
            target,
            self.layout,
            self.rungs,
            self.marks,
            lambda: None,
            self.again,
            lambda request_id, reason: self.failures.append((request_id, reason)),
        )

    def again(self, source: str, asked: Again, timeout_s: float) -> Chunk:
        assert source == "prefill-worker"
        self.asked.append(asked)
        return self.sender.again(asked)

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
        """Wait until the publisher has done all it was told."""
        self.sender.preempted((), WITHIN_S)
        self.reported()

    def reported(self) -> list[str]:
        """Requests whose blocks prefill has got back, ever."""
        self.sent += self.sender.take_finished()
        return self.sent

    # -- the wire ----------------------------------------------------------------------------

    def deliver(self, *order: int) -> None:
        """Deliver what has been posted, all of it or the given positions."""
        for index in order or range(len(self.wire.posted)):
            self.give(*self.wire.posted[index])
        if not order:
            self.wire.posted = []

    def give(self, delivery: Delivery, done: OnTaken) -> Done:
        """Deliver one thing. All that is given must be done exactly once in the end: see `quiet`."""
        counted = Done(done)
        self.wire.given.append((delivery, counted))
        self.receiver.deliver(delivery, counted)
        return counted

    def lose(self) -> None:
        """The peer cannot be reached: what was posted last is never delivered, and done for the sender."""
        posted, self.wire.posted = self.wire.posted, []
        given = [delivery for delivery, _ in self.wire.given]
        for delivery, done in posted:
            if not any(delivery is other for other in given):
                done(None)

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

    def written(self, spoiled: Sequence[int] = ()) -> list[int]:
        """Positions in TARGET that hold what SOURCE holds there; all others are untouched.

        Those that are spoiled may hold anything.
        """
        right = []
        for position, block in enumerate(TARGET):
            if position in spoiled:
                continue
            blocks = [layer[block] for layer in self.target]
            if all((a == b[SOURCE[position]]).all() for a, b in zip(blocks, self.source, strict=True)):
                right.append(position)
            else:
                assert not any(block.any() for block in blocks), f"block {position} is neither"
        others = [block for block in range(BLOCKS) if block not in TARGET]
        assert not any(layer[others].any() for layer in self.target), "written outside the request's blocks"
        return right

    def until_written(self, positions: Sequence[int], what: str, spoiled: Sequence[int] = ()) -> None:
        """Wait until exactly these positions are written; a block that is being written is not yet."""

        def reached() -> bool:
            try:
                return self.written(spoiled) == list(positions)
            except AssertionError:
                return False

        until(reached, what)

    def quiet(self) -> None:
        """Nothing is left of any request, and all that was given is done, once."""
        self.lose()
        until(lambda: all(done.calls for _, done in self.wire.given), "all is done")
        until(lambda: self.rungs.live() == (0, 0), "payloads are released")
        assert self.sender.owned_bytes() == 0
        until(lambda: not self.sender.open_requests(), "prefill has its blocks back")
        assert self.receiver.waiting() == 0
        assert all(done.calls == 1 for _, done in self.wire.given)
        assert max(Counter(self.reported()).values(), default=1) == 1  # and each is reported once


@contextmanager
def connected(transport: Transport, *others: Transport) -> Iterator[Pair]:
    pair = Pair(transport, *others)
    try:
        yield pair
    finally:
        pair.transport.open.set()
        pair.receiver.stop()
        pair.sender.close()


TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "memory": MemoryTransport,
    "tcp": lambda: TcpTransport("127.0.0.1", b"k" * 32),
    "nixl": lambda: NixlTransport("127.0.0.1"),
}


@pytest.fixture(params=list(TRANSPORTS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Over a transport that copies, and over those that read the source until it is released."""
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed: pip install -e '.[nixl]'")
    with connected(TRANSPORTS[request.param]()) as pair:
        yield pair


def only(transport: str) -> pytest.MarkDecorator:
    """A test for one of the two."""
    return pytest.mark.parametrize("pair", [transport], indirect=True)


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
    assert pair.sent == ([RID] if pair.transport.name == "memory" else [])
    pair.quiet()
    assert pair.sent == [RID]


def test_a_long_range_is_split_on_block_boundaries(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.prefill, "MAX_CHUNK_BYTES", 2 * BLOCK_PAYLOAD)
    pair.prefill(ends=[PROMPT])
    tokens = [chunk.header.tokens for chunk in pair.wire.chunks()]
    assert tokens == [(0, 2 * SIZE), (2 * SIZE, 4 * SIZE), (4 * SIZE, PROMPT)]


def test_a_step_that_adds_nothing_publishes_nothing(pair: Pair) -> None:
    pair.prefill(ends=[2 * SIZE, 2 * SIZE, PROMPT, PROMPT])
    assert [chunk.header.tokens for chunk in pair.wire.chunks()] == [(0, 2 * SIZE), (2 * SIZE, PROMPT)]


@only("memory")
def test_blocks_are_kept_until_they_have_been_copied(pair: Pair) -> None:
    entered, go = threading.Event(), threading.Event()
    publish = pair.transport.publish

    def slow(runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> Ticket:
        entered.set()
        assert go.wait(WITHIN_S)
        return publish(runs, read)

    pair.transport.publish = slow  # type: ignore[method-assign]
    pair.sender.open(RID, "decode-worker")
    pair.sender.valid(RID, SOURCE, PROMPT)
    assert pair.sender.finish(RID, FIRST_TOKEN)
    assert entered.wait(WITHIN_S)
    assert pair.sender.take_finished() == set()
    with pytest.raises(TimeoutError, match=r"did not catch up within 0\.05 s"):
        pair.sender.preempted((), 0.05)
    assert pair.sender.take_finished() == set()
    go.set()
    pair.sender.preempted((), WITHIN_S)
    assert pair.sender.take_finished() == {RID}
    assert pair.sender.take_finished() == set()


@only("tcp")
@pytest.mark.parametrize("finished", ["before", "after"])
def test_blocks_are_kept_until_all_chunks_have_been_read(pair: Pair, finished: str) -> None:
    pair.expect()
    pair.open()
    pair.sender.open(RID, "decode-worker")
    for end in (2 * SIZE, 4 * SIZE, PROMPT):
        pair.sender.valid(RID, SOURCE, end)
    if finished == "before":
        assert pair.sender.finish(RID, FIRST_TOKEN)
    pair.settle()
    for index, unread in [(1, 3), (0, 2), (2, 1)]:
        assert pair.transport.live()[0] == unread
        assert (pair.reported(), list(pair.sender.open_requests())) == ([], [RID])
        pair.deliver(index)
        until(lambda unread=unread: pair.transport.live()[0] == unread - 1, "one is read")  # type: ignore[misc]
    if finished == "after":
        pair.settle()
        assert pair.reported() == []  # prefill still runs
        assert pair.sender.finish(RID, FIRST_TOKEN)
        pair.settle()
    until(pair.reported, "the blocks are given back")
    pair.deliver(3)
    pair.loaded()
    assert pair.written() == ALL
    pair.close()
    pair.quiet()
    assert pair.sent == [RID]


@only("tcp")
def test_a_chunk_that_cannot_be_delivered_holds_no_blocks(pair: Pair) -> None:
    pair.prefill()
    assert pair.sent == []
    pair.lose()
    assert pair.reported() == [RID]
    pair.quiet()


@only("tcp")
def test_an_aborted_prefill_gives_its_blocks_back_though_chunks_are_under_way(pair: Pair) -> None:
    pair.prefill(first_token=None)
    assert pair.sent == [RID]
    assert pair.transport.live() == (0, 0)


def test_the_tickets_of_chunks_that_are_done_are_not_kept(pair: Pair) -> None:
    """With some transports, holding a ticket holds the payload."""

    class Held(list[Ticket]):
        pass

    publish, tickets = pair.transport.publish, weakref.WeakSet[Held]()
    fetch, release = pair.transport.fetch, pair.transport.release

    def wrapped(runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> Ticket:
        ticket = Held([publish(runs, read)])
        tickets.add(ticket)
        return ticket

    pair.transport.publish = wrapped  # type: ignore[method-assign]
    pair.transport.fetch = lambda ticket, *args: fetch(ticket[0], *args)  # type: ignore[method-assign]
    pair.transport.release = lambda ticket: release(ticket[0])
    Held.__hash__ = object.__hash__  # type: ignore[method-assign]
    pair.expect()
    pair.open()
    pair.sender.open(RID, "decode-worker")
    pair.sender.valid(RID, SOURCE, 2 * SIZE)
    pair.settle()
    assert len(tickets) == 1
    pair.deliver()
    until(lambda: pair.wire.dones() == [1], "done")
    pair.wire.given.clear()
    until(lambda: (gc.collect(), not tickets)[1], "the ticket is forgotten while prefill goes on")
    assert list(pair.sender.open_requests()) == [RID]


def test_finishing_an_unknown_request_keeps_no_blocks(pair: Pair) -> None:
    assert pair.sender.finish("other", 1) is False


# -- preemption ----------------------------------------------------------------------------------


def test_a_preempted_request_is_given_up(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.sender.open(RID, "decode-worker")
    pair.sender.valid(RID, SOURCE, 2 * SIZE)
    pair.sender.preempted([RID], WITHIN_S)
    assert pair.transport.live() == (0, 0)  # its blocks may be overwritten now
    for layer in pair.source:
        layer[SOURCE] = 0
    for end in (2 * SIZE, PROMPT):  # prefill starts over, and is too late
        pair.sender.valid(RID, SOURCE, end)
    assert pair.sender.finish(RID, FIRST_TOKEN)
    pair.settle()
    assert [type(delivery) for delivery, _ in pair.wire.posted] == [Chunk, HandoverFailed]
    assert pair.sent == [RID]
    pair.deliver(1, 0)
    assert pair.failed() == "prefill was preempted"
    pair.close()
    until(lambda: pair.finished() == [RID], "the blocks are given back")
    assert not any(layer.any() for layer in pair.target)
    pair.quiet()


def test_a_preemption_leaves_other_requests_alone(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.sender.open(RID, "decode-worker")
    pair.sender.open("other", "decode-worker")
    pair.sender.valid(RID, SOURCE, 2 * SIZE)
    pair.sender.preempted(["other", "unknown"], WITHIN_S)
    pair.sender.preempted(["other"], WITHIN_S)
    pair.sender.valid(RID, SOURCE, PROMPT)
    assert pair.sender.finish(RID, FIRST_TOKEN)
    assert pair.sender.finish("other", None)
    pair.settle()
    failed = [delivery for delivery, _ in pair.wire.posted if isinstance(delivery, HandoverFailed)]
    assert failed == [HandoverFailed("other", "prefill was preempted")]  # said once
    assert "other" in pair.sent
    pair.wire.posted = [posted for posted in pair.wire.posted if posted[0] is not failed[0]]
    pair.deliver()
    pair.loaded()
    assert pair.written() == ALL
    pair.close()
    pair.quiet()


@only("tcp")
def test_a_preemption_waits_for_what_is_being_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sending, go, send = threading.Event(), threading.Event(), kv.tcp._send

    def slow(*args: object) -> None:
        sending.set()
        assert go.wait(WITHIN_S)
        send(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(kv.tcp, "_send", slow)
    pair.expect()
    pair.open()
    pair.sender.open(RID, "decode-worker")
    pair.sender.valid(RID, SOURCE, 2 * SIZE)
    pair.settle()
    pair.deliver()
    assert sending.wait(WITHIN_S)
    with pytest.raises(TimeoutError, match=r"still being sent after 0\.1 s"):
        pair.sender.preempted([RID], 0.1)
    assert pair.sender.finish(RID, None)
    pair.sender.preempted((), WITHIN_S)  # the publisher goes on meanwhile
    assert pair.reported() == []
    go.set()
    pair.sender.preempted([RID], WITHIN_S)
    until(pair.reported, "the blocks are given back")
    pair.until_written([0, 1], "what was being sent came whole")
    pair.deliver()
    assert pair.failed() == "prefill was preempted"
    pair.close()
    pair.quiet()


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
    time.sleep(0.02)
    assert pair.transport.waiting == 0  # there is no place for it yet
    assert pair.wire.dones() == [0, 0, 0]
    assert pair.written() == []
    pair.expect()
    assert pair.finished() == []
    pair.open()
    pair.loaded()
    assert pair.written() == ALL
    until(lambda: pair.wire.dones() == [1, 1, 1], "done")
    pair.close()
    pair.quiet()


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
    pair.deliver(0, 2, 3)
    pair.until_written([0, 1, 4], "two chunks are written")
    time.sleep(0.02)
    assert pair.finished() == []
    pair.deliver(1)
    pair.loaded()


def test_not_loaded_without_an_end(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    pair.deliver(0, 1, 2)
    pair.until_written(ALL, "all chunks are written")
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


def damaged(pair: Pair, damage: Callable[[Chunk], Chunk], spoiled: Sequence[int] = ()) -> str:
    """Deliver a prompt whose second chunk is damaged; return the reason of the failure.

    ``spoiled`` are blocks of the chunk's own that may have been written before the damage is found.
    """
    pair.expect()
    pair.open()
    pair.prefill()
    for delivery, done in pair.wire.posted:
        second = isinstance(delivery, Chunk) and delivery.header.index == 1
        pair.give(damage(delivery) if second else delivery, done)  # type: ignore[arg-type]
    pair.wire.posted = []
    reason = pair.failed()
    pair.until_written([0, 1, 4], "the sound chunks are written", spoiled)
    until(lambda: pair.wire.dones() == [1, 1, 1], "the damaged one is done too")
    pair.close()
    until(lambda: pair.finished() == [RID], "the blocks are given back")
    pair.quiet()
    return reason


@only("memory")
@pytest.mark.parametrize("run", [0, 4, 5])
def test_a_flipped_bit(pair: Pair, run: int) -> None:
    def flip(chunk: Chunk) -> Chunk:
        pair.transport.payload(chunk.ticket)[run][11] ^= 1
        return chunk

    reason = damaged(pair, flip, spoiled=[2, 3])
    assert f"checksum of run {run} of chunk 1 (tokens 8-16) is" in reason


def test_source_memory_that_changes_too_early(pair: Pair) -> None:
    """An engine that reuses blocks before they are reported is found out where it matters."""

    def overwrite(chunk: Chunk) -> Chunk:
        for layer in pair.source:
            layer[SOURCE[2]] ^= 255
        return chunk

    if pair.transport.name != "memory":
        assert "checksum of run 0 of chunk 1" in damaged(pair, overwrite, spoiled=[2, 3])
        return
    pair.expect()
    pair.open()
    pair.prefill()
    source = [layer.copy() for layer in pair.source]
    overwrite(pair.wire.chunks()[1])  # it has been copied
    pair.deliver()
    pair.loaded()
    pair.source = source
    assert pair.written() == ALL


@only("memory")
def test_a_run_too_few(pair: Pair) -> None:
    def cut(chunk: Chunk) -> Chunk:
        pair.transport.payload(chunk.ticket).pop()
        return chunk

    assert "number of runs is 5, expected 6" in damaged(pair, cut)


@only("memory")
def test_a_run_too_short(pair: Pair) -> None:
    def cut(chunk: Chunk) -> Chunk:
        payload = pair.transport.payload(chunk.ticket)
        payload[5] = payload[5][:-1]
        return chunk

    assert "size of a run is 63, expected 64" in damaged(pair, cut)


def test_the_payload_of_another_request(pair: Pair) -> None:
    nines = np.full(NBYTES, 9, np.uint8)
    pair.transport.inner.register([nines])
    other = pair.transport.publish([nines] * (2 * LAYERS), lambda: None)

    def exchange(chunk: Chunk) -> Chunk:
        return replace(chunk, ticket=other)

    pair.wire.given.append((HandoverFailed("other", ""), released := Done()))
    threading.Timer(0.2, lambda: (pair.transport.release(other), released())).start()
    assert "checksum of run 0 of chunk 1" in damaged(pair, exchange, spoiled=[2, 3])


def test_a_payload_that_is_gone(pair: Pair) -> None:
    def lose(chunk: Chunk) -> Chunk:
        pair.transport.release(chunk.ticket)
        return chunk

    missing = "has been released" if pair.transport.name == "memory" else "no longer has payload"
    spoiled = [2, 3] if pair.transport.name == "nixl" else []  # one-sided: read, and then found to be gone
    assert missing in damaged(pair, lose, spoiled)


def test_another_layout(pair: Pair) -> None:
    layout = replace(pair.layout, order="amx:1")
    reason = damaged(pair, lambda chunk: replace(chunk, header=replace(chunk.header, layout=layout)))
    assert "order is 'vec:1' here and 'amx:1' there" in reason


def test_more_tokens_promised_than_sent(pair: Pair) -> None:
    def stretch(chunk: Chunk) -> Chunk:
        return replace(chunk, header=replace(chunk.header, tokens=(2 * SIZE, 5 * SIZE)))

    reason = damaged(pair, stretch)
    assert "number of runs" in reason


def test_a_chunk_that_comes_twice_counts_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    pair.transport.open.clear()
    pair.deliver(0, 0, 1, 3, 0)
    time.sleep(0.02)
    assert pair.wire.dones() == [0, 0, 0, 0]  # the first is fetched by the same ticket
    pair.transport.open.set()
    pair.until_written([0, 1, 2, 3], "two chunks are written")
    time.sleep(0.05)
    assert pair.finished() == []  # four deliveries are not three chunks
    assert "chunk 0 came twice" in caplog.text
    assert pair.failures == []
    pair.deliver(2)
    pair.loaded()
    assert pair.transport.waiting == 3  # nothing was fetched twice
    pair.close()
    pair.quiet()


def test_chunks_with_a_hole_between_them_are_not_a_prompt(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    for delivery, done in pair.wire.posted:
        if isinstance(delivery, Chunk) and delivery.header.index == 1:
            # a sound payload that says it is the first part once more, which has been verified by then
            until(lambda: pair.wire.dones() == [1], "the first chunk is loaded")
            pair.give(replace(delivery, header=replace(delivery.header, tokens=(0, 2 * SIZE))), done)
        else:
            pair.give(delivery, done)
    pair.wire.posted = []
    assert "chunk 1 holds tokens 0-8, expected them from 8" in pair.failed()
    pair.close()
    pair.quiet()


def test_a_prompt_that_ends_too_early_is_not_loaded(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill(ends=[2 * SIZE, 4 * SIZE])
    pair.deliver()
    assert "tokens" in pair.failed()
    pair.close()
    pair.quiet()


def test_an_aborted_prefill(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill(ends=[2 * SIZE], first_token=None)
    assert pair.sent == [RID]
    pair.transport.open.clear()  # or fetching the withdrawn chunk would fail first
    pair.deliver()
    assert pair.failed() == "prefill was aborted"
    pair.transport.open.set()
    until(lambda: pair.wire.dones() == [1], "done")
    pair.close()
    pair.quiet()


def test_a_full_store_fails_the_request_with_its_reason() -> None:
    with connected(MemoryTransport(capacity=3 * BLOCK_PAYLOAD)) as pair:
        pair.expect()
        pair.open()
        pair.prefill()
        assert pair.sent == [RID]
        kinds = [type(delivery) for delivery, _ in pair.wire.posted]
        assert kinds == [Chunk, HandoverFailed]  # no end, and no chunk after the gap
        assert pair.transport.live() == (0, 0)
        pair.transport.open.clear()
        pair.deliver()
        assert "does not fit" in pair.failed()
        pair.transport.open.set()
        pair.close()
        pair.quiet()


@only("memory")
def test_a_transport_that_fails_in_another_way_fails_the_request_only(pair: Pair) -> None:
    publish = pair.transport.publish

    def broken(runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> Ticket:
        raise RuntimeError("out of luck")

    pair.transport.publish = broken  # type: ignore[method-assign]
    pair.prefill()
    assert pair.sent == [RID]
    ((failed, _),) = pair.wire.posted
    assert isinstance(failed, HandoverFailed)
    assert "out of luck" in failed.reason
    pair.wire.posted.clear()
    pair.transport.publish = publish  # type: ignore[method-assign]

    def mended() -> bool:
        pair.rungs.probe_due()
        return bool(pair.rungs.order("decode-worker", 1).rungs)

    assert pair.rungs.order("decode-worker", 1).rungs == ()
    until(mended, "a probe mends the rung")
    pair.expect(request_id="next")
    pair.open(request_id="next")
    pair.prefill(request_id="next")
    pair.deliver()
    until(lambda: pair.finished() == ["next"], "the next one is loaded")
    assert pair.written() == ALL


def test_a_request_that_was_never_expected(pair: Pair) -> None:
    pair.open()
    until(lambda: pair.failures, "a failure")
    assert pair.failures == [(RID, "no handover is under way for it")]
    assert pair.finished() == [RID]


def test_a_failure_that_overtakes_its_request_is_told_when_that_comes(pair: Pair) -> None:
    """Prefill's word and the gateway's come by different ways."""
    pair.receiver.deliver(HandoverFailed(RID, "no rung takes it"), Done())
    assert pair.failures == [(RID, "no rung takes it")]
    assert pair.receiver.expect(RID, 60.0) == "no rung takes it"  # before the worker has closed it
    pair.close()
    assert pair.receiver.expect(RID, 60.0) == "no rung takes it"
    assert pair.receiver.expect("another", 60.0) is None


# -- the prefill worker is lost ------------------------------------------------------------------


@pytest.mark.parametrize("announced", [0, 1, 3], ids=["nothing", "a chunk", "all but the end"])
def test_what_a_lost_sender_has_not_announced_is_not_waited_for(pair: Pair, announced: int) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    if announced:
        pair.deliver(*range(announced))
        until(lambda: pair.wire.dones() == [1] * announced, "what was announced is read")
    pair.receiver.sender_lost(RID)
    assert pair.failed() == f"its prefill worker was lost after announcing {announced} chunks"
    pair.receiver.sender_lost(RID)
    assert len(pair.failures) == 1
    pair.lose()


def test_the_end_without_a_chunk_is_not_all_that_a_lost_sender_had_to_say(pair: Pair) -> None:
    """Chunks may come by another way than the end, and be lost on it."""
    pair.expect()
    pair.open()
    pair.prefill()
    pair.deliver(0, 2, 3)
    pair.receiver.sender_lost(RID)
    assert pair.failed() == "its prefill worker was lost after announcing 2 chunks"
    pair.lose()


def test_what_a_lost_sender_has_announced_is_loaded(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.prefill()
    pair.transport.open.clear()
    pair.deliver()
    pair.receiver.sender_lost(RID)
    pair.transport.open.set()
    pair.loaded()
    pair.receiver.sender_lost(RID)
    pair.receiver.sender_lost("nobody's")
    assert pair.failures == []
    assert pair.written() == ALL


# -- deadlines -----------------------------------------------------------------------------------


def test_a_deadline_says_what_has_arrived_and_is_said_once(pair: Pair) -> None:
    pair.expect(timeout_s=2.0)
    began = time.monotonic()
    pair.open()
    pair.prefill()
    pair.deliver(0, 3)
    pair.until_written([0, 1], "one chunk is written")
    pair.receiver.sweep()
    assert pair.failures == []
    time.sleep(max(0.0, began + 2.05 - time.monotonic()))
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


def test_a_prompt_that_decode_had_cached_needs_the_end_only(pair: Pair) -> None:
    """Then no blocks are opened: the engine closes it, and may decode for longer than a handover may take."""
    pair.expect(timeout_s=0.2)
    pair.prefill()
    pair.deliver(2, 3)
    end = pair.receiver.ended(RID)
    assert end is not None
    assert end.first_token == FIRST_TOKEN
    assert pair.wire.dones() == [0]
    pair.close()
    assert pair.wire.dones() == [1]
    pair.deliver(0, 1)
    assert pair.wire.dones() == [1, 1, 1]
    time.sleep(0.25)
    pair.receiver.sweep()
    assert pair.failures == []
    assert pair.finished() == []
    assert pair.transport.waiting == 0
    pair.quiet()


def test_a_prompt_that_decode_had_cached_still_has_a_deadline_for_its_end(pair: Pair) -> None:
    pair.expect(timeout_s=0.05)
    pair.prefill()
    pair.deliver(0, 1, 2)
    time.sleep(0.1)
    pair.receiver.sweep()
    assert "0 of an unknown number chunks" in pair.failed()
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
    assert (pair.wire.dones(), pair.wire.dones(HandoverEnd)) == ([0, 0, 0], [1])  # and still reads
    pair.transport.open.set()
    until(lambda: pair.finished(), "the blocks are given back")
    for layer in pair.target:  # to another request
        layer[:] = 0
    time.sleep(0.05)
    assert pair.finished() == [RID]
    assert pair.written() == []
    assert pair.failures == []
    until(lambda: pair.wire.dones() == [1, 1, 1], "done")
    pair.quiet()


def test_closing_drops_the_chunks_that_wait_for_a_thread(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.prefill, "MAX_CHUNK_BYTES", BLOCK_PAYLOAD)
    pair.transport.open.clear()
    pair.expect()
    pair.open()
    pair.prefill()
    pair.deliver()
    until(lambda: pair.transport.waiting == actors.decode.FETCH_THREADS == 4, "all threads fetch")
    pair.close()
    pair.transport.open.set()
    until(lambda: pair.wire.dones() == [1] * 5, "done")
    assert pair.transport.waiting == 4  # the fifth was not even fetched
    until(lambda: pair.finished() == [RID], "the blocks are given back")
    pair.quiet()


@pytest.mark.parametrize("opened", [True, False])
def test_stopping_is_the_end_of_every_delivery(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    """Of what is being fetched, of what waits for a thread, of what waits for blocks, of what comes late."""
    monkeypatch.setattr(actors.prefill, "MAX_CHUNK_BYTES", BLOCK_PAYLOAD)
    pair.transport.open.clear()
    pair.expect()
    if opened:
        pair.open()
    pair.prefill()
    pair.deliver(0, 1, 2, 3, 5)
    until(lambda: pair.transport.waiting == 4 * opened, "all threads fetch")
    pair.receiver.stop()
    pair.receiver.stop()
    pair.deliver(4)
    pair.transport.open.set()
    until(lambda: pair.wire.dones() == [1] * 5, "done")
    pair.quiet()


@only("memory")
def test_a_worker_that_cannot_be_told_of_a_failure_is_done_all_the_same(pair: Pair) -> None:
    def raising(request_id: str, reason: str) -> None:
        raise RuntimeError("the event loop is closed")

    pair.receiver._on_failed = raising
    pair.expect()
    pair.open()
    pair.prefill()
    pair.transport.release(pair.wire.chunks()[0].ticket)
    pair.deliver()
    until(lambda: pair.wire.dones() == [1, 1, 1], "done")
    pair.close()
    pair.quiet()


def test_a_failed_handover_is_done_with_its_chunks_when_it_is_closed(pair: Pair) -> None:
    pair.expect()
    pair.prefill(ends=[2 * SIZE, 4 * SIZE], first_token=None)
    pair.deliver()
    assert pair.failed() == "prefill was aborted"
    assert (pair.wire.dones(), pair.wire.dones(HandoverFailed)) == ([0, 0], [1])
    pair.close()
    assert pair.wire.dones() == [1, 1]
    assert pair.transport.waiting == 0
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
    assert pair.wire.dones() == [0, 0, 0]
    pair.close()
    assert pair.wire.dones() == [1, 1, 1]
    pair.close()
    time.sleep(0.05)
    assert pair.finished() == []
    assert pair.transport.waiting == 0
    pair.quiet()


def test_what_comes_after_the_close_is_dropped(pair: Pair) -> None:
    pair.expect()
    pair.open()
    pair.close()
    assert pair.finished() == [RID]
    pair.prefill()
    pair.deliver()
    assert (pair.wire.dones(), pair.wire.dones(HandoverEnd)) == ([1, 1, 1], [1])  # at once
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


# -- the ladder ----------------------------------------------------------------------------------


@contextmanager
def two_rungs(first: str) -> Iterator[tuple[Pair, FaultyTransport]]:
    """A pair with two transports, of which the first can be told to misbehave and is preferred."""
    tcp, memory = TcpTransport("127.0.0.1", b"k" * 32), MemoryTransport()
    best, other = (tcp, memory) if first == "tcp" else (memory, tcp)
    faulty = FaultyTransport(best)  # type: ignore[arg-type]
    with connected(faulty, other) as pair:  # type: ignore[arg-type]
        pair.rungs.meet("decode-worker", "", ("tcp", "memory"))
        ladder = pair.rungs._peers["decode-worker"].ladder
        ladder.probed(first, [1e-6, 1e-6], time.monotonic())
        ladder.probed(other.name, [1.0, 1.0], time.monotonic())
        try:
            yield pair, faulty
        finally:
            other.close()


@pytest.mark.parametrize("first", ["tcp", "memory"])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault("lost"), "lost"),
        (Fault("stalled"), "timeout"),
        (Fault("corrupt"), "corrupt"),
        (Fault("truncated"), "corrupt"),
        (Fault("swapped"), "corrupt"),
        (Fault("full"), "full"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else None,
)
def test_what_a_rung_cannot_carry_goes_over_the_next(
    monkeypatch: pytest.MonkeyPatch, first: str, fault: Fault, cause: str
) -> None:
    """Also after prefill's engine has its blocks back, where the first rung has copied them."""
    monkeypatch.setattr(kv.ladder, "MIN_DEADLINE_S", 0.2)
    with two_rungs(first) as (pair, faulty):
        copied = first == "memory" and fault.kind != "full"
        faulty.suffer(replace(fault, times=1) if copied else fault)
        pair.expect()
        pair.open()
        pair.prefill()
        source = [layer.copy() for layer in pair.source]
        if copied:
            assert pair.sent == [RID]
            for layer in pair.source:  # the engine gives its blocks to somebody else
                layer[:] = 0
        pair.deliver()
        pair.loaded()
        pair.source = source
        assert pair.written() == ALL
        assert faulty.fired[fault.kind] >= 1
        other = "memory" if first == "tcp" else "tcp"
        handed = pair.receiver.handed(RID)
        assert handed is not None
        assert handed.nbytes == 5 * BLOCK_PAYLOAD
        # of what was copied, only one chunk suffered; others may have been fetched at the same moment
        assert set(handed.rungs) - {first} == {other}
        assert copied or handed.rungs == (other,)
        tally = pair.rungs.tally
        assert sum(tally.chunks.values()) == 3
        assert tally.chunks[other, cause] >= 1
        assert sum(tally.nbytes.values()) == 5 * BLOCK_PAYLOAD
        choice = pair.rungs.order("decode-worker", 1)
        assert choice.rungs == (other,)
        assert f"{first} broken ({cause})" in choice.reason
        pair.close()
        pair.quiet()


def test_one_damaged_chunk_among_sound_ones_takes_the_next_rung_alone() -> None:
    with two_rungs("tcp") as (pair, faulty):
        faulty.suffer(Fault("corrupt", times=1))
        pair.expect()
        pair.open()
        pair.prefill()
        pair.deliver(0)
        until(lambda: pair.wire.dones() == [1], "the damaged one is done")
        assert [asked.index for asked in pair.asked] == [0]
        pair.deliver(1, 2, 3)
        pair.loaded()
        assert pair.written() == ALL
        # those that had been published over the broken rung are not tried there
        assert [(asked.index, asked.cause) for asked in pair.asked[1:]] in (
            [(1, "lost"), (2, "lost")],
            [(2, "lost"), (1, "lost")],
        )
        assert faulty.fired == {"corrupt": 1}
        pair.close()
        pair.quiet()


def test_when_no_rung_is_left_the_reason_names_them_all() -> None:
    with two_rungs("tcp") as (pair, faulty):
        memory = pair.rungs.transports["memory"] = FaultyTransport(pair.rungs.transports["memory"])
        faulty.suffer(Fault("lost"))
        memory.suffer(Fault("corrupt"))
        pair.expect()
        pair.open()
        pair.prefill()
        pair.deliver()
        reason = pair.failed()
        assert "tcp: " in reason
        assert "memory" in reason
        assert "no rung is left" in reason
        assert faulty.fired["lost"] >= 1
        assert memory.fired["corrupt"] >= 1
        pair.close()
        until(lambda: pair.finished() == [RID], "the blocks are given back")
        pair.quiet()


def test_what_is_carried_moves_the_estimate() -> None:
    with two_rungs("tcp") as (pair, _):
        before = pair.rungs.rates()["decode-worker", "tcp"]
        pair.expect()
        pair.open()
        pair.prefill()
        pair.deliver()
        pair.loaded()
        until(lambda: pair.wire.dones() == [1, 1, 1], "done")
        assert all(done.seconds for delivery, done in pair.wire.given if isinstance(delivery, Chunk))
        assert pair.rungs.rates()["decode-worker", "tcp"] < before / 2


def test_a_chunk_that_is_not_published_any_more_cannot_be_had_again(pair: Pair) -> None:
    pair.prefill()
    pair.lose()
    asked = Again(RID, 0, pair.transport.name, "lost", "")
    with pytest.raises(PeerLost, match="not published any more"):
        pair.sender.again(asked)
    assert pair.rungs.order("decode-worker", 1).rungs  # nobody is to blame


def test_a_sender_that_is_gone_is_named(pair: Pair) -> None:
    def gone(source: str, asked: Again, timeout_s: float) -> Chunk:
        raise PeerLost(f"worker {source} is gone")

    pair.receiver._again = gone
    pair.expect()
    pair.open()
    pair.prefill()
    pair.transport.release(pair.wire.chunks()[0].ticket)
    pair.deliver()
    assert "worker prefill-worker is gone" in pair.failed()
    pair.close()
    pair.quiet()


# -- blocks that nobody takes, leases ------------------------------------------------------------


def test_blocks_that_a_peer_has_no_room_for_are_copied_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actors.prefill, "HOLD_S", 0.05)
    monkeypatch.setattr(actors.prefill, "PARKING", "memory")
    with two_rungs("tcp") as (pair, _):
        pair.expect()
        pair.prefill()
        pair.deliver()  # its engine has no blocks yet
        pair.sender.sweep()
        pair.settle()
        assert pair.sent == []  # not so soon
        time.sleep(0.1)
        pair.sender.sweep()
        pair.settle()
        assert pair.sent == [RID]
        assert pair.rungs.transports["memory"].live() == (3, 5 * BLOCK_PAYLOAD)
        assert pair.rungs.transports["tcp"].live() == (0, 0)
        source = [layer.copy() for layer in pair.source]
        for layer in pair.source:
            layer[:] = 0
        pair.source = source
        pair.open()
        pair.loaded()
        assert pair.written() == ALL
        assert pair.rungs.order("decode-worker", 1).rungs[0] == "tcp"  # which is not to blame
        assert pair.rungs.tally.chunks == {("memory", "moved"): 3}
        pair.close()
        pair.quiet()


def test_blocks_stay_where_there_is_no_room_to_copy_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.prefill, "HOLD_S", 0.0)
    monkeypatch.setattr(actors.prefill, "PARKING", "memory")
    with two_rungs("tcp") as (pair, _):
        pair.rungs.transports["memory"] = MemoryTransport(capacity=3 * BLOCK_PAYLOAD)
        pair.expect()
        pair.prefill()
        time.sleep(0.01)
        for _ in range(3):
            pair.sender.sweep()
        pair.settle()
        assert pair.sent == []
        assert pair.rungs.transports["memory"].live()[0] == 1
        pair.deliver()
        pair.open()
        pair.loaded()
        assert pair.written() == ALL
        pair.close()
        pair.quiet()


def test_a_lease_that_runs_out_is_counted_and_leaves_nothing(pair: Pair) -> None:
    pair.sender.open(RID, "decode-worker", lease_s=0.05)
    pair.sender.valid(RID, SOURCE, PROMPT)
    assert pair.sender.finish(RID, FIRST_TOKEN)
    pair.settle()
    assert pair.rungs.live() == (1, pair.sender.owned_bytes())
    pair.sender.sweep()
    pair.settle()
    assert pair.sender.expired_leases == 0
    time.sleep(0.1)
    pair.sender.sweep()
    pair.settle()
    assert (pair.sender.expired_leases, pair.rungs.live(), pair.sender.owned_bytes()) == (1, (0, 0), 0)
    assert pair.sent == [RID]
    pair.expect()
    pair.open()
    pair.deliver()
    assert "not published any more" in pair.failed()
    pair.close()
    pair.quiet()


def test_what_no_request_owns_is_told_apart(pair: Pair) -> None:
    pair.prefill()
    orphan = pair.transport.publish([pair.source[0][0]], lambda: None)
    assert pair.rungs.live()[1] - pair.sender.owned_bytes() == NBYTES
    pair.transport.release(orphan)
    pair.quiet()


def test_an_abort_after_prefill_withdraws_what_decode_never_took(pair: Pair) -> None:
    pair.prefill()
    pair.sender.abandon([RID, "unknown"])
    pair.settle()
    assert (pair.rungs.live(), pair.sent) == ((0, 0), [RID])
    failed = [delivery for delivery, _ in pair.wire.posted if isinstance(delivery, HandoverFailed)]
    assert failed == [HandoverFailed(RID, "the request was aborted")]
    pair.quiet()


def test_aborts_at_any_moment_leave_nothing_on_prefill() -> None:
    """While chunks are published, fetched, moved to another rung and copied."""
    random = np.random.default_rng(2)
    with two_rungs("tcp") as (pair, faulty), pytest.MonkeyPatch.context() as patch:
        patch.setattr(actors.prefill, "HOLD_S", 0.0)
        patch.setattr(actors.prefill, "PARKING", "memory")
        for turn in range(60):
            request_id = f"t{turn}.0"
            faulty.suffer(*([Fault("lost", times=1)] if turn % 3 == 0 else []))
            steps: dict[str, Callable[[], object]] = {
                "open": lambda rid=request_id: pair.open(request_id=rid),
                "deliver": pair.deliver,
                "sweep": pair.sender.sweep,
                "abandon": lambda rid=request_id: pair.sender.abandon([rid]),
            }
            pair.expect(request_id=request_id)
            pair.prefill(request_id=request_id)
            for step in random.permutation(list(steps)):
                steps[step]()
                time.sleep(float(random.random()) * 0.002)
            pair.close(request_id)
            until(lambda rid=request_id: rid in pair.finished(), "the blocks are given back")
            for layer in pair.target:
                layer[:] = 0
            for rung in ("tcp", "memory"):  # sound again, for the next turn
                pair.rungs._peers["decode-worker"].ladder.probed(rung, [1e-6, 1e-6], time.monotonic())
        assert faulty.fired["lost"] >= 3
        pair.quiet()


# -- probes --------------------------------------------------------------------------------------


def test_a_probe_measures_every_rung_and_counts_what_announcing_takes() -> None:
    class ByRay(MemoryTransport):
        """Its tickets are lists, as if they held references."""

        def publish(self, runs: Sequence[Run], read: Callable[[], None], near: bool = False) -> Ticket:
            return [super().publish(runs, read)]

        def fetch(self, ticket: Ticket, into: Sequence[Run | None], timeout_s: float) -> None:
            super().fetch(ticket[0], into, timeout_s)

        def release(self, ticket: Ticket) -> None:
            super().release(ticket[0])

    tcp = TcpTransport("127.0.0.1", b"k" * 32)
    asked: list[tuple[str, str, int]] = []

    def ask(peer: str, probe: Probe, timeout_s: float) -> float:
        time.sleep(0.02)
        asked.append((peer, probe.rung, probe.nbytes))
        return rungs.answer(probe, timeout_s)

    rungs = Rungs({"tcp": tcp, "memory": ByRay()}, "here", ask)
    rungs.register([])
    rungs.probe_due()
    assert asked == []  # nobody has been met
    rungs.meet("d", "there", ("tcp", "memory", "other"))
    assert "(assumed)" in rungs.order("d", 1).reason
    rungs.probe_due()
    assert {(rung, size) for _, rung, size in asked} == {
        (rung, size) for rung in ("tcp", "memory") for size in kv.ladder.PROBE_SIZES
    }
    choice = rungs.order("d", 1)
    assert "(assumed)" not in choice.reason
    assert choice.rungs == ("tcp", "memory")  # which announces through a channel
    before = len(asked)
    rungs.probe_due()
    assert (len(asked), rungs.live()) == (before, (0, 0))
    rungs.close()


def test_what_a_map_says_of_a_link_is_held_against_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    def ask(peer: str, probe: Probe, timeout_s: float) -> float:
        time.sleep(0.02)
        return rungs.answer(probe, timeout_s) + 0.02

    mapped = {"there": {"memory": (0.0, 1e-12)}, "elsewhere": {"memory": (0.0, 1.0)}}
    rungs = Rungs({"memory": MemoryTransport()}, "here", ask, mapped)
    rungs.meet("d", "there", ("memory",))
    rungs.meet("e", "beyond", ("memory",))
    assert "(by the map)" in rungs.order("d", 1).reason
    assert "(assumed)" in rungs.order("e", 1).reason
    assert list(rungs.mapped()) == [("d", "memory")]
    rungs.probe_due()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert told[0].startswith("KV to d: memory takes ")
    assert "handoff probe FILE" in told[0]


@pytest.mark.parametrize("fault", [Fault("corrupt"), Fault("lost"), Fault("full")], ids=lambda f: str(f.kind))
def test_a_probe_that_fails_breaks_its_rung_and_leaves_nothing(fault: Fault) -> None:
    faulty = FaultyTransport(MemoryTransport())
    rungs = Rungs({"memory": faulty}, "here", lambda _, probe, timeout_s: rungs.answer(probe, timeout_s))
    rungs.meet("d", "there", ("memory",))
    faulty.suffer(fault)
    rungs.probe_due()
    choice = rungs.order("d", 1)
    assert choice.rungs == ()
    assert f"memory broken ({fault.kind})" in choice.reason
    assert (rungs.live(), faulty.fired[fault.kind]) == ((0, 0), 1)
    faulty.suffer()

    def mended() -> bool:
        rungs.probe_due()
        return bool(rungs.order("d", 1).rungs)

    until(mended, "it is probed again")


def test_a_peer_without_a_transport_is_not_sent_it() -> None:
    rungs = Rungs({"tcp": MemoryTransport(), "memory": MemoryTransport()})
    rungs.meet("d", "there", ("memory",))
    assert rungs.order("d", 1).rungs == ("memory",)
    with pytest.raises(TransferError, match="no transport 'other', only tcp, memory"):
        rungs.transport("other")
