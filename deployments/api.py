"""What of vLLM's HTTP API the gateway serves. All else is refused, and told so; nothing is ignored.

``ENDPOINTS`` and ``REQUESTS`` are the whole truth: the README's table is made of them, and tests ask a
running gateway whether they hold.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import VLLMValidationError

from deployments import edge
from deployments.engine_client import check_sequences

ENDPOINTS: Mapping[str, str] = {
    "/v1/completions": "divided",
    "/v1/chat/completions": "divided",
    "/v1/chat/completions/batch": "divided",
    "/v1/responses": "divided; answers are not stored",
    "/v1/responses/{response_id}": "404: answers are not stored",
    "/v1/responses/{response_id}/cancel": "404: answers are not stored",
    "/v1/messages": "divided (Anthropic's API)",
    "/v1/messages/count_tokens": "by the gateway",
    "/generative_scoring": "undivided: one token",
    "/tokenize": "by the gateway",
    "/detokenize": "by the gateway",
    "/v1/models": "by the gateway",
    "/v1/models/{model}": "by the gateway",
    "/version": "by the gateway",
    "/health": "by the gateway: 503 if no worker is alive",
    "/ping": "as /health",
    "/load": "by the gateway: its requests under way",
    "/metrics": "by the gateway, workers' included",
    "/openapi.json": "by the gateway",
    "/docs": "by the gateway",
    "/docs/oauth2-redirect": "by the gateway",
    "/redoc": "by the gateway",
    "/handoff/requests/{request_id:path}": "by the gateway",
    "/handoff/workers": "by the gateway",
}
"""Paths that are served, and how."""

_NO_POOLING = "pooling models have no decode phase; use vLLM itself for them"
_NO_AUDIO = "speech models are not handed over; use vLLM itself for them"
_NO_LORA = "LoRA adapters are not handed over"
_NO_CONTROL = "engines cannot be stopped, scaled or profiled through the gateway; see `handoff --help`"
_NO_SCALE_OUT = "the gateway divides requests itself; use /v1/completions with token ids"
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(
        ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score"), _NO_POOLING
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _NO_POOLING),
    **dict.fromkeys(
        ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech", "/v1/realtime"), _NO_AUDIO
    ),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _NO_LORA),
    **dict.fromkeys(
        (
            *("/sleep", "/wake_up", "/is_sleeping", "/start_profile", "/stop_profile", "/pause", "/resume"),
            *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/collective_rpc", "/server_info"),
            *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
        ),
        _NO_CONTROL,
    ),
    **dict.fromkeys(
        (
            *("/inference/v1/generate", "/v1/completions/render", "/v1/chat/completions/render"),
            *("/v1/completions/derender", "/v1/chat/completions/derender"),
        ),
        _NO_SCALE_OUT,
    ),
    "/invocations": "use the endpoint that it stands for, such as /v1/completions",
    "/v1/systemone": "its decisions read logits that are not handed over",
    "/kv_event_sources": "KV events are not published",
    "/tokenizer_info": "use /tokenize",
}
"""Paths of vLLM's server that are not served, and why or what to do."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: how it runs.

    Attributes:
        what: for people.
        runs: ``first-token``, ``decode-samples`` (both divided), ``undivided`` or ``refused``.
        why: for people.
        examples: parameters of completions of the kind.
        chat: parameters of chats of the kind.

    """

    what: str
    runs: str
    why: str
    examples: tuple[Mapping[str, Any], ...] = ()
    chat: tuple[Mapping[str, Any], ...] = ()


_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["here"]}}}},
}

REQUESTS: tuple[Kind, ...] = (
    Kind(
        "greedy or random sampling without state, stops, logprobs, logit bias, `allowed_token_ids`, "
        "`min_tokens`, `n`, `echo`, streams, tools that the model may choose",
        "first-token",
        "sampling keeps no state from token to token",
        (
            *({}, {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, {"stop": ["zzz"]}),
            *({"stop_token_ids": [7]}, {"logprobs": 2}, {"logit_bias": {"9": 2}}, {"min_tokens": 2}),
            *({"allowed_token_ids": [100, 101]}, {"n": 2}, {"echo": True}, {"stream": True}),
            *({"temperature": 0, "seed": 3}, {"prompt": ["one", "two"]}, {"truncate_prompt_tokens": 3}),
        ),
        (
            {"logprobs": True, "top_logprobs": 2},
            {"tools": [_TOOL]},
            {"tools": [_TOOL], "tool_choice": "none"},
        ),
    ),
    Kind(
        "`seed` with temperature; presence, frequency and repetition penalties; structured outputs, JSON "
        "schemas, tools that the model must call; `bad_words`, `repetition_detection`, `vllm_xargs`",
        "decode-samples",
        "sampling keeps state from token to token: decode samples all of them",
        (
            *({"seed": 3, "temperature": 0.8}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}),
            *(
                {"repetition_penalty": 1.2},
                {"bad_words": ["the"]},
                {"response_format": {"type": "json_object"}},
            ),
            *({"structured_outputs": {"regex": "[ab]{2}"}}, {"structured_outputs": {"choice": ["a", "b"]}}),
            *({"vllm_xargs": {"plugin": 1}},),
            {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}},
        ),
        (
            {"tools": [_TOOL], "tool_choice": "required"},
            {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "it", "schema": {"type": "object"}},
                }
            },
        ),
    ),
    Kind(
        "`prompt_logprobs`, `echo` with logprobs",
        "undivided",
        "on one worker: it must compute the whole prompt",
        ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}),
        ({"prompt_logprobs": 1},),
    ),
    Kind(
        "`max_tokens: 1` without a seed, beam search (token by token)",
        "undivided",
        "there is nothing left to decode",
        ({"max_tokens": 1}, {"use_beam_search": True, "n": 2, "temperature": 0}),
    ),
    Kind(
        "`priority`, unless the cluster file has `engine: {scheduling_policy: priority}`",
        "refused",
        "the engines serve in order",
        ({"priority": 1},),
        ({"priority": 1},),
    ),
    Kind(
        "`best_of`, `logits_processors`, `kv_transfer_params`, `functions`, `web_search_options`, "
        "`modalities` other than text, data-parallel ranks",
        "refused",
        "vLLM or the gateway would ignore them",
        ({"best_of": 3}, {"logits_processors": ["a.b"]}, {"kv_transfer_params": {"do_remote_decode": True}}),
        ({"functions": [{"name": "f"}]}, {"web_search_options": {}}, {"modalities": ["audio"]}),
    ),
    Kind(
        "LoRA, prompt embeddings, images, audio, `suffix`",
        "refused",
        "not handed over, or not known to a model of text",
        ({"model": "adapter"}, {"prompt": None, "prompt_embeds": "AAAA"}, {"suffix": "x"}),
    ),
    Kind(
        "more sequences at once than `gateway.limits.sequences`; a body, head or duration beyond the limits",
        "refused",
        "one client must not take everything",
        ({"n": 1000}, {"prompt": ["x"] * 200}),
        ({"n": 1000},),
    ),
    Kind(
        "on CPUs: `seed` with temperature and a long prompt, where it would run undivided",
        "refused",
        "vLLM's CPU engine dies of a seeded prompt that it computes in several steps",
    ),
)
"""Requests, by how they run. Where several hold, the last one does."""


def table() -> str:
    """Return both tables in Markdown, for the README."""
    words = {
        "first-token": "divided where that is better; first token from prefill",
        "decode-samples": "divided where that is better; decode samples",
    }
    rows = ["| request | how it runs | why |", "|---|---|---|"]
    rows += [f"| {kind.what} | {words.get(kind.runs, kind.runs)} | {kind.why} |" for kind in REQUESTS]
    return "\n".join(rows)


# -- making it so --------------------------------------------------------------------------------


def narrow(app: FastAPI, arguments: Namespace, sequences: int) -> None:
    """Make vLLM's application serve ``ENDPOINTS`` alone, and refuse what it would ignore.

    Args:
        app: with its state set.
        arguments: of vLLM's server.
        sequences: most that a request may have generated at once.

    """
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in ENDPOINTS]
    _exceptions(app).add_exception_handler(HTTPException, _http_error)
    app.get("/v1/models/{model:path}")(_model)
    app.openapi_schema = None  # it is made again, from what there is now
    peek = not arguments.sse_keep_alive_interval
    for serving, method in _CHECKED.items():
        setattr(app.state, serving, Checked(getattr(app.state, serving), method, sequences, peek))


_CHECKED = {
    "openai_serving_completion": "create_completion",
    "openai_serving_chat": "create_chat_completion",
    "openai_serving_chat_batch": "create_batch_chat_completion",
}


def _exceptions(app: FastAPI) -> ExceptionMiddleware:
    """Return the layer that answers exceptions. vLLM built the layers, once and for all."""
    layer: Any = app.middleware_stack or app
    while not isinstance(layer, ExceptionMiddleware):
        layer = layer.app
    return layer


async def _http_error(request: Request, raised: Exception) -> JSONResponse:
    assert isinstance(raised, HTTPException)
    message = str(raised.detail)
    if raised.status_code == HTTPStatus.NOT_FOUND and message == HTTPStatus.NOT_FOUND.phrase:
        why = ABSENT.get(request.url.path, "see /docs for what is")
        message = f"{request.method} {request.url.path} is not served here: {why}."
    if raised.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.url.path} does not take {request.method}; see /docs for what it takes."
    answer = edge.error(raised.status_code, message)
    answer.headers.update(raised.headers or {})
    return answer


async def _model(model: str, raw_request: Request) -> Any:
    """Tell about one model, as OpenAI's API does."""
    shown = await raw_request.app.state.openai_serving_models.show_available_models()
    for card in shown.data:
        if card.id == model:
            return card
    known = ", ".join(card.id for card in shown.data)
    return edge.error(404, f"The model {model!r} does not exist; there is {known}.", "model")


IGNORED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "logits_processors": (None, []),
    "functions": (None, []),
    "function_call": (None, "none"),
    "web_search_options": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
}
"""Parameters that vLLM's server ignores although answers depend on them, and values that ask for nothing."""


class Checked:
    """One of vLLM's serving objects, whose requests are checked first.

    A stream is begun only when its first part is there: what goes wrong before is answered with a status.

    Args:
        serving: vLLM's object; everything but ``method`` is its own.
        method: takes (request, raw request).
        sequences: most that a request may have generated at once.
        peek: whether to wait for the first part.

    """

    def __init__(self, serving: Any, method: str, sequences: int, peek: bool) -> None:
        self._serving, self._create = serving, getattr(serving, method)
        self._sequences, self._peek = sequences, peek
        setattr(self, method, self._checked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serving, name)

    async def _checked(self, request: Any, raw_request: Request | None = None) -> Any:
        for name, value in (request.model_extra or {}).items():
            if name in IGNORED and value not in IGNORED[name]:
                raise VLLMValidationError("this parameter is not supported", parameter=name, value=value)
        check_sequences(prompts_of(request) * (request.n or 1), self._sequences)
        answer = await self._create(request, raw_request)
        if not self._peek or not isinstance(answer, AsyncGenerator):
            return answer
        first = await anext(answer, None)
        return _error_of(first) or _again(first, answer)


def prompts_of(request: Any) -> int:
    """Return how many prompts a completion, a chat or a batch of chats has."""
    asked = getattr(request, "prompt", None) or getattr(request, "messages", None)
    several = isinstance(asked, list) and asked and isinstance(asked[0], (str, list))
    return len(asked) if several else 1  # type: ignore[arg-type]


async def _again(first: str | None, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    try:
        if first is not None:
            yield first
        async for part in rest:
            yield part
    finally:
        await rest.aclose()


def _error_of(part: str | None) -> ErrorResponse | None:
    """Return the error that a stream's first part tells, if it does."""
    if part is None or not part.startswith('data: {"error"'):
        return None
    return ErrorResponse(error=ErrorInfo(**json.loads(part.removeprefix("data: "))["error"]))
