"""A model, a serving cluster of one prefill-only and one decode-only node, and an undivided engine."""

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import ray
from asking import Endpoint
from limits import ENGINE, MODELS
from undivided import Undivided, undivided

from cluster.connect import connect
from cluster.file import ClusterFile
from cluster.local import LocalCluster, held
from deployments import place
from deployments.app import Serving
from deployments.app import serving as serve
from experiments import models
from experiments.faulty_worker import FaultyWorker
from experiments.s3_server import S3Server

if TYPE_CHECKING:
    from guarded import Guarded

pytest.register_assert_rewrite("comparing")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with clusters of their own come before those that share one, which would run beside them."""

    def shared(item: pytest.Item) -> int:
        names = getattr(item, "fixturenames", ()) if HERE in item.path.parents else ()
        return 2 if "guarded" in names else int("cluster" in names or "reference" in names)

    items.sort(key=shared)


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Clusters of these tests are invisible to the user's own `handoff status`."""
    home = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def model() -> Path:
    """A small model with random weights."""
    return models.make(MODELS / "tiny", "tiny")


@pytest.fixture(scope="session")
def file(model: Path) -> ClusterFile:
    """One node that only prefills and one that only decodes."""
    node = {"cpus": 1, "object_store": "256MiB"}
    return ClusterFile.model_validate(
        {
            "name": f"s{secrets.token_hex(4)}",
            "model": str(model),
            "served_model_name": "tiny",
            "engine": ENGINE,
            "gateway": {"port": _free_port()},
            "router": {"mode": "always"},  # the handover is what is tested
            "recompute": {"tokens_per_s": 500, "burst_s": 20},
            "nodes": {"prefill": {"role": "prefill", **node}, "decode": {"role": "decode", **node}},
        }
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def cluster(file: ClusterFile, s3: S3Server) -> Iterator[LocalCluster]:
    """The Ray nodes, with nothing on them yet; this process is a driver.

    The store's credentials are in their environment, where workers look for them.
    """
    with held(file, print) as started:
        connect(started)
        yield started
        ray.shutdown()


@pytest.fixture(scope="session")
def serving(file: ClusterFile, cluster: LocalCluster) -> Iterator[Serving]:
    """The application on those nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "Worker", FaultyWorker)
        with serve(file, print) as running:
            yield running


@pytest.fixture(scope="session")
def endpoint(serving: Serving) -> Endpoint:
    """The application's HTTP endpoint."""
    return Endpoint(serving.url, serving.model)


@pytest.fixture(scope="session")
def reference(file: ClusterFile) -> Iterator[Undivided]:
    """An undivided engine with the same model and options as a worker."""
    with undivided(file.model, file.engine) as engine:
        yield engine


@pytest.fixture(scope="session")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Guarded"]:
    """A gateway of its own, with keys and tight limits, on the fake engine."""
    from guarded import guarded_serving  # imports test modules, which pytest must have seen before

    with guarded_serving(model, tmp_path_factory.mktemp("guarded")) as running:
        yield running
