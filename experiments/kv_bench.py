"""How fast KV crosses from one paged cache into another, over every transport, against what the link can do.

Two ends (``experiments/kv_station.py``) run the product's own sender and receiver: whole blocks, cut into
chunks as prefill cuts them, checksums computed by the sender and verified by the receiver. Only the
announcements, which are actor calls between workers, go over a local socket here. On the same link, in turns
with the transports: iperf3, ``torch.save`` over a socket, and ``ray.put``/``ray.get`` of the whole cache; and
plain copies of memory. Rates count from the first checksum at the sender to the last one that the receiver
has verified.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final

import psutil

from actors import decode, prefill
from cluster import netns
from experiments.children import ChildError, child
from experiments.kv_station import BASELINES, MB, NEEDS_RAY, NEEDS_S3, TRANSPORTS, Client, Place, Spent
from experiments.ray_nodes import RayNodes, ray_nodes
from experiments.results import Run
from experiments.s3_server import s3_server
from kv.bucket import S3Settings
from kv.ladder import PROBE_SIZES

KIND: Final = "bench-kv"
Progress = Callable[[str], None]

SAME_NODE: Final = "same-node"
LINKS: Final[Mapping[str, float | None]] = {
    SAME_NODE: None,
    "cross-node": None,
    "cross-node-10g": 10.0,
    "cross-node-1g": 1.0,
}
"""Gbit/s that a link is limited to."""
MEMORY_COPY, IPERF3 = "memory copy", "iperf3"
IPERF_STREAMS: Final = (1, 2, 4)
IPERF_S: Final = 1
FIRST_MBYTES: Final = 109
PROBE_MBYTES: Final = max(PROBE_SIZES) // MB
"""Workers that meet send each other as much over every transport, before any request."""
START_END: Final = "from experiments.kv_station import main; main()"
COARSE_S: Final = 0.5
"""The machine counts its CPU time in hundredths of a second, and what surrounds a transfer is in it too."""
PIECES: Final = (1, 2, 4, 8, 16, 32)
"""Megabytes. Sizes of a chunk whose curve is measured."""
S3_MBYTES: Final = 512
"""More does not go through a bucket at once: servers write slowly."""
MAX_MBYTES: Final = 4096
"""Largest amount of KV that crosses at once, and so the receiver's cache at most."""
OBJECT_STORE: Final = 1 << 30
"""Bytes, for each of the Ray nodes."""


class BenchError(RuntimeError):
    """The bench cannot run as it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured. A megabyte is 2**20 bytes.

    Attributes:
        mbytes: KV of one request.
        concurrency: how many requests at once.
        links: names in ``LINKS``.
        transports: names in ``kv_station.TRANSPORTS``.
        baselines: names in ``kv_station.BASELINES``; one request at a time only.
        rounds: how often each case is measured; all cases take turns.
        case_s: a case that has taken this long is not measured again.
        longest_s: a case that would take longer at the link's limit is left out.
        once_s: so is a case that would take longer at the rate its transport has reached on the link.
        budget_s: no round begins that would end later than this; every link gets its share of it.
        pieces: whether the curve over chunk sizes is measured.

    """

    mbytes: tuple[int, ...] = (1, 16, 109, 512)
    concurrency: tuple[int, ...] = (1, 8)
    links: tuple[str, ...] = tuple(LINKS)
    transports: tuple[str, ...] = tuple(TRANSPORTS)
    baselines: tuple[str, ...] = tuple(BASELINES)
    rounds: int = 5
    case_s: float = 3.0
    longest_s: float = 3.0
    once_s: float = 10.0
    budget_s: float = 450.0
    pieces: bool = True
    chunk_bytes: int = field(default_factory=lambda: prefill.MAX_CHUNK_BYTES)
    fetch_threads: int = field(default_factory=lambda: decode.FETCH_THREADS)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure: so many requests at once, each of that size, one way."""

    transport: str
    link: str
    mbytes: int
    concurrency: int

    @property
    def nbytes(self) -> int:
        """Bytes that cross."""
        return self.mbytes * self.concurrency * MB


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        case: of what.
        seconds: from the first checksum to the last one verified.
        cpu_s: CPU time of both ends, and of Ray's services where they carry it.
        busy_s: CPU time of the whole machine.
        peak_bytes: by how much both ends' memory grew at most, together.
        first: the first one over a transport that has just been opened.
        piece: chunk size in megabytes, where it is not the product's.

    """

    case: Case
    seconds: float
    cpu_s: float
    busy_s: float
    peak_bytes: int
    first: bool = False
    piece: int | None = None

    @property
    def gbit_s(self) -> float:
        """The rate."""
        return self.case.nbytes * 8 / self.seconds / 1e9

    def as_json(self) -> dict[str, Any]:
        """Return the raw sample."""
        return {
            **asdict(self.case),
            "seconds": round(self.seconds, 6),
            "cpu_s": round(self.cpu_s, 6),
            "busy_s": round(self.busy_s, 3),
            "peak_bytes": self.peak_bytes,
            "first": self.first,
            "piece": self.piece,
        }


@dataclass(slots=True)
class Found:
    """Everything measured so far, and how long may be measured on."""

    ends_at: float = float("inf")
    links_left: int = 1
    samples: list[Sample] = field(default_factory=list)
    iperf: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[tuple[str, int], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    missing: list[dict[str, str]] = field(default_factory=list)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the raw samples."""
        iperf = [
            {"transport": IPERF3, "link": link, "concurrency": streams, "gbit_s": rate}
            for (link, streams), rates in self.iperf.items()
            for rate in rates
        ]
        copies = [
            {"transport": MEMORY_COPY, "link": link, "mbytes": mbytes, "seconds": copy, "checksum_s": check}
            for (link, mbytes), times in self.copies.items()
            for copy, check in times
        ]
        return [*(sample.as_json() for sample in self.samples), *iperf, *copies]

    def next_link(self) -> float:
        """Return until when the next link may be measured."""
        share = (self.ends_at - time.monotonic()) / max(1, self.links_left)
        self.links_left -= 1
        return time.monotonic() + share

    def not_measured(self, what: str, link: str, reason: str, progress: Progress) -> None:
        """Keep what is missing, and say so."""
        self.missing.append({"what": what, "link": link, "reason": reason})
        progress(f"{link}: {what} is not measured: {reason}")


def measure(parameters: Parameters, progress: Progress) -> Run:
    """Measure everything, and return the run."""
    _check(parameters)
    run = Run.begin(KIND, asdict(parameters))
    found = Found(time.monotonic() + parameters.budget_s, len(parameters.links))
    if SAME_NODE in parameters.links:
        with ends_at([("127.0.0.1", ()), ("127.0.0.1", ())], SAME_NODE, parameters, found, progress) as ends:
            _measure_link(ends, SAME_NODE, parameters, found, progress)
    if links := [link for link in parameters.links if link != SAME_NODE]:
        if (reason := netns.missing()) is not None:
            for link in links:
                found.not_measured("everything", link, reason, progress)
        else:
            with netns.network(2, attach_host=True) as network:  # for the S3 server, made ready from here
                places = [(node.address, node.prefix) for node in network.nodes]
                with ends_at(places, "cross-node", parameters, found, progress) as ends:
                    for link in links:
                        if (limit := LINKS[link]) is not None:
                            network.limit(limit)
                        _measure_link(ends, link, parameters, found, progress)
                        if limit is not None:
                            network.limit(None)
    return run.end(summary(found, parameters), found.as_json())


def _check(parameters: Parameters) -> None:
    if unknown := [link for link in parameters.links if link not in LINKS]:
        raise BenchError(f"link: {unknown[0]!r} is not known; one of {', '.join(LINKS)}")
    if unknown := [name for name in parameters.transports if name not in TRANSPORTS]:
        raise BenchError(f"transport: {unknown[0]!r} is not known; one of {', '.join(TRANSPORTS)}")
    if bad := [size for size in parameters.mbytes if not 1 <= size <= MAX_MBYTES]:
        raise BenchError(f"mbytes: must be between 1 and {MAX_MBYTES}, not {bad[0]}")
    needed = sum(_blocks(parameters)) * MB + 3 * OBJECT_STORE
    if (free := psutil.virtual_memory().available) < needed:
        raise BenchError(
            f"the bench needs {needed / 2**30:.1f} GiB of free memory, {free / 2**30:.1f} GiB are free; "
            f"give smaller sizes (--mbytes)"
        )


def _blocks(parameters: Parameters) -> tuple[int, int]:
    """Return how many blocks, of a megabyte each, the sender's and the receiver's caches have.

    More than one case needs, so that a transfer seldom finds its blocks in the processor's caches. What is
    sent eight times at once may be the same KV, what is received may not.
    """
    most = max([*parameters.mbytes, FIRST_MBYTES if parameters.pieces else 1])
    return max(2 * most, 256), max(256, 2 * most, min(most * max(parameters.concurrency), MAX_MBYTES))


# -- the two ends --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends, and what is around them."""

    sender: Client
    receiver: Client
    places: Sequence[tuple[str, Sequence[str]]]
    ray: RayNodes | None
    usable: Sequence[str]
    """Transports and baselines that could be opened."""


@contextlib.contextmanager
def ends_at(
    places: Sequence[tuple[str, Sequence[str]]],
    where: str,
    parameters: Parameters,
    found: Found,
    progress: Progress,
) -> Iterator[Ends]:
    """Start a sender at the first place and a receiver at the second, (address, command prefix) each."""
    with contextlib.ExitStack() as stack:
        wanted = [*parameters.transports, *parameters.baselines]
        if "s3" not in wanted:  # then its baseline is not worth a server
            wanted = [name for name in wanted if name not in NEEDS_S3]
        ray = None
        if NEEDS_RAY & set(wanted):
            nodes = places if places[0] != places[1] else places[:1]
            progress(f"{where}: starting {len(nodes)} Ray nodes")
            ray = stack.enter_context(ray_nodes(nodes, OBJECT_STORE))
        progress(f"{where}: starting both ends")
        s3 = _s3(stack, places[0], where, wanted, found, progress)
        key = secrets.token_bytes(32)
        peers, sides = socket.socketpair(), socket.socketpair()
        for pair in (peers, sides):
            for end in pair:
                stack.callback(end.close)
        clients = []
        environment = dict(ray.environment) if ray else {}
        if places[0] != places[1]:  # one machine: UCX would read the other namespace's memory, past the link
            environment["UCX_TLS"] = "tcp"
        for index, (role, blocks) in enumerate(zip(("sender", "receiver"), _blocks(parameters), strict=True)):
            ours, theirs = socket.socketpair()
            inherited = [theirs.fileno(), peers[index].fileno(), sides[index].fileno()]
            address, prefix = places[index]
            argv = ["-c", START_END, role, *map(str, inherited)]
            running = stack.enter_context(child(role, argv, environment, prefix=prefix, pass_fds=inherited))
            theirs.close()
            commands = stack.enter_context(Connection(ours.detach()))
            client = Client(role, commands, running.check)
            client.call(
                "place",
                Place(
                    address,
                    places[1 - index][0],
                    key,
                    ray.address if ray else None,
                    blocks,
                    7 if index == 0 else 0,
                    s3,
                ),
            )
            clients.append(client)
        sender, receiver = clients
        for client in clients:
            client.result()
        usable = []
        for name in wanted:
            if name in NEEDS_S3 and s3 is None:
                continue
            try:
                _open(sender, receiver, name, places[1][0])
            except RuntimeError as error:
                found.not_measured(name, where, str(error), progress)
            else:
                usable.append(name)
        yield Ends(sender, receiver, places, ray, usable)


def _s3(
    stack: contextlib.ExitStack,
    place: tuple[str, Sequence[str]],
    where: str,
    wanted: Sequence[str],
    found: Found,
    progress: Progress,
) -> S3Settings | None:
    """Start an S3 server beside the sender, if something needs it: what is fetched crosses the link."""
    names = sorted(NEEDS_S3 & set(wanted))
    if not names:
        return None
    address, prefix = place
    kind = None if where == SAME_NODE else "versitygw"  # another server would not be on the link
    try:
        server = stack.enter_context(s3_server(kind, address, prefix))
    except ChildError as error:
        for name in names:
            found.not_measured(name, where, str(error), progress)
        return None
    progress(f"{where}: S3 by {server.kind}")
    return server.settings


def _open(sender: Client, receiver: Client, name: str, address: str) -> None:
    if name in TRANSPORTS:
        for end in (receiver, sender):
            end("open", name)
        return
    port = receiver("plain", name, "")
    sender("plain", name, f"{address}:{port}")


# -- measuring -----------------------------------------------------------------------------------------


def _measure_link(ends: Ends, link: str, parameters: Parameters, found: Found, progress: Progress) -> None:
    until = found.next_link()
    cases = _cases(ends, link, parameters, found, progress)
    for name in ends.usable:  # before anything else has warmed anything but what workers do when they meet
        if name in TRANSPORTS and LINKS[link] is None and FIRST_MBYTES in parameters.mbytes:
            with contextlib.suppress(RuntimeError):  # it will fail again below, and be told there
                transfer(ends, Case(name, link, PROBE_MBYTES, 1))
            sample = _measure_case(ends, Case(name, link, FIRST_MBYTES, 1), found, progress, first=True)
            if sample is not None:
                progress(f"{link}: {name}, the first {FIRST_MBYTES} MB: {sample.gbit_s:.1f} Gbit/s")
    iperf = shutil.which(IPERF3)
    if iperf is None:
        found.not_measured(IPERF3, link, "iperf3 not found: apt-get install iperf3", progress)
    spent: dict[Case, float] = defaultdict(float)
    for number in range(parameters.rounds):
        began = time.monotonic()
        if iperf is not None:
            for streams in IPERF_STREAMS:
                found.iperf[link, streams].append(iperf3_gbit_s(ends.places, streams))
        for mbytes in parameters.mbytes:
            found.copies[link, mbytes].append(ends.receiver("copy_rate", mbytes))
        turn = [case for case in cases if spent[case] < parameters.case_s]
        random.Random(number).shuffle(turn)
        if number == 0:
            turn.sort(key=lambda case: case.nbytes)  # what is small says how long the others will take
        for case in turn:
            if (expected := _expected_s(case, found)) > parameters.once_s:
                what = f"{case.transport}, {case.mbytes} MB x {case.concurrency}"
                found.not_measured(what, link, f"it would take {expected:.0f} s", progress)
                spent[case] = parameters.case_s
                continue
            sample = _measure_case(ends, case, found, progress)
            spent[case] += sample.seconds if sample is not None else parameters.case_s
        progress(f"{link}: round {number + 1} of {parameters.rounds}{_so_far(found, link)}")
        if 2 * time.monotonic() - began > until and number + 1 < parameters.rounds:
            progress(f"{link}: no time for another round")
            break
    if parameters.pieces and LINKS[link] is None:
        _measure_pieces(ends, link, parameters, found, progress)


def _expected_s(case: Case, found: Found) -> float:
    """Return how long a case will take at the best rate that its transport has reached on its link."""
    rates = [
        sample.gbit_s
        for sample in found.samples
        if (sample.case.transport, sample.case.link) == (case.transport, case.link)
    ]
    return case.nbytes * 8 / 1e9 / max(rates) if rates else 0.0


def _measure_case(
    ends: Ends, case: Case, found: Found, progress: Progress, first: bool = False, piece: int | None = None
) -> Sample | None:
    """Measure a case and keep the sample; None if it failed, which is kept too."""
    try:
        sample = transfer(ends, case, first, piece)
    except RuntimeError as error:
        what = f"{case.transport}, {case.mbytes} MB x {case.concurrency}"
        found.not_measured(what, case.link, str(error), progress)
        return None
    found.samples.append(sample)
    return sample


def _cases(ends: Ends, link: str, parameters: Parameters, found: Found, progress: Progress) -> list[Case]:
    cases = []
    for mbytes in parameters.mbytes:
        for concurrency in parameters.concurrency:
            shape = f"{mbytes} MB x {concurrency}"
            limit = LINKS[link]
            if limit is not None and mbytes * concurrency * MB * 8 / limit / 1e9 > parameters.longest_s:
                reason = f"it would take more than {parameters.longest_s:g} s each time"
                found.not_measured(shape, link, reason, progress)
            elif mbytes * concurrency > MAX_MBYTES:
                found.not_measured(shape, link, f"more than {MAX_MBYTES} MB at once", progress)
            else:
                if NEEDS_S3 & set(ends.usable) and mbytes * concurrency > S3_MBYTES:
                    reason = f"more than {S3_MBYTES} MB at once through a bucket"
                    found.not_measured(f"s3, {shape}", link, reason, progress)
                cases += [
                    Case(name, link, mbytes, concurrency)
                    for name in ends.usable
                    if (name in TRANSPORTS or concurrency == 1)
                    and (name not in NEEDS_S3 or mbytes * concurrency <= S3_MBYTES)
                ]
    return cases


def transfer(ends: Ends, case: Case, first: bool = False, piece: int | None = None) -> Sample:
    """Measure one case once. Raises RuntimeError if anything does not arrive, or not as it was sent."""
    ray = ends.ray if case.transport in NEEDS_RAY else None
    before = ray.cpu_s() if ray is not None else 0.0
    crossed = ends.sender("link_bytes") if case.link != SAME_NODE else 0
    requests = [secrets.token_hex(6) for _ in range(case.concurrency)]
    if case.transport in TRANSPORTS:
        ends.receiver("expect", case.transport, requests, case.mbytes)
    busy = _busy_s()
    if case.transport in TRANSPORTS:
        ends.receiver.call("received")
        ends.sender.call("send", case.transport, requests, case.mbytes)
    else:
        ends.receiver.call("baseline", case.transport, case.mbytes)
        ends.sender.call("baseline", case.transport, case.mbytes)
    began, sent, received = _results(ends)
    busy = _busy_s() - busy
    if case.link != SAME_NODE and (crossed := ends.sender("link_bytes") - crossed) < case.nbytes:
        raise RuntimeError(
            f"only {crossed} of {case.nbytes} bytes crossed the link: the others went another way"
        )
    cpu_s = sent.cpu_s + received.cpu_s
    if ray is not None:
        cpu_s += ray.cpu_s() - before
    peak = sent.peak_bytes + received.peak_bytes
    return Sample(case, received.at - began, cpu_s, busy, peak, first, piece)


def _results(ends: Ends) -> tuple[float, Spent, Spent]:
    """Return when it began, and what both ends spent. If one failed, the other's answer is taken as well."""
    try:
        received: Spent = ends.receiver.result()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            ends.sender.result()
        raise
    began, sent = ends.sender.result()
    return began, sent, received


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def iperf3_gbit_s(places: Sequence[tuple[str, Sequence[str]]], streams: int) -> float:
    """Return Gbit/s from the first place to the second; places are (address, command prefix)."""
    address, prefix = places[1]
    argv = [*prefix, IPERF3, "-s", "-1", "-B", address, "-p", "5201", "--forceflush"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            while "Server listening" not in (line := server.stdout.readline()):
                if not line:
                    raise BenchError("the iperf3 server ended before it listened; is port 5201 in use?")
            argv = [*places[0][1], IPERF3, "-c", address, "-p", "5201", "-J"]
            argv += ["-t", str(IPERF_S), "-P", str(streams)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
            if done.returncode:
                raise BenchError(f"iperf3 failed: {done.stdout.strip() or done.stderr.strip()}")
            return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 1e9)
        finally:
            server.kill()


def _measure_pieces(ends: Ends, link: str, parameters: Parameters, found: Found, progress: Progress) -> None:
    names = [name for name in ends.usable if name in TRANSPORTS]
    for _ in range(min(3, parameters.rounds)):
        for piece in PIECES:
            for name in names:
                ends.sender("open", name, piece * MB)
                _measure_case(ends, Case(name, link, FIRST_MBYTES, 1), found, progress, piece=piece)
    for name in names:
        ends.sender("open", name, parameters.chunk_bytes)
    progress(f"{link}: chunk sizes measured")


def _so_far(found: Found, link: str) -> str:
    rates = defaultdict(list)
    for sample in found.samples:
        if sample.case.link == link and (sample.case.mbytes, sample.case.concurrency) == (FIRST_MBYTES, 1):
            rates[sample.case.transport].append(sample.gbit_s)
    parts = [f"{name} {median(values):.1f}" for name, values in rates.items()]
    if (limit := _iperf3_limit(found, link)) is not None:
        parts.append(f"iperf3 {limit:.1f}")
    return f"; {FIRST_MBYTES} MB so far, Gbit/s: {', '.join(parts)}" if parts else ""


# -- summary -------------------------------------------------------------------------------------------


def summary(found: Found, parameters: Parameters) -> dict[str, Any]:
    """Return rows, the curve over chunk sizes, and what is missing."""
    groups: dict[Case, list[Sample]] = defaultdict(list)
    pieces: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for sample in found.samples:
        case = sample.case
        if sample.piece is not None:
            pieces[case.transport, case.link, sample.piece].append(sample.gbit_s)
        if sample.piece in (None, parameters.chunk_bytes // MB):
            groups[case].append(sample)
    rows = [_row(case, samples, found) for case, samples in groups.items()]
    rows += [_copy_row(link, mbytes, times) for (link, mbytes), times in found.copies.items()]
    rows += [_limit_row(link, streams, rates) for (link, streams), rates in found.iperf.items()]
    return {
        "rows": rows,
        "pieces": [
            {"transport": name, "link": link, "piece_mbytes": piece, "gbit_s_p50": _digits(median(rates))}
            for (name, link, piece), rates in pieces.items()
        ],
        "checksum_gbyte_s": {
            f"{link}, {mbytes} MB": _digits(mbytes * MB / median(checked for _, checked in times) / 1e9)
            for (link, mbytes), times in found.copies.items()
        },
        "not_measured": found.missing,
    }


def _row(case: Case, samples: Sequence[Sample], found: Found) -> dict[str, Any]:
    rate = median(sample.gbit_s for sample in samples)
    name, limit = _limit(case, found)
    first = next((sample.gbit_s for sample in samples if sample.first), None)
    nbytes = case.nbytes * len(samples)
    return {
        "case": f"{case.link}/{case.transport}/{case.mbytes}x{case.concurrency}",
        **asdict(case),
        "gbit_s_p50": _digits(rate),
        "gbit_s_first": None if first is None else _digits(first),
        "limit": name,
        "limit_gbit_s": None if limit is None else _digits(limit),
        "ratio": None if limit is None else round(rate / limit, 3),
        "cpu_s_per_gb": round(sum(sample.cpu_s for sample in samples) / nbytes * 1e9, 3),
        "cores_busy": _cores_busy(samples),
        "peak_mbytes": round(max(sample.peak_bytes for sample in samples) / MB),
        "checksum": case.transport in TRANSPORTS,
        "samples": len(samples),
    }


def _cores_busy(samples: Sequence[Sample]) -> float | None:
    """Return how many cores of the machine were at work; None for what is over too soon to say."""
    seconds = sum(sample.seconds for sample in samples)
    if seconds / len(samples) < COARSE_S:
        return None
    return round(sum(sample.busy_s for sample in samples) / seconds, 2)


def _limit(case: Case, found: Found) -> tuple[str, float | None]:
    """What the rate is compared with.

    Two copies of memory where the object store of one node does them; a plain client of the same server.
    """
    if case.transport in NEEDS_S3:
        same = Case("s3 plain", case.link, case.mbytes, 1)
        plain = [one.gbit_s for one in found.samples if one.case == same and one.piece is None]
        return same.transport, median(plain) if plain else None
    if case.link == SAME_NODE and case.transport in NEEDS_RAY:
        times = found.copies.get((case.link, case.mbytes))
        rate = None if not times else case.mbytes * MB * 8 / median(copy for copy, _ in times) / 1e9 / 2
        return "two memory copies", rate
    return IPERF3, _iperf3_limit(found, case.link)


def _iperf3_limit(found: Found, link: str) -> float | None:
    rates = [median(rates) for (where, _), rates in found.iperf.items() if where == link]
    return max(rates, default=None)


def _copy_row(link: str, mbytes: int, times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    rate = _digits(mbytes * MB * 8 / median(copy for copy, _ in times) / 1e9)
    return _baseline_row(Case(MEMORY_COPY, link, mbytes, 1), rate, len(times))


def _limit_row(link: str, streams: int, rates: Sequence[float]) -> dict[str, Any]:
    return _baseline_row(Case(IPERF3, link, 0, streams), _digits(median(rates)), len(rates))


def _baseline_row(case: Case, rate: float, samples: int) -> dict[str, Any]:
    return {
        "case": f"{case.link}/{case.transport}/{case.mbytes}x{case.concurrency}",
        **asdict(case),
        "gbit_s_p50": rate,
        "limit": case.transport,
        "limit_gbit_s": rate,
        "ratio": 1.0,
        "cpu_s_per_gb": None,
        "checksum": False,
        "samples": samples,
    }


def _digits(rate: float) -> float:
    return round(rate, 3)
