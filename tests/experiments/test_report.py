"""`handoff report`: the page is well-formed and alone, says what the files say, and what they do not."""

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from experiments import bars
from experiments.bars import Bar
from experiments.report import PUBLISHED, page, published, read
from experiments.report_verdict import verdict
from experiments.results import ResultError, Run
from handoff.cli import app

RESULTS = Path(__file__).parents[2] / "results"
FILES = [RESULTS / f"bench-{name}.json" for name in ("kv", "goodput", "serve")]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def html() -> str:
    return page(read(FILES))


def runs(kind: str | None = None) -> list[Run]:
    return [run for _, run in read(FILES) if kind in (None, run.kind)]


def edited(kind: str, edit: Callable[[dict[str, Any]], object], folder: Path) -> list[Run]:
    data = json.loads((RESULTS / f"{kind}.json").read_text())
    edit(data)
    (folder / "edited.json").write_text(json.dumps(data))
    return [run for _, run in read([folder / "edited.json"])]


def cells(html: str, section: str) -> list[list[str]]:
    """The rows of the tables below a heading."""
    body = ElementTree.fromstring(html).find("body")
    assert body is not None
    found, here = [], False
    for part in body:
        here = part.text == section if part.tag == "h2" else here
        if here:
            found += [["".join(cell.itertext()) for cell in row] for row in part.iter("tr")]
    return found


def test_the_page_is_well_formed_and_loads_nothing(html: str) -> None:
    root = ElementTree.fromstring(html)
    (goodput,) = runs("bench-goodput")
    assert len(root.findall(".//svg")) >= 4 + 6 + len(goodput.results["ratios"]) > 4 + 6
    assert not {"script", "link", "iframe", "img", "object", "embed", "image", "use"} & {
        element.tag for element in root.iter()
    }
    for element in root.iter():
        assert not {"src", "srcset", "style", "background"} & set(element.keys()), element.tag
        assert element.tag == "a" or "href" not in str(list(element.keys()))
    assert not re.search(r"https?:|url\(|@import|//[a-z]", re.sub(r"<a [^>]*>", "", html))


def test_every_case_of_bench_kv_is_in_its_table(html: str) -> None:
    (run,) = runs("bench-kv")
    shown = cells(html, "bench-kv")
    heads = [row for row in shown if row[0] == "transport"]
    sizes = [int(name.removesuffix(" MB")) for name in heads[0][2:]]
    assert sizes == [1, 16, 109, 512]
    links = list(dict.fromkeys(row["link"] for row in run.results["rows"]))
    assert len(heads) == len(links) == 4
    link, found = -1, {}
    for name, at_once, *figures in shown:
        if name == "transport":
            link, sizes = link + 1, [int(size.removesuffix(" MB")) for size in figures]
            continue
        for size, figure in zip(sizes, figures, strict=True):
            found[links[link], name, size, int(at_once)] = figure
    for row in run.results["rows"]:
        if row["mbytes"]:
            figure = found.pop((row["link"], row["transport"], row["mbytes"], row["concurrency"]))
            assert figure.split()[0] == f"{row['gbit_s_p50']:.2f}"
        else:
            assert f"{row['concurrency']}: {row['gbit_s_p50']:.2f}" in html
    assert set(found.values()) <= {"–"}


def test_every_row_of_the_others_is_in_its_table(html: str) -> None:
    (serve,), (goodput,) = runs("bench-serve"), runs("bench-goodput")
    table = {row[0]: row for row in cells(html, "bench-serve")}
    for row in serve.results["rows"]:
        ours = row["system"] == "handoff"
        first, each = table[str(row["prompt_tokens"])][1:4], table[str(row["prompt_tokens"])][4:7]
        assert first[int(ours)] == f"{row['ttft_ms_p50']:.1f}"
        assert each[int(ours)] == f"{row['tpot_ms_p50']:.2f}"
        if ours:
            assert first[2].startswith(f"{row['ttft_ratio']:.2f} (")
            assert table[str(row["prompt_tokens"])][7] == f"{row['handover_overhead_ms_p50']:.1f}"
    table = {row[0]: row for row in cells(html, "bench-goodput")}
    assert len(table) == len(goodput.results["rows"]) + 1
    for row in goodput.results["rows"]:
        shown = table[f"{row['mix']}, {row['system']}, {row['engine']}"]
        assert shown[1] == f"{row['goodput_rps']:.2f}"
    for ledger in serve.results["ledger"]:
        for ms in (ledger["first_token_ms_p50"] | ledger["handover_ms_p50"]).values():
            assert f">{ms:.2f}</text>" in html


def test_published_figures_stand_beside_those_measured() -> None:
    (run,) = runs("bench-kv")
    rates = {row["case"]: row for row in run.results["rows"]}
    (first, *others) = published(runs())
    beside = {row["what"]: (row["published"], row["here"]) for row in first["rows"]}
    share, here = beside["Pickled tensors over TCP, share of the link"]
    assert share == "13 %"
    percent = 100 * rates["cross-node-10g/torch.save/109x1"]["ratio"]
    assert f"cross-node-10g: {percent:.1f} %" in here
    assert len(here) == 4
    moved, here = beside["109 MB from cache to cache, Handoff over TCP"]
    assert moved is None
    ms = 109 * 2**20 * 8 / rates["cross-node-1g/tcp/109x1"]["gbit_s_p50"] / 1e6
    assert f"cross-node-1g: {ms:.0f} ms" in here
    assert [len(row["here"]) for row in first["rows"]] == [4] * 8 + [3] * 2 + [
        0
    ] * 11  # no head to head among them
    assert not [one for report in others for row in report["rows"] for one in row["here"]]
    assert {report["id"] for report in json.loads(PUBLISHED.read_text())} == {"R1", "R2", "R3", "R4", "R5"}


def test_without_runs_of_a_kind_the_verdict_says_not_measured() -> None:
    assert [line.answer for line in verdict([])] == ["not measured"] * 4
    answers = {line.question: line.answer for line in verdict(runs("bench-serve"))}
    assert answers["How fast does KV cross?"] == "not measured"
    assert answers["Is the first token later?"] != "not measured"
    assert answers["Should I disaggregate?"] == "not measured"


def test_of_two_runs_of_a_kind_each_figure_says_which() -> None:
    one = runs("bench-serve")[0]
    two = [one, replace(one, started="2026-12-24T18:00:00+00:00")]
    later = [line.figures for line in verdict(two) if line.question == "Is the first token later?"]
    assert [text.split(": ")[0] for text in later] == [f"Run of {run.started}" for run in two]
    (ratio,) = (row for row in published(two)[0]["rows"] if "divided by" in row["what"])
    assert [text[:25] for text in ratio["here"]] == [run.started for run in two for _ in range(3)]


def test_the_verdict_follows_the_samples(tmp_path: Path) -> None:
    def slower(data: dict[str, Any]) -> None:
        for one in data["samples"]:
            if (one["system"], one["prompt_tokens"]) == ("handoff", 3900):
                one["ttft_ms"] *= 2
        data["outputs_equal"] -= 1

    lines = {line.question: line for line in verdict(edited("bench-serve", slower, tmp_path))}
    later = lines["Is the first token later?"]
    assert later.finding == "worse"
    assert "slower at 3900 tokens" in later.answer
    same = lines["Are the answers the same?"]
    assert (same.answer, same.finding) == ("no", "worse")

    def few(data: dict[str, Any]) -> None:
        data["samples"] = [one for one in data["samples"] if one["repeat"] < 2]

    lines = {line.question: line for line in verdict(edited("bench-serve", few, tmp_path))}
    assert lines["Is the first token later?"].answer == "too few samples at 256, 2048 and 3900 tokens"
    assert lines["Is the first token later?"].finding is None


@pytest.mark.parametrize(
    ("interval", "answer"), [([1.1, 1.5], "more on balanced"), ([0.1, 0.2], "fewer on balanced")]
)
def test_goodput_is_more_or_less_where_the_interval_is_apart_from_one(
    interval: list[float], answer: str, tmp_path: Path
) -> None:
    def apart(data: dict[str, Any]) -> None:
        for ratio in data["ratios"]:
            ratio["by_best_ci95"] = interval if ratio["mix"] == "balanced" else [0.9, 1.1]

    lines = verdict(edited("bench-goodput", apart, tmp_path))
    assert [line for line in lines if line.answer.startswith(f"{answer};")]


def test_what_is_in_a_file_cannot_become_markup(tmp_path: Path) -> None:
    def marked(data: dict[str, Any]) -> None:
        data["host"]["cpu"] = "<script>alert(1)</script>"
        data["rows"][0]["transport"] = data["samples"][0]["transport"] = "<b>&tcp</b>"

    edited("bench-kv", marked, tmp_path)
    html = page(read([tmp_path / "edited.json"]))
    root = ElementTree.fromstring(html)
    assert not {"script", "b"} & {element.tag for element in root.iter()}
    assert "<b>&tcp</b>" in "".join(root.itertext())


def test_a_run_of_a_kind_without_tables_is_shown_with_its_facts(tmp_path: Path) -> None:
    edited("bench-kv", lambda data: data.update(kind="race"), tmp_path)
    assert "no tables for runs of this kind" in page(read([tmp_path / "edited.json"]))


def test_bars_are_to_scale() -> None:
    drawn = bars.draw([Bar("all", 4.0, "4"), Bar("half", 2.0, "2"), Bar("early", -1.0, "-1")], "t")
    widths = [float(one.get("width", "")) for one in ElementTree.fromstring(drawn).iter("rect")]
    assert widths[1] == pytest.approx(widths[0] / 2, abs=0.1)
    assert widths[2] == 0


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "there" / "report.html"
    done = CliRunner().invoke(app, ["report", *map(str, FILES), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert ElementTree.parse(out).getroot().tag == "html"
    monkeypatch.chdir(tmp_path)
    none = CliRunner().invoke(app, ["report"])
    assert isinstance(none.exception, ResultError)
    assert "make bench-serve" in str(none.exception)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_chromium_renders_it_at_a_phones_width(html: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(html)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shot = tmp_path / "page.png"
    command = [str(CHROMIUM), *options, "--window-size=390,2000", f"--screenshot={shot}"]
    done = subprocess.run([*command, str(tmp_path / "page.html")], capture_output=True, timeout=120)
    assert shot.exists(), done.stderr[-2000:]
    data = shot.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (390, 2000)
    assert len(data) > 20_000, "the page is blank"
