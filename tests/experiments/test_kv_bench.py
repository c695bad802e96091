"""`bench kv`: its arithmetic, what it refuses, and a small real run."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from cluster import netns
from experiments import kv_bench
from experiments.kv_bench import BenchError, Case, Ends, Found, Parameters, Sample, measure, summary
from experiments.kv_plot import draw
from experiments.kv_station import MB
from experiments.results import load, save
from handoff.cli import app

RECORDED = Path(__file__).parents[2] / "results" / "bench-kv.json"

TINY = Parameters(
    mbytes=(1, 3),
    concurrency=(1, 2),
    links=("same-node",),
    transports=("tcp",),
    baselines=("torch.save",),
    rounds=2,
    pieces=False,
)


def sample(case: Case, gbit_s: float, first: bool = False, piece: int | None = None) -> Sample:
    seconds = case.nbytes * 8 / gbit_s / 1e9
    return Sample(
        case,
        seconds,
        cpu_s=case.nbytes / 1e9,
        busy_s=2 * seconds,
        peak_bytes=5 * MB,
        first=first,
        piece=piece,
    )


def test_what_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow transport's large cases, once its small ones have shown that it is slow."""
    asked: list[Case] = []

    def slow(_: object, case: Case, first: bool = False, piece: int | None = None) -> Sample:
        asked.append(case)
        return sample(case, 0.5, first, piece)

    monkeypatch.setattr(kv_bench, "transfer", slow)
    monkeypatch.setattr(kv_bench.shutil, "which", lambda tool: None)
    ends = Ends(lambda *_: None, lambda *_: (0.1, 0.1), [], None, ["tcp"])  # type: ignore[arg-type]
    found = Found()
    parameters = replace(TINY, mbytes=(16, 512), concurrency=(1, 8), rounds=3)
    kv_bench._measure_link(ends, "same-node", parameters, found, print)
    sizes = [(case.mbytes, case.concurrency) for case in asked]
    assert sizes[:3] == [(16, 1), (16, 8), (512, 1)]
    assert (512, 8) not in sizes
    assert sizes.count((16, 1)) == 3
    assert sizes.count((512, 1)) == 1  # it takes longer than case_s
    assert {"what": "tcp, 512 MB x 8", "link": "same-node", "reason": "it would take 69 s"} in found.missing


def test_rows_are_medians_and_ratios_to_the_limit_of_their_link() -> None:
    found = Found()
    tcp, plasma = Case("tcp", "cross-node", 109, 1), Case("plasma", "same-node", 109, 1)
    found.samples = [sample(tcp, rate) for rate in (8, 9, 30)] + [
        sample(plasma, 20, first=True),
        sample(plasma, 24),
    ]
    found.samples.append(sample(tcp, 99, piece=4))
    found.samples.append(sample(Case("tcp", "cross-node", 512, 8), 9))
    found.iperf["cross-node", 1] = [9, 10, 50]
    found.iperf["cross-node", 4] = [5, 6, 7]
    copy_s = 109 * MB * 8 / 50 / 1e9
    found.copies["same-node", 109] = [(copy_s, 0.01)] * 3
    results = summary(found, Parameters())
    rows = {row["case"]: row for row in results["rows"]}
    over_tcp, over_plasma = rows["cross-node/tcp/109x1"], rows["same-node/plasma/109x1"]
    assert (over_tcp["gbit_s_p50"], over_tcp["limit_gbit_s"], over_tcp["ratio"]) == (9, 10, 0.9)
    assert (over_tcp["cpu_s_per_gb"], over_tcp["cores_busy"], over_tcp["peak_mbytes"]) == (1.0, None, 5)
    assert over_tcp["checksum"] is True
    assert rows["cross-node/tcp/512x8"]["cores_busy"] == 2.0  # of what is over too soon, nothing can be said
    assert (over_plasma["limit"], over_plasma["limit_gbit_s"]) == ("two memory copies", 25)
    assert (over_plasma["gbit_s_first"], over_plasma["gbit_s_p50"], over_plasma["ratio"]) == (20, 22, 0.88)
    assert len(found.as_json()) == len(found.samples) + 6 + 3
    assert rows["cross-node/iperf3/0x1"]["gbit_s_p50"] == 10
    assert rows["same-node/memory copy/109x1"]["gbit_s_p50"] == 50
    assert results["pieces"] == [
        {"transport": "tcp", "link": "cross-node", "piece_mbytes": 4, "gbit_s_p50": 99}
    ]
    plot = ElementTree.fromstring(draw(results["rows"]))
    assert len(plot.findall(".//{*}polyline")) == 2  # of tcp and plasma; memory copies are no transport


def test_the_command_passes_on_what_was_asked_for_and_shows_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Parameters] = []
    recorded = load(RECORDED, "bench-kv")

    def measured(parameters: Parameters, progress: object) -> object:
        asked.append(parameters)
        return recorded

    monkeypatch.setattr(kv_bench, "measure", measured)
    monkeypatch.setattr("handoff.interrupt.end_in_order", lambda: None)
    out = tmp_path / "there" / "run.json"
    options = ["--quick", "--link", "cross-node", "--mbytes", "2", "--mbytes", "3", "--transport", "tcp"]
    done = CliRunner().invoke(app, ["bench", "kv", *options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    (parameters,) = asked
    assert (parameters.links, parameters.mbytes, parameters.transports) == (("cross-node",), (2, 3), ("tcp",))
    assert (parameters.rounds, parameters.pieces) == (2, False)
    assert load(out, "bench-kv").results["rows"] == recorded.results["rows"]
    assert ElementTree.parse(out.with_suffix(".svg")).findall(".//{*}polyline")


def test_the_recorded_run_has_every_row() -> None:
    rows = {row["case"]: row for row in load(RECORDED, "bench-kv").results["rows"]}
    for link in kv_bench.LINKS:
        for transport in ("tcp", "plasma"):
            row = rows[f"{link}/{transport}/109x1"]
            assert row["checksum"] is True
            assert row["gbit_s_p50"] > 0
            assert row["ratio"] == pytest.approx(row["gbit_s_p50"] / row["limit_gbit_s"], abs=0.002)
            assert row["cpu_s_per_gb"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"links": ("moon",)}, "link: 'moon' is not known; one of same-node"),
        ({"transports": ("pigeon",)}, "transport: 'pigeon' is not known; one of tcp"),
        ({"mbytes": (0,)}, "mbytes: must be between 1 and"),
    ],
)
def test_what_cannot_be_measured_is_refused(change: dict[str, tuple[object]], message: str) -> None:
    with pytest.raises(BenchError, match=re.escape(message)):
        measure(replace(TINY, **change), print)  # type: ignore[arg-type]


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_bench.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 20}))
    with pytest.raises(BenchError, match=r"needs 3\.5 GiB of free memory, 0\.0 GiB are free"):
        measure(TINY, print)


def test_missing_tools_are_reported_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real run on one node; neither namespaces nor iperf3 are there."""
    monkeypatch.setattr(netns, "missing", lambda: "network namespaces need root")
    monkeypatch.setattr(kv_bench.shutil, "which", lambda tool: None)
    run = measure(replace(TINY, links=("same-node", "cross-node")), print)
    assert run.results["not_measured"] == [
        {"what": "iperf3", "link": "same-node", "reason": "iperf3 not found: apt-get install iperf3"},
        {"what": "everything", "link": "cross-node", "reason": "network namespaces need root"},
    ]
    rows = {row["case"]: row for row in run.results["rows"]}
    assert {f"same-node/tcp/{size}x{count}" for size in (1, 3) for count in (1, 2)} < set(rows)
    assert all(row["gbit_s_p50"] > 0 for row in rows.values())
    ours, theirs = rows["same-node/tcp/3x2"], rows["same-node/torch.save/3x1"]
    assert (ours["checksum"], ours["samples"], ours["ratio"]) == (True, 2, None)
    assert not theirs["checksum"]
    save(run, tmp_path / "run.json")
    assert load(tmp_path / "run.json", "bench-kv").results["rows"] == run.results["rows"]


def test_a_bucket_is_compared_with_a_plain_client_of_its_server() -> None:
    run = measure(
        replace(TINY, mbytes=(1,), concurrency=(1,), transports=("s3",), baselines=("s3 plain",)), print
    )
    rows = {row["case"]: row for row in run.results["rows"]}
    plain, ours = rows["same-node/s3 plain/1x1"], rows["same-node/s3/1x1"]
    assert (ours["limit"], ours["limit_gbit_s"], ours["checksum"]) == ("s3 plain", plain["gbit_s_p50"], True)
    assert ours["ratio"] > 0
