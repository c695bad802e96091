"""Who still needs the blocks of requests that the engine has finished.

vLLM asks once whether a finished request's blocks must be kept, and expects one report when they need not.
Several of us may have to do with one request: chunks are sent from its blocks, pages are copied out of
them, KV is written into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Holds:
    """Counts who holds finished requests' blocks. Engine thread only."""

    def __init__(self) -> None:
        self._holders: dict[str, set[str]] = {}

    def add(self, request_id: str, holders: Mapping[str, bool]) -> bool:
        """The engine has finished a request: note who holds its blocks; return whether anybody does."""
        if held := {name for name, holds in holders.items() if holds}:
            self._holders[request_id] = held
        return bool(held)

    def release(self, holder: str, request_ids: Iterable[str]) -> tuple[set[str], set[str]]:
        """Somebody is done with these requests.

        Returns those finished ones of them that nobody holds any more, and those that are not finished.
        """
        free, others = set[str](), set[str]()
        for request_id in request_ids:
            if (held := self._holders.get(request_id)) is None:
                others.add(request_id)
                continue
            held.discard(holder)
            if not held:
                del self._holders[request_id]
                free.add(request_id)
        return free, others
