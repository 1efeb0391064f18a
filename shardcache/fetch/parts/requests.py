"""Requests for object bodies: each with a connection slot and a stall timeout, and hedged if late."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from shardcache.errors import OriginBusyError, OriginError, OriginUnavailableError, ShardChangedError
from shardcache.fetch.connections.bandwidth import Bandwidth
from shardcache.fetch.connections.scheduler import Claim, Scheduler
from shardcache.fetch.parts.hedging import Hedging, race
from shardcache.fetch.parts.pausable_read import PausableRead
from shardcache.fetch.parts.stall_timeout import LEAST_BYTES_PER_S, StalledError, StallTimeout
from shardcache.fetch.parts.tier_watch import SlowOwnerError, TierWatch
from shardcache.metrics import Counters
from shardcache.origin.base import Origin, RemoteObject
from shardcache.origin.registry import Deferred
from shardcache.origin.tier_client import OWNER, QUESTION, Route, TierState, sums_of
from shardcache.transport.flow import Received
from shardcache.transport.messages import Answer
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit

# While the other parts are as slow as a late one, check again after a tenth more of its time.
_LOOK_AGAIN = 1.1


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Bytes fetched by one request: a part, or the whole of an object without ranges.

    Attributes:
        begun: called with each attempt's read, except those of hedged requests.
    """

    origin: Origin
    obj: RemoteObject
    parts: Parts
    claim: Claim
    begun: Callable[[PausableRead], None]


class Requests:
    """Sends requests as slots, bandwidth and hedging allow, and counts received bytes."""

    def __init__(
        self, slots: Scheduler, bandwidth: Bandwidth, hedging: Hedging, counters: Counters, stall_timeout_s: float
    ) -> None:
        self._scheduler = slots
        self._bandwidth = bandwidth
        self._hedging = hedging
        self._pausable_reads: defaultdict[str, set[PausableRead]] = defaultdict(set)  # by origin
        self._counters = counters
        self._stall_timeout_s = stall_timeout_s

    async def fetch(self, span: RequestSpan) -> list[PartSums]:
        """Fetch the bytes and return its parts' checksums once it is written.

        The tier is requested first, if there is one; whatever fails there, the origin is requested next. A request to
        either is hedged if late, by one to the origin.

        Raises what the origin raises for the first request, and PartFileError.
        """
        async with self._scheduler.hold(span.claim):
            if (sums := await self._from_tier(span)) is not None:
                return sums
            return await self._from_origin(span)

    async def _from_tier(self, span: RequestSpan) -> list[PartSums] | None:
        """Return None if the origin has to be requested.

        A part that stops short is requested once more, past the tier's cache: the file there may be damaged.
        """
        origin, obj, parts = span.origin, span.obj, span.parts
        if not isinstance(origin, Deferred) or (tier := origin.tier) is None:
            return None
        while (route := await self._route(span, origin, tier)) is not None:
            with self._pausable_read(span, span.claim, self._count_from_tier) as pausable_read:
                span.begun(pausable_read)
                watch = self._watch(span, origin, tier, route, pausable_read)
                reading = self._read_tier(span, origin, route, pausable_read)
                try:
                    sums, is_first = await race(reading, 0.0, watch.run)
                except SlowOwnerError:
                    continue
                except OriginBusyError:  # the object store's answer
                    self._counters.tier_requests += 1
                    raise
                except OriginError as exn:
                    if span.claim.paused and isinstance(exn, OriginUnavailableError):
                        raise  # nginx may close a paused connection; that is not a failure
                    self._counters.tier_requests += 1
                    self._counters.tier_failures += 1
                    tier.failed(obj, exn.message, stalled=isinstance(exn, StalledError))
                    if not pausable_read.received_bytes and not isinstance(exn, (StalledError, ShardChangedError)):
                        return None
                    tier.suspect(obj, [parts.start])
                    if route.refreshes or isinstance(exn, StalledError):
                        return None
                    continue
            if sums is None:
                return None
            self._counters.tier_requests += 1
            if not is_first:
                self._counters.hedged_bytes += pausable_read.received_bytes
                return sums
            tier.served(obj, parts)
            self._observe(tier.address, pausable_read)
            self._scheduler.took(span.claim, parts.size_bytes, pausable_read.worked.elapsed_s)
            return sums
        return None

    async def _route(self, span: RequestSpan, origin: Deferred, tier: TierState) -> Route | None:
        """Return the way to request parts from the tier, by another owner if the first is left out."""
        route = tier.route(span.obj, span.parts)
        if route is None or not tier.slow_owners.any(time.monotonic()):
            return route
        for way in (route, replace(route, detours=True)):
            if not tier.slow_owners.has(await self._owner(span, origin, way), time.monotonic()):
                return way
        return None

    async def _read_tier(
        self, span: RequestSpan, origin: Deferred, route: Route, pausable_read: PausableRead
    ) -> list[PartSums] | None:
        """Return None if the object's parts bypass the tier."""
        async with pausable_read.limit():
            answer = await origin.ask_tier(route, span.obj, span.parts, pausable_read)
        if answer is None:
            return None
        sums = sums_of(answer, span.obj)
        if answer.headers.get("x-shardcache-tier") != "HIT":  # then the time is the object store's
            self._hedging.took(span.claim.origin, span.parts.size_bytes, pausable_read.worked.elapsed_s)
        return sums

    async def _owner(self, span: RequestSpan, origin: Deferred, route: Route) -> str:
        """Return the address of the node that owns the parts; empty if unknown."""
        answer = await self._answer(span, origin, replace(route, question="name"))
        return "" if answer is None else answer.headers.get(OWNER, "")

    async def _is_alive(self, span: RequestSpan, origin: Deferred, route: Route) -> bool:
        answer = await self._answer(span, origin, replace(route, question="alive"))
        return answer is not None and answer.status < 500

    async def _answer(self, span: RequestSpan, origin: Deferred, route: Route) -> Answer | None:
        """Return the answer to a question about the parts' owner; None if there is none in time."""
        try:
            async with asyncio.timeout(QUESTION * self._stall_timeout_s):
                return await origin.ask_tier(route, span.obj, span.parts, None)
        except (OriginError, TimeoutError):
            return None

    def _watch(
        self, span: RequestSpan, origin: Deferred, tier: TierState, route: Route, read: PausableRead
    ) -> TierWatch:
        return TierWatch(
            tier,
            self._hedging,
            self._stall_timeout_s,
            read,
            span.obj.url,
            span.parts.size_bytes,
            span.claim.origin,
            partial(self._owner, span, origin, route),
            partial(self._is_alive, span, origin, route),
            partial(self._rates, span, read),
            partial(self._sooner, span),
        )

    async def _sooner(self, span: RequestSpan, limit_s: float, end_first: Commit) -> list[PartSums] | None:
        """Return the checksums of the bytes from the origin; None unless they arrive within a time.

        The request needs no slot of its own: the one to the tier, which has a slot, is none to the origin.
        """
        if self._scheduler.is_throttled(span.claim.origin):
            return None

        async def commit() -> bool:
            limit.reschedule(None)
            return await end_first()

        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._again(span, span.claim.again(), nullcontext(), commit)
        except TimeoutError:
            return None

    async def _from_origin(self, span: RequestSpan) -> list[PartSums]:
        with self._pausable_read(span, span.claim, self._count) as pausable_read:
            span.begun(pausable_read)
            sums, is_first = await self._first_of_two(span, pausable_read)
        self._scheduler.took(span.claim, span.parts.size_bytes, pausable_read.worked.elapsed_s)
        self._hedging.took(span.claim.origin, span.parts.size_bytes, pausable_read.worked.elapsed_s, span.parts.count)
        if not is_first:
            self._counters.hedged_bytes += pausable_read.received_bytes
        assert sums is not None
        return sums

    @contextmanager
    def _pausable_read(self, span: RequestSpan, claim: Claim, count: Received) -> Iterator[PausableRead]:
        """Provide the pausable read of one request; during the block its claim can be paused."""
        stall_timeout = StallTimeout(self._stall_timeout_s, span.obj.url, count, LEAST_BYTES_PER_S)
        grant, prompt = partial(self._bandwidth.grant, claim), claim.priority().alone
        pausable_read = claim.work = PausableRead(stall_timeout, span.parts.size_bytes, grant, prompt=prompt)
        self._pausable_reads[claim.origin].add(pausable_read)
        try:
            yield pausable_read
        finally:
            claim.work = None
            self._pausable_reads[claim.origin].discard(pausable_read)
            if not self._pausable_reads[claim.origin]:
                del self._pausable_reads[claim.origin]
            self._bandwidth.settle(pausable_read.leave_bytes)

    async def _first_of_two(self, span: RequestSpan, pausable_read: PausableRead) -> tuple[list[PartSums] | None, bool]:
        """Return the checksums of the answer that was written, and True if it is the first request's."""
        size_bytes = span.parts.size_bytes
        patience_s = self._hedging.patience_s(span.claim.origin, size_bytes) if span.obj.ranges else None
        reading = self._read(span, pausable_read, None)
        if patience_s is not None:
            return await race(reading, patience_s, partial(self._second, span, pausable_read, patience_s))
        return await reading, True

    async def _second(
        self, span: RequestSpan, first: PausableRead, patience_s: float, end_first: Commit
    ) -> list[PartSums] | None:
        await self._is_late(span, first, patience_s)
        if self._scheduler.is_throttled(span.claim.origin) or not self._hedging.spend(
            span.claim.origin, span.parts.count
        ):
            return None
        claim = span.claim.again()
        return await self._again(span, claim, self._scheduler.hold(claim), end_first)

    async def _again(
        self, span: RequestSpan, claim: Claim, slot: AbstractAsyncContextManager[None], end_first: Commit
    ) -> list[PartSums] | None:
        first_has_ended = False

        async def commit() -> bool:
            nonlocal first_has_ended
            first_has_ended = await end_first()
            return first_has_ended

        try:
            async with slot:
                return await self._read_in_time(span, claim, commit)
        except OriginError:
            if first_has_ended:
                raise
        return None  # the first may still arrive; its outcome counts

    async def _is_late(self, span: RequestSpan, first: PausableRead, patience_s: float) -> None:
        """Return once a second request is likely to bring the bytes sooner than the first."""
        await first.worked.reaches(patience_s)
        while (due_s := self._due_s(span, first, patience_s)) > (elapsed_s := first.worked.elapsed_s):
            await first.worked.reaches(max(due_s, _LOOK_AGAIN * elapsed_s))

    def _due_s(self, span: RequestSpan, first: PausableRead, patience_s: float) -> float:
        size_bytes, received_bytes = span.parts.size_bytes, first.received_bytes
        return self._hedging.due_s(span.claim.origin, size_bytes, patience_s, received_bytes, self._rates(span, first))

    def _rates(self, span: RequestSpan, read: PausableRead) -> list[float]:
        others = self._pausable_reads[span.claim.origin] - {read}
        return [other.rate_bytes_per_s for other in others if other.received_bytes]

    async def _read_in_time(self, span: RequestSpan, claim: Claim, end_first: Commit) -> list[PartSums] | None:
        self._counters.hedges += 1
        sums = None
        with self._pausable_read(span, claim, self._count) as pausable_read:
            try:
                sums = await self._read(span, pausable_read, end_first)
            finally:
                self._counters.hedged_bytes += pausable_read.received_bytes if sums is None else 0
        return sums

    async def _read(
        self, span: RequestSpan, pausable_read: PausableRead, commit: Commit | None
    ) -> list[PartSums] | None:
        self._counters.origin_requests += 1
        async with pausable_read.limit():
            sums = await span.origin.fetch(span.obj, span.parts, pausable_read, commit)
        self._observe(span.claim.origin, pausable_read)
        return sums

    def _observe(self, place: str, pausable_read: PausableRead) -> None:
        measures, took_s = self._counters.measures, pausable_read.worked.elapsed_s
        measures.part.of(place).observe(took_s)
        measures.first_byte.of(place).observe(
            took_s if pausable_read.first_byte_s is None else pausable_read.first_byte_s
        )

    def _count_from_tier(self, received_bytes: int) -> None:
        self._counters.tier_bytes += received_bytes

    def _count(self, received_bytes: int) -> None:
        self._counters.origin_bytes += received_bytes
