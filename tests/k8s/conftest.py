"""The Kubernetes, what is applied to it at once, and a summary of the steps with their times."""

import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from cluster_manifests import client
from kubernetes_lab import PROJECT, Lab, up

from experiments import models as made

STEPS = pytest.StashKey[list[tuple[str, str, float]]]()
FAILED = pytest.StashKey[bool]()
WHERE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STEPS] = []


@pytest.fixture(scope="session")
def lab(pytestconfig: pytest.Config) -> Iterator[Lab]:
    steps, began = pytestconfig.stash[STEPS], [time.monotonic()]

    def progress(step: str) -> None:
        print(f"k8s-test: {step}", flush=True)
        ended()
        steps.append((step, "", 0.0))

    def ended() -> None:
        now = time.monotonic()
        if steps:
            steps[-1] = (steps[-1][0], "done", now - began[0])
        began[0] = now

    with up(models, progress) as running:
        ended()
        pytestconfig.stash[WHERE] = running.where
        running.apply(client(running))
        yield running


def models() -> Path:
    """A folder with the model `tiny`, which pods mount."""
    folder = PROJECT / "models"
    if not (folder / "tiny" / "config.json").exists():
        made.make(folder / "tiny", "tiny", progress=print, force=False)
    return folder


@pytest.fixture(autouse=True)
def explained(lab: Lab, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.stash.get(FAILED, False):
        print(lab.look())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = report.failed
    if report.when == "call" or report.outcome != "passed":
        item.config.stash[STEPS].append((item.name, report.outcome, report.duration))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section(f"steps, on {config.stash.get(WHERE, 'no Kubernetes')}")
    for name, outcome, seconds in config.stash[STEPS]:
        terminalreporter.line(f"{seconds:7.1f} s  {outcome:<7}  {name}")
