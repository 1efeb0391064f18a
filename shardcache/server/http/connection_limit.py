"""Limits on the number and the lifetime of a listening socket's connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast


class Limit:
    """Protocol factory that wraps `inner` and closes every connection beyond `connections` at a time immediately.

    A client that sends its request or reads its answer a byte a minute occupies a connection for at most `limit_s`.
    """

    def __init__(self, inner: Callable[[], asyncio.Protocol], connections: int, limit_s: float) -> None:
        self.inner = inner
        self.limit_s = limit_s
        self.free = connections

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _Limited(self)


class _Limited(asyncio.Protocol):
    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._inner: asyncio.Protocol | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._limit.free:
            transport.close()
            return
        self._limit.free -= 1
        # Not `close`: that would wait until the client has read everything written.
        end = cast(asyncio.WriteTransport, transport).abort
        self._timer = asyncio.get_running_loop().call_later(self._limit.limit_s, end)
        self._inner = self._limit.inner()
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is None or self._timer is None:
            return
        self._limit.free += 1
        self._timer.cancel()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()
