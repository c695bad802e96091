"""When workers are added and given up, and how gateways learn of it; without a cluster."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from actors.messages import Role
from cluster.file import ClusterFile
from deployments.balance import COOLDOWN, Limits, Loaded, Memory
from deployments.members import NONE, Follower, MemberList, Members
from deployments.pools import Grow, Pool, Shrink, resize
from deployments.roles import has_pools, spec_of

LIMITS, IDLE_S = Limits(smooth_s=1.0), 60.0
POOLS: dict[Role, Pool] = {"prefill": Pool(1, 3), "decode": Pool(2, 8)}


def workers(prefill: int, decode: int) -> list[Loaded]:
    return [
        *(Loaded(f"prefill-worker-{i}", "prefill") for i in range(prefill)),
        *(Loaded(f"decode-worker-{i}", "decode", occupied=i / 100) for i in range(decode)),
    ]


def asked(
    memory: Memory,
    now: float = 100.0,
    pools: dict[Role, Pool] = POOLS,
    since: dict[Role, float] | None = None,
    count: tuple[int, int] = (1, 2),
) -> tuple[dict[Role, float], Grow | Shrink | None]:
    return resize(workers(*count), memory, pools, since or {}, now, LIMITS, IDLE_S)


def test_a_role_that_is_short_gets_a_worker() -> None:
    _, grown = asked(Memory(prompts_s=1.5))
    assert isinstance(grown, Grow)
    assert (grown.role, grown.by) == ("prefill", 1)
    assert "prompts wait 1.5 s" in grown.why
    _, grown = asked(Memory(occupied=1.7))
    assert isinstance(grown, Grow)
    assert (grown.role, grown.by) == ("decode", 1)
    assert asked(Memory(prompts_s=0.9, prompting=0.9, occupied=1.5))[1] is None


def test_many_get_several_at_once_and_never_more_than_there_may_be() -> None:
    pools: dict[Role, Pool] = {**POOLS, "decode": Pool(20, 100)}
    _, grown = asked(Memory(occupied=19.0), pools=pools, count=(1, 20))
    assert grown == Grow("decode", 5, "20 decode workers are 95% occupied")
    pools["decode"] = Pool(20, 23)
    _, grown = asked(Memory(occupied=19.0), pools=pools, count=(1, 20))
    assert isinstance(grown, Grow)
    assert grown.by == 3
    pools["decode"] = Pool(20, 20)
    assert asked(Memory(occupied=19.0), pools=pools, count=(1, 20))[1] is None


def test_one_that_is_coming_is_waited_for() -> None:
    pools: dict[Role, Pool] = {**POOLS, "decode": Pool(2, 8, coming=1)}
    assert asked(Memory(occupied=1.9), pools=pools)[1] is None
    assert asked(Memory(occupied=1.9, changed_at=100 - COOLDOWN / 2))[1] is None


def test_what_was_added_is_given_up_when_it_was_not_needed_for_long() -> None:
    pools: dict[Role, Pool] = {**POOLS, "decode": Pool(2, 8, added=("decode-worker-2", "decode-worker-3"))}
    idle = Memory(occupied=0.4)
    since, shrunk = asked(idle, 100, pools, count=(1, 4))
    assert (since, shrunk) == ({"decode": 100}, None)
    since, shrunk = asked(idle, 100 + IDLE_S / 2, pools, since, (1, 4))
    assert (since, shrunk) == ({"decode": 100}, None)
    busy, _ = asked(Memory(occupied=2.5), 101 + IDLE_S / 2, pools, since, (1, 4))
    assert busy == {}
    since, shrunk = asked(idle, 100 + IDLE_S, pools, since, (1, 4))
    assert isinstance(shrunk, Shrink)
    assert shrunk.worker == "decode-worker-2"  # the least occupied of those that were added
    assert since == {}


def test_those_of_the_file_stay() -> None:
    since, shrunk = asked(Memory(), 100 + IDLE_S, since={"decode": 0.0})
    assert (since, shrunk) == ({"decode": 0.0}, None)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("demand", [i / 4 for i in range(1, 40)])
def test_under_any_constant_load_the_number_settles(role: Role, demand: float) -> None:
    """A queue grows while prompts take all the time there is."""
    pools: dict[Role, Pool] = {"prefill": Pool(1, 10), "decode": Pool(1, 10)}
    size, waits_s, since, changes = 1, 0.0, dict[Role, float](), list[int]()
    for now in itertools.count(0, 5):
        busy = min(demand, size)
        waits_s = max(0.0, waits_s + 5 * (demand - size)) if role == "prefill" else 0.0
        memory = Memory(
            prompts_s=waits_s,
            prompting=(size if waits_s else busy) if role == "prefill" else 0.0,
            occupied=busy if role == "decode" else 0.0,
            changed_at=-100,
        )
        pools[role] = replace(pools[role], added=tuple(f"{role}-worker-{i}" for i in range(1, size)))
        count = (size, 1) if role == "prefill" else (1, size)
        since, done = resize(workers(*count), memory, pools, since, now, LIMITS, IDLE_S)
        if isinstance(done, Grow):
            size += done.by
            changes.append(1)
        elif isinstance(done, Shrink):
            size -= 1
            changes.append(-1)
        if now > 2000:
            break
    assert size == 10 or demand <= size
    assert sum(a != b for a, b in itertools.pairwise(changes)) <= 1, changes


# -- the list of workers ------------------------------------------------------------------------------


def test_a_gateway_is_told_what_has_changed() -> None:
    members = MemberList(["a", "b"])
    first = members.asked(1, NONE)
    assert first is not None
    assert (first.here, first.leaving) == ({"a", "b"}, set())
    assert members.asked(1, first.version) is None
    members.comes("c")
    version = members.leaves("a")
    second = members.asked(1, first.version)
    assert second is not None
    assert (second.version, second.here, second.leaving) == (version, {"b", "c"}, {"a"})
    assert not members.wait_seen(version, 0.1)
    members.asked(1, version)
    assert members.wait_seen(version, 0.1)
    assert members.gone("a") > version
    assert members.now().leaving == set()


def test_a_gateway_that_asks_no_more_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    members = MemberList("a")
    members.asked(1, NONE)
    monkeypatch.setattr("deployments.members.GONE_S", 0.2)
    assert members.wait_seen(members.leaves("a"), 5)


def test_a_list_that_was_begun_anew_is_another_version() -> None:
    old = MemberList("a").now().version
    assert MemberList("a").asked(1, old) is not None


class Dispatched:
    """What a follower does to its dispatcher."""

    def __init__(self) -> None:
        self.did = list[str]()
        self.known = {"a", "b"}

    def workers(self) -> list["Dispatched.Client"]:
        return [self.Client(name) for name in self.known]

    def leaves(self, name: str, leaving: bool) -> None:
        if leaving:
            self.did.append(f"{name} leaves")

    def remove_worker(self, name: str) -> None:
        self.did.append(f"{name} is removed")
        self.known.discard(name)

    class Client:
        def __init__(self, name: str) -> None:
            self.info = self
            self.name = name


def test_a_gateway_follows() -> None:
    async def follow() -> None:
        dispatched, refused = Dispatched(), [1]

        async def connect(name: str) -> None:
            if refused:
                refused.pop()
                raise ConnectionError("not yet")
            dispatched.did.append(f"{name} comes")
            dispatched.known.add(name)

        follower = Follower(dispatched, connect, 1)  # type: ignore[arg-type]
        follower.apply(Members((1, 1), frozenset("bc"), frozenset("a")))
        await asyncio.sleep(0.01)
        assert dispatched.did == ["a leaves"]
        follower.apply(Members((1, 1), frozenset("bc"), frozenset("a")))  # asked again, nothing new
        await asyncio.sleep(0.01)
        assert dispatched.did == ["a leaves", "a leaves", "c comes"]
        follower.apply(Members((1, 2), frozenset("bc"), frozenset()))
        assert dispatched.did[3:] == ["a is removed"]
        assert dispatched.known == {"b", "c"}

    asyncio.run(follow())


# -- the cluster file -----------------------------------------------------------------------------------


def file(**others: object) -> ClusterFile:
    data: dict[str, object] = {
        "model": "m",
        "nodes": {"p": {"role": "prefill"}, "d": {"role": "decode", "count": 3}},
        "workers": {"decode": {"most": 3}},
    }
    return ClusterFile.model_validate(data | others)


def test_what_there_may_be_is_in_the_file() -> None:
    assert [ask.name for ask in file().asks()] == ["prefill-worker-0", "decode-worker-0"]
    assert [ask.name for ask in file().asks(most=True)] == [
        "prefill-worker-0",
        *(f"decode-worker-{i}" for i in range(3)),
    ]
    assert has_pools(file())
    assert spec_of(file()) is not None
    assert spec_of(file(workers={})) is None
    assert not has_pools(file(router={"mode": "replicas"}))


def test_those_that_are_always_there_are_some_and_not_more() -> None:
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"most is 3 and count is {count}"):
            file(workers={"decode": {"count": count, "most": 3}})
