"""The gateway: vLLM's OpenAI server in a Ray Serve replica, its engine being our cluster."""

from __future__ import annotations

import logging
import secrets
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import ray
from fastapi import APIRouter, FastAPI, HTTPException, Request
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app

from actors.engine import engine_config
from actors.messages import WorkerInfo
from actors.peers import NAMESPACE
from deployments.engine_client import TASKS, ClusterEngineClient
from deployments.ledger import Record, current
from deployments.worker_client import WorkerClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """What a gateway replica needs to know.

    Attributes:
        model: local path or hub id; the gateway reads its tokenizer and configuration.
        served_name: the model's name in the API.
        engine: vLLM engine options, for limits such as ``max_model_len``.
        workers: names of the worker actors.

    """

    model: str
    served_name: str
    engine: dict[str, Any]
    workers: tuple[str, ...]


class Gateway:
    """A Serve deployment; ``deployments/app.py`` wraps it. One event loop, no engine of its own."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._spec = spec
        self._engine = ClusterEngineClient(engine_config(spec.model, spec.engine))
        self._app: FastAPI | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        """Connect to the workers and build vLLM's application; called by Serve once per replica."""
        client = secrets.randbits(31)
        dispatcher = self._engine.dispatcher
        for name in self._spec.workers:
            handle = ray.get_actor(name, namespace=NAMESPACE)
            info: WorkerInfo = await handle.start.remote()
            worker = WorkerClient(handle, info, client, dispatcher.on_batch, dispatcher.on_lost)
            await worker.connect()
            dispatcher.add_worker(worker)
        arguments = server_arguments(self._spec)
        app = build_app(arguments, TASKS, self._engine.model_config)
        app.include_router(ledger_routes(self._engine))
        await init_app_state(self._engine, app.state, arguments, TASKS)
        return LedgerMiddleware(app)

    async def check_health(self) -> None:
        """Serve's health check: the replica is healthy while it can answer; workers recover by themselves."""


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
    """Notes when a request arrived and when its first token left; gives every request an id."""

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
        current.set(record)

        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start":
                if header is None:  # otherwise Serve's proxy returns it
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            elif message.get("body"):
                record.note_sent()
            await send(message)

        await self.app(scope, receive, noting)
