"""The planner, against what three reports have published, and against what must hold of any plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.file import load as load_cluster_file
from experiments import plan_costs as costs
from experiments.plan import Load, Plan, Prediction, divisible, plan, split_layers
from experiments.plan_machines import Handover, Link, Machines
from experiments.plan_machines import load as load_machines
from experiments.plan_model import PlanError, read, shape
from handoff.cli import app

MODELS = Path(__file__).parent / "plan_models"
MISTRAL, LLAMA_405B, MOE_62 = (
    read(str(MODELS / f"{name}.json")) for name in ("mistral-7b", "llama-405b-awq", "moe-62-layers")
)
R5 = {
    "nodes": {
        "two": {"devices": 2, "memory": "96GB", "tflops": 250, "bandwidth_gbyte_s": 1800},
        "one": {"memory": "96GB", "tflops": 250, "bandwidth_gbyte_s": 1800},
    },
    "links": {"inside": {"gbit_s": 400}, "between": {"gbit_s": 200, "latency_us": 10}},
    "assume": {"memory": 1.0},
}
PAIR: dict[str, Any] = {
    "nodes": {"n": {"count": 2, "memory": "80GB", "tflops": 300, "bandwidth_gbyte_s": 2000}},
    "links": {"between": {"gbit_s": 100, "latency_us": 20}},
}


def machines(data: dict[str, Any]) -> Machines:
    return Machines.model_validate(data)


def of(result: Plan, name: str) -> Prediction:
    return next(one for one in result.ranked if one.layout.name == name)


def why_not(result: Plan, name: str) -> str:
    return next(one.reason for one in result.rejected if one.name == name)


def near(published: float) -> Any:
    return pytest.approx(published, rel=0.25)


# R1: two laptops, Mistral-7B in 16 bit, 871 prompt tokens, 256 out; its phases are inputs.


def laptops(prefill_tokens_s: float, rates: dict[str, float], decode: float = 8.7) -> Machines:
    mb = 871 * 131072 / 1e9 * 8  # Gbit of KV
    return machines(
        {
            "nodes": {
                "laptop": {
                    "count": 2,
                    "memory": "32GB",
                    "prefill_tokens_s": prefill_tokens_s,
                    "decode_tokens_s": decode,
                }
            },
            "links": {"between": {"gbit_s": 37.6, "kv_gbit_s": mb / rates["network"]}},
            "handover": {
                "ms": 0,
                "overlap": False,
                "first_token": "decode",
                "encode_gbit_s": mb / rates["encode"],
                "decode_gbit_s": mb / rates["decode"],
            },
        }
    )


TCP = {"encode": 0.093, "network": 0.572, "decode": 1.370}
RAY = {"encode": 0.228, "network": 1.261, "decode": 1.436}


def test_r1_kv_is_109_mb() -> None:
    assert MISTRAL.kv_per_token * 871 / 2**20 == pytest.approx(109, rel=0.01)


@pytest.mark.parametrize(
    ("rates", "prefill_s", "decode", "overhead", "ttft", "end_to_end"),
    [(TCP, 5.389, 8.7, 2.035, 7.553, 34.198), (RAY, 3.620, 8.8, 2.924, 6.642, 36.639)],
    ids=["tcp", "ray"],
)
def test_r1_phases_add_up(
    rates: dict[str, float], prefill_s: float, decode: float, overhead: float, ttft: float, end_to_end: float
) -> None:
    result = plan(MISTRAL, laptops(871 / prefill_s, rates, decode), Load(871, 256, 1))
    divided = of(result, "split-1p1d")
    assert divided.parts["KV transfer"] == near(overhead)
    assert divided.ttft == near(ttft)
    assert divided.latency == near(end_to_end)
    assert divided.tokens_s == near(256 / end_to_end)


@pytest.mark.parametrize("rates", [TCP, RAY], ids=["tcp", "ray"])
def test_r1_alone_wins_and_moving_never_pays(rates: dict[str, float]) -> None:
    result = plan(MISTRAL, laptops(871 / 1.4, rates), Load(871, 256, 1))
    assert of(result, "single").latency == near((34 + 43) / 2)
    assert of(result, "single").latency < of(result, "split-1p1d").latency
    assert [link.tokens for link in result.links] == [None]
    assert result.links[0].transfer > result.links[0].prefill


# R4: 62 layers, 16k tokens; a link on which an all-reduce of 95 MB takes 400 ms; compute of 285.8 ms on two.


def macs() -> Machines:
    return machines(
        {
            "nodes": {
                "mac": {
                    "count": 3,
                    "memory": "512GB",
                    "prefill_tokens_s": 16384 / 0.2858 / 2,
                    "prefill_at": 16384,
                }
            },
            "links": {"between": {"gbit_s": 0.095 / 0.4 * 8}},
            "assume": {"chunk_tokens": 16384},
        }
    )


def test_r4_names_the_all_reduce_wait() -> None:
    result = plan(MOE_62, macs(), Load(16384, 64, 1))
    tensor = of(result, "tensor-2")
    assert costs.all_reduces(MOE_62) == 124
    assert costs.activation_bytes(MOE_62, 16384) == near(95e6)
    assert tensor.parts["all-reduce wait"] == near(49.4)
    assert tensor.ttft == near(49.7)
    assert tensor.parts["compute"] == near(0.2858)
    assert tensor.largest == "all-reduce wait"
    assert "124 all-reduces of 100.7 MB" in tensor.notes[0]
    assert "99%" in tensor.notes[0]
    assert result.ranked[0].layout.name == "single"
    assert result.ranked[-1] is tensor
    assert "8 key-value heads" in why_not(result, "tensor-3")


# R5: two GPUs and one, of 96 GB, 200 Gbit/s.


def test_r5_is_three_stages() -> None:
    result = plan(LLAMA_405B, machines(R5), Load(4096, 256, 1))
    assert [one.layout.name for one in result.ranked] == ["pipeline-3"]
    stages = result.ranked[0].layout.decode[0].stages
    assert [stage.layers for stage in stages] == [42, 42, 42]
    assert LLAMA_405B.weights == near(215e9)
    for row in result.ranked[0].memory:
        assert row["weights_bytes"] == near(72e9)
        assert row["kv_bytes"] == near(24e9)
    assert "128 attention heads do not divide by 3" in why_not(result, "tensor-3")
    for layout in ("single", "tensor-2", "split-1p2d"):
        assert "do not fit" in why_not(result, layout)
    assert "110 of 126 layers" in why_not(result, "pipeline-2")


def test_r5_heads_from_the_configuration_alone() -> None:
    assert "128 = 3 x 42 + 2" in (divisible(LLAMA_405B, 3) or "")
    assert [ranks for ranks in range(1, 9) if divisible(LLAMA_405B, ranks) is None] == [1, 2, 4, 8]


def test_r5_bus_bandwidth() -> None:
    size, ranks = 1e9, 3
    seconds = costs.all_reduce_seconds(size, ranks, Link(gbit_s=200, latency_us=10))
    assert 2 * (ranks - 1) / ranks * size / seconds == near(23.0e9)


# What must hold of any plan.


def test_parameters_are_those_of_the_published_models() -> None:
    assert MISTRAL.parameters == pytest.approx(7.248e9, rel=0.001)
    assert LLAMA_405B.parameters == pytest.approx(405.85e9, rel=0.001)
    assert MOE_62.parameters == pytest.approx(228.7e9, rel=0.001)
    assert MOE_62.active == pytest.approx(10e9, rel=0.1)


def test_stages_take_layers_by_speed_and_room() -> None:
    assert split_layers(126, [1, 1, 1], [200] * 3) == [42, 42, 42]
    assert split_layers(32, [3, 1], [99, 99]) == [24, 8]
    assert split_layers(32, [3, 1], [20, 99]) == [20, 12]
    assert split_layers(32, [1, 1], [15, 16]) is None


def test_unequal_devices_get_unequal_stages() -> None:
    data = {
        "nodes": {"big": {"memory": "24GB", "tflops": 300}, "small": {"memory": "12GB", "tflops": 100}},
        "links": {"between": {"gbit_s": 100}},
        "assume": {"memory": 0.5},
    }
    result = plan(MISTRAL, machines(data), Load(512, 64, 1))
    assert [stage.layers for stage in of(result, "pipeline-2").layout.decode[0].stages] == [24, 8]
    assert "do not fit" in why_not(result, "single")


def test_pipeline_is_gpipes() -> None:
    assert costs.bubble(4, 8) == pytest.approx(3 / 11)
    assert costs.pipeline_seconds([0.5] * 4, [0.0] * 3, 8) == pytest.approx(0.5 * 11)
    assert costs.pipeline_seconds([0.5, 1.0], [0.1], 3) == pytest.approx(1.6 + 2 * 1.0)


def test_experts_are_read_as_sequences_need_them() -> None:
    one, many = costs.weights_read(MOE_62, 1), costs.weights_read(MOE_62, 10_000)
    read_by_one = MOE_62.layers * (MOE_62.layer_shared + MOE_62.layer_experts / 32) * MOE_62.bits / 8
    assert one == pytest.approx(read_by_one + MOE_62.embedding_bytes)
    assert many == pytest.approx(MOE_62.weights - MOE_62.embedding_bytes)


@pytest.mark.parametrize("concurrency", [1, 7, 64])
def test_times_add_up(concurrency: int) -> None:
    result = plan(MISTRAL, machines(PAIR), Load(2048, 200, concurrency))
    assert {one.layout.name for one in result.ranked} >= {"single", "replicas-2", "tensor-2", "split-1p1d"}
    for one in result.ranked:
        assert sum(one.parts.values()) == pytest.approx(one.ttft)
        assert one.ttft + one.tpot * 199 == pytest.approx(one.latency)
        if concurrency > 1 and one.layout.name != "replicas-2":
            assert one.tokens_s * one.latency == pytest.approx(200 * concurrency)


def test_replicas_are_no_worse_than_their_best() -> None:
    data = {"nodes": {"big": {"memory": "80GB", "tflops": 900}, "small": {"memory": "80GB", "tflops": 90}}}
    for concurrency in (1, 4, 32):
        result = plan(MISTRAL, machines(data), Load(4096, 64, concurrency))
        assert of(result, "replicas-2").latency <= of(result, "single").latency * 1.000001


def test_the_example_is_what_the_documentation_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of docs/planning.md: its table is the command's output for the file that it names."""
    monkeypatch.setenv("COLUMNS", "130")
    project = Path(__file__).resolve().parents[2]
    options = ["--prompt", "8192", "--output", "256", "--concurrency", "16"]
    options += ["--cluster", str(project / "examples" / "machines.yaml")]
    done = CliRunner().invoke(app, ["plan", str(MODELS / "mistral-7b.json"), *options])
    text = (project / "docs" / "planning.md").read_text("utf-8")
    shown = {" ".join(line.split()) for line in text.splitlines()}
    rows = [
        " ".join(line.split()) for line in done.output.splitlines() if line.startswith((" split", " repl"))
    ]
    assert len(rows) == 2
    assert set(rows) <= shown
    snippet = text.partition("```yaml\n")[2].partition("```")[0]
    assert len(machines(yaml.safe_load(snippet)).devices()) == 9


def test_overlap_hides_what_prefill_lasts() -> None:
    how = Handover(ms=5)
    fast = costs.move_seconds(MISTRAL, 4096, 12.5e9, how, prefill=1.0, chunks=4)
    slow = costs.move_seconds(MISTRAL, 4096, 0.1e9, how, prefill=1.0, chunks=4)
    assert fast.exposed == pytest.approx(fast.wire / 4 + 0.005)
    assert slow.exposed == pytest.approx(slow.wire - 0.75 + 0.005)


def test_the_verdict_changes_with_the_link() -> None:
    load = Load(8192, 128, 1)
    slow = {**PAIR, "links": {"between": {"gbit_s": 1}}}
    fast_plan, slow_plan = (plan(MISTRAL, machines(data), load) for data in (PAIR, slow))
    for layout in ("tensor-2", "split-1p1d"):
        assert of(fast_plan, layout).latency < of(slow_plan, layout).latency
    assert fast_plan.ranked[0].layout.name == "tensor-2"
    assert slow_plan.ranked[0].layout.name == "pipeline-2"
    assert slow_plan.ranked[-1].layout.name == "tensor-2"
    assert fast_plan.links[0].tokens is not None
    assert slow_plan.links[0].tokens is None


def test_break_even_is_where_moving_takes_as_long_as_computing() -> None:
    how, rate, speed = Handover(ms=20), 2e9, 5000.0
    tokens = costs.break_even_tokens(MISTRAL, rate, how, speed)
    assert tokens is not None
    assert 0.02 + tokens * MISTRAL.kv_per_token / rate == pytest.approx(tokens / speed)


def test_memory_limits_requests_at_once() -> None:
    data = {"nodes": {"n": {"memory": "20GB", "tflops": 300, "bandwidth_gbyte_s": 2000}}}
    result = plan(MISTRAL, machines(data), Load(8192, 128, 16))
    assert "3 of 16 requests" in result.ranked[0].notes[0]
    assert result.ranked[0].longest == (18e9 - MISTRAL.weights) // 131072
    with pytest.raises(PlanError, match="max_position_embeddings"):
        plan(MISTRAL, machines(data), Load(32768, 128, 1))


def test_what_is_assumed_is_said() -> None:
    said = "\n".join(machines({"nodes": {"n": {"count": 2}}}).assumed())
    for field in (
        "nodes.n.memory",
        "nodes.n.tflops",
        "nodes.n.bandwidth_gbyte_s",
        "links.between",
        "assume.compute",
    ):
        assert field in said
    assert "nodes." not in "\n".join(machines(PAIR).assumed())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512"),
        ({"quantization_config": {"quant_method": "odd"}}, "quant_method is 'odd'"),
    ],
)
def test_configurations_that_do_not_say_enough(change: dict[str, Any], message: str) -> None:
    config = json.loads((MODELS / "mistral-7b.json").read_text("utf-8"))
    with pytest.raises(PlanError, match=message):
        shape({**config, **change}, "m")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"nodes": {"n": {"memory": "4Gi"}}}, 'did you mean "4GiB"'),
        ({"nodes": {"n": {"tflop": 3}}}, "did you mean 'tflops'"),
        ({"nodes": {"n": {}}, "links": {"pairs": [{"nodes": ["n-0", "x"], "gbit_s": 1}]}}, "no node 'x'"),
        ({}, "nodes: missing"),
    ],
)
def test_wrong_machines_files(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    path = tmp_path / "machines.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(PlanError, match=message):
        load_machines(path)


# The command.


def asked(tmp_path: Path, data: dict[str, Any], *options: str, model: str | None = None) -> Any:
    path = tmp_path / "machines.json"
    path.write_text(json.dumps(data))
    folder = tmp_path / "mistral"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((MODELS / "mistral-7b.json").read_text("utf-8"))
    return CliRunner().invoke(app, ["plan", model or str(folder), "--cluster", str(path), *options])


def test_the_table_and_its_json(tmp_path: Path) -> None:
    done = asked(tmp_path, PAIR)
    assert done.exit_code == 0, done.output
    for words in ("Layouts, best latency first", "split-1p1d", "64 all-reduces", "Assumed", "assume.compute"):
        assert words in done.output
    said = json.loads(asked(tmp_path, PAIR, "--json").stdout)
    assert said["model"]["kv_bytes_per_token"] == 131072
    assert [one["latency_s"] for one in said["ranked"]] == sorted(one["latency_s"] for one in said["ranked"])


@pytest.mark.parametrize(
    ("layout", "roles"),
    [("split-1p1d", {"prefill": 1, "decode": 1}), ("replicas-2", {"prefill": 0, "decode": 2})],
)
def test_the_cluster_file_can_be_served(tmp_path: Path, layout: str, roles: dict[str, int]) -> None:
    out = tmp_path / "cluster.yaml"
    done = asked(tmp_path, PAIR, "--layout", layout, "--out", str(out))
    assert done.exit_code == 0, (done.output, done.exception)
    file = load_cluster_file(out)
    assert {role: workers.count for role, workers in file.workers.items()} == roles
    assert sum(node.spec.gpus for node in file.each_node()) == 2
    assert file.model == str(tmp_path / "mistral")


def test_ranks_inside_a_node_can_be_served(tmp_path: Path) -> None:
    data = {"nodes": {"n": {"devices": 4, "memory": "80GB", "tflops": 300, "bandwidth_gbyte_s": 2000}}}
    out = tmp_path / "cluster.yaml"
    done = asked(tmp_path, data, "--layout", "split-tensor-2-1p1d", "--out", str(out))
    assert done.exit_code == 0, (done.output, done.exception)
    file = load_cluster_file(out)
    assert [file.ranks("prefill"), file.ranks("decode")] == [2, 2]
    assert [node.spec.role for node in file.each_node()] == ["both"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layout", "pipeline-2", "--out", "x.yaml"), "no pipeline stages"),
        (("--layout", "tensor-2", "--out", "x.yaml"), "ranks of a worker's engine are on one node"),
        (("--layout", "sideways", "--out", "x.yaml"), "possible here: "),
        (("--layout", "single"), "there is no --out"),
        (("--weights", "4Gi"), "--weights is '4Gi'"),
    ],
)
def test_wishes_that_cannot_be(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = asked(tmp_path, PAIR, *options)
    assert isinstance(done.exception, PlanError)
    assert message in str(done.exception)


def test_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: Any, **__: Any) -> None:
        raise AssertionError("opened a connection")

    monkeypatch.setattr("socket.socket.connect", no)
    done = asked(tmp_path, PAIR, model="nobody/has-this-model")
    assert isinstance(done.exception, PlanError)
    assert "nothing is downloaded" in str(done.exception)


def test_a_hub_model_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "models--somebody--mistral"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (kept / "snapshots" / ("0" * 40) / "config.json").write_text((MODELS / "mistral-7b.json").read_text())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = read("somebody/mistral")
    assert (found.name, found.parameters) == ("somebody/mistral", MISTRAL.parameters)
