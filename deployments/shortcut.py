"""The way of ordinary requests through the gateway, past FastAPI's and past layers that have nothing to do.

Between a request and vLLM's own handler of it lie the route table, twice, and FastAPI's dependencies. What is
certain to come through them unchanged goes straight to that handler; all else, and whatever is wrong in any
way, takes the long way from its start and is answered there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, get_type_hints

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from vllm.entrypoints.serve.elastic_ep.middleware import ScalingMiddleware

logger = logging.getLogger(__name__)

PATHS: Final = ("/v1/completions", "/v1/chat/completions")
KIND: Final = (b"content-type", b"application/json")
_KEPT: Final = (
    ServerErrorMiddleware,
    CORSMiddleware,
    PrometheusInstrumentatorMiddleware,
    ExceptionMiddleware,
)
_LEFT_OUT: Final = (ScalingMiddleware, AsyncExitStackMiddleware)
"""Layers that do nothing here: engines are not scaled, and no files come."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """vLLM's handler of a path, and what it takes."""

    handler: Callable[..., Any]
    model: type[BaseModel]


def shortcut(app: FastAPI) -> Any:
    """Return an application that answers as ``app``, whose layers are built, does.

    If it has a layer that is not known here, it is ``app`` itself.
    """
    layers: list[Any] = []
    layer: Any = app.middleware_stack
    while isinstance(layer, (*_KEPT, *_LEFT_OUT)):
        layers.append(layer)
        layer = layer.app
    if layer is not app.router:
        logger.warning("%s is not known here: requests take the long way", type(layer).__name__)
        return app
    endpoints = {
        route.path: _Endpoint(route.endpoint, get_type_hints(route.endpoint)["request"])
        for route in app.router.routes
        if isinstance(route, APIRoute) and route.path in PATHS and "POST" in route.methods
    }
    way: Any = _answer
    for layer in reversed(layers):
        if not isinstance(layer, _LEFT_OUT):
            way = _around(layer, way)
    return Shortcut(app, way, endpoints)


def _around(layer: Any, inner: Any) -> Any:
    """Return the same layer around something else."""
    found = copy(layer)
    found.app = inner
    if isinstance(layer, PrometheusInstrumentatorMiddleware):
        found._get_handler = lambda request: (request.scope["path"], True)  # it asks every route otherwise
    return found


class Shortcut:
    """Tells which way a request takes.

    Args:
        app: the long way.
        way: the short one, ``_answer`` with layers around it.
        endpoints: what can take it, by path.

    """

    def __init__(self, app: FastAPI, way: Any, endpoints: Mapping[str, _Endpoint]) -> None:
        self.app, self._way, self._endpoints = app, way, endpoints

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST" or KIND not in scope["headers"]:
            await self.app(scope, receive, send)
            return
        messages: list[Any] = []
        body = await _body(receive, messages)
        request = None if body is None else _request_of(body, endpoint.model)
        if request is None:
            await self.app(scope, _again(messages, receive), send)
            return
        scope["app"], scope["handoff.asked"] = self.app, (endpoint.handler, request)
        await self._way(scope, receive, send)


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer as FastAPI's route does, whose handler returns responses."""
    handler, request = scope["handoff.asked"]
    response = await handler(request, raw_request=Request(scope, receive, send))
    if response is not None:  # else the client has gone
        await response(scope, receive, send)


async def _body(receive: Any, messages: list[Any]) -> bytes | None:
    """Return the body, and every message it came in; None if it did not come, for reasons told in them."""
    parts = []
    while True:
        try:
            message = await receive()
        except Exception as error:
            messages.append(error)
            return None
        messages.append(message)
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _request_of(body: bytes, model: type[BaseModel]) -> BaseModel | None:
    """Return what was asked; None if it is wrong in any way."""
    try:
        return model.model_validate(json.loads(body))
    except Exception:
        return None


def _again(messages: list[Any], receive: Any) -> Any:
    """Return a channel that gives these messages once more, or raises them, and then what comes."""
    waiting = iter(messages)

    async def received() -> Any:
        message = next(waiting, None)
        if isinstance(message, Exception):
            raise message
        return await receive() if message is None else message

    return received
