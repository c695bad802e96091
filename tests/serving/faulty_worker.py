"""The worker that these tests run: the real one, whose transports can be told to misbehave."""

from collections.abc import Mapping

from actors.worker import Worker
from kv.faulty import Fault, FaultyTransport
from kv.transport import Transport


class FaultyWorker(Worker):
    """While nothing is asked of it, every call goes straight through to the real transports."""

    def _transports(self) -> Mapping[str, Transport]:
        self._faulty = {name: FaultyTransport(inner) for name, inner in super()._transports().items()}
        return self._faulty  # type: ignore[return-value]

    async def suffer(self, rung: str, *faults: Fault) -> None:
        """Have these faults on one transport from now on; none given: be sound again."""
        self._faulty[rung].suffer(*faults)

    async def fired(self, rung: str) -> dict[str, int]:
        """How often each kind of fault has happened."""
        return dict(self._faulty[rung].fired)
