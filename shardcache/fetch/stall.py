"""Slow is fine, stalled is not; nor is so slow that a part would take days."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from shardcache.errors import OriginUnavailableError
from shardcache.transport.flow import Received

LEAST_BYTES_PER_S = 1024
"""A connection that brings less is given up: the line may be at its end with it, or somebody holds it up on purpose."""


# Part of the limit by which a request may be given up late, so that not each of its bytes sets the alarm anew.
_SLACK = 0.1


class Watch:
    """Gives a request any time as long as enough of its answer comes in every so often.

    Args:
        limit_s: how often that is.
        tally: told of everything that comes.
        least_per_s: how much is enough; by default anything is.
    """

    def __init__(self, limit_s: float, url: str, tally: Received, least_per_s: int = 0) -> None:
        self._limit_s = limit_s
        self._url = url
        self._tally = tally
        self._least = max(1, int(limit_s * least_per_s))
        self._received = 0  # since the clock was started anew
        self._restarts_from_s = 0.0
        self._limit: asyncio.Timeout | None = None

    def received(self, count: int) -> None:
        """Note that so much came in, and start the clock anew when it was enough."""
        self._tally(count)
        self._received += count
        if self._received >= self._least:
            self._restart()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Run the clock during a block. Raises OriginUnavailableError when too little came in for too long."""
        try:
            async with asyncio.timeout(self._limit_s) as self._limit:
                yield
        except TimeoutError:
            # Origins translate their own time-outs, so this one is the clock's.
            amount = f"only {self._received} bytes were" if self._received else "nothing was"
            raise OriginUnavailableError(f"{amount} received for {self._limit_s:g} s", url=self._url) from None
        finally:
            self._limit = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the clock during a block: who does not listen cannot tell whether anything is said."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(None)
            self._restarts_from_s = 0.0
        try:
            yield
        finally:
            self._restart()

    def _restart(self) -> None:
        self._received = 0
        now_s = asyncio.get_running_loop().time()
        if self._limit is None or self._limit.expired() or now_s < self._restarts_from_s:
            return
        self._restarts_from_s = now_s + _SLACK * self._limit_s
        self._limit.reschedule(now_s + (1 + _SLACK) * self._limit_s)
