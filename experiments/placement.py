"""Moving a model from one actor to others: which case of placement takes how long. Pure; docs/experiments.md.

The cases are those of a published report (R3 in ``published.json``): by Ray's object store or by S3, to
loaders in the source's own pod, in other pods of its machine, on other machines, and mixes of these. A pod
is a Ray node with an object store of its own; it is named by its machine's number and a letter, and the
source is in ``0a``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal

KIND: Final = "placement"
SOURCE: Final = "0a"
Medium = Literal["store", "s3"]
MEDIA: Final[tuple[Medium, ...]] = ("store", "s3")
_OTHERS: Final = ("1a", "2a", "3a", "4a", "5a")


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the matrix: loaders that start at the same moment, each named by its pod.

    published: seconds, as the report has them, for a model of 564 MB.
    """

    name: str
    medium: Medium
    loaders: tuple[str, ...]
    published: str | None = None

    @property
    def cell(self) -> str:
        """What it is called in results: ``store 5 x3``."""
        return f"{self.name} x{len(self.loaders)}"


_STORE_5: Final = "grows linearly"
_S3_2: Final = ("5.4", "5.4", "5.4", "5.6")
MATRIX: Final[tuple[Case, ...]] = (
    Case("store 1", "store", ("1a",), "5.4"),
    Case("store 2", "store", ("0b",), "2.59"),
    Case("store 2", "store", ("0b", "0c"), "2.61"),
    Case("store 3", "store", ("0a",), "about 20 % less than store 2"),
    Case("store 3", "store", ("0a", "0a"), "about 20 % less than store 2"),
    Case("store 4", "store", ("0b", "0c", "1a", "1b"), "on the other machine about 3 times as long"),
    *(Case("store 5", "store", _OTHERS[:count], _STORE_5) for count in range(1, 6)),
    *(Case("s3 2", "s3", _OTHERS[:count], _S3_2[count - 1]) for count in range(1, 5)),
    Case("s3 4", "s3", ("1a", "1b", "2a"), "the two that share take twice as long"),
)
"""All seven cases. Every loader of ``s3`` reads a bucket that no machine's link is shared with."""


def machine(pod: str) -> str:
    """Return the number of a pod's machine."""
    return pod.rstrip("abcdefghijklmnopqrstuvwxyz")


def pods(machines: int) -> list[str]:
    """Return the pods that the matrix needs on so many machines, the source's first."""
    wanted = {SOURCE, *(pod for case in MATRIX for pod in case.loaders)}
    return sorted(pod for pod in wanted if int(machine(pod)) < machines)


def named(machines: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the pod that each node of a cluster stands for: ``0a`` and so on, by machine.

    machines: the nodes of each. Machine 0 is that with the most nodes; its first one has the source.
    """
    order = sorted(machines.values(), key=lambda nodes: (-len(nodes), sorted(nodes)))
    return {
        f"{number}{letter}": node
        for number, nodes in enumerate(order)
        for letter, node in zip("abcdefghijklmnopqrstuvwxyz", sorted(nodes), strict=False)
    }


def possible(there: Collection[str], media: Sequence[Medium] = MEDIA) -> list[Case]:
    """Return the cases that these pods are enough for."""
    return [case for case in MATRIX if case.medium in media and set(case.loaders) <= {*there}]


def left_out(there: Collection[str], media: Sequence[Medium] = MEDIA) -> list[dict[str, str]]:
    """Return the others, with the reason."""
    found = []
    for case in MATRIX:
        lacking = sorted({*case.loaders} - {*there})
        if case.medium not in media:
            found.append({"case": case.cell, "reason": f"--medium leaves {case.medium} out"})
        elif lacking:
            found.append({"case": case.cell, "reason": f"there is no pod {', '.join(lacking)}"})
    return found


def missing(samples: Sequence[Mapping[str, Any]], cases: Sequence[Case], repeats: int) -> list[Case]:
    """Return the cases that have not been measured so often yet."""
    done = [one["case"] for one in samples]
    return [case for case in cases if done.count(case.cell) < repeats]


def rows(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each case that has samples: medians over loaders and repeats."""
    lines = []
    for case in MATRIX:
        taken = [one for one in samples if one["case"] == case.cell]
        if not taken:
            continue
        by_machine: dict[str, list[float]] = {}
        for one in taken:
            for pod, seconds in zip(one["loaders"], one["seconds"], strict=True):
                by_machine.setdefault(machine(pod), []).append(seconds)
        lines.append(
            {
                "case": case.cell,
                "medium": case.medium,
                "loaders": list(case.loaders),
                "seconds_p50": _digits(median(value for one in taken for value in one["seconds"])),
                "slowest_s_p50": _digits(median(max(one["seconds"]) for one in taken)),
                "by_machine_s_p50": {name: _digits(median(of)) for name, of in sorted(by_machine.items())},
                "published_s": case.published,
                "samples": len(taken),
            }
        )
    return lines


# -- what the report concluded, and whether it holds --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A claim of the report, the figures here, whether it holds, and ``why`` not."""

    claim: str
    figures: str
    holds: bool
    why: str | None = None


FLAT: Final = 1.3
"""Times that grow by less are called flat."""
_UNLIMITED: Final = (
    "links have no limit here: all machines are this one, and copies and its cores are what is shared"
)


def conclusions(
    lines: Sequence[Mapping[str, Any]], gbit_s: float | None, mbytes: float, loopback: bool = False
) -> list[Conclusion]:
    """Return the report's claims for which there are figures.

    gbit_s: limit of the links, None: not known. loopback: all pods are on one machine, without links.
    """
    by = {line["case"]: line for line in lines}
    found = []
    wire = "the wire's part" if gbit_s is None else f"the {mbytes * 8e6 / 1e9 / gbit_s:.2f} s of the wire"

    def seconds(case: str) -> float:
        return float(by[case]["seconds_p50"])

    def claim(text: str, figures: str, holds: bool, why: str) -> None:
        found.append(Conclusion(text, figures, holds, None if holds else _UNLIMITED if loopback else why))

    if {"store 1 x1", "store 2 x1"} <= by.keys():
        one, two = seconds("store 1 x1"), seconds("store 2 x1")
        why = f"{wire} is little beside what the store itself takes"
        claim("The same machine beats another one", f"{two:.2f} s against {one:.2f} s", two < one, why)
    if {"store 2 x1", "store 3 x1"} <= by.keys():
        two, three = seconds("store 2 x1"), seconds("store 3 x1")
        why = "the copy between two stores of a machine takes little beside the loader's own copy"
        claim(
            "The source's own pod beats another pod", f"{three:.2f} s against {two:.2f} s", three < two, why
        )
    if "store 4 x4" in by:
        machines = by["store 4 x4"]["by_machine_s_p50"]
        ratio = machines["1"] / machines["0"]
        why = f"{wire}, twice for two, is little beside what the stores take on both sides"
        figures = f"{machines['1']:.2f} s against {machines['0']:.2f} s: {ratio:.1f} times"
        claim(
            "In a mix, loaders elsewhere take about 3 times as long (here: 2 or more)",
            figures,
            ratio >= 2,
            why,
        )
    many = [case for case in by if case.startswith("store 5 ")]
    if len(many) > 2 and "store 5 x1" in by:
        count = len(by[many[-1]]["loaders"])
        ratio = seconds(many[-1]) / seconds("store 5 x1")
        figures = f"{count} loaders take {ratio:.1f} times as long as one: " + _listed(by, many)
        why = "loaders that have the object pass it on, and so spare the source's link"
        text = (
            f"Loaders on other machines share the source's link: {count} take {count} times as long "
            f"(here: half of that or more)"
        )
        claim(text, figures, ratio >= count / 2, why)
    many = [case for case in by if case.startswith("s3 2 ")]
    if len(many) > 1:
        ratio = max(seconds(case) for case in many) / min(seconds(case) for case in many)
        why = "the server, or this machine's cores, are what is shared"
        claim(f"From S3 it stays flat (within {FLAT} times)", _listed(by, many), ratio < FLAT, why)
    if "s3 4 x3" in by:
        machines = by["s3 4 x3"]["by_machine_s_p50"]
        ratio = machines["1"] / machines["2"]
        figures = f"{machines['1']:.2f} s against {machines['2']:.2f} s: {ratio:.1f} times"
        why = "the link is not what limits a loader"
        text = "Two loaders from S3 that share a machine take twice as long (here: 1.5 times or more)"
        claim(text, figures, ratio >= 1.5, why)
    return found


def _listed(by: Mapping[str, Mapping[str, Any]], cases: Sequence[str]) -> str:
    return ", ".join(f"{by[case]['seconds_p50']:.2f}" for case in cases) + " s"


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
