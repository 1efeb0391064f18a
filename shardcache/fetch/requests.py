"""Requests for object bodies to an origin: sent in a slot, hedged when late, given up when stalled.

The daemon has one `Requests`, and `TierFirst` sends each request to an origin by its `fetch`. A
claim asks the scheduler for a connection slot, and holds the slot while the request runs. Patience
is the time after which a request may be late. A late request is hedged: a second request is sent
for the same bytes, on another connection, and the first to bring them counts. The bytes of a second
request wait in memory until they are committed: the first request is ended, and then they are
written.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from shardcache.fetch.limits.bandwidth import Bandwidth
from shardcache.fetch.limits.hedging import LOOK_AGAIN_FACTOR
from shardcache.fetch.limits.scheduler import Scheduler
from shardcache.fetch.limits.slot_claims import Claim
from shardcache.fetch.race import race
from shardcache.fetch.reads import PausableRead
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.shared.exceptions import OriginError
from shardcache.telemetry.metrics import Counters
from shardcache.transport.between.flow import Commit, Received
from shardcache.transport.between.parts import Parts, PartSums


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Bytes fetched by one request: a part or several, or all of an object without ranges.

    Attributes:
        origin: the origin to fetch from.
        obj: the object in the version to fetch.
        parts: the parts, and the file that they are written to.
        claim: the request's claim on a connection slot.
        when_begun: called with the read of each attempt, except the reads of hedged requests.
    """

    origin: Origin
    obj: RemoteObject
    parts: Parts
    claim: Claim
    when_begun: Callable[[PausableRead], None]


class Requests:
    """Sends requests as slots, bandwidth and hedging allow, and counts received bytes.

    Args:
        scheduler: the connection slots, and each origin's limits and hedging.
        bandwidth: the bandwidth limits, which grant byte credit.
        counters: the daemon's statistics.
        stall_timeout_s: time within which enough bytes must arrive, else a request is given up.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        bandwidth: Bandwidth,
        counters: Counters,
        stall_timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._bandwidth = bandwidth
        self._counters = counters
        self._stall_timeout_s = stall_timeout_s
        self._reads: dict[PausableRead, str] = {}  # reads in flight, with their origins' names

    async def fetch(self, span: RequestSpan, count_bytes: Received) -> list[PartSums]:
        """Fetch bytes into their file, and hedge the request if it is late.

        The span's claim holds its slot. Return the checksums of the parts.

        Args:
            span: the bytes to fetch.
            count_bytes: called with each number of bytes received.

        Raises what the origin raises for the first request, and PartFileError.
        """
        hedging = self._scheduler.origin(span.claim.origin_name).hedging
        size_bytes = span.parts.size_bytes
        with self.reading(span, span.claim, count_bytes) as read:
            span.when_begun(read)
            # None means that the request is not hedged. An object without ranges never is, as a
            # second request could not fetch less than the whole object.
            patience_s: float | None = None
            if span.obj.has_ranges:
                patience_s = hedging.patience_s(size_bytes, span.parts.count)
            # The first request writes its bytes as they arrive, without a commit.
            first = self._read(span, read, commit=None)
            if patience_s is None:
                sums = await first
                is_first = True
            else:
                second = partial(self._hedge, span, count_bytes, read, patience_s)
                sums, is_first = await race(first, patience_s, second)

        took_s = read.reading_time.elapsed_s
        self._scheduler.record_time(span.claim, size_bytes, took_s)
        hedging.record_time(size_bytes, took_s, span.parts.count)
        if not is_first:
            # The second request has won, so the bytes of the first were received in vain.
            self._counters.hedged_bytes += read.received_bytes
        assert sums is not None  # only a second request that has not ended the first returns None
        return sums

    async def fetch_within(
        self,
        span: RequestSpan,
        count_bytes: Received,
        limit_s: float,
        end_first: Commit,
    ) -> list[PartSums] | None:
        """Fetch bytes that were already requested elsewhere, such as from the tier.

        Return the checksums of the parts, or None if the bytes do not arrive within `limit_s`. The
        request needs no slot of its own: the first request holds a slot of the origin, though it
        was sent elsewhere.

        Args:
            span: the bytes to fetch.
            count_bytes: called with each number of bytes received.
            limit_s: time in which the bytes have to arrive.
            end_first: ends the first request; returns False if that request has already ended.
        """
        if self._scheduler.origin(span.claim.origin_name).aimd.is_lowered:
            return None  # the origin is throttling

        async def commit() -> bool:
            limit.reschedule(None)  # the bytes have arrived, so the time limit no longer applies
            return await end_first()

        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._fetch_again(
                    span, count_bytes, span.claim.again(), nullcontext(), commit
                )
        except TimeoutError:
            return None

    @contextmanager
    def reading(
        self, span: RequestSpan, claim: Claim, count_bytes: Received
    ) -> Iterator[PausableRead]:
        """Provide the read of one request; during the block, its claim can be paused.

        Args:
            span: the bytes to fetch.
            claim: the claim under which the request runs: the span's, or that of a hedged request.
            count_bytes: called with each number of bytes received.
        """
        # The priority is that of the span's claim, as the claim of a request without a slot of its
        # own (`fetch_within`) has no group.
        priority = span.claim.group.priority
        read = PausableRead(
            span.obj.url,
            self._stall_timeout_s,
            count_bytes,
            span.parts.size_bytes,
            partial(self._bandwidth.grant, claim),
            prompt=priority.streamed,
        )
        claim.work = read
        self._reads[read] = claim.origin_name
        try:
            yield read
        finally:
            claim.work = None
            del self._reads[read]
            self._bandwidth.settle(read.credit_bytes)

    def other_rates(self, origin: str, read: PausableRead) -> list[float]:
        """Return the rates of an origin's other reads in flight, in bytes per second.

        Args:
            read: the read that is left out.
        """
        return [
            other.rate_bytes_per_s
            for other, other_origin in self._reads.items()
            if other_origin == origin and other is not read and other.received_bytes
        ]

    def observe(self, place: str, read: PausableRead) -> None:
        """Record the times of a finished read in the metrics.

        Args:
            place: name of the origin or tier that has sent the bytes.
        """
        measures = self._counters.measures
        took_s = read.reading_time.elapsed_s
        first_byte_s = took_s if read.first_byte_s is None else read.first_byte_s
        measures.part.of(place).observe(took_s)
        measures.first_byte.of(place).observe(first_byte_s)

    async def _hedge(
        self,
        span: RequestSpan,
        count_bytes: Received,
        first: PausableRead,
        patience_s: float,
        end_first: Commit,
    ) -> list[PartSums] | None:
        """Send a hedged request once it is likely to bring the bytes sooner than the first.

        Return the checksums of its parts, or None if it was not sent or came to nothing.

        Args:
            first: the read of the first request.
            patience_s: reading time after which the first request may be late.
            end_first: ends the first request; returns False if that request has already ended.
        """
        origin = self._scheduler.origin(span.claim.origin_name)
        await first.reading_time.reaches(patience_s)
        while True:
            due_s = origin.hedging.due_s(
                span.parts.size_bytes,
                patience_s,
                first.received_bytes,
                self.other_rates(origin.name, first),
            )
            elapsed_s = first.reading_time.elapsed_s
            if due_s <= elapsed_s:
                break
            await first.reading_time.reaches(max(due_s, LOOK_AGAIN_FACTOR * elapsed_s))

        # No second request is sent while the origin throttles, or if too many were hedged lately.
        if origin.aimd.is_lowered or not origin.hedging.spend(span.parts.count):
            return None
        claim = span.claim.again()
        slot = self._scheduler.hold(claim)
        return await self._fetch_again(span, count_bytes, claim, slot, end_first)

    async def _fetch_again(
        self,
        span: RequestSpan,
        count_bytes: Received,
        claim: Claim,
        slot: AbstractAsyncContextManager[None],
        end_first: Commit,
    ) -> list[PartSums] | None:
        """Send a second request; return the checksums of its parts.

        Return None if it fails while the first request still runs: the outcome of the first counts
        then.

        Args:
            slot: holds the second request's connection slot while it is entered.
            end_first: ends the first request; returns False if that request has already ended.
        """
        sums = None
        has_ended_first = False

        async def commit() -> bool:
            nonlocal has_ended_first
            has_ended_first = await end_first()
            return has_ended_first

        try:
            async with slot:
                self._counters.hedges += 1
                sums = await self._read_hedge(span, count_bytes, claim, commit)
        except OriginError:
            # Once this request has ended the first, no other outcome than this error is left.
            if has_ended_first:
                raise
        return sums

    async def _read_hedge(
        self,
        span: RequestSpan,
        count_bytes: Received,
        claim: Claim,
        commit: Commit,
    ) -> list[PartSums] | None:
        """Read for a second request; if it comes to nothing, count its bytes as hedged in vain."""
        sums = None
        with self.reading(span, claim, count_bytes) as read:
            try:
                sums = await self._read(span, read, commit)
            finally:
                if sums is None:
                    self._counters.hedged_bytes += read.received_bytes
        return sums

    async def _read(
        self,
        span: RequestSpan,
        read: PausableRead,
        commit: Commit | None,
    ) -> list[PartSums] | None:
        """Send a request and read its body; return the checksums of its parts.

        Args:
            commit: called when the whole body has arrived in memory. If it returns False, the body
                is dropped and the result is None. None to write the body as it arrives.
        """
        self._counters.count_fetched(span.obj.url, size_bytes=0, requests=1)
        async with read.stall_timeout():
            sums = await span.origin.fetch(span.obj, span.parts, read, commit)
        self.observe(span.claim.origin_name, read)
        return sums
