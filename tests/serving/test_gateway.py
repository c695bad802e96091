"""Where the gateway listens, without a cluster: who may share its port; and what its outermost layer says."""

import asyncio
import json
import socket
import subprocess
import sys
from typing import Any

import httpx
import pytest
from starlette.datastructures import State
from starlette.responses import PlainTextResponse

from cluster.file import Limits
from deployments.edge import Edge
from deployments.errors import StartError
from deployments.keys import Keys
from deployments.ledger import current
from deployments.replica import listen

HOST = "127.0.0.1"


def test_replicas_of_one_node_share_the_port() -> None:
    with listen(HOST, 0) as first, listen(HOST, first.getsockname()[1]) as second:
        assert first.getsockname() == second.getsockname()


@pytest.mark.parametrize("shared", [True, False])
def test_a_port_that_another_program_has(shared: bool) -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=rf"cannot listen on {HOST}:{port}.*set gateway.port"):
            listen(HOST, port, shared)


def test_another_gateway_on_the_port_is_noticed_before_it_is_shared() -> None:
    """Two clusters on one port would each get half of the requests."""
    with listen(HOST, 0) as other, pytest.raises(StartError, match="in use"):
        listen(HOST, other.getsockname()[1], shared=False)


def answered(refused: bool) -> tuple[int, dict[str, str], str]:
    """What a client gets of a stream that is refused before it begins, or not."""

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        if refused and (record := current.get()) is not None:
            record.facts.update(refused=(429, "later"), retry_after_s=6.5)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"data: 1\n\n", b"data: [DONE]\n\n", b""):
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})

    edge = Edge(stream, Limits(), Keys(()), ())
    transport = httpx.ASGITransport(edge)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post("/v1/completions", json={})

    response = asyncio.run(ask())
    return response.status_code, dict(response.headers), response.text


def test_what_is_being_answered_is_counted() -> None:
    state, seen = State(), []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        seen.append(state.server_load_metrics)
        await PlainTextResponse("yes")(scope, receive, send)
        if scope["path"] == "/v1/completions":
            raise RuntimeError("broken")

    transport = httpx.ASGITransport(Edge(answer, Limits(), Keys(()), (), state), raise_app_exceptions=False)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for path in ("/v1/completions", "/v1/models", "/v1/chat/completions"):
                await client.post(path, json={})

    asyncio.run(ask())
    assert (seen, state.server_load_metrics) == ([1, 0, 1], 0)


def test_a_stream_that_is_refused_before_it_begins_has_the_status() -> None:
    assert answered(refused=False)[::2] == (200, "data: 1\n\ndata: [DONE]\n\n")
    status, headers, text = answered(refused=True)
    assert (status, headers["retry-after"], headers["content-type"]) == (429, "7", "application/json")
    told = {"message": "later", "type": "Too Many Requests", "param": None, "code": 429}
    assert json.loads(text)["error"] == told


def test_bringing_up_imports_no_vllm() -> None:
    """It takes some ten seconds of a core and a gigabyte, which only workers and gateways need."""
    look = "import sys, deployments.local, deployments.roles; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], timeout=60, check=False).returncode == 0
