"""Requests for object bodies where a cluster's tier is in front of the origin.

The tier is a cache that the nodes of a cluster share. Each part has an owner, which is the node
that fetches the part from the object store for all nodes. The `Downloader` sends each request by
`TierFirst.fetch`, which requests the tier first. If the tier fails in any way, the origin is
requested next.

A span is the bytes that one request is for, which are one or more parts of an object. A request to
the tier is lost if the owner no longer works on it, although the owner has not sent the parts. A
route is the address and headers of a request to the tier. A route past the tier's cache makes the
owner fetch the part from the object store again.
"""

import time
from dataclasses import replace
from functools import partial

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
from shardcache.shared.exceptions import (
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    ShardChangedError,
)
from shardcache.telemetry.metrics import Counters
from shardcache.transport.between.parts import PartSums

# Number of times that a lost request is repeated. If it is lost again, the object store is
# requested.
_MAX_LOSSES = 1


class TierFirst:
    """Sends each request to the tier in front of its origin, if there is one, then to the origin.

    A late request to either is hedged by a request to the origin.
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
        """Wait for a connection slot, and fetch the bytes of a span into their file.

        Return the checksums of the parts. Raises what the origin raises for the first request, and
        PartFileError.
        """
        counters = self._counters
        async with self._scheduler.hold(span.claim):
            tier = span.origin.tier
            if tier is None:
                count_bytes = partial(counters.count_fetched, span.obj.url)
                return await self._requests.fetch(span, count_bytes)

            # Counts the bytes that the origin sends although there is a tier.
            count_past_tier = partial(counters.count_fetched_past_tier, span.obj.url)
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

    A request may go to the parts' owner, past the owner's cache, or to another owner.

    Args:
        shared: the span, and what all requests for it use.
        counters: the daemon's counters.
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
        """Fetch the span from the tier; return the checksums of its parts.

        Return None if the origin has to be requested. If the bytes of a part stop short, the part
        is requested once more, past the tier's cache, as the file in that cache may be damaged. A
        lost request is repeated `_MAX_LOSSES` times.
        """
        losses = 0
        while losses <= _MAX_LOSSES:
            route = await self._next_route()
            if route is None:
                return None
            with self._requests.reading(self._span, self._span.claim, self._count_bytes) as read:
                self._span.when_begun(read)
                try:
                    sums, is_from_tier = await self._request(route, read)
                except SlowOwnerError:
                    continue  # the owner is recorded as slow, so the next route avoids it
                except LostRequestError:
                    losses += 1
                    self._counters.tier_requests += 1
                    self._counters.tier_failures += 1
                    continue
                except OriginError as exn:
                    may_repeat = self._record_failure(exn, route, read)
                    if may_repeat:
                        continue
                    return None
            if sums is not None:
                self._record(read, is_from_tier=is_from_tier)
            return sums
        return None

    async def _request(
        self,
        route: Route,
        read: PausableRead,
    ) -> tuple[list[PartSums] | None, bool]:
        """Send a request to the tier, and watch it.

        Return the checksums of the parts, and True if the tier has sent the parts, or False if the
        object store has sent them sooner.
        """
        request = WatchedRequest(self._shared, route, read)
        # The watch begins together with the request, so the patience is 0. The watch decides by
        # itself when to ask the owner, and when to request the object store.
        return await race(request.send(), patience_s=0.0, second=request.watch)

    def _count_bytes(self, received_bytes: int) -> None:
        self._counters.tier_bytes += received_bytes

    def _record(self, read: PausableRead, *, is_from_tier: bool) -> None:
        """Record that the bytes have arrived.

        Args:
            read: the read of the tier's answer.
            is_from_tier: True if the tier has sent the bytes, False if the object store was sooner.
        """
        self._counters.tier_requests += 1
        if not is_from_tier:
            self._counters.hedged_bytes += read.received_bytes
            return
        span = self._span
        self._tier.served(span.obj, span.parts.start)
        self._requests.observe(self._tier.address, read)
        took_s = read.reading_time.elapsed_s
        self._scheduler.record_time(span.claim, span.parts.size_bytes, took_s)

    async def _next_route(self) -> Route | None:
        """Return the route to the parts' owner, or to the next owner if the first owner is slow.

        Return None if both owners are slow, or if the tier must not be used at present.
        """
        direct = self._tier.route(self._span.obj, self._span.parts.start)
        slow_owners = self._tier.slow_owners
        # While no owner is slow, the owner of these parts does not matter, which saves a question.
        if direct is None or not slow_owners.is_any_left_out(time.monotonic()):
            return direct

        for route in (direct, replace(direct, detours=True)):
            owner = await self._questions.address(route)
            if not slow_owners.is_left_out(owner, time.monotonic()):
                return route
        return None

    def _record_failure(self, exn: OriginError, route: Route, read: PausableRead) -> bool:
        """Record a failed request, and return True if the tier is to be requested again now.

        An error that is not the tier's fault is raised again.

        Args:
            exn: the error of the request.
            route: the route of the request.
            read: the read of the tier's answer.
        """
        # 1. nginx may close a connection while the scheduler has paused the read. Then the tier has
        #    not failed.
        is_busy = isinstance(exn, OriginBusyError)
        if self._span.claim.was_paused and isinstance(exn, OriginUnavailableError) and not is_busy:
            raise exn

        # 2. The object store throttles, and the tier has passed on its answer.
        self._counters.tier_requests += 1
        if is_busy:
            raise exn

        # 3. The tier has failed.
        is_stalled = isinstance(exn, StalledError)
        self._counters.tier_failures += 1
        self._tier.failed(self._span.obj, exn.message, stalled=is_stalled)

        # 4. If the body stopped short, belonged to another version, or stalled, the file in the
        #    tier's cache may be damaged. The part's next request then goes past the cache. The next
        #    request is sent now, unless the failed request already went past the cache or nginx was
        #    silent.
        has_changed = isinstance(exn, ShardChangedError)
        if not read.received_bytes and not is_stalled and not has_changed:
            return False
        self._tier.suspect(self._span.obj, [self._span.parts.start])
        return not route.refreshes and not is_stalled
