"""Whatever way a request takes through the gateway, it is answered and counted alike."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request, with_cancellation

from deployments.shortcut import Shortcut, shortcut

PATH = "/v1/completions"
JSON = "application/json"


class Asked(BaseModel):
    what: str
    n: int = 1


class App:
    """An application in the manner of vLLM's, which counts how often FastAPI routes a request."""

    def __init__(self, handler: Any = None) -> None:
        self.app, self.registry = FastAPI(), CollectorRegistry()
        self.app.exception_handler(ValueError)(self._refuse)
        self.app.exception_handler(RequestValidationError)(self._refuse)
        self.app.exception_handler(HTTPException)(self._refuse)
        self.app.exception_handler(Exception)(self._refuse)
        self.app.add_middleware(CORSMiddleware, allow_origins=["*"])
        Instrumentator(registry=self.registry).add().instrument(self.app)
        self.app.post(PATH, dependencies=[Depends(validate_json_request)])(handler or self.handler())
        self.app.middleware_stack = self.app.build_middleware_stack()
        self.routed, whole = 0, self.app.router.app

        async def routing(scope: Any, receive: Any, send: Any) -> None:
            self.routed += scope["type"] == "http"
            await whole(scope, receive, send)

        self.app.router.middleware_stack = routing

    def handler(self) -> Any:
        @with_cancellation
        async def answer(request: Asked, raw_request: Request) -> Any:
            match request.what:
                case "wrong":
                    raise ValueError("a wrong value")
                case "broken":
                    raise RuntimeError("broken")
                case "refused":
                    raise HTTPException(429, "later", {"retry-after": "7"})
                case "stream":
                    return StreamingResponse(self.parts(request.n), media_type="text/event-stream")
            told = {
                "what": request.what,
                "user": raw_request.headers.get("x-user"),
                "app": raw_request.app is self.app,
            }
            return JSONResponse(told, headers={"x-n": str(request.n)})

        return answer

    async def parts(self, count: int) -> AsyncIterator[str]:
        for i in range(count):
            yield f"data: {i}\n\n"

    async def _refuse(self, request: Request, error: Exception) -> JSONResponse:
        status = getattr(error, "status_code", 500 if type(error) is RuntimeError else 400)
        return JSONResponse(
            {"error": str(error), "path": request.url.path}, status, getattr(error, "headers", None)
        )

    def counted(self) -> list[tuple[str, dict[str, str], float]]:
        return [
            (sample.name, sample.labels, sample.value)
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name.endswith(("_total", "_count")) or sample.name.endswith("size_bytes_sum")
        ]


def ask(app: Any, content: bytes, headers: dict[str, str], method: str = "POST") -> tuple[int, Any, bytes]:
    async def one() -> tuple[int, Any, bytes]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answer = await client.request(method, PATH, content=content, headers=headers)
            return answer.status_code, sorted(answer.headers.multi_items()), answer.content

    return asyncio.run(one())


def body(**asked: Any) -> bytes:
    return json.dumps(asked).encode()


@pytest.mark.parametrize(
    ("content", "headers", "short"),
    [
        (body(what="a"), {"x-user": "me"}, True),
        (body(what="a", n=3), {}, True),
        (body(what="stream", n=3), {}, True),
        (body(what="wrong"), {}, True),
        (body(what="broken"), {}, True),
        (body(what="refused"), {}, True),
        (body(what="a"), {"origin": "http://elsewhere"}, True),
        (body(what="a"), {"content-type": "application/json; charset=utf-8"}, False),
        (body(what="a"), {"content-type": "text/plain"}, False),
        (body(n=3), {}, False),
        (body(what="a", n="many"), {}, False),
        (b'{"what": ', {}, False),
        (b"[]", {}, False),
        (b"", {}, False),
        (b"\xff", {}, False),
    ],
)
def test_both_ways_answer_alike(content: bytes, headers: dict[str, str], short: bool) -> None:
    headers = {"content-type": JSON, **headers}
    long, other = App(), App()
    expected = ask(long.app, content, headers)
    way = shortcut(other.app)
    assert isinstance(way, Shortcut)
    assert ask(way, content, headers) == expected
    assert other.counted() == long.counted()
    assert long.counted()
    assert (long.routed, other.routed) == (1, 0 if short else 1)


def test_other_methods_take_the_long_way() -> None:
    app = App()
    assert ask(shortcut(app.app), b"", {}, "GET")[0] == 405
    assert app.routed == 1


def test_what_goes_wrong_before_the_body_is_there_is_told_by_the_application() -> None:
    app, told = App(), []

    async def receive() -> Any:
        raise HTTPException(413, "too long")

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(b"content-type", JSON.encode()), (b"host", b"gateway")]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b""}
    scope |= {"raw_path": PATH.encode(), "scheme": "http", "server": ("gateway", 80), "http_version": "1.1"}
    asyncio.run(shortcut(app.app)(scope, receive, send))
    assert told[0]["status"] == 413
    assert b"too long" in told[1]["body"]


def test_a_client_that_leaves_ends_what_it_asked_for() -> None:
    ended = []

    @with_cancellation
    async def slow(request: Asked, raw_request: Request) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    app = App(slow)
    messages = iter([{"type": "http.request", "body": body(what="a")}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        raise AssertionError(f"nobody is there to be told {message}")

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [(b"content-type", JSON.encode())]}
    scope |= {"raw_path": PATH.encode(), "query_string": b"", "http_version": "1.1", "scheme": "http"}
    asyncio.run(asyncio.wait_for(shortcut(app.app)(scope, receive, send), 10))
    assert ended == [True]


def test_with_a_layer_that_is_not_known_there_is_no_short_way() -> None:
    app = App()
    app.app.middleware_stack = None
    app.app.add_middleware(GZipMiddleware)
    app.app.middleware_stack = app.app.build_middleware_stack()
    assert shortcut(app.app) is app.app
