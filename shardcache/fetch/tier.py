"""Requests to the cluster's tier, which come before those to the origin, and the watch over each of them.

The object store may be slow, and then the tier is: nginx sends a part that another node has requested as well only when
it is whole. A node that requested it from the store for that would make both slower. So it waits as long as the owner
lives, and requests from the store only what takes much longer than the tier's other parts.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

from shardcache.errors import OriginBusyError, OriginError, OriginUnavailableError, ShardChangedError
from shardcache.fetch.hedging import LOOK_AGAIN, MIN_STALL_SHARE, race
from shardcache.fetch.reads import PausableRead, StalledError
from shardcache.fetch.requests import Requests, RequestSpan
from shardcache.origin.registry import Deferred
from shardcache.origin.tier_client import OWNER, QUESTION, Route, TierState, sums_of
from shardcache.transport.messages import Answer
from shardcache.transport.parts import PartSums
from shardcache.transport.workers import Commit

# An owner is slow if the object store sends the part within this share of the time that the owner would still take.
_MUCH_SOONER = 0.25


class SlowOwnerError(Exception):
    """The owner has been slow before, and is slow again."""


async def fetch(requests: Requests, span: RequestSpan) -> list[PartSums]:
    """Fetch bytes and return the checksums of their parts once they are written.

    The tier is requested first, if there is one; whatever fails there, the origin is requested next. A request to
    either is hedged if late, by one to the origin.

    Raises what the origin raises for the first request, and PartFileError.
    """
    async with requests.scheduler.hold(span.claim):
        sums = None
        if isinstance(span.origin, Deferred) and span.origin.tier is not None:
            sums = await TierRequests(requests, span, span.origin, span.origin.tier).fetch()
        return await requests.fetch(span) if sums is None else sums


class TierRequests:
    """Requests to the tier for one span: by the owner, past its cache, or by another owner."""

    def __init__(self, requests: Requests, span: RequestSpan, origin: Deferred, tier: TierState) -> None:
        self.requests = requests
        self.span = span
        self.tier = tier
        self._origin = origin
        self._counters = requests.counters

    async def fetch(self) -> list[PartSums] | None:
        """Return the checksums of the bytes; None if the origin has to be requested.

        A part that stops short is requested once more, past the tier's cache: the file there may be damaged.
        """
        while (route := await self._route()) is not None:
            with self.requests.reading(self.span, self.span.claim, self._count) as read:
                self.span.begun(read)
                watch = _Watch(self, route, read)
                try:
                    sums, is_first = await race(self._read(route, read), 0.0, watch.run)
                except SlowOwnerError:
                    continue
                except OriginError as exn:
                    if self._repeats(exn, route, read):
                        continue
                    return None
            if sums is None:
                return None
            self._counters.tier_requests += 1
            if is_first:
                self._served(read)
            else:
                self._counters.hedged_bytes += read.received_bytes
            return sums
        return None

    async def _route(self) -> Route | None:
        """Return the way to request the parts, by another owner if the first is left out."""
        route = self.tier.route(self.span.obj, self.span.parts)
        if route is None or not self.tier.slow_owners.any(time.monotonic()):
            return route
        for way in (route, replace(route, detours=True)):
            if not self.is_slow(await self.owner(way)):
                return way
        return None

    async def _read(self, route: Route, read: PausableRead) -> list[PartSums] | None:
        """Return None if the object's parts bypass the tier."""
        async with read.limit():
            answer = await self._origin.ask_tier(route, self.span.obj, self.span.parts, read)
        if answer is None:
            return None
        sums = sums_of(answer, self.span.obj)
        if answer.headers.get("x-shardcache-tier") != "HIT":  # then the time is the object store's
            self.requests.hedging.took(self.span.claim.origin, self.span.parts.size_bytes, read.worked.elapsed_s)
        return sums

    def _served(self, read: PausableRead) -> None:
        self.tier.served(self.span.obj, self.span.parts)
        self.requests.observe(self.tier.address, read)
        self.requests.scheduler.took(self.span.claim, self.span.parts.size_bytes, read.worked.elapsed_s)

    def _repeats(self, exn: OriginError, route: Route, read: PausableRead) -> bool:
        """Record a failed request, and return whether the tier is requested again. Raises errors that are not its."""
        is_stalled = isinstance(exn, StalledError)
        if self.span.claim.paused and isinstance(exn, OriginUnavailableError) and not isinstance(exn, OriginBusyError):
            raise exn  # nginx may close a paused connection; that is not a failure
        self._counters.tier_requests += 1
        if isinstance(exn, OriginBusyError):  # the object store's answer
            raise exn
        self._counters.tier_failures += 1
        self.tier.failed(self.span.obj, exn.message, stalled=is_stalled)
        if not (read.received_bytes or is_stalled or isinstance(exn, ShardChangedError)):
            return False
        self.tier.suspect(self.span.obj, [self.span.parts.start])
        return not (route.refreshes or is_stalled)

    async def owner(self, route: Route) -> str:
        """Return the address of the node that owns the parts; empty if unknown."""
        answer = await self._answer(replace(route, question="name"))
        return "" if answer is None else answer.headers.get(OWNER, "")

    def is_slow(self, owner: str) -> bool:
        """Return whether an owner is left out."""
        return self.tier.slow_owners.has(owner, time.monotonic())

    async def is_alive(self, route: Route) -> bool:
        """Return whether the owner of the parts answers."""
        answer = await self._answer(replace(route, question="alive"))
        return answer is not None and answer.status < 500

    async def _answer(self, route: Route) -> Answer | None:
        """Return the answer to a question about the parts' owner; None if there is none in time."""
        try:
            async with asyncio.timeout(QUESTION * self.requests.stall_timeout_s):
                return await self._origin.ask_tier(route, self.span.obj, self.span.parts, None)
        except (OriginError, TimeoutError):
            return None

    def _count(self, received_bytes: int) -> None:
        self._counters.tier_bytes += received_bytes


class _Watch:
    """Watch over one request: whether its owner lives, and whether the object store would be quicker."""

    def __init__(self, tier_requests: TierRequests, route: Route, read: PausableRead) -> None:
        self._tier_requests = tier_requests
        self._route = route
        self._read = read
        self._requests = tier_requests.requests
        self._hedging = self._requests.hedging
        self._stall_timeout_s = self._requests.stall_timeout_s
        self._place = tier_requests.span.claim.origin
        self._size_bytes = tier_requests.span.parts.size_bytes
        self._asked_s = -math.inf

    async def run(self, end_first: Commit) -> list[PartSums] | None:
        """Return the checksums of the bytes once the origin has sent them sooner; run on until the request ends.

        Raises, after it has ended the request, OriginUnavailableError if the owner is silent, SlowOwnerError if it has
        been slow before.
        """
        while True:
            await self._next_look()
            left_s = self._left_s()
            if left_s is None and self._read.worked.elapsed_s < self._next_question_s:
                continue
            asking = asyncio.ensure_future(self._tier_requests.is_alive(self._route))
            try:
                if (sums := await self._look(left_s, asking, end_first)) is not None:
                    return sums
            finally:
                asking.cancel()

    async def _next_look(self) -> None:
        look_s = max(self._usual_s, LOOK_AGAIN * self._read.worked.elapsed_s)
        await self._read.worked.reaches(min(look_s, max(self._usual_s, self._next_question_s)))

    @property
    def _usual_s(self) -> float:
        return self._hedging.usual_s(self._place, self._size_bytes, self._stall_timeout_s)

    @property
    def _next_question_s(self) -> float:
        return math.inf if self._read.received_bytes else self._asked_s + QUESTION * self._stall_timeout_s

    def _left_s(self) -> float | None:
        """Return the time that the request will still take, if that is much longer than usual; else None."""
        return self._hedging.left_s(
            self._size_bytes,
            self._read.received_bytes,
            self._read.worked.elapsed_s,
            self._usual_s,
            self._requests.other_rates(self._place, self._read),
            self._stall_timeout_s,
        )

    async def _look(
        self, left_s: float | None, asking: asyncio.Future[bool], end_first: Commit
    ) -> list[PartSums] | None:
        """An owner that answers promptly is not slow itself: it waits for the object store."""
        self._asked_s = self._read.worked.elapsed_s
        await asyncio.wait([asking], timeout=MIN_STALL_SHARE * self._stall_timeout_s)
        if not asking.done() and left_s is None and not self._read.received_bytes:
            left_s = self._stall_timeout_s
        if left_s is not None and (sums := await self._sooner(left_s, asking, end_first)) is not None:
            return sums
        is_alive = await asking
        if self._read.received_bytes:
            return None  # the stall time-out decides
        if is_alive:
            self._read.heard()
        elif await end_first():
            url = self._tier_requests.span.obj.url
            raise OriginUnavailableError("the shard's owner in the tier does not answer", url=url)
        return None

    async def _sooner(self, left_s: float, asking: asyncio.Future[bool], end_first: Commit) -> list[PartSums] | None:
        owner = await self._tier_requests.owner(self._route)
        if self._tier_requests.is_slow(owner):
            if await end_first():
                raise SlowOwnerError
            return None
        if not (self._hedging.spend(self._place) if asking.done() else self._hedging.tries(self._place)):
            return None
        asked_s = time.monotonic()
        limit_s = max(_MUCH_SOONER * left_s, self._usual_s)
        sums = await self._requests.sooner(self._tier_requests.span, limit_s, end_first)
        if sums is not None:
            self._hedging.took(self._place, self._size_bytes, time.monotonic() - asked_s)
            if owner and not asking.done():  # the store has sent all of it before the owner has answered a question
                self._hedging.won(self._place)
                self._tier_requests.tier.slow_owners.add(owner, time.monotonic())
        return sums
