"""The composition root: workers, gateway and Serve, brought up together and taken down together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve

from actors.peers import NAMESPACE
from cluster.file import ClusterFile, Objectives
from cluster.names import GATEWAY
from deployments import keys
from deployments.errors import StartError
from deployments.gateway import GRACEFUL_S, Gateway, GatewaySpec, listen
from deployments.options import server_arguments
from deployments.place import PlacedWorker, Progress, start_workers, stop_workers
from deployments.planner import Routing
from deployments.router import Slo

APP = "handoff"


@dataclass(frozen=True, slots=True)
class Serving:
    """A running application."""

    url: str
    model: str
    workers: tuple[PlacedWorker, ...]


@contextlib.contextmanager
def serving(file: ClusterFile, progress: Progress) -> Iterator[Serving]:
    """Serve a cluster file's model on the Ray cluster this process is connected to, until the block ends.

    Raises what ``start_workers`` raises, and ``StartError`` if the gateway does not come up.
    """
    if running := [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if _is_worker(actor)
    ]:
        raise StartError(f"this cluster is serving already ({', '.join(running)}); stop that first")
    _check_gateway(file)  # before the long work
    workers = start_workers(file, progress)
    try:
        yield _serve_gateway(file, workers, progress)
    finally:
        progress("stopping the gateway and the workers")
        with contextlib.suppress(Exception):
            serve.shutdown()
        stop_workers([worker.handle for worker in workers])


def _check_gateway(file: ClusterFile) -> None:
    """Raise ``StartError`` for what would keep the gateway from starting on this node."""
    listen(file.gateway.host, file.gateway.port, shared=False).close()
    keys.read(file.gateway.api_keys_file)
    server_arguments(file.model, _served_name(file), file.gateway.options)


def _served_name(file: ClusterFile) -> str:
    return file.served_model_name or Path(file.model).name


def _is_worker(actor: dict[str, str]) -> bool:
    return actor["namespace"] == NAMESPACE and "-worker-" in (actor["name"] or "")


def _routing(file: ClusterFile) -> Routing:
    def seconds(ms: float | None) -> float | None:
        return None if ms is None else ms / 1e3

    def slo(of: Objectives) -> Slo:
        return Slo(seconds(of.ttft_ms), seconds(of.tpot_ms))

    classes = {name: slo(of) for name, of in file.slo.classes.items()}
    return Routing(file.router.mode, file.router.shadow, slo(file.slo), classes)


def _serve_gateway(file: ClusterFile, workers: list[PlacedWorker], progress: Progress) -> Serving:
    name = _served_name(file)
    spec = GatewaySpec(
        model=file.model,
        served_name=name,
        engine=dict(file.engine),
        workers=tuple(worker.info.name for worker in workers),
        recompute=(file.recompute.tokens_per_s, file.recompute.burst_s),
        routing=_routing(file),
        options=dict(file.gateway.options),
        limits=file.gateway.limits,
        api_keys_file=file.gateway.api_keys_file,
        otlp_endpoint=file.gateway.otlp_endpoint,
    )
    progress("starting the gateway")
    serve.start(proxy_location="Disabled")  # replicas listen themselves; see deployments/gateway.py
    deployment = serve.deployment(
        Gateway,
        name="gateway",
        num_replicas=file.gateway.replicas,
        user_config={"host": file.gateway.host, "port": file.gateway.port},
        graceful_shutdown_timeout_s=GRACEFUL_S + 1,
        ray_actor_options={"num_cpus": 1, "resources": {GATEWAY: 1}},
    )
    serve.run(deployment.bind(spec), name=APP, route_prefix="/", blocking=False)
    url = f"http://{file.gateway.host}:{file.gateway.port}"
    progress(f"serving {name} at {url}/v1")
    return Serving(url, name, tuple(workers))
