"""Options that vLLM refuses, before any weights are read; and the loop around an engine."""

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from actors.engine import EngineLoop, build_core, engine_config
from actors.errors import EngineStartError
from experiments.models import make

WITHIN_S = 10.0


@pytest.fixture(scope="module")
def model() -> Path:
    return make(Path(__file__).parents[2] / "models" / "tiny", "tiny")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("max_model_length", 4096, "max_model_length"),  # there is no such option
        ("max_model_len", 1_000_000, "8192"),  # more than the model has positions
        ("dtype", "bfloat17", "bfloat17"),
    ],
)
def test_an_option_that_vllm_refuses_is_named(model: Path, option: str, value: object, says: str) -> None:
    with pytest.raises(EngineStartError, match=rf"(?s){option}.*{says}"):
        engine_config(str(model), {option: value})


@pytest.mark.parametrize("option", ["pipeline_parallel_size", "data_parallel_size"])
def test_an_engine_that_is_divided_otherwise_is_refused(option: str) -> None:
    with pytest.raises(EngineStartError, match=f"{option} is 2: .*set it to 1"):
        build_core("anything", {option: 2}, "some-engine")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size is '2'; give a whole number"),
        ({"tensor_parallel_size": 2, "fake": {}}, "tensor_parallel_size is 2: the fake engine has one rank"),
    ],
)
def test_ranks_that_there_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineStartError, match=says):
        engine_config("anything", options)


@pytest.mark.engine
def test_ranks_that_do_not_share_the_heads_are_refused(model: Path) -> None:
    with pytest.raises(
        EngineStartError, match=r"tensor_parallel_size is 8, .* 4 key-value heads.* of 1, 2, 4"
    ):
        engine_config(str(model), {"tensor_parallel_size": 8, "max_model_len": 1024})


class FakeCore:
    """Steps when it has requests; each step gives what `results` says."""

    def __init__(self) -> None:
        self.scheduler, self.batch_queue = self, None
        self.results: deque[Any] = deque()
        self.steps = 0
        self.shut_down = threading.Event()

    def has_requests(self) -> bool:
        return bool(self.results)

    def step_fn(self) -> tuple[Any, bool]:
        self.steps += 1
        result = self.results.popleft()
        if isinstance(result, Exception):
            raise result
        return result, True

    def post_step(self, executed: bool) -> None:
        assert executed

    def shutdown(self) -> None:
        self.shut_down.set()


class Heard:
    """What the loop told."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.error: BaseException | None = None
        self.told = threading.Semaphore(0)

    def produced(self, outputs: Any) -> None:
        self.outputs.append(outputs)
        self.told.release()

    def stepped(self, unfinished: int) -> None:
        assert unfinished == 0

    def died(self, error: BaseException) -> None:
        self.error = error
        self.told.release()


def running(core: FakeCore) -> tuple[EngineLoop, Heard]:
    heard = Heard()
    loop = EngineLoop(lambda: core, heard)  # type: ignore[arg-type, return-value]
    loop.start()
    assert loop.started.wait(WITHIN_S)
    return loop, heard


def test_commands_run_in_order_on_the_engine_thread_and_lead_to_steps() -> None:
    core = FakeCore()
    loop, heard = running(core)
    names: list[str] = []
    for part in ({0: "a"}, {0: "b"}):
        loop.call(lambda core: names.append(threading.current_thread().name))
        loop.call(lambda core, part=part: core.results.append(part))  # type: ignore[misc, attr-defined]
    for _ in range(2):
        assert heard.told.acquire(timeout=WITHIN_S)
    assert heard.outputs == [{0: "a"}, {0: "b"}]
    assert names == ["engine", "engine"]
    assert (core.steps, loop.error) == (2, None)
    loop.stop()
    assert core.shut_down.is_set()


def test_an_engine_that_dies_is_told_once_and_shut_down() -> None:
    core = FakeCore()
    loop, heard = running(core)
    died = RuntimeError("no more")
    loop.call(lambda core: core.results.append(died))  # type: ignore[attr-defined]
    assert heard.told.acquire(timeout=WITHIN_S)
    assert heard.error is died
    assert loop.error is died
    assert core.shut_down.wait(WITHIN_S)


def test_an_engine_that_cannot_be_built_is_no_death() -> None:
    heard, refused = Heard(), EngineStartError("no")

    def build() -> Any:
        raise refused

    loop = EngineLoop(build, heard)
    loop.start()
    assert loop.started.wait(WITHIN_S)
    assert loop.error is refused
    assert heard.error is None
