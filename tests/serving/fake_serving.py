"""`handoff serve --engine fake` in a process of its own."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
from test_storm import answers

from cluster.processes import marked
from cluster.state import StateDir
from experiments.children import Child, child

STARTED_WITHIN_S = 300.0
ASKED_EVERY_S = 0.5
"""A new client each time, which takes more than the answer."""


@contextmanager
def fake_serving(data: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[tuple[Child, str]]:
    """Serve a cluster file; yields the process and the gateway's address."""
    url = f"http://127.0.0.1:{data['gateway']['port']}"
    argv = ["-m", "handoff", "serve", "{folder}/cluster.yaml", "--engine", "fake"]
    deadline = time.monotonic() + STARTED_WITHIN_S
    with child("fake", argv, environment, {"cluster.yaml": json.dumps(data)}) as server:
        while not answers(server, url):
            assert time.monotonic() < deadline, f"not serving after {STARTED_WITHIN_S:g} s:\n{server.tail()}"
            time.sleep(ASKED_EVERY_S)
        yield server, url
        server.check()


def process(cluster: str, title: str) -> psutil.Process:
    """Return the one process of a cluster that has this title, as Ray gives it."""
    plan, found = StateDir.of(cluster).plan(), []
    assert plan is not None, f"{cluster} is not running"
    for one in marked(plan.marker):
        with contextlib.suppress(psutil.Error, IndexError):
            if one.cmdline()[0].startswith(title):
                found.append(one)
    (only,) = found
    return only
