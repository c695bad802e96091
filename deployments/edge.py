"""The gateway's outermost layer: ids, keys and limits of requests, the ledger's first and last moments."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from prometheus_client import Counter
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from cluster.file import Limits
from deployments.keys import Keys
from deployments.ledger import Record, current

OPEN = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Paths that need no key: what load balancers and Prometheus ask for."""
COUNTED = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses"),
        *("/v1/messages", "/generative_scoring"),
    }
)
"""Paths of requests that ``/load`` counts. vLLM's own count takes a thread for each of them."""
PROXY_HEALTH = "/-/healthz"
"""Where Ray Serve's own proxy tells that it listens; KubeRay asks it before it sends a head requests."""
ID_CHARACTERS = 128
CLASS_HEADER = b"x-handoff-class"
"""Names the class of a request, whose objectives are in the cluster file (``slo.classes``)."""

MODE_HEADER = b"x-handoff-router"
"""Routes one request otherwise than the cluster file says (``router.mode``), to compare."""

REFUSED = Counter("handoff_gateway_refused", "Requests that were refused at the door, by status", ("status",))


def error(status: int, message: str, param: str | None = None) -> JSONResponse:
    """Return an answer as OpenAI's API words errors."""
    kind = HTTPStatus(status).phrase
    told = ErrorResponse(error=ErrorInfo(message=message, type=kind, code=status, param=param))
    headers = {"www-authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(told.model_dump(), status, headers)


class Edge:
    """Gives every request an id, turns away those without a key or beyond the limits, keeps their records.

    The head of a response waits for the first piece of its body, so that it can tell where the request
    went: until then nobody knows.

    Args:
        app: the ASGI application behind it.
        limits: on requests.
        keys: that clients need one of; none: all may come in.
        ended: told the record of every request, when its answer has left.
        state: of vLLM's application; ``server_load_metrics`` is kept there.

    """

    def __init__(
        self,
        app: Any,
        limits: Limits,
        keys: Keys,
        ended: Sequence[Callable[[Record], None]],
        state: State | None = None,
    ) -> None:
        self.app, self._limits, self._keys, self._ended = app, limits, keys, ended
        self._state = State() if state is None else state
        self._state.server_load_metrics = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"] == PROXY_HEALTH:
            await PlainTextResponse("success")(scope, receive, send)
            return
        given = {name: value for name, value in scope["headers"] if name in _READ}
        request_id = given.get(b"x-request-id", b"").decode("latin-1")
        refusal = self._judge(scope, given, request_id)
        if refusal is not None or not request_id:
            request_id = secrets.token_hex(8)
            scope["headers"] = [*scope["headers"], (b"x-request-id", request_id.encode())]
        record = Record(request_id)
        record.note("arrived")
        if (wanted := given.get(CLASS_HEADER)) is not None:
            record.facts["class"] = wanted.decode("latin-1")
        if (wanted := given.get(MODE_HEADER)) is not None:
            record.facts["asked_mode"] = wanted.decode("latin-1")
        record.parent = given.get(b"traceparent", b"").decode("latin-1")
        current.set(record)
        head: Any = None
        over = False

        async def noting(message: Any) -> None:
            nonlocal head, over
            if over:
                return
            if message["type"] == "http.response.start":
                head = message
                return
            if message.get("body"):
                record.note_sent()
            told = record.facts.get("refused")
            if head is not None and head["status"] == HTTPStatus.OK and isinstance(told, tuple):
                over = True  # of a stream that has not begun, so its status can still tell
                refused = error(*told)
                headers = [*refused.raw_headers, *extra_headers(record)]
                await send({**head, "status": refused.status_code, "headers": headers})
                await send({"type": "http.response.body", "body": refused.body})
                return
            if head is not None:
                head["headers"] = [*head.get("headers", ()), *extra_headers(record)]
                waiting, head = head, None
                await send(waiting)
            await send(message)

        if refusal is not None:
            REFUSED.labels(refusal.status_code).inc()
            await refusal(scope, receive, noting)
            return
        counts = scope["path"] in COUNTED
        self._state.server_load_metrics += counts
        try:
            await self.app(scope, self._limited(receive), noting)
        finally:
            self._state.server_load_metrics -= counts
            record.note("ended")
            for told in self._ended:
                told(record)

    def _judge(self, scope: Any, given: dict[bytes, bytes], request_id: str) -> JSONResponse | None:
        """Return the refusal of a request whose head has arrived, or None."""
        limits = self._limits
        if len(self._keys) and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            if (sent := given.get(b"authorization")) is None:
                return error(401, "No API key was sent; send one as: Authorization: Bearer KEY")
            if not self._keys.fit(sent):
                return error(401, "The API key is not one of this gateway's.")
        url = len(scope["raw_path"]) + len(scope["query_string"])
        if url > limits.head:
            return error(
                414, f"The URL has {url} bytes; at most {limits.head} are taken (gateway.limits.head)."
            )
        if (size := url + sum(len(name) + len(value) for name, value in scope["headers"])) > limits.head:
            return error(
                431,
                f"URL and headers have {size} bytes; at most {limits.head} are taken (gateway.limits.head).",
            )
        if len(request_id) > ID_CHARACTERS or not (request_id.isascii() and request_id.isprintable()):
            return error(
                400,
                f"X-Request-Id must be at most {ID_CHARACTERS} printable ASCII characters.",
                "X-Request-Id",
            )
        length = given.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limits.body:
            return error(413, _too_large(limits.body))
        return None

    def _limited(self, receive: Any) -> Any:
        """Return a channel that ends where the body becomes too long or does not come."""
        body, within_s = self._limits.body, self._limits.arrive_s
        taken, over, deadline = 0, False, asyncio.get_running_loop().time() + within_s

        async def limited() -> Any:
            nonlocal taken, over
            if over:
                return await receive()  # tells of a disconnect
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                REFUSED.labels(408).inc()
                raise HTTPException(
                    408,
                    f"The body did not arrive within {within_s:g} s (gateway.limits.arrive_s).",
                    {"connection": "close"},
                ) from None
            taken += len(message.get("body", b""))
            over = not message.get("more_body", False)
            if taken > body:
                REFUSED.labels(413).inc()
                raise HTTPException(413, _too_large(body))
            return message

        return limited


_READ = frozenset(
    {b"x-request-id", b"authorization", b"content-length", b"traceparent", CLASS_HEADER, MODE_HEADER}
)


def _too_large(most: int) -> str:
    return f"The body has more than {most} bytes, which is the most that is taken (gateway.limits.body)."


def extra_headers(record: Record) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell a request's id, where it went, and when to try again."""
    headers = [(b"x-request-id", record.request_id.encode())]
    if (path := record.path()) is not None:
        headers.append((b"x-handoff-path", path.encode("ascii", "replace")))
    wait_s = record.facts.get("retry_after_s")
    if isinstance(wait_s, float):
        headers.append((b"retry-after", str(max(1, math.ceil(wait_s))).encode()))
    return headers
