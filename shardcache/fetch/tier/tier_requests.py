"""Requests for object bodies where a cluster's tier is in front of the origin.

The tier is requested first; whatever fails there, the origin is requested next.
"""

import time
from dataclasses import replace
from functools import partial

from shardcache.errors import (
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    ShardChangedError,
)
from shardcache.fetch.limits.scheduler import Scheduler
from shardcache.fetch.race import race
from shardcache.fetch.reads import PausableRead, StalledError
from shardcache.fetch.requests import Requests, RequestSpan
from shardcache.fetch.tier.tier_watch import (
    LostRequestError,
    OwnerQuestions,
    SlowOwnerError,
    TierSpan,
    WatchedRequest,
)
from shardcache.origin.tier.tier_state import Route
from shardcache.telemetry.metrics import Counters
from shardcache.transport.between.parts import PartSums

# Lost requests of a part that are repeated; after another one, the object store is requested.
_MAX_LOSSES = 1


class TierFirst:
    """Sends each request to the tier in front of its origin, if there is one, then to the origin.

    A request to either is hedged if late, by one to the origin.
    """

    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        counters: Counters,
        stall_timeout_s: float,
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._counters = counters
        self._stall_timeout_s = stall_timeout_s

    async def fetch(self, span: RequestSpan) -> list[PartSums]:
        """Fetch bytes in a slot, and return the checksums of their parts, which are written then.

        Raises what the origin raises for the first request, and PartFileError.
        """
        counters = self._counters
        async with self._scheduler.hold(span.claim):
            tier = span.origin.tier
            if tier is None:
                return await self._requests.fetch(span, partial(counters.fetched, span.obj.url))

            count_past_tier = partial(counters.fetched_past_tier, span.obj.url)
            shared = TierSpan(
                span,
                tier,
                self._requests,
                self._scheduler,
                OwnerQuestions(span, self._stall_timeout_s),
                count_past_tier,
                self._stall_timeout_s,
            )
            sums = await _TierRequests(shared, counters).fetch()
            if sums is None:
                sums = await self._requests.fetch(span, count_past_tier)
            return sums


class _TierRequests:
    """Requests to the tier for one span, one after the other.

    They go to the parts' owner, past its cache, or to another owner.
    """

    def __init__(self, shared: TierSpan, counters: Counters) -> None:
        self._shared = shared
        self._span = shared.span
        self._tier = shared.tier
        self._requests = shared.requests
        self._scheduler = shared.scheduler
        self._questions = shared.questions
        self._counters = counters

    async def fetch(self) -> list[PartSums] | None:
        """Return the checksums of the bytes; None if the origin has to be requested.

        A part that stops short is requested once more, past the tier's cache: the file there may be
        damaged. A request that was lost is repeated once.
        """
        losses = 0
        while losses <= _MAX_LOSSES:
            route = await self._next_route()
            if route is None:
                return None
            with self._requests.reading(self._span, self._span.claim, self._count_bytes) as read:
                self._span.begun(read)
                try:
                    sums, is_first = await self._request(route, read)
                except SlowOwnerError:
                    continue  # the owner is left out by now, so that the next route avoids it
                except LostRequestError:
                    losses += 1
                    self._counters.tier_requests += 1
                    self._counters.tier_failures += 1
                    continue
                except OriginError as exn:
                    if self._is_repeatable(exn, route, read):
                        continue
                    return None
            if sums is not None:
                self._record(read, is_first=is_first)
            return sums
        return None

    async def _request(
        self,
        route: Route,
        read: PausableRead,
    ) -> tuple[list[PartSums] | None, bool]:
        """Return the checksums, and True unless the object store has sent the bytes sooner."""
        request = WatchedRequest(self._shared, route, read)
        return await race(request.send(), patience_s=0.0, second=request.watch)

    def _count_bytes(self, received_bytes: int) -> None:
        self._counters.tier_bytes += received_bytes

    def _record(self, read: PausableRead, *, is_first: bool) -> None:
        """Record that the bytes have arrived; `is_first` if the tier has sent them."""
        self._counters.tier_requests += 1
        if not is_first:
            self._counters.hedged_bytes += read.received_bytes
            return
        span = self._span
        self._tier.served(span.obj, span.parts.start)
        self._requests.observe(self._tier.address, read)
        took_s = read.reading_time.elapsed_s
        self._scheduler.took(span.claim, span.parts.size_bytes, took_s)

    async def _next_route(self) -> Route | None:
        """Return the route to the parts' owner, or to the next owner if that one is slow.

        None if both are slow, or the tier is not to be used.
        """
        direct = self._tier.route(self._span.obj, self._span.parts.start)
        slow_owners = self._tier.slow_owners
        if direct is None or not slow_owners.any(time.monotonic()):
            return direct

        for route in (direct, replace(direct, detours=True)):
            owner = await self._questions.address(route)
            if not slow_owners.has(owner, time.monotonic()):
                return route
        return None

    def _is_repeatable(self, exn: OriginError, route: Route, read: PausableRead) -> bool:
        """Record a failed request, and return whether the tier is to be requested again.

        Raises errors that are not the tier's.
        """
        # 1. nginx may close a paused connection; that is not a failure.
        is_busy = isinstance(exn, OriginBusyError)
        if self._span.claim.was_paused and isinstance(exn, OriginUnavailableError) and not is_busy:
            raise exn

        # 2. The object store is throttling: the tier passes on its answer.
        self._counters.tier_requests += 1
        if is_busy:
            raise exn

        # 3. The tier has failed.
        is_stalled = isinstance(exn, StalledError)
        self._counters.tier_failures += 1
        self._tier.failed(self._span.obj, exn.message, stalled=is_stalled)

        # 4. After some bytes, other bytes or silence, its cached file may be damaged. Then the part
        #    is requested past its cache: at once, unless that was just done or nginx was silent.
        has_changed = isinstance(exn, ShardChangedError)
        if not read.received_bytes and not is_stalled and not has_changed:
            return False
        self._tier.suspect(self._span.obj, [self._span.parts.start])
        return not route.refreshes and not is_stalled
