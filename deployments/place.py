"""Starts the worker actors where placement says, and checks that they belong together."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import ray

from actors.errors import EngineStartError
from actors.fingerprint import require_same
from actors.messages import WorkerInfo, WorkerSpec
from actors.peers import NAMESPACE
from actors.versions import require_equal, versions
from actors.worker import Worker, engine_env
from cluster.errors import PlacementError
from cluster.file import ClusterFile
from cluster.nodes import snapshot
from cluster.placement import Placement, WorkerAsk, place
from deployments import store
from deployments.errors import StartError
from kv.tls import TlsFiles

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

SCHEDULED_WITHIN_S = 10.0
"""A worker that Ray has not started by then never will: what it needs has gone since it was placed."""
STARTED_WITHIN_S = 600.0
CONNECTED_WITHIN_S = 60.0
PAIRS_EVERY_S = 0.5
ANSWER_S = 10.0
"""A worker that serves answers within this time."""
NODE_WITHIN_S, NODE_EVERY_S = 1800.0, 1.0
"""How long a worker that is added waits for its node: a machine starts, gigabytes of an image are pulled."""
RESTARTS = -1
"""Without end: a worker may die once a week for years, and an engine that does not start ends nothing."""


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """A started worker: its actor and what it told about itself."""

    handle: Any
    info: WorkerInfo


def running_workers() -> set[str]:
    """Return the names of the workers that are there."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {
        actor["name"]
        for actor in actors
        if actor["namespace"] == NAMESPACE and "-worker-" in (actor["name"] or "")
    }


def start_workers(file: ClusterFile, progress: Progress) -> list[PlacedWorker]:
    """Place, start and connect all workers of a cluster file.

    Raises:
        cluster.errors.PlacementError: a worker fits on no node; says what each node offers.
        EngineStartError: vLLM refused the model or the options.
        VersionsDiffer: two nodes have different versions of vLLM, Ray, Python or Handoff.
        ModelFilesDiffer: two nodes have different model files.
        kv.errors.LayoutMismatch: two workers' KV caches cannot be exchanged.
        StartError: a worker did not start in time.

    On any error the workers that were started are ended.

    """
    asks = {ask.name: ask for ask in file.asks()}
    placements = place(list(asks.values()), snapshot())
    handles: dict[str, Any] = {}
    try:
        for placement in placements:
            handles[placement.worker] = _create(file, asks[placement.worker], placement)
            progress(f"{placement.worker} goes to node {placement.node_name}")
        infos = _wait_started(handles, progress)
        require_same(infos)
        _connect({handles[one.name]: [p for p in infos if p is not one] for one in infos}, progress)
        _wait_for_pairs(handles, infos, progress)
    except BaseException:
        stop_workers(list(handles.values()))
        raise
    return [PlacedWorker(handles[info.name], info) for info in infos]


def add_worker(
    file: ClusterFile, ask: WorkerAsk, others: Sequence[str], placing: Lock, progress: Progress
) -> WorkerInfo:
    """Start one more worker, and connect it with those that are there, which go on serving.

    Waits for a node that has room for it, which Ray's autoscaler or a person may bring. One of this name
    that is there already is only connected. Others that do not answer now meet it when KV goes there first.

    Args:
        file: which asks for it.
        ask: what it asks for.
        others: names of the workers that are there.
        placing: held from the choice of a node until the worker is there.
        progress: told what is waited for.

    Raises what ``start_workers`` does; the worker is ended then, unless it was there and has an engine.

    """
    handle, serves = None, False
    try:
        if there := ask.name in running_workers():
            handle = ray.get_actor(ask.name, namespace=NAMESPACE)
        else:
            handle = _placed(file, ask, placing, progress)
        (info,) = _wait_started({ask.name: handle}, progress)
        serves = there
        handles = {name: ray.get_actor(name, namespace=NAMESPACE) for name in others}
        infos = _answering(handles)
        handles = {one.name: handles[one.name] for one in infos}
        require_same([info, *infos])
        _connect({handle: infos} | {other: [info] for other in handles.values()}, progress)
        met = [one for one in infos if one.role != info.role]
        _wait_for_pairs({**handles, ask.name: handle}, [info, *met], progress)
    except BaseException:
        if handle is not None and not serves:
            stop_workers([handle])
        raise
    return info


def _answering(handles: Mapping[str, Any]) -> list[WorkerInfo]:
    """Return what those workers tell about themselves that answer soon."""
    asked = [handle.start.remote() for handle in handles.values()]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
    found = []
    for reference in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            found.append(ray.get(reference))
    return found


def _placed(file: ClusterFile, ask: WorkerAsk, placing: Lock, progress: Progress) -> Any:
    """Create a worker once there is a node for it."""
    deadline, told = time.monotonic() + NODE_WITHIN_S, False
    while True:
        with placing:
            try:
                (placement,) = place([ask], snapshot())
            except PlacementError as error:
                if time.monotonic() > deadline:
                    raise StartError(f"no node had room within {NODE_WITHIN_S:g} s: {error}") from error
            else:
                handle = _create(file, ask, placement)
                ray.wait([handle.versions.remote()], timeout=SCHEDULED_WITHIN_S)
                progress(f"{ask.name} goes to node {placement.node_name}")
                return handle
        if not told:
            progress(f"{ask.name} waits for a node with {', '.join(ask.wants())} free")
            told = True
        time.sleep(NODE_EVERY_S)


def _connect(asked: Mapping[Any, Sequence[WorkerInfo]], progress: Progress) -> None:
    """Tell workers (their actors) of others, which they measure the ways to."""
    connected = [handle.connect.remote(list(peers)) for handle, peers in asked.items()]
    _, waiting = ray.wait(connected, num_returns=len(connected), timeout=CONNECTED_WITHIN_S)
    if waiting:
        raise StartError(f"{len(waiting)} workers did not answer in {CONNECTED_WITHIN_S:g} s when connected")
    for way in (line for reference in connected for line in _result(reference)):
        progress(way)


def _wait_for_pairs(handles: dict[str, Any], infos: Sequence[WorkerInfo], progress: Progress) -> None:
    """Return when each prefill worker has got a test block of KV to each decode worker."""
    deadline, told = time.monotonic() + CONNECTED_WITHIN_S, ""
    senders = [info.name for info in infos if info.role == "prefill"]
    receivers = [info.name for info in infos if info.role == "decode"]
    while True:
        asked = {name: handles[name].unproven.remote(receivers) for name in senders}
        missing = [
            f"{name} to {peer}: {why}" for name in senders for peer, why in _result(asked[name]).items()
        ]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise StartError(
                f"no test block of KV has got over within {CONNECTED_WITHIN_S:g} s from "
                f"{'; from '.join(missing)}. "
                f"Nodes must reach each other's TCP ports (firewalls), or choose another `transport`"
            )
        if (telling := f"waiting for a test block of KV from {'; from '.join(missing)}") != told:
            progress(told := telling)
        time.sleep(PAIRS_EVERY_S)


def stop_workers(handles: Sequence[Any]) -> None:
    """End worker actors at once."""
    for handle in handles:
        ray.kill(handle, no_restart=True)


def _paths(files: dict[str, str]) -> dict[str, Path]:
    return {field: Path(file) for field, file in files.items()}


def _create(file: ClusterFile, ask: WorkerAsk, placement: Placement) -> Any:
    """Create the actor. Only its node has the resources that it asks for, also when that comes back anew."""
    spec = WorkerSpec(
        name=ask.name,
        role=ask.role,
        model=file.model_on(placement.node_name),
        engine=file.engine_for(ask.role, placement.node_name),
        transport=file.transport,
        s3=store.settings(file),
        tier=file.s3 is not None and file.s3.tier,
        tls=None if file.tls is None else TlsFiles(**_paths(file.tls.model_dump())),
        mapped={} if file.map is None else file.map.out_of(placement.node_name),
    )
    return (
        ray.remote(Worker)
        .options(
            name=spec.name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=ask.cpus,
            num_gpus=ask.gpus,
            resources=placement.resources,
            max_restarts=RESTARTS,
            runtime_env={"env_vars": engine_env(spec.engine)},
            max_concurrency=10_000,
        )
        .remote(spec)
    )


def _wait_started(handles: dict[str, Any], progress: Progress) -> list[WorkerInfo]:
    started = time.monotonic()
    scheduled = {handle.versions.remote(): name for name, handle in handles.items()}
    _, unscheduled = ray.wait(list(scheduled), num_returns=len(scheduled), timeout=SCHEDULED_WITHIN_S + 20)
    if unscheduled:
        names = ", ".join(scheduled[reference] for reference in unscheduled)
        raise StartError(f"Ray has not started {names}; see `handoff status` for what the nodes have free")
    require_equal(versions(), dict(_result(reference) for reference in scheduled))
    pending = {handle.start.remote(): name for name, handle in handles.items()}
    infos: dict[str, WorkerInfo] = {}
    while pending:
        done, _ = ray.wait(list(pending), timeout=5)
        waited = time.monotonic() - started
        if waited > STARTED_WITHIN_S:
            raise StartError(
                f"{', '.join(pending.values())} not ready after {waited:.0f} s; see the cluster's logs"
            )
        for reference in done:
            name = pending.pop(reference)
            infos[name] = _result(reference)
            info = infos[name]
            progress(f"{name} is ready on {info.node} after {waited:.0f} s: {info.kv_blocks} KV blocks")
        if not done:
            progress(f"waiting for {', '.join(pending.values())} to load the model ({waited:.0f} s)")
    return [infos[name] for name in handles]


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else EngineStartError(str(error)) from None
    except ray.exceptions.RayActorError as error:
        raise StartError(f"a worker's process ended while it started: {error}") from error
