"""Connections that hold a socket and ask nothing, or never end asking: the protocol that closes them in time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

# For a request's head. Its body has a limit in gate.py.
_HEAD_WITHIN_S = 30.0


class PatientProtocol(H11Protocol):
    """One connection. Looks now and then whether a request has come since it looked last."""

    _seen: RequestResponseCycle | None = None
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look = self.loop.call_later(_HEAD_WITHIN_S, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        cycle: Any = self.cycle  # of the last request whose head was read
        if (cycle is None or cycle.response_complete) and cycle is self._seen:
            self.transport.close()
            return
        self._seen = cycle
        self._look = self.loop.call_later(_HEAD_WITHIN_S, self._close_if_silent)
