"""The gateway: vLLM's OpenAI server in a Ray Serve replica, its engine being our cluster.

Serve starts, places, watches and replaces the replicas. HTTP comes straight to them: each
listens on the gateway's port itself, as vLLM's own server does. Serve's proxy would copy every
token through another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException, Request
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app

from actors.engine import engine_config
from actors.messages import WorkerInfo
from actors.peers import NAMESPACE
from actors.secret import CHANNEL_PURPOSE, data_plane_key
from deployments.budget import Budget
from deployments.engine_client import TASKS, ClusterEngineClient
from deployments.errors import StartError
from deployments.ledger import Record, current
from deployments.metrics import WorkerMetrics
from deployments.planner import DEFAULT, Planner, Routing
from deployments.worker_client import WorkerClient

logger = logging.getLogger(__name__)

CONNECTED_WITHIN_S = 120.0
"""A worker that is being restarted has that long to load its model."""
KEEP_ALIVE_S = 60
CLASS_HEADER = "x-handoff-class"
"""Names the class of a request, whose objectives are in the cluster file (``slo.classes``)."""
GRACEFUL_S = 4
"""How long a replica that is being stopped goes on answering; Serve ends it a second later."""


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """What a gateway replica needs to know.

    Attributes:
        model: local path or hub id; the gateway reads its tokenizer and configuration.
        served_name: the model's name in the API.
        engine: vLLM engine options, for limits such as ``max_model_len``.
        workers: names of the worker actors.
        recompute: prompt tokens per second that decode workers may compute after failed handovers, and
            for how many seconds' worth at once.
        routing: how requests are routed and admitted.

    """

    model: str
    served_name: str
    engine: dict[str, Any]
    workers: tuple[str, ...]
    recompute: tuple[float, float]
    routing: Routing = DEFAULT


class Gateway:
    """A Serve deployment; ``deployments/app.py`` wraps it. One event loop, no engine of its own."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._spec = spec
        self._engine = ClusterEngineClient(engine_config(spec.model, spec.engine))
        self._engine.dispatcher.budget = Budget(*spec.recompute)
        self._engine.dispatcher.planner = Planner(spec.routing)
        self._metrics = WorkerMetrics(self._engine.dispatcher.workers)
        self._polling: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def reconfigure(self, address: dict[str, Any]) -> None:
        """Connect to the workers, then listen on ``host`` and ``port``. Called by Serve."""
        if self._server is not None:
            return
        await self._connect()
        listening = listen(address["host"], address["port"])
        self._server = Server(uvicorn_config(await self._build_app()))
        self._serving = asyncio.create_task(self._server.serve([listening]), name="http")

    async def _connect(self) -> None:
        client, key = secrets.randbits(31), data_plane_key(CHANNEL_PURPOSE)
        dispatcher = self._engine.dispatcher
        for name in self._spec.workers:
            handle = ray.get_actor(name, namespace=NAMESPACE)
            try:
                async with asyncio.timeout(CONNECTED_WITHIN_S):
                    info: WorkerInfo = await handle.start.remote()
                    worker = WorkerClient(handle, info, client, key, dispatcher.on_batch, dispatcher.on_lost)
                    await worker.connect()
            except TimeoutError:
                raise StartError(
                    f"worker {name} did not answer the gateway within {CONNECTED_WITHIN_S:.0f} s; "
                    f"see the cluster's logs"
                ) from None
            dispatcher.add_worker(worker)
        self._metrics.register()
        self._polling = asyncio.create_task(self._metrics.poll(), name="worker metrics")

    async def _build_app(self) -> Any:
        """Build vLLM's application around our engine."""
        arguments = server_arguments(self._spec)
        app = build_app(arguments, TASKS, self._engine.model_config)
        app.include_router(ledger_routes(self._engine))
        await init_app_state(self._engine, app.state, arguments, TASKS)
        return LedgerMiddleware(app)

    async def check_health(self) -> None:
        """Serve's health check: healthy while it takes requests; workers recover by themselves."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Called by Serve before it ends the replica: finish what is being answered, take nothing new."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            with contextlib.suppress(Exception):
                await self._serving


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the process belongs to Serve."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See the base class."""
        yield


def listen(host: str, port: int, shared: bool = True) -> socket.socket:
    """Return a socket that listens there.

    Args:
        host: address.
        port: port.
        shared: together with other replicas on the same node. Otherwise a gateway that is there is noticed.

    Raises:
        StartError: another program has the port.

    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048, reuse_port=shared)
    except OSError as error:
        raise StartError(
            f"the gateway cannot listen on {host}:{port}: {error.strerror}; set gateway.port to a free one"
        ) from error


def uvicorn_config(app: Any) -> uvicorn.Config:
    """Return how HTTP is served: as vLLM's own server does."""
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_S,
    )


def server_arguments(spec: GatewaySpec) -> Namespace:
    """Return vLLM's own server arguments for this gateway."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    arguments: Namespace = parser.parse_args(["--model", spec.model, "--served-model-name", spec.served_name])
    return arguments


def ledger_routes(engine: ClusterEngineClient) -> APIRouter:
    """Return the routes that tell where requests went and what they cost."""
    router = APIRouter(prefix="/handoff", tags=["handoff"])

    @router.get("/requests/{request_id}")
    async def request_record(request_id: str) -> dict[str, object]:
        """Tell where one of the latest requests ran and where its time went."""
        record = engine.ledger.get(request_id)
        if record is None:
            raise HTTPException(
                404, f"request {request_id!r} is not among the latest; ids are those of X-Request-Id"
            )
        return dict(record.as_json())

    @router.get("/workers")
    async def workers() -> list[dict[str, object]]:
        """List the workers with their load and handover counters."""
        return await engine.dispatcher.describe_workers()

    return router


class LedgerMiddleware:
    """Notes when a request arrived and when its first token left; gives every request an id.

    The head of a response waits for the first piece of its body, so that it can tell where the request
    went: until then nobody knows.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        header = Request(scope).headers.get("x-request-id")
        request_id = header or secrets.token_hex(8)
        if header is None:
            scope["headers"] = [*scope["headers"], (b"x-request-id", request_id.encode())]
        record = Record(request_id)
        record.note("arrived")
        if (wanted := Request(scope).headers.get(CLASS_HEADER)) is not None:
            record.facts["class"] = wanted
        current.set(record)

        head: Any = None

        async def noting(message: Any) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
                return
            if message.get("body"):
                record.note_sent()
            if head is not None:
                head["headers"] = [*head.get("headers", ()), *extra_headers(record)]
                waiting, head = head, None
                await send(waiting)
            await send(message)

        await self.app(scope, receive, noting)


def extra_headers(record: Record) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell a request's id, where it went, and when to try again."""
    headers = [(b"x-request-id", record.request_id.encode())]
    if (path := record.path()) is not None:
        headers.append((b"x-handoff-path", path.encode("ascii", "replace")))
    wait_s = record.facts.get("retry_after_s")
    if isinstance(wait_s, float):
        headers.append((b"retry-after", str(max(1, math.ceil(wait_s))).encode()))
    return headers
