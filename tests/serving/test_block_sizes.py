"""Prefill and decode with different block sizes: the same answers. Caches that cannot be converted: refused.

These run before the shared application starts (the file's name sees to it), on its Ray nodes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import Endpoint, until
from comparing import equal_but_for_ties, prompt
from limits import BLOCK, CHUNK, ENGINE
from undivided import Undivided

from cluster.file import ClusterFile
from cluster.local import LocalCluster
from cluster.names import ROLES
from cluster.nodes import snapshot
from deployments.app import serving as serve
from deployments.place import start_workers
from experiments.models import kv_bytes_per_token
from kv.errors import LayoutMismatch

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

OUT = 24
SIZES = {"128-to-64": (128, 64), "64-to-96": (64, 96)}
"""Of prefill and of decode."""


def engines(file: ClusterFile, prefill: dict[str, Any], decode: dict[str, Any]) -> ClusterFile:
    """The same cluster with engine options by role."""
    workers = {"prefill": {"engine": prefill}, "decode": {"engine": decode}}
    return ClusterFile.model_validate({**file.model_dump(), "workers": workers})


def test_caches_of_different_types_are_refused(file: ClusterFile, cluster: LocalCluster) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        start_workers(engines(file, {}, {"dtype": "float16"}), print)
    assert caught.value.field == "dtype"
    assert {caught.value.ours, caught.value.theirs} == {"torch.bfloat16", "torch.float16"}
    assert ENGINE["dtype"] == "bfloat16"
    for part in ("dtype is", "'torch.bfloat16'", "'torch.float16'"):
        assert part in str(caught.value)
    _all_free()


@pytest.fixture(scope="module", params=SIZES)
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    return SIZES[request.param]


@pytest.fixture(scope="module")
def mixed(file: ClusterFile, cluster: LocalCluster, sizes: tuple[int, int]) -> Iterator[Endpoint]:
    """The application with two block sizes."""
    prefill, decode = sizes
    with serve(engines(file, {"block_size": prefill}, {"block_size": decode}), print) as running:
        found = {worker.info.role: worker.info.layout.block_size for worker in running.workers}
        assert found == {"prefill": prefill, "decode": decode}
        yield Endpoint(running.url, running.model)
    _all_free()


def _all_free() -> None:
    """Wait until the nodes can take the next application."""
    until(
        lambda: all(
            node.free.get(role, 0) == node.total.get(role, 0) for node in snapshot() for role in ROLES
        ),
        "what the workers held is free again",
        within_s=30,
    )


@pytest.mark.parametrize("length", [1, 63, 65, BLOCK, 3 * BLOCK + 5, CHUNK + 1, 1500])
@pytest.mark.parametrize("extra", [{}, {"presence_penalty": 0.7}], ids=["first", "decode"])
def test_answers_are_those_of_one_engine(
    mixed: Endpoint,
    reference: Undivided,
    sizes: tuple[int, int],
    model: Path,
    length: int,
    extra: dict[str, float],
) -> None:
    asked = {"max_tokens": OUT, "ignore_eos": True, **extra}
    tokens = prompt(length, f"{sizes} {extra}")
    answer = mixed.complete(tokens, **asked)
    expected = reference.generate(tokens, **asked)
    assert answer.prompt == expected.prompt
    equal_but_for_ties(answer.tokens, expected.sequences[0], **extra)
    record = answer.record
    assert record["attempts"] == 1
    assert "failure" not in record
    if length > 1 or not extra:
        assert record["mode"] == ("decode-samples" if extra else "first-token")
        blocks = -(-length // sizes[0])
        per_token = kv_bytes_per_token(json.loads((model / "config.json").read_text()))
        assert record["kv_bytes"] == blocks * sizes[0] * per_token
    mixed.settled()


def test_a_prompt_that_decode_holds_in_part(
    mixed: Endpoint, reference: Undivided, sizes: tuple[int, int]
) -> None:
    """Blocks of a common beginning are not written again, in whatever block of prefill's they end."""
    begin = prompt(5 * BLOCK + 7, f"begin {sizes}")
    for end in range(3):
        tokens = [*begin, *prompt(200, f"end {end} {sizes}")]
        answer = mixed.complete(tokens, max_tokens=OUT, ignore_eos=True)
        expected = reference.generate(tokens, max_tokens=OUT, ignore_eos=True)
        equal_but_for_ties(answer.tokens, expected.sequences[0])
    mixed.settled()
