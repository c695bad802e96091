"""The head dies, with Ray's control store, Serve's controller and all, and is started again: serving goes on.

Ray keeps its control store in files here (RocksDB, part of Ray), which the new head takes over. The gateway
is on another node, as docs/failures.md advises. On the fake engine.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from comparing import prompt
from test_storm import FAKE, VOCAB, cluster_file

from actors.fake_kv import continuation
from cluster.file import ClusterFile
from cluster.launch import NODE_NAME
from cluster.names import GATEWAY, HEAD, LABEL_NODE, LABEL_ROLE
from experiments.children import Child, child
from experiments.faulty_serve import gone, until
from experiments.ray_nodes import RayNodes, ray_nodes
from experiments.storm import Load, plans, wrong

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(580)]

AT_ONCE, MOST_TOKENS = 12, 40
STARTED_WITHIN_S, BACK_WITHIN_S = 300.0, 180.0
PROMPTS = [prompt(300 + 900 * i // 40, f"head {i}") for i in range(40)]
RIGHT = {tuple(tokens): continuation(tokens, MOST_TOKENS, VOCAB) for tokens in PROMPTS}
PLANS = plans(400, 5, PROMPTS, MOST_TOKENS, aborted=0.0)
START = """
import sys
from pathlib import Path
import ray
from actors.peers import NAMESPACE
from cluster.file import load
from deployments.app import start
ray.init(address=sys.argv[2], namespace=NAMESPACE, log_to_driver=False)
start(load(Path(sys.argv[1])), lambda line: print(line, flush=True))
"""
"""What it starts outlives it."""


@dataclass(frozen=True)
class Served:
    """A head without resources, a prefill node with the gateway, and a decode node."""

    nodes: RayNodes
    url: str

    def process(self, node: Child, title: str) -> psutil.Process | None:
        """A node's process of that title, the youngest."""
        found = []
        for process in node.processes():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(title):
                    found.append(process)
        return max(found, key=lambda process: process.create_time(), default=None)

    def pid(self, node: Child, title: str) -> int:
        process = self.process(node, title)
        assert process is not None, f"there is no {title} on {node.name}"
        return process.pid

    @contextlib.contextmanager
    def head_again(self) -> Iterator[Child]:
        """Start the head with the same command line as before."""
        argv = [str(argument) for argument in self.nodes.nodes[0].process.args[1:]]  # type: ignore[index]
        (folder,) = (argument.partition("=")[2] for argument in argv if argument.startswith("--temp-dir="))
        # Ray looks for a cluster on this machine and finds the other nodes, which are not on others here.
        (Path(folder) / "ray_current_cluster").unlink()
        with child("ray-head-again", argv, {**self.nodes.environment, NODE_NAME: HEAD}) as head:
            yield head


@pytest.fixture
def served(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path))
    data = cluster_file(model, **{**FAKE, "kv_blocks": 400, "step_ms": 4, "prefill_tokens_s": 20_000})
    file = ClusterFile.model_validate(data)
    offers: list[tuple[str, ...]] = [()]
    for node in file.each_node():
        offered = {**file.resources_of(node), **({GATEWAY: 1} if node.spec.role == "prefill" else {})}
        labels = f"--labels={LABEL_NODE}={node.name},{LABEL_ROLE}={node.spec.role}"
        offers.append(("--num-cpus=3", f"--resources={json.dumps(offered)}", labels))
    names = [HEAD, *(node.name for node in file.each_node())]
    places = [(f"127.0.0.{index + 2}", ()) for index in range(len(names))]
    with ray_nodes(places, 128 << 20, offers, names) as nodes:
        argv = ["-c", START, "{folder}/cluster.yaml", nodes.address]
        with child("start", argv, nodes.environment, {"cluster.yaml": json.dumps(data)}) as start:
            until(lambda: start.process.poll() is not None, "the application is started", STARTED_WITHIN_S)
            start.check()
        yield Served(nodes, f"http://127.0.0.1:{file.gateway.port}")


def test_the_head_is_started_again(served: Served) -> None:
    """No connection breaks, no answer is wrong, and a worker that dies later is started again and found."""
    head, with_gateway, with_decode = served.nodes.nodes
    gateway = served.pid(with_gateway, "ray::ServeReplica")
    with Load(lambda: served.url, "tiny", PLANS, AT_ONCE) as load:
        until(lambda: load.answered() >= AT_ONCE, "requests run")
        for process in head.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        until(lambda: not head.processes(), "the head is dead")
        answered = load.answered()
        until(lambda: load.answered() > answered + 4 * AT_ONCE, "requests are answered without a head")
        with served.head_again() as again:
            until(
                lambda: served.process(again, "ray::ServeController"),
                "Serve's controller runs",
                BACK_WITHIN_S,
            )
            worker = served.pid(with_decode, "ray::Worker")
            os.kill(worker, signal.SIGKILL)
            until(lambda: gone(worker), "a worker is dead")
            until(
                lambda: served.process(with_decode, "ray::Worker"), "Ray starts another worker", BACK_WITHIN_S
            )
            answered = load.answered()
            until(lambda: load.answered() > answered + 4 * AT_ONCE, "requests go on", BACK_WITHIN_S)
            assert not gone(gateway), "the gateway was replaced"
    assert not wrong(load.outcomes, RIGHT)
    assert not [outcome for outcome in load.outcomes if outcome.broken]
