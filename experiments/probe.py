"""The fabric probe: every pair of nodes of a running Ray cluster, and each node, measured in turns.

Nothing is measured at the same time as anything else. Every round measures everything once; what drifts
during a run is spread over all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from cluster.file import ClusterFile
from cluster.names import AT_SHARE, at
from cluster.placement import NodeOffer
from deployments import store
from experiments.probe_map import EACH_NODE, KIND, Place, bus_gbyte_s, rows
from experiments.probe_station import Station
from experiments.probe_tcp import ProbeError
from experiments.results import Run
from kv.bucket import S3Settings

ANSWER_S: Final = 120.0
"""For one measurement, a node's first one with the imports that it needs included."""
MB: Final = 1 << 20
GIGA: Final = 1e9
STORE_SHARE: Final = 4
"""An object takes at most this part of the smallest object store."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured. A megabyte is 2**20 bytes.

    Attributes:
        rounds: how often; no round begins that would end after ``budget_s``.
        seconds: of each measurement of TCP.
        streams: connections at once.
        mbytes: of objects, NIXL's payloads, copies and collectives.
        iperf_s: of each measurement by iperf3; 0: none.
        budget_s: for everything.

    """

    rounds: int = 5
    seconds: float = 1.0
    streams: tuple[int, ...] = (1, 4, 8)
    mbytes: int = 64
    iperf_s: int = 1
    budget_s: float = 600.0


@dataclass(slots=True)
class Found:
    """Everything measured so far."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    ways: dict[Place, str] = field(default_factory=dict)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, place: Place, value: float, turn: int) -> None:
        """Keep a measurement, in the unit of its quantity."""
        self.samples.append({**asdict(place), "value": float(f"{value:.6g}"), "round": turn})

    def not_measured(self, place: Place, reason: str, progress: Progress) -> None:
        """Keep what is missing, and say so once."""
        key = (place.what, place.source if place.target is None else f"{place.source} > {place.target}")
        if key not in self.missing:
            self.missing[key] = reason
            progress(f"{key[0]}, {key[1]}: not measured: {reason}")


class Stations:
    """The actors, one on each node, and how they are asked."""

    def __init__(self, ray: Any, offers: Sequence[NodeOffer]) -> None:
        self._ray = ray
        self.offers = {offer.name: offer for offer in offers}
        self.actors = {name: _station(ray, offer) for name, offer in self.offers.items()}
        self.facts: dict[str, dict[str, Any]] = self.all(dict.fromkeys(self.actors, ("facts",)))

    def ask(self, node: str, method: str, *arguments: Any) -> Any:
        """Return a node's answer. Raises ``ProbeError`` if it has none, or not in time."""
        return self.all({node: (method, *arguments)})[node]

    def all(self, asked: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Return the answers of nodes that are asked at the same time."""
        waiting = {
            node: getattr(self.actors[node], method).remote(*arguments)
            for node, (method, *arguments) in asked.items()
        }
        answers = {}
        for node, reference in waiting.items():
            try:
                answers[node] = self._ray.get(reference, timeout=ANSWER_S)
            except Exception as error:
                what = getattr(error, "cause", None) or error
                text = str(what).strip() or f"no answer to {asked[node][0]} within {ANSWER_S:g} s"
                raise ProbeError(f"{node}: {type(what).__name__}: {text.splitlines()[-1]}") from error
        return answers

    def address(self, node: str) -> str:
        """Return the address that other nodes reach it by."""
        return self.offers[node].address

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors.values():
            self._ray.kill(actor)


def nodes_to_probe(offers: Sequence[NodeOffer]) -> list[NodeOffer]:
    """Return the nodes that take workers; all of them in a cluster that knows no roles."""
    return [offer for offer in offers if offer.roles] or list(offers)


def measure(
    offers: Sequence[NodeOffer], file: ClusterFile | None, parameters: Parameters, progress: Progress
) -> Run:
    """Probe these nodes of the cluster that this process is connected to, and return the map."""
    import ray

    names = [offer.name for offer in offers]
    if len(set(names)) < len(names):
        raise ProbeError(f"nodes share a name: {', '.join(sorted(names))}; give each its own (--node-name)")
    run = Run.begin(KIND, asdict(parameters))
    progress(f"starting a station on {', '.join(names)}")
    stations, found = Stations(ray, offers), Found()
    try:
        probe = _Probe(stations, parameters, found, progress, None if file is None else store.settings(file))
        probe.rounds()
    finally:
        stations.close()
    lines = rows(found.samples, found.ways)
    results = {
        "cluster": None if file is None else file.name,
        "nodes": names,
        "rows": [line.as_json() for line in lines],
        "not_measured": [
            {"what": what, "where": where, "reason": why} for (what, where), why in found.missing.items()
        ],
    }
    return run.end(results, found.samples)


class _Probe:
    """The rounds of one run."""

    def __init__(
        self,
        stations: Stations,
        parameters: Parameters,
        found: Found,
        progress: Progress,
        s3: S3Settings | None,
    ) -> None:
        self.stations, self.parameters, self.found = stations, parameters, found
        self.progress, self.s3 = progress, s3
        self.nodes = list(stations.actors)
        self.ports = stations.all(dict.fromkeys(self.nodes, ("listen",)))
        stores = [int(offer.total.get("object_store_memory", 0)) for offer in stations.offers.values()]
        self.nbytes = parameters.mbytes * MB
        self.object_bytes = min([self.nbytes, *(store // STORE_SHARE for store in stores if store)])

    def rounds(self) -> None:
        """Measure everything, as often as asked for and time allows."""
        began = time.monotonic()
        for turn in range(self.parameters.rounds):
            for what, step in self._steps():
                try:
                    step(turn)
                except ProbeError as error:
                    self.found.not_measured(what, str(error), self.progress)
            self.progress(f"round {turn + 1} of {self.parameters.rounds}")
            each = (time.monotonic() - began) / (turn + 1)
            if time.monotonic() + each - began > self.parameters.budget_s:
                if turn + 1 < self.parameters.rounds:
                    self.progress(f"no time for another round within {self.parameters.budget_s:g} s")
                break

    def _steps(self) -> Iterator[tuple[Place, Callable[[int], None]]]:
        for node in self.nodes:
            yield Place("memory copy", node), partial(self._copy, node)
            for device in self.stations.facts[node]["devices"]:
                yield Place("to device", node, device=device), partial(self._device, node, device)
            if self.s3 is not None:
                yield Place("s3 put", node), partial(self._s3, node)
        for source in self.nodes:
            for target in self.nodes:
                if source != target:
                    yield from self._pair(source, target)
        for index, one in enumerate(self.nodes):
            for other in self.nodes[index + 1 :]:
                yield Place("all-reduce", one, other), partial(self._all_reduce, (one, other))
        if len(self.nodes) > 2:
            yield Place("all-reduce", EACH_NODE), partial(self._all_reduce, tuple(self.nodes))

    def _pair(self, source: str, target: str) -> Iterator[tuple[Place, Callable[[int], None]]]:
        yield Place("round trip", source, target), partial(self._round_trip, source, target)
        for streams in self.parameters.streams:
            yield Place("tcp", source, target, streams), partial(self._tcp, source, target, streams)
            if self.parameters.iperf_s:
                yield Place("iperf3", source, target, streams), partial(self._iperf, source, target, streams)
        yield Place("object store", source, target), partial(self._object, source, target)
        yield Place("nixl", source, target), partial(self._nixl, source, target)

    # -- links ----------------------------------------------------------------------------------------

    def _round_trip(self, source: str, target: str, turn: int) -> None:
        where = (self.stations.address(target), self.ports[target])
        value = self.stations.ask(source, "round_trip_us", *where)
        self.found.add(Place("round trip", source, target), value, turn)

    def _tcp(self, source: str, target: str, streams: int, turn: int) -> None:
        where = (self.stations.address(target), self.ports[target])
        value = self.stations.ask(source, "rate_gbit_s", *where, streams, self.parameters.seconds)
        self.found.add(Place("tcp", source, target, streams), value, turn)

    def _iperf(self, source: str, target: str, streams: int, turn: int) -> None:
        lacking = [node for node in (source, target) if not self.stations.facts[node]["iperf3"]]
        if lacking:
            raise ProbeError(f"iperf3 not found on {', '.join(lacking)}: apt-get install iperf3")
        port = self.stations.ask(target, "iperf_listen")
        where = (self.stations.address(target), port)
        value = self.stations.ask(source, "iperf_gbit_s", *where, streams, self.parameters.iperf_s)
        self.found.add(Place("iperf3", source, target, streams), value, turn)

    def _object(self, source: str, target: str, turn: int) -> None:
        nbytes = self.object_bytes
        held = self.stations.ask(source, "put", nbytes)
        sent = self.stations.ask(source, "sent_bytes")
        seconds = self.stations.ask(target, "get", held, nbytes)
        self._crossed(source, sent, nbytes)
        self.found.add(Place("object store", source, target), nbytes * 8 / seconds / GIGA, turn)

    def _nixl(self, source: str, target: str, turn: int) -> None:
        lacking = [node for node in (source, target) if not self.stations.facts[node]["nixl"]]
        if lacking:
            raise ProbeError(f"nixl is not installed on {', '.join(lacking)} (the extra `nixl`)")
        one, other = self.stations.facts[source], self.stations.facts[target]
        apart = one["machine"] == other["machine"] and one["network"] != other["network"]
        ticket = self.stations.ask(source, "nixl_publish", self.nbytes, apart)
        place = Place("nixl", source, target)
        fetch = partial(self.stations.ask, target, "nixl_fetch", ticket, self.nbytes, apart)
        if turn == 0:
            fetch()  # agents meet at the first one
        sent = self.stations.ask(source, "sent_bytes")
        seconds, self.found.ways[place] = fetch()
        if apart:
            self._crossed(source, sent, self.nbytes)
        self.found.add(place, self.nbytes * 8 / seconds / GIGA, turn)

    def _crossed(self, source: str, sent: int, nbytes: int) -> None:
        """Raise unless the bytes left the source over its interface. RDMA's are not counted there."""
        left = self.stations.ask(source, "sent_bytes") - sent
        if left < nbytes:
            raise ProbeError(f"only {left} of {nbytes} bytes left {source} over its network interface")

    # -- collectives ----------------------------------------------------------------------------------

    def _all_reduce(self, nodes: tuple[str, ...], turn: int) -> None:
        master = f"{self.stations.address(nodes[0])}:{self.stations.ask(nodes[0], 'free_port')}"
        joined = {node: ("meet", master, rank, len(nodes)) for rank, node in enumerate(nodes)}
        place = Place("all-reduce", *nodes) if len(nodes) == 2 else Place("all-reduce", EACH_NODE)
        try:
            backends = self.stations.all(joined)
            self.stations.all(dict.fromkeys(nodes, ("all_reduce_s", MB)))  # connections are made
            times = self.stations.all(dict.fromkeys(nodes, ("all_reduce_s", self.nbytes)))
        finally:
            self.stations.all(dict.fromkeys(nodes, ("part",)))
        self.found.ways[place] = ", ".join(sorted(set(backends.values())))
        self.found.add(place, bus_gbyte_s(self.nbytes, len(nodes), max(times.values())), turn)

    # -- each node ------------------------------------------------------------------------------------

    def _copy(self, node: str, turn: int) -> None:
        seconds = self.stations.ask(node, "copy_s", self.nbytes)
        self.found.add(Place("memory copy", node), self.nbytes / seconds / GIGA, turn)

    def _device(self, node: str, device: str, turn: int) -> None:
        times = self.stations.ask(node, "device_s", device, self.nbytes)
        for what, seconds in zip(("to device", "from device"), times, strict=True):
            self.found.add(Place(what, node, device=device), self.nbytes / seconds / GIGA, turn)

    def _s3(self, node: str, turn: int) -> None:
        times = self.stations.ask(node, "s3_s", self.s3, self.nbytes)
        for what, seconds in zip(("s3 put", "s3 get"), times, strict=True):
            self.found.add(Place(what, node), self.nbytes * 8 / seconds / GIGA, turn)


def resource_of(offer: NodeOffer) -> str:
    """Return what pins an actor to a node: our own resource, or Ray's if it is no node of a cluster file."""
    own = at(offer.name)
    return own if own in offer.total else f"node:{offer.address}"


def _station(ray: Any, offer: NodeOffer) -> Any:
    """A station on a node. It takes the node's free GPUs, without which Ray would show it none."""
    gpus, resources = offer.free.get("GPU", 0.0), {resource_of(offer): AT_SHARE}
    return ray.remote(Station).options(num_cpus=0, num_gpus=gpus, resources=resources).remote(offer.address)
