"""Requests to origins for object bodies: each with a connection slot and a stall timeout, and hedged if late."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from shardcache.errors import OriginError
from shardcache.fetch.hedging import LOOK_AGAIN, Hedging, race
from shardcache.fetch.limits import Bandwidth
from shardcache.fetch.priority import Claim
from shardcache.fetch.reads import MIN_BYTES_PER_S, PausableRead, StallTimeout
from shardcache.fetch.scheduler import Scheduler
from shardcache.metrics import Counters
from shardcache.origin.base import Origin, RemoteObject
from shardcache.transport.flow import Received
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Bytes fetched by one request: a part or several, or the whole of an object without ranges.

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
        self, scheduler: Scheduler, bandwidth: Bandwidth, hedging: Hedging, counters: Counters, stall_timeout_s: float
    ) -> None:
        self.scheduler = scheduler
        self.hedging = hedging
        self.counters = counters
        self.stall_timeout_s = stall_timeout_s
        self._bandwidth = bandwidth
        self._reads: defaultdict[str, set[PausableRead]] = defaultdict(set)  # by origin

    async def fetch(self, span: RequestSpan) -> list[PartSums]:
        """Fetch bytes and return the checksums of their parts once they are written; the claim holds a slot.

        Raises what the origin raises for the first request, and PartFileError.
        """
        size_bytes = span.parts.size_bytes
        with self.reading(span, span.claim, self._count) as read:
            span.begun(read)
            sums, is_first = await self._first_of_two(span, read)
        self.scheduler.took(span.claim, size_bytes, read.worked.elapsed_s)
        self.hedging.took(span.claim.origin, size_bytes, read.worked.elapsed_s, span.parts.count)
        if not is_first:
            self.counters.hedged_bytes += read.received_bytes
        assert sums is not None
        return sums

    async def sooner(self, span: RequestSpan, limit_s: float, end_first: Commit) -> list[PartSums] | None:
        """Return the checksums of bytes that were requested from the tier; None unless they arrive within a time.

        The request needs no slot of its own: the one to the tier, which has a slot, is none to the origin.
        """
        if self.scheduler.is_throttled(span.claim.origin):
            return None

        async def commit() -> bool:
            limit.reschedule(None)
            return await end_first()

        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._again(span, span.claim.again(), nullcontext(), commit)
        except TimeoutError:
            return None

    @contextmanager
    def reading(self, span: RequestSpan, claim: Claim, count: Received) -> Iterator[PausableRead]:
        """Provide the read of one request; during the block its claim can be paused."""
        stall_timeout = StallTimeout(self.stall_timeout_s, span.obj.url, count, MIN_BYTES_PER_S)
        grant, prompt = partial(self._bandwidth.grant, claim), claim.priority().alone
        read = claim.work = PausableRead(stall_timeout, span.parts.size_bytes, grant, prompt=prompt)
        self._reads[claim.origin].add(read)
        try:
            yield read
        finally:
            claim.work = None
            self._reads[claim.origin].discard(read)
            if not self._reads[claim.origin]:
                del self._reads[claim.origin]
            self._bandwidth.settle(read.credit_bytes)

    def other_rates(self, origin: str, read: PausableRead) -> list[float]:
        """Return the rates of an origin's other parts in flight."""
        return [other.rate_bytes_per_s for other in self._reads[origin] - {read} if other.received_bytes]

    def observe(self, place: str, read: PausableRead) -> None:
        """Record the time of a finished read from an origin or the tier."""
        took_s = read.worked.elapsed_s
        self.counters.measures.part.of(place).observe(took_s)
        self.counters.measures.first_byte.of(place).observe(took_s if read.first_byte_s is None else read.first_byte_s)

    async def _first_of_two(self, span: RequestSpan, read: PausableRead) -> tuple[list[PartSums] | None, bool]:
        """Return the checksums of the answer that was written, and True if it is the first request's."""
        patience_s = self.hedging.patience_s(span.claim.origin, span.parts.size_bytes) if span.obj.ranges else None
        reading = self._read(span, read, None)
        if patience_s is None:
            return await reading, True
        return await race(reading, patience_s, partial(self._second, span, read, patience_s))

    async def _second(
        self, span: RequestSpan, first: PausableRead, patience_s: float, end_first: Commit
    ) -> list[PartSums] | None:
        origin = span.claim.origin
        await self._is_late(span, first, patience_s)
        if self.scheduler.is_throttled(origin) or not self.hedging.spend(origin, span.parts.count):
            return None
        claim = span.claim.again()
        return await self._again(span, claim, self.scheduler.hold(claim), end_first)

    async def _is_late(self, span: RequestSpan, first: PausableRead, patience_s: float) -> None:
        """Return once a second request is likely to bring the bytes sooner than the first."""
        origin, size_bytes = span.claim.origin, span.parts.size_bytes
        await first.worked.reaches(patience_s)
        while True:
            rates = self.other_rates(origin, first)
            due_s = self.hedging.due_s(origin, size_bytes, patience_s, first.received_bytes, rates)
            if due_s <= (elapsed_s := first.worked.elapsed_s):
                return
            await first.worked.reaches(max(due_s, LOOK_AGAIN * elapsed_s))

    async def _again(
        self, span: RequestSpan, claim: Claim, slot: AbstractAsyncContextManager[None], end_first: Commit
    ) -> list[PartSums] | None:
        """Return None if the hedged request comes to nothing: the first may still arrive, and its outcome counts."""
        first_has_ended = False

        async def commit() -> bool:
            nonlocal first_has_ended
            first_has_ended = await end_first()
            return first_has_ended

        try:
            async with slot:
                return await self._read_again(span, claim, commit)
        except OriginError:
            if first_has_ended:
                raise
        return None

    async def _read_again(self, span: RequestSpan, claim: Claim, commit: Commit) -> list[PartSums] | None:
        self.counters.hedges += 1
        sums = None
        with self.reading(span, claim, self._count) as read:
            try:
                sums = await self._read(span, read, commit)
            finally:
                self.counters.hedged_bytes += read.received_bytes if sums is None else 0
        return sums

    async def _read(self, span: RequestSpan, read: PausableRead, commit: Commit | None) -> list[PartSums] | None:
        self.counters.origin_requests += 1
        async with read.limit():
            sums = await span.origin.fetch(span.obj, span.parts, read, commit)
        self.observe(span.claim.origin, read)
        return sums

    def _count(self, received_bytes: int) -> None:
        self.counters.origin_bytes += received_bytes
