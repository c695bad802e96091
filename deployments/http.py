"""Uvicorn's HTTP protocol, with what it lacks: heads that are too long or do not come are not waited for."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.file import Limits

TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def limited_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """Return the protocol for ``uvicorn.Config``.

    It bounds what a connection can hold before a request is complete enough to be answered properly; a head
    that arrives whole is judged by ``deployments/edge.py``.
    """
    most, within_s = 2 * limits.head, limits.arrive_s

    class Limited(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_bytes = 0
            self._deadline: asyncio.TimerHandle | None = None
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            super().data_received(data)
            if self._deadline is not None and self._head_bytes > most:
                self._refuse(TOO_LONG)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait()

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            super().on_headers_complete()

        def _wait(self) -> None:
            if self._deadline is None:
                self._head_bytes = 0
                self._deadline = self.loop.call_later(within_s, self._refuse, TOO_LATE)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _refuse(self, answer: bytes) -> None:
            self._stop_waiting()
            if not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()

    return Limited
