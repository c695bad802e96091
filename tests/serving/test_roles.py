"""A worker on a `both` node changes its role with the load, and back; its process stays. Fake engine.

And a gateway that starts does not wait for a worker that does not answer.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from asking import Endpoint, until
from comparing import prompt
from fake_serving import fake_serving, process
from test_storm import VOCAB, cluster_file

from actors.fake_kv import continuation

pytestmark = [pytest.mark.cluster]

PREFILL, DECODE = "prefill-worker-0", ("decode-worker-0", "decode-worker-1")
SLOTS, AT_ONCE = 8, 12
FAKE = {"kv_bytes_per_token": 64, "kv_blocks": 2000, "prefill_tokens_s": 4000, "step_ms": 20}


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[str, Endpoint]]:
    """One node for both roles: a prefill and two decode workers."""
    data = cluster_file(model, **FAKE)
    data["engine"]["max_num_seqs"] = SLOTS
    data["nodes"] = {"both": {"role": "both", "cpus": 3, "slots": 2, "object_store": "128MiB"}}
    data["workers"] = {"decode": {"count": 2}}
    data["roles"] = {"prompts_s": 0.3, "occupied": 0.5, "smooth_s": 0.5, "hold_s": 2}
    with fake_serving(data, {}) as (_, url):
        yield data["name"], Endpoint(url, "tiny")


@pytest.fixture
def endpoint(served: tuple[str, Endpoint]) -> Endpoint:
    return served[1]


class Load:
    """Requests of one kind, one after the other by several clients; each answer is checked."""

    def __init__(self, endpoint: Endpoint, length: int, answer: int) -> None:
        self._endpoint, self._length, self._answer = endpoint, length, answer
        self._numbers, self._ending = itertools.count(), threading.Event()
        self.records: list[dict[str, Any]] = []

    def client(self) -> None:
        while not self._ending.is_set():
            tokens = prompt(self._length, f"roles {self._length} {next(self._numbers)}")
            answer = self._endpoint.complete(tokens, max_tokens=self._answer, ignore_eos=True)
            assert answer.tokens == continuation(tokens, self._answer, VOCAB)
            assert answer.record["attempts"] == 1, answer.record
            self.records.append(answer.record)

    @contextmanager
    def running(self) -> Iterator[Callable[[Callable[[], object], str], None]]:
        """Yields a function that waits for a condition, and for no longer than all clients are well."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            clients: list[Future[None]] = [pool.submit(self.client) for _ in range(AT_ONCE)]

            def wait(condition: Callable[[], object], what: str) -> None:
                until(lambda: any(c.done() for c in clients) or condition(), what, within_s=90)
                for client in clients:
                    if client.done():
                        client.result()

            try:
                yield wait
            finally:
                self._ending.set()
        for client in clients:
            client.result()


def roles(endpoint: Endpoint) -> dict[str, str]:
    return {name: worker["role"] for name, worker in endpoint.workers().items()}


def changes(endpoint: Endpoint) -> dict[tuple[str, str, str], int]:
    """The counter, by (worker, role, reason)."""
    line = re.compile(r'handoff_role_changes_total\{reason="(\w+)",to="(\w+)",worker="([\w-]+)"\} (\S+)')
    found = line.findall(endpoint.http.get("/metrics").text)
    return {(worker, to, reason): int(float(count)) for reason, to, worker, count in found}


@pytest.mark.timeout(420)
def test_a_worker_follows_the_load_and_comes_back(endpoint: Endpoint) -> None:
    """Nothing is dropped, repeated or started again; other gateways' knowledge plays no part."""
    pids = {name: worker["pid"] for name, worker in endpoint.workers().items()}
    assert roles(endpoint) == {PREFILL: "prefill", DECODE[0]: "decode", DECODE[1]: "decode"}
    prompts = Load(endpoint, 1500, 2)
    with prompts.running() as wait:
        wait(lambda: list(roles(endpoint).values()).count("prefill") == 2, "a decode worker prefills")
        (changed,) = [name for name in DECODE if roles(endpoint)[name] == "prefill"]
        wait(lambda: any(r["prefill_worker"] == changed for r in prompts.records[-20:]), "it is asked to")
    assert any(r["prefill_worker"] == changed and r["decode_worker"] != changed for r in prompts.records)
    until(lambda: (changed, "prefill", "prompts") in changes(endpoint), "the change is counted", within_s=20)
    answers = Load(endpoint, 20, 150)
    with answers.running() as wait:
        wait(lambda: list(roles(endpoint).values()).count("decode") == 2, "a prefill worker decodes")
        (back,) = {name for name, role in roles(endpoint).items() if role == "decode"} & {changed, PREFILL}
        wait(lambda: any(r["decode_worker"] == back for r in answers.records[-20:]), "it is asked to")
    until(lambda: (back, "decode", "answers") in changes(endpoint), "the change is counted", within_s=20)
    print(changes(endpoint))
    assert {name: worker["pid"] for name, worker in endpoint.workers().items()} == pids
    assert all(worker["alive"] for worker in endpoint.workers().values())
    endpoint.settled()


BEGIN = """
import json, sys
from cluster.connect import connect
from cluster.file import Roles, Slo
from cluster.local import running
from deployments import roles

import ray

cluster = running(sys.argv[1])
connect(cluster)

def actor():
    handle = ray.get_actor(roles.ACTOR)
    return ray.get(handle.spec.remote(), timeout=60).limits.prompts_s, handle._actor_id.hex()

before = actor()
roles.begin(cluster.file)
same = actor()
slower = Roles(**cluster.file.roles.model_dump() | {"prompts_s": 7})
roles.begin(cluster.file.model_copy(update={"roles": slower}))
other = actor()
roles.begin(cluster.file.model_copy(update={"roles": Roles(change=False)}))
try:
    none = actor()
except ValueError:
    none = None
roles.begin(cluster.file)
print(json.dumps([before, same, other, none, actor()]))
"""
"""Begins the actor again, for the same cluster file, others, and the first one."""


def test_the_actor_is_replaced_where_the_file_says_something_else(served: tuple[str, Endpoint]) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", BEGIN, served[0]], capture_output=True, text=True, timeout=240, check=False
    )
    assert asked.returncode == 0, asked.stderr
    before, same, other, none, again = json.loads(asked.stdout.splitlines()[-1])
    assert before == same == [0.3, before[1]]
    assert other[0] == 7
    assert none is None
    assert again[0] == 0.3
    assert len({before[1], other[1], again[1]}) == 3
    served[1].settled()


@pytest.mark.timeout(420)
def test_a_gateway_that_starts_does_not_wait_for_a_worker_that_does_not_answer(
    served: tuple[str, Endpoint],
) -> None:
    cluster, endpoint = served
    workers = endpoint.workers()
    deaf, gateway = workers[DECODE[0]]["pid"], process(cluster, "ray::ServeReplica")

    def known() -> dict[str, dict[str, Any]]:
        try:
            return endpoint.workers()
        except httpx.TransportError:
            return {}

    os.kill(deaf, signal.SIGSTOP)
    try:
        gateway.kill()
        until(lambda: not gateway.is_running(), "it is dead")
        until(known, "another gateway serves", within_s=180)
        assert set(known()) == set(workers) - {DECODE[0]}
        tokens = prompt(300, "without it")
        assert endpoint.complete(tokens, max_tokens=8, ignore_eos=True).tokens == continuation(
            tokens, 8, VOCAB
        )
    finally:
        os.kill(deaf, signal.SIGCONT)
    until(lambda: set(known()) == set(workers), "the gateway knows it too", within_s=120)
    endpoint.settled()
