"""The gateway's connection to one worker: calls out, one stream of outputs back.

All requests of a gateway share the stream: a worker sends one message per engine step and
gateway, however many requests are in the step.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from typing import Any

from actors.messages import Handover, OutputBatch, WorkerInfo, WorkerStats

logger = logging.getLogger(__name__)

CLOCK_SAMPLES = 5
RECONNECT_S = 1.0


class WorkerClient:
    """Talks to one worker actor.

    Args:
        handle: the actor.
        info: what the worker told about itself when it started.
        client: this gateway's number, unique among the worker's clients.
        on_batch: called with (this client, batch) for everything the worker sends.
        on_lost: called with (this client, reason) when the stream breaks; every request
            that was there is lost.

    """

    def __init__(
        self,
        handle: Any,
        info: WorkerInfo,
        client: int,
        on_batch: Callable[[WorkerClient, OutputBatch], None],
        on_lost: Callable[[WorkerClient, str], None],
    ) -> None:
        self.info, self.handle = info, handle
        self.alive = False
        self.clock_offset = 0.0
        self.prefill_tokens = 0
        self.running = 0
        self.client, self._on_batch, self._on_lost = client, on_batch, on_lost
        self._task: asyncio.Task[None] | None = None
        # Calls for a request are made outside it: when a client leaves, Serve cancels the request's task, and
        # Ray with it every call that was made from there, among them the abort.
        self._outside = contextvars.Context()

    async def connect(self) -> None:
        """Measure the clock offset and start reading outputs."""
        self.clock_offset = await self._measure_offset()
        self.alive = True
        self._task = asyncio.create_task(self._read(), name=f"outputs of {self.info.name}")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()

    async def submit(self, frame: tuple[bytes, ...], handover: Handover | None) -> None:
        """Send a request; raises what the worker raised, or Ray's error if it is gone."""
        await self._outside.run(self.handle.submit.remote, frame, handover)

    async def stats(self) -> WorkerStats:
        """Return the worker's counters."""
        stats: WorkerStats = await self.handle.stats.remote()
        return stats

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; returns whether the engine could (nothing was running)."""
        return bool(await self.handle.reset_prefix_cache.remote())

    def abort(self, request_ids: list[str]) -> None:
        """Tell the worker to forget requests; not waited for."""
        self._outside.run(self.handle.abort.remote, request_ids)

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

    async def _read(self) -> None:
        while True:
            try:
                async for reference in self.handle.outputs.remote(self.client):
                    self._on_batch(self, await reference)
                reason = "its output stream ended"
            except asyncio.CancelledError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self.alive = False
            logger.warning("worker %s was lost: %s", self.info.name, reason)
            self._on_lost(self, reason)
            await self._until_back()

    async def _until_back(self) -> None:
        """Wait until the worker (restarted by Ray) has an engine again."""
        while not self.alive:
            await asyncio.sleep(RECONNECT_S)
            try:
                self.info = await self.handle.start.remote()
                self.clock_offset = await self._measure_offset()
                self.alive = True
                logger.warning("worker %s is back", self.info.name)
            except Exception as error:
                logger.debug("worker %s is not back yet: %s", self.info.name, error)
