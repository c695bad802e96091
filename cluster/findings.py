"""What the doctor says: one finding for each item that is judged."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Level = Literal["pass", "warn", "fail", "not applicable"]
EVERY: Final = "all"
"""Instead of a node's name."""


@dataclass(frozen=True)
class Finding:
    """item: what was looked at. node: where. found: what was there, with values. remedy: empty if fine."""

    item: str
    level: Level
    node: str
    found: str
    remedy: str = ""


def passed(item: str, found: str) -> list[Finding]:
    """The item is fine on all nodes."""
    return [Finding(item, "pass", EVERY, found)]


def not_applicable(item: str, why: str) -> list[Finding]:
    """There is nothing to be judged."""
    return [Finding(item, "not applicable", EVERY, why)]


def differing(item: str, values: Mapping[str, str], level: Level, remedy: str) -> list[Finding]:
    """Whether a value, by node, is the same everywhere; names the nodes of fewer hands, or all in a tie."""
    by_value = dict[str, list[str]]()
    for node, value in sorted(values.items()):
        by_value.setdefault(value, []).append(node)
    if len(by_value) < 2:
        return passed(item, listed(by_value))
    sizes = sorted((len(nodes) for nodes in by_value.values()), reverse=True)
    most = sizes[0] if sizes[0] > sizes[1] else None
    odd = [node for nodes in by_value.values() if len(nodes) != most for node in nodes]
    told = "; ".join(f"{value} on {', '.join(nodes)}" for value, nodes in by_value.items())
    return [Finding(item, level, ", ".join(sorted(odd)), told, remedy)]


def listed(values: Iterable[str]) -> str:
    """Different values, each once."""
    return ", ".join(dict.fromkeys(values))
