"""Which workers a request goes to: a pure function."""

from dataclasses import replace

import pytest

from deployments.errors import NoWorker
from deployments.router import Route, WorkerLoad, route
from deployments.split import Mode

P0, P1 = (WorkerLoad(f"p{i}", "prefill", True, 0, 0) for i in range(2))
D0, D1 = (WorkerLoad(f"d{i}", "decode", True, 0, 0) for i in range(2))
ALL = [P0, P1, D0, D1]


@pytest.mark.parametrize("mode", [Mode.FIRST_TOKEN, Mode.DECODE_SAMPLES])
def test_a_divided_request_goes_to_a_pair_and_keeps_its_reason(mode: Mode) -> None:
    assert route(ALL, mode, "why") == Route("p0", "d0", mode, "why")


def test_the_least_loaded_of_each_role() -> None:
    workers = [
        replace(P0, prefill_tokens=100),
        replace(P1, prefill_tokens=99, running=50),
        replace(D0, running=2),
        replace(D1, running=1, prefill_tokens=5000),
    ]
    assert route(workers, Mode.FIRST_TOKEN, "") == Route("p1", "d1", Mode.FIRST_TOKEN, "")


def test_the_order_of_the_workers_does_not_matter() -> None:
    assert route(ALL[::-1], Mode.FIRST_TOKEN, "") == route(ALL, Mode.FIRST_TOKEN, "")


def test_an_undivided_request_runs_on_decode() -> None:
    assert route(ALL, Mode.UNDIVIDED, "why") == Route("d0", "d0", Mode.UNDIVIDED, "why")


def test_an_undivided_request_of_one_token_runs_on_prefill() -> None:
    assert route(ALL, Mode.UNDIVIDED, "why", one_token=True) == Route("p0", "p0", Mode.UNDIVIDED, "why")


def test_the_dead_get_nothing() -> None:
    workers = [replace(P0, alive=False), replace(P1, prefill_tokens=10**6), replace(D0, alive=False), D1]
    assert route(workers, Mode.FIRST_TOKEN, "") == Route("p1", "d1", Mode.FIRST_TOKEN, "")


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("one_token", [False, True])
@pytest.mark.parametrize(
    ("alive", "missing"), [([P0, P1], "decode"), ([D0, D1], "prefill")], ids=["no decode", "no prefill"]
)
def test_a_role_without_workers_is_done_by_the_other(
    alive: list[WorkerLoad], missing: str, mode: Mode, one_token: bool
) -> None:
    dead = [replace(worker, alive=False) for worker in ALL if worker not in alive]
    found = route([*dead, *alive], mode, "why", one_token)
    assert found == Route(alive[0].name, alive[0].name, Mode.UNDIVIDED, f"no {missing} worker is alive")


@pytest.mark.parametrize(
    "workers", [[], [replace(worker, alive=False) for worker in ALL]], ids=["none", "dead"]
)
def test_no_worker_at_all(workers: list[WorkerLoad]) -> None:
    with pytest.raises(NoWorker, match=f"none of the {len(workers)} workers is alive"):
        route(workers, Mode.FIRST_TOKEN, "")
