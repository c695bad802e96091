"""The tier under vLLM's scheduler: two fake engines that share a bucket of a real S3 server.

The fake engine's tokens follow from every byte of KV that it did not compute itself.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_fake_engine import VOCAB, Engine, prompt
from test_handover import until

import actors.recall
from actors.engine import build_core
from actors.fake_kv import continuation
from actors.link import Link, register
from actors.recall import Recall
from actors.rungs import Rungs
from experiments.models import make
from experiments.s3_server import S3Server
from kv.bucket import Bucket
from kv.ladder import PRIORS, Ladder
from kv.memory import MemoryTransport

pytestmark = pytest.mark.engine

BLOCK, PAGE, NBYTES = 32, 512, 256
PATIENT_S = 15.0
"""For a busy machine: what is there is found and loaded, however long that takes."""
SLOW = 4000
"""Tokens that the engines compute in a second: a page takes longer to compute than to load."""


class Tiered(Engine):
    """An engine with a tier. `computed` and `counted` tell what has changed since they were asked last."""

    def __init__(self, core: Any, link: Link) -> None:
        super().__init__(core)
        assert link.tier is not None
        self.link, self.tier, self._seen = link, link.tier, 0
        self._counters = self.tier.counters()

    def run(self) -> None:
        deadline = time.monotonic() + 30
        while self.core.scheduler.has_requests():
            assert time.monotonic() < deadline, "requests are left after 30 s"
            self.step()
            time.sleep(0.001)

    def step(self) -> None:
        super().step()
        self.link.meter.completed(0)

    def computed(self) -> int:
        before, self._seen = self._seen, self.link.computed_tokens
        return self._seen - before

    def counted(self) -> dict[str, int]:
        before, self._counters = self._counters, self.tier.counters()
        return {key: count - before[key] for key, count in self._counters.items() if count != before[key]}

    def right(self, tokens: list[int], count: int = 4, **params: Any) -> int:
        """Answer, check the answer; return how many tokens were computed for it."""
        self.computed()
        assert self.answer(tokens, count, **params) == continuation(tokens, count, VOCAB)
        return self.computed()

    def kept(self) -> None:
        assert self.tier.keeper.behind.flush(20)

    def idle(self) -> None:
        """Nothing is left of any request."""
        self.step()
        assert self.free_blocks() == self.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        assert not self.link.holds._holders
        assert not self.tier.recall._asked

    def reset(self) -> None:
        """As a new engine, as far as tokens are concerned."""
        self.idle()
        assert self.core.reset_prefix_cache()
        self.tier.recall._ladder = Ladder({"tier": PRIORS["s3"]})
        self.counted()


Start = Callable[..., Tiered]


@pytest.fixture(scope="module")
def start(s3: S3Server) -> Iterator[Start]:
    """Start engines that use one prefix of the bucket."""
    model = make(Path(__file__).parents[2] / "models" / "tiny", "tiny")

    @contextmanager
    def started(options: dict[str, Any], fake: dict[str, Any]) -> Iterator[Tiered]:
        engine_id = f"tiered-{time.monotonic_ns()}"
        with closing(Bucket(replace(s3.settings, prefix="t/recall", timeout_s=5.0))) as bucket:
            rungs = Rungs({"memory": MemoryTransport()})
            link = Link("w", "m", rungs, _never, _never, lambda: None, _never, bucket)
            register(engine_id, link)
            defaults = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 16}
            fake = {"kv_bytes_per_token": NBYTES, "kv_blocks": 160, "prefill_tokens_s": SLOW, **fake}
            core = build_core(
                str(model), {**defaults, "block_size": BLOCK, **options, "fake": fake}, engine_id
            )
            try:
                yield Tiered(core, link)
            finally:
                core.shutdown()
                link.close()

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr(Recall, "sweep", lambda _: None)  # no probe by itself
        patch.setattr(actors.recall, "ASK_S", (PATIENT_S, PATIENT_S))
        patch.setattr(actors.recall, "LOAD_SLACK_S", PATIENT_S)
        yield lambda options=None, **fake: stack.enter_context(started(options or {}, fake))


def _never(*_: Any) -> None:
    raise AssertionError("nothing is handed over in these tests")


@pytest.fixture(scope="module")
def _pair(start: Start) -> tuple[Tiered, Tiered]:
    return start(), start()


@pytest.fixture
def one(_pair: tuple[Tiered, Tiered]) -> Iterator[Tiered]:
    _pair[0].reset()
    yield _pair[0]
    _pair[0].idle()


@pytest.fixture
def other(_pair: tuple[Tiered, Tiered]) -> Iterator[Tiered]:
    _pair[1].reset()
    yield _pair[1]
    _pair[1].idle()


def test_what_one_engine_computed_another_loads(one: Tiered, other: Tiered) -> None:
    tokens = prompt(3 * PAGE + 100, "another")
    assert one.right(tokens) == len(tokens) + 3
    one.kept()
    assert one.counted() == {"misses": 1, "written_bytes": 3 * PAGE * NBYTES}
    assert other.right(tokens) == 100 + 3
    nbytes = 3 * PAGE * NBYTES
    assert other.counted() == {"hits": 1, "loaded_tokens": 3 * PAGE, "loaded_bytes": nbytes}
    assert other.right(tokens) == 100 % BLOCK + 3  # its own cache holds it now, and nobody is asked
    assert other.counted() == {}
    other.reset()
    assert other.right([*tokens[: 2 * PAGE], *prompt(PAGE, "another end")]) == PAGE + 3
    other.kept()
    assert other.counted()["written_bytes"] == PAGE * NBYTES  # what differs


def test_what_the_engine_holds_itself_is_not_loaded(one: Tiered, other: Tiered) -> None:
    tokens = prompt(2 * PAGE + 1, "itself")
    assert one.right(tokens, 1) == len(tokens)
    one.kept()
    assert other.right(tokens[: PAGE + BLOCK], 1) == BLOCK  # one page came
    assert other.right(tokens, 1) == 1
    assert other.counted()["loaded_tokens"] == PAGE + (PAGE - BLOCK)


def test_the_last_block_of_a_prompt_is_computed(one: Tiered, other: Tiered) -> None:
    tokens = prompt(2 * PAGE, "last block")
    one.right(tokens)
    one.kept()
    assert other.right(tokens) == BLOCK + 3


def test_generated_tokens_are_kept_too(one: Tiered, other: Tiered) -> None:
    tokens = prompt(PAGE - 20, "generated")
    answer = one.answer(tokens, 40)
    one.kept()
    assert one.counted()["written_bytes"] == PAGE * NBYTES
    assert other.right([*tokens, *answer, *prompt(10)]) == 40 - 20 + 10 + 3


def test_salts_and_requests_that_read_no_cache_are_apart(
    one: Tiered, other: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(PAGE + 10, "salts")
    one.right(tokens)
    one.kept()
    assert other.right(tokens, skip_reading_prefix_cache=True) == len(tokens) + 3
    other.reset()
    monkeypatch.setattr(other.tier, "_salt", b"computed otherwise")
    assert other.right(tokens) == len(tokens) + 3
    assert other.counted()["misses"] == 1


@pytest.mark.parametrize("how", ["damaged", "truncated", "gone"])
def test_a_page_that_is_not_right_is_computed(
    one: Tiered, other: Tiered, s3: S3Server, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if s3.folder is None:
        pytest.skip(f"the files of {s3.kind} cannot be reached; install Go, or put versitygw on PATH")
    tokens = prompt(3 * PAGE + 10, how)
    one.right(tokens)
    one.kept()
    tier, recall = other.tier.recall.tiers[0], other.tier.recall
    key = tier.keys(tokens, other.tier._salt)[1]
    file = s3.folder / tier.settings.bucket / tier.settings.prefix / tier.name(key)
    good, load = file.read_bytes(), recall._load

    def spoil(*args: Any) -> None:
        """After the tier was asked, before it is read."""
        match how:
            case "damaged":
                file.write_bytes(good[:-100] + bytes([good[-100] ^ 4]) + good[-99:])
            case "truncated":
                file.write_bytes(good[:1000])
            case "gone":
                file.unlink()
        load(*args)

    with monkeypatch.context() as patch:
        patch.setattr(recall, "_load", spoil)
        assert other.right(tokens) == len(tokens) + 3
    what = "gone" if how == "gone" else "corrupt"
    other.kept()
    assert other.counted() == {"hits": 1, what: 1, "written_bytes": PAGE * NBYTES}
    assert file.read_bytes() == good  # stored again
    other.reset()
    assert other.right(tokens) == 10 + 3


def test_a_store_that_does_not_answer_costs_a_moment_once(
    own: S3Server, one: Tiered, other: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(2 * PAGE + 10, "no answer")
    one.right(tokens)
    one.kept()
    other.right(prompt(PAGE, "pace"), 1)
    other.kept()
    other.counted()
    monkeypatch.setattr(actors.recall, "ASK_S", (0.25, 2.0))
    os.kill(own.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert other.right(tokens) == len(tokens) + 3
        assert time.monotonic() - began < 10
        assert other.counted()["failures"] == 1
        for i in range(3):  # not asked again
            assert other.right(prompt(2 * PAGE, f"no answer {i}"), 1) == 2 * PAGE
        counted = other.counted()
        assert "failures" not in counted
        assert counted["slower"] == 3
    finally:
        os.kill(own.pid, signal.SIGCONT)

    def sound() -> bool:
        other.tier.recall._probe()
        return other.tier.recall._ladder.rates(time.monotonic())["tier"] > 0

    until(sound, "a probe passes")
    monkeypatch.setattr(actors.recall, "ASK_S", (PATIENT_S, PATIENT_S))
    assert other.core.reset_prefix_cache()
    assert other.right(tokens) == 10 + 3


def test_what_is_faster_to_compute_is_computed(
    one: Tiered, other: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(2 * PAGE + 10, "faster")
    one.right(tokens)
    one.kept()
    other.right(prompt(PAGE - BLOCK, "measured"), 40)
    other.kept()  # what is written behind this, or behind an earlier test, is not counted below
    other.counted()
    assert other.link.meter.measured
    other.tier.recall._ladder = Ladder({"tier": (10.0, 1e-9)})
    assert other.right(tokens) == len(tokens) + 3
    assert other.counted() == {"slower": 1}


def test_requests_that_are_aborted_at_any_moment_leave_nothing(one: Tiered, other: Tiered) -> None:
    tokens = prompt(3 * PAGE + 10, "aborted")
    one.right(tokens)
    one.kept()
    for steps in range(12):
        request_id = other.ask(tokens, 20)
        for _ in range(steps):
            other.step()
        other.core.abort_requests([request_id])
        other.run()
        other.reset()
    assert other.right(tokens) == 10 + 3


def test_preempted_requests_keep_the_right_pages(start: Start, other: Tiered) -> None:
    """Ten requests that together need more blocks than there are; what was kept meanwhile is right."""
    few = start({"num_gpu_blocks_override": 66}, prefill_tokens_s=0)
    asked = {few.ask(tokens, 150): tokens for tokens in (prompt(PAGE - 60, f"few {i}") for i in range(10))}
    few.run()
    assert len(few.preempted) > 3
    few.kept()
    assert few.counted()["written_bytes"] == 10 * PAGE * NBYTES
    for request_id, tokens in asked.items():
        answer = few.answers[request_id]
        assert answer == continuation(tokens, 150, VOCAB)
        assert other.right([*tokens, *answer[:100]], 2) == 40 + 1
    few.idle()


def test_probes_measure_and_leave_nothing(one: Tiered) -> None:
    recall = one.tier.recall
    recall._probe()
    assert recall._ladder.rates(time.monotonic())["tier"] > 1e6
    assert recall._ladder.due(time.monotonic()) == []
    until(
        lambda: not any(stored.name.startswith("handover/") for stored in recall._bucket.list()),
        "the probes are deleted",
    )
