"""The fake engine by itself: vLLM's engine core around it, in this process, without a peer."""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from actors.engine import add_request, build_core
from actors.fake_kv import continuation
from actors.fingerprint import model_files
from actors.link import Link, register
from actors.rungs import Rungs
from experiments.models import make
from kv.memory import MemoryTransport

pytestmark = pytest.mark.engine

VOCAB, BLOCK, BUDGET, EOS = 4096, 16, 64, 2
STEPS = 5000


def prompt(length: int, seed: object = 0) -> list[int]:
    drawn = random.Random(f"{length} {seed}")
    return [drawn.randrange(VOCAB) for _ in range(length)]


class Engine:
    """An engine core that is stepped here. `ask` adds requests; `run` steps until all are answered."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, Any] = {}
        self.preempted: list[str] = []
        self._ids = count()
        preempt = core.scheduler._preempt_request

        def noting(request: Any, *args: Any, **options: Any) -> None:
            self.preempted.append(request.request_id)
            preempt(request, *args, **options)

        core.scheduler._preempt_request = noting

    def ask(self, tokens: list[int], max_tokens: int = 8, ignore_eos: bool = True, **params: Any) -> str:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, **params)
        sampling.update_from_generation_config({}, EOS)
        request_id = f"r{next(self._ids)}"
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        add_request(self.core, request)
        self.answers[request_id] = []
        return request_id

    def run(self) -> None:
        for _ in range(STEPS):
            if not self.core.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"requests are left after {STEPS} steps")

    def step(self) -> None:
        outputs, _ = self.core.step_fn()
        for batch in outputs.values():
            for output in batch.outputs:
                self.answers[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = str(output.finish_reason)

    def answer(self, tokens: list[int], *args: Any, **params: Any) -> list[int]:
        request_id = self.ask(tokens, *args, **params)
        self.run()
        return self.answers[request_id]

    def free_blocks(self) -> int:
        found: int = self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return found


@pytest.fixture(scope="module")
def model() -> Path:
    return make(Path(__file__).parents[2] / "models" / "tiny", "tiny")


@pytest.fixture
def build(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setitem(os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    @contextmanager
    def build(options: dict[str, Any] | None = None, **fake: Any) -> Iterator[Engine]:
        engine_id = f"test-{time.monotonic()}"
        rungs = Rungs({"memory": MemoryTransport()})
        link = Link("w", "m", rungs, _never, _never, lambda: None, _never)
        register(engine_id, link)
        defaults = {"max_model_len": 1024, "max_num_batched_tokens": BUDGET, "max_num_seqs": 32}
        core = build_core(
            str(model), {**defaults, "block_size": BLOCK, **(options or {}), "fake": fake}, engine_id
        )
        try:
            yield Engine(core)
        finally:
            core.shutdown()
            link.close()

    return build


def _never(*_: Any) -> None:
    raise AssertionError("nothing is handed over in these tests")


@pytest.mark.parametrize("nbytes", [16, 256])
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BUDGET, BUDGET + 1, 3 * BUDGET + 5])
def test_prompts_in_several_steps(build: Callable[..., Any], nbytes: int, length: int) -> None:
    with build(kv_bytes_per_token=nbytes) as engine:
        tokens = prompt(length)
        assert engine.answer(tokens, 2 * BLOCK) == continuation(tokens, 2 * BLOCK, VOCAB)


def test_many_at_once(build: Callable[..., Any]) -> None:
    with build() as engine:
        asked = {engine.ask(tokens, 20): tokens for tokens in (prompt(5 + 7 * i, i) for i in range(40))}
        free = engine.free_blocks()
        engine.run()
        for request_id, tokens in asked.items():
            assert engine.answers[request_id] == continuation(tokens, 20, VOCAB)
        assert engine.free_blocks() == free


def test_a_cached_prefix_is_read_and_not_computed(build: Callable[..., Any]) -> None:
    with build() as engine:
        written: list[int] = []
        kv = engine.core.model_executor._kv
        write = kv.write
        kv.write = lambda blocks, start, tokens: (written.append(len(tokens)), write(blocks, start, tokens))
        common = prompt(6 * BLOCK)
        engine.answer(common, 1)
        written.clear()
        tokens = common + prompt(5, "tail")
        assert engine.answer(tokens, 4) == continuation(tokens, 4, VOCAB)
        assert sum(written) == 5 + 3
        kv.layers[:, 1:] ^= 1  # KV that is cached but wrong gives other tokens: it is read
        other = common + prompt(5, "other tail")
        assert engine.answer(other, 4) != continuation(other, 4, VOCAB)


def test_a_prefix_that_is_computed_in_the_same_step(build: Callable[..., Any]) -> None:
    """vLLM lets a request start from blocks that an earlier one fills in this very step."""
    with build() as engine:
        first = prompt(2 * BUDGET + 2 * BLOCK)
        second = first + prompt(5, "tail")
        asked = {engine.ask(first, 4): first}
        engine.step()
        asked[engine.ask(second, 4)] = second
        starts: list[int] = []
        write = engine.core.model_executor._kv.write
        engine.core.model_executor._kv.write = lambda blocks, start, tokens: (
            starts.append(start),
            write(blocks, start, tokens),
        )
        engine.run()
        assert starts[:3] == [BUDGET, 2 * BUDGET, 2 * BUDGET + 2 * BLOCK]  # the last two in one step
        for request_id, tokens in asked.items():
            assert engine.answers[request_id] == continuation(tokens, 4, VOCAB)


def test_preempted_requests_go_on_right(build: Callable[..., Any]) -> None:
    """Ten requests that together need more than twice the blocks there are."""
    with build({"num_gpu_blocks_override": 66, "enable_prefix_caching": False}) as engine:
        asked = {engine.ask(tokens, 200): tokens for tokens in (prompt(30, i) for i in range(10))}
        engine.run()
        assert len(engine.preempted) > 3
        for request_id, tokens in asked.items():
            assert engine.answers[request_id] == continuation(tokens, 200, VOCAB)


def test_stops(build: Callable[..., Any]) -> None:
    with build() as engine:
        tokens = prompt(40)
        free = continuation(tokens, 20, VOCAB)
        stopped = engine.ask(tokens, 20, stop_token_ids=[free[7]])
        engine.run()
        assert (engine.answers[stopped], engine.reasons[stopped]) == (free[:8], "stop")
        late = engine.ask(tokens, 20, stop_token_ids=[free[7]], min_tokens=9)
        engine.run()
        answer = engine.answers[late]
        assert answer[:8] == [*free[:7], free[7] + 1]
        assert (len(answer), engine.reasons[late]) == (20, "length")


def test_end_of_text(build: Callable[..., Any]) -> None:
    """About one token in VOCAB is the end-of-text token."""
    seed = next(i for i in range(100_000) if EOS in continuation(prompt(3, i), 1, VOCAB))
    tokens = prompt(3, seed)
    with build() as engine:
        ended, ignored = engine.ask(tokens, 5, ignore_eos=False), engine.ask(tokens, 5)
        engine.run()
        assert (engine.answers[ended], engine.reasons[ended]) == ([EOS], "stop")
        assert engine.answers[ignored] == continuation(tokens, 5, VOCAB)


def test_allowed_tokens(build: Callable[..., Any]) -> None:
    with build() as engine:
        answer = engine.answer(prompt(40), 30, allowed_token_ids=[3000, 7, 1500])
        assert set(answer) == {3000, 7, 1500}


def test_aborts_leave_no_block(build: Callable[..., Any]) -> None:
    with build() as engine:
        free = engine.free_blocks()
        for stage in range(6):
            asked = [engine.ask(prompt(3 * BUDGET, i), 20) for i in range(3)]
            for _ in range(stage):
                engine.step()
            engine.core.abort_requests(asked)
        engine.run()
        assert engine.free_blocks() == free
        assert not engine.core.model_executor._sequences


def test_time(build: Callable[..., Any]) -> None:
    """Ten steps of 10 ms and five sequences of 1 ms each, and 100 prompt tokens at 1000 a second."""
    with build(step_ms=10, step_ms_per_sequence=1, prefill_tokens_s=1000) as engine:
        began = time.monotonic()
        for i in range(5):
            engine.ask(prompt(20, i), 10)
        engine.run()
        took = time.monotonic() - began
        assert took > 0.100 + 0.100 + 0.040


def test_faults(build: Callable[..., Any]) -> None:
    from actors.fake import FakeEngineDied

    tokens = prompt(40)
    right = continuation(tokens, 8, VOCAB)
    with build(faults={"die_at_step": 3}) as engine:
        request_id = engine.ask(tokens, 8)
        with pytest.raises(FakeEngineDied, match="step 3"):
            engine.run()
        assert engine.answers[request_id] == right[:2]
    with build(faults={"die_after_s": 0.01}) as engine:
        time.sleep(0.02)
        engine.ask(tokens, 8)
        with pytest.raises(FakeEngineDied, match=r"after \d+\.\d s"):
            engine.run()
    with build(faults={"corrupt_at_step": 3}) as engine:
        wrong = engine.answer(tokens, 8)
        assert wrong[:2] == right[:2]
        assert wrong[2:] != right[2:]
    with build(faults={"slow_every": 4, "slow_ms": 100}) as engine:
        began = time.monotonic()
        assert engine.answer(tokens, 8) == right
        assert time.monotonic() - began > 0.2


def test_a_model_without_weights_will_do(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    assert model_files(tmp_path, weights_needed=False).digest
