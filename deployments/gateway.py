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
from collections.abc import Iterator, Sequence
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
from cluster.file import ClusterFile, Limits
from deployments import api, keys
from deployments.budget import Budget
from deployments.edge import Edge
from deployments.engine_client import TASKS, ClusterEngineClient
from deployments.http import limited_protocol
from deployments.meeting import ONE_WITHIN_S, meet
from deployments.members import Follower
from deployments.metrics import WorkerMetrics, count_request
from deployments.options import server_arguments
from deployments.planner import Planner, Routing
from deployments.replica import DRAIN_S, listen
from deployments.roles import has_pools
from deployments.shortcut import shortcut
from deployments.tracing import tracer
from deployments.worker_client import WorkerClient

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 60


class Gateway:
    """What a Serve replica runs (``deployments/replica.py``). One event loop, no engine of its own.

    Args:
        file: the cluster's. The gateway reads the model's tokenizer and configuration.
        workers: names of the worker actors.

    """

    def __init__(self, file: ClusterFile, workers: Sequence[str]) -> None:
        self._file, self._workers = file, workers
        self._keys = keys.of_gateway(file.gateway.api_keys_file)
        self._engine = ClusterEngineClient(engine_config(file.model, dict(file.engine)), file.gateway.limits)
        self._engine.dispatcher.budget = Budget(file.recompute.tokens_per_s, file.recompute.burst_s)
        self._engine.dispatcher.planner = Planner(Routing.of(file))
        self._tracer = tracer(file.gateway.otlp_endpoint)
        self._metrics = WorkerMetrics(self._engine.dispatcher.workers, self._engine.report)
        self._client = secrets.randbits(31)
        self._late: list[asyncio.Task[None]] = []
        self._polling: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Connect to the workers, then listen. Does nothing the second time."""
        if self._server is not None:
            return
        await self._connect()
        listening = listen(self._file.gateway.host, self._file.gateway.port)
        self._server = Server(uvicorn_config(await self._build_app(), self._file.gateway.limits))
        self._serving = asyncio.create_task(self._server.serve([listening]), name="http")

    async def _connect(self) -> None:
        dispatcher = self._engine.dispatcher
        found, late = await meet(self._workers, self._reach)
        for worker in found:
            dispatcher.add_worker(worker)
        if has_pools(self._file):
            for task in late:
                task.cancel()  # it is on the list that is followed
            follower = Follower(dispatcher, self._join, self._client)
            self._following = asyncio.create_task(follower.run(), name="workers")
        else:
            self._late = [asyncio.create_task(self._joins(task), name="late workers") for task in late]
        self._metrics.register()
        self._polling = asyncio.create_task(self._metrics.poll(), name="worker metrics")

    async def _reach(self, name: str) -> WorkerClient:
        """Connect to a worker."""
        key, dispatcher = data_plane_key(CHANNEL_PURPOSE), self._engine.dispatcher
        handle = ray.get_actor(name, namespace=NAMESPACE)
        info: WorkerInfo = await handle.start.remote()
        worker = WorkerClient(handle, info, self._client, key, dispatcher.on_batch, dispatcher.on_lost)
        await worker.connect()
        return worker

    async def _join(self, name: str) -> None:
        """Connect to a worker that was added, and have it get requests."""
        async with asyncio.timeout(ONE_WITHIN_S):
            self._engine.dispatcher.add_worker(await self._reach(name))

    async def _joins(self, late: asyncio.Task[WorkerClient]) -> None:
        worker = await late
        self._engine.dispatcher.add_worker(worker)
        logger.warning("worker %s is there now", worker.info.name)

    async def _build_app(self) -> Any:
        """Build vLLM's application around our engine."""
        file = self._file
        arguments = server_arguments(file.model, file.served_name, file.gateway.options)
        arguments.structured_outputs_config = self._engine.vllm_config.structured_outputs_config
        app = build_app(arguments, TASKS, self._engine.model_config)
        app.include_router(ledger_routes(self._engine))
        await init_app_state(self._engine, app.state, arguments, TASKS)
        api.narrow(app, arguments, self._file.gateway.limits.sequences)
        enable_envs_cache()
        ended = [count_request] if self._tracer is None else [count_request, self._tracer.export]
        return Edge(shortcut(app), self._file.gateway.limits, self._keys, ended, app.state)

    def check(self) -> None:
        """Raise RuntimeError unless it takes requests; workers recover by themselves."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def end(self) -> None:
        """Finish what is being answered, take nothing new."""
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
