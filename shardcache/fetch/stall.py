"""Slow is fine, stalled is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from shardcache.errors import OriginUnavailableError
from shardcache.origin.base import Received


class Watch:
    """Gives a request any time as long as something of its answer comes in every so often."""

    def __init__(self, limit_s: float, url: str, tally: Received) -> None:
        self._limit_s = limit_s
        self._url = url
        self._tally = tally
        self._limit: asyncio.Timeout | None = None

    def received(self, count: int) -> None:
        """Note that so many bytes came in, and start the clock anew."""
        self._tally(count)
        self._restart()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Run the clock during a block. Raises OriginUnavailableError when nothing came in for too long."""
        try:
            async with asyncio.timeout(self._limit_s) as self._limit:
                yield
        except TimeoutError:
            # Origins translate their own time-outs, so this one is the clock's.
            raise OriginUnavailableError(f"nothing was received for {self._limit_s:g} s", url=self._url) from None
        finally:
            self._limit = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the clock during a block: who does not listen cannot tell whether anything is said."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None)
        try:
            yield
        finally:
            self._restart()

    def _restart(self) -> None:
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + self._limit_s)
