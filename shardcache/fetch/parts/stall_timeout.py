"""Stall timeout: slow is fine; stalled, or so slow that a part would take days, is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from shardcache.errors import OriginUnavailableError
from shardcache.transport.flow import Received

LEAST_BYTES_PER_S = 1024
"""Minimum rate: a slower connection is given up, whether the network is failing or the peer stalls on purpose."""


# Fraction of the limit by which a request may time out late, so that not every byte reschedules the timer.
_SLACK = 0.1


class StalledError(OriginUnavailableError):
    """Too little of an answer arrived for too long."""


class StallTimeout:
    """Stall timeout of a request: no limit on its duration, as long as enough of the answer keeps arriving.

    Args:
        limit_s: time within which enough must arrive.
        tally: called with every count received.
        least_per_s: minimum rate; by default anything is enough.
    """

    def __init__(self, limit_s: float, url: str, tally: Received, least_per_s: int = 0) -> None:
        self._limit_s = limit_s
        self._url = url
        self._tally = tally
        self._least = max(1, int(limit_s * least_per_s))
        self._received = 0  # since the timer was last restarted
        self._restarts_from_s = 0.0
        self._limit: asyncio.Timeout | None = None

    def received(self, count: int) -> None:
        """Count what was received, and restart the timer when it is enough."""
        self._tally(count)
        self._received += count
        if self._received >= self._least:
            self.restart()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Run the timer during the block. Raises StalledError when too little arrived for too long."""
        try:
            async with asyncio.timeout(self._limit_s) as self._limit:
                yield
        except TimeoutError:
            # Origins translate their own timeouts, so this one is the timer's.
            amount = f"only {self._received} bytes were" if self._received else "nothing was"
            raise StalledError(f"{amount} received for {self._limit_s:g} s", url=self._url) from None
        finally:
            self._limit = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the timer during the block, in which nothing is read."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None)
            self._restarts_from_s = 0.0
        try:
            yield
        finally:
            self.restart()

    def restart(self) -> None:
        """Restart the timer."""
        self._received = 0
        now_s = asyncio.get_running_loop().time()
        if self._limit is None or self._limit.expired() or now_s < self._restarts_from_s:
            return
        self._restarts_from_s = now_s + _SLACK * self._limit_s
        self._limit.reschedule(now_s + (1 + _SLACK) * self._limit_s)
