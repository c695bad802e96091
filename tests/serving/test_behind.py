"""KV outlives workers: prompts are kept in a bucket behind the requests, and loaded by whoever needs them.

Real vLLM and a real S3 server. These run before the shared application starts (the file's name sees to it),
on its Ray nodes, in this order: each goes on from what the one before has left.
"""

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
import ray
from asking import Answer, Endpoint, until
from comparing import equal_but_for_ties, prompt
from undivided import Undivided

from cluster.file import ClusterFile
from cluster.local import LocalCluster
from cluster.names import ROLES
from cluster.nodes import snapshot
from deployments.app import Serving
from deployments.app import serving as serve
from experiments.s3_server import S3Server
from kv.bucket import Bucket
from kv.tier import PAGES, blocks_per_page

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

PREFILL, DECODE = "prefill-worker-0", "decode-worker-0"
BACK_WITHIN_S = 120.0
ASKED: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}


class Tiered:
    """The application with a tier, and what of it the tests break."""

    def __init__(self, serving: Serving, s3: S3Server, prefix: str) -> None:
        self.endpoint = Endpoint(serving.url, serving.model)
        self.handles = {worker.info.name: worker.handle for worker in serving.workers}
        layout = serving.workers[0].info.layout
        self.page = blocks_per_page(layout) * layout.block_size
        self._settings = replace(s3.settings, prefix=prefix)

    def pages(self) -> int:
        """How many are in the bucket."""
        with closing(Bucket(self._settings)) as bucket:
            return sum(stored.name.startswith(PAGES) for stored in bucket.list())

    def stats(self, name: str) -> dict[str, Any]:
        found = ray.get(self.handles[name].stats.remote(), timeout=30)
        return {"computed": found.computed_tokens, **found.tier}

    def forget(self, name: str) -> None:
        """The worker's own prefix cache, not the tier."""
        reset = self.handles[name].reset_prefix_cache
        until(lambda: ray.get(reset.remote(), timeout=30), f"{name} has forgotten its prefixes", within_s=20)

    @property
    def pids(self) -> dict[str, int]:
        return {name: ray.get(handle.start.remote(), timeout=30).pid for name, handle in self.handles.items()}


@pytest.fixture(scope="module")
def tiered(file: ClusterFile, cluster: LocalCluster, s3: S3Server) -> Iterator[Tiered]:
    prefix = f"behind-{secrets.token_hex(4)}"
    section = {**asdict(replace(s3.settings, prefix=prefix)), "tier": True}
    data = {**file.model_dump(), "s3": section, "recompute": {"tokens_per_s": 100, "burst_s": 20}}
    with serve(ClusterFile.model_validate(data), print) as running:
        yield Tiered(running, s3, prefix)
    until(
        lambda: all(
            node.free.get(role, 0) == node.total.get(role, 0) for node in snapshot() for role in ROLES
        ),
        "what the workers held is free again",
        within_s=30,
    )


@pytest.fixture(scope="module")
def common(tiered: Tiered) -> list[int]:
    """The beginning of several prompts: four pages that prefill has computed, and that are kept."""
    tokens = prompt(4 * tiered.page, "common")
    answer = tiered.endpoint.complete(tokens, **ASKED)
    assert (answer.record["mode"], answer.record["attempts"]) == ("first-token", 1)
    assert answer.record["tier_tokens"] == 0
    until(lambda: tiered.pages() == 4, "the prompt's pages are in the bucket", within_s=30)
    assert tiered.stats(PREFILL)["dropped_bytes"] == 0
    assert tiered.stats(DECODE)["written_bytes"] == 0  # what it got is kept by who has computed it
    return tokens


def right(answer: Answer, reference: Undivided, tokens: list[int]) -> None:
    equal_but_for_ties(answer.tokens, reference.generate(tokens, **ASKED).sequences[0])


def test_prefill_dies_and_decode_goes_on_from_the_tier(
    tiered: Tiered, reference: Undivided, common: list[int]
) -> None:
    """It computes what the tier does not hold, and nothing else."""
    endpoint, tokens = tiered.endpoint, [*common, *prompt(200, "prefill dies")]
    tiered.forget(DECODE)
    before, pid = tiered.stats(DECODE), tiered.pids[PREFILL]
    os.kill(pid, signal.SIGSTOP)  # so that it dies before it has handed anything over
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(endpoint.complete, tokens, **ASKED)
            until(lambda: _waiting(endpoint, DECODE) == 1, "decode waits for the KV", within_s=20)
            os.kill(pid, signal.SIGKILL)
            answer = asked.result(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    right(answer, reference, tokens)
    record, after = answer.record, tiered.stats(DECODE)
    assert (record["attempts"], record["mode"], record["decode_worker"]) == (2, "undivided", DECODE)
    assert PREFILL in record["failure"]
    assert (record["tier_worker"], record["tier_tokens"]) == (DECODE, len(common))
    assert after["loaded_tokens"] - before["loaded_tokens"] == len(common)
    assert after["computed"] - before["computed"] == 200 + len(answer.tokens) - 1
    assert after["hits"] - before["hits"] == 1


def _waiting(endpoint: Endpoint, name: str) -> int:
    try:
        found: int = endpoint.workers()[name].get("receiving", 0)
        return found
    except httpx.HTTPError:
        return 0


def test_what_one_worker_computed_another_loads(
    tiered: Tiered, reference: Undivided, common: list[int]
) -> None:
    """The prefill worker that is back is a new process, and has computed nothing yet."""
    endpoint, tokens = tiered.endpoint, [*common, *prompt(300, "another worker")]
    until(
        lambda: all(worker["alive"] for worker in endpoint.workers().values()),
        "prefill is back",
        BACK_WITHIN_S,
    )
    before = tiered.stats(PREFILL)
    answer = endpoint.complete(tokens, **ASKED)
    right(answer, reference, tokens)
    record, after = answer.record, tiered.stats(PREFILL)
    assert (record["attempts"], record["mode"]) == (1, "first-token")
    assert (record["tier_worker"], record["tier_tokens"]) == (PREFILL, len(common))
    assert after["computed"] - before["computed"] == 300
    body = {"model": endpoint.model, "prompt": [*common, 7], "max_tokens": 3}
    tiered.forget(PREFILL)
    path = endpoint.http.post("/v1/completions", json=body).headers["x-handoff-path"]
    assert f"; {len(common)} tokens from the tier on {PREFILL}, for " in path
    assert "computing" in path
    endpoint.settled()


def test_a_damaged_page_is_computed_again(
    tiered: Tiered, reference: Undivided, common: list[int], s3: S3Server
) -> None:
    if s3.folder is None:
        pytest.skip(f"the files of {s3.kind} cannot be reached; install Go, or put versitygw on PATH")
    settings = tiered._settings
    pages = list((s3.folder / settings.bucket / settings.prefix / PAGES).glob("*/*"))
    assert len(pages) >= 4
    for page in pages:
        data = bytearray(page.read_bytes())
        data[len(data) // 2] ^= 16
        page.write_bytes(bytes(data))
    tiered.forget(PREFILL)
    before, tokens = tiered.stats(PREFILL), [*common, *prompt(50, "damaged")]
    answer = tiered.endpoint.complete(tokens, **ASKED)
    right(answer, reference, tokens)
    after = tiered.stats(PREFILL)
    assert (answer.record["attempts"], answer.record["tier_tokens"]) == (1, 0)
    assert after["corrupt"] - before["corrupt"] == 1
    assert after["computed"] - before["computed"] == len(tokens)


def test_decode_dies_amid_a_stream_that_goes_on_from_the_tier(tiered: Tiered, reference: Undivided) -> None:
    endpoint, tokens, count = tiered.endpoint, prompt(3 * tiered.page + 40, "decode dies"), 400
    before = tiered.pages()
    endpoint.complete(tokens, max_tokens=1)  # prefill alone; the pages are kept
    until(lambda: tiered.pages() >= before + 3, "the prompt's pages are in the bucket", within_s=30)
    stream = endpoint.openai.completions.create(
        model=endpoint.model,
        prompt=tokens,
        stream=True,
        max_tokens=count,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        extra_headers={"X-Request-Id": "tier-decode-dies"},
    )
    parts = [next(stream) for _ in range(8)]
    tiered.forget(PREFILL)
    computed = tiered.stats(PREFILL)["computed"]
    os.kill(tiered.pids[DECODE], signal.SIGKILL)
    parts += list(stream)
    found = [token for part in parts for token in part.choices[0].token_ids]
    record = endpoint.record("tier-decode-dies")
    assert record["attempts"] == 2
    assert DECODE in record["failure"]
    assert (record["tier_worker"], record["tier_tokens"]) == (PREFILL, 3 * tiered.page)
    assert tiered.stats(PREFILL)["computed"] - computed < 40 + count
    equal_but_for_ties(found, reference.generate(tokens, max_tokens=count, ignore_eos=True).sequences[0])
