"""The life of a cluster by its commands: up until it serves, status, down without losing what is answered.

Where there may be network namespaces, its nodes are hosts with links of 1 Gbit/s.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from asking import Endpoint, until
from test_storm import cluster_file

from cluster import netns
from cluster.local import LocalCluster, running
from cluster.processes import end, marked
from cluster.state import StateDir

pytestmark = [pytest.mark.cluster]

COMMAND_S = 240.0
STEP_MS, TOKENS, CLIENTS = 40, 50, 4
"""Answers of 2 s, one after the other: some are under way whenever `handoff down` comes to them."""
PROMPT, KV_BYTES = 1500, 16384
FAKE = {"kv_bytes_per_token": KV_BYTES, "kv_blocks": 200, "step_ms": STEP_MS}
LINK_BYTES_S = 1e9 / 8
LINKED = netns.missing() is None
needs_network = pytest.mark.skipif(not LINKED, reason=f"{netns.missing()} (for the test of links)")


def handoff(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ours; it succeeds."""
    command = [sys.executable, "-m", "handoff", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@dataclass(frozen=True)
class Up:
    """A cluster that `handoff up` has brought up, and what that printed."""

    cluster: LocalCluster
    endpoint: Endpoint
    printed: str
    marker: str
    devices: frozenset[str]
    """Of this machine's network, before."""

    def sent(self, node: str) -> int:
        """Bytes that have left a node by its link."""
        pid = next(one.process.pid for one in self.cluster.nodes if one.name == node)
        inside = ("nsenter", f"--net=/proc/{pid}/ns/net", "--")
        argv = [*inside, "ip", "-s", "-j", "link", "show", "dev", netns.DEVICE]
        shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


@pytest.fixture(scope="module")
def up(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    data = cluster_file(model, **FAKE)
    if LINKED:
        data["links"] = {"gbit_s": 1}
    path = tmp_path_factory.mktemp("lifecycle") / "cluster.yaml"
    path.write_text(json.dumps(data))
    devices = frozenset(psutil.net_if_addrs())
    done = handoff("up", str(path))
    cluster, plan = running(data["name"]), StateDir.of(data["name"]).plan()
    assert cluster is not None
    assert plan is not None
    try:
        url = f"http://127.0.0.1:{data['gateway']['port']}"
        yield Up(cluster, Endpoint(url, "tiny"), done.stdout + done.stderr, plan.marker, devices)
    finally:
        end(plan.marker)


def test_up_tells_of_each_node_and_pair_and_returns_when_it_serves(up: Up) -> None:
    print(up.printed)
    for part in (
        "prefill-0 is alive",
        "decode-0 is alive",
        "decode-worker-0 is ready on decode-0",
        "KV from prefill-worker-0 to decode-worker-0",
        f"tiny is served at {up.endpoint.url}/v1",
    ):
        assert part in up.printed
    assert "(assumed)" not in up.printed, "a way was not measured"
    answer = up.endpoint.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": [5] * 300, "max_tokens": 4}
    )
    assert answer.status_code == 200
    assert answer.headers["x-handoff-path"].startswith("prefill-worker-0>decode-worker-0; ")


def test_status_shows_nodes_workers_and_the_ways_between_them(up: Up) -> None:
    words = [line.split() for line in handoff("status", up.cluster.name).stdout.splitlines()]
    rows = {line[0]: line for line in words if len(line) > 3 and line[0] != "prefill-worker-0"}
    address = up.cluster.nodes[1].address
    assert address.startswith("198.18." if LINKED else "127.0.0.")
    assert rows["prefill-0"][1:4] == ["prefill", address, "alive"]
    assert rows["decode-worker-0"][1:4] == ["decode", "decode-0", "ready"]
    assert rows["decode-worker-0"][-1] == "none"  # nothing is on its way
    mine = [line for line in words if line and line[0] == "prefill-worker-0"]
    assert mine[0][1:4] == ["prefill", "prefill-0", "ready"]
    assert mine[1][1] == "decode-worker-0"
    assert {"tcp", "plasma"} <= set(mine[1])
    assert "broken" not in mine[1]


@needs_network
def test_kv_crosses_the_links_of_the_file_and_no_faster(up: Up) -> None:
    before = up.sent("prefill-0")
    answer = up.endpoint.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": [9] * PROMPT, "max_tokens": 4}
    )
    assert answer.headers["x-handoff-path"].startswith("prefill-worker-0>decode-worker-0; ")
    record = up.endpoint.http.get(f"/handoff/requests/{answer.headers['x-request-id']}").json()
    assert record["kv_bytes"] >= 0.9 * PROMPT * KV_BYTES
    assert up.sent("prefill-0") - before >= record["kv_bytes"]
    stats = {worker["name"]: worker for worker in up.endpoint.http.get("/handoff/workers").json()}
    rates = stats["prefill-worker-0"]["rates"]
    print(record["kv_bytes"], rates)
    assert 0 < rates["decode-worker-0 tcp"] < 1.2 * LINK_BYTES_S


def test_status_watches_until_it_is_told_to_stop(up: Up) -> None:
    command = [sys.executable, "-m", "handoff", "status", up.cluster.name, "--watch", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watching:
        assert watching.stdout is not None
        late = threading.Timer(COMMAND_S, watching.kill)
        late.start()
        try:
            seen, printed = 0, list[str]()
            while seen < 2 and (line := watching.stdout.readline()):
                printed.append(line)
                seen += line.split()[:1] == ["from"]
            watching.terminate()
            printed += watching.stdout.readlines()
            assert seen == 2, "".join(printed)
            assert watching.wait(30) == 0, "".join(printed)
        finally:
            late.cancel()


@dataclass
class Client:
    """Asks for one short stream after the other until it is not let in any more; read by a thread."""

    url: str
    answers: int = 0
    broken: list[str] = field(default_factory=list)
    """Answers that had begun and did not come to their end."""

    def run(self) -> None:
        asked: dict[str, Any] = {"model": "tiny", "prompt": [7] * 200, "max_tokens": TOKENS, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        while True:
            chunks, tokens, ended = 0, None, False
            try:
                with httpx.stream(
                    "POST", f"{self.url}/v1/completions", json=asked, timeout=COMMAND_S
                ) as answer:
                    for line in answer.iter_lines():
                        if line == "data: [DONE]":
                            ended = True
                        elif line:
                            chunks += 1
                            tokens = (json.loads(line.removeprefix("data: ")).get("usage") or {}).get(
                                "completion_tokens"
                            )
            except httpx.TransportError as error:
                if chunks:
                    self.broken.append(f"after {chunks} chunks: {error!r}")
                return
            if not ended or tokens != TOKENS:
                self.broken.append(f"{chunks} chunks, {tokens} tokens, ended: {ended}")
                return
            self.answers += 1


def test_down_lets_answers_come_to_their_end_and_leaves_nothing(up: Up) -> None:
    """The last of this file: the cluster is gone then."""
    clients = [Client(up.endpoint.url) for _ in range(CLIENTS)]
    threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    until(lambda: all(client.answers for client in clients), "every client has had an answer", within_s=60)
    done = handoff("down", up.cluster.name)
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert [client.broken for client in clients] == [[]] * CLIENTS
    assert "no new requests" in done.stderr
    assert "broken off" not in done.stderr
    assert running(up.cluster.name) is None
    until(lambda: not marked(up.marker), "all processes are gone", within_s=20)
    until(lambda: up.devices >= set(psutil.net_if_addrs()), "the network is gone", within_s=20)
