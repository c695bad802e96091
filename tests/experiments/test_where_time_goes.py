"""`handoff experiment where-time-goes`: profiles taken apart, what follows, and two ranks for real."""

import copy
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import netns
from experiments import plan_model, where, where_run
from experiments.compare import compare
from experiments.models import make
from experiments.report import page, read
from experiments.results import Run, check, save
from experiments.where import Cell, cells, conclusions, link_rows, predicted_s, rows
from experiments.where_profile import PARTS, STEP, ProfileError, RankStep, rank_steps, together
from experiments.where_run import Parameters, WhereError, measure
from handoff import where as command
from handoff.cli import app

TOO_FEW_RIGHTS = netns.missing()
MODELS = Path(__file__).parent / "plan_models"
SHAPE = plan_model.read(str(MODELS / "mistral-7b.json"))
PER_STEP = 2 * SHAPE.layers + 1
MAIN, GLOO = 1, 7


def event(name: str, start: float, took: float, thread: int = MAIN, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "tid": thread, "ts": start, "dur": took, **more}


def reduced(start: float, took: float, tokens: int = 4, late: float = 10, kind: str = "all_reduce") -> Any:
    shape = {"Input Dims": [[tokens, 8]], "Input type": ["c10::BFloat16"]}
    call = "c10d::allreduce_" if kind == "all_reduce" else "c10d::_allgather_base_"
    return [
        event(call, start, 2 * late),
        event(f"gloo:{kind}", start + late, took - late, GLOO, cat="user_annotation", args=shape),
    ]


def trace(took: float = 500.0) -> dict[str, Any]:
    """A step of 2000 us: a product with a cast in it, an all-reduce, a KV write; and one of 1000 us."""
    events = [
        event(f"{STEP} 0", 0, 2000, cat="user_annotation"),
        event("aten::linear", 100, 400),
        event("_C::onednn_mm", 110, 300),
        event("aten::copy_", 420, 50),
        event("vllm::reduce", 590, took + 20),
        *reduced(600, took),
        event("aten::empty", 700, 20),  # while it waits: none of the computing
        event("_C::cpu_attn_reshape_and_cache", 1500, 100),
        event("aten::mul", 1500, 999, GLOO),  # another thread's
        event(f"{STEP} 1", 2000, 1000, cat="user_annotation"),
        *reduced(2100, 300, tokens=3),
        *reduced(2500, 100, tokens=1, kind="all_gather"),
        event("aten::argmax", 2700, 40),
    ]
    # A barrier before the first step is none of them; processes have metadata of their own.
    events = [*reduced(-90, 50, kind="barrier"), *events, {"ph": "M", "name": "process_name"}]
    return {"traceEvents": events[::-1]}


def test_a_profile_is_taken_apart() -> None:
    first, second = rank_steps(trace())
    assert (first.tokens, second.tokens) == (4, 3)
    assert first.seconds == pytest.approx(2000e-6)
    assert first.copy_s == pytest.approx(150e-6)
    assert first.compute_s == pytest.approx((50 + 300 + 20) * 1e-6)
    assert [(one.kind, one.nbytes) for one in first.collectives] == [("all_reduce", 64)]
    assert first.collectives[0].seconds == pytest.approx(500e-6)
    assert [(one.kind, one.nbytes) for one in second.collectives] == [("all_reduce", 48), ("all_gather", 16)]
    assert second.compute_s == pytest.approx(40e-6)


def test_the_last_rank_waits_for_nobody() -> None:
    first, second = together([rank_steps(trace(500)), rank_steps(trace(900))])
    assert first["transfer_s"] == pytest.approx(500e-6)
    assert first["wait_s"] == pytest.approx(200e-6)  # 400 of one, 0 of the other
    assert first["all_reduce_s"] == pytest.approx(700e-6)
    assert (first["all_reduces"], first["all_reduce_bytes"], first["other_collectives"]) == (1, 64, 0)
    assert (second["wait_s"], second["other_collectives"]) == (0, 1)
    assert second["transfer_s"] == pytest.approx(400e-6)
    assert second["all_reduce_s"] == pytest.approx(300e-6)
    for step in (first, second):
        assert sum(step[f"{part}_s"] for part in PARTS) == pytest.approx(step["seconds"], abs=5e-6)


def test_profiles_that_are_none_are_refused() -> None:
    with pytest.raises(ProfileError, match=f"no '{STEP}'"):
        rank_steps({"traceEvents": [event("aten::mm", 0, 1)]})
    shared = [one for one in trace()["traceEvents"] if not one["name"].startswith("gloo:")]
    with pytest.raises(ProfileError, match="3 collective calls, and 0 that gloo"):
        rank_steps({"traceEvents": shared})
    whole = rank_steps(trace())
    other = [RankStep(4, 1.0, 0.1, 0.1, ()), whole[1]]
    with pytest.raises(ProfileError, match="step 0"):
        together([whole, other])


# -- what follows

RATES = {None: 8e9, 1.0: 1e9, 0.2: 2e8}


def sample(cell: Cell, slower: float = 1.0, scale: float = 1.0, count: int = PER_STEP) -> dict[str, Any]:
    """What a model of 4096 hidden would have taken, with 20 ms of computing for 256 tokens."""
    named = {"cell": cell.name, "link": where.link_name(cell.gbit_s)}
    if cell.chunk is None:
        nbytes = 4 << 20
        took = nbytes * 8 / RATES[cell.gbit_s]
        return {**named, "what": "link", "nbytes": nbytes, "seconds": took, "empty_s": 2e-4}
    each = cell.chunk * SHAPE.hidden * 2
    spent = count * each * 8 / RATES[cell.gbit_s] * slower * scale
    own = {"compute_s": 0.02 * cell.chunk / 256, "copy_s": 0.001, "other_s": 0.002}
    step = {
        "tokens": cell.chunk,
        "seconds": spent + sum(own.values()),
        **own,
        "wait_s": spent / 4,
        "transfer_s": spent * 3 / 4,
        "all_reduces": count,
        "all_reduce_bytes": count * each,
        "all_reduce_s": spent,
        "other_collectives": 1,
    }
    steps = [dict(step) for _ in range(2048 // cell.chunk)]
    return {
        **named,
        "what": "prefill",
        "gbit_s": cell.gbit_s,
        "chunk_tokens": cell.chunk,
        "buffer_bytes": cell.buffer,
        "prompt_tokens": 2048,
        "seconds": 0.9 * sum(one["seconds"] for one in steps),
        "profiled_s": sum(one["seconds"] for one in steps),
        "sent_bytes": round(1.01 * sum(one["all_reduce_bytes"] for one in steps)),
        "steps": steps,
    }


WANTED = cells((None, 1.0, 0.2), (256, 2048), (64 << 10,))
SAMPLES = [sample(cell) for cell in WANTED]


def holds(samples: list[dict[str, Any]]) -> list[bool]:
    return [one.holds for one in conclusions(rows(samples, SHAPE), SHAPE)]


def test_cells_are_every_chunk_on_every_link_and_buffers_on_limited_ones() -> None:
    assert len(WANTED) == 3 + 3 * 2 + 2
    assert {cell.chunk for cell in WANTED if cell.buffer} == {2048}
    assert {cell.gbit_s for cell in WANTED if cell.buffer} == {1.0, 0.2}
    assert len({cell.name for cell in WANTED}) == len(WANTED)
    assert where.missing(SAMPLES[:-1], WANTED, 1) == [WANTED[-1]]


def test_a_row_adds_its_steps_up_and_has_the_prediction_beside() -> None:
    by = {row["case"]: row for row in rows(SAMPLES, SHAPE)}
    row = by["1 Gbit/s: chunks of 256"]
    assert (row["steps"], row["all_reduces"], row["all_reduces_per_step"]) == (8, 8 * PER_STEP, PER_STEP)
    assert row["compute_ms_p50"] == pytest.approx(160)
    assert row["each_mb"] == pytest.approx(256 * 4096 * 2 / 1e6, rel=1e-3)
    assert row["all_reduce_bytes"] == PER_STEP * 2048 * 4096 * 2
    ideal = 2 * SHAPE.layers * (2048 * 4096 * 2 * 8 / 1e9 + 8 * 2 * 1e-4)
    assert row["predicted_ms"] == pytest.approx(1e3 * ideal, rel=1e-3)
    assert predicted_s(SHAPE, [256] * 8, 1.0, 100) == pytest.approx(ideal)
    assert [row["gbit_s"] for row in rows(SAMPLES, SHAPE)] == [None, None, 1.0, 1.0, 1.0, 0.2, 0.2, 0.2]
    alone = rows([one for one in SAMPLES if one["what"] == "prefill"], SHAPE)
    assert {row["predicted_ms"] for row in alone} == {None}
    assert [one["bus_gbit_s_p50"] for one in link_rows(SAMPLES)] == [8.0, 1.0, 0.2]
    assert link_rows(SAMPLES)[0]["latency_us_p50"] == 100


def changed(where_: Any, **how: Any) -> list[dict[str, Any]]:
    return [sample(cell, **how) if where_(cell) else sample(cell) for cell in WANTED]


def test_each_claim_falls_by_its_own_figures() -> None:
    assert holds(SAMPLES) == [True] * 5
    assert holds(changed(lambda cell: cell.chunk, count=PER_STEP - 1))[0] is False
    lost = copy.deepcopy(SAMPLES)
    lost[-1]["sent_bytes"] //= 2  # reduced by another way than the link
    assert holds(lost) == [False, True, True, True, True]
    assert holds(changed(lambda cell: cell.gbit_s == 0.2, scale=1e-3))[1] is False
    assert holds(changed(lambda cell: cell.chunk == 2048 and cell.gbit_s == 0.2, slower=0.75))[2] is False
    assert holds(changed(lambda cell: cell.buffer, slower=0.75)) == [True, True, True, False, True]
    late = changed(lambda cell: cell.chunk == 256 and cell.gbit_s == 1.0, slower=2.0)
    assert holds(late) == [True, True, True, True, False]
    assert conclusions(rows([one for one in SAMPLES if one["link"] == "unlimited"], SHAPE), SHAPE) == []


def test_mistakes_name_the_option_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where_run.netns, "missing", lambda: "network namespaces need root")
    with pytest.raises(WhereError, match="need root"):
        measure(Parameters("model"), tmp_path / "out.json", print)
    monkeypatch.setattr(where_run.netns, "missing", lambda: None)
    arguments = ["experiment", "where-time-goes", "--model", str(MODELS), "--prompt", "100"]
    result = CliRunner().invoke(app, [*arguments, "--chunk", "256", "--out", str(tmp_path / "o")])
    assert isinstance(result.exception, WhereError)
    assert "--chunk is 256, --prompt 100" in str(result.exception)


class Recorder:
    def __init__(self, interrupted_at: int | None) -> None:
        self.asked: list[str] = []
        self.interrupted_at = interrupted_at

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, cell: Cell) -> dict[str, Any]:
        self.asked.append(cell.name)
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        return sample(cell)


def test_an_interrupted_experiment_goes_on_and_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(where_run.netns, "missing", lambda: None)
    recorders: list[Recorder] = []

    def ranks(*_: object) -> Recorder:
        recorders.append(Recorder(None if recorders else 9))
        return recorders[-1]

    monkeypatch.setattr(where_run, "_ranks", ranks)
    out = tmp_path / "where-time-goes.json"
    wanted = Parameters(str(MODELS / "mistral-7b.json"), chunks=(256, 2048), buffers=(64 << 10,), repeats=2)
    with pytest.raises(KeyboardInterrupt):
        measure(wanted, out, lambda _: None)
    run = measure(wanted, out, lambda _: None)
    asked = [*recorders[0].asked[:8], *recorders[1].asked]
    assert sorted(asked) == sorted(2 * [cell.name for cell in WANTED])
    assert measure(wanted, out, lambda _: None).results == run.results
    assert len(recorders) == 2
    assert len(check(out).results["conclusions"]) == 5
    assert {one.finding for one in compare(out, out).rows} == {"too few samples"}
    text = page(read([out]))
    assert "0.2 Gbit/s: chunks of 2048: 99." in text  # beside the published 99.4 %
    assert "Where does the time of a tensor-parallel prefill go?" in text
    assert 'fill="#c9504a"' in text  # waiting, in the bars
    command.show(run.results)
    shown = capsys.readouterr().out
    assert "published, 62 layers" in shown
    assert "Step by step, 0.2 Gbit/s: chunks of 256" in shown


def test_a_run_without_figures_is_refused_by_the_schema(tmp_path: Path) -> None:
    run = Run.begin("where-time-goes", asdict(Parameters("m"))).end({"rows": []}, SAMPLES)
    save(run, tmp_path / "where-time-goes.json")
    with pytest.raises(ValueError, match="measure again"):
        check(tmp_path / "where-time-goes.json")


@pytest.mark.skipif(TOO_FEW_RIGHTS is not None, reason=f"no hosts of their own here: {TOO_FEW_RIGHTS}")
def test_sockets_get_the_buffers_that_a_node_is_told() -> None:
    def most(node: netns.Node) -> list[str]:
        argv = [*node.prefix, "cat", "/proc/sys/net/ipv4/tcp_wmem", "/proc/sys/net/ipv4/tcp_rmem"]
        text = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20).stdout
        return [line.split()[2] for line in text.splitlines()]

    outside = [Path(f"/proc/sys/net/ipv4/tcp_{way}").read_text().split()[2] for way in ("wmem", "rmem")]
    with netns.network(1) as network:
        (node,) = network.nodes
        node.buffers(98304)
        assert most(node) == ["98304", "98304"]
        node.buffers(None)
        assert most(node) == outside
    assert [
        Path(f"/proc/sys/net/ipv4/tcp_{way}").read_text().split()[2] for way in ("wmem", "rmem")
    ] == outside


@pytest.mark.skipif(TOO_FEW_RIGHTS is not None, reason=f"no hosts of their own here: {TOO_FEW_RIGHTS}")
@pytest.mark.experiment
def test_two_ranks_on_a_link_for_real(tmp_path: Path) -> None:
    """A real engine. Counts do not depend on the machine; of times, only what a slow link must take."""
    model = make(tmp_path / "tiny", "tiny", lambda _: None)
    traces = tmp_path / "traces"
    wanted = Parameters(str(model), 600, (0.05,), (300, 600), (64 << 10,), repeats=1)
    run = measure(wanted, tmp_path / "where-time-goes.json", print, traces)
    check(tmp_path / "where-time-goes.json")
    found = {one["claim"].partition(" (")[0]: one for one in run.results["conclusions"]}
    assert found["A layer has 2 all-reduces of its activations"]["holds"], found
    assert found["Prefill is waiting for all-reduces"]["holds"], found
    by = {row["case"]: row for row in run.results["rows"]}
    halves = by["0.05 Gbit/s: chunks of 300"]["by_step"]
    assert [(step["tokens"], step["all_reduces"]) for step in halves] == [(300, 17)] * 2
    # 17 times 600 tokens of 512 elements of 2 bytes cannot cross the link faster.
    assert all(row["all_reduce_ms_p50"] > 0.9 * 17 * 600 * 1024 * 8 / 0.05e6 for row in by.values())
    assert len(list(traces.glob("*-rank?.json"))) == 2 * (2 + 3)  # warming up, and three cells
