"""How a request is divided: which parameters allow what, and what each worker is asked."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest

from deployments.split import PLACEHOLDER_TOKEN, Mode, choose, continued, decode_part, prefill_part

PROMPT = [11, 12, 13, 14]


def request(prompt: list[int] | None = PROMPT, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**{"max_tokens": 10, "temperature": 0.0, **params})
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=None if prompt is None else list(prompt),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"seed": 5},  # greedy: the seed is never used
        {"logprobs": 5},
        {"stop": ["x"], "detokenize": True},
        {"stop_token_ids": [7]},
        {"ignore_eos": True},
        {"min_tokens": 4},
        {"logit_bias": {5: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"max_tokens": 2},
    ],
    ids=str,
)
def test_prefill_may_sample_where_sampling_has_no_state(params: dict[str, Any]) -> None:
    assert choose(request(**params)).mode is Mode.FIRST_TOKEN


STATEFUL = {
    "seed": {"seed": 5, "temperature": 0.8},
    "presence_penalty": {"presence_penalty": 0.1},
    "frequency_penalty": {"frequency_penalty": -0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex="a+")},
    "bad_words": {"bad_words": ["x"]},
    "thinking_token_budget": {"thinking_token_budget": 5},
    "repetition_detection": {
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3)
    },
    "extra_args": {"extra_args": {"plugin": 1}},
}


@pytest.mark.parametrize("name", STATEFUL)
def test_decode_samples_where_sampling_has_a_state_and_says_which(name: str) -> None:
    found = choose(request(**STATEFUL[name]))
    assert found.mode is Mode.DECODE_SAMPLES
    assert name in found.reason


def test_one_seeded_token_is_divided_too() -> None:
    """An engine that computes a seeded prompt in several steps may die of it; decode computes one token."""
    assert choose(request(max_tokens=1, seed=5, temperature=0.8)).mode is Mode.DECODE_SAMPLES
    assert choose(request(max_tokens=1, seed=5)).mode is Mode.UNDIVIDED  # greedy: the seed is never used


@pytest.mark.parametrize("name", STATEFUL)
def test_a_prompt_of_one_token_leaves_nothing_to_hand_over_then(name: str) -> None:
    found = choose(request([11], **STATEFUL[name]))
    assert found.mode is Mode.UNDIVIDED
    assert name in found.reason
    assert choose(request([11])).mode is Mode.FIRST_TOKEN


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_tokens": 1}, "one token"),
        ({"max_tokens": 1, "presence_penalty": 1.0}, "one token"),
        ({"prompt_logprobs": 0}, "prompt logprobs"),
        ({"prompt_logprobs": 2, "max_tokens": 1}, "prompt logprobs"),
    ],
    ids=str,
)
def test_undivided(params: dict[str, Any], says: str) -> None:
    found = choose(request(**params))
    assert found.mode is Mode.UNDIVIDED
    assert says in found.reason


def test_without_token_ids_or_sampling_undivided() -> None:
    assert choose(request(None)).mode is Mode.UNDIVIDED
    pooling = request()
    pooling.sampling_params = None
    assert choose(pooling).mode is Mode.UNDIVIDED


@pytest.mark.parametrize("field", ["mm_features", "lora_request", "prompt_embeds"])
def test_what_is_not_handed_over_is_undivided(field: str) -> None:
    asked = request()
    setattr(asked, field, [object()])
    assert choose(asked).mode is Mode.UNDIVIDED


# -- the parts -----------------------------------------------------------------------------------


def params_of(part: EngineCoreRequest) -> SamplingParams:
    assert part.sampling_params is not None
    return part.sampling_params


def test_prefill_is_asked_for_one_token_sampled_as_the_client_wants() -> None:
    asked = request(temperature=0.7, top_k=9, logprobs=2, min_tokens=4, stop_token_ids=[7])
    part = prefill_part(asked, Mode.FIRST_TOKEN)
    params = params_of(part)
    assert part.prompt_token_ids == PROMPT
    assert (params.max_tokens, params.min_tokens) == (1, 1)
    assert (params.temperature, params.top_k, params.logprobs) == (0.7, 9, 2)
    assert params.stop_token_ids == [7]


def test_prefill_need_not_sample_well_where_decode_samples() -> None:
    asked = request(
        temperature=0.7, seed=3, logprobs=2, structured_outputs=StructuredOutputsParams(regex="a")
    )
    params = params_of(prefill_part(asked, Mode.DECODE_SAMPLES))
    assert (params.max_tokens, params.temperature) == (1, 0.0)
    assert params.logprobs is None
    assert params.structured_outputs is None


@pytest.mark.parametrize("mode", [Mode.FIRST_TOKEN, Mode.DECODE_SAMPLES])
def test_prefill_reads_its_prefix_cache_only_if_the_client_lets_it(mode: Mode) -> None:
    asked = request()
    params_of(asked).skip_reading_prefix_cache = True
    assert params_of(prefill_part(asked, mode)).skip_reading_prefix_cache is True


def test_decode_goes_on_after_the_first_token() -> None:
    part = decode_part(request(min_tokens=4, temperature=0.7), Mode.FIRST_TOKEN)
    params = params_of(part)
    assert part.prompt_token_ids == [*PROMPT, PLACEHOLDER_TOKEN]
    assert (params.max_tokens, params.min_tokens, params.temperature) == (9, 3, 0.7)


def test_decode_is_asked_everything_where_it_samples() -> None:
    asked = request(presence_penalty=0.4, min_tokens=4)
    part = decode_part(asked, Mode.DECODE_SAMPLES)
    assert part.prompt_token_ids == PROMPT
    assert params_of(part) == params_of(asked)


@pytest.mark.parametrize("mode", [Mode.FIRST_TOKEN, Mode.DECODE_SAMPLES])
def test_both_parts_have_the_requests_priority(mode: Mode) -> None:
    asked = request()
    asked.priority = 7
    assert prefill_part(asked, mode).priority == decode_part(asked, mode).priority == 7


def test_a_request_goes_on_after_what_was_emitted() -> None:
    part = continued(request(min_tokens=2), [5, 6, 7])
    params = params_of(part)
    assert part.prompt_token_ids == [*PROMPT, 5, 6, 7]
    assert (params.max_tokens, params.min_tokens) == (7, 0)


def test_the_request_itself_stays_as_it_was() -> None:
    asked = request(min_tokens=4)
    for part in (
        prefill_part(asked, Mode.FIRST_TOKEN),
        prefill_part(asked, Mode.DECODE_SAMPLES),
        decode_part(asked, Mode.FIRST_TOKEN),
        decode_part(asked, Mode.DECODE_SAMPLES),
        continued(asked, [5]),
    ):
        part.request_id = "other"
        assert part.sampling_params is not None
    assert asked.request_id == "r"
    assert asked.prompt_token_ids == PROMPT
    assert (params_of(asked).max_tokens, params_of(asked).min_tokens) == (10, 4)
