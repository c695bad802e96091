"""The gateway's connection to one worker: requests out, one stream of outputs back.

All requests of a gateway share a channel: a worker sends one message per engine step and
gateway, however many requests are in the step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from actors.channel import Channel, dial
from actors.messages import (
    Abort,
    Handover,
    Hello,
    OutputBatch,
    SenderLost,
    Submit,
    WorkerInfo,
    WorkerStats,
)

logger = logging.getLogger(__name__)

CLOCK_SAMPLES = 5
RECONNECT_S = 1.0
RETURN_TIMEOUT_S = 120.0
STATS_TIMEOUT_S = 2.0
RESET_TIMEOUT_S = 65.0
"""A little more than the worker itself waits for its engine."""


class WorkerClient:
    """Talks to one worker actor.

    Args:
        handle: the actor.
        info: what the worker told about itself when it started.
        client: this gateway's number, unique among the worker's clients.
        key: the cluster's key for channels.
        on_batch: called with (this client, batch) for everything the worker sends.
        on_lost: called with (this client, reason) when the channel breaks; every request
            that was there is lost.

    """

    def __init__(
        self,
        handle: Any,
        info: WorkerInfo,
        client: int,
        key: bytes,
        on_batch: Callable[[WorkerClient, OutputBatch], None],
        on_lost: Callable[[WorkerClient, str], None],
    ) -> None:
        self.info, self.handle = info, handle
        self.alive = self.closed = False
        self.clock_offset = 0.0
        self.on_back: Callable[[WorkerClient], None] | None = None
        """Called when the worker can be reached again."""
        self.client, self._key = client, key
        self._on_batch, self._on_lost = on_batch, on_lost
        self._channel: Channel | None = None
        self._return: asyncio.Task[None] | None = None
        self._unsent: list[Submit | Abort | SenderLost] = []

    async def connect(self) -> None:
        """Open the channel and measure the clock offset.

        Raises:
            ChannelError: the worker cannot be reached.

        """
        self.clock_offset = await self._measure_offset()
        self._channel = await dial(self.info.address, self._key)
        self._channel.open(lambda batch: self._on_batch(self, batch), self._lost)
        self._channel.send(Hello(self.client))
        self.alive = True

    def submit(self, frame: tuple[bytes, ...], handover: Handover | None) -> None:
        """Send a request. If the worker is gone, ``on_lost`` is called, now or soon."""
        self._send(Submit(frame, handover))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Tell the worker to forget requests; not waited for."""
        self._send(Abort(tuple(request_ids)))

    def sender_lost(self, request_ids: Sequence[str]) -> None:
        """Tell the worker that the prefill worker of these requests is gone; not waited for."""
        self._send(SenderLost(tuple(request_ids)))

    def close(self) -> None:
        """Hang up for good: its return is not waited for. The caller tries elsewhere what is under way."""
        self.alive, self.closed = False, True
        if self._return is not None:
            self._return.cancel()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def stats(self) -> WorkerStats:
        """Return the worker's counters.

        Raises TimeoutError if it does not answer: Ray holds calls to a worker whose node is gone.
        """
        async with asyncio.timeout(STATS_TIMEOUT_S):
            stats: WorkerStats = await self.handle.stats.remote()
        return stats

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; returns whether the engine could (nothing was running).

        Raises TimeoutError if the worker does not answer; see ``stats``.
        """
        async with asyncio.timeout(RESET_TIMEOUT_S):
            return bool(await self.handle.reset_prefix_cache.remote())

    async def _measure_offset(self) -> float:
        """Return the worker's clock minus ours, from the fastest of a few round trips (Cristian 1989)."""
        best = (float("inf"), 0.0)
        for _ in range(CLOCK_SAMPLES):
            sent = time.monotonic()
            theirs = await self.handle.clock.remote()
            received = time.monotonic()
            best = min(best, (received - sent, theirs - (sent + received) / 2))
        # Processes of one machine share the clock; a smaller offset is measuring noise.
        return best[1] if abs(best[1]) > best[0] else 0.0

    def _send(self, message: Submit | Abort | SenderLost) -> None:
        """Send together with what else is sent in this turn of the event loop: it takes one system call."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(message)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if self._channel is not None:
            self._channel.send(*messages)

    def _lost(self, reason: str) -> None:
        self.alive, self._channel = False, None
        logger.warning("worker %s was lost: %s", self.info.name, reason)
        self._on_lost(self, reason)
        self._return = asyncio.get_running_loop().create_task(self._until_back())

    async def _until_back(self) -> None:
        """Wait until the worker can be reached again: restarted by Ray, or its network mended."""
        while not self.alive:
            await asyncio.sleep(RECONNECT_S)
            try:
                async with asyncio.timeout(RETURN_TIMEOUT_S):
                    self.info = await self.handle.start.remote()
                    await self.connect()
                logger.warning("worker %s is back", self.info.name)
                if self.on_back is not None:
                    self.on_back(self)
            except Exception as error:
                logger.debug("worker %s is not back yet: %s", self.info.name, error)
