"""The tables and plots of a recorded run, by its kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from markupsafe import Markup

from experiments import bars, head, kv_plot, mesh, pipeline, probe_map, where
from experiments.bars import Bar, Stack
from experiments.compare import of_median, series
from experiments.energy import joules_told, power_told
from experiments.results import Run
from experiments.where_profile import PARTS as PARTS_OF_STEPS


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
    rows, both = run.results["rows"], {name: ratios(run, name) for name in ("ttft_ratio", "tpot_ratio")}
    plain = {row["prompt_tokens"]: row for row in rows if row["system"] == "undivided"}
    cells = []
    for (row, ttft, ttft_bounds), (_, tpot, tpot_bounds) in zip(*both.values(), strict=True):
        other = plain[row["prompt_tokens"]]
        overhead = row["handover_overhead_ms_p50"]
        cells.append(
            [
                str(row["prompt_tokens"]),
                f"{other['ttft_ms_p50']:.1f}",
                f"{row['ttft_ms_p50']:.1f}",
                f"{ttft:.2f}{within(ttft_bounds)}",
                f"{other['tpot_ms_p50']:.2f}",
                f"{row['tpot_ms_p50']:.2f}",
                f"{tpot:.2f}{within(tpot_bounds)}",
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


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return lines of a probe's map as cells."""
    return [
        [
            row["row"],
            *(f"{row[name]:.3g}" for name in ("p50", "low", "high")),
            probe_map.SHOWN[row["unit"]],
            row["how"] or "",
        ]
        for row in rows
    ]


def _probe_parts(run: Run) -> Parts:
    cells = _measured(run.results["rows"])
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


def _where_parts(run: Run) -> Parts:
    rows, tables, plots = run.results["rows"], [], []
    for link in dict.fromkeys(row["link"] for row in rows):
        here = [row for row in rows if row["link"] == link]
        cells = [where.cells_of(row) for row in here]
        lines, columns = [*cells, where.PUBLISHED_CELLS], ("chunk", *where.COLUMNS)
        cut = 1 + len(where.PART_COLUMNS)
        title = where.title_of(here[0], run.results["links"])
        tables.append(Table(title, columns[:cut], [line[:cut] for line in lines]))
        tables.append(
            Table(
                f"{link}: all-reduces, % of a prefill, ms, and what the planner predicts",
                (columns[0], *columns[cut:]),
                [(line[0], *line[cut:]) for line in lines],
            )
        )
        drawn = [
            Stack(
                line[0], [row[f"{part}_ms_p50"] for part in PARTS_OF_STEPS], _figure(row["profiled_ms_p50"])
            )
            for row, line in zip(here, cells, strict=True)
        ]
        title = f"Where a prefill's time goes, ms by tokens of a chunk: {link}"
        plots.append((title, Markup(bars.stacked(drawn, PARTS_OF_STEPS, title))))
    if (chosen := where.steps_of(rows)) is not None:
        name, steps = chosen
        tables.append(Table(f"Step by step: {name}", ("step", *where.STEP_COLUMNS), steps))
    notes = [
        f"{'Holds' if one['holds'] else 'Does not hold'}: {one['claim']}: {one['figures']}."
        for one in run.results["conclusions"]
    ]
    tables[-1] = replace(tables[-1], notes=notes)
    return tables, plots


def _pipeline_parts(run: Run) -> Parts:
    rows = run.results["rows"]
    found = {(row["setup"], check["item"]): check for row in rows for check in row["checks"]}
    words = {True: "pass", False: "FAIL", None: "–"}
    items = [
        [item, *(words[found.get((row["setup"], item), {}).get("ok")] for row in rows)]
        for item in dict.fromkeys(item for _, item in found)
    ]
    times = [
        [
            row["setup"],
            row["split"],
            "/".join(f"{stage['weights_bytes'] / 1e6:.1f}" for stage in row["stages"]),
            str(row["kv_tokens"]),
            *(_figure(row[f"{name}_ms_p50"]) for name in ("ttft", "tpot", "total")),
        ]
        for row in rows
    ]
    fabric = _measured(run.results["fabric"])
    notes = [
        f"{setup}, {item}: {check['told']}."
        for (setup, item), check in found.items()
        if not check["ok"] or item == "split" or ("slow" not in setup and item in ("placement", "weights"))
    ]
    notes += [
        f"Tensor parallel {row['stages_count']}: {row['tensor_reason']}."
        for row in rows
        if row["stages_count"] > 1 and not row["slow"]
    ]
    notes += [
        f"{'Holds' if one['holds'] else 'Does not hold'}: {one['claim']}: {one['figures']}."
        for one in run.results["conclusions"]
    ]
    notes += run.results["recommendation"]
    notes += [f"not measured: {one['what']}: {one['reason']}" for one in run.results["not_measured"]]
    held = run.results["reference"]
    title = f"Items of the bring-up; answers held against {held['file']} (SHA-256 {held['sha256'][:12]})"
    columns = ("stages", "layers", "weights MB", "KV tokens", "first token ms", "per token ms", "all ms")
    tables = [
        Table(title, ("item", *(row["setup"] for row in rows)), items, notes),
        Table("One request at a time, medians, longest prompt", columns, times),
        Table(
            "The fabric, nothing else running", ("what", "median", "lowest", "highest", "unit", "way"), fabric
        ),
    ]
    title = "First token, ms, by the stages' layers; grey: the last node is slow"
    drawn = [
        Bar(row["split"], row["ttft_ms_p50"], f"{row['ttft_ms_p50']:.0f}", int(row["slow"])) for row in rows
    ]
    return tables if fabric else tables[:2], [(title, Markup(bars.draw(drawn, title)))]


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
    objectives = ("TTFT objective ms", "TPOT objective ms")
    for row in run.results["rows"]:
        low, high = row["goodput_rps_ci95"] or (0.0, 0.0)
        cells.append(
            [
                f"{row['mix']}, {row['contender']}",
                f"{row['goodput_rps_p50']:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{row['offered_rps']:.2f}",
                joules_told(row),
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
    notes += [power_told(run.results["energy"])] if "energy" in run.results else []
    columns = ("mix, contender", "goodput/s", "95 %", "offered/s", "J/request in time", *objectives)
    return [Table("Undivided against every split, equal engines", columns, cells, notes)], plots


def ratios(run: Run, measure: str) -> list[tuple[Any, float, tuple[float, float] | None]]:
    """Return (row, median ratio, its interval if there are samples enough) of each of Handoff's rows."""
    found, taken = [], series(run)
    for row in run.results["rows"]:
        if row["system"] == "handoff":
            values = taken[f"handoff/{row['prompt_tokens']}", measure].values
            found.append((row, row[measure], of_median(values)))
    return found


def within(bounds: tuple[float, float] | None) -> str:
    """Return an interval in words."""
    return " (too few samples)" if bounds is None else f" ({bounds[0]:.2f} to {bounds[1]:.2f})"


PARTS: Final[Mapping[str, Callable[[Run], Parts]]] = {
    "bench-serve": _serve_parts,
    "bench-kv": _kv_parts,
    "bench-goodput": _goodput_parts,
    "demo": _demo_parts,
    "probe": _probe_parts,
    "placement": _placement_parts,
    head.KIND: _head_parts,
    mesh.KIND: _mesh_parts,
    pipeline.KIND: _pipeline_parts,
    where.KIND: _where_parts,
    "plan": _plan_parts,
    "verdict": _verdict_parts,
}
