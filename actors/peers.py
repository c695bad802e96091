"""How one worker reaches another: found through Ray once, then over a channel."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.channel import Address, Channel, ChannelError, dial
from actors.messages import Again, Announce, Chunk, Delivery, Probe, Taken, WorkerInfo
from kv.errors import KVError, PeerLost

logger = logging.getLogger(__name__)

NAMESPACE = "handoff"
FOUND_WITHIN_S = 10.0
BACK_WITHIN_S = 5.0
"""After a channel breaks, the same process is dialled for this long, and gets again what it had not taken."""
DIAL_AGAIN_S = 0.2
AGAIN_WITHIN_S = 15.0
"""A peer copies a chunk and publishes it within this time, or it is taken to be gone."""


OnTaken = Callable[[float | None], None]
"""Called once a peer is done with a delivery (with the seconds its fetch took), or is gone (None)."""


@dataclass(slots=True)
class _Posted:
    """A delivery that its peer has not taken. ``sent`` is the process that it was sent to."""

    delivery: Delivery
    taken: OnTaken
    sent: Address | None = None


@dataclass(slots=True)
class _Peer:
    """A worker. ``address`` is that of the process which was dialled last."""

    name: str
    address: Address | None = None
    channel: Channel | None = None
    dialling: asyncio.Task[None] | None = None
    untaken: dict[int, _Posted] = field(default_factory=dict)


class Peers:
    """Posts deliveries to other workers without waiting for them.

    Args:
        key: the cluster's key for channels.
        loop: the worker's event loop.
        undelivered: told (delivery, reason) on the loop when a delivery cannot be made.

    """

    def __init__(
        self,
        key: bytes,
        loop: asyncio.AbstractEventLoop,
        undelivered: Callable[[Delivery, str], None],
    ) -> None:
        self._key, self._loop, self._undelivered = key, loop, undelivered
        self._peers: dict[str, _Peer] = {}
        self._numbers = itertools.count()

    def post(self, peer: str, delivery: Delivery, taken: OnTaken) -> None:
        """Send a delivery; ``taken`` is called once. Any thread."""
        self._loop.call_soon_threadsafe(self._post, peer, delivery, taken)

    def call(self, peer: str, delivery: Delivery, taken: OnTaken) -> None:
        """Like ``post``, through Ray: for tickets that only Ray can carry. Any thread."""
        try:
            reply = ray.get_actor(peer, namespace=NAMESPACE).deliver.remote(delivery)
        except Exception as error:
            logger.warning("worker %s could not be reached: %s", peer, error)
            taken(None)
            return

        def replied(future: Any) -> None:
            taken(future.result() if future.exception() is None else None)

        reply.future().add_done_callback(replied)

    def again(self, peer: str, asked: Again, timeout_s: float) -> Chunk:
        """Have a peer publish a chunk over another rung. Blocks; not on the event loop.

        Raises:
            TransferError: what the peer raised, or it is gone.

        """
        chunk: Chunk = _ask(peer, "again", (asked,), min(AGAIN_WITHIN_S, timeout_s))
        return chunk

    def probe(self, peer: str, probe: Probe, timeout_s: float) -> float:
        """Have a peer fetch a probe; return the seconds it took. See ``again``."""
        return float(_ask(peer, "probe", (probe, timeout_s), timeout_s))

    def close(self) -> None:
        """End all channels; what was not taken will not be. On the event loop."""
        for peer in self._peers.values():
            if peer.dialling is not None:
                peer.dialling.cancel()
            if peer.channel is not None:
                peer.channel.close()
            self._give_up(peer, list(peer.untaken), "this worker is stopping")

    # -- event loop -----------------------------------------------------------------------------

    def _post(self, name: str, delivery: Delivery, taken: OnTaken) -> None:
        peer = self._peers.setdefault(name, _Peer(name))
        number = next(self._numbers)
        peer.untaken[number] = _Posted(delivery, taken)
        if peer.channel is not None:
            self._send(peer, number)
        elif peer.dialling is None:
            peer.dialling = self._loop.create_task(self._dial(peer), name=f"dial {name}")

    def _send(self, peer: _Peer, number: int) -> None:
        assert peer.channel is not None
        posted = peer.untaken[number]
        posted.sent = peer.address
        peer.channel.send(Announce(number, posted.delivery))

    async def _dial(self, peer: _Peer) -> None:
        """Connect and send what waits: to the process that had it, else to the one in its place."""
        try:
            if peer.address is not None:
                await self._dial_again(peer, peer.address)
            if peer.channel is None and peer.untaken:
                await self._dial_new(peer)
        finally:
            peer.dialling = None

    async def _dial_again(self, peer: _Peer, address: Address) -> None:
        """After a break: whatever was sent to a process that is gone is lost with it."""
        deadline = self._loop.time() + BACK_WITHIN_S
        reason = "it does not answer any more"
        while any(posted.sent for posted in peer.untaken.values()) and self._loop.time() < deadline:
            try:
                self._connected(peer, await dial(address, self._key, BACK_WITHIN_S))
                return
            except ChannelError as error:
                reason = str(error)
                await asyncio.sleep(DIAL_AGAIN_S)
        peer.address = None
        self._give_up(peer, [number for number, posted in peer.untaken.items() if posted.sent], reason)

    async def _dial_new(self, peer: _Peer) -> None:
        """Ask Ray where the worker is now."""
        try:
            async with asyncio.timeout(FOUND_WITHIN_S):
                handle: Any = await asyncio.to_thread(ray.get_actor, peer.name, NAMESPACE)
                info: WorkerInfo = await handle.start.remote()
            peer.address = info.address
            self._connected(peer, await dial(info.address, self._key))
        except TimeoutError:
            self._give_up(peer, list(peer.untaken), f"Ray did not find it within {FOUND_WITHIN_S:.0f} s")
        except Exception as error:
            self._give_up(peer, list(peer.untaken), str(error))

    def _connected(self, peer: _Peer, channel: Channel) -> None:
        def replied(message: object) -> None:
            assert isinstance(message, Taken), message
            if (posted := peer.untaken.pop(message.number, None)) is not None:
                posted.taken(message.seconds)

        def lost(reason: str) -> None:
            logger.warning("the channel to worker %s broke: %s", peer.name, reason)
            peer.channel = None
            if peer.untaken and peer.dialling is None:
                peer.dialling = self._loop.create_task(self._dial(peer), name=f"dial {peer.name} again")

        peer.channel = channel
        channel.open(replied, lost)
        for number in list(peer.untaken):
            self._send(peer, number)

    def _give_up(self, peer: _Peer, numbers: list[int], reason: str) -> None:
        if numbers:
            logger.warning("worker %s could not be reached: %s", peer.name, reason)
        for number in numbers:
            posted = peer.untaken.pop(number)
            self._undelivered(posted.delivery, f"worker {peer.name} could not be reached: {reason}")
            posted.taken(None)


def _ask(peer: str, method: str, arguments: tuple[object, ...], timeout_s: float) -> Any:
    """Call a method of a worker through Ray, which can carry every ticket."""
    try:
        handle = ray.get_actor(peer, namespace=NAMESPACE)
        return ray.get(getattr(handle, method).remote(*arguments), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, KVError):
            raise error.cause from error
        raise PeerLost(f"worker {peer} could not do it: {error.cause!r}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise PeerLost(f"worker {peer} did not answer within {timeout_s:.1f} s") from error
    except (ray.exceptions.RayError, ValueError) as error:
        raise PeerLost(f"worker {peer} is gone: {type(error).__name__}") from error
