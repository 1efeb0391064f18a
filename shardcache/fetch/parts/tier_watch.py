"""Watch over a request to the tier: whether its owner lives, and whether the object store would be quicker.

The object store may be slow, and then the tier is: nginx sends a part that another node has requested as well only when
it is whole. A node that requested it from the store for that would make both slower. So it waits as long as the owner
lives, and requests from the store only what takes much longer than the tier's other parts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shardcache.errors import OriginUnavailableError
from shardcache.fetch.parts.hedging import LEAST, Hedging
from shardcache.fetch.parts.pausable_read import PausableRead
from shardcache.origin.tier_client import QUESTION, TierState
from shardcache.transport.parts import PartSums
from shardcache.transport.workers import Commit

# Look again after a tenth more of the time that a part has taken.
_LOOK_AGAIN = 1.1
# An owner is slow if the object store sends the part within this share of the time that the owner would still take.
_MUCH_SOONER = 0.25


class SlowOwnerError(Exception):
    """The owner has been slow before, and is slow again."""


@dataclass(slots=True)
class TierWatch:
    """Watch over one request.

    Attributes:
        read: the request's.
        url: of the object.
        size_bytes: number of bytes requested.
        origin: name under which the origin's times are known.
        owner: returns the owner's address.
        is_alive: returns whether the owner answers.
        rates: returns those of the other parts in flight.
        from_origin: requests the bytes from the origin; returns their checksums if they arrive within a time.
    """

    tier: TierState
    hedging: Hedging
    stall_timeout_s: float
    read: PausableRead
    url: str
    size_bytes: int
    origin: str
    owner: Callable[[], Awaitable[str]]
    is_alive: Callable[[], Awaitable[bool]]
    rates: Callable[[], list[float]]
    from_origin: Callable[[float, Commit], Awaitable[list[PartSums] | None]]
    _asked_s: float = -math.inf

    async def run(self, end_first: Commit) -> list[PartSums] | None:
        """Return the checksums of the bytes once the origin has sent them sooner; run on until the request ends.

        Raises, after it has ended the request, OriginUnavailableError if the owner is silent, SlowOwnerError if it has
        been slow before.
        """
        while True:
            await self._next_look()
            left_s = self._left_s()
            if left_s is None and self.read.worked.elapsed_s < self._next_question_s:
                continue
            asking = asyncio.ensure_future(self.is_alive())
            try:
                if (sums := await self._look(left_s, asking, end_first)) is not None:
                    return sums
            finally:
                asking.cancel()

    async def _next_look(self) -> None:
        look_s = max(self._usual_s, _LOOK_AGAIN * self.read.worked.elapsed_s)
        await self.read.worked.reaches(min(look_s, max(self._usual_s, self._next_question_s)))

    @property
    def _usual_s(self) -> float:
        return self.hedging.usual_s(self.origin, self.size_bytes, self.stall_timeout_s)

    @property
    def _next_question_s(self) -> float:
        return math.inf if self.read.received_bytes else self._asked_s + QUESTION * self.stall_timeout_s

    def _left_s(self) -> float | None:
        return self.hedging.left_s(
            self.size_bytes,
            self.read.received_bytes,
            self.read.worked.elapsed_s,
            self._usual_s,
            self.rates(),
            self.stall_timeout_s,
        )

    async def _look(
        self, left_s: float | None, asking: asyncio.Future[bool], end_first: Commit
    ) -> list[PartSums] | None:
        """An owner that answers promptly is not slow itself: it waits for the object store."""
        self._asked_s = self.read.worked.elapsed_s
        await asyncio.wait([asking], timeout=LEAST * self.stall_timeout_s)
        if not asking.done() and left_s is None and not self.read.received_bytes:
            left_s = self.stall_timeout_s
        if left_s is not None:
            sums = await self._sooner(left_s, asking, end_first)
            if sums is not None:
                return sums
        is_alive = await asking
        if self.read.received_bytes:
            return None  # the stall time-out decides
        if is_alive:
            self.read.heard()
        elif await end_first():
            raise OriginUnavailableError("the shard's owner in the tier does not answer", url=self.url)
        return None

    async def _sooner(self, left_s: float, asking: asyncio.Future[bool], end_first: Commit) -> list[PartSums] | None:
        owner = await self.owner()
        if self.tier.slow_owners.has(owner, time.monotonic()):
            if await end_first():
                raise SlowOwnerError
            return None
        if not (self.hedging.spend(self.origin) if asking.done() else self.hedging.tries(self.origin)):
            return None
        asked_s = time.monotonic()
        sums = await self.from_origin(max(_MUCH_SOONER * left_s, self._usual_s), end_first)
        if sums is not None:
            self.hedging.took(self.origin, self.size_bytes, time.monotonic() - asked_s)
            if owner and not asking.done():  # the store has sent all of it before the owner has answered a question
                self.hedging.won(self.origin)
                self.tier.slow_owners.add(owner, time.monotonic())
        return sums
