"""How one worker reaches another: named Ray actors, looked up once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from actors.messages import Delivery

logger = logging.getLogger(__name__)

NAMESPACE = "handoff"


class Peers:
    """Posts deliveries to other workers, in order per peer, without waiting for them."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._lock = threading.Lock()

    def handle(self, name: str) -> Any:
        """Return the actor handle of a worker; raises ``ValueError`` if there is none."""
        with self._lock:
            if name not in self._handles:
                self._handles[name] = ray.get_actor(name, namespace=NAMESPACE)
            return self._handles[name]

    def post(self, peer: str, delivery: Delivery, taken: Callable[[], None]) -> None:
        """Send a delivery; ``taken`` is called once the peer is done with it, or cannot be reached."""
        try:
            reply = self.handle(peer).deliver.remote(delivery)
        except Exception as error:
            self._lost(peer, error)
            taken()
            return
        reply.future().add_done_callback(lambda future: self._replied(peer, future, taken))

    def _replied(self, peer: str, future: Any, taken: Callable[[], None]) -> None:
        try:
            if (error := future.exception()) is not None:
                self._lost(peer, error)
        finally:
            taken()

    def _lost(self, peer: str, error: BaseException) -> None:
        """Forget the handle, so that a restarted worker is looked up again."""
        logger.warning("worker %s could not be reached: %s", peer, error)
        with self._lock:
            self._handles.pop(peer, None)
