"""The composition root: workers, gateway and Serve, brought up together and taken down together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ray
from ray import serve
from ray.autoscaler.sdk import request_resources

from actors.peers import NAMESPACE
from cluster import api_keys
from cluster.file import ClusterFile
from cluster.names import GATEWAY
from deployments import roles
from deployments.drain import end_gateways
from deployments.errors import StartError
from deployments.options import server_arguments
from deployments.place import PlacedWorker, Progress, running_workers, start_workers, stop_workers
from deployments.replica import DRAIN_S, Replica, listen
from deployments.roles import has_pools

APP = "handoff"
GATEWAY_ENV = {"VLLM_CONFIGURE_LOGGING": "0"}
"""Otherwise vLLM closes the log handlers of Serve, which then takes a gateway that it finds again, after its
controller or the head was restarted, for a broken one, and replaces it."""
GRACEFUL_S = 4.0
"""When the application ends, what is being answered has that long to be finished."""
ENDED_WITHIN_S = 15.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A running application."""

    url: str
    model: str
    workers: tuple[PlacedWorker, ...]


@contextlib.contextmanager
def serving(file: ClusterFile, progress: Progress) -> Iterator[Serving]:
    """Serve a cluster file's model on the Ray cluster this process is connected to, until the block ends.

    Raises what ``start`` raises.
    """
    running = start(file, progress)
    try:
        yield running
    finally:
        progress("stopping the gateway and the workers")
        _stop(file, running.workers)


def start(file: ClusterFile, progress: Progress) -> Serving:
    """Serve a cluster file's model on the Ray cluster this process is connected to; outlives this process.

    Raises what ``start_workers`` raises, and ``StartError`` if the gateway does not come up.
    """
    if running := running_workers():
        raise StartError(f"this cluster is serving already ({', '.join(sorted(running))}); stop that first")
    _check_gateway(file)  # before the long work
    workers = start_workers(file, progress)
    try:
        url = _run_gateways(file, [worker.info.name for worker in workers], progress)
        roles.begin(file)
    except BaseException:
        _stop(file, workers)
        raise
    return Serving(url, file.served_name, tuple(workers))


def update(file: ClusterFile, progress: Progress) -> None:
    """Replace the gateways of the running application, one after the other, by such as the file says now.

    No request is lost: a new replica listens before an old one takes no more, and that one answers what it
    has taken. Workers stay as they are. Returns when all new replicas serve; old ones may still be
    answering, for up to ``DRAIN_S``.

    Raises ``StartError`` if nothing is served, or the new gateways do not come up.
    """
    asked = [ask.name for ask in file.asks()]
    found = running_workers()
    if not set(asked) <= found <= {ask.name for ask in file.asks(most=True)}:
        raise StartError(
            f"the cluster's workers are {', '.join(sorted(found)) or 'none'}, the file's {', '.join(asked)}: "
            f"an update replaces gateways only; start the application with `handoff serve`"
        )
    roles.end()  # it is asked to do what the file says now
    _run_gateways(file, asked, progress)
    roles.begin(file)


def _stop(file: ClusterFile, workers: Sequence[PlacedWorker]) -> None:
    """Gateways may finish what they are answering for a while; without workers, that ends."""
    roles.end()
    ending = threading.Thread(
        target=end_gateways, args=(GRACEFUL_S + ENDED_WITHIN_S,), name="serve.shutdown", daemon=True
    )
    ending.start()
    ending.join(GRACEFUL_S)
    stop_workers([worker.handle for worker in workers])
    if has_pools(file):
        for name in running_workers() - {worker.info.name for worker in workers}:
            with contextlib.suppress(ValueError):  # it was leaving, and has left
                stop_workers([ray.get_actor(name, namespace=NAMESPACE)])
        request_resources(bundles=[])  # the autoscaler gives their nodes back
    ending.join(ENDED_WITHIN_S)


def _check_gateway(file: ClusterFile) -> None:
    """Raise ``StartError`` for what would keep the gateway from starting on this node."""
    listen(file.gateway.host, file.gateway.port, shared=False).close()
    api_keys.read(file.gateway.api_keys_file)
    if file.gateway.options:
        server_arguments(file.model, file.served_name, file.gateway.options)  # imports vLLM


def gateways(file: ClusterFile, workers: Sequence[str]) -> serve.Application:
    """Return the gateways in front of these workers as what Serve runs."""
    deployment = serve.deployment(
        Replica,
        name="gateway",
        num_replicas=file.gateway.replicas,
        user_config={"host": file.gateway.host, "port": file.gateway.port},  # has Serve call `reconfigure`
        graceful_shutdown_timeout_s=DRAIN_S + 10,
        max_surge_percent=100,  # an update starts a replica before it stops one
        ray_actor_options={
            "num_cpus": 1,
            "resources": {GATEWAY: 1},
            "runtime_env": {"env_vars": dict(GATEWAY_ENV)},
        },
    )
    return deployment.bind(file, tuple(workers))


def _run_gateways(file: ClusterFile, workers: Sequence[str], progress: Progress) -> str:
    """Bring up the gateways, or replace those that are there; return their URL."""
    progress("starting the gateway")
    serve.start(proxy_location="Disabled")  # replicas listen themselves; see deployments/gateway.py
    try:
        serve.run(gateways(file, workers), name=APP, route_prefix="/", blocking=False)
    except RuntimeError as error:
        raise StartError(f"the gateways did not come up: {error}") from error
    url = f"http://{file.gateway.host}:{file.gateway.port}"
    progress(f"serving {file.served_name} at {url}/v1")
    return url
