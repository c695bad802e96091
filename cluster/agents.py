"""Telling a raylet the ports of its agents, so that it does not wait for them.

A raylet of Ray 2.60 reads each agent's port from a file that the agent writes once it listens, even where the
port was given on the command line, and aborts after 15 s without it. Two nodes that start on two busy cores
miss that often. The ports are ours, so we write the files as soon as the raylet has a name for them. The
agents replace them by equal ones; until they listen, their clients retry, as they do when an agent restarts.
"""

from collections.abc import Mapping
from pathlib import Path

import psutil


def announce(start: int, ports: Mapping[str, int]) -> bool:
    """Write the port files for the raylet that the process `start` spawned. False if there is none yet."""
    try:
        for child in psutil.Process(start).children():
            if child.name() == "raylet":
                options = dict(part.partition("=")[::2] for part in child.cmdline())
                return _write(Path(options["--session_dir"]), options["--node_id"], ports)
    except (psutil.Error, KeyError):  # it has ended, or has only been forked and not yet become a raylet
        pass
    return False


def _write(session: Path, node_id: str, ports: Mapping[str, int]) -> bool:
    for name, port in ports.items():
        target = session / f"{name}_{node_id}"
        draft = target.with_suffix(".draft")
        draft.write_text(str(port), encoding="ascii")
        draft.replace(target)
    return True
