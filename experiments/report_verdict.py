"""The verdict of recorded runs: a line for each question, its answer, and the figures behind it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from experiments import head, mesh, pipeline, placement, where
from experiments.compare import Finding, finding
from experiments.report_tables import ratios, within
from experiments.results import Run

NOT_MEASURED: Final = "not measured"
KV_MBYTES: Final = 109
GOODPUT: Final = "Does adaptive routing serve more requests in time than the best other mode?"
KV: Final = "How fast does KV cross?"
DISAGGREGATE: Final = "Should I disaggregate?"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the verdict: what was asked, what was found, and the figures behind it."""

    question: str
    answer: str
    figures: str
    finding: Finding | None = None


def verdict(runs: Sequence[Run]) -> list[Line]:
    """Return what the runs say, and what they do not."""
    told = "No run has compared both on equal hardware, with real engines and many requests at once."
    lines = [_disaggregate_line(run) for run in runs if run.kind == "verdict"]
    lines = lines or [Line(DISAGGREGATE, NOT_MEASURED, told)]
    for kind, (question, said) in LINES.items():
        of = [run for run in runs if run.kind == kind]
        for run in of:
            which = f"Run of {run.started}: " if len(of) > 1 else ""
            lines += [replace(line, figures=which + line.figures) for line in said(run)]
        if not of:
            lines.append(Line(question, NOT_MEASURED, f"make {kind} measures it."))
    for run in runs:
        if run.kind == placement.KIND:
            lines.append(_placement_line(run))
        if run.kind == head.KIND:
            lines.append(_head_line(run))
        if run.kind == mesh.KIND:
            told = run.results["conclusions"]
            answer = f"{sum(one['holds'] for one in told)} of {len(told)} claims hold"
            figures = " ".join(f"{one['figures']}." for one in told)
            lines.append(Line("Do weights, KV and waiting tokens stay off the gateway?", answer, figures))
        if run.kind == where.KIND:
            lines.append(_where_line(run))
        if run.kind == pipeline.KIND:
            lines.append(_pipeline_line(run))
    return lines


def _pipeline_line(run: Run) -> Line:
    items = [check for row in run.results["rows"] for check in row["checks"]]
    passed = sum(check["ok"] for check in items)
    told = [f"{row['setup']}: {row['split']}" for row in run.results["rows"]]
    answer = f"{'yes' if passed == len(items) else 'no'}: {passed} of {len(items)} items pass"
    figures = f"{'; '.join(told)}. {' '.join(run.results['recommendation'])}"
    found: Finding = "better" if passed == len(items) else "worse"
    return Line("Does vLLM run in pipeline stages over these nodes?", answer, figures.strip(), found)


def _disaggregate_line(run: Run) -> Line:
    said = run.results["verdicts"]
    pays = [one["mix"] for one in said if one["disaggregate"]]
    answer = f"yes, for {_listed(pays)}" if pays else "don't"
    figures = "; ".join(f"{one['mix']}: {one['answer']}" for one in said)
    workers, rate = run.parameters["workers"], run.parameters["gbit_s"]
    how = "simulated, with steps measured on a real engine"
    told = f"{workers} engines, link of {rate:.3g} Gbit/s, {how}. {figures}."
    return Line(DISAGGREGATE, answer, told)


def _placement_line(run: Run) -> Line:
    told = run.results["conclusions"]
    names = ", ".join(one["claim"].partition(" (here")[0] for one in told if not one["holds"])
    not_so = f"Not so here: {names}." if names else ""
    model, limit = run.results["model_bytes"] / 1e6, run.parameters["gbit_s"]
    where = "pods on one machine, no links" if limit is None else f"links of {limit:g} Gbit/s"
    links = where if run.parameters["cluster"] is None else f"cluster {run.parameters['cluster']}"
    answer = f"{sum(one['holds'] for one in told)} of {len(told)} conclusions hold"
    question = "Does moving a model by Ray's store and by S3 behave as published?"
    return Line(question, answer, f"{model:.0f} MB, {links}. {not_so}".strip())


def _where_line(run: Run) -> Line:
    usual = [row for row in run.results["rows"] if row["buffer_bytes"] is None]
    most = max(usual, key=lambda row: row["all_reduce_percent"])
    told = run.results["conclusions"]
    answer = f"{most['all_reduce_percent']:.0f} % of it waits for all-reduces, over {most['link']}"
    figures = f"{sum(one['holds'] for one in told)} of {len(told)} claims of the report hold."
    figures += "".join(f" Not so here: {one['claim']}: {one['figures']}." for one in told if not one["holds"])
    return Line("Where does the time of a tensor-parallel prefill go?", answer, figures)


def _head_line(run: Run) -> Line:
    pays = [one for one in run.results["break_even"] if one["speedup"] is not None]
    told = [f"{one['link']}, {one['prompt_tokens']} tokens: {one['speedup']:g} times" for one in pays]
    answer = f"yes, to a node that is fast enough: {'; '.join(told)}" if pays else "don't"
    question = "Does handing one request over pay, sent after prefill?"
    return Line(question, answer, " ".join(run.results["recommendation"]))


def _serve_lines(run: Run) -> list[Line]:
    asked = {"ttft_ratio": "Is the first token later?", "tpot_ratio": "Do the tokens after it take longer?"}
    lines = []
    for measure, question in asked.items():
        found: dict[Finding, list[str]] = {}
        figures = []
        for row, ratio, bounds in ratios(run, measure):
            found.setdefault(finding(bounds, higher_is_better=False), []).append(str(row["prompt_tokens"]))
            figures.append(f"{row['prompt_tokens']} tokens {ratio:.2f}{within(bounds)}")
        parts = {"worse": "slower", "better": "faster", "noise": "no difference beyond noise"}
        answer = "; ".join(
            f"{parts.get(name, name)} at {_listed(lengths)} tokens" for name, lengths in found.items()
        )
        worst = next((name for name in ("worse", "better", "noise") if name in found), None)
        told = f"Handoff by undivided vLLM, one request at a time: {', '.join(figures)}."
        lines.append(Line(question, answer, told, worst))
    equal, outputs = run.results["outputs_equal"], run.results["outputs"]
    same = "yes" if equal == outputs else "no"
    told = f"{equal} of {outputs} answers equal those of undivided vLLM."
    lines.append(Line("Are the answers the same?", same, told, "better" if equal == outputs else "worse"))
    return lines


def _goodput_lines(run: Run) -> list[Line]:
    lines = []
    for engine in dict.fromkeys(row["engine"] for row in run.results["rows"]):
        found: dict[Finding, list[str]] = {"worse": [], "better": [], "noise": []}
        told = []
        for ratio in run.results["ratios"]:
            if ratio["engine"] != engine:
                continue
            low, high = ratio["by_best_ci95"] or (0.0, 1.0)
            found["better" if low > 1 else "worse" if high < 1 else "noise"].append(ratio["mix"])
            by = "–" if ratio["by_best"] is None else f"{ratio['by_best']:.2f} ({low:.2f} to {high:.2f})"
            told.append(f"{ratio['mix']} {by}")
        parts = {"worse": "fewer", "better": "more", "noise": "within noise"}
        seen = [name for name in found if found[name]]
        answer = "; ".join(f"{parts[name]} on {_listed(found[name])}" for name in seen)
        note = "; engines simulated, no model computed" if engine == "simulated" else ""
        figures = f"Goodput by that of the best other mode, {engine} engine: {', '.join(told)}{note}."
        lines.append(Line(GOODPUT, answer, figures, seen[0] if seen else None))
    return lines


def _kv_lines(run: Run) -> list[Line]:
    rows = [row for row in run.results["rows"] if row["checksum"] and row["concurrency"] == 1]
    size = min((row["mbytes"] for row in rows), key=lambda mbytes: abs(mbytes - KV_MBYTES), default=None)
    told = []
    for link in dict.fromkeys(row["link"] for row in rows):
        here = [row for row in rows if (row["link"], row["mbytes"]) == (link, size)]
        best = max(here, key=lambda row: row["gbit_s_p50"], default=None)
        if best is not None:
            share = "" if best["ratio"] is None else f" ({best['ratio']:.2f} of {best['limit']})"
            told.append(f"{link}: {best['transport']}, {best['gbit_s_p50']:.2f} Gbit/s{share}")
    if not told:
        return [Line(KV, NOT_MEASURED, "the run has no verified transfer")]
    return [Line(KV, f"{size} MB, fastest transport of each link", "; ".join(told))]


LINES: Final[Mapping[str, tuple[str, Callable[[Run], list[Line]]]]] = {
    "bench-serve": ("Is the first token later, and those after it?", _serve_lines),
    "bench-goodput": (GOODPUT, _goodput_lines),
    "bench-kv": (KV, _kv_lines),
}


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
