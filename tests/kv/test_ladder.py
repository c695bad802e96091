"""The ladder's decisions: a table of what was seen, and what follows."""

import math

import pytest

from kv.errors import ChunkCorrupt, KVError, PeerLost, StoreFull, TransferTimeout
from kv.ladder import (
    FADE_S,
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_DEADLINE_S,
    MIN_DEADLINE_S,
    PROBE_SIZES,
    PROBE_WITHIN_S,
    SWITCH,
    Ladder,
    Side,
    cause_of,
    possible,
)

MB = 1_000_000
SMALL, LARGE = PROBE_SIZES


def probe(latency_s: float, rate: float) -> list[float]:
    """What a probe of such a link takes."""
    return [latency_s + size / rate for size in PROBE_SIZES]


def ladder(**links: tuple[float, float]) -> Ladder:
    """A ladder whose rungs were probed at time 0: name=(latency in seconds, bytes per second)."""
    made = Ladder(dict.fromkeys(links, (1.0, 1.0)))
    assert made.due(0.0) == list(links)
    for name, link in links.items():
        made.probed(name, probe(*link), 0.0)
    return made


# -- which rungs there are ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "same_node", "rungs"),
    [
        (("tcp", "plasma"), ("tcp", "plasma"), False, ["tcp", "plasma"]),
        (("plasma", "tcp"), ("tcp", "plasma"), False, ["tcp", "plasma"]),
        (("tcp", "plasma", "nixl"), ("tcp", "plasma"), False, ["tcp", "plasma"]),
        (("tcp", "plasma"), ("tcp", "plasma", "s3"), True, ["tcp", "plasma"]),
        (("s3", "tcp"), ("tcp", "s3"), False, ["tcp", "s3"]),
        (("s3", "plasma"), ("s3", "plasma"), True, ["plasma", "s3"]),
        (("tcp",), ("plasma",), True, []),
        (("tcp", "other"), ("other", "tcp"), False, ["tcp", "other"]),
    ],
    ids=str,
)
def test_a_rung_needs_both_ends(
    ours: tuple[str, ...], theirs: tuple[str, ...], same_node: bool, rungs: list[str]
) -> None:
    found = possible(Side("a", ours), Side("a" if same_node else "b", theirs))
    assert list(Ladder(found).order(MB, 0.0).rungs) == rungs


def test_the_object_store_is_nearer_on_one_node() -> None:
    ours = Side("a", ("plasma",))
    near, far = possible(ours, ours)["plasma"], possible(ours, Side("b", ("plasma",)))["plasma"]
    assert near < far


def test_a_map_says_what_to_expect_until_a_probe_has() -> None:
    """Of a link of 0.1 GB/s; the object store, which it does not name, is taken to be as fast as ever."""
    ours, theirs = Side("a", ("tcp", "plasma")), Side("b", ("tcp", "plasma"))
    mapped = {"tcp": (0.001, 1e-8)}
    made = Ladder(possible(ours, theirs, mapped), mapped)
    choice = made.order(100 * MB, 0.0)
    assert choice.rungs == ("plasma", "tcp")
    assert "tcp 1001.5 ms (by the map)" in choice.reason
    assert "(assumed)" in choice.reason
    assert made.mapped() == {"tcp": pytest.approx(LARGE / (0.0015 + LARGE * 1e-8))}
    assert made.drift("tcp") is None
    made.probed("tcp", probe(0.001, 1e10), 1.0)
    assert made.order(100 * MB, 1.0).rungs == ("tcp", "plasma")
    assert made.drift("tcp") is None  # faster is no reason to worry


@pytest.mark.parametrize(("rate", "times"), [(1e9, None), (4e8, None), (1e8, 9.0), (1e7, 89.6)])
def test_a_link_that_is_slower_than_its_map_is_told(rate: float, times: float | None) -> None:
    mapped = {"tcp": (0.0, 1e-9)}
    made = Ladder(possible(Side("a", ("tcp",)), Side("b", ("tcp",)), mapped), mapped)
    made.probed("tcp", probe(0.0005, rate), 0.0)
    assert made.drift("tcp") == (None if times is None else pytest.approx(times, rel=0.02))


def test_nothing_in_common_is_said() -> None:
    choice = Ladder({}).order(MB, 0.0)
    assert (choice.rungs, "no transport in common" in choice.reason) == ((), True)


# -- the order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("links", "nbytes", "rungs"),
    [
        ({"a": (1e-3, 1e9), "b": (1e-3, 2e9)}, 8 * MB, ("b", "a")),
        ({"a": (1e-3, 1e9), "b": (9e-3, 2e9)}, 8 * MB, ("a", "b")),  # 9 ms against 13 ms
        ({"a": (1e-3, 1e9), "b": (9e-3, 2e9)}, 80 * MB, ("b", "a")),  # 81 ms against 49 ms
        ({"a": (1e-3, 1e9), "b": (9e-3, 2e9)}, 0, ("a", "b")),
        ({"a": (3e-3, 1e9), "b": (1e-3, 1e9), "c": (2e-3, 1e9)}, MB, ("b", "c", "a")),
    ],
    ids=str,
)
def test_measured_cost_decides(
    links: dict[str, tuple[float, float]], nbytes: int, rungs: tuple[str, ...]
) -> None:
    assert ladder(**links).order(nbytes, 0.0).rungs == rungs


def test_the_reason_tells_the_estimates_and_what_is_only_assumed() -> None:
    made = Ladder({"a": (1e-3, 1e-9), "b": (2e-3, 1e-9), "c": (1.0, 0.0)})
    made.probed("a", probe(2e-3, 1e9), 0.0)
    made.broke("c", "timeout", 0.0)
    assert made.order(8 * MB, 0.0).reason == "for 8.0 MB: a 10.0 ms, b 10.0 ms (assumed), c broken (timeout)"


def test_a_probe_whose_large_payload_was_faster_is_a_latency() -> None:
    made = ladder(a=(1e-3, 1e9))
    made.probed("a", [4e-3, 3e-3], 0.0)
    assert "a 4.0 ms" in made.order(100 * MB, 0.0).reason


def test_transfers_move_the_estimate() -> None:
    made = ladder(a=(1e-3, 1e9), b=(5e-3, 1e9))
    assert made.order(9 * MB, 0.0).rungs[0] == "a"  # 10 ms against 14 ms
    for _ in range(50):
        made.took("a", 9 * MB, 0.1, 1.0)
    assert made.order(9 * MB, 1.0).rungs == ("b", "a")
    assert made.rates(1.0)["a"] == pytest.approx(LARGE / (1e-3 + LARGE / 1e9) / 10, rel=0.05)


def test_one_slow_transfer_changes_nothing() -> None:
    made = ladder(a=(1e-3, 1e9), b=(5e-3, 1e9))
    assert made.order(9 * MB, 0.0).rungs[0] == "a"
    made.took("a", 9 * MB, 0.3, 1.0)
    assert made.order(9 * MB, 1.0).rungs[0] == "a"


@pytest.mark.parametrize(("faster", "first"), [(SWITCH * 0.95, "a"), (SWITCH * 1.05, "b")])
def test_the_rung_in_use_is_kept_while_it_is_nearly_the_best(faster: float, first: str) -> None:
    made = ladder(a=(10e-3, 1e12), b=(20e-3, 1e12))
    assert made.order(MB, 0.0).rungs == ("a", "b")
    made.probed("b", probe(10e-3 / faster, 1e12), 0.0)
    assert made.order(MB, 0.0).rungs[0] == first
    fresh = ladder(a=(10e-3, 1e12), b=(10e-3 / faster, 1e12))
    assert fresh.order(MB, 0.0).rungs[0] == "b"


def test_a_rung_that_was_slow_once_is_tried_again() -> None:
    made = ladder(a=(1e-3, 1e9), b=(9e-3, 1e9))
    for _ in range(50):
        made.took("a", 9 * MB, 0.3, 0.0)
    assert made.order(9 * MB, 0.0).rungs == ("b", "a")
    assert made.order(9 * MB, FADE_S / 10).rungs == ("b", "a")
    assert made.order(9 * MB, 5 * FADE_S).rungs == ("a", "b")


# -- broken rungs ------------------------------------------------------------------------------------


def test_a_broken_rung_is_skipped_until_a_probe_passes() -> None:
    made = ladder(a=(1e-3, 1e9), b=(5e-3, 1e9))
    assert made.broke("a", "corrupt", 10.0)
    assert not made.broke("a", "timeout", 10.1)  # of another chunk that was under way
    choice = made.order(MB, 10.2)
    assert choice.rungs == ("b",)
    assert "a broken (corrupt)" in choice.reason
    assert made.rates(10.2)["a"] == 0.0
    made.took("a", MB, 1e-3, 10.3)  # one that had been sent before
    assert made.order(MB, 10.3).rungs == ("b",)
    made.probed("a", probe(1e-3, 1e9), 12.0)
    assert made.order(MB, 12.0).rungs == ("a", "b")


def test_all_rungs_may_be_broken() -> None:
    made = ladder(a=(1e-3, 1e9), b=(5e-3, 1e9))
    made.broke("a", "lost", 0.0)
    made.broke("b", "full", 0.0)
    choice = made.order(MB, 0.0)
    assert choice.rungs == ()
    assert "a broken (lost), b broken (full)" in choice.reason


def test_probes_of_a_broken_rung_wait_longer_each_time() -> None:
    made, now, waits = ladder(a=(1e-3, 1e9)), 100.0, []
    made.broke("a", "lost", now)
    for _ in range(9):
        began = now
        while not made.due(now):
            now += 0.25
        waits.append(now - began)
        made.probe_failed("a", "lost", now)
    assert waits[0] == FIRST_BACKOFF_S
    assert waits == sorted(waits)
    assert waits[1:4] == [2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S, 8 * FIRST_BACKOFF_S]
    assert waits[-1] == MAX_BACKOFF_S


def test_a_probe_is_asked_for_once() -> None:
    made = ladder(a=(1e-3, 1e9))
    assert made.due(1000.0) == []  # sound: nothing to probe
    made.broke("a", "lost", 0.0)
    assert made.due(FIRST_BACKOFF_S / 2) == []
    assert made.due(FIRST_BACKOFF_S) == ["a"]
    assert made.due(FIRST_BACKOFF_S + PROBE_WITHIN_S / 2) == []
    assert made.due(FIRST_BACKOFF_S + PROBE_WITHIN_S) == ["a"]  # the answer was lost


def test_a_rung_that_breaks_again_soon_waits_longer() -> None:
    made = ladder(a=(1e-3, 1e9))
    made.broke("a", "lost", 0.0)
    made.probed("a", probe(1e-3, 1e9), 1.0)
    made.broke("a", "lost", 2.0)
    assert made.due(2.0 + FIRST_BACKOFF_S) == []
    assert made.due(2.0 + 2 * FIRST_BACKOFF_S) == ["a"]
    made.probed("a", probe(1e-3, 1e9), 5.0)
    made.broke("a", "lost", 5.0 + 2 * MAX_BACKOFF_S)
    assert made.due(5.0 + 2 * MAX_BACKOFF_S + FIRST_BACKOFF_S) == ["a"]


# -- deadlines and causes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "nbytes", "expected"),
    [(1e9, 8 * MB, MIN_DEADLINE_S), (1e7, 8 * MB, 16.0), (1e5, 80 * MB, MAX_DEADLINE_S)],
)
def test_a_deadline_follows_the_estimate_within_bounds(rate: float, nbytes: int, expected: float) -> None:
    deadline = ladder(a=(1e-6, rate)).deadline_s("a", nbytes, 0.0)
    assert math.isclose(deadline, expected, rel_tol=0.01)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TransferTimeout("x"), "timeout"),
        (PeerLost("x"), "lost"),
        (StoreFull("x"), "full"),
        (ChunkCorrupt("r", "checksum", 1, 2), "corrupt"),
        (KVError("x"), "error"),
        (RuntimeError("x"), "error"),
    ],
    ids=str,
)
def test_causes(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause


def test_a_way_is_proven_by_a_probe_and_only_while_it_works() -> None:
    ladder = Ladder({"tcp": (0.001, 1e-9), "plasma": (0.001, 1e-9)})
    assert not ladder.proven()
    ladder.probe_failed("tcp", "timeout", 0.0)
    assert not ladder.proven()  # the other one is only assumed
    ladder.probed("plasma", [0.001, 0.01], 1.0)
    assert ladder.proven()
    ladder.broke("plasma", "timeout", 2.0)
    assert not ladder.proven()
