"""Which workers there are, told by one and followed by every gateway.

``MemberList`` is the one place that knows; a gateway asks it every second with the version that it has. So
asking is acknowledging: whoever asks with a version sends nothing to the workers that leave by it. Imports
no vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import ray

from actors.peers import NAMESPACE

if TYPE_CHECKING:
    from deployments.dispatch import Dispatcher

logger = logging.getLogger(__name__)

ACTOR: Final = "roles"
"""The actor that holds the list (``deployments/roles.py``)."""
EVERY_S: Final = 1.0
WAITS_S: Final = 3.0
GONE_S: Final = 10.0
"""A gateway that has not asked for so long is gone, or cannot reach the actor's node."""

Version = tuple[int, int]
"""When the list was begun, and how often it has changed since."""
NONE: Final[Version] = (0, 0)


@dataclass(frozen=True, slots=True)
class Members:
    """The workers: those ``here`` take requests, those that are ``leaving`` finish what they have."""

    version: Version
    here: frozenset[str]
    leaving: frozenset[str]


def waits() -> dict[str, str]:
    """Return what workers that come or leave wait for, by name; nothing if there are no such workers."""
    try:
        told: dict[str, str] = ray.get(
            ray.get_actor(ACTOR, namespace=NAMESPACE).waits.remote(), timeout=WAITS_S
        )
    except (ValueError, ray.exceptions.RayError):
        return {}
    return told


class MemberList:
    """The list, and who has seen which version of it. Any thread."""

    def __init__(self, here: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._now = Members((time.time_ns(), 0), frozenset(here), frozenset())
        self._seen: dict[int, tuple[Version, float]] = {}

    def now(self) -> Members:
        """Return the list as it is."""
        return self._now

    def asked(self, gateway: int, version: Version) -> Members | None:
        """Return the list, or None to a gateway that has it."""
        with self._lock:
            self._seen[gateway] = version, time.monotonic()
            return None if version == self._now.version else self._now

    def comes(self, name: str) -> Version:
        """A worker serves."""
        return self._change(lambda m: (m.here | {name}, m.leaving - {name}))

    def leaves(self, name: str) -> Version:
        """A worker takes no more requests."""
        return self._change(lambda m: (m.here - {name}, m.leaving | {name}))

    def gone(self, name: str) -> Version:
        """A worker is to be ended: gateways hang up."""
        return self._change(lambda m: (m.here - {name}, m.leaving - {name}))

    def wait_seen(self, version: Version, within_s: float) -> bool:
        """Return whether all gateways that still ask have seen a version, waiting for them for so long."""
        deadline = time.monotonic() + within_s
        while True:
            oldest = time.monotonic() - GONE_S
            with self._lock:
                self._seen = {key: (has, at) for key, (has, at) in self._seen.items() if at > oldest}
                if all(has >= version for has, _ in self._seen.values()):
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(EVERY_S / 4)

    def _change(self, to: Callable[[Members], tuple[frozenset[str], frozenset[str]]]) -> Version:
        with self._lock:
            begun, count = self._now.version
            self._now = Members((begun, count + 1), *to(self._now))
            return self._now.version


class Follower:
    """A gateway's side: what the list says is done to its dispatcher.

    Args:
        dispatcher: of this gateway.
        connect: connects to the worker of a name and makes it known to the dispatcher.
        gateway: this gateway's number.

    """

    def __init__(
        self, dispatcher: Dispatcher, connect: Callable[[str], Awaitable[None]], gateway: int
    ) -> None:
        self._dispatcher, self._connect, self._gateway = dispatcher, connect, gateway
        self._version = NONE
        self._members: Members | None = None
        self._connecting: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the list, until cancelled. While it cannot be asked for, everything stays as it is."""
        while True:
            try:
                handle: Any = ray.get_actor(ACTOR, namespace=NAMESPACE)
                async with asyncio.timeout(GONE_S):
                    found = await handle.members.remote(self._gateway, self._version)
                self._members = found or self._members
                if self._members is not None:
                    self.apply(self._members)
            except Exception as error:
                logger.debug("the list of workers cannot be asked for: %r", error)
            await asyncio.sleep(EVERY_S)

    def apply(self, members: Members) -> None:
        """Do what the list says; workers that come are connected to behind our back, and again if need be."""
        known = {worker.info.name for worker in self._dispatcher.workers()}
        for name in known:
            if name not in members.here | members.leaving:
                logger.info("worker %s is given up", name)
                self._dispatcher.remove_worker(name)
            else:
                self._dispatcher.leaves(name, name in members.leaving)
        for name in self._connecting.keys() - members.here:
            self._connecting.pop(name).cancel()
        for name in members.here - known:
            if name not in self._connecting or self._connecting[name].done():
                self._connecting[name] = asyncio.create_task(self._come(name), name=f"connect to {name}")
        self._version = members.version

    async def _come(self, name: str) -> None:
        try:
            await self._connect(name)
            logger.info("worker %s was added", name)
        except Exception as error:
            logger.warning("worker %s was added, but cannot be reached yet: %s", name, error)
