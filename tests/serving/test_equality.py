"""A divided request answers what one engine would have answered, token by token.

Every case goes through the HTTP endpoint with the official client, and is compared with a plain vLLM engine
that computes the same prompt alone and from nothing (`undivided.py`). What the gateway's ledger says of the
request proves that it really ran divided: in which mode, on which two nodes, with how many bytes of KV.

`comparing.py` says what equal means.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from asking import Answer, Endpoint
from comparing import ALIKE, TIE, equal, equal_but_for_ties, equal_until_a_draw, prompt
from limits import BLOCK, CHUNK, MAX_LEN
from undivided import Undivided

from deployments.app import Serving
from experiments.models import kv_bytes_per_token

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

OUT = 24

FIRST, DECODE, WHOLE = "first-token", "decode-samples", "undivided"
EOS = 2


@pytest.fixture(scope="module")
def kv_bytes(model: Path) -> Callable[[int], int]:
    """How many bytes of KV are handed over for a prompt: whole blocks."""
    per_block = BLOCK * kv_bytes_per_token(json.loads((model / "config.json").read_text()))
    return lambda tokens: -(-tokens // BLOCK) * per_block


@pytest.fixture
def ran(kv_bytes: Callable[[int], int], serving: Serving) -> Callable[..., None]:
    """Check where a request ran."""
    transports = {name for worker in serving.workers for name in worker.info.transports}

    def check(
        answer: Answer, mode: str, worker: str = "decode", kv: bool | None = True, cached: bool = False
    ) -> None:
        record = answer.record
        assert record["mode"] == mode, record
        assert record["attempts"] == 1
        assert "failure" not in record
        assert record["prompt_tokens"] == len(answer.prompt)
        nodes = (record["prefill_node"], record["decode_node"])
        if mode == WHOLE:
            assert nodes == (f"{worker}-0", f"{worker}-0")
            assert record["transport"] is None
            assert "kv_bytes" not in record
        else:
            assert nodes == ("prefill-0", "decode-0")
            if kv:
                assert set(record["transport"].split("+")) <= transports | ({"cached"} if cached else set())
            if kv is not None:
                assert record.get("kv_bytes") == (kv_bytes(len(answer.prompt)) if kv else None)

    return check


# -- lengths -------------------------------------------------------------------------------------

LENGTHS = [
    *(1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 5),
    *(CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + BLOCK, 2 * CHUNK, 1500, 2049, MAX_LEN - OUT),
]


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_samples_the_first_token(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], length: int
) -> None:
    asked = {"max_tokens": OUT, "ignore_eos": True}
    answer = endpoint.complete(prompt(length), **asked)
    ran(answer, FIRST)
    equal(answer, reference.generate(prompt(length), **asked), **asked)


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_samples_every_token(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], length: int
) -> None:
    asked = {"max_tokens": OUT, "ignore_eos": True, "presence_penalty": 0.7}
    answer = endpoint.complete(prompt(length, "decode"), **asked)
    ran(answer, DECODE if length > 1 else WHOLE)
    equal(answer, reference.generate(prompt(length, "decode"), **asked), **asked)


@pytest.mark.parametrize("extra", [{}, {"frequency_penalty": 0.5}], ids=["first", "decode"])
@pytest.mark.parametrize("length", [1, BLOCK, CHUNK + 3, 1300])
def test_streamed(
    endpoint: Endpoint,
    reference: Undivided,
    ran: Callable[..., None],
    length: int,
    extra: dict[str, float],
) -> None:
    asked = {"max_tokens": OUT, "ignore_eos": True, **extra}
    answer = endpoint.complete(prompt(length, "stream"), stream=True, **asked)
    ran(answer, FIRST if not extra else DECODE if length > 1 else WHOLE)
    equal(answer, reference.generate(prompt(length, "stream"), **asked), **asked)
    assert len([part for part in answer.raw if part.choices]) > OUT / 2  # not all in one piece


def test_the_answer_depends_on_every_block_of_the_prompt(reference: Undivided) -> None:
    """What gives the cases above their teeth: a block of KV that is not the prompt's gives other tokens."""
    whole = prompt(1500, "teeth")
    right = reference.generate(whole, max_tokens=OUT, ignore_eos=True).tokens
    for at in range(0, 1500, 2 * BLOCK):
        changed = whole[:at] + prompt(BLOCK, at) + whole[at + BLOCK :]
        assert reference.generate(changed[:1500], max_tokens=OUT, ignore_eos=True).tokens != right, at


# -- sampling parameters -------------------------------------------------------------------------

ONE_AFTER_ANOTHER = [
    ("max_tokens-2", {"max_tokens": 2}, FIRST),
    ("logit_bias", {"logit_bias": {"40": 4.0, "41": -100.0}}, FIRST),
    ("allowed_token_ids", {"allowed_token_ids": list(range(100, 160))}, FIRST),
    ("eos", {"logit_bias": {str(EOS): 3.0}}, FIRST),
    ("ignore_eos", {"logit_bias": {str(EOS): 6.0}, "ignore_eos": True}, FIRST),
    ("min_tokens", {"min_tokens": 7, "logit_bias": {str(EOS): 30.0}}, FIRST),
    ("skip_special_tokens", {"logit_bias": {"5": 30.0}, "skip_special_tokens": False}, FIRST),
    ("top-of-greedy", {"top_p": 0.5, "top_k": 3}, FIRST),
    ("seed-of-greedy", {"seed": 3}, FIRST),
    ("presence", {"presence_penalty": 1.5}, DECODE),
    ("frequency", {"frequency_penalty": 1.5}, DECODE),
    ("repetition", {"repetition_penalty": 1.4}, DECODE),
    (
        "all-penalties",
        {"presence_penalty": 0.4, "frequency_penalty": -0.3, "repetition_penalty": 1.1},
        DECODE,
    ),
    (
        "min_tokens-penalty",
        {"min_tokens": 5, "presence_penalty": 0.2, "logit_bias": {str(EOS): 30.0}},
        DECODE,
    ),
    ("bad_words", {"bad_words": ["the", "and", "of"]}, DECODE),
    ("choice", {"structured_outputs": {"choice": ["blue whale", "green turtle"]}}, DECODE),
    ("regex", {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{4}"}}, DECODE),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("name", "params", "mode"), ONE_AFTER_ANOTHER, ids=[name for name, _, _ in ONE_AFTER_ANOTHER]
)
def test_parameters(
    endpoint: Endpoint,
    reference: Undivided,
    ran: Callable[..., None],
    name: str,
    params: dict[str, Any],
    mode: str,
    stream: bool,
) -> None:
    asked = {"max_tokens": OUT, **params}
    length = 700 if stream else 200
    answer = endpoint.complete(prompt(length, name), stream=stream, **asked)
    ran(answer, mode)
    bias = {int(token): value for token, value in params.get("logit_bias", {}).items()}
    equal(answer, reference.generate(prompt(length, name), **{**asked, "logit_bias": bias or None}), **params)


DRAWN = {
    "plain": {"temperature": 0.9},
    "truncated": {"temperature": 1.3, "top_p": 0.9, "top_k": 40},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "penalty": {"temperature": 0.8, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("params", DRAWN.values(), ids=DRAWN)
def test_seeds(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], params: dict[str, float]
) -> None:
    """The last prompt is longer than a chunk."""
    same = []
    for seed, length in enumerate([2, 128, 200, 257, 500, 1100]):
        tokens = prompt(length, f"seeds {params}")
        asked = {"max_tokens": OUT, "ignore_eos": True, "seed": seed, **params}
        answer = endpoint.complete(tokens, logprobs=1, stream=bool(seed % 2), **asked)
        ran(answer, DECODE)
        expected = reference.generate(tokens, seed_late=length > CHUNK, **asked)
        same.append(equal_until_a_draw(answer.choices[0], expected.sequences[0]))
    assert same.count(True) > len(same) / 2


def test_several_choices(endpoint: Endpoint, reference: Undivided, ran: Callable[..., None]) -> None:
    """Each has its own seed, one after the other's."""
    asked = {"max_tokens": OUT, "ignore_eos": True, "temperature": 0.9, "seed": 5, "n": 3}
    tokens = prompt(150, "choices")
    answer = endpoint.complete(tokens, logprobs=1, **asked)
    ran(answer, DECODE)
    expected = reference.generate(tokens, **asked)
    pairs = zip(answer.choices, expected.sequences, strict=True)
    same = [equal_until_a_draw(choice, sequence) for choice, sequence in pairs]
    assert any(same)
    assert len({tuple(choice.tokens) for choice in answer.choices}) == 3


def test_several_choices_without_a_seed_are_divided_each(
    endpoint: Endpoint, ran: Callable[..., None]
) -> None:
    answer = endpoint.complete(prompt(450, "n"), max_tokens=OUT, ignore_eos=True, temperature=0.9, n=3)
    ran(answer, FIRST)
    assert [len(choice.tokens) for choice in answer.choices] == [OUT] * 3
    assert len({tuple(choice.tokens) for choice in answer.choices}) == 3


@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 0.1}], ids=["first", "decode"])
@pytest.mark.parametrize("kind", ["string", "first-string", "token", "first-token", "kept-string"])
def test_stops(
    endpoint: Endpoint,
    reference: Undivided,
    ran: Callable[..., None],
    kind: str,
    extra: dict[str, float],
) -> None:
    asked: dict[str, Any] = {"max_tokens": OUT, "ignore_eos": True, **extra}
    tokens = prompt(300, kind)
    free = reference.generate(tokens, **asked)
    half = len(free.text) // 2
    match kind:
        case "string":
            asked["stop"] = ["no such text", free.text[half : half + 6]]
        case "kept-string":
            asked |= {"stop": [free.text[half : half + 6]], "include_stop_str_in_output": True}
        case "first-string":
            asked["stop"] = [free.text[:2]]
        case "token":
            asked["stop_token_ids"] = [free.tokens[OUT // 2]]
        case "first-token":
            asked["stop_token_ids"] = [free.tokens[0]]
    answer = endpoint.complete(tokens, **asked)
    over_at_once = kind.startswith("first") and not extra
    ran(answer, DECODE if extra else FIRST, kv=not over_at_once)
    expected = reference.generate(tokens, **asked)
    assert expected.sequences[0].finish_reason == "stop"
    equal(answer, expected, **extra)
    endpoint.settled()


@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 0.5}], ids=str)
def test_one_token_is_all_prefill(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], extra: dict[str, float]
) -> None:
    tokens = prompt(500, f"one {extra}")
    answer = endpoint.complete(tokens, max_tokens=1, **extra)
    ran(answer, WHOLE, worker="prefill")
    equal(answer, reference.generate(tokens, max_tokens=1, **extra))


def test_seeds_that_one_cpu_engine_dies_of(endpoint: Endpoint, ran: Callable[..., None]) -> None:
    """A seeded prompt of several prefill steps ends vLLM's CPU engine: it is divided, or refused."""
    tokens, seeded = prompt(1100, "seeds alone"), {"seed": 4, "temperature": 0.8}
    one, other = (endpoint.complete(tokens, max_tokens=1, **seeded) for _ in range(2))
    ran(one, DECODE)
    assert len(one.tokens) == 1
    assert one.tokens == other.tokens
    with pytest.raises(openai.BadRequestError, match="`seed` with a prompt of 1100 tokens"):
        endpoint.complete(tokens, max_tokens=2, prompt_logprobs=1, **seeded)
    endpoint.settled()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 0.5}], ids=["first", "decode"])
def test_logprobs(
    endpoint: Endpoint,
    reference: Undivided,
    ran: Callable[..., None],
    extra: dict[str, float],
    stream: bool,
) -> None:
    asked = {"max_tokens": OUT, "ignore_eos": True, **extra}
    tokens = prompt(400 + stream, "logprobs")
    answer = endpoint.complete(tokens, logprobs=3, stream=stream, **asked)
    ran(answer, DECODE if extra else FIRST)
    expected = reference.generate(tokens, **asked)
    equal(answer, expected, **extra)
    (one,) = expected.sequences
    if answer.tokens != one.tokens:
        return  # a tie
    wanted = [likely[token] for token, likely in zip(one.tokens, one.logprobs, strict=True)]
    assert answer.choices[0].logprobs == pytest.approx(wanted, abs=TIE if extra else ALIKE)
    if not stream:
        tops = answer.raw.choices[0].logprobs.top_logprobs
        for top, likely in zip(tops, one.logprobs, strict=True):
            best = sorted(likely.values(), reverse=True)[:3]
            assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=TIE if extra else ALIKE)


@pytest.mark.parametrize("params", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}], ids=str)
def test_prompt_logprobs_come_from_one_worker(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], params: dict[str, Any]
) -> None:
    tokens = prompt(600, f"prompt {params}")
    answer = endpoint.complete(tokens, max_tokens=OUT, ignore_eos=True, **params)
    ran(answer, WHOLE)
    expected = reference.generate(tokens, max_tokens=OUT, ignore_eos=True, prompt_logprobs=2)
    assert expected.prompt_logprobs is not None
    known = list(zip(tokens, expected.prompt_logprobs, strict=True))[1:]
    wanted = [likely[token] for token, likely in known if likely is not None]
    if "echo" in params:
        found = [value for value in answer.raw.choices[0].logprobs.token_logprobs if value is not None]
        found, rest = found[: len(wanted)], found[len(wanted) :]
        assert len(rest) == OUT
    else:
        entries = answer.raw.choices[0].prompt_logprobs[1:]
        found = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries, strict=True)]
    assert found == pytest.approx(wanted, abs=ALIKE)
    assert answer.tokens[-OUT:] == expected.tokens


# -- text and chats ------------------------------------------------------------------------------

SENTENCE = "The quick brown fox jumps over the lazy dog, and nobody knows why it should. "


@pytest.mark.parametrize("times", [1, 12, 60])
def test_text(endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], times: int) -> None:
    answer = endpoint.complete(SENTENCE * times, max_tokens=OUT)
    ran(answer, FIRST)
    assert len(answer.prompt) > 10 * times
    equal(answer, reference.generate(answer.prompt, max_tokens=OUT))


CHATS = {
    "short": [{"role": "user", "content": "Hello!"}],
    "system": [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": SENTENCE * 9},
    ],
    "turns": [
        {"role": "user", "content": SENTENCE * 12},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "What do you see?"},
    ],
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"frequency_penalty": 0.4}, {"seed": 11, "temperature": 0.7}],
    ids=["greedy", "penalty", "seed"],
)
@pytest.mark.parametrize("chat", CHATS)
def test_chats(
    endpoint: Endpoint,
    reference: Undivided,
    ran: Callable[..., None],
    chat: str,
    extra: dict[str, float],
    stream: bool,
) -> None:
    first, *others = CHATS[chat]
    first = {**first, "content": f"{extra} {stream}. {first['content']}"}  # or it is behind a cached prefix
    messages = [first, *others, {"role": "user", "content": "And now?"}]
    answer = endpoint.chat(messages, stream=stream, max_tokens=OUT, **extra)
    ran(answer, DECODE if extra else FIRST)
    expected = reference.chat(messages, max_tokens=OUT, **extra)
    assert answer.prompt == expected.prompt
    if "seed" not in extra:
        equal(answer, expected, **extra)
    elif answer.tokens == expected.tokens:
        assert answer.text == expected.text
    else:
        assert answer.tokens[:3] == expected.tokens[:3]


@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 0.3}], ids=["first", "decode"])
def test_a_chat_with_logprobs(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], extra: dict[str, float]
) -> None:
    messages = [{"role": "user", "content": f"logprobs {extra} {SENTENCE}"}]
    answer = endpoint.chat(messages, max_tokens=OUT, logprobs=True, top_logprobs=2, **extra)
    ran(answer, DECODE if extra else FIRST)
    expected = reference.chat(messages, max_tokens=OUT, **extra)
    equal(answer, expected, **extra)
    (one,) = expected.sequences
    if answer.tokens != one.tokens:
        return  # a tie
    wanted = [likely[token] for token, likely in zip(one.tokens, one.logprobs, strict=True)]
    assert answer.choices[0].logprobs == pytest.approx(wanted, abs=TIE if extra else ALIKE)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chat_that_must_answer_in_json(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], stream: bool
) -> None:
    """A model that knows nothing may put in blanks for ever, so the answer need not be complete."""
    messages = [{"role": "user", "content": f"{stream} " + SENTENCE * 20}]
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = endpoint.chat(messages, stream=stream, max_tokens=40, response_format=form)
    ran(answer, DECODE)
    equal(answer, reference.chat(messages, max_tokens=40, structured_outputs={"json": SCHEMA}))
    assert answer.text.startswith("{")


def test_the_client_can_leave_the_request_id_to_the_gateway(endpoint: Endpoint) -> None:
    response = endpoint.http.post(
        "/v1/completions", json={"model": endpoint.model, "prompt": "Hello", "max_tokens": 4}
    )
    assert response.status_code == 200
    assert endpoint.record(response.headers["x-request-id"])["mode"] == FIRST


# -- batches and cached prefixes -----------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 0.0, "repetition_penalty": 1.001}], ids=str)
def test_eight_at_once(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], extra: dict[str, float]
) -> None:
    """Equal but for ties."""
    lengths = [1 + bool(extra), 40, 127, 128, 300, 513, 700, 1200, 129, 256, 64, 900, 2, 511, 200, 385]
    prompts = [prompt(length, f"batch {extra}") for length in lengths]
    asked = {"max_tokens": OUT, "ignore_eos": True, **extra}

    def ask(number: int) -> Answer:
        return endpoint.complete(prompts[number], stream=bool(number % 2), **asked)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(len(prompts)), timeout=120))
    for tokens, answer in zip(prompts, answers, strict=True):
        ran(answer, DECODE if extra else FIRST)
        equal_but_for_ties(answer.tokens, reference.generate(tokens, **asked).sequences[0], **extra)
    endpoint.settled()


@pytest.mark.parametrize("extra", [{}, {"frequency_penalty": 0.3}], ids=["first", "decode"])
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, CHUNK, CHUNK + 1, 1300])
def test_the_same_prompt_again(
    endpoint: Endpoint,
    reference: Undivided,
    ran: Callable[..., None],
    length: int,
    extra: dict[str, float],
) -> None:
    """Both workers have it cached by then; decode wholly, where all it needs are whole blocks."""
    tokens = prompt(length, f"again {extra}")
    asked = {"max_tokens": OUT, "ignore_eos": True, **extra}
    expected = reference.generate(tokens, **asked).sequences[0]
    for turn in range(3):
        answer = endpoint.complete(tokens, **asked)
        waits_for_nothing = turn and extra and length % BLOCK == 1
        ran(answer, DECODE if extra else FIRST, kv=None if waits_for_nothing else True, cached=turn > 0)
        equal_but_for_ties(answer.tokens, expected, **extra)
    endpoint.settled()


@pytest.mark.parametrize("extra", [{}, {"frequency_penalty": 0.3}], ids=["first", "decode"])
def test_prompts_that_share_a_beginning(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None], extra: dict[str, float]
) -> None:
    begin = prompt(1000, f"shared {extra}")
    asked = {"max_tokens": OUT, "ignore_eos": True, **extra}
    for shared in (1000, BLOCK, 4 * BLOCK, 4 * BLOCK + 1, 700, 7 * BLOCK):
        tokens = begin[:shared] + prompt(130, f"after {shared} {extra}")
        answer = endpoint.complete(tokens, **asked)
        ran(answer, DECODE if extra else FIRST)
        equal_but_for_ties(answer.tokens, reference.generate(tokens, **asked).sequences[0], **extra)


def test_what_decode_wrote_is_reused_by_the_next_turn(endpoint: Endpoint, reference: Undivided) -> None:
    """Blocks that decode filled, prompt and answer, are a prefix of the conversation's next prompt."""
    tokens = prompt(200, "turns")
    for turn in range(3):
        answer = endpoint.complete(tokens, max_tokens=100, ignore_eos=True)
        expected = reference.generate(tokens, max_tokens=100, ignore_eos=True)
        equal_but_for_ties(answer.tokens, expected.sequences[0])
        tokens = [*tokens, *answer.tokens, *prompt(20, f"turn {turn}")]


# -- limits --------------------------------------------------------------------------------------


def test_an_answer_ends_where_the_model_does(
    endpoint: Endpoint, reference: Undivided, ran: Callable[..., None]
) -> None:
    tokens = prompt(MAX_LEN - 3, "end")
    answer = endpoint.complete(tokens, max_tokens=10, ignore_eos=True)
    ran(answer, FIRST)
    assert len(answer.tokens) == 3
    equal(answer, reference.generate(tokens, max_tokens=10, ignore_eos=True))
