"""The reference: one plain vLLM engine without a connector, in a process of its own.

It gets the same model, the same engine options and the same number of threads (one) as a worker, so that on
the same prompt it computes the same numbers. Prompts are computed one at a time and from nothing: its prefix
cache is emptied before each.
"""

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

TOP = 5
"""How many of the likeliest tokens the reference tells at each position."""

STARTED_WITHIN_S = 300.0
ANSWERED_WITHIN_S = 120.0


@dataclass(frozen=True)
class Sequenced:
    """One generated sequence: its tokens, and at each position the likeliest tokens with their logprobs."""

    tokens: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, float]]


@dataclass(frozen=True)
class Reference:
    """What the undivided engine answers."""

    prompt: list[int]
    sequences: list[Sequenced]
    prompt_logprobs: list[dict[int, float] | None] | None

    @property
    def tokens(self) -> list[int]:
        return self.sequences[0].tokens

    @property
    def text(self) -> str:
        return self.sequences[0].text


class Undivided:
    """The test's end of the reference process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def generate(self, prompt: Sequence[int], **params: Any) -> Reference:
        """Complete a prompt; `params` are vLLM's SamplingParams, greedy unless they say otherwise.

        With `seed_late`, the prompt is prefilled without the seed first: vLLM's CPU build dies of a seeded
        prompt that it prefills in several chunks.
        """
        return self._ask("generate", list(prompt), params)

    def chat(self, messages: Sequence[Mapping[str, str]], **params: Any) -> Reference:
        """Answer a chat."""
        return self._ask("chat", list(messages), params)

    def _ask(self, kind: str, prompt: Any, params: dict[str, Any]) -> Reference:
        self._pipe.send((kind, prompt, {"temperature": 0.0, **params}))
        assert self._pipe.poll(ANSWERED_WITHIN_S), f"no answer from the reference in {ANSWERED_WITHIN_S} s"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Reference)
        return answer


@contextmanager
def undivided(model: str, engine: Mapping[str, Any]) -> Iterator[Undivided]:
    """A reference process for a model and engine options."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, model, dict(engine)), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(STARTED_WITHIN_S), f"the reference did not start in {STARTED_WITHIN_S} s"
        assert ours.recv() == "ready"
        yield Undivided(ours)
    finally:
        ours.close()
        process.join(10)
        process.kill()


def _serve(pipe: Connection, model: str, engine: dict[str, Any]) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # where it runs does not change what it computes
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    if engine.get("enforce_eager"):
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as in a worker
    from vllm import LLM

    llm = LLM(model=model, disable_log_stats=True, **engine)
    pipe.send("ready")
    while True:
        try:
            kind, prompt, params = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_answer(llm, kind, prompt, params))
        except Exception as error:
            pipe.send(RuntimeError(f"the reference failed: {error!r}"))
            llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states), internal=True)


def _answer(llm: Any, kind: str, prompt: Any, params: dict[str, Any]) -> Reference:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    late = params.pop("seed_late", False)
    if (structured := params.get("structured_outputs")) is not None:
        params["structured_outputs"] = StructuredOutputsParams(**structured)
    sampling = SamplingParams(**{"logprobs": TOP, **params})
    llm.reset_prefix_cache()
    if late:
        first = SamplingParams(temperature=0.0, max_tokens=1)
        llm.generate({"prompt_token_ids": prompt}, first, use_tqdm=False)
    if kind == "chat":
        (output,) = llm.chat(prompt, sampling, use_tqdm=False)
    else:
        (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    return Reference(
        prompt=list(output.prompt_token_ids),
        sequences=[
            Sequenced(
                tokens=list(one.token_ids),
                text=one.text,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
                logprobs=[_plain(at) for at in one.logprobs or ()],
            )
            for one in output.outputs
        ],
        prompt_logprobs=None
        if output.prompt_logprobs is None
        else [None if at is None else _plain(at) for at in output.prompt_logprobs],
    )


def _plain(logprobs: Mapping[int, Any]) -> dict[int, float]:
    return {token: value.logprob for token, value in logprobs.items()}
