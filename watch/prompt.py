"""HTTP connections on which requests arrive in time: one that stalls would hold one of the server's few places."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0  # for a request to arrive, from its first byte, or from the connection's begin, to its last


class Prompt(H11Protocol):
    """uvicorn's protocol, which itself waits without an end for the rest of a request."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a request, if this is a part of one."""
        super().data_received(data)
        if not self._incomplete():
            self._stop()
        elif self._due is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop()
        super().connection_lost(exc)

    def _incomplete(self) -> bool:
        """Whether head or body of the next request is still to come."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def _wait(self) -> None:
        self._due = self.loop.call_later(SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
