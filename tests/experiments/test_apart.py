"""Systems of one machine are stopped while another one is measured, and all run afterwards."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
from test_load import served

from experiments.apart import VARIABLE, ApartError, apart, processes
from experiments.load_bench import Parameters, measure

SPAWNS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
"""A system that is two processes, one of which the other has started."""
NAMES = tuple(f"{name}-{os.getpid()}" for name in ("one", "two"))


@pytest.fixture
def systems() -> Iterator[tuple[str, ...]]:
    with ExitStack() as stack:
        for name in NAMES:
            process = subprocess.Popen([sys.executable, "-c", SPAWNS], env={**os.environ, VARIABLE: name})
            stack.callback(_end, process)
        for name in NAMES:
            _until(lambda name=name: len(processes(name)) == 2)  # type: ignore[misc]
        yield NAMES


def _end(process: subprocess.Popen[bytes]) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in family:
        one.kill()
    process.wait()


def _until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stopped(name: str) -> list[bool]:
    return [process.status() == psutil.STATUS_STOPPED for process in processes(name)]


def test_all_processes_of_the_others_are_stopped_in_turn(systems: tuple[str, ...]) -> None:
    one, two = systems
    with apart(systems) as only:
        assert (stopped(one), stopped(two)) == ([False, False], [False, False])
        for _ in range(2):
            only(one)
            assert stopped(two) == [True, True]
            _until(lambda: stopped(one) == [False, False])
            only(two)
            assert stopped(one) == [True, True]
            _until(lambda: stopped(two) == [False, False])
    _until(lambda: stopped(one) == stopped(two) == [False, False])


def test_a_load_is_offered_while_the_other_system_is_stopped(systems: tuple[str, ...]) -> None:
    """Each answers one request before its load, which is not counted; the servers are stand-ins, here."""
    told: dict[str, list[list[bool]]] = {name: [] for name in systems}

    def tell(line: str) -> None:
        for name, other in (systems, systems[::-1]):
            if line.startswith(f"{name}, "):
                told[name].append(stopped(other))

    with served() as one, served() as two:
        urls = dict(zip(systems, (one.url, two.url), strict=True))
        run = measure(
            Parameters(urls, rates=(4.0, 4.0), output_tokens=(2, 2), seconds=2.0, warm_s=0, apart=True),
            None,
            tell,
        )
    assert told == {name: [[True, True]] * 2 for name in systems}
    counted = sum(row["requests"] for row in run.results["rows"]) / 2
    assert len(one.asked) == len(two.asked) == counted + 2
    _until(lambda: stopped(systems[0]) == stopped(systems[1]) == [False, False])


def test_all_go_on_when_a_measurement_fails(systems: tuple[str, ...]) -> None:
    def measure() -> None:
        with apart(systems) as only:
            only(systems[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure()
    _until(lambda: stopped(systems[1]) == [False, False])


def test_a_system_that_nothing_marks_is_refused_and_nothing_stops(systems: tuple[str, ...]) -> None:
    said = f"no process has {VARIABLE}=other in its environment; start"
    with pytest.raises(ApartError, match=said), apart([*systems, "other"]):
        pytest.fail("it was let through")
    assert stopped(systems[0]) == [False, False]
