"""A worker that breaks where it is told to: in the middle of a transfer, or on the wire.

The real one; while nothing is asked of it, every call goes straight through.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping

from actors.channel import Channel
from actors.messages import Announce, Chunk, Delivery, HandoverEnd, HandoverFailed, WorkerSpec
from actors.peers import OnTaken
from actors.worker import Worker
from kv.faulty import Fault, FaultyTransport
from kv.tcp import TcpTransport
from kv.transport import Transport

HELD_S = 60.0
"""A thread that is held goes on after this long at the latest."""


class FaultyWorker(Worker):
    """Counts the stages of transfers that it reaches, and can be told to die or to wait at one.

    Stages are ``post N`` and ``post end`` (it is about to announce chunk N, from 0, or the end of a request's
    KV to its peer), ``take N`` and ``take end`` (a peer's announcement has come), and ``failed N``: after it
    has announced N chunks of a request, it is about to tell the peer that no more will come.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._reached: Counter[str] = Counter()
        self._deadly: str | None = None
        self._gates: dict[str, threading.Event] = {}
        self._faulty: dict[str, FaultyTransport] = {}
        self._posted: Counter[str] = Counter()

    # -- asked by tests and experiments -----------------------------------------------------------

    async def suffer(self, rung: str, *faults: Fault) -> None:
        """Have these faults on one transport from now on; none given: be sound again."""
        self._faulty[rung].suffer(*faults)

    async def fired(self, rung: str) -> dict[str, int]:
        """How often each kind of fault has happened."""
        return dict(self._faulty[rung].fired)

    async def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    async def kv_port(self) -> int:
        """The port that KV is fetched from over tcp."""
        inner = self._faulty["tcp"].inner
        assert isinstance(inner, TcpTransport)
        return inner.address[1]

    async def die_at(self, stage: str) -> None:
        """Kill -9 this process when it next reaches a stage."""
        self._deadly = stage

    async def hold_at(self, stage: str) -> None:
        """Have every thread that reaches a ``post`` stage wait there, until ``free``."""
        self._gates[stage] = threading.Event()

    async def free(self) -> None:
        """Let everything go on."""
        gates, self._gates = self._gates, {}
        for gate in gates.values():
            gate.set()

    async def reached(self) -> dict[str, int]:
        """How often each stage has been reached, by threads that wait there too."""
        return dict(self._reached)

    # -- see the base class -----------------------------------------------------------------------

    def _transports(self) -> Mapping[str, Transport]:
        self._faulty = {name: FaultyTransport(inner) for name, inner in super()._transports().items()}
        return self._faulty

    def _post(self, peer: str, delivery: Delivery, taken: OnTaken) -> None:
        match delivery:
            case Chunk(header):
                self._posted[header.request_id] += 1
                self._reach(f"post {header.index}")
            case HandoverEnd():
                self._reach("post end")
            case HandoverFailed(request_id):
                self._reach(f"failed {self._posted[request_id]}")
        super()._post(peer, delivery, taken)

    def _take(self, channel: Channel, message: object) -> None:
        if isinstance(message, Announce):
            self._reach(f"take {_part(message.delivery)}")
        super()._take(channel, message)

    async def deliver(self, delivery: Delivery) -> float | None:
        """See the base class."""
        self._reach(f"take {_part(delivery)}")
        return await super().deliver(delivery)

    def _reach(self, stage: str) -> None:
        self._reached[stage] += 1
        if stage == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if (gate := self._gates.get(stage)) is not None:
            gate.wait(HELD_S)


def _part(delivery: Delivery) -> str:
    match delivery:
        case Chunk(header):
            return str(header.index)
        case HandoverEnd():
            return "end"
    return "failed"
