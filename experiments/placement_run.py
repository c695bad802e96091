"""The placement experiment on Ray nodes of this machine: pods of machines that are network namespaces.

A machine is a namespace whose link is limited in both directions; without namespaces all pods are on the
loopback interface, and machines are only names. Ray's custom resources (``pod:0b``) force every actor into
its pod, as in the report. Finished cells are kept in the file after each, and are not run again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from cluster import netns
from cluster.names import AT_SHARE
from cluster.placement import NodeOffer
from experiments import placement
from experiments.children import ChildError
from experiments.placement import KIND, MEDIA, SOURCE, Case, Medium, machine
from experiments.probe import resource_of
from experiments.ray_nodes import ray_nodes
from experiments.results import Run, save
from experiments.s3_server import s3_server
from experiments.suite import begun
from kv.bucket import Bucket, S3Settings
from kv.chunk import checksum

Progress = Callable[[str], None]
WAIT_S: Final = 120.0
STORE_TIMES: Final = 3
"""An object store has room for so many models; the one before is given up while the next one comes."""
LEAST_STORE: Final = 128 << 20
_NEEDED: Final = "it takes two nodes, or one for `store 3`"


class PlacementError(RuntimeError):
    """The experiment cannot run as it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured.

    Attributes:
        model: a folder with safetensors files, on the source's node.
        machines: how many of our own, the source's included; cases that take more are left out.
        gbit_s: of each machine's link, in each direction; None: no namespaces, and no limit.
        cluster: the one whose nodes are the pods, by its name or address; None: pods of our own.
        repeats: how often each case is measured.
        media: by what the model travels.

    """

    model: str
    machines: int | None = 6
    gbit_s: float | None = 1.0
    cluster: str | None = None
    repeats: int = 3
    media: tuple[Medium, ...] = field(default=MEDIA)


class Source:
    """The actor that has the model."""

    def __init__(self) -> None:
        self._data = np.zeros(0, np.uint8)
        self._bucket: Any = None
        self._transport: Any = None

    def read(self, folder: str) -> tuple[int, int]:
        """Read the model's files; returns bytes and checksum of all of them."""
        files = weights(Path(folder))
        self._data = np.concatenate([np.fromfile(path, np.uint8) for path in files])
        return self._data.nbytes, checksum(self._data)

    def put(self) -> list[Any]:
        """Put the model into this pod's store, anew; it stays as long as somebody has the list."""
        import ray

        return [ray.put(self._data)]

    def upload(self, settings: S3Settings) -> Any:
        """Put the model into a bucket; returns what loaders need."""
        from kv.s3 import S3Transport

        self._bucket = Bucket(settings)
        self._transport = S3Transport(self._bucket)
        return self._transport.publish([self._data], _nothing)


class Loader:
    """An actor that needs the model in memory of its own."""

    def __init__(self) -> None:
        self._into = np.zeros(0, np.uint8)
        self._transport: Any = None

    def prepare(self, nbytes: int, settings: S3Settings | None) -> None:
        """Take the memory, and connect."""
        self._into = np.ones(nbytes, np.uint8)
        if settings is not None:
            from kv.s3 import S3Transport

            self._transport = S3Transport(Bucket(settings))

    def from_store(self, held: list[Any]) -> tuple[float, int]:
        """Return the seconds until the model is in memory of this actor's own, and its checksum."""
        import ray

        began = time.perf_counter()
        np.copyto(self._into, ray.get(held[0], timeout=WAIT_S))
        return self._done(began)

    def from_s3(self, ticket: Any) -> tuple[float, int]:
        """See ``from_store``."""
        began = time.perf_counter()
        self._transport.fetch(ticket, [self._into], WAIT_S)
        return self._done(began)

    def _done(self, began: float) -> tuple[float, int]:
        took, found = time.perf_counter() - began, checksum(self._into)
        self._into[:] = 0
        return took, found


def weights(folder: Path) -> list[Path]:
    """Return a model's weight files; raises ``PlacementError`` if it has none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PlacementError(f"--model: {folder} has no *.safetensors; handoff model make {folder}")
    return files


def measure(
    parameters: Parameters,
    out: Path,
    progress: Progress,
    nodes: Mapping[str, NodeOffer] | None = None,
    s3: S3Settings | None = None,
) -> Run:
    """Measure what the file at ``out`` does not have yet, write it there after every case, and return it.

    nodes: of the cluster that this process is connected to, by the pod that each stands for; None: pods of
    our own are brought up. s3: that cluster's bucket.
    """
    there = list(nodes) if nodes is not None else placement.pods(parameters.machines or 0)
    cases = placement.possible(there, parameters.media)
    run = begun(KIND, asdict(parameters), out, progress)
    todo = placement.missing(run.samples, cases, parameters.repeats)
    if not cases:
        raise PlacementError(f"no case is possible in the pods {', '.join(there)}: {_NEEDED}")
    if not todo:
        progress(f"{out} has all {len(cases)} cases; nothing to run")
        return run
    if nodes is None:
        field_ = _own(parameters, there, any(case.medium == "s3" for case in todo), progress)
    else:
        field_ = _given(parameters, nodes, s3)
    with field_ as pods:
        for turn in range(parameters.repeats):
            for case in placement.missing(run.samples, cases, turn + 1):
                if case.medium == "s3" and pods.no_s3 is not None:
                    continue
                sample = pods.load(case)
                progress(f"{case.cell}: {', '.join(f'{value:.2f}' for value in sample['seconds'])} s")
                run = _with(run, parameters, [*run.samples, sample], there, pods)
                save(run, out)
    return run


def _with(run: Run, parameters: Parameters, samples: Sequence[Any], there: Sequence[str], pods: Pods) -> Run:
    left_out = placement.left_out(there, parameters.media)
    if pods.no_s3 is not None and "s3" in parameters.media:
        left_out.append({"case": "s3", "reason": pods.no_s3})
    lines = placement.rows(samples)
    loopback = parameters.cluster is None and parameters.gbit_s is None
    found = placement.conclusions(lines, parameters.gbit_s, pods.nbytes / 1e6, loopback)
    results = {
        "model_bytes": pods.nbytes,
        "pods": pods.names,
        "rows": lines,
        "conclusions": [asdict(one) for one in found],
        "not_measured": left_out,
    }
    return run.end(results, samples)


class Pods:
    """Pods that run, and the actors in them.

    Attributes:
        nbytes: of the model.
        names: the node that each pod is.
        no_s3: why nothing goes through a bucket; None: it does.

    """

    def __init__(
        self,
        ray: Any,
        model: str,
        resources: Mapping[str, str],
        settings: S3Settings | None,
        no_s3: str | None,
        names: Mapping[str, str],
    ) -> None:
        self._ray, self._settings, self.no_s3 = ray, settings, no_s3
        self._resources, self.names = resources, dict(names)
        self._source = self._actor(Source, SOURCE)
        self.nbytes, self._checksum = ray.get(self._source.read.remote(model), timeout=WAIT_S)
        self._loaders: dict[tuple[str, int], Any] = {}
        self._ticket: Any = None

    def close(self) -> None:
        """End the actors."""
        for actor in (self._source, *self._loaders.values()):
            self._ray.kill(actor)

    def _actor(self, kind: type, pod: str) -> Any:
        options: dict[str, Any] = {"num_cpus": 0, "resources": {self._resources[pod]: AT_SHARE}}
        return self._ray.remote(kind).options(**options).remote()

    def load(self, case: Case) -> dict[str, Any]:
        """Measure a case once."""
        slots = [(pod, case.loaders[:index].count(pod)) for index, pod in enumerate(case.loaders)]
        for slot in slots:
            if slot not in self._loaders:
                self._loaders[slot] = loader = self._actor(Loader, slot[0])
                self._ray.get(loader.prepare.remote(self.nbytes, self._settings), timeout=WAIT_S)
                held = self._ray.get(self._source.put.remote(), timeout=WAIT_S)
                self._ray.get(loader.from_store.remote(held), timeout=WAIT_S)  # stores meet; not counted
        loaders = [self._loaders[slot] for slot in slots]
        if case.medium == "s3":
            if self._ticket is None:
                self._ticket = self._ray.get(self._source.upload.remote(self._settings), timeout=WAIT_S)
            asked = [loader.from_s3.remote(self._ticket) for loader in loaders]
        else:
            held = self._ray.get(self._source.put.remote(), timeout=WAIT_S)
            asked = [loader.from_store.remote(held) for loader in loaders]
        answers = self._ray.get(asked, timeout=WAIT_S)
        if wrong := [
            slot for slot, (_, found) in zip(slots, answers, strict=True) if found != self._checksum
        ]:
            raise PlacementError(f"{case.cell}: the model arrived damaged in {wrong}")
        return {
            "case": case.cell,
            "loaders": list(case.loaders),
            "seconds": [round(seconds, 5) for seconds, _ in answers],
        }


@contextlib.contextmanager
def _given(
    parameters: Parameters, nodes: Mapping[str, NodeOffer], settings: S3Settings | None
) -> Iterator[Pods]:
    """The nodes of the cluster that this process is connected to."""
    import ray

    resources = {pod: resource_of(offer) for pod, offer in nodes.items()}
    names = {pod: offer.name for pod, offer in nodes.items()}
    no_s3 = None if settings is not None else "the cluster file has no section `s3`"
    pods = Pods(ray, parameters.model, resources, settings, no_s3, names)
    try:
        for offer in nodes.values():
            if (store := offer.total.get("object_store_memory", 0)) < 2 * pods.nbytes:
                raise PlacementError(
                    f"{offer.name}: object_store is {store / 1e6:.0f} MB, and the model of "
                    f"{pods.nbytes / 1e6:.0f} MB needs twice its size; raise it, or give a smaller --model"
                )
        yield pods
    finally:
        pods.close()


@contextlib.contextmanager
def _own(parameters: Parameters, names: Sequence[str], s3: bool, progress: Progress) -> Iterator[Pods]:
    """Bring the pods up, and the S3 server if it is needed; take them down after the block."""
    import ray

    from cluster.connect import join

    if parameters.gbit_s is not None and (reason := netns.missing()) is not None:
        raise PlacementError(f"{reason}; or give --local: nodes without limited links")
    nbytes = sum(path.stat().st_size for path in weights(Path(parameters.model)))
    store = max(LEAST_STORE, STORE_TIMES * nbytes)
    with contextlib.ExitStack() as stack:
        places, head, server = _places(stack, names, parameters)
        settings, no_s3 = None, None
        if s3:  # before the pods, which find the credentials in their environment
            try:
                found = stack.enter_context(s3_server("versitygw" if server else None, *server))
            except ChildError as error:
                no_s3 = str(error)
                progress(f"s3 is not measured: {no_s3}")
            else:
                settings = found.settings
                progress(f"S3 by {found.kind}")
        progress(f"starting {len(names)} pods: {' '.join(names)}")
        options: list[tuple[str, ...]] = [("--num-cpus=0", f"--object-store-memory={LEAST_STORE}")]
        options += [(f"--resources={json.dumps({f'pod:{name}': 1})}",) for name in names]
        nodes = stack.enter_context(ray_nodes([head, *places], store, options))
        join(nodes.address, Path(nodes.environment["RAY_AUTH_TOKEN_PATH"]))
        stack.callback(ray.shutdown)
        resources = {name: f"pod:{name}" for name in names}
        model = str(Path(parameters.model).resolve())
        yield Pods(ray, model, resources, settings, no_s3, {name: f"pod {name}" for name in names})


Spot = tuple[str, tuple[str, ...]]
"""An address, and what comes before a command that is to run there."""


def _places(
    stack: contextlib.ExitStack, names: Sequence[str], parameters: Parameters
) -> tuple[list[Spot], Spot, tuple[Any, ...]]:
    """Where each pod is, where the head is, and where an S3 server would be."""
    if parameters.gbit_s is None:
        return [(f"127.0.1.{index + 1}", ()) for index in range(len(names))], ("127.0.0.2", ()), ()
    count = 1 + max(int(machine(name)) for name in names)
    network = stack.enter_context(netns.network(count + 1, attach_host=True))
    *machines, apart = network.nodes
    for node in machines:
        node.limit(parameters.gbit_s)
        node.limit_arrivals(parameters.gbit_s)
    of = [machines[int(machine(name))] for name in names]
    assert network.host is not None, "it was asked for"
    return [(node.address, node.prefix) for node in of], (network.host, ()), (apart.address, apart.prefix)


def _nothing() -> None:
    """Nobody waits for the memory."""
