"""`handoff serve --engine fake` in a process of its own."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from test_storm import answers

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
