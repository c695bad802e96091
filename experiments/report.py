"""One page of recorded runs: the verdict first, published figures beside, nothing loaded from anywhere.

Everything shown is read from the files; what none of them has is called "not measured".
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments import bars, head, kv_plot, mesh, placement, probe_map
from experiments.bars import Bar
from experiments.compare import Finding, finding, of_median, series
from experiments.results import ResultError, Run, check

HERE: Final = Path(__file__).parent
PUBLISHED: Final = HERE / "published.json"
NOT_MEASURED: Final = "not measured"
MB, KV_MBYTES = 2**20, 109
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


def read(paths: Sequence[Path]) -> list[tuple[Path, Run]]:
    """Return the runs of files in the page's order; ``ResultError`` if one does not fit the schema."""
    if not paths:
        raise ResultError(
            "no recorded runs to report on: make bench-serve (or bench-kv, bench-goodput) first"
        )
    order = list(_LINES)
    runs = [(path, check(path)) for path in paths]
    return sorted(runs, key=lambda one: order.index(one[1].kind) if one[1].kind in order else len(order))


def page(runs: Sequence[tuple[Path, Run]]) -> str:
    """Return the page: HTML that is well-formed XML too."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        verdict=verdict([run for _, run in runs]),
        published=published([run for _, run in runs]),
        sections=[_section(path, run) for path, run in runs],
    )


# -- the verdict


def verdict(runs: Sequence[Run]) -> list[Line]:
    """Return what the runs say, and what they do not."""
    told = "No run has compared both on equal hardware, with real engines and many requests at once."
    lines = [_disaggregate_line(run) for run in runs if run.kind == "verdict"]
    lines = lines or [Line(DISAGGREGATE, NOT_MEASURED, told)]
    for kind, (question, said) in _LINES.items():
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
    return lines


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
        for row, ratio, bounds in _ratios(run, measure):
            found.setdefault(finding(bounds, higher_is_better=False), []).append(str(row["prompt_tokens"]))
            figures.append(f"{row['prompt_tokens']} tokens {ratio:.2f}{_within(bounds)}")
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


_LINES: Final[Mapping[str, tuple[str, Callable[[Run], list[Line]]]]] = {
    "bench-serve": ("Is the first token later, and those after it?", _serve_lines),
    "bench-goodput": (GOODPUT, _goodput_lines),
    "bench-kv": (KV, _kv_lines),
}


def _ratios(run: Run, measure: str) -> list[tuple[Any, float, tuple[float, float] | None]]:
    """Return (row, median ratio, its interval if there are samples enough) of each of Handoff's rows."""
    found, taken = [], series(run)
    for row in run.results["rows"]:
        if row["system"] == "handoff":
            values = taken[f"handoff/{row['prompt_tokens']}", measure].values
            found.append((row, row[measure], of_median(values)))
    return found


def _within(bounds: tuple[float, float] | None) -> str:
    return " (too few samples)" if bounds is None else f" ({bounds[0]:.2f} to {bounds[1]:.2f})"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# -- published figures


def published(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the reports with, beside each figure, what was measured here: (where, figure) or nothing."""
    reports: list[dict[str, Any]] = json.loads(PUBLISHED.read_text("utf-8"))
    for report in reports:
        for row in report["rows"]:
            row["here"] = [
                f"{run.started}, {one}" if [other.kind for other in runs].count(run.kind) > 1 else one
                for run in runs
                for one in _beside(run, row["measured"])
            ]
    return reports


def _beside(run: Run, wanted: Mapping[str, Any] | None) -> list[str]:
    if wanted is None or wanted["kind"] != run.kind:
        return []
    found = []
    for row in map(_derived, run.results[wanted.get("rows", "rows")]):
        if all(row[name] == value for name, value in wanted["where"].items()):
            value = row[wanted["field"]]
            where = _where(row)
            if value is not None:
                found.append(f"{where}: {_short(value)} {wanted['unit']}".rstrip())
    return found


def _where(row: Mapping[str, Any]) -> str:
    """What tells a row from the others that stand beside the same published figure."""
    if "phases_ms_p50" in row:
        return f"{row['link']}, {row['prompt_tokens']} tokens"
    if "pair" in row:
        return f"{row['pair']}, {row['prompt_tokens']} tokens"
    if "choice" in row:
        return str(row["choice"])
    if "link" in row:
        return str(row["link"])
    if "loaders" in row:
        return f"{len(row['loaders'])} loader{'s' if len(row['loaders']) > 1 else ''}"
    if "source" in row:
        return f"{row['source']} > {row['target']}" if row["target"] else str(row["source"])
    return f"{row['prompt_tokens']} tokens"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the units that the reports use."""
    if "tpot_ms_p50" in row:
        return {**row, "tokens_s": 1e3 / row["tpot_ms_p50"]}
    if "loaders" in row:
        by = {f"machine_{name}": seconds for name, seconds in row["by_machine_s_p50"].items()}
        return {**row, **by, "name": row["case"].rpartition(" x")[0]}
    if "source" in row or "pair" in row or "choice" in row:
        return dict(row)
    if "phases_ms_p50" in row:
        share = row["transfer_share"]
        return {**row, "share_percent": None if share is None else 100 * share, **head.sums(row)}
    percent = None if row["ratio"] is None else 100 * row["ratio"]
    return {**row, "ms": row["mbytes"] * MB * 8 / row["gbit_s_p50"] / 1e6, "ratio_percent": percent}


# -- a section for each run


def _section(path: Path, run: Run) -> dict[str, Any]:
    tables, plots = _PARTS.get(run.kind, lambda _: ([], []))(run)
    facts = {
        "file": path.name,
        "started": run.started,
        "commit": run.commit or "unknown",
        "machine": f"{run.host['cpu']}, {run.host['cores']} cores, {run.host['memory_bytes'] / 1e9:.0f} GB, "
        f"{run.host['system']}, load {run.host['load_average_1m']} at the start",
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "parameters": json.dumps(dict(run.parameters)),
    }
    return {"kind": run.kind, "facts": facts, "tables": [asdict(one) for one in tables], "plots": plots}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts; the first column is named, the others are figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


Plot = tuple[str, Markup]
"""(title, SVG)."""
Parts = tuple[list[Table], list[Plot]]


def _serve_parts(run: Run) -> Parts:
    rows, ratios = run.results["rows"], {name: _ratios(run, name) for name in ("ttft_ratio", "tpot_ratio")}
    plain = {row["prompt_tokens"]: row for row in rows if row["system"] == "undivided"}
    cells = []
    for (row, ttft, ttft_bounds), (_, tpot, tpot_bounds) in zip(*ratios.values(), strict=True):
        other = plain[row["prompt_tokens"]]
        overhead = row["handover_overhead_ms_p50"]
        cells.append(
            [
                str(row["prompt_tokens"]),
                f"{other['ttft_ms_p50']:.1f}",
                f"{row['ttft_ms_p50']:.1f}",
                f"{ttft:.2f}{_within(ttft_bounds)}",
                f"{other['tpot_ms_p50']:.2f}",
                f"{row['tpot_ms_p50']:.2f}",
                f"{tpot:.2f}{_within(tpot_bounds)}",
                "" if overhead is None else f"{overhead:.1f}",
            ]
        )
    first, each = (
        ("first token ms, undivided", "handoff", "ratio"),
        ("per token ms, undivided", "handoff", "ratio"),
    )
    columns = ("prompt tokens", *first, *each, "handover overhead ms")
    title = "Handoff against undivided vLLM: medians; ratios of pairs with 95 % intervals"
    plots = []
    for ledger in run.results["ledger"]:
        length = f"{ledger['prompt_tokens']} prompt tokens"
        plots.append(_stages(f"Time to the first token, ms: {length}", ledger["first_token_ms_p50"]))
        plots.append(
            _stages(
                f"From the end of prefill to decode's first token, ms: {length}", ledger["handover_ms_p50"]
            )
        )
    return [Table(title, columns, cells)], plots


def _stages(title: str, stages: Mapping[str, float]) -> Plot:
    drawn = [Bar(name.replace("_", " "), ms, f"{ms:.2f}") for name, ms in stages.items()]
    return title, Markup(bars.draw(drawn, title))


def _kv_parts(run: Run) -> Parts:
    rows = run.results["rows"]
    tables = []
    for link in dict.fromkeys(row["link"] for row in rows):
        here = [row for row in rows if row["link"] == link]
        sizes = sorted({row["mbytes"] for row in here if row["mbytes"]})
        cells = []
        for name, at_once in sorted(
            {(row["transport"], row["concurrency"]) for row in here if row["mbytes"]}
        ):
            of = {
                row["mbytes"]: row
                for row in here
                if (row["transport"], row["concurrency"]) == (name, at_once)
            }
            cells.append([name, str(at_once), *(_rate(of.get(size)) for size in sizes)])
        streams = [f"{row['concurrency']}: {row['gbit_s_p50']:.2f}" for row in here if not row["mbytes"]]
        missing = [one for one in run.results["not_measured"] if one["link"] == link]
        notes = [f"iperf3, Gbit/s by streams: {', '.join(streams)}"] if streams else []
        notes += [f"not measured: {one['what']}: {one['reason'].strip().splitlines()[-1]}" for one in missing]
        title = (
            f"{link}: Gbit/s, in brackets the share of its limit (iperf3, memory copies, or a plain client)"
        )
        tables.append(Table(title, ("transport", "at once", *(f"{size} MB" for size in sizes)), cells, notes))
    drawn = kv_plot.panels(rows)
    box = f'<svg viewBox="0 0 {kv_plot.WIDTH} {kv_plot.HEIGHT}" class="rates" role="img">'
    return tables, [(f"Rate over size: {link}", Markup(f"{box}{svg}</svg>")) for link, svg in drawn.items()]


def _rate(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    share = "" if row["ratio"] is None else f" ({row['ratio']:.2f})"
    return f"{row['gbit_s_p50']:.2f}{share}"


def _goodput_parts(run: Run) -> Parts:
    rows = run.results["rows"]
    cells, plots = [], []
    for row in rows:
        low, high = row["goodput_ci95"]
        times = [row[f"{what}_ms_p50"] for what in ("ttft", "tpot")]
        figures = [f"{row['goodput_rps']:.2f}", f"{low:.2f} to {high:.2f}", f"{row['offered_rps']:.2f}"]
        figures += ["–" if ms is None else f"{ms:.0f}" for ms in times]
        cells.append([f"{row['mix']}, {row['system']}, {row['engine']}", *figures, str(row["refused"])])
    for engine, mix in dict.fromkeys((row["engine"], row["mix"]) for row in rows):
        drawn = [
            Bar(
                row["system"],
                row["goodput_rps"],
                f"{row['goodput_rps']:.2f}",
                int(row["system"] != "adaptive"),
                tuple(row["goodput_ci95"]),
            )
            for row in rows
            if (row["engine"], row["mix"]) == (engine, mix)
        ]
        title = f"Requests a second within objectives: {mix}, {engine} engine"
        plots.append((title, Markup(bars.draw(drawn, title))))
    columns = (
        "mix, system, engine",
        "goodput/s",
        "95 %",
        "offered/s",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "refused",
    )
    return [Table("Goodput: requests a second that meet both objectives", columns, cells)], plots


def _demo_parts(run: Run) -> Parts:
    results = run.results
    cells = [
        [
            "answers equal those of an undivided engine",
            "yes" if results["output_matches_undivided"] else "no",
        ],
        ["KV over", f"{results['transport']}, {results['kv_bytes'] / 1e6:.1f} MB"],
    ]
    return [Table("The demonstration", ("what", "found"), cells)], [
        _stages("Ledger, ms", results["ledger_ms"])
    ]


def _probe_parts(run: Run) -> Parts:
    cells = [
        [
            row["row"],
            *(f"{row[name]:.3g}" for name in ("p50", "low", "high")),
            probe_map.SHOWN[row["unit"]],
            row["how"] or "",
        ]
        for row in run.results["rows"]
    ]
    notes = [
        f"not measured: {one['what']}, {one['where']}: {one['reason']}" for one in run.results["not_measured"]
    ]
    columns = ("what, where", "median", "lowest", "highest", "unit", "way")
    plots = [("Between nodes: a row for each source", Markup(probe_map.heat_map(run)))]
    return [Table("What the links and the nodes can do", columns, cells, notes)], plots


def _placement_parts(run: Run) -> Parts:
    cells, drawn = [], []
    for row in run.results["rows"]:
        by = ", ".join(f"{name}: {value:.2f}" for name, value in row["by_machine_s_p50"].items())
        figures = [f"{row['seconds_p50']:.2f} s", f"{row['slowest_s_p50']:.2f} s", by]
        cells.append([row["case"], " ".join(row["loaders"]), *figures, row["published_s"] or "–"])
        drawn.append(
            Bar(row["case"], row["seconds_p50"], f"{row['seconds_p50']:.2f}", int(row["medium"] == "s3"))
        )
    notes = [
        f"{'Holds' if one['holds'] else 'Does not hold'}: {one['claim']}: {one['figures']}."
        + (f" Why: {one['why']}." if one["why"] else "")
        for one in run.results["conclusions"]
    ]
    notes += [f"not measured: {one['case']}: {one['reason']}" for one in run.results["not_measured"]]
    columns = ("case", "loaders in pods", "median", "slowest", "by machine, s", "published (564 MB), s")
    title = f"{run.results['model_bytes'] / 1e6:.0f} MB into every loader's own memory"
    plot = Markup(bars.draw(drawn, title))
    return [Table(title, columns, cells, notes)], [("Seconds by case; grey: S3", plot)]


def _head_parts(run: Run) -> Parts:
    rows, tables, plots = run.results["rows"], [], []
    columns = ("way", *(name for name, _ in head.COLUMNS))
    published = [
        [f"published: {name}", *(_figure(figures.get(key)) for _, key in head.COLUMNS)]
        for name, figures in head.PUBLISHED.items()
    ]
    for link, prompt in dict.fromkeys((row["link"], row["prompt_tokens"]) for row in rows):
        here = [row for row in rows if (row["link"], row["prompt_tokens"]) == (link, prompt)]
        here.sort(key=lambda row: (*head.ALONE, *head.WAYS).index(row["case"]))
        cells = [
            [row["case"], *(_figure(head.sums(row).get(key)) for _, key in head.COLUMNS)] for row in here
        ]
        size = max(row["kv_bytes"] for row in here) / 1e6
        title = f"{link}, {prompt} prompt tokens, {size:.0f} MB of KV: ms, medians; shares of iperf3 in %"
        tables.append(Table(title, columns, [*cells, *published]))
        drawn = [
            Bar(
                row["case"],
                row["transfer_ms_p50"],
                f"{row['transfer_ms_p50']:.0f}",
                int(row["case"] not in head.OURS),
            )
            for row in here
            if row["kv_bytes"]
        ]
        title = f"Transfer, ms: {link}, {prompt} tokens"
        plots.append((title, Markup(bars.draw(drawn, title))))
    encodings = [
        [
            one["case"],
            _figure(one["encode_ms_p50"]),
            _figure(one["decode_ms_p50"]),
            f"{one['bytes'] / 1e6:.1f}",
        ]
        for one in run.results["encodings"]
    ]
    tables.append(
        Table(
            "Encodings of the longest prompt's KV, in one process",
            ("encoding", "encode ms", "decode ms", "MB"),
            encodings,
        )
    )
    users = [
        [
            f"{one['case']}, {one['users']} users",
            *(f"{one[f'{how}_gbit_s_p50']:.2f}" for how in ("one", "several")),
            f"{one['several_by_one']:.2f}",
        ]
        for one in run.results["users"]
    ]
    title = f"KV of {run.parameters['user_mbytes']} MB for each of many users at once: Gbit/s"
    tables.append(Table(title, ("way", "in one process", "a process each", "ratio"), users))
    notes = [
        f"iperf3, {one['link']}, {one['streams']} streams: {one['gbit_s_p50']:.2f} Gbit/s"
        for one in run.results["links"]
    ]
    notes += [
        f"{'Holds' if one['holds'] else 'Does not hold'}: {one['claim']}: {one['figures']}."
        for one in run.results["conclusions"]
    ]
    notes += [*run.results["recommendation"]]
    notes += [f"not measured: {one['case']}: {one['reason']}" for one in run.results["not_measured"]]
    tables[-1] = replace(tables[-1], notes=notes)
    return tables, plots


def _mesh_parts(run: Run) -> Parts:
    cells = [
        [
            f"{row['pair']}, {row['prompt_tokens']} tokens in",
            f"{row['bytes_per_request'] / 1e3:.1f}",
            f"{row['bytes_per_token']:.0f}",
            f"{row['round_trips_per_request']:g}",
            f"{row['round_trips_per_token']:g}",
            f"{row['services_bytes_per_request'] / 1e3:.1f}",
            f"{row['kv_bytes'] / 1e3:.0f}",
        ]
        for row in run.results["rows"]
    ]
    columns = (
        "between, prompt",
        "kB a request",
        "bytes a token",
        "round trips a request",
        "round trips a token",
        "Ray's own above rest, kB",
        "KV of a request, kB",
    )
    notes = [
        f"{'Holds' if one['holds'] else 'Does not hold'}: {one['claim']}: {one['figures']}."
        for one in run.results["conclusions"]
    ]
    notes += run.results["recommendation"]
    choices = run.results["choices"]
    figures = [
        [
            one["choice"],
            *(_figure(one[f"{name}_p50"]) for name in ("ttft_ms", "tpot_ms", "total_ms", "tokens_s")),
        ]
        for one in choices
    ]
    title = f"One node at {100 * run.parameters['speed']:.0f} % of its speed: which does what"
    drawn = [Bar(one["choice"], one["total_ms_p50"], f"{one['total_ms_p50']:.0f}") for one in choices]
    tables = [
        Table(
            "TCP payload on the links, counted from packets; a token's part by two lengths of answer",
            columns,
            cells,
            notes,
        ),
        Table(title, ("choice", "first token ms", "per token ms", "all ms", "tokens/s"), figures),
    ]
    return tables, [(f"{title}, ms", Markup(bars.draw(drawn, title)))] if drawn else []


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _plan_parts(run: Run) -> Parts:
    cells = [
        [
            one["layout"],
            f"{one['ttft_s']:.3f}",
            f"{one['tpot_s'] * 1e3:.1f}",
            f"{one['latency_s']:.2f}",
            f"{one['tokens_s']:.1f}",
            one["largest_part"],
        ]
        for one in run.results["ranked"]
    ]
    notes = [f"{one['name']} is rejected: {one['reason']}" for one in run.results["rejected"]]
    notes += [f"assumed: {line}" for line in run.results["assumptions"]]
    columns = ("layout", "TTFT s", "TPOT ms", "latency s", "tokens/s", "largest part of TTFT")
    return [Table(f"Layouts, best {run.results['goal']} first (predicted)", columns, cells, notes)], []


def _verdict_parts(run: Run) -> Parts:
    cells, plots = [], []
    for row in run.results["rows"]:
        low, high = row["goodput_rps_ci95"] or (0.0, 0.0)
        cells.append(
            [
                f"{row['mix']}, {row['contender']}",
                f"{row['goodput_rps_p50']:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{row['offered_rps']:.2f}",
                f"{row['slo']['ttft_ms']:.0f}",
                f"{row['slo']['tpot_ms']:.1f}",
            ]
        )
    for one in run.results["verdicts"]:
        drawn = [
            Bar(
                row["contender"],
                row["goodput_rps_p50"],
                f"{row['goodput_rps_p50']:.2f}",
                int(row["contender"] != "undivided"),
                tuple(row["goodput_rps_ci95"]) if row["goodput_rps_ci95"] else None,
            )
            for row in run.results["rows"]
            if row["mix"] == one["mix"]
        ]
        title = f"Requests a second in time: {one['mix']}"
        plots.append((title, Markup(bars.draw(drawn, title))))
    notes = [f"{one['mix']}: {one['answer']}" for one in run.results["verdicts"]]
    columns = ("mix, contender", "goodput/s", "95 %", "offered/s", "TTFT objective ms", "TPOT objective ms")
    return [Table("Undivided against every split, equal engines", columns, cells, notes)], plots


_PARTS: Final = {
    "bench-serve": _serve_parts,
    "bench-kv": _kv_parts,
    "bench-goodput": _goodput_parts,
    "demo": _demo_parts,
    "probe": _probe_parts,
    "placement": _placement_parts,
    head.KIND: _head_parts,
    mesh.KIND: _mesh_parts,
    "plan": _plan_parts,
    "verdict": _verdict_parts,
}
