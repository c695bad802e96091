"""When workers change their role: a decision over figures, tried on a fluid model of two pools."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from actors.messages import Burden, Role
from actors.steps import StepModel
from cluster.file import ClusterFile
from deployments.balance import COOLDOWN, Change, Limits, Loaded, Memory, decide, occupied
from deployments.roles import RoleBalancer, RolesSpec, spec_of

LIMITS = Limits()
STEADY_S = 400.0


@dataclass
class Pools:
    """Prompts queue before prefill workers; what these have computed is written by decode workers.

    ``prompts`` and ``answers`` are the work that comes in a second, in workers.
    """

    roles: dict[str, Role]
    limits: Limits = LIMITS
    fixed: frozenset[str] = frozenset()
    queue: float = 0.0
    writing: float = 0.0
    now: float = 1000.0
    memory: Memory = field(default_factory=Memory)
    changes: list[tuple[float, Change]] = field(default_factory=list)

    def of(self, role: Role) -> list[str]:
        return [name for name, own in self.roles.items() if own == role]

    def run(self, seconds: float, prompts: float, answers: float, noise: Callable[[], float]) -> None:
        """One second after the other; ``answers`` is what decoding takes if all prompts get through."""
        for _ in range(int(seconds)):
            self.now += 1.0
            prefills, decodes = self.of("prefill"), self.of("decode")
            came = prompts * noise()
            done = min(self.queue + came, len(prefills))
            self.queue += came - done
            share = done / prompts if prompts else 1.0
            self.writing += 0.3 * (answers * share - self.writing)  # answers take some seconds
            loads = [
                Loaded(
                    name,
                    role,
                    self.queue / len(prefills) if role == "prefill" else 0.0,
                    done / len(prefills) if role == "prefill" else 0.0,
                    min(1.0, self.writing / len(decodes)) if role == "decode" else 0.0,
                    name not in self.fixed,
                )
                for name, role in self.roles.items()
            ]
            self.memory, change = decide(loads, self.memory, self.now, self.limits)
            if change is not None:
                assert self.roles[change.worker] != change.to
                assert change.worker not in self.fixed
                self.roles[change.worker] = change.to
                self.changes.append((self.now, change))
                assert self.of("prefill"), "the last prefill worker was taken"
                assert self.of("decode"), "the last decode worker was taken"

    @property
    def ways(self) -> set[Role]:
        return {change.to for _, change in self.changes}


def pools(prefills: int, decodes: int, **others: object) -> Pools:
    roles: dict[str, Role] = {f"p{i}": "prefill" for i in range(prefills)}
    roles |= {f"d{i}": "decode" for i in range(decodes)}
    return Pools(roles, **others)  # type: ignore[arg-type]


def constant() -> float:
    return 1.0


def noisy(seed: int, spread: float) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.uniform(1 - spread, 1 + spread)


SIZES = [(1, 2), (2, 1), (4, 4), (7, 2)]
DEMANDS = [0.0, 0.4, 0.9, 1.6, 2.5, 6.0]


@pytest.mark.parametrize("size", SIZES)
def test_a_constant_load_never_brings_a_worker_back(size: tuple[int, int]) -> None:
    changed = 0
    for prompts, answers in itertools.product(DEMANDS, DEMANDS):
        found = pools(*size)
        found.run(STEADY_S, prompts, answers, constant)
        assert len(found.ways) <= 1, (prompts, answers, found.changes)
        found.changes.clear()
        found.run(STEADY_S, prompts, answers, constant)
        assert found.changes == [], (prompts, answers)
        changed += sorted(found.roles.values()) != sorted(pools(*size).roles.values())
    assert changed > 5, "nothing of this has changed a role"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_a_noisy_load_does_not_bring_it_back_either(size: tuple[int, int], seed: int) -> None:
    for prompts, answers in itertools.product(DEMANDS[1::2], DEMANDS[1::2]):
        found = pools(*size)
        found.run(STEADY_S, prompts, answers, noisy(seed, 0.5))
        assert len(found.ways) <= 1, (prompts, answers, found.changes)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_changes_are_apart_and_roles_are_held(seed: int) -> None:
    rng, found, seen = random.Random(seed), pools(3, 3), 0
    for _ in range(100):
        found.run(rng.choice((5, 30, 120)), rng.choice(DEMANDS), rng.choice(DEMANDS), noisy(seed, 0.9))
        seen = max(seen, len(found.changes))
    moments = [at for at, _ in found.changes]
    assert seen > 10
    assert all(b - a >= COOLDOWN * LIMITS.smooth_s for a, b in itertools.pairwise(moments))
    for name in found.roles:
        own = [at for at, change in found.changes if change.worker == name]
        assert all(b - a >= LIMITS.hold_s for a, b in itertools.pairwise(own))


def test_load_that_lasts_is_followed_soon_in_both_directions() -> None:
    found = pools(1, 3)
    found.run(300, 0.2, 0.6, constant)
    assert found.changes == []
    began = found.now
    found.run(30, 1.6, 0.6, constant)
    (at, change), *more = found.changes
    assert (change.to, change.reason, more) == ("prefill", "prompts", [])
    assert at - began <= 20
    assert "prompts wait" in change.why
    found.run(120, 0.2, 0.6, constant)
    assert len(found.changes) == 1, "it is not called back while nobody needs it"
    began = found.now
    found.run(30, 0.2, 2.5, constant)
    assert [change.to for _, change in found.changes] == ["prefill", "decode"]
    assert found.changes[1][0] - began <= 20
    assert found.changes[1][1].reason == "answers"


def test_as_many_as_it_takes_are_changed() -> None:
    """And one more, where it can be spared, while a backlog is there."""
    found = pools(2, 8)
    found.run(STEADY_S, 4.5, 2.0, constant)
    assert 5 <= len(found.of("prefill")) <= 6
    assert {change.to for _, change in found.changes} == {"prefill"}
    gap = min(b - a for a, b in itertools.pairwise(at for at, _ in found.changes))
    assert gap >= COOLDOWN * LIMITS.smooth_s


def test_a_short_burst_changes_nothing() -> None:
    found = pools(1, 2)
    found.run(300, 0.3, 0.3, constant)
    found.run(2, 2.0, 0.3, constant)
    found.run(300, 0.3, 0.3, constant)
    assert found.changes == []


def test_workers_of_nodes_with_one_role_stay() -> None:
    found = pools(1, 3, fixed=frozenset({"d0", "d2"}))
    found.run(300, 5.0, 0.1, constant)
    assert [change.worker for _, change in found.changes] == ["d1"]


def test_the_one_with_the_least_to_do_changes() -> None:
    memory = Memory(0.0, 100.0, 1.0, 0.4, dict.fromkeys("abc", ("decode", -1000.0)), -1e3)
    workers = [Loaded("p", "prefill", 100.0, 1.0)]
    workers += [
        Loaded(name, "decode", occupied=share) for name, share in zip("abc", (0.2, 0.05, 0.15), strict=True)
    ]
    _, change = decide(workers, memory, 1.0, LIMITS)
    assert change is not None
    assert change.worker == "b"


def test_occupied_is_the_largest_share() -> None:
    step = StepModel(base=0.01, sequence=0.001, context=0.0)
    burden = Burden("decode", "n", 1, 0.0, 0.0, 10, 500, 100, 1000, step)
    assert occupied(burden, None) == 0.5  # of the cache
    assert occupied(replace(burden, context=50), None) == 0.1  # of the slots
    assert occupied(burden, 0.02) == pytest.approx(1.0)  # of the 10 ms that sequences may add
    assert occupied(burden, 0.005) == 0.5  # nothing could meet that


# -- what the cluster file says ---------------------------------------------------------------------


def file(**others: object) -> ClusterFile:
    data: dict[str, object] = {
        "model": "m",
        "nodes": {"a": {"role": "both", "slots": 2, "cpus": 3}, "b": {"role": "prefill"}},
        "workers": {"decode": {"count": 2}},
    }
    return ClusterFile.model_validate(data | others)


def test_roles_change_where_a_group_says_both() -> None:
    spec = spec_of(file())
    assert spec is not None
    assert spec.nodes == {"prefill": {"a-0"}, "decode": {"a-0"}}
    assert spec.limits == Limits()
    told = spec_of(file(slo={"ttft_ms": 500, "tpot_ms": 40}, roles={"hold_s": 9}))
    assert told is not None
    assert told.limits == Limits(prompts_s=0.25, hold_s=9, tpot_s=0.04)


@pytest.mark.parametrize(
    "others",
    [
        {"roles": {"change": False}},
        {"workers": {}},  # one of each
        {"router": {"mode": "replicas"}},
        {"nodes": {"a": {"role": "prefill"}, "b": {"role": "decode", "slots": 2, "cpus": 2}}},
    ],
)
def test_where_no_role_can_change_nobody_looks(others: dict[str, object]) -> None:
    assert spec_of(file(**others)) is None


def test_a_worker_does_not_change_to_a_role_that_may_not_be_on_its_node() -> None:
    workers = {"prefill": {"labels": {"zone": "east"}}, "decode": {"count": 2, "node": "a-0"}}
    spec = spec_of(file(workers=workers))
    assert spec is not None
    assert spec.nodes == {"prefill": set(), "decode": {"a-0"}}


# -- telling the workers ------------------------------------------------------------------------------


class Told(RoleBalancer):
    """Workers are a table; what they are told is kept."""

    def __init__(self, burdens: dict[str, Burden], limits: Limits) -> None:
        self.burdens, self.told = burdens, list[tuple[str, Role, str]]()
        super().__init__(RolesSpec(file(), {"prefill": frozenset("n"), "decode": frozenset("n")}, limits))

    def _found(self) -> set[str]:
        """There is no cluster."""
        return set()

    def _run(self) -> None:
        """Only when asked to."""

    def _ask(self, names: object, method: str, within_s: float, *arguments: object) -> dict[str, object]:
        assert method == "burden"
        return dict(self.burdens)

    def _tell(self, name: str, to: Role, reason: str, why: str, alive: object) -> None:
        self.told.append((name, to, reason))


def test_a_worker_that_was_started_anew_is_told_again() -> None:
    burden = Burden("prefill", "n", 1, 0.0, 0.0, 0, 0, 10, 1000, StepModel())
    workers = dict.fromkeys(("p", "x"), burden) | {
        name: replace(burden, role="decode") for name in ("d", "e")
    }
    found = Told(workers, Limits(smooth_s=1000))
    found.look()
    found.burdens["x"] = replace(burden, role="decode", pid=2)
    found.look()
    found.look()  # it has not heard it yet
    assert found.told == [("x", "prefill", "restart")] * 2
    found.burdens["x"] = replace(burden, pid=2)
    found.look()
    assert len(found.told) == 2


def test_a_worker_that_is_all_there_is_of_a_role_keeps_it() -> None:
    burden = Burden("prefill", "n", 1, 0.0, 0.0, 0, 0, 10, 1000, StepModel())
    found = Told({"p": burden, "x": burden, "d": replace(burden, role="decode")}, Limits(smooth_s=1000))
    found.look()
    del found.burdens["d"]
    found.burdens["x"] = replace(burden, role="decode", pid=2)
    found.look()
    assert found.told == []
