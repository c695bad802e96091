"""Two nodes in two network namespaces, a gateway on each, and the link between them cut while requests run.

On the fake engine, whose every token proves the KV that it was computed from.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from comparing import prompt
from test_storm import FAKE, VOCAB, cluster_file

from actors.fake_kv import continuation
from cluster import netns
from cluster.file import ClusterFile
from cluster.names import GATEWAY, LABEL_NODE, LABEL_ROLE
from cluster.netns import Network
from experiments.faulty_serve import Controls, gone, served_faulty_on, until
from experiments.ray_nodes import RayNodes, ray_nodes
from experiments.storm import Load, plans, wrong

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(400),
    pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing())),
]

AT_ONCE, MOST_TOKENS = 12, 40
DETECTED_WITHIN_S = 30.0
"""No deadline of a transfer is longer (``kv.ladder.MAX_DEADLINE_S``)."""
BACK_WITHIN_S = 120.0
SETTLED_WITHIN_S = 5.0
DOWN_S = 6.0
"""Less than Ray takes to declare a node dead."""
PROMPTS = [prompt(300 + 900 * i // 40, f"cut {i}") for i in range(40)]
RIGHT = {tuple(tokens): continuation(tokens, MOST_TOKENS, VOCAB) for tokens in PROMPTS}
PLANS = plans(400, 5, PROMPTS, MOST_TOKENS, aborted=0.0)


@dataclass(frozen=True)
class Across:
    """The served cluster: prefill is on the first node, decode on the second."""

    network: Network
    nodes: RayNodes
    controls: Controls
    urls: tuple[str, ...]

    def load(self) -> Load:
        """Requests to both gateways in turn."""
        urls = itertools.cycle(self.urls)
        return Load(lambda: next(urls), "tiny", PLANS, AT_ONCE)

    def gateways(self, node: int) -> list[psutil.Process]:
        return [process for process in self.nodes.nodes[node].processes() if _is_gateway(process)]

    def rates(self) -> dict[str, float]:
        """What prefill thinks of the ways to decode: bytes per second, 0 while broken."""
        found = self.controls.stats("prefill-worker-0").rates
        return {way.split(" ")[1]: rate for way, rate in found.items()}


def _is_gateway(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[0].startswith("ray::ServeReplica")
    except (psutil.Error, IndexError):
        return False


@pytest.fixture(scope="module")
def across(model: Path) -> Iterator[Across]:
    data = cluster_file(model, **{**FAKE, "kv_blocks": 400, "step_ms": 4, "prefill_tokens_s": 20_000})
    data["gateway"] |= {"host": "0.0.0.0", "replicas": 2}
    data["recompute"] = {"tokens_per_s": 1_000_000}
    file = ClusterFile.model_validate(data)
    offers = [
        (
            "--num-cpus=2",
            f"--resources={json.dumps({**file.resources_of(node), GATEWAY: 1})}",
            f"--labels={LABEL_NODE}={node.name},{LABEL_ROLE}={node.spec.role}",
        )
        for node in file.each_node()
    ]
    with ExitStack() as stack:
        network = stack.enter_context(netns.network(2, attach_host=True))
        places = [(node.address, node.prefix) for node in network.nodes]
        names = [node.name for node in file.each_node()]
        nodes = stack.enter_context(ray_nodes(places, 128 << 20, offers, names))
        urls = tuple(f"http://{node.address}:{file.gateway.port}" for node in network.nodes)
        controls = stack.enter_context(served_faulty_on(nodes, file, network.nodes[0].prefix, urls[0]))
        yield Across(network, nodes, controls, urls)


def judged(across: Across, load: Load) -> None:
    """All requests were answered, rightly, and have left nothing."""
    assert not wrong(load.outcomes, RIGHT)
    took = across.controls.settled(SETTLED_WITHIN_S)
    print(f"{load.answered()} requests; {took:.1f} s until nothing was left")


def test_the_way_that_kv_takes_is_cut(across: Across) -> None:
    """Packets of the direct way vanish, and nobody is told: KV takes the other, and comes back by itself."""
    until(lambda: all(across.rates().get(rung) for rung in ("tcp", "plasma")), "both ways are sound")
    port = across.controls.worker("prefill-worker-0", "kv_port")
    with across.load() as load:
        until(lambda: load.answered() >= AT_ONCE, "requests run")
        before = across.controls.stats("decode-worker-0").taken_bytes.get("tcp", 0)
        until(
            lambda: across.controls.stats("decode-worker-0").taken_bytes.get("tcp", 0) > before,
            "KV goes the direct way",
        )
        for node in across.network.nodes:
            node.drop(port)
        try:
            cut = time.monotonic()
            until(lambda: across.rates()["tcp"] == 0, "the cut is detected", DETECTED_WITHIN_S)
            detected, answered = time.monotonic() - cut, load.answered()
            until(lambda: load.answered() > answered + AT_ONCE, "requests are answered without it")
            assert across.rates()["tcp"] == 0
        finally:
            for node in across.network.nodes:
                node.pass_all()
        until(lambda: across.rates()["tcp"] > 0, "a probe has mended it", BACK_WITHIN_S)
    failed = across.controls.stats("decode-worker-0").failed
    assert failed.get("tcp timeout", 0) > 0
    print(f"detected after {detected:.1f} s; {failed}")
    judged(across, load)


def test_all_of_the_link_is_cut_for_a_while(across: Across) -> None:
    """Tokens, announcements and KV wait, or go again."""
    with across.load() as load:
        until(lambda: load.answered() >= AT_ONCE, "requests run")
        across.network.nodes[1].cut()
        down = time.monotonic()
        try:
            while time.monotonic() - down < DOWN_S:
                time.sleep(0.1)
        finally:
            across.network.nodes[1].mend()
        answered = load.answered()
        until(lambda: load.answered() > answered + 2 * AT_ONCE, "requests go on", BACK_WITHIN_S)
        until(lambda: len(across.controls.alive()) == 2, "both workers are alive", BACK_WITHIN_S)
    gaps = [later.ended - one.ended for one, later in itertools.pairwise(load.outcomes)]
    assert max(gaps) > DOWN_S / 2, "the cut was not felt"
    judged(across, load)


def test_a_gateway_on_one_node_dies(across: Across) -> None:
    """The other node's answers; workers on both forget what the dead one had asked of them."""
    (victim,) = across.gateways(1)
    with across.load() as load:
        until(lambda: load.answered() >= AT_ONCE, "requests run")
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: gone(victim.pid), "it is dead")
        answered = load.answered()
        until(lambda: load.answered() > answered + AT_ONCE, "the other one serves")
        assert across.gateways(0)
    assert any(outcome.broken for outcome in load.outcomes), "no connection was on it"
    judged(across, load)
