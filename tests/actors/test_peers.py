"""Deliveries from worker to worker: none is lost silently when a connection or a process goes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from actors import peers
from actors.channel import Channel, Listener
from actors.messages import Announce, Delivery, HandoverFailed, Taken
from actors.peers import Peers

KEY = b"k" * 32


class Process:
    """A worker's process: takes deliveries, and says so when the test wants it."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.channels: list[Channel] = []
        self.takes = True
        self.listener = Listener("127.0.0.1", KEY, self._accepted)

    def _accepted(self, channel: Channel) -> None:
        def taken(message: Any) -> None:
            assert isinstance(message, Announce)
            assert isinstance(message.delivery, HandoverFailed)
            self.got.append(message.delivery.request_id)
            if self.takes:
                channel.send(Taken(message.number, None))

        self.channels.append(channel)
        channel.open(taken, lambda _: None)

    def cut(self) -> None:
        """Break the connections, and live on."""
        for channel in self.channels:
            channel.close()
        self.channels = []

    def end(self) -> None:
        self.listener.close()
        self.cut()


class World:
    """One worker called `d`, whose process may be replaced, and the peers of another that posts to it."""

    def __init__(self) -> None:
        self.process = Process()
        self.lookups = 0
        self.reachable = True
        self.taken: list[str] = []
        self.undelivered: list[tuple[str, str]] = []
        self.peers = Peers(KEY, asyncio.get_running_loop(), self._lost)

    def _lost(self, delivery: Delivery, reason: str) -> None:
        assert isinstance(delivery, HandoverFailed)
        self.undelivered.append((delivery.request_id, reason))

    def get_actor(self, name: str, namespace: str) -> Any:
        self.lookups += 1
        if not self.reachable:
            raise ValueError(f"no actor {name} in {namespace}")
        world = self

        class Info:
            address = world.process.listener.address

        class Method:
            async def remote(self) -> Info:
                return Info()

        class Handle:
            start = Method()

        return Handle()

    def post(self, *request_ids: str) -> None:
        for request_id in request_ids:

            def taken(_: float | None, request_id: str = request_id) -> None:
                self.taken.append(request_id)

            self.peers.post("d", HandoverFailed(request_id, "r"), taken)

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not done():  # noqa: ASYNC110  a condition, not an event
                await asyncio.sleep(0.002)


def in_world(play: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A test that plays on an event loop, with a deadline."""

    def test(monkeypatch: pytest.MonkeyPatch) -> None:
        async def limited() -> None:
            world = World()
            monkeypatch.setattr(peers.ray, "get_actor", world.get_actor)
            monkeypatch.setattr(peers, "BACK_WITHIN_S", 0.3)
            monkeypatch.setattr(peers, "DIAL_AGAIN_S", 0.01)
            try:
                await asyncio.wait_for(play(world), 60)
            finally:
                world.peers.close()
                world.process.end()

        asyncio.run(limited())

    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


@in_world
async def test_deliveries_arrive_in_order_after_one_lookup(world: World) -> None:
    world.post("a", "b", "c")
    await world.until(lambda: len(world.taken) == 3)
    world.post("d")
    await world.until(lambda: len(world.taken) == 4)
    assert world.process.got == world.taken == ["a", "b", "c", "d"]
    assert (world.lookups, world.undelivered) == (1, [])


@in_world
async def test_what_was_not_taken_comes_again_after_a_break(world: World) -> None:
    world.process.takes = False
    world.post("a", "b")
    await world.until(lambda: world.process.got == ["a", "b"])
    world.process.takes = True
    world.process.cut()
    await world.until(lambda: len(world.taken) == 2)
    assert world.process.got == ["a", "b", "a", "b"]
    assert world.undelivered == []
    assert world.lookups == 1  # the same process: Ray need not be asked


@in_world
async def test_what_a_dead_process_had_is_reported_and_its_successor_gets_the_rest(world: World) -> None:
    world.process.takes = False
    world.post("a")
    await world.until(lambda: world.process.got)
    dead, world.process = world.process, Process()
    dead.end()
    await asyncio.sleep(0.05)  # while the old address is dialled
    world.post("b")
    await world.until(lambda: world.process.got)
    await world.until(lambda: len(world.taken) == 2)
    assert world.process.got == ["b"]
    ((request_id, reason),) = world.undelivered
    assert request_id == "a"
    assert "worker d could not be reached" in reason


@in_world
async def test_the_first_delivery_after_a_restart_arrives(world: World) -> None:
    world.post("a")
    await world.until(lambda: world.taken == ["a"])
    dead, world.process = world.process, Process()
    dead.end()
    await asyncio.sleep(0.02)
    world.post("b")
    await world.until(lambda: world.taken == ["a", "b"])
    assert world.process.got == ["b"]
    assert world.undelivered == []


@in_world
async def test_a_worker_that_ray_does_not_know(world: World) -> None:
    world.reachable = False
    world.post("a", "b")
    await world.until(lambda: len(world.taken) == 2)
    assert [request_id for request_id, _ in world.undelivered] == ["a", "b"]
    assert "no actor d" in world.undelivered[0][1]
    world.reachable = True
    world.post("c")
    await world.until(lambda: world.process.got == ["c"])


@in_world
async def test_closing_ends_what_was_not_taken(world: World) -> None:
    world.process.takes = False
    world.post("a")
    await world.until(lambda: world.process.got)
    world.peers.close()
    assert world.taken == ["a"]
