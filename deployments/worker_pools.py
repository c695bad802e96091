"""Workers come and go while the others serve: started, connected and told of; or emptied, and then ended.

Used by the actor that decides it (``deployments/roles.py``). Each worker comes or leaves in a thread of its
own, which may take minutes: a node has to be there first, or a long answer be finished. Imports no vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Set
from typing import Any, Final

import ray
from ray.autoscaler.sdk import request_resources

from actors.messages import Role, WorkerStats
from actors.peers import NAMESPACE
from cluster.file import ClusterFile
from cluster.names import ROLES
from cluster.placement import WorkerAsk
from deployments.members import MemberList
from deployments.place import add_worker, running_workers, stop_workers
from deployments.pools import Pool

logger = logging.getLogger(__name__)

SEEN_S: Final = 30.0
"""Gateways take less to hear of a worker that leaves; one that does not is cut off from it."""
EMPTY_S: Final = 900.0
"""A worker that leaves has so long for what it has: the longest answer, and the lease of what it sent."""
LOOK_S: Final = 0.5
ANSWER_S: Final = 5.0
AGAIN_S: Final = 60.0
"""After a worker could not be added, none is for so long."""


class WorkerPools:
    """The workers of a cluster file, and those that come and go.

    Args:
        file: the cluster's.
        found: names of the workers that are there, also such as were being added, or emptied.

    Attributes:
        members: the list that gateways follow.
        changed_at: when a worker came or went last, on the monotonic clock.

    """

    def __init__(self, file: ClusterFile, found: Set[str]) -> None:
        self._file, self._placing, self._lock = file, threading.Lock(), threading.Lock()
        self._base = {ask.name for ask in file.asks()}
        self._asks = {ask.name: ask for ask in file.asks(most=True) if ask.name not in self._base}
        added = self._asks.keys() & found
        self.members = MemberList(self._base | added)
        self.changed_at = 0.0
        self._paused_until = 0.0
        self._coming: dict[str, str] = {}
        self._leaving: dict[str, str] = {}
        for name in sorted(added):  # whoever has begun to add it may not have come to the end of it
            self._start(self._come, self._asks[name])

    def sizes(self) -> dict[Role, Pool]:
        """Return how many workers there are for each role, and how many there may be."""
        here = self.members.now().here
        with self._lock:
            return {role: self._size(role, here) for role in ROLES}

    def _size(self, role: Role, here: frozenset[str]) -> Pool:
        """Under the lock."""
        count = sum(ask.role == role for ask in self._file.asks())
        asks = [ask for ask in self._asks.values() if ask.role == role]
        coming = sum(ask.name in self._coming and ask.name not in here for ask in asks)
        # The slot of one that leaves is taken until it has left.
        leaving = sum(ask.name in self._leaving for ask in asks)
        most = count if time.monotonic() < self._paused_until else count + len(asks) - leaving
        return Pool(count, most, coming, tuple(ask.name for ask in asks if ask.name in here))

    def waits(self) -> dict[str, str]:
        """Return what workers that come or leave wait for, by name."""
        with self._lock:
            return {**self._coming, **self._leaving}

    def grow(self, role: Role, by: int, why: str) -> None:
        """Start so many workers more; returns at once."""
        here = self.members.now().here
        with self._lock:
            free = [
                ask
                for name, ask in self._asks.items()
                if ask.role == role and name not in {*here, *self._coming, *self._leaving}
            ][:by]
            self._coming |= {ask.name: "is being placed" for ask in free}
        for ask in free:
            logger.warning("%s is added: %s", ask.name, why)
            self._start(self._come, ask)

    def shrink(self, name: str, why: str) -> None:
        """Have a worker finish what it has, and end it; returns at once."""
        logger.warning("%s is given up: %s", name, why)
        with self._lock:
            self._leaving[name] = "gateways are told"
        self.changed_at = time.monotonic()
        self._start(self._leave, name)

    # -- in a thread of its own -----------------------------------------------------------------------------

    def _start(self, do: Callable[[Any], None], what: object) -> None:
        threading.Thread(target=do, args=(what,), name=f"{do.__name__} {what}", daemon=True).start()

    def _come(self, ask: WorkerAsk) -> None:
        def tell(line: str) -> None:
            logger.info("%s", line)
            with self._lock:
                self._coming[ask.name] = line

        self._demand()
        try:
            add_worker(self._file, ask, sorted(self.members.now().here - {ask.name}), self._placing, tell)
        except Exception as error:
            logger.error("%s could not be added: %s: %s", ask.name, type(error).__name__, error)
            self._paused_until = time.monotonic() + AGAIN_S
            if ask.name not in running_workers():
                self.members.gone(ask.name)
        else:
            self.members.comes(ask.name)
            logger.warning("%s serves", ask.name)
        finally:
            with self._lock:
                self._coming.pop(ask.name, None)
            self.changed_at = time.monotonic()
            self._demand()

    def _leave(self, name: str) -> None:
        try:
            if not self.members.wait_seen(self.members.leaves(name), SEEN_S):
                logger.warning("%s leaves although a gateway has not said that it knows", name)
            self._wait_empty(name)
            self.members.wait_seen(self.members.gone(name), SEEN_S)
            handle = ray.get_actor(name, namespace=NAMESPACE)
            others = [ray.get_actor(other, namespace=NAMESPACE) for other in self.members.now().here]
            ray.wait([handle.stop.remote()], timeout=ANSWER_S)
            stop_workers([handle])
            told = [other.part.remote(name) for other in others]
            ray.wait(told, num_returns=len(told), timeout=ANSWER_S)
            logger.warning("%s has left", name)
        except Exception:
            logger.exception("%s could not be ended in order", name)
            self.members.gone(name)
            with contextlib.suppress(ValueError):
                stop_workers([ray.get_actor(name, namespace=NAMESPACE)])
        finally:
            with self._lock:
                self._leaving.pop(name, None)
            self.changed_at = time.monotonic()
            self._demand()

    def _wait_empty(self, name: str) -> None:
        """Wait until a worker has nothing to do, twice in a row, or for as long as it may take."""
        handle = ray.get_actor(name, namespace=NAMESPACE)
        deadline, empty, why = time.monotonic() + EMPTY_S, 0, ""
        while empty < 2:
            if time.monotonic() > deadline:
                logger.warning("%s still has %s after %g s; that is tried elsewhere", name, why, EMPTY_S)
                return
            try:
                stats: WorkerStats = ray.get(handle.stats.remote(), timeout=ANSWER_S)
            except ray.exceptions.GetTimeoutError:
                why, empty = "no answer", 0
                continue
            except ray.exceptions.RayActorError:
                return  # it died, and what it had went elsewhere
            why = _has(stats)
            empty = 0 if why else empty + 1
            with self._lock:
                self._leaving[name] = f"finishes {why}" if why else "is ended"
            time.sleep(LOOK_S)

    def _demand(self) -> None:
        """Tell Ray's autoscaler, if there is one, what all workers together need."""
        with self._lock:
            wanted = {*self._base, *self.members.now().here, *self._coming, *self._leaving}
        asks = [ask for ask in self._file.asks(most=True) if ask.name in wanted]
        try:
            request_resources(bundles=[ask.needs() for ask in asks])
        except Exception as error:
            logger.warning("the autoscaler could not be told what is needed: %s", error)


def _has(stats: WorkerStats) -> str:
    """Return what a worker still has to do, in words; nothing: an empty text."""
    waiting = int(stats.tier.get("waiting_bytes", 0))
    had = {
        "requests": stats.requests,
        "handovers": stats.sending + stats.receiving,
        "chunks that were not fetched": stats.live_chunks,
        "bytes for the tier": waiting,
    }
    return ", ".join(f"{count} {what}" for what, count in had.items() if count)
