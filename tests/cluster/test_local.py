"""Real Ray nodes on this machine: what they offer, that Ray enforces placement, and what stays behind."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from traces import Traces, small_file, traces, until

from cluster.connect import connect
from cluster.errors import AlreadyRunningError, BringUpError, NotRunningError, PlacementError
from cluster.file import ClusterFile
from cluster.local import LocalCluster, down, held, running, up
from cluster.nodes import snapshot
from cluster.placement import Placement, WorkerAsk, place
from cluster.processes import marked
from cluster.report import report
from cluster.state import StateDir

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three nodes: p-0 (prefill, two slots, zone east), d-0 (decode), b-0 (both, zone west)."""
    file = small_file(
        p={"role": "prefill", "slots": 2, "cpus": 2, "labels": {"zone": "east"}},
        d={"role": "decode"},
        b={"role": "both", "cpus": 2, "labels": {"zone": "west"}},
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    with held(file) as started:
        connect(started)
        yield started
        ray.shutdown()


class Probe:
    """An actor that tells where it is."""

    def where(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def spawn(self) -> int:
        """Start a process in a session of its own, as a careless library might."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def start(placement: Placement) -> Any:
    return ray.remote(Probe).options(num_cpus=1, resources=placement.resources).remote()


@contextlib.contextmanager
def actors(placements: list[Placement]) -> Iterator[list[Any]]:
    """Run an actor for each placement, and wait until its resources are free again afterwards."""
    before = {node.name: dict(node.free) for node in snapshot()}
    handles = [start(placement) for placement in placements]
    try:
        yield handles
    finally:
        for handle in handles:
            ray.kill(handle)
        until(lambda: {node.name: dict(node.free) for node in snapshot()} == before, "actors ended")


def test_the_nodes_are_those_of_the_file(cluster: LocalCluster) -> None:
    nodes = {node.name: node for node in snapshot()}
    assert sorted(nodes) == ["b-0", "d-0", "head", "p-0"]
    assert nodes["b-0"].roles == {"prefill", "decode"}
    assert nodes["p-0"].total["prefill"] == 2
    assert nodes["p-0"].labels["zone"] == "east"
    assert nodes["head"].roles == frozenset()
    assert len({node.address for node in nodes.values()}) == 4
    assert [node.state for node in report(cluster)] == ["alive"] * 4


def test_actors_land_where_they_were_placed_and_no_more_fit(cluster: LocalCluster) -> None:
    asks = [WorkerAsk(f"p{i}", "prefill") for i in range(3)] + [WorkerAsk("d", "decode", node="b-0")]
    placements = place(asks, snapshot())
    assert Counter(placed.node_name for placed in placements) == {"p-0": 2, "b-0": 2}
    with actors(placements) as handles:
        found = ray.get([handle.where.remote() for handle in handles], timeout=60)
        assert found == [placed.node_id for placed in placements]
        assert ray.get(handles[3].environment.remote("HANDOFF_NODE_NAME"), timeout=30) == "b-0"

        taken = {"p-0": 0, "b-0": 0}
        until(
            lambda: {n.name: n.free.get("prefill", 0) for n in snapshot() if n.name in taken} == taken,
            "report",
        )
        began = time.monotonic()
        with pytest.raises(PlacementError, match="prefill: 0 free of 2, 1 needed"):
            place([WorkerAsk("late", "prefill")], snapshot())
        assert time.monotonic() - began < 10


def test_ray_itself_holds_back_an_actor_on_a_node_without_the_role(cluster: LocalCluster) -> None:
    wrong = Placement("w", "d-0", "", {"prefill": 1.0, "at:d-0": 0.001})
    with actors([wrong]) as [handle]:
        ready, _ = ray.wait([handle.where.remote()], timeout=3)
        assert ready == []


def test_workers_spread_and_pack(cluster: LocalCluster) -> None:
    two = [WorkerAsk(f"p{i}", "prefill") for i in range(2)]
    assert {placed.node_name for placed in place(two, snapshot())} == {"p-0", "b-0"}
    packed = place(two, snapshot(), spread=False)
    assert {placed.node_name for placed in packed} == {"p-0"}
    with actors(packed) as handles:
        assert len(set(ray.get([handle.where.remote() for handle in handles], timeout=60))) == 1


def test_labels_select_the_node(cluster: LocalCluster) -> None:
    placements = place([WorkerAsk("p", "prefill", labels={"zone": "west"})], snapshot())
    with actors(placements) as [handle]:
        nodes = {node.node_id: node.name for node in snapshot()}
        assert nodes[ray.get(handle.where.remote(), timeout=60)] == "b-0"


def test_a_second_up_is_refused_at_once(cluster: LocalCluster) -> None:
    began = time.monotonic()
    with pytest.raises(AlreadyRunningError) as caught:
        up(cluster.file)
    assert time.monotonic() - began < 5
    for part in (
        repr(cluster.name),
        str(cluster.supervisor_pid),
        cluster.address,
        f"handoff down {cluster.name}",
    ):
        assert part in str(caught.value)
    assert running(cluster.name) == cluster


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_a_client_without_the_token_is_refused(
    cluster: LocalCluster, tmp_path: Path, token: str | None
) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"HOME": str(tmp_path)}  # where Ray looks for a token of its own
    if token is not None:
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    code = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).get_all_node_info()"
    done = subprocess.run(
        [sys.executable, "-c", code, cluster.address], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "AuthenticationError" in done.stderr


def test_the_token_is_private(cluster: LocalCluster) -> None:
    assert stat.S_IMODE(cluster.token_path.stat().st_mode) == 0o600
    token = cluster.token_path.read_text()
    assert len(token) == 64
    for process in traces(cluster).processes:
        assert token not in " ".join(process.cmdline())


def test_object_stores_are_allocated_before_first_use(cluster: LocalCluster) -> None:
    raylets = [process for process in traces(cluster).processes if process.name() == "raylet"]
    assert len(raylets) == 4
    for raylet in raylets:
        assert raylet.memory_info().shared > 80 * 2**20


def test_down_leaves_nothing(cluster: LocalCluster) -> None:
    (placed,) = place([WorkerAsk("d", "decode")], snapshot())
    child = ray.get(start(placed).spawn.remote(), timeout=60)
    left = traces(cluster)
    assert child in {process.pid for process in left.processes}
    ray.shutdown()
    down(cluster.name)
    left.assert_gone(within_s=10)  # what was killed on a busy machine takes a moment to go
    assert running(cluster.name) is None
    with pytest.raises(NotRunningError, match=cluster.name):
        down(cluster.name)


class RayletKiller(threading.Thread):
    """Kills the raylets of a-0 as they appear, `times` of them."""

    def __init__(self, state: StateDir, times: int) -> None:
        super().__init__(daemon=True)
        self.state = state
        self.times = times
        self.killed: list[int] = []

    def raylet(self) -> psutil.Process | None:
        status = self.state.status()
        if status is None or status.nodes["a-0"].pid is None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(status.nodes["a-0"].pid).children():
                if child.name() == "raylet" and child.pid not in self.killed:
                    return child
        return None

    def run(self) -> None:
        while len(self.killed) < self.times:
            until(self.raylet, "a raylet of a-0", within_s=120)
            if found := self.raylet():
                self.killed.append(found.pid)
                found.kill()


def test_a_lost_start_is_repeated_a_lost_node_returns_and_a_killed_supervisor_leaves_nothing() -> None:
    file = small_file(a={"role": "both", "count": 2})
    killer = RayletKiller(StateDir.of(file.name), times=1)
    killer.start()
    started = up(file)
    assert len(killer.killed) == 1
    assert {node.name: node.process.starts for node in started.nodes} == {"head": 1, "a-0": 2, "a-1": 1}

    left = traces(started)
    victim = {node.name: node for node in started.nodes}["a-0"]
    assert victim.process.pid is not None
    os.kill(victim.process.pid, signal.SIGKILL)
    until(lambda: {n.name: n.state for n in report(started_now(started))}["a-0"] == "dead", "death noticed")
    assert [node.state for node in report(started_now(started))] == ["alive", "dead", "alive"]
    until(lambda: {n.name: n.state for n in report(started_now(started))}["a-0"] == "alive", "it is back", 60)
    pids = {node.name: node.process.pid for node in started_now(started).nodes}
    assert {node.name for node in started.nodes if pids[node.name] != node.process.pid} == {"a-0"}

    os.kill(started.supervisor_pid, signal.SIGKILL)
    left.assert_gone()
    assert running(started.name) is None


def started_now(cluster: LocalCluster) -> LocalCluster:
    found = running(cluster.name)
    assert found is not None
    return found


def heed_interrupts() -> None:
    """In the child: a shell that started the tests in the background made it ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def begin(tmp_path: Path) -> tuple[subprocess.Popen[str], ClusterFile, Traces]:
    """`handoff up` in a process of its own, caught while its first node starts."""
    file = small_file(a={"role": "both", "cpus": 2})
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(file.model_dump(mode="json")))
    command = subprocess.Popen(
        [sys.executable, "-m", "handoff", "up", str(path)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    state = StateDir.of(file.name)
    until(lambda: (plan := state.plan()) and len(marked(plan.marker)) > 3, "the head starts")
    return command, file, Traces(file.name)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_up_leaves_nothing(tmp_path: Path, ending: signal.Signals) -> None:
    command, _, left = begin(tmp_path)
    command.send_signal(ending)
    command.communicate(timeout=30)
    assert command.returncode != 0
    left.assert_gone()


def test_what_no_supervisor_is_left_to_clean_up_goes_with_down(tmp_path: Path) -> None:
    command, file, left = begin(tmp_path)
    status = StateDir.of(file.name).status()
    assert status is not None
    for pid in (status.reaper_pid, status.supervisor_pid, command.pid):
        os.kill(pid, signal.SIGKILL)
    command.communicate(timeout=30)
    assert left.state_dir.exists()
    down(file.name)
    assert left.remains() == []


def test_a_node_that_does_not_start_is_named_with_its_log() -> None:
    file = small_file(a={"role": "both"})
    state = StateDir.of(file.name)
    killer = RayletKiller(state, times=3)
    killer.start()
    with pytest.raises(BringUpError, match=r"node a-0 ended with exit code") as caught:
        up(file)
    assert len(killer.killed) == 3
    assert str(state.failed) in str(caught.value)
    assert (state.failed / "head.log").exists()
    assert not state.path.exists()


def test_object_stores_beyond_shared_memory_are_refused_before_anything_starts() -> None:
    file = small_file(a={"role": "both", "object_store": "900TiB"})
    with pytest.raises(BringUpError, match=r"need 921600\.1 GiB of shared memory.*lower object_store"):
        up(file)
    assert not StateDir.of(file.name).path.exists()
