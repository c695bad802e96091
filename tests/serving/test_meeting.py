"""How a gateway meets its workers, of which some come late, and some never."""

import asyncio

import pytest

from deployments.errors import StartError
from deployments.meeting import meet

SOON_S, LONG_S = 0.2, 30.0


class Workers:
    """Some are there, and some not yet; it is noted who was tried."""

    def __init__(self, *there: str) -> None:
        self.there, self.tried = {*there}, set[str]()
        self.came = asyncio.Event()

    async def connect(self, name: str) -> str:
        self.tried.add(name)
        if name not in self.there:
            await self.came.wait()
        return f"to {name}"


def test_all_that_are_there_come_in_their_order() -> None:
    async def go() -> None:
        found, late = await meet(["b", "a", "c"], Workers("a", "b", "c").connect)
        assert (found, late) == (["to b", "to a", "to c"], [])

    asyncio.run(go())


def test_one_that_is_not_there_delays_nobody_and_comes_later() -> None:
    async def go() -> None:
        workers = Workers("a", "c")
        found, late = await meet(["a", "b", "c"], workers.connect, SOON_S, LONG_S)
        assert found == ["to a", "to c"]
        assert workers.tried == {"a", "b", "c"}
        workers.came.set()
        assert [await task for task in late] == ["to b"]

    asyncio.run(go())


def test_the_first_is_waited_for_longer() -> None:
    async def go() -> None:
        workers = Workers()
        meeting = asyncio.create_task(meet(["a", "b"], workers.connect, SOON_S, LONG_S))
        await asyncio.sleep(2 * SOON_S)
        assert not meeting.done()
        workers.came.set()
        found, late = await meeting
        assert len(found) + len(late) == 2
        assert found

    asyncio.run(go())


def test_one_that_fails_is_tried_again() -> None:
    tries = []

    async def connect(name: str) -> str:
        tries.append(name)
        if len(tries) == 1:
            raise ConnectionError("refused")
        return name

    found, late = asyncio.run(meet(["a"], connect))
    assert (found, late, tries) == (["a"], [], ["a", "a"])


def test_none_is_an_error_that_says_why() -> None:
    async def connect(name: str) -> str:
        if name == "a":
            raise ConnectionError("refused by a")
        await asyncio.sleep(LONG_S)
        return name

    async def go() -> None:
        with pytest.raises(StartError, match=r"within 0.4 s: a: refused by a; b: no answer; see `handoff"):
            await meet(["a", "b"], connect, SOON_S, 2 * SOON_S)
        assert all(task.cancelling() for task in asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(go())
