"""The dispatcher with workers that answer when a test says so: orders of events that are rare in life."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from test_split import PROMPT, request
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from actors.frames import decode_request, encode_outputs
from actors.messages import (
    Handed,
    Handover,
    LoadReport,
    ModelFiles,
    OutputBatch,
    Recalled,
    ReceiveFrom,
    Role,
    SendTo,
    WorkerInfo,
)
from actors.steps import StepModel
from deployments.budget import Budget
from deployments.dispatch import Dispatcher
from deployments.errors import RequestLost
from deployments.ledger import Record
from deployments.planner import Planner, Routing
from deployments.refusals import NoWorker, Overloaded, Unmeetable
from deployments.snapshot import Slo
from kv.chunk import KVLayout

SEEDED_ALONE = 6


class Client:
    """Stands for a `WorkerClient`. What it was told is in `log`."""

    def __init__(self, name: str, role: Role) -> None:
        layout = KVLayout("m", "bf16", 1, 128, 1, "x")
        files = ModelFiles("m", "/m")
        self.info = WorkerInfo(name, role, f"node-{name}", 1, files, layout, 1, 1, ("memory",), ("", 0))
        self.alive, self.closed, self.client, self.clock_offset = True, False, 1, 0.0
        self.on_back: object = None
        self.log: list[tuple[str, str]] = []
        self.handovers: list[Handover | None] = []
        self.prompts: list[list[int]] = []

    def submit(self, frame: tuple[bytes, ...], handover: Handover | None) -> None:
        asked = decode_request(frame)
        self.log.append(("submit", asked.request_id))
        self.handovers.append(handover)
        self.prompts.append(list(asked.prompt_token_ids or ()))

    def abort(self, request_ids: Sequence[str]) -> None:
        self.log += [("abort", request_id) for request_id in request_ids]

    def sender_lost(self, request_ids: Sequence[str]) -> None:
        self.log += [("sender lost", request_id) for request_id in request_ids]


class Pair:
    """A dispatcher, a prefill and a decode worker, and what the client has been given."""

    def __init__(self) -> None:
        self.p, self.d = Client("p", "prefill"), Client("d", "decode")
        self.tokens: list[int] = []
        self.finished: FinishReason | None = None
        self.failures: list[Exception] = []
        self.record = Record("r")
        self.dispatcher = Dispatcher(
            self.deliver,
            lambda _, error: self.failures.append(error),
            seeded_alone=SEEDED_ALONE,
            planner=Planner(Routing("always")),
        )
        for worker in (self.p, self.d):
            self.dispatcher.add_worker(worker)  # type: ignore[arg-type]

    def deliver(self, outputs: list[EngineCoreOutput]) -> list[str]:
        for output in outputs:
            assert output.request_id == "r"
            self.tokens += output.new_token_ids
            self.finished = output.finish_reason
        return []

    async def submit(self, prompt: list[int] | None = None, **params: Any) -> None:
        self.dispatcher.submit(request(prompt or PROMPT, **params), self.record)
        await settle()

    async def output(
        self, worker: Client, *tokens: int, end: FinishReason | None = None, attempt: int = 0
    ) -> None:
        output = EngineCoreOutput(f"r.{attempt}", list(tokens), finish_reason=end)
        frame = encode_outputs(EngineCoreOutputs(outputs=[output]))
        self.dispatcher.on_batch(worker, OutputBatch(frame))  # type: ignore[arg-type]
        await settle()

    async def failure(self, worker: Client, reason: str, attempt: int = 0) -> None:
        batch = OutputBatch((), failures={f"r.{attempt}": reason})
        self.dispatcher.on_batch(worker, batch)  # type: ignore[arg-type]
        await settle()

    async def lose(self, worker: Client) -> None:
        worker.alive = False
        self.dispatcher.on_lost(worker, "killed")  # type: ignore[arg-type]
        await settle()

    def idle(self) -> bool:
        return self.load() == (0, 0, 0, 0)

    def load(self) -> tuple[object, ...]:
        """Prompt tokens that wait and requests that run, of both workers, as the router is told."""
        told = [self.dispatcher.planner.fleet.describe(worker.info.name) for worker in (self.p, self.d)]
        return tuple(one[key] for one in told for key in ("prefill_tokens", "running"))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def scenario(play: Callable[[Pair], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that plays on an event loop, with a deadline."""

    def test() -> None:
        async def limited() -> None:
            await asyncio.wait_for(play(Pair()), 10)

        asyncio.run(limited())

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


@scenario
async def test_prefill_then_decode(pair: Pair) -> None:
    await pair.submit()
    assert pair.p.handovers == [SendTo("d")]
    (receive,) = pair.d.handovers
    assert isinstance(receive, ReceiveFrom)
    assert (receive.peer, receive.prompt_tokens, receive.first_token) == ("p", 4, True)
    assert pair.load() == (4, 0, 0, 1)
    await pair.output(pair.p, 7, end=FinishReason.LENGTH)
    assert (pair.tokens, pair.finished, pair.load()) == ([7], None, (0, 0, 0, 1))
    await pair.output(pair.d, 8)
    await pair.output(pair.d, 9, end=FinishReason.STOP)
    assert (pair.tokens, pair.finished) == ([7, 8, 9], FinishReason.STOP)
    assert pair.idle()
    assert pair.record.facts["attempts"] == 1


@scenario
async def test_a_role_that_changes_amid_an_answer_is_for_later_requests(pair: Pair) -> None:
    await pair.submit()
    await pair.output(pair.p, 7, end=FinishReason.LENGTH)
    await pair.output(pair.d, 8)
    for worker, role in ((pair.p, "decode"), (pair.d, "prefill")):
        report = LoadReport(StepModel(), role=role)  # type: ignore[arg-type]
        pair.dispatcher.on_batch(worker, OutputBatch((), load=report))  # type: ignore[arg-type]
    await pair.output(pair.d, 9, end=FinishReason.STOP)
    assert (pair.tokens, pair.finished) == ([7, 8, 9], FinishReason.STOP)
    assert pair.idle()
    assert (pair.p.info.role, pair.d.info.role) == ("decode", "prefill")
    pair.tokens.clear()
    await pair.submit()
    assert pair.d.handovers[1:] == [SendTo("p")]
    await pair.output(pair.d, 7, end=FinishReason.LENGTH)
    await pair.output(pair.p, 8, end=FinishReason.STOP)
    assert pair.tokens == [7, 8]
    assert pair.idle()


@scenario
async def test_decode_is_faster_than_the_first_token(pair: Pair) -> None:
    await pair.submit()
    await pair.output(pair.d, 8)
    await pair.output(pair.d, 9, end=FinishReason.LENGTH)
    assert pair.tokens == []
    await pair.output(pair.p, 7, end=FinishReason.LENGTH)
    assert (pair.tokens, pair.finished) == ([7, 8, 9], FinishReason.LENGTH)
    assert pair.idle()


@scenario
async def test_the_first_token_ends_it_and_decode_is_told(pair: Pair) -> None:
    await pair.submit()
    await pair.output(pair.p, 7, end=FinishReason.STOP)
    assert (pair.tokens, pair.finished) == ([7], FinishReason.STOP)
    assert ("abort", "r.0") in pair.d.log
    assert pair.idle()


@scenario
async def test_what_comes_after_an_abort_is_dropped(pair: Pair) -> None:
    await pair.submit()
    pair.dispatcher.abort(["r"])
    await pair.output(pair.p, 7, end=FinishReason.LENGTH)
    await pair.failure(pair.d, "late")
    assert (pair.tokens, pair.failures) == ([], [])
    assert pair.idle()


@scenario
async def test_a_failed_handover_is_tried_again_undivided(pair: Pair) -> None:
    await pair.submit()
    await pair.output(pair.p, 7, end=FinishReason.LENGTH)
    await pair.failure(pair.d, "checksum")
    assert pair.d.log[-2:] == [("abort", "r.0"), ("submit", "r.1")]
    assert (pair.d.handovers[-1], pair.d.prompts[-1]) == (None, [11, 12, 13, 14, 7])
    await pair.output(pair.d, 99, attempt=0)  # of the attempt that is over
    await pair.output(pair.d, 8, end=FinishReason.LENGTH, attempt=1)
    assert pair.tokens == [7, 8]
    assert (pair.record.facts["attempts"], pair.record.facts["failure"]) == (2, "checksum")
    assert pair.idle()


@scenario
async def test_three_failures_are_the_end(pair: Pair) -> None:
    await pair.submit()
    for attempt in range(3):
        assert pair.failures == []
        await pair.failure(pair.d, f"why {attempt}", attempt)
    (error,) = pair.failures
    assert isinstance(error, RequestLost)
    assert "failed 3 times: why 2" in str(error)
    assert pair.idle()


@scenario
async def test_a_lost_decode_worker_is_replaced_where_nothing_is_lost_with_it(pair: Pair) -> None:
    await pair.submit()
    await pair.output(pair.p, 7, end=FinishReason.LENGTH)
    await pair.lose(pair.d)
    assert (pair.p.handovers[-1], pair.p.prompts[-1]) == (None, [11, 12, 13, 14, 7])
    await pair.output(pair.p, 8, end=FinishReason.LENGTH, attempt=1)
    assert pair.tokens == [7, 8]
    assert pair.idle()


@scenario
async def test_a_sampling_state_that_is_lost_is_an_error(pair: Pair) -> None:
    await pair.submit(presence_penalty=0.5, temperature=1.0)
    await pair.output(pair.p, 1, end=FinishReason.LENGTH)
    assert pair.tokens == []  # prefill's token is not an answer
    await pair.output(pair.d, 7)
    await pair.lose(pair.d)
    (error,) = pair.failures
    assert "cannot be continued" in str(error)
    assert pair.idle()


STATEFUL: list[dict[str, Any]] = [
    {"seed": 1, "temperature": 1.0},
    {"presence_penalty": 0.5, "temperature": 0.0},
]


@pytest.mark.parametrize("params", STATEFUL, ids=str)
def test_what_can_be_repeated_is_computed_again_and_goes_on(params: dict[str, Any]) -> None:
    @scenario
    async def repeated(pair: Pair) -> None:
        await pair.submit(**params)
        for token in (7, 8, 9):
            await pair.output(pair.d, token)
        await pair.lose(pair.d)
        assert pair.p.prompts[-1] == [11, 12, 13, 14]
        for token in (7, 8, 9):
            await pair.output(pair.p, token, attempt=1)
            assert pair.tokens == [7, 8, 9]
        await pair.output(pair.p, 10, end=FinishReason.LENGTH, attempt=1)
        assert pair.tokens == [7, 8, 9, 10]
        assert pair.failures == []
        assert pair.idle()

    repeated()


@scenario
async def test_what_is_not_the_same_again_is_an_error(pair: Pair) -> None:
    await pair.submit(**STATEFUL[0])
    for token in (7, 8):
        await pair.output(pair.d, token)
    await pair.lose(pair.d)
    await pair.output(pair.p, 7, attempt=1)
    await pair.output(pair.p, 5, attempt=1)
    (error,) = pair.failures
    assert "other tokens came" in str(error)
    assert pair.tokens == [7, 8]
    assert pair.idle()


@scenario
async def test_before_its_first_token_it_can_start_again(pair: Pair) -> None:
    await pair.submit(seed=1, temperature=1.0)
    await pair.lose(pair.d)
    assert pair.failures == []
    assert pair.p.prompts[-1] == [11, 12, 13, 14]


@scenario
async def test_a_prefill_worker_whose_part_is_done_may_die(pair: Pair) -> None:
    """Whether all KV has been announced, decode knows."""
    await pair.submit()
    await pair.output(pair.p, 7, end=FinishReason.LENGTH)
    await pair.lose(pair.p)
    assert pair.d.log[-1] == ("sender lost", "r.0")
    assert pair.record.facts["attempts"] == 1
    await pair.output(pair.d, 8, end=FinishReason.LENGTH)
    assert pair.tokens == [7, 8]


@scenario
async def test_a_refused_submission_is_tried_elsewhere(pair: Pair) -> None:
    await pair.submit()
    await pair.failure(pair.p, "the engine refused it: no")
    assert pair.d.log[-1] == ("submit", "r.1")
    assert "refused it: no" in str(pair.record.facts["failure"])


@scenario
async def test_nobody_is_left(pair: Pair) -> None:
    await pair.submit()
    await pair.lose(pair.p)
    await pair.lose(pair.d)
    (error,) = pair.failures
    assert isinstance(error, NoWorker)
    with pytest.raises(NoWorker):
        pair.dispatcher.require_worker()


LONG = [11] * (SEEDED_ALONE + 1)


@scenario
async def test_a_seeded_prompt_that_would_end_the_engine_it_runs_on_is_refused(pair: Pair) -> None:
    with pytest.raises(VLLMValidationError, match="`seed` with a prompt of 7 tokens"):
        await pair.submit(LONG, seed=1, temperature=1.0, prompt_logprobs=1)
    assert pair.p.log == pair.d.log == []
    assert pair.idle()
    await pair.submit(LONG, temperature=1.0, prompt_logprobs=1)  # without the seed it runs
    assert pair.d.prompts == [LONG]


@scenario
async def test_a_seeded_prompt_is_not_tried_again_where_it_would_end_the_engine(pair: Pair) -> None:
    await pair.submit(LONG, seed=1, temperature=1.0)
    await pair.failure(pair.d, "a corrupt chunk")
    (error,) = pair.failures
    assert "a corrupt chunk" in str(error)
    assert "seed" in str(error)
    assert len(pair.d.prompts) == 1
    assert pair.idle()


# -- recomputing -------------------------------------------------------------------------------------


@scenario
async def test_decode_computes_for_itself_while_the_budget_lasts(pair: Pair) -> None:
    clock = [0.0]
    pair.dispatcher.budget = Budget(tokens_per_s=1, burst_s=4, clock=lambda: clock[0])
    await pair.submit()
    await pair.failure(pair.d, "checksum")
    assert (pair.failures, pair.d.log[-1]) == ([], ("submit", "r.1"))
    assert pair.record.facts["decode_worker"] == "d"
    await pair.failure(pair.d, "again", attempt=1)
    (error,) = pair.failures
    assert isinstance(error, Overloaded)
    assert (error.http_status, error.retry_after_s) == (503, 1.0)
    assert "again; computing the prompt on d" in str(error)
    assert len(pair.d.prompts) == 2
    assert pair.idle()
    pair.failures.clear()
    clock[0] = 2.0
    await pair.submit()
    await pair.failure(pair.d, "checksum")
    assert (pair.failures, pair.d.log[-1]) == ([], ("submit", "r.1"))


@scenario
async def test_what_came_out_of_the_tier_is_recorded_and_not_paid_for(pair: Pair) -> None:
    pair.dispatcher.budget = Budget(tokens_per_s=1, burst_s=4, clock=lambda: 0.0)
    await pair.submit()
    await pair.failure(pair.d, "checksum")
    assert pair.dispatcher.budget.spend(1) > 0
    frame = encode_outputs(EngineCoreOutputs(outputs=[EngineCoreOutput("r.1", [8])]))
    batch = OutputBatch(frame, recalled={"r.1": Recalled(3, 777, "faster")})
    pair.dispatcher.on_batch(pair.d, batch)  # type: ignore[arg-type]
    facts = pair.record.facts
    assert (facts["tier_worker"], facts["tier_tokens"], facts["tier_bytes"]) == ("d", 3, 777)
    assert (pair.record.path() or "").endswith("; 3 tokens from the tier on d, faster")
    assert pair.dispatcher.budget.spend(3) == 0
    assert pair.dispatcher.budget.spend(1) > 0


@scenario
async def test_a_retry_elsewhere_than_on_decode_costs_no_budget(pair: Pair) -> None:
    pair.dispatcher.budget = Budget(tokens_per_s=1, burst_s=1, clock=lambda: 0.0)
    pair.dispatcher.budget.spend(10)
    await pair.submit()
    await pair.output(pair.p, 7, end=FinishReason.LENGTH)
    await pair.lose(pair.d)
    assert (pair.failures, pair.p.log[-1]) == ([], ("submit", "r.1"))


@scenario
async def test_the_same_decode_worker_computes_for_itself(pair: Pair) -> None:
    other = Client("a", "decode")  # idle, and the router's first choice once the other has work
    await pair.submit()
    pair.dispatcher.add_worker(other)  # type: ignore[arg-type]
    await pair.failure(pair.d, "checksum")
    assert pair.d.log[-1] == ("submit", "r.1")
    assert other.log == []


@scenario
async def test_how_kv_came_is_recorded(pair: Pair) -> None:
    await pair.submit()
    assert pair.record.facts["transport"] is None
    await pair.output(pair.p, 7, end=FinishReason.LENGTH)
    frame = encode_outputs(EngineCoreOutputs(outputs=[EngineCoreOutput("r.0", [8])]))
    how = Handed(123, ("tcp", "plasma"), "because")
    batch = OutputBatch(frame, marks={"r.0": (("output", 1.0),)}, handed={"r.0": how})
    pair.dispatcher.on_batch(pair.d, batch)  # type: ignore[arg-type]
    facts = pair.record.facts
    assert (facts["kv_bytes"], facts["transport"]) == (123, "tcp+plasma")
    assert (pair.record.path() or "").startswith("p>d; tcp+plasma; because; always: ")
    decision = facts["decision"]
    assert isinstance(decision, dict)
    assert (decision["prefill"], decision["decode"], decision["cause"]) == ("p", "d", "always")
    assert decision["ttft_ms"] > 0
    assert set(decision["parts_ms"]) == {"overhead", "queue", "prefill", "handover", "others"}


# -- routing -----------------------------------------------------------------------------------------


def replan(pair: Pair, routing: Routing) -> None:
    """Have the pair routed otherwise."""
    pair.dispatcher.planner = Planner(routing)
    for worker in (pair.p, pair.d):
        pair.dispatcher.planner.fleet.add(worker.info)


@scenario
async def test_adaptively_an_idle_pair_does_not_divide(pair: Pair) -> None:
    replan(pair, Routing())
    await pair.submit()
    assert (pair.p.log, pair.d.log, pair.d.handovers) == ([], [("submit", "r.0")], [None])
    assert pair.record.facts["mode"] == "undivided"
    await pair.output(pair.d, 7)
    assert pair.load() == (0, 0, 0, 1)
    await pair.output(pair.d, 8, end=FinishReason.LENGTH)
    assert pair.tokens == [7, 8]
    assert pair.idle()


@scenario
async def test_in_the_shadow_the_decision_is_told_and_not_taken(pair: Pair) -> None:
    replan(pair, Routing("never", shadow=True))
    await pair.submit()
    assert pair.p.handovers == [SendTo("d")]
    shadow = pair.record.facts["shadow"]
    assert isinstance(shadow, dict)
    assert (shadow["prefill"], shadow["decode"]) == ("d", "d")
    assert "; else " in str(shadow["reason"])
    pair.dispatcher.abort(["r"])
    assert pair.idle()


@scenario
async def test_a_request_that_would_be_late_is_refused_and_leaves_nothing(pair: Pair) -> None:
    with pytest.raises(Unmeetable) as caught:
        pair.dispatcher.submit(request(PROMPT), pair.record, Slo(ttft_s=1e-6))
    assert caught.value.http_status == 429
    assert caught.value.retry_after_s >= 1
    assert pair.p.log == pair.d.log == []
    assert pair.idle()
    pair.dispatcher.submit(request(PROMPT), pair.record, Slo(ttft_s=1e-6), admitted=True)
    assert pair.p.log == [("submit", "r.0")]


@scenario
async def test_what_one_engine_must_not_run_alone_is_divided(pair: Pair) -> None:
    replan(pair, Routing())
    await pair.submit(LONG, seed=1, temperature=1.0)
    assert pair.p.handovers == [SendTo("d")]
