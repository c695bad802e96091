"""The bring-up for real: Ray nodes, the fabric between them, and vLLM in stages, one on each.

Nodes are network namespaces whose links are limited, or, without root, on loopback. Every finished engine is
kept in the file with its answers, and is not run again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from cluster import netns
from cluster.names import AT_SHARE, AT_UNITS, at
from cluster.nodes import snapshot
from cluster.placement import NodeOffer
from experiments import pipeline, plan
from experiments.mesh_run import slow
from experiments.pipeline import KIND, STREAMS, Setup, Split
from experiments.pipeline_reference import Reference, reference
from experiments.plan_model import Shape, read
from experiments.probe import MB, Stations
from experiments.probe_map import EACH_NODE, Place, bus_gbyte_s
from experiments.probe_map import rows as fabric_rows
from experiments.ray_nodes import RayNodes, ray_nodes
from experiments.results import Run, save
from experiments.suite import begun

Progress = Callable[[str], None]
OBJECT_STORE: Final = 128 << 20
KV_BYTES: Final = 256 << 20
CHUNK: Final = 512
START_S: Final = 300.0
ANSWER_S: Final = 300.0
FREED_S: Final = 60.0
REDUCED: Final = 16 * MB
IPERF_S: Final = 1
TOLD_EVERY_S: Final = 10.0
ENVIRONMENT: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "OMP_NUM_THREADS": "1",  # as the undivided engine's: kernels round by it
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles small functions even for eager engines
    "HF_HUB_OFFLINE": "1",
}


class PipelineError(RuntimeError):
    """The experiment cannot run as it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """What is measured.

    Attributes:
        model: a local folder.
        sizes: numbers of stages.
        gbit_s: of each node's link, each way; None: loopback, no limit.
        slow: share of its time that the slow node may compute; None: no node is made slow.
        prompts: lengths of the held-out prompts in tokens, if they are still to be made.
        tokens: of their answers, likewise.
        reference: file of the held-out answers.
        repeats: how often every prompt is asked, and the fabric measured.

    """

    model: str
    sizes: tuple[int, ...] = (1, 2, 3)
    gbit_s: float | None = 1.0
    slow: float | None = 0.33
    prompts: tuple[int, ...] = (16, 256, 1500)
    tokens: int = 17
    reference: str = "results/references/pipeline.json"
    repeats: int = 3

    def engine(self, context: int) -> dict[str, Any]:
        """vLLM options of every engine, the undivided one included."""
        return {
            "max_model_len": -(-context // 128) * 128,
            "max_num_batched_tokens": CHUNK,
            "kv_cache_memory_bytes": KV_BYTES,
            "enforce_eager": True,
            "enable_prefix_caching": False,  # every prompt is asked again
        }


def measure(parameters: Parameters, out: Path, progress: Progress) -> Run:
    """Measure what the file at ``out`` does not have yet, write it there after every part, and return it."""
    _check(parameters)
    shape = read(parameters.model)
    run = begun(KIND, asdict(parameters), out, progress)
    wanted = pipeline.setups(parameters.sizes, parameters.slow)
    if not (_answers_missing(run.samples, wanted, parameters) or _fabric_missing(run.samples, parameters)):
        progress(f"{out} has all of it; delete it to measure again")
        return run
    # What the planner refuses, it refuses before anything is started.
    _engines(
        shape,
        wanted,
        parameters,
        pipeline.link_of([], parameters.gbit_s),
        plan.Load(max(parameters.prompts), parameters.tokens, 1),
    )
    context = max(parameters.prompts) + parameters.tokens
    held = reference(
        Path(parameters.reference),
        Path(parameters.model),
        parameters.prompts,
        parameters.tokens,
        parameters.engine(context),
        progress,
    )
    with _nodes(parameters, progress) as nodes:
        turns = range(_fabric_done(run.samples), parameters.repeats)
        with contextlib.closing(nodes.fabric(turns, progress)) as rounds:
            for taken in rounds:
                run = _with(run, parameters, [*run.samples, *taken], held)
                save(run, out)
        link = pipeline.link_of(run.results.get("fabric", []), parameters.gbit_s)
        load = plan.Load(max(len(one["prompt"]) for one in held.requests), parameters.tokens, 1)
        for layers, group in _engines(shape, wanted, parameters, link, load).items():
            todo = [one for one in group if one[0] in _answers_missing(run.samples, wanted, parameters)]
            if not todo:
                continue
            progress(f"{'/'.join(map(str, layers))}: starting an engine of {len(layers)} on Ray")
            with nodes.engine(layers, parameters.engine(held.longest), progress) as engine:
                for setup, split in todo:
                    facts, answers = engine.measure(setup, split, shape, held, progress)
                    run = _with(run, parameters, [*_without(run.samples, setup), facts, *answers], held)
                    save(run, out)
    return run


def _check(parameters: Parameters) -> None:
    folder = Path(parameters.model)
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise PipelineError(
            f"--model: {folder} has no config.json and *.safetensors; give a local folder, or "
            f"handoff model make {folder}"
        )
    if parameters.gbit_s is not None and (reason := netns.missing()) is not None:
        raise PipelineError(f"{reason}; or give --local: all nodes on loopback, without limits")
    if parameters.tokens < 2:
        raise PipelineError(f"--tokens is {parameters.tokens}; the time per token takes 2 or more")


def _answers_missing(samples: Sequence[Any], wanted: Sequence[Setup], parameters: Parameters) -> list[Setup]:
    """The setups that lack repeats. One is measured in one piece: engines differ from start to start."""
    done = {one["case"]: one["repeats"] for one in samples if one["what"] == "engine"}
    return [one for one in wanted if done.get(one.name, 0) < parameters.repeats]


def _fabric_done(samples: Sequence[Any]) -> int:
    return 1 + max((one["round"] for one in samples if one["what"] == "fabric"), default=-1)


def _fabric_missing(samples: Sequence[Any], parameters: Parameters) -> bool:
    return max(parameters.sizes) > 1 and _fabric_done(samples) < parameters.repeats


def _without(samples: Sequence[Any], setup: Setup) -> list[Any]:
    return [one for one in samples if one.get("case") != setup.name]


def _engines(
    shape: Shape, wanted: Sequence[Setup], parameters: Parameters, link: Any, load: plan.Load
) -> dict[tuple[int, ...], list[tuple[Setup, Split]]]:
    """The setups by the layers of their engine's stages: one engine serves several."""
    memory = psutil.virtual_memory().total // max(parameters.sizes)
    found: dict[tuple[int, ...], list[tuple[Setup, Split]]] = {}
    for setup in wanted:
        speeds = [1.0] * setup.stages
        if setup.slow and parameters.slow is not None:
            speeds[-1] = parameters.slow
        planned = pipeline.split(shape, speeds, memory, link, load)
        if setup.split == pipeline.EVEN:
            layers = pipeline.even(shape.layers, setup.stages)
            planned = Split(layers, "as equal as it goes", planned.tensor_parallel, planned.tensor_reason)
        found.setdefault(planned.layers, []).append((setup, planned))
    return found


def _with(run: Run, parameters: Parameters, samples: Sequence[Mapping[str, Any]], held: Reference) -> Run:
    taken = [one["sample"] for one in samples if one["what"] == "fabric"]
    ways = {Place(*one["place"]): one["how"] for one in samples if one["what"] == "fabric" and one["how"]}
    fabric = [line.as_json() for line in fabric_rows(taken, ways)]
    lines = pipeline.rows(samples)
    missing = []
    if parameters.gbit_s is None:
        missing = [
            {"what": "links", "reason": "no namespaces: all nodes are on loopback, unlimited"},
            {"what": "bytes between stages", "reason": "loopback has no counter of its own for each node"},
        ]
    results = {
        "rows": lines,
        "fabric": fabric,
        "reference": {
            "file": Path(parameters.reference).name,
            "sha256": held.sha256,
            "config_sha256": held.config_sha256,
            "made": dict(held.made),
            "prompts": [len(one["prompt"]) for one in held.requests],
        },
        "conclusions": [asdict(one) for one in pipeline.conclusions(lines, fabric, parameters.gbit_s)],
        "recommendation": pipeline.recommendation(lines, fabric),
        "not_measured": missing,
    }
    return run.end(results, samples)


class Engine:
    """The actor that has the engine: its scheduler, on the first stage's node."""

    def __init__(self, model: str, stages: int, options: Mapping[str, Any]) -> None:
        from actors.stages import build

        self._engine = build(model, stages, options)
        self._asked = 0

    def stages(self) -> list[dict[str, Any]]:
        """What each stage says of itself; see ``StageWorker.stage``."""
        return list(self._engine.collective_rpc("stage"))

    def answer(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """See ``actors.stages.answer``."""
        from actors.stages import answer

        self._asked += 1
        return answer(self._engine, f"request-{self._asked}", prompt, tokens)

    def close(self) -> None:
        """End the stages."""
        self._engine.engine_core.shutdown()


class Running:
    """An engine that answers, and how it is checked."""

    def __init__(
        self, parameters: Parameters, ask: Callable[..., Any], nodes: Sequence[NodeOffer], start_s: float
    ) -> None:
        self._parameters, self._ask, self._nodes, self._start_s = parameters, ask, nodes, start_s
        self._warm = False

    def measure(
        self, setup: Setup, split: Split, shape: Shape, held: Reference, progress: Progress
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Ask every held-out prompt, ``repeats`` times; return what the engine is, and the answers."""
        parameters = self._parameters
        if not self._warm:
            for one in held.requests:
                self._ask("answer", one["prompt"], 2)
            self._warm = True
        before = self._ask("stages")
        with contextlib.ExitStack() as stack:
            if setup.slow and parameters.slow is not None:
                stack.enter_context(slow([psutil.Process(before[-1]["pid"])], parameters.slow))
            answers = [
                self._answer(setup, one, repeat)
                for repeat in range(parameters.repeats)
                for one in held.requests
            ]
        after = self._ask("stages")
        equal = sum(one["equal"] for one in answers)
        progress(
            f"{setup.name}: {'/'.join(map(str, split.layers))}, {equal} of {len(answers)} answers equal, "
            f"{sum(one['total_s'] for one in answers):.1f} s"
        )
        passed = sum(one["prompt_tokens"] + one["output_tokens"] - 1 for one in answers)
        facts = {
            "what": "engine",
            "case": setup.name,
            "repeats": parameters.repeats,
            "start_s": round(self._start_s, 2),
            **self._facts(setup, split, shape, held, before, after, pipeline.activations(shape, passed)),
        }
        return facts, answers

    def _answer(self, setup: Setup, one: Mapping[str, list[int]], repeat: int) -> dict[str, Any]:
        found = self._ask("answer", one["prompt"], len(one["tokens"]))
        pairs = enumerate(zip(one["tokens"], found["tokens"], strict=False))
        differs = next((at_ for at_, (right, got) in pairs if right != got), None)
        if differs is None and len(found["tokens"]) != len(one["tokens"]):
            differs = min(len(found["tokens"]), len(one["tokens"]))
        return {
            "what": "answer",
            "case": setup.name,
            "repeat": repeat,
            "prompt_tokens": len(one["prompt"]),
            "output_tokens": len(one["tokens"]),
            "ttft_s": round(found["ttft_s"], 6),
            "total_s": round(found["total_s"], 6),
            "equal": differs is None,
            "differs_at": differs,
        }

    def _facts(
        self,
        setup: Setup,
        split: Split,
        shape: Shape,
        held: Reference,
        before: Sequence[Mapping[str, Any]],
        after: Sequence[Mapping[str, Any]],
        crossed: int,
    ) -> dict[str, Any]:
        """What the engine is, and every item of the check but the answers."""
        layers = [one["layers"] for one in after]
        sizes = pipeline.tensors(Path(self._parameters.model))
        own = pipeline.weights(sizes, layers, shape.tied)
        stages = [
            {
                "node": node.name,
                "address": one["address"],
                "first_layer": one["layers"][0],
                "last_layer": one["layers"][-1],
                "weights_bytes": size,
                "kv_bytes": one["kv_bytes"],
                "kv_tokens": one["kv_tokens"],
                "resident_bytes": one["resident_bytes"],
                "sent_bytes": one["sent_bytes"] - earlier["sent_bytes"],
            }
            for node, one, earlier, size in zip(self._nodes, after, before, own, strict=True)
        ]
        counts, there = tuple(map(len, layers)), [layer for one in layers for layer in one]
        as_meant = [one["node_id"] == node.node_id for one, node in zip(after, self._nodes, strict=True)]
        places = ", ".join(
            f"layers {one['first_layer']} to {one['last_layer']} on {one['node']} ({one['address']})"
            for one in stages
        )
        whole = sum(sizes.values())
        least = min(one["kv_tokens"] for one in stages)
        checks = [
            _item("split", counts == split.layers and there == list(range(shape.layers)), split.reason),
            _item("placement", all(as_meant), places),
            _item(
                "weights",
                sum(own) >= whole,  # an embedding that is the head too is there twice
                f"{' + '.join(f'{size / 1e6:.1f}' for size in own)} MB of the files' {whole / 1e6:.1f} MB",
            ),
            _item(
                "KV left",
                least >= held.longest,
                f"room for {least} tokens; the longest request has {held.longest}",
            ),
        ]
        if self._parameters.gbit_s is not None and len(stages) > 1:
            sent = [one["sent_bytes"] for one in stages[:-1]]
            counted = ", ".join(f"{count / 1e6:.2f} MB" for count in sent)
            told = f"{crossed / 1e6:.2f} MB of activations; links counted {counted}"
            checks.append(_item("bytes between stages", min(sent) >= crossed, told))
        return {
            "stages_count": setup.stages,
            "slow": setup.slow,
            "layers": list(counts),
            "reason": split.reason,
            "tensor_parallel": split.tensor_parallel,
            "tensor_reason": split.tensor_reason,
            "stages": stages,
            "weights_mb_most": round(max(own) / 1e6, 2),
            "kv_mb_least": round(min(one["kv_bytes"] for one in stages) / 1e6, 2),
            "kv_tokens": least,
            "checks": checks,
        }


def _item(name: str, ok: bool, told: str) -> dict[str, Any]:
    return {"item": name, "ok": ok, "told": told}


class _Nodes:
    """Ray nodes that run, one for each stage of the largest size."""

    def __init__(
        self, ray: Any, parameters: Parameters, offers: Sequence[NodeOffer], running: RayNodes
    ) -> None:
        self._ray, self._parameters, self._offers, self._running = ray, parameters, offers, running

    def fabric(self, turns: Sequence[int], progress: Progress) -> Generator[list[dict[str, Any]], None, None]:
        """Measure the links between neighbours, and all-reduce over all: nothing runs beside it."""
        if len(self._offers) < 2 or not turns:
            return
        stations = Stations(self._ray, self._offers)
        try:
            for turn in turns:
                found = list(_fabric(stations))
                told = ", ".join(f"{place} {value:.3g}" for place, value, _ in found)
                progress(f"fabric, {turn + 1} of {self._parameters.repeats}: {told}")
                yield [fabric_sample(place, value, how, turn) for place, value, how in found]
        finally:
            stations.close()

    @contextlib.contextmanager
    def engine(
        self, layers: Sequence[int], options: Mapping[str, Any], progress: Progress
    ) -> Iterator[Running]:
        """Start an engine whose stages have so many layers, stage by stage on node by node."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, offers = self._ray, self._offers[: len(layers)]
        bundles = [{"GPU": 1, at(offer.name): AT_SHARE} for offer in offers]
        group, actor = placement_group(bundles, strategy="PACK"), None
        try:
            try:
                ray.get(group.ready(), timeout=FREED_S)
            except ray.exceptions.GetTimeoutError as error:
                free = {offer.name: offer.free.get("GPU", 0) for offer in snapshot()}
                raise PipelineError(
                    f"no placement group of {bundles} within {FREED_S:g} s; free GPUs: {free}"
                ) from error
            environment = {
                **ENVIRONMENT,
                "VLLM_RAY_BUNDLE_INDICES": ",".join(str(index) for index in range(len(layers))),
                "VLLM_PP_LAYER_PARTITION": ",".join(map(str, layers)),
            }
            where = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
            began = time.monotonic()
            actor = (
                ray.remote(Engine)
                .options(num_cpus=0, scheduling_strategy=where, runtime_env={"env_vars": environment})
                .remote(self._parameters.model, len(layers), dict(options))
            )

            def ask(method: str, *arguments: Any) -> Any:
                return self._asked(getattr(actor, method).remote(*arguments), method, ANSWER_S, progress)

            self._asked(actor.stages.remote(), "start", START_S, progress)
            yield Running(self._parameters, ask, offers, time.monotonic() - began)
            ask("close")
        finally:
            if actor is not None:
                _forget_memory(self._running)
                ray.kill(actor)  # its stages end with it
            remove_placement_group(group)

    def _asked(self, answer: Any, what: str, within_s: float, progress: Progress) -> Any:
        ray, began = self._ray, time.monotonic()
        while not ray.wait([answer], timeout=TOLD_EVERY_S)[0]:
            if time.monotonic() - began > within_s:
                raise PipelineError(f"the engine did not {what} within {within_s:g} s")
            progress(f"waiting for the engine to {what} ({time.monotonic() - began:.0f} s)")
        try:
            return ray.get(answer, timeout=within_s)
        except ray.exceptions.RayError as error:
            why = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            raise PipelineError(f"the engine failed to {what}: {why}") from error


def _forget_memory(running: RayNodes) -> None:
    """Unlink the shared memory of an engine that may still be starting: whoever is killed does not."""
    for node in running.nodes:
        for process in node.processes():
            with contextlib.suppress(psutil.Error, OSError):
                for mapped in process.memory_maps():
                    if mapped.path.startswith("/dev/shm/psm_"):
                        Path(mapped.path).unlink(missing_ok=True)


def fabric_sample(place: Place, value: float, how: str | None, turn: int) -> dict[str, Any]:
    """Return a measurement of the fabric as it is written."""
    return {
        "what": "fabric",
        "round": turn,
        "place": [place.what, place.source, place.target, place.streams],
        "how": how,
        "sample": {**asdict(place), "value": float(f"{value:.6g}"), "round": turn},
    }


def _fabric(stations: Stations) -> Iterator[tuple[Place, float, str | None]]:
    names = list(stations.actors)
    ports = stations.all(dict.fromkeys(names, ("listen",)))
    for source, target in pairwise(names):
        address = stations.address(target)
        yield (
            Place("round trip", source, target),
            stations.ask(source, "round_trip_us", address, ports[target]),
            None,
        )
        tool = "iperf3" if all(stations.facts[name]["iperf3"] for name in (source, target)) else "tcp"
        for streams in STREAMS:
            if tool == "iperf3":
                port = stations.ask(target, "iperf_listen")
                rate = stations.ask(source, "iperf_gbit_s", address, port, streams, IPERF_S)
            else:
                rate = stations.ask(source, "rate_gbit_s", address, ports[target], streams, float(IPERF_S))
            yield Place(tool, source, target, streams), rate, None
    master = f"{stations.address(names[0])}:{stations.ask(names[0], 'free_port')}"
    try:
        backends = stations.all({name: ("meet", master, rank, len(names)) for rank, name in enumerate(names)})
        stations.all(dict.fromkeys(names, ("all_reduce_s", MB)))  # connections are made
        times = stations.all(dict.fromkeys(names, ("all_reduce_s", REDUCED)))
    finally:
        stations.all(dict.fromkeys(names, ("part",)))
    value = bus_gbyte_s(REDUCED, len(names), max(times.values()))
    yield Place("all-reduce", EACH_NODE), value, ", ".join(sorted(set(backends.values())))


@contextlib.contextmanager
def _nodes(parameters: Parameters, progress: Progress) -> Iterator[_Nodes]:
    import ray

    from cluster.connect import join

    count = max(parameters.sizes)
    names = [f"stage-{index}" for index in range(count)]
    with contextlib.ExitStack() as stack:
        head: tuple[str, Sequence[str]] = ("127.0.0.2", ())
        places: list[tuple[str, Sequence[str]]] = [(f"127.0.1.{index + 1}", ()) for index in range(count)]
        if parameters.gbit_s is not None:
            network = stack.enter_context(netns.network(count, attach_host=True))
            for node in network.nodes:
                node.limit(parameters.gbit_s)
                node.limit_arrivals(parameters.gbit_s)
            assert network.host is not None, "it was asked for"
            head, places = (network.host, ()), [(node.address, node.prefix) for node in network.nodes]
        where = ", ".join(f"{name} {address}" for name, (address, _) in zip(names, places, strict=True))
        progress(f"starting {count} Ray nodes: {where}")
        options: list[tuple[str, ...]] = [("--num-cpus=0",)]
        # A GPU stands for whatever a node computes with; vLLM's Ray executor knows nothing else.
        options += [
            (f"--node-name={name}", "--num-gpus=1", f"--resources={json.dumps({at(name): AT_UNITS})}")
            for name in names
        ]
        nodes = stack.enter_context(ray_nodes([head, *places], OBJECT_STORE, options, ["head", *names]))
        join(nodes.address, Path(nodes.environment["RAY_AUTH_TOKEN_PATH"]))
        stack.callback(ray.shutdown)
        there = {offer.name: offer for offer in snapshot()}
        yield _Nodes(ray, parameters, [there[name] for name in names], nodes)
