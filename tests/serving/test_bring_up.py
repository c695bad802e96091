"""Workers that cannot be brought up: the error says what to change, and nothing of the attempt stays.

These run before the shared application starts (the file's name sees to it), on its Ray nodes.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from asking import until
from limits import ENGINE, MODELS

from actors.errors import EngineStartError, ModelFilesDiffer
from actors.peers import NAMESPACE
from cluster.errors import PlacementError
from cluster.file import ClusterFile
from cluster.local import LocalCluster
from cluster.names import ROLES
from cluster.nodes import snapshot
from deployments.place import start_workers
from experiments import models

pytestmark = [pytest.mark.cluster, pytest.mark.engine]


@pytest.fixture(autouse=True)
def _nothing_stays(cluster: LocalCluster) -> Iterator[None]:
    assert workers_left() == [], "the application runs already: run this file before the others"
    yield
    until(lambda: not workers_left(), "the workers are ended", within_s=20)
    until(
        lambda: all(
            node.free.get(role, 0) == node.total.get(role, 0) for node in snapshot() for role in ROLES
        ),
        "what they held is free again",
        within_s=20,
    )


def workers_left() -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]


def changed(file: ClusterFile, **keys: Any) -> ClusterFile:
    return ClusterFile.model_validate({**file.model_dump(), **keys})


def test_an_engine_option_that_vllm_refuses(file: ClusterFile) -> None:
    says = r"(?s)worker \w+-worker-0 on node \w+-0.*max_model_length"
    with pytest.raises(EngineStartError, match=says):
        start_workers(changed(file, engine={**ENGINE, "max_model_length": 4096}), print)


def test_nodes_with_different_model_files(file: ClusterFile, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(models.PRESETS["tiny"], name="tiny-other", seed=1)
    monkeypatch.setitem(models.PRESETS, spec.name, spec)
    other: Path = models.make(MODELS / spec.name, spec.name)
    nodes = file.model_dump()["nodes"]
    nodes["decode"]["model"] = str(other)
    with pytest.raises(ModelFilesDiffer) as caught:
        start_workers(changed(file, nodes=nodes), print)
    for part in ("prefill-0", "decode-0", str(other), file.model):
        assert part in str(caught.value)


def test_a_worker_that_fits_nowhere_is_refused_at_once(file: ClusterFile) -> None:
    began = time.monotonic()
    with pytest.raises(PlacementError, match=r"decode-worker-1 fits on no node.*"):
        start_workers(changed(file, workers={"decode": {"count": 2}}), print)
    assert time.monotonic() - began < 10
    assert workers_left() == []
