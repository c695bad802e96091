"""`handoff experiment pipeline`: the split, the items, what follows, and vLLM in stages for real."""

import json
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from cluster import netns
from cluster.launch import MARKER
from experiments import pipeline, pipeline_reference, pipeline_run
from experiments.compare import compare
from experiments.models import make
from experiments.pipeline import EVEN, PLANNED, Setup, conclusions, setups, split, tensors, weights
from experiments.pipeline_reference import HeldOutError, Reference
from experiments.pipeline_run import Parameters, PipelineError, measure
from experiments.plan import Load
from experiments.plan_machines import Link
from experiments.plan_model import PlanError, read
from experiments.report import page
from experiments.report import read as read_runs
from experiments.results import Run, check, save
from handoff.cli import app

MODELS = Path(__file__).parent / "plan_models"
LINK = Link(gbit_s=200, latency_us=10)
PLAIN = Load(4096, 256, 1)


def test_the_published_model_is_split_as_published() -> None:
    found = split(read(str(MODELS / "llama-405b-awq.json")), [1, 1, 1], 120 * 10**9, LINK, PLAIN)
    assert found.layers == (42, 42, 42)
    assert not found.tensor_parallel
    assert "impossible: 128 attention heads do not divide by 3" in found.tensor_reason


def test_a_slow_node_gets_fewer_layers_and_the_reason_has_the_figures() -> None:
    shape = read(str(MODELS / "mistral-7b.json"))
    found = split(shape, [1, 0.33], 10**12, LINK, PLAIN)
    assert found.layers == (24, 8)
    assert "speed 1, 0.33: 24/8; the slowest stage takes as long as 24.2 layers" in found.reason
    assert "(16/16) 48.5" in found.reason
    assert found.tensor_parallel
    assert "64 all-reduces" in found.tensor_reason


def test_what_has_no_room_is_said() -> None:
    with pytest.raises(PlanError, match="cannot go over 2 nodes: weights of"):
        split(read(str(MODELS / "mistral-7b.json")), [1, 1], 4 * 10**9, LINK, PLAIN)


def test_setups_are_the_sizes_and_a_slow_node() -> None:
    assert [one.name for one in setups((1, 2, 3), 0.33)] == [
        "1 stage",
        "2 stages",
        "3 stages",
        f"2 stages, one slow, {EVEN}",
        f"2 stages, one slow, {PLANNED}",
    ]
    assert setups((1,), 0.33) == [Setup(1)]
    assert setups((3,), None) == [Setup(3)]
    assert pipeline.even(8, 3) == (3, 3, 2)


def model(folder: Path, layers: int = 8, seed: int = 0) -> Path:
    """The tiny model's configuration with weights of a few bytes, of which nothing can be computed."""
    from experiments.models import PRESETS

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PRESETS["tiny"].config()))
    data = {
        f"model.layers.{layer}.mlp.up_proj.weight": np.full(50, seed, np.uint8) for layer in range(layers)
    }
    data |= {"model.embed_tokens.weight": np.zeros(30, np.uint8), "lm_head.weight": np.zeros(20, np.uint8)}
    save_file(data, folder / "model.safetensors")
    return folder


def test_weights_of_stages_are_the_files(tmp_path: Path) -> None:
    sizes = tensors(model(tmp_path))
    assert sum(sizes.values()) == 450
    stages = [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert weights(sizes, stages, tied=False) == [180, 150, 120]
    assert weights(sizes, stages, tied=True) == [180, 150, 150]
    assert sum(weights(sizes, [[0, 1, 2], [3, 4]], tied=False)) == 300  # what nobody holds is missing


# -- held-out answers


def held(folder: Path, **changed: Any) -> Reference:
    config, content = pipeline_reference.digests(folder)
    requests = [{"prompt": list(range(20, 20 + length)), "tokens": [5, 6, 7]} for length in (4, 40)]
    return replace(
        Reference(folder.name, config, content, {"at": "before"}, requests, pipeline_reference.VERSION),
        **changed,
    )


def test_answers_of_another_model_are_refused(tmp_path: Path) -> None:
    one, other = model(tmp_path / "one"), model(tmp_path / "other", seed=1)
    file = tmp_path / "held.json"
    file.write_text(json.dumps(asdict(held(one))))
    assert pipeline_reference.load(file, one) == held(one)
    with pytest.raises(HeldOutError, match=r"--reference: .* of a model whose weights has SHA-256"):
        pipeline_reference.load(file, other)
    file.write_text(json.dumps(asdict(held(one, requests=[]))))
    with pytest.raises(HeldOutError, match="no answers; give another --reference"):
        pipeline_reference.load(file, one)
    file.write_text("[]")
    with pytest.raises(HeldOutError, match="holds no answers"):
        pipeline_reference.load(file, one)


def test_answers_that_are_there_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = model(tmp_path / "model"), list[Any]()

    def answers(_: str, __: Any, requests: Any, tokens: int, *___: Any) -> list[dict[str, Any]]:
        asked.append(requests)
        return [{"token_ids": [1] * tokens} for _ in requests]

    monkeypatch.setattr(pipeline_reference, "answers", answers)
    for _ in range(2):
        found = pipeline_reference.reference(tmp_path / "held.json", folder, (4, 9), 3, {}, print)
        assert [len(one["prompt"]) for one in found.requests] == [4, 9]
        assert found.longest == 12
    assert len(asked) == 1


# -- rows and claims, on stages that answer as they are told


class Stages:
    """An engine whose stages say what they were told to be, and answer what is held out, or not."""

    def __init__(self, layers: tuple[int, ...], reference: Reference, **wrong: Any) -> None:
        self.layers, self.reference, self.wrong = layers, reference, wrong
        self.sent = 0

    def __call__(self, method: str, *arguments: Any) -> Any:
        if method == "stages":
            self.sent += self.wrong.get("sent", 10**9)
            firsts = [sum(self.layers[:index]) for index in range(len(self.layers))]
            return [
                {
                    "rank": index,
                    "node_id": self.wrong.get("node", f"id-{index}"),
                    "address": f"198.18.0.{index + 2}",
                    "pid": psutil.Process().pid,
                    "layers": list(range(first, first + count)),
                    "kv_bytes": 10**6,
                    "kv_tokens": self.wrong.get("kv_tokens", 4096),
                    "resident_bytes": 10**9,
                    "sent_bytes": self.sent,
                }
                for index, (first, count) in enumerate(zip(firsts, self.layers, strict=True))
            ]
        (right,) = (one["tokens"] for one in self.reference.requests if one["prompt"] == arguments[0])
        tokens = [*right[: arguments[1]]]
        if "token" in self.wrong and len(tokens) > 1:
            tokens[1] = self.wrong["token"]
        return {"tokens": tokens, "ttft_s": 0.01 * self.layers[-1], "total_s": 0.02 * self.layers[-1]}


class Offer:
    def __init__(self, index: int) -> None:
        self.name, self.node_id = f"stage-{index}", f"id-{index}"


class Recorder:
    """Nodes with such engines."""

    def __init__(self, reference: Reference, started: list[tuple[int, ...]], interrupted_at: int, wrong: Any):
        self.reference, self.started = reference, started
        self.interrupted_at, self.wrong = interrupted_at, wrong

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def fabric(self, turns: range, _: Any) -> Generator[list[dict[str, Any]], None, None]:
        for turn in turns:
            yield self.round(turn)

    def round(self, turn: int) -> list[dict[str, Any]]:
        found = []
        for what, streams, value in (("round trip", None, 50.0), ("iperf3", 1, 0.9), ("iperf3", 8, 0.96)):
            place = pipeline_run.Place(what, "stage-0", "stage-1", streams)
            found.append((place, value, None))
        found.append((pipeline_run.Place("all-reduce", "all nodes"), 0.11, "gloo"))
        return [pipeline_run.fabric_sample(place, value, how, turn) for place, value, how in found]

    def engine(self, layers: tuple[int, ...], options: Any, _: Any) -> "Recorder":
        assert options["max_model_len"] % 128 == 0
        self.started.append(layers)
        if len(self.started) == self.interrupted_at:
            raise KeyboardInterrupt
        self.layers = layers
        return self

    def measure(self, *arguments: Any) -> Any:
        ask = Stages(self.layers, self.reference, **self.wrong)
        offers: Any = [Offer(index) for index in range(len(self.layers))]
        return pipeline_run.Running(self.parameters, ask, offers, 1.0).measure(*arguments)

    parameters: Parameters


@pytest.fixture
def run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = model(tmp_path / "model")
    file = tmp_path / "held.json"
    file.write_text(json.dumps(asdict(held(folder))))
    monkeypatch.setattr(pipeline_run.netns, "missing", lambda: None)
    monkeypatch.setattr(pipeline_run, "slow", lambda *_: Recorder(held(folder), [], 0, {}))
    wanted = Parameters(str(folder), repeats=2, reference=str(file))
    started: list[tuple[int, ...]] = []

    def run(interrupted_at: int = 0, **wrong: Any) -> Run:
        recorder = Recorder(held(folder), started, interrupted_at, wrong)
        recorder.parameters = wanted
        monkeypatch.setattr(pipeline_run, "_nodes", lambda *_: recorder)
        return measure(wanted, tmp_path / "pipeline.json", print)

    run.started = started  # type: ignore[attr-defined]
    return run


def test_an_interrupted_bring_up_goes_on_and_is_drawn(run_with: Any, tmp_path: Path) -> None:
    out = tmp_path / "pipeline.json"
    with pytest.raises(KeyboardInterrupt):
        run_with(interrupted_at=3)
    assert [row["setup"] for row in check(out).results["rows"]] == [
        "1 stage",
        "2 stages",
        f"2 stages, one slow, {EVEN}",
    ]
    run = run_with()
    assert run_with.started == [(8,), (4, 4), (3, 3, 2), (3, 3, 2), (6, 2)]
    assert run_with().results == run.results
    assert len(run_with.started) == 5
    rows = {row["setup"]: row for row in run.results["rows"]}
    assert rows[f"2 stages, one slow, {PLANNED}"]["split"] == "6/2"
    assert all(item["ok"] for row in rows.values() for item in row["checks"])
    assert {item["item"] for item in rows["3 stages"]["checks"]} == {
        *("split", "placement", "weights", "KV left", "bytes between stages", "outputs")
    }
    assert rows["3 stages"]["outputs_equal"] == rows["3 stages"]["outputs"] == 4
    assert rows["3 stages"]["ttft_ms_p50"] == 20.0
    assert {one.finding for one in compare(out, out).rows} == {"too few samples"}
    text = page(read_runs([out]))
    assert "8 attention heads do not divide by 3" in text
    assert "3 stages: 3/3/2" in text  # beside the published 42/42/42
    assert "Yes: 29 of 29 items pass" in text


@pytest.mark.parametrize(
    ("item", "wrong"),
    [
        ("outputs", {"token": 99}),
        ("placement", {"node": "elsewhere"}),
        ("KV left", {"kv_tokens": 10}),
        ("bytes between stages", {"sent": 1}),
    ],
)
def test_each_item_fails_by_its_own_fault(run_with: Any, item: str, wrong: dict[str, Any]) -> None:
    run = run_with(**wrong)
    (row,) = (row for row in run.results["rows"] if row["setup"] == "3 stages")
    assert [one["item"] for one in row["checks"] if not one["ok"]] == [item]
    assert any(f"3 stages: {item} failed" in line for line in run.results["recommendation"])


def claims(rows: list[dict[str, Any]], fabric: list[dict[str, Any]]) -> list[bool]:
    return [one.holds for one in conclusions(rows, fabric, 1.0)]


def test_each_claim_falls_by_its_own_figures(run_with: Any) -> None:
    results = run_with().results
    rows, fabric = results["rows"], results["fabric"]
    assert claims(rows, fabric) == [True, True, True, True, True, True]
    by = {row["setup"]: row for row in rows}

    def changed(setup: str, **fields: Any) -> list[dict[str, Any]]:
        return [{**row, **fields} if row["setup"] == setup else row for row in rows]

    assert claims(changed("3 stages", tensor_parallel=True), fabric)[0] is False
    heavy = [
        {**stage, "weights_bytes": 1 + 900 * (index == 0)}
        for index, stage in enumerate(by["2 stages"]["stages"])
    ]
    assert claims(changed("2 stages", stages=heavy), fabric)[1] is False
    assert claims(changed("1 stage", outputs_equal=0), fabric)[2] is False
    slower = [{**line, "p50": 0.5 * line["p50"]} for line in fabric]
    assert claims(rows, slower)[3:5] == [False, False]
    assert claims(changed(f"2 stages, one slow, {EVEN}", ttft_ms_p50=1.0), fabric)[5] is False


def test_a_run_without_figures_is_refused_by_the_schema(tmp_path: Path) -> None:
    save(Run.begin("pipeline", asdict(Parameters("m"))).end({"rows": []}, []), tmp_path / "pipeline.json")
    with pytest.raises(ValueError, match="measure again"):
        check(tmp_path / "pipeline.json")


def test_mistakes_name_the_option_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match=r"--model: .* has no config.json"):
        measure(Parameters(str(tmp_path)), tmp_path / "out.json", print)
    few = model(tmp_path / "few")
    with pytest.raises(PlanError, match="cannot go over 9 nodes: 8 layers are fewer than stages"):
        measure(Parameters(str(few), (9,), gbit_s=None), tmp_path / "out.json", print)
    monkeypatch.setattr(pipeline_run.netns, "missing", lambda: "network namespaces need root")
    with pytest.raises(PipelineError, match="need root; or give --local"):
        measure(Parameters(str(model(tmp_path / "model"))), tmp_path / "out.json", print)


@pytest.mark.experiment
def test_vllm_in_stages_for_real(tmp_path: Path) -> None:
    """Two Ray nodes, vLLM with a stage on each; answers held against an undivided engine's."""
    folder = make(tmp_path / "tiny", "tiny", lambda _: None)
    out, local = tmp_path / "pipeline.json", netns.missing() is not None
    arguments = ["--model", str(folder), "--stages", "2", "--slow", "1", "--prompt", "600", "--prompt", "40"]
    arguments += [
        "--tokens",
        "9",
        "--repeats",
        "1",
        "--reference",
        str(tmp_path / "held.json"),
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(
        app, ["experiment", "pipeline", *arguments, *(["--local"] if local else [])], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    (row,) = check(out).results["rows"]
    assert row["split"] == "4/4"
    assert [stage["node"] for stage in row["stages"]] == ["stage-0", "stage-1"]
    assert (row["outputs"], row["outputs_equal"]) == (2, 2)
    assert ("bytes between stages" in {item["item"] for item in row["checks"]}) == (not local)
    answers = json.loads((tmp_path / "held.json").read_text())["requests"]
    assert len({token for one in answers for token in one["tokens"]}) > 5  # not all the same
    assert not [process for process in psutil.process_iter(["environ"]) if _of_ours(process)]


def _of_ours(process: psutil.Process) -> bool:
    marker = (process.info["environ"] or {}).get(MARKER, "")
    return marker.startswith("ray-") and process.ppid() == psutil.Process().pid
