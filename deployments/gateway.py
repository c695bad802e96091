"""The gateway: vLLM's OpenAI server in a Ray Serve replica, its engine being our cluster.

Serve starts, places, watches and replaces the replicas. HTTP comes straight to them: each
listens on the gateway's port itself, as vLLM's own server does. Serve's proxy would copy every
token through another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import uvicorn
from fastapi import APIRouter, HTTPException
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.envs import enable_envs_cache

from actors.engine import engine_config
from actors.messages import WorkerInfo
from actors.peers import NAMESPACE
from actors.secret import CHANNEL_PURPOSE, data_plane_key
from cluster.file import Limits
from deployments import api, keys
from deployments.budget import Budget
from deployments.edge import Edge
from deployments.engine_client import TASKS, ClusterEngineClient
from deployments.errors import StartError
from deployments.http import limited_protocol
from deployments.members import Follower
from deployments.metrics import WorkerMetrics, count_request
from deployments.options import server_arguments
from deployments.planner import DEFAULT, Planner, Routing
from deployments.shortcut import shortcut
from deployments.tracing import tracer
from deployments.worker_client import WorkerClient

logger = logging.getLogger(__name__)

CONNECTED_WITHIN_S = 120.0
"""A worker that is being restarted has that long to load its model."""
KEEP_ALIVE_S = 60
DRAIN_S = 600
"""How long a replica that is being replaced goes on answering what it has taken."""


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
        options: vLLM's own server options.
        limits: on requests.
        api_keys_file: path of the file with the keys that clients need; None: no keys.
        otlp_endpoint: URL of an OpenTelemetry collector; None: what the environment says.
        routing: how requests are routed and admitted.
        pools: whether workers are added and given up by load.

    """

    model: str
    served_name: str
    engine: dict[str, Any]
    workers: tuple[str, ...]
    recompute: tuple[float, float]
    options: Mapping[str, Any]
    limits: Limits
    api_keys_file: str | None
    otlp_endpoint: str | None
    routing: Routing = DEFAULT
    pools: bool = False


class Gateway:
    """A Serve deployment; ``deployments/app.py`` wraps it. One event loop, no engine of its own."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._spec = spec
        self._keys = keys.of_gateway(spec.api_keys_file)
        self._engine = ClusterEngineClient(engine_config(spec.model, spec.engine), spec.limits)
        self._engine.dispatcher.budget = Budget(*spec.recompute)
        self._engine.dispatcher.planner = Planner(spec.routing)
        self._tracer = tracer(spec.otlp_endpoint)
        self._metrics = WorkerMetrics(self._engine.dispatcher.workers, self._engine.report)
        self._polling: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def reconfigure(self, address: dict[str, Any]) -> None:
        """Connect to the workers, then listen on ``host`` and ``port``. Called by Serve."""
        if self._server is not None:
            return
        await self._connect()
        listening = listen(address["host"], address["port"])
        self._server = Server(uvicorn_config(await self._build_app(), self._spec.limits))
        self._serving = asyncio.create_task(self._server.serve([listening]), name="http")

    async def _connect(self) -> None:
        client, dispatcher = secrets.randbits(31), self._engine.dispatcher
        for name in self._spec.workers:
            await self._meet(client, name)
        if self._spec.pools:
            follower = Follower(dispatcher, partial(self._meet, client), client)
            self._following = asyncio.create_task(follower.run(), name="workers")
        self._metrics.register()
        self._polling = asyncio.create_task(self._metrics.poll(), name="worker metrics")

    async def _meet(self, client: int, name: str) -> None:
        """Connect to a worker, and have it get requests."""
        key, dispatcher = data_plane_key(CHANNEL_PURPOSE), self._engine.dispatcher
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

    async def _build_app(self) -> Any:
        """Build vLLM's application around our engine."""
        arguments = server_arguments(self._spec.model, self._spec.served_name, self._spec.options)
        arguments.structured_outputs_config = self._engine.vllm_config.structured_outputs_config
        app = build_app(arguments, TASKS, self._engine.model_config)
        app.include_router(ledger_routes(self._engine))
        await init_app_state(self._engine, app.state, arguments, TASKS)
        api.narrow(app, arguments, self._spec.limits.sequences)
        enable_envs_cache()
        ended = [count_request] if self._tracer is None else [count_request, self._tracer.export]
        return Edge(shortcut(app), self._spec.limits, self._keys, ended, app.state)

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
        if self._tracer is not None:
            self._tracer.close()


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


def uvicorn_config(app: Any, limits: Limits) -> uvicorn.Config:
    """Return how HTTP is served: as vLLM's own server does, and within limits."""
    return uvicorn.Config(
        app,
        http=limited_protocol(limits),
        log_config=None,  # its own would close the handlers of Serve, which finds its replicas' logs by them
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )


def ledger_routes(engine: ClusterEngineClient) -> APIRouter:
    """Return the routes that tell where requests went and what they cost."""
    router = APIRouter(prefix="/handoff", tags=["handoff"])

    @router.get("/requests/{request_id:path}")
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
