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
from actors.messages import Announce, Chunk, Delivery, Taken, WorkerInfo

logger = logging.getLogger(__name__)

NAMESPACE = "handoff"
FOUND_WITHIN_S = 10.0
BACK_WITHIN_S = 5.0
"""After a channel breaks, the same process is dialled for this long, and gets again what it had not taken."""
DIAL_AGAIN_S = 0.2


@dataclass(slots=True)
class _Peer:
    """A worker. Everything but ``channel.send`` happens on the event loop."""

    name: str
    address: Address | None = None
    channel: Channel | None = None
    dialling: asyncio.Task[None] | None = None
    untaken: dict[int, tuple[Delivery, Callable[[], None]]] = field(default_factory=dict)


class Peers:
    """Posts deliveries to other workers without waiting for them.

    Args:
        key: the cluster's key for channels.
        loop: the worker's event loop.

    """

    def __init__(self, key: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._key, self._loop = key, loop
        self._peers: dict[str, _Peer] = {}
        self._numbers = itertools.count()

    def post(self, peer: str, delivery: Delivery, taken: Callable[[], None]) -> None:
        """Send a delivery. Any thread.

        ``taken`` is called once: when the peer is done with it, or cannot be reached.
        """
        self._loop.call_soon_threadsafe(self._post, peer, delivery, taken)

    def call(self, peer: str, delivery: Delivery, taken: Callable[[], None]) -> None:
        """Like ``post``, through Ray: for tickets that only Ray can carry. Any thread."""
        try:
            reply = ray.get_actor(peer, namespace=NAMESPACE).deliver.remote(delivery)
        except Exception as error:
            logger.warning("worker %s could not be reached: %s", peer, error)
            taken()
            return
        reply.future().add_done_callback(lambda _: taken())

    def close(self) -> None:
        """End all channels; what was not taken will not be. On the event loop."""
        for peer in self._peers.values():
            if peer.dialling is not None:
                peer.dialling.cancel()
            if peer.channel is not None:
                peer.channel.close()
            _give_up(peer)

    # -- event loop -----------------------------------------------------------------------------

    def _post(self, name: str, delivery: Delivery, taken: Callable[[], None]) -> None:
        peer = self._peers.setdefault(name, _Peer(name))
        number = next(self._numbers)
        peer.untaken[number] = (delivery, taken)
        if peer.channel is not None:
            peer.channel.send(Announce(number, delivery))
        elif peer.dialling is None:
            peer.dialling = self._loop.create_task(self._dial(peer), name=f"dial {name}")

    async def _dial(self, peer: _Peer) -> None:
        """Connect, and send what waits; a process that cannot be reached gets nothing of it."""
        try:
            if peer.address is not None:
                await self._dial_again(peer, peer.address)
            else:
                async with asyncio.timeout(FOUND_WITHIN_S):
                    handle: Any = await asyncio.to_thread(ray.get_actor, peer.name, NAMESPACE)
                    info: WorkerInfo = await handle.start.remote()
                peer.address = info.address
                self._connected(peer, await dial(info.address, self._key))
        except Exception as error:
            logger.warning("worker %s could not be reached: %s", peer.name, error or type(error).__name__)
            peer.address = None
            _give_up(peer)
        finally:
            peer.dialling = None

    async def _dial_again(self, peer: _Peer, address: Address) -> None:
        deadline = self._loop.time() + BACK_WITHIN_S
        while True:
            try:
                self._connected(peer, await dial(address, self._key, BACK_WITHIN_S))
                return
            except ChannelError:
                if self._loop.time() > deadline:
                    raise
                await asyncio.sleep(DIAL_AGAIN_S)

    def _connected(self, peer: _Peer, channel: Channel) -> None:
        def replied(message: object) -> None:
            assert isinstance(message, Taken), message
            if (entry := peer.untaken.pop(message.number, None)) is not None:
                entry[1]()

        def lost(reason: str) -> None:
            logger.warning("the channel to worker %s broke: %s", peer.name, reason)
            peer.channel = None
            if peer.untaken and peer.dialling is None:
                peer.dialling = self._loop.create_task(self._dial(peer), name=f"dial {peer.name} again")

        peer.channel = channel
        channel.open(replied, lost)
        for number, (delivery, _) in list(peer.untaken.items()):
            channel.send(Announce(number, delivery))


def plain(delivery: Delivery, plain_tickets: bool) -> bool:
    """Return whether a delivery can travel over a channel."""
    return plain_tickets or not isinstance(delivery, Chunk)


def _give_up(peer: _Peer) -> None:
    untaken, peer.untaken = peer.untaken, {}
    for _, taken in untaken.values():
        taken()
