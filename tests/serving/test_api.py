"""What the gateway says it serves, it serves; what it refuses, it refuses as OpenAI's API words errors.

On the fake engine; that divided answers are vLLM's is `test_equality.py`'s matter.
"""

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import openai
import pytest
from asking import Endpoint
from comparing import prompt
from guarded import ANSWER_S, ARRIVE_S, BODY, HEAD, KEYS, SEQUENCES, Guarded
from vllm.entrypoints.launchers.app import build_app

from actors.fake_kv import continuation
from deployments.api import ABSENT, ENDPOINTS, REQUESTS, Kind, table
from deployments.options import server_arguments

pytestmark = [pytest.mark.cluster]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TEXT = "The quick brown fox jumps over the lazy dog. "
VOCAB = 4096


@pytest.fixture(scope="module")
def endpoint(guarded: Guarded) -> Endpoint:
    return guarded.endpoint


@pytest.fixture(autouse=True)
def _nothing_is_left(endpoint: Endpoint) -> Iterator[None]:
    yield
    endpoint.settled()


def completion(**params: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": TEXT, "max_tokens": 4, **params}


def chat(**params: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": TEXT}]
    return {"model": "tiny", "messages": messages, "max_tokens": 24, **params}


def refusal(response: httpx.Response, status: int | None = None) -> dict[str, Any]:
    """The error of a response, which is a 4xx (or this status) in OpenAI's form."""
    code = response.status_code
    assert code == status if status else 400 <= code < 500, f"{code}: {response.text}"
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == response.status_code
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


# -- the tables ----------------------------------------------------------------------------------

EXAMPLES = [
    pytest.param(kind, path, body, id=f"{path.split('/')[2]} {json.dumps(body)[:60]}")
    for kind in REQUESTS
    for path, bodies in ((COMPLETIONS, kind.examples), (CHATS, kind.chat))
    for body in bodies
]


@pytest.mark.parametrize(("kind", "path", "params"), EXAMPLES)
def test_every_kind_of_request_runs_as_the_table_says(
    endpoint: Endpoint, kind: Kind, path: str, params: dict[str, Any]
) -> None:
    response = endpoint.http.post(path, json=completion(**params) if path == COMPLETIONS else chat(**params))
    if kind.runs == "refused":
        error = refusal(response)
        assert any(word in f"{error['param']} {error['message']}" for word in (*params, "sequences")), error
        return
    assert response.status_code == 200, response.text
    record = endpoint.record(response.headers["x-request-id"])
    assert record["mode"] == kind.runs
    assert ("; undivided;" in response.headers["x-handoff-path"]) is (kind.runs == "undivided")


def test_the_readme_has_the_table() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert table() in readme


def test_every_route_of_vllms_server_is_served_or_refused_with_a_reason() -> None:
    """A new version of vLLM may bring routes; someone must look at them."""
    arguments = server_arguments("/no/model", "name", {})
    routes = {getattr(route, "path", "") for route in build_app(arguments, ("generate",)).router.routes}
    known = {*ENDPOINTS, *ABSENT}
    unknown = {route for route in routes - known if not route.startswith("/inference/")}
    assert {route for route in unknown if not route.endswith(("/render", "/derender"))} <= {""}


@pytest.mark.parametrize("path", ABSENT)
def test_what_is_absent_says_why(endpoint: Endpoint, path: str) -> None:
    error = refusal(endpoint.http.post(path, json={"model": "tiny", "input": "x"}), 404)
    assert path in error["message"]
    assert ABSENT[path] in error["message"]


def test_the_openapi_document_lists_what_is_served(endpoint: Endpoint) -> None:
    document = endpoint.http.get("/openapi.json").json()
    unlisted = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
    assert {path.replace(":path", "") for path in ENDPOINTS} - unlisted == set(document["paths"])


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if "{" not in path])
def test_what_is_served_is_there(endpoint: Endpoint, path: str) -> None:
    assert endpoint.http.get(path).status_code in (200, 405)
    refusal(endpoint.http.request("PATCH", path), 405) if path != "/metrics" else None


# -- the official client -------------------------------------------------------------------------

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,  # otherwise vLLM lets the model answer with any JSON
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Lima"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
USER: Any = [{"role": "user", "content": TEXT}]


def test_the_client_completes_and_streams(endpoint: Endpoint) -> None:
    client, tokens = endpoint.openai, prompt(200, "client")
    extra = {"return_token_ids": True, "ignore_eos": True}
    whole = client.completions.create(model="tiny", prompt=tokens, max_tokens=9, extra_body=extra)
    assert whole.choices[0].to_dict()["token_ids"] == continuation(tokens, 9, VOCAB)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (200, 9)
    parts = list(
        client.completions.create(
            model="tiny",
            prompt=tokens,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
    )
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].choices == []
    assert parts[-1].usage == whole.usage


def test_the_asynchronous_client_streams_many_at_once(endpoint: Endpoint) -> None:
    async def ask(client: openai.AsyncOpenAI, index: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"{index} {TEXT}"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            extra_body={"ignore_eos": True},
        )
        text, counts = "", []
        async for part in stream:
            text += (part.choices[0].delta.content or "") if part.choices else ""
            counts.append(part.usage.completion_tokens if part.usage else None)
        assert counts == sorted(counts)
        assert counts[-1] == 8
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=KEYS[1]) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(12)))

    texts = asyncio.run(asyncio.wait_for(all_of_them(), 60))
    assert len(set(texts)) == 12


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str
)
def test_the_client_is_told_which_tool_to_call(endpoint: Endpoint, choice: Any) -> None:
    answer = endpoint.openai.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=300,
    )
    call, *_ = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Lima")


def test_the_client_is_told_which_tool_to_call_in_a_stream(endpoint: Endpoint) -> None:
    name, arguments = "", ""  # of the first call; there may be more
    for part in endpoint.openai.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=300,
        parallel_tool_calls=False,
        stream=True,
    ):
        for call in part.choices[0].delta.tool_calls or ():
            if call.index > 0:
                continue
            name += (call.function and call.function.name) or ""
            arguments += (call.function and call.function.arguments) or ""
    assert name == "weather"
    assert json.loads(arguments)["city"] in ("Oslo", "Lima")


def test_the_client_parses_an_answer_in_json(endpoint: Endpoint) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "w", "schema": TOOLS[0]["function"]["parameters"], "strict": True},
    }
    answer = endpoint.openai.chat.completions.create(
        model="tiny", messages=USER, response_format=form, max_tokens=300
    )
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Oslo", "Lima")


def test_models_tokens_and_version(endpoint: Endpoint) -> None:
    assert [model.id for model in endpoint.openai.models.list()] == ["tiny"]
    assert endpoint.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        endpoint.openai.models.retrieve("other/one")
    asked = endpoint.http.post("/tokenize", json={"model": "tiny", "prompt": TEXT}).json()
    told = endpoint.http.post("/detokenize", json={"model": "tiny", "tokens": asked["tokens"]}).json()
    assert told["prompt"].strip().endswith(TEXT.strip())
    completed = endpoint.complete(TEXT, max_tokens=2)
    assert completed.prompt == asked["tokens"]
    assert endpoint.http.get("/version").json()["version"]
    assert endpoint.http.get("/health").status_code == 200


def test_other_dialects(endpoint: Endpoint) -> None:
    answer = endpoint.openai.responses.create(model="tiny", input=TEXT, max_output_tokens=5)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    body = {"model": "tiny", "max_tokens": 5, "messages": USER}
    message = endpoint.http.post("/v1/messages", json=body)
    assert message.json()["usage"]["output_tokens"] == 5
    counted = endpoint.http.post("/v1/messages/count_tokens", json=body).json()
    assert counted["input_tokens"] == message.json()["usage"]["input_tokens"]
    batch = endpoint.http.post("/v1/chat/completions/batch", json={**body, "messages": [USER, USER]}).json()
    assert [choice["index"] for choice in batch["choices"]] == [0, 1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"prompt": [5] * 3000}, openai.BadRequestError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
        ({"n": SEQUENCES + 1, "temperature": 1}, openai.BadRequestError),
        ({"prompt": ["x"] * (SEQUENCES + 1)}, openai.BadRequestError),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError),
        ({"prompt": [99999]}, openai.BadRequestError),
        ({"prompt": "x" * BODY}, openai.APIStatusError),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_clients_errors_have_types(
    endpoint: Endpoint, params: dict[str, Any], kind: type[openai.APIStatusError], stream: bool
) -> None:
    """Of streams too: they begin only when there is a first token."""
    with pytest.raises(kind) as caught:
        endpoint.openai.completions.create(**completion(**params), stream=stream)
    assert caught.value.status_code < 500
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == caught.value.status_code
    assert caught.value.request_id


# -- keys ----------------------------------------------------------------------------------------


def test_without_a_key_only_the_doorplate_can_be_read(guarded: Guarded) -> None:
    with httpx.Client(base_url=guarded.endpoint.url) as anyone:
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert anyone.get(path).status_code == 200
        for path in (
            "/v1/models",
            "/handoff/workers",
            "/handoff/requests/x",
            "/docs",
            "/openapi.json",
            "/no",
        ):
            assert "Authorization: Bearer" in refusal(anyone.get(path), 401)["message"]
        for path in (COMPLETIONS, "/tokenize", "/invocations", "/load"):
            refusal(anyone.post(path, json=completion()), 401)
        for header in ("Bearer wrong", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x"):
            refusal(anyone.get("/v1/models", headers={"Authorization": header}), 401)
        for key in KEYS:
            assert anyone.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.endpoint.url}/v1", api_key="sk-wrong").models.list()


def test_keys_are_nowhere_but_in_their_file(guarded: Guarded) -> None:
    processes = guarded.server.processes()
    assert len(processes) > 3
    told = [" ".join([*process.cmdline(), *process.environ().values()]) for process in processes]
    folders = {found for text in told for found in re.findall(r"--log[s_-]*dir=(\S+)", text)}
    logs = [path.read_bytes() for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    assert len(logs) > 3, f"no logs were found in {folders}"
    logs.append(guarded.server.log.read_bytes())
    for key in KEYS:
        assert not any(key in text for text in told)
        assert not any(key.encode() in text for text in logs)


# -- limits --------------------------------------------------------------------------------------


def raw(endpoint: Endpoint, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send bytes, and return what comes until the gateway closes the connection."""
    address = urlsplit(endpoint.url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 80), timeout=30) as connection:
        answer = b""
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        while data := connection.recv(65536):
            answer += data
        return answer


def test_bodies_have_a_limit(endpoint: Endpoint) -> None:
    assert (
        "gateway.limits.body"
        in refusal(endpoint.http.post(COMPLETIONS, json=completion(prompt="x" * BODY)), 413)["message"]
    )
    pieces = iter([b'{"model": "tiny", "prompt": "'] + [b"x" * 8192] * (BODY // 8192 + 1) + [b'"}'])
    headers = {"content-type": "application/json"}
    assert refusal(endpoint.http.post(COMPLETIONS, content=pieces, headers=headers), 413)  # no length is told


def test_heads_have_a_limit(endpoint: Endpoint) -> None:
    refusal(endpoint.http.get("/v1/models", headers={"x-long": "x" * HEAD}), 431)
    refusal(endpoint.http.get("/v1/models?" + "x" * HEAD), 414)
    endless = [b"GET /health HTTP/1.1\r\nx-endless: ", *[b"x" * 4096] * 3]
    assert raw(endpoint, *endless, pause_s=0.05).startswith(b"HTTP/1.1 431")
    assert endpoint.http.get("/health").status_code == 200


def test_requests_arrive_in_time_or_not_at_all(endpoint: Endpoint) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n".encode()
    json_head = head + b"content-type: application/json\r\ncontent-length: 99\r\n\r\n"
    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        silent = pool.submit(raw, endpoint)
        headless = pool.submit(raw, endpoint, head)
        bodyless = pool.submit(raw, endpoint, json_head + b'{"model"')
        assert silent.result(30).startswith(b"HTTP/1.1 408")
        assert headless.result(30).startswith(b"HTTP/1.1 408")
        answer = bodyless.result(120)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"gateway.limits.arrive_s" in answer
    assert time.monotonic() - began >= ARRIVE_S


def test_answers_end_in_time(endpoint: Endpoint) -> None:
    def ask(stream: bool) -> httpx.Response:
        body = completion(max_tokens=2000, ignore_eos=True, stream=stream)
        return endpoint.http.post(COMPLETIONS, json=body)

    with ThreadPoolExecutor(2) as pool:
        whole, streamed = pool.map(ask, (False, True))
    assert f"within {ANSWER_S} s" in refusal(whole, 504)["message"]
    assert streamed.status_code == 200
    *_, last, done = [line for line in streamed.text.splitlines() if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 504


def test_ids_are_echoed_and_find_the_record(endpoint: Endpoint) -> None:
    for request_id in ("my id/../of: today?#%41", "x" * 128):
        response = endpoint.http.post(COMPLETIONS, json=completion(), headers={"X-Request-Id": request_id})
        assert response.headers["x-request-id"] == request_id
        assert request_id in response.json()["id"]
        found = endpoint.http.get(f"/handoff/requests/{quote(request_id, safe='')}")
        assert found.json()["request_id"] == request_id
    for request_id in ("x" * 129, "ü"):
        headers = {"X-Request-Id": request_id.encode("latin-1")}
        error = refusal(endpoint.http.post(COMPLETIONS, json=completion(), headers=headers), 400)
        assert error["param"] == "X-Request-Id"
    refusal(endpoint.http.get("/handoff/requests/no-such-id"), 404)


# -- malformed -----------------------------------------------------------------------------------

BODIES = {
    "nothing": b"",
    "not json": b"{",
    "not utf-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "a list": b"[1]",
    "null": b"null",
    "deep": b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}",
    "nan": b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    "a lone surrogate": b'{"model": "tiny", "prompt": "\\ud800"}',
    "a huge number": b'{"model": "tiny", "prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
    "no prompt": b'{"model": "tiny"}',
    "an empty prompt": b'{"model": "tiny", "prompt": ""}',
    "no prompts": b'{"model": "tiny", "prompt": []}',
    "a prompt without tokens": b'{"model": "tiny", "prompt": [[]]}',
    "negative tokens": b'{"model": "tiny", "prompt": [-1]}',
    "a number for a model": b'{"model": 5, "prompt": "a"}',
    "words for numbers": b'{"model": "tiny", "prompt": "a", "max_tokens": "many"}',
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/v1/responses", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("name", BODIES)
def test_malformed_bodies(endpoint: Endpoint, path: str, name: str) -> None:
    headers = {"content-type": "application/json"}
    refusal(endpoint.http.post(path, content=BODIES[name], headers=headers)) if not (
        path == "/tokenize" and name in ("an empty prompt", "a huge number", "nan", "words for numbers")
    ) else None


def test_other_types_of_content(endpoint: Endpoint) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-99"):
        content = json.dumps(completion()).encode()
        response = endpoint.http.post(COMPLETIONS, content=content, headers={"content-type": kind})
        assert response.status_code in (200, 400)
        if "json" not in kind:
            refusal(response, 400)
