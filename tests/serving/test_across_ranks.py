"""Prefill and decode of different tensor-parallel sizes: the same answers; a dead rank is a dead worker.

These run before the shared application starts (the file's name sees to it), on its Ray nodes. Ranks add up
sums of bfloat16 in parts, so that what they compute is rounded otherwise than by the reference, which has
one: tokens may differ where the reference held both for almost equally likely, and only there.
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from asking import Endpoint, until
from comparing import equal_but_for_ties, prompt
from limits import BLOCK, CHUNK, MAX_LEN
from undivided import Undivided

from cluster.file import ClusterFile
from cluster.local import LocalCluster
from cluster.names import ROLES
from cluster.nodes import snapshot
from deployments.app import Serving
from deployments.app import serving as serve
from experiments.models import kv_bytes_per_token

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

OUT = 16
SIZES = {"2-to-1": (2, 1), "1-to-2": (1, 2)}
"""Of prefill and of decode."""


def ranked(file: ClusterFile, prefill: int, decode: int) -> ClusterFile:
    """The same cluster with so many ranks. They share the CPU that a worker of one rank would have."""
    workers = {
        role: {"cpus": 1 / ranks, "engine": {"tensor_parallel_size": ranks}}
        for role, ranks in (("prefill", prefill), ("decode", decode))
    }
    return ClusterFile.model_validate({**file.model_dump(), "workers": workers})


def _all_free() -> None:
    """Wait until the nodes can take the next application."""
    until(
        lambda: all(
            node.free.get(role, 0) == node.total.get(role, 0) for node in snapshot() for role in ROLES
        ),
        "what the workers held is free again",
        within_s=30,
    )


@pytest.fixture(scope="module", params=SIZES)
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    return SIZES[request.param]


@pytest.fixture(scope="module")
def across(file: ClusterFile, cluster: LocalCluster, sizes: tuple[int, int]) -> Iterator[Serving]:
    """The application with these ranks."""
    with serve(ranked(file, *sizes), print) as running:
        found = {worker.info.role: worker.info.layout.ranks for worker in running.workers}
        assert (found["prefill"], found["decode"]) == sizes
        yield running
    _all_free()


@pytest.fixture
def endpoint(across: Serving) -> Endpoint:
    return Endpoint(across.url, across.model)


@pytest.mark.parametrize("length", [1, BLOCK, CHUNK + BLOCK // 2, 1500])
def test_answers_are_those_of_one_engine(
    endpoint: Endpoint, reference: Undivided, sizes: tuple[int, int], model: Path, length: int
) -> None:
    tokens = prompt(length, f"ranks {sizes}")
    answer = endpoint.complete(tokens, stream=length > BLOCK, max_tokens=OUT, ignore_eos=True)
    expected = reference.generate(tokens, max_tokens=OUT, ignore_eos=True)
    equal_but_for_ties(answer.tokens, expected.sequences[0])
    record = answer.record
    assert (record["attempts"], record["mode"]) == (1, "first-token")
    per_token = kv_bytes_per_token(json.loads((model / "config.json").read_text()))
    assert record["kv_bytes"] == -(-length // BLOCK) * BLOCK * per_token
    endpoint.settled()


def test_decode_samples_and_holds_a_part(endpoint: Endpoint, reference: Undivided, sizes: object) -> None:
    """Blocks that decode has already are not written again."""
    begin, asked = prompt(2 * BLOCK + 7, f"begin {sizes}"), {"max_tokens": OUT, "ignore_eos": True}
    for end in range(2):
        tokens = [*begin, *prompt(200, f"end {end} {sizes}")]
        answer = endpoint.complete(tokens, presence_penalty=0.7, **asked)
        expected = reference.generate(tokens, presence_penalty=0.7, **asked)
        equal_but_for_ties(answer.tokens, expected.sequences[0], presence_penalty=0.7)
        assert answer.record["mode"] == "decode-samples"
    endpoint.settled()


def test_clients_that_leave_free_everything(endpoint: Endpoint) -> None:
    def leave(case: tuple[int, int]) -> None:
        length, after = case
        stream = endpoint.openai.completions.create(
            model=endpoint.model,
            prompt=prompt(length, f"leave {case}"),
            max_tokens=500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        with stream:
            for _, _ in zip(range(after), stream, strict=False):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, [(1800, 0), (130, 1), (900, 0), (700, 3)], timeout=120))
    endpoint.settled(within_s=20)


def maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def ranks_of(pid: int) -> list[psutil.Process]:
    """Processes below one that compute: those that share a KV cache with it."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if any("memfd:handoff-kv" in line for line in maps(child.pid))]


def test_shared_memory_has_no_name(across: Serving, sizes: tuple[int, int]) -> None:
    """Nothing has to be cleaned up behind processes that are killed."""
    role = "prefill" if sizes == (2, 1) else "decode"
    (worker,) = [placed for placed in across.workers if placed.info.role == role]
    ranks = [rank.pid for rank in ranks_of(worker.info.pid)]
    assert len(ranks) == 2
    mapped = [line.partition("/dev/shm/")[2] for pid in (worker.info.pid, *ranks) for line in maps(pid)]
    of_ranks = [name for name in mapped if name.startswith(("psm_", "sem.mp-", "vllm_dist_"))]
    assert of_ranks
    assert [name for name in of_ranks if not name.endswith("(deleted)")] == []


def test_a_rank_that_dies_is_a_dead_worker(
    across: Serving, endpoint: Endpoint, reference: Undivided, sizes: tuple[int, int]
) -> None:
    """Last but one: the worker is not waited for; that workers come back is tested with one rank."""
    if sizes != (2, 1):
        pytest.skip("the prefill worker has one rank here; of two ranks, see 2-to-1")
    (worker,) = [placed for placed in across.workers if placed.info.role == "prefill"]
    processes = ranks_of(worker.info.pid)
    assert len(processes) == 2
    everything = [psutil.Process(worker.info.pid), *processes]
    tokens, asked = prompt(MAX_LEN - 50, "a rank dies"), {"max_tokens": OUT, "ignore_eos": True}
    processes[1].suspend()  # or prefill could be over before anybody has seen it begin
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(endpoint.complete, tokens, **asked)
        until(lambda: endpoint.workers()["prefill-worker-0"]["requests"], "it is prefilled", within_s=30)
        processes[1].kill()
        answer = future.result(timeout=60)
    assert (answer.record["attempts"], answer.record["mode"]) == (2, "undivided")
    assert "prefill-worker-0" in answer.record["failure"]
    equal_but_for_ties(answer.tokens, reference.generate(tokens, **asked).sequences[0])
    _, alive = psutil.wait_procs(everything, timeout=20)
    assert alive == []


def test_ranks_end_with_their_worker(across: Serving, sizes: tuple[int, int]) -> None:
    """Last: the worker is killed, as at the end of every application."""
    if sizes != (1, 2):
        pytest.skip("the decode worker has one rank here; of two ranks, see 1-to-2")
    (worker,) = [placed for placed in across.workers if placed.info.role == "decode"]
    processes = ranks_of(worker.info.pid)
    assert len(processes) == 2
    os.kill(worker.info.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
