"""A gateway connects to all its workers at once, and serves with those that come soon; others come later.

A gateway that takes the place of one that died must not wait for a worker whose node died with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from deployments.errors import StartError

logger = logging.getLogger(__name__)
T = TypeVar("T")

ALL_WITHIN_S: Final = 10.0
ONE_WITHIN_S: Final = 120.0
"""A worker that is being restarted has that long to load its model, if no other is there."""
TRY_S, AGAIN_S = 30.0, 1.0


async def meet(
    names: Sequence[str],
    connect: Callable[[str], Awaitable[T]],
    all_within_s: float = ALL_WITHIN_S,
    one_within_s: float = ONE_WITHIN_S,
) -> tuple[list[T], list[asyncio.Task[T]]]:
    """Return the workers that are connected, in the order of their names, and those that are still tried.

    Args:
        names: of the workers.
        connect: connects to one; tried again when it fails.
        all_within_s: how long all are waited for.
        one_within_s: how long at least one is waited for.

    Raises:
        StartError: there is none.

    """
    failed: dict[str, str] = {}
    tasks = [
        asyncio.create_task(_until_there(name, connect, failed), name=f"connect to {name}") for name in names
    ]
    done, late = await asyncio.wait(tasks, timeout=all_within_s)
    if not done:
        left_s = one_within_s - all_within_s
        done, late = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        for task in late:
            task.cancel()
        why = "; ".join(f"{name}: {failed.get(name, 'no answer')}" for name in names)
        raise StartError(f"no worker could be reached within {one_within_s:g} s: {why}; see `handoff status`")
    if late:
        missing = [name for name, task in zip(names, tasks, strict=True) if task in late]
        logger.warning("serving without %s, which cannot be reached yet", ", ".join(missing))
    return [task.result() for task in tasks if task in done], [task for task in tasks if task in late]


async def _until_there(name: str, connect: Callable[[str], Awaitable[T]], failed: dict[str, str]) -> T:
    while True:
        try:
            async with asyncio.timeout(TRY_S):
                return await connect(name)
        except TimeoutError:
            failed[name] = f"no answer within {TRY_S:g} s"
        except Exception as error:
            failed[name] = str(error) or repr(error)
            logger.debug("worker %s cannot be reached yet: %s", name, failed[name])
        await asyncio.sleep(AGAIN_S)
