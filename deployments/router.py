"""Which worker prefills and which decodes: a pure function over a snapshot.

First version: the least loaded of each role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.messages import Role
from deployments.errors import NoWorker
from deployments.split import Mode


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the gateway knows of a worker.

    Attributes:
        name: the worker.
        role: what it is for.
        alive: whether its output stream is up.
        prefill_tokens: prompt tokens sent there whose prefill has not ended.
        running: requests sent there that are still producing tokens.

    """

    name: str
    role: Role
    alive: bool
    prefill_tokens: int
    running: int


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. ``prefill`` equals ``decode`` for an undivided request."""

    prefill: str
    decode: str
    mode: Mode
    reason: str


def route(workers: Sequence[WorkerLoad], mode: Mode, reason: str, one_token: bool = False) -> Route:
    """Choose the least loaded pair.

    A request that cannot be divided runs on a decode worker, unless it produces a single
    token: then it is all prefill. With no worker of a role alive, the other role does both.

    Raises:
        NoWorker: none is alive.

    """
    prefill = min(
        (w for w in workers if w.alive and w.role == "prefill"),
        key=lambda w: (w.prefill_tokens, w.running, w.name),
        default=None,
    )
    decode = min(
        (w for w in workers if w.alive and w.role == "decode"),
        key=lambda w: (w.running, w.prefill_tokens, w.name),
        default=None,
    )
    if prefill is None and decode is None:
        raise NoWorker(f"none of the {len(workers)} workers is alive; see `handoff status`")
    if prefill is None or decode is None:
        only = prefill or decode
        assert only is not None
        missing = "prefill" if prefill is None else "decode"
        return Route(only.name, only.name, Mode.UNDIVIDED, f"no {missing} worker is alive")
    if mode is Mode.UNDIVIDED:
        alone = prefill if one_token else decode
        return Route(alone.name, alone.name, mode, reason)
    return Route(prefill.name, decode.name, mode, reason)
