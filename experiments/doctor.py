"""Gathering what `handoff doctor` judges: on this machine, or on every node of a running Ray cluster.

An `Examiner` is an actor pinned to a node; it sees what the processes of Ray there see: their limits, their
environment, their packages. Nodes that do not answer become findings.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from actors import secret
from actors import versions as packages
from actors.errors import EngineStartError, WorkerError
from actors.fingerprint import model_files
from cluster import facts, preflight
from cluster.facts import Facts
from cluster.fake import FAKE
from cluster.file import ClusterFile
from cluster.findings import Finding, passed
from cluster.launch import shared_memory
from cluster.model_config import is_path
from cluster.names import AT_SHARE, at
from cluster.placement import NodeOffer
from deployments import store
from kv.bucket import S3Settings

PACKAGES: Final = {**packages.PACKAGES, "torch": ("torch",), "nixl": ("nixl",)}
HERE: Final = "here"
ANSWER_S: Final = 90.0
"""For a node to start a process and to look at itself; models on slow disks take the most."""
CONNECT_S: Final = 3.0
CLOCK_ROUNDS: Final = 5
_GREETING: Final = b"handoff doctor at "


@dataclass(frozen=True)
class Question:
    """What a node is asked, beyond what it is.

    Attributes:
        node: its name.
        address: that other nodes reach it by.
        model: path or hub id of the weights there; None: it reads none.
        weights: whether the engine needs them.
        s3: the bucket to try.

    """

    node: str
    address: str
    model: str | None = None
    weights: bool = True
    s3: S3Settings | None = None


class Examiner:
    """On a node, for as long as it is examined."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def now(self) -> float:
        """Return this machine's clock."""
        return time.time()

    def facts(self, question: Question) -> Facts:
        """Return what this node is like, Ray's authentication included."""
        return replace(_facts(question), auth=_authentication(), token=_has_token())

    def listen(self, node: str, address: str) -> int:
        """Greet whoever connects to the port that is returned, until this actor ends."""
        listener = self._listener = socket.create_server((address, 0))

        def greet() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(_GREETING + node.encode())
                except OSError:
                    if listener.fileno() < 0:
                        return

        threading.Thread(target=greet, name="doctor-greet", daemon=True).start()
        return int(listener.getsockname()[1])

    def reach(self, others: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Return for each other node an empty text if it greets this one, else what went wrong."""
        with ThreadPoolExecutor(16) as pool:
            return dict(zip(others, pool.map(_greeted, others, others.values()), strict=True))

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()


def _greeted(node: str, place: tuple[str, int]) -> str:
    wanted, got = _GREETING + node.encode(), b""
    try:
        with socket.create_connection(place, timeout=CONNECT_S) as connection:
            while len(got) < len(wanted) and (part := connection.recv(len(wanted) - len(got))):
                got += part
    except OSError as error:
        return f"{place[0]}:{place[1]}: {error.strerror or str(error) or type(error).__name__}"
    return "" if got == wanted else f"{place[0]}:{place[1]}: another program answers there"


def _facts(question: Question) -> Facts:
    found = facts.gather(question.node, question.address, os.environ)
    found = replace(found, versions=packages.versions(PACKAGES), **_model(question.model, question.weights))
    return found if question.s3 is None else replace(found, s3=store.trouble(question.s3))


def _model(model: str | None, weights: bool) -> dict[str, Any]:
    if model is None:
        return {}
    path = Path(model)
    if not path.is_dir():
        if is_path(model):
            return {"model_error": f"{model} is no folder on this node"}
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(model, local_files_only=True))
        except (OSError, ValueError):  # it is not in the cache; or no hub id at all
            return {"model_later": True}
    try:
        return {"model": model_files(path, weights).digest}
    except (EngineStartError, OSError, ValueError) as error:
        return {"model_error": str(error)}


def _authentication() -> str:
    from ray import _raylet
    from ray._private.authentication.authentication_utils import get_authentication_mode_name

    compiled: Any = _raylet  # its type information is incomplete
    return str(get_authentication_mode_name(compiled.get_authentication_mode()))


def _has_token() -> bool:
    try:
        secret.data_plane_key()
    except WorkerError:
        return False
    return True


# -- this machine -------------------------------------------------------------------------------------


def here(file: ClusterFile | None) -> tuple[list[Facts], list[Finding]]:
    """Examine this machine; with a cluster file, what would keep it from coming up here as well."""
    model = None if file is None else file.model
    weights = file is None or FAKE not in file.engine
    found = _facts(Question(HERE, own_address(), model, weights, store.settings(file) if file else None))
    if file is None or file.hosts is not None:
        return [found], []
    remedy = "see what was found; handoff up says the same before it starts anything"
    item = "bring-up"
    obstacles = [Finding(item, "fail", HERE, line, remedy) for line in preflight.obstacles(file)]
    found = replace(found, object_store=shared_memory(file))
    return [found], obstacles or passed(item, f"{file.name!r} can be brought up on this machine")


def own_address() -> str:
    """Return the address that this machine would reach others by. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # of a network that is only for documentation
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


# -- a cluster ----------------------------------------------------------------------------------------


def nodes(address: str, file: ClusterFile | None) -> tuple[list[Facts], list[Finding]]:
    """Examine every node of the Ray cluster at ``address`` (HOST:PORT), which this process is connected to.

    Args:
        address: of Ray's control store.
        file: names the models and the bucket; None: neither is looked at.

    """
    import ray

    from cluster.nodes import snapshot

    offers = _named(snapshot())
    actors = {name: _examiner(ray, offer) for name, offer in offers.items()}
    try:
        return _examined(ray, address, file, offers, actors)
    finally:
        for actor in actors.values():
            ray.kill(actor)


def _named(offers: Sequence[NodeOffer]) -> dict[str, NodeOffer]:
    """Nodes by name; those that share one, with the beginning of their Ray id."""
    names = [offer.name for offer in offers]
    return {
        offer.name if names.count(offer.name) == 1 else f"{offer.name} ({offer.node_id[:8]})": offer
        for offer in offers
    }


def _examined(
    ray: Any,
    address: str,
    file: ClusterFile | None,
    offers: Mapping[str, NodeOffer],
    actors: Mapping[str, Any],
) -> tuple[list[Facts], list[Finding]]:
    asked = {name: actor.facts.remote(_question(name, offers[name], file)) for name, actor in actors.items()}
    answers, problems = _answers(ray, asked)
    places, more = _answers(
        ray, {name: actors[name].listen.remote(name, offers[name].address) for name in answers}
    )
    problems += more
    ends = {name: (offers[name].address, port) for name, port in places.items()}
    ways, more = _answers(
        ray,
        {
            name: actors[name].reach.remote({other: end for other, end in ends.items() if other != name})
            for name in ends
        },
    )
    problems += more
    host = address.rpartition(":")[0]
    found = []
    for name, answer in answers.items():
        clock, error = _clock(partial(_ask_time, ray, actors[name]))
        store = int(offers[name].total.get("object_store_memory", 0)) or None
        found.append(
            replace(
                answer,
                object_store=store,
                clock_s=clock,
                clock_error_s=error,
                reaches=ways.get(name, {}),
                open=answers_strangers(address) if offers[name].address == host else None,
            )
        )
    return found, [*_missing(file, offers), *problems]


def _examiner(ray: Any, offer: NodeOffer) -> Any:
    """An examiner on a node: by our own resource, or by Ray's where the node is no node of a cluster file."""
    own = at(offer.name)
    resource = own if own in offer.total else f"node:{offer.address}"
    return ray.remote(Examiner).options(num_cpus=0, resources={resource: AT_SHARE}).remote()


def _question(name: str, offer: NodeOffer, file: ClusterFile | None) -> Question:
    mine = file is not None and offer.roles and any(node.name == offer.name for node in file.each_node())
    model = file.model_on(offer.name) if file is not None and mine else None
    weights = file is None or FAKE not in file.engine
    return Question(name, offer.address, model, weights, store.settings(file) if file else None)


def _answers(ray: Any, asked: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """What came within ``ANSWER_S``, by node; a finding for each node that did not answer."""
    if not asked:
        return {}, []
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
    answers, problems = dict[str, Any](), list[Finding]()
    for name, reference in asked.items():
        try:
            if reference not in done:
                raise TimeoutError(f"no answer within {ANSWER_S:g} s")
            answers[name] = ray.get(reference)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            told = f"{type(error).__name__}: {lines[0]}" if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
            remedy = "is the same handoff installed there (requirements/)? The node's Ray logs have the rest"
            problems.append(Finding("answer", "fail", name, told, remedy))
    return answers, problems


def _ask_time(ray: Any, examiner: Any) -> float:
    return float(ray.get(examiner.now.remote(), timeout=ANSWER_S))


def _clock(ask: Callable[[], float], clock: Callable[[], float] = time.time) -> tuple[float, float]:
    """How far another clock is ahead of ours, and how wrong that may be: half the shortest round trip."""
    best = (0.0, float("inf"))
    for _ in range(CLOCK_ROUNDS):
        before = clock()
        there = ask()
        after = clock()
        best = min(best, (there - (before + after) / 2, (after - before) / 2), key=lambda one: one[1])
    return best


def _missing(file: ClusterFile | None, offers: Mapping[str, NodeOffer]) -> list[Finding]:
    if file is None:
        return []
    names = [node.name for node in file.each_node() if node.name not in offers]
    remedy = "see `handoff status`, or `ray monitor FILE` for machines of your own"
    return [Finding("answer", "fail", name, "not in the cluster", remedy) for name in names]


def answers_strangers(address: str, within_s: float = 5.0) -> bool | None:
    """Whether Ray's control store answers a call without a token; None if that cannot be told."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            call(b"", timeout=within_s)
        except grpc.RpcError as error:
            return False if error.code() == grpc.StatusCode.UNAUTHENTICATED else None
        return True


def read_logs(paths: Sequence[Path]) -> list[str]:
    """Return the texts of log files, which may hold anything."""
    return [path.read_text("utf-8", errors="replace") for path in paths]
