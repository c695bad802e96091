"""The tests' client: the official `openai` package, answers as token ids, and the gateway's ledger."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import OpenAI

SETTLED_WITHIN_S = 5.0
PENDING = (
    *("requests", "engine_requests", "kv_blocks_used", "sending", "receiving"),
    *("live_chunks", "live_bytes", "orphan_bytes"),
    *("prefill_tokens", "running"),
)
"""What must be zero on every worker when no request is under way."""

_OPENAI = {
    *("max_tokens", "seed", "stop", "logprobs", "top_logprobs", "n", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "echo", "response_format", "temperature", "top_p"),
}
"""Parameters that the client has itself; the others are vLLM's and go in `extra_body`."""


def until(condition: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)


@dataclass
class Choice:
    """One choice of an answer, put together from the stream if it was streamed."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Answer:
    """What the endpoint answered, and what it tells about the request."""

    request_id: str
    prompt: list[int]
    choices: list[Choice]
    usage: Any
    raw: Any
    record: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        return self.choices[0].tokens

    @property
    def text(self) -> str:
        return self.choices[0].text


class Endpoint:
    """A serving cluster as its users see it."""

    def __init__(self, url: str, model: str, key: str = "none") -> None:
        self.url, self.model, self.key = url, model, key
        self.openai = OpenAI(base_url=f"{url}/v1", api_key=key, timeout=120, max_retries=0)
        self.http = httpx.Client(base_url=url, timeout=30, headers={"Authorization": f"Bearer {key}"})

    def complete(self, prompt: str | Sequence[int], *, stream: bool = False, **params: Any) -> Answer:
        """Complete a prompt, greedily unless `params` say otherwise."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        return self._ask(self.openai.completions.create, stream, params, prompt=prompt)

    def chat(self, messages: Sequence[Any], *, stream: bool = False, **params: Any) -> Answer:
        """Answer a chat."""
        return self._ask(self.openai.chat.completions.create, stream, params, messages=list(messages))

    def record(self, request_id: str) -> dict[str, Any]:
        """What the gateway's ledger knows of a request."""
        response = self.http.get(f"/handoff/requests/{request_id}")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def workers(self) -> dict[str, dict[str, Any]]:
        """What the gateway tells of the workers, by name."""
        return {worker["name"]: worker for worker in self.http.get("/handoff/workers").json()}

    def settled(self, within_s: float = SETTLED_WITHIN_S) -> None:
        """Wait until no worker holds anything of any request."""
        deadline = time.monotonic() + within_s
        while left := self._left():
            assert time.monotonic() < deadline, f"still there after {within_s:g} s: {left}"
            time.sleep(0.05)

    def _left(self) -> dict[str, dict[str, Any]]:
        left = {
            name: {key: worker.get(key, "unknown") for key in PENDING if worker.get(key, "unknown") != 0}
            for name, worker in self.workers().items()
        }
        return {name: what for name, what in left.items() if what}

    def _ask(self, create: Any, stream: bool, params: dict[str, Any], **what: Any) -> Answer:
        request_id = secrets.token_hex(8)
        params = {"temperature": 0.0, **params}
        ours = {name: value for name, value in params.items() if name in _OPENAI}
        extra = {name: value for name, value in params.items() if name not in _OPENAI}
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = create(
            model=self.model,
            stream=stream,
            extra_body={"return_token_ids": True, **extra},
            extra_headers={"X-Request-Id": request_id},
            **what,
            **ours,
            **options,
        )
        parts = list(answer) if stream else [answer]
        choices: dict[int, Choice] = {}
        prompt: list[int] = []
        for part in parts:
            prompt = prompt or getattr(part, "prompt_token_ids", None) or []
            for one in part.choices:
                prompt = prompt or getattr(one, "prompt_token_ids", None) or []
                _add(choices.setdefault(one.index, Choice()), one)
        return Answer(
            request_id=request_id,
            prompt=list(prompt),
            choices=[choices[index] for index in sorted(choices)],
            usage=parts[-1].usage,
            raw=answer if not stream else parts,
            record=self.record(request_id),
        )


def _add(choice: Choice, part: Any) -> None:
    choice.tokens += getattr(part, "token_ids", None) or []
    message = getattr(part, "message", None) or getattr(part, "delta", None)
    choice.text += (message.content if message is not None else getattr(part, "text", "")) or ""
    choice.finish_reason = part.finish_reason or choice.finish_reason
    choice.stop_reason = getattr(part, "stop_reason", None) or choice.stop_reason
    if part.logprobs is not None:
        content = getattr(part.logprobs, "content", None)
        values = part.logprobs.token_logprobs if content is None else [at.logprob for at in content]
        choice.logprobs += [value for value in values or () if value is not None]
