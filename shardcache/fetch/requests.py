"""Requests for object bodies, to the cluster's tier and then to the origin: in a slot, given up or hedged if late.

The object store may be slow, and then the tier is: nginx sends a part that another node has requested as well only when
it is whole. A node that requested it from the store for that would make both slower. So it waits as long as the owner
has the part in hand, and requests from the store only what takes much longer than the tier's other parts.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

from shardcache.errors import OriginBusyError, OriginError, OriginUnavailableError, ShardChangedError
from shardcache.fetch.estimates import LOOK_AGAIN, MIN_STALL_SHARE
from shardcache.fetch.reads import Bandwidth, PausableRead, StalledError
from shardcache.fetch.scheduler import Claim, Scheduler
from shardcache.metrics import Counters
from shardcache.origin.base import OWNER, Origin, RemoteObject, Route
from shardcache.origin.registry import QUESTION, Deferred, TierState, sums_of
from shardcache.transport.messages import Answer
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit, Received

T = TypeVar("T")

_NOT_IN_HAND = 404  # status of an owner's answer
# Then the object store is requested.
_MAX_LOSSES = 1
# An owner is slow if the object store sends the part within this share of the time that the owner would still take.
_MUCH_SOONER = 0.25
# So is one that sends a cached part in this many times the time in which parts usually come from the object store.
_SLOWNESS = 2


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Bytes fetched by one request: a part or several, or the whole of an object without ranges."""

    origin: Origin
    obj: RemoteObject
    parts: Parts
    claim: Claim
    begun: Callable[[PausableRead], None]  # called with each attempt's read, except those of hedged requests


class Requests:
    """Sends requests as slots, bandwidth and hedging allow, and counts received bytes."""

    def __init__(self, scheduler: Scheduler, bandwidth: Bandwidth, counters: Counters, stall_timeout_s: float) -> None:
        self.scheduler = scheduler
        self.counters = counters
        self.stall_timeout_s = stall_timeout_s
        self._bandwidth = bandwidth
        self._reads: dict[PausableRead, str] = {}  # in flight, with their origins

    async def fetch(self, span: RequestSpan) -> list[PartSums]:
        """Fetch bytes and return the checksums of their parts once they are written.

        The tier is requested first, if there is one; whatever fails there, the origin is requested next. A request to
        either is hedged if late, by one to the origin.

        Raises what the origin raises for the first request, and PartFileError.
        """
        async with self.scheduler.hold(span.claim):
            sums = None
            if isinstance(span.origin, Deferred) and span.origin.tier is not None:
                sums = await _TierRequests(self, span, span.origin, span.origin.tier).fetch()
            return await self._from_origin(span) if sums is None else sums

    async def _from_origin(self, span: RequestSpan) -> list[PartSums]:
        hedging, size_bytes = self.scheduler.origin(span.claim.origin).hedging, span.parts.size_bytes
        with self.reading(span, span.claim, self._counting(span)) as read:
            span.begun(read)
            patience_s = hedging.patience_s(size_bytes) if span.obj.ranges else None
            first = self._read(span, read, None)
            if patience_s is None:
                sums, is_first = await first, True
            else:
                sums, is_first = await race(first, patience_s, partial(self._second, span, read, patience_s))
        self.scheduler.took(span.claim, size_bytes, read.worked.elapsed_s)
        hedging.took(size_bytes, read.worked.elapsed_s, span.parts.count)
        if not is_first:
            self.counters.hedged_bytes += read.received_bytes
        assert sums is not None
        return sums

    async def sooner(self, span: RequestSpan, limit_s: float, end_first: Commit) -> list[PartSums] | None:
        """Return the checksums of bytes that were requested from the tier; None unless they arrive within a time.

        The request needs no slot of its own: the one to the tier, which has a slot, is none to the origin.
        """
        if self.scheduler.origin(span.claim.origin).aimd.is_lowered:
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
        grant, prompt = partial(self._bandwidth.grant, claim), claim.priority().alone
        read = PausableRead(span.obj.url, self.stall_timeout_s, count, span.parts.size_bytes, grant, prompt=prompt)
        claim.work = read
        self._reads[read] = claim.origin
        try:
            yield read
        finally:
            claim.work = None
            del self._reads[read]
            self._bandwidth.settle(read.credit_bytes)

    def other_rates(self, origin: str, read: PausableRead) -> list[float]:
        """Return the rates of an origin's other parts in flight."""
        others = (other for other, place in self._reads.items() if place == origin and other is not read)
        return [other.rate_bytes_per_s for other in others if other.received_bytes]

    def observe(self, place: str, read: PausableRead) -> None:
        """Record the time of a finished read from an origin or the tier."""
        took_s = read.worked.elapsed_s
        self.counters.measures.part.of(place).observe(took_s)
        self.counters.measures.first_byte.of(place).observe(took_s if read.first_byte_s is None else read.first_byte_s)

    async def _second(
        self, span: RequestSpan, first: PausableRead, patience_s: float, end_first: Commit
    ) -> list[PartSums] | None:
        """Send a hedged request once it is likely to bring the bytes sooner than the first."""
        origin = self.scheduler.origin(span.claim.origin)

        def due_s() -> float:
            rates = self.other_rates(origin.name, first)
            return origin.hedging.due_s(span.parts.size_bytes, patience_s, first.received_bytes, rates)

        await first.worked.reaches(patience_s)
        while (look_s := due_s()) > (elapsed_s := first.worked.elapsed_s):
            await first.worked.reaches(max(look_s, LOOK_AGAIN * elapsed_s))
        if origin.aimd.is_lowered or not origin.hedging.spend(span.parts.count):
            return None
        claim = span.claim.again()
        return await self._again(span, claim, self.scheduler.hold(claim), end_first)

    async def _again(
        self, span: RequestSpan, claim: Claim, slot: AbstractAsyncContextManager[None], end_first: Commit
    ) -> list[PartSums] | None:
        """Return None if the hedged request comes to nothing: the first may still arrive, and its outcome counts."""
        sums, first_has_ended = None, False

        async def commit() -> bool:
            nonlocal first_has_ended
            first_has_ended = await end_first()
            return first_has_ended

        try:
            async with slot:
                self.counters.hedges += 1
                with self.reading(span, claim, self._counting(span)) as read:
                    try:
                        sums = await self._read(span, read, commit)
                    finally:
                        self.counters.hedged_bytes += read.received_bytes if sums is None else 0
        except OriginError:
            if first_has_ended:
                raise
        return sums

    def _counting(self, span: RequestSpan) -> Received:
        """Return the function that counts bytes from the origin."""
        is_tiered = isinstance(span.origin, Deferred) and span.origin.tier is not None
        counted = self.counters.fetched_past_tier if is_tiered else self.counters.fetched
        return partial(counted, span.obj.url)

    async def _read(self, span: RequestSpan, read: PausableRead, commit: Commit | None) -> list[PartSums] | None:
        self.counters.fetched(span.obj.url, 0, 1)
        async with read.limit():
            sums = await span.origin.fetch(span.obj, span.parts, read, commit)
        self.observe(span.claim.origin, read)
        return sums


async def race(
    first: Coroutine[Any, Any, T],
    patience_s: float,
    second: Callable[[Callable[[], Awaitable[bool]]], Coroutine[Any, Any, T]],
) -> tuple[T, bool]:
    """Run `first`, and `second` as well after `patience_s`, until one is done; the other has ended when this returns.

    Args:
        second: called with a function that cancels `first` and returns whether it could; only after that may `second`
            do what must not be done twice. If it returns without having cancelled `first`, `first` goes on.

    Returns the result, and True if it is that of `first`. Raises what either raises, after cancelling the other.
    """
    try:
        async with asyncio.TaskGroup() as group:
            leader = group.create_task(first)

            async def end_leader() -> bool:
                leader.cancel()
                await asyncio.wait([leader])
                return leader.cancelled()

            await asyncio.wait([leader], timeout=patience_s)
            if not leader.done():
                spare = group.create_task(second(end_leader))
                await asyncio.wait([leader])
                if not leader.cancelled():
                    spare.cancel()
    except BaseExceptionGroup as failures:
        cause = failures.exceptions[0]
        raise cause from cause.__cause__
    return (spare.result(), False) if leader.cancelled() else (leader.result(), True)


class _SlowOwnerError(Exception):
    """The owner has been slow before, and is slow again."""


class _LostRequestError(Exception):
    """Nobody has the request in hand: a worker of the owner's nginx has been killed or hangs, or its node is silent."""


class _Owner(Enum):
    """Answer of the parts' owner to the question whether it has a request for them in hand."""

    HAS_THEM = auto()
    LOST_THEM = auto()  # it has none, or only such that a worker holds which does not run
    UNREACHABLE = auto()  # this node's nginx answers in its place, and has the next owner on the ring from now on
    SILENT = auto()  # this node's nginx does not answer either


@dataclass(eq=False, repr=False)
class _TierRequests:
    """Requests to the tier for one span, one after the other: by the owner, past its cache, or by another owner."""

    _requests: Requests
    _span: RequestSpan
    _origin: Deferred
    _tier: TierState
    # of the request in flight
    _route: Route = field(init=False)
    _read: PausableRead = field(init=False)
    _asked_s: float = field(init=False)  # its reading time when its owner was last asked about it
    _denied_s: float | None = field(init=False)  # that of the last answer, if it was that there is none in hand

    def __post_init__(self) -> None:
        requests, span = self._requests, self._span
        self._hedging, self._counters = requests.scheduler.origin(span.claim.origin).hedging, requests.counters
        self._stall_timeout_s, self._size_bytes = requests.stall_timeout_s, span.parts.size_bytes

    async def fetch(self) -> list[PartSums] | None:
        """Return the checksums of the bytes; None if the origin has to be requested.

        A part that stops short is requested once more, past the tier's cache: the file there may be damaged. A request
        that was lost is repeated once.
        """
        losses = 0
        while losses <= _MAX_LOSSES and (route := await self._next_route()) is not None:
            self._route, self._asked_s, self._denied_s = route, -math.inf, None
            with self._requests.reading(self._span, self._span.claim, self._count) as self._read:
                self._span.begun(self._read)
                try:
                    sums, is_first = await race(self._ask(), 0.0, self._watch)
                except _SlowOwnerError:
                    continue
                except _LostRequestError:
                    losses += 1
                    self._counters.tier_requests += 1
                    self._counters.tier_failures += 1
                    continue
                except OriginError as exn:
                    if self._repeats(exn):
                        continue
                    return None
            if sums is None:
                return None
            self._counters.tier_requests += 1
            if is_first:
                self._tier.served(self._span.obj, self._span.parts.start)
                self._requests.observe(self._tier.address, self._read)
                self._requests.scheduler.took(self._span.claim, self._size_bytes, self._read.worked.elapsed_s)
            else:
                self._counters.hedged_bytes += self._read.received_bytes
            return sums
        return None

    async def _next_route(self) -> Route | None:
        """Return the way to request the parts, by another owner if the first is left out."""
        route = self._tier.route(self._span.obj, self._span.parts.start)
        if route is None or not self._tier.slow_owners.any(time.monotonic()):
            return route
        for way in (route, replace(route, detours=True)):
            if not self._is_slow(await self._owner(way)):
                return way
        return None

    async def _ask(self) -> list[PartSums] | None:
        """Return None if the object's parts bypass the tier."""
        async with self._read.limit():
            answer = await self._origin.ask_tier(self._route, self._span.obj, self._span.parts, self._read)
        if answer is None:
            return None
        sums = sums_of(answer, self._span.obj)
        if answer.headers.get("x-shardcache-tier") != "HIT":  # then the time is the object store's
            self._hedging.took(self._size_bytes, self._read.worked.elapsed_s)
        return sums

    def _repeats(self, exn: OriginError) -> bool:
        """Record a failed request, and return whether the tier is requested again. Raises errors that are not its."""
        is_busy, is_stalled = isinstance(exn, OriginBusyError), isinstance(exn, StalledError)
        if self._span.claim.paused and isinstance(exn, OriginUnavailableError) and not is_busy:
            raise exn  # nginx may close a paused connection; that is not a failure
        self._counters.tier_requests += 1
        if is_busy:  # the object store's answer
            raise exn
        self._counters.tier_failures += 1
        self._tier.failed(self._span.obj, exn.message, stalled=is_stalled)
        if not (self._read.received_bytes or is_stalled or isinstance(exn, ShardChangedError)):
            return False
        self._tier.suspect(self._span.obj, [self._span.parts.start])
        return not (self._route.refreshes or is_stalled)

    async def _owner(self, route: Route) -> str:
        """Return the address of the node that owns the parts; empty if unknown."""
        answer = await self._question(replace(route, question="name"))
        return "" if answer is None else answer.headers.get(OWNER, "")

    def _is_slow(self, owner: str) -> bool:
        return self._tier.slow_owners.has(owner, time.monotonic())

    async def _ask_owner(self) -> _Owner:
        """Ask the owner of the parts whether it has a request for them in hand."""
        answer = await self._question(replace(self._route, question="alive"))
        if answer is None:
            return _Owner.SILENT
        if answer.status >= 500:
            return _Owner.UNREACHABLE
        return _Owner.LOST_THEM if answer.status == _NOT_IN_HAND else _Owner.HAS_THEM

    async def _question(self, route: Route) -> Answer | None:
        """Return the answer to a question about the parts' owner; None if there is none in time."""
        try:
            async with asyncio.timeout(QUESTION * self._stall_timeout_s):
                return await self._origin.ask_tier(route, self._span.obj, self._span.parts, None)
        except (OriginError, TimeoutError):
            return None

    def _count(self, received_bytes: int) -> None:
        self._counters.tier_bytes += received_bytes

    # the watch over one request: whether its owner has it in hand, and whether the object store would be quicker

    async def _watch(self, end_first: Commit) -> list[PartSums] | None:
        """Return the checksums of the bytes once the origin has sent them sooner; run on until the request ends.

        Raises, after it has ended the request, OriginUnavailableError if the owner is silent, _LostRequestError if the
        owner has lost it, _SlowOwnerError if the owner has been slow before.
        """
        while True:
            look_s = max(self._usual_s, LOOK_AGAIN * self._read.worked.elapsed_s)
            await self._read.worked.reaches(min(look_s, max(self._usual_s, self._next_question_s)))
            left_s = self._left_s()
            is_due = self._sends_slowly or self._read.worked.elapsed_s >= self._next_question_s
            if left_s is None and not is_due:
                continue
            asking = asyncio.ensure_future(self._ask_owner())
            try:
                if (sums := await self._look(left_s, asking, end_first)) is not None:
                    return sums
            finally:
                asking.cancel()

    @property
    def _usual_s(self) -> float:
        return self._hedging.usual_s(self._size_bytes, self._stall_timeout_s)

    @property
    def _next_question_s(self) -> float:
        return max(self._asked_s, self._read.last_byte_s) + QUESTION * self._stall_timeout_s

    def _left_s(self) -> float | None:
        """Return the time that the request will still take, if that is much longer than usual; else None."""
        read, rates = self._read, self._requests.other_rates(self._span.claim.origin, self._read)
        return self._hedging.left_s(
            self._size_bytes, read.received_bytes, read.worked.elapsed_s, self._usual_s, rates, self._stall_timeout_s
        )

    async def _look(
        self, left_s: float | None, asking: asyncio.Future[_Owner], end_first: Commit
    ) -> list[PartSums] | None:
        """Request the parts from the object store if their owner is slow, then go by its answer.

        An owner that answers promptly is not slow itself: it waits for the object store. One that neither answers nor
        sends may be dead, and then the next owner on the ring fetches its parts, once for all nodes: the object store
        is not asked for them as well.
        """
        self._asked_s = self._read.worked.elapsed_s
        await asyncio.wait([asking], timeout=MIN_STALL_SHARE * self._stall_timeout_s)
        if not asking.done():
            left_s = self._stall_timeout_s if left_s is None else left_s
            if not self._sends:
                left_s = None
        if left_s is not None and (sums := await self._sooner(left_s, asking, end_first)) is not None:
            return sums
        await self._judge(await asking, end_first)
        return None

    async def _judge(self, answer: _Owner, end_first: Commit) -> None:
        """Go on or end the request: bytes are a sign of life, and an answer only if it is about these parts."""
        if answer is _Owner.LOST_THEM:
            await self._judge_denial(end_first)
            return
        self._denied_s = None
        if answer is _Owner.HAS_THEM:
            if not self._read.received_bytes:
                self._read.heard()
        elif not self._sends and await end_first():
            if self._read.received_bytes or answer is _Owner.UNREACHABLE:
                raise _LostRequestError
            url = self._span.obj.url
            raise OriginUnavailableError("the part's owner in the tier does not answer", url=url)

    async def _judge_denial(self, end_first: Commit) -> None:
        """The owner has answered the request, or has lost it: bytes that came since the last denial tell which."""
        denied_s = self._denied_s
        if denied_s is None or self._read.last_byte_s > denied_s:
            self._denied_s = self._asked_s
            if denied_s is not None and self._sends_slowly:
                await self._leave_out(end_first)
        elif self._asked_s - denied_s >= QUESTION * self._stall_timeout_s and await end_first():
            raise _LostRequestError

    @property
    def _sends(self) -> bool:
        """True if bytes have come since the owner was asked."""
        return self._read.last_byte_s > self._asked_s

    @property
    def _sends_slowly(self) -> bool:
        """True if the bytes, once they came, came more slowly than the object store usually sends them."""
        read = self._read
        if read.first_byte_s is None or not read.received_bytes:
            return False
        sending_s = read.worked.elapsed_s - read.first_byte_s
        if sending_s < MIN_STALL_SHARE * self._stall_timeout_s:
            return False
        return sending_s * self._size_bytes / read.received_bytes >= _SLOWNESS * self._usual_s

    async def _leave_out(self, end_first: Commit) -> None:
        """Record that the owner is slow by itself, and end the request once that is certain."""
        owner = await self._owner(self._route)
        if owner and not self._is_slow(owner):
            self._tier.slow_owners.add(owner, time.monotonic())
        if self._is_slow(owner) and await end_first():
            raise _SlowOwnerError

    async def _sooner(self, left_s: float, asking: asyncio.Future[_Owner], end_first: Commit) -> list[PartSums] | None:
        owner = await self._owner(self._route)
        if self._is_slow(owner):
            if await end_first():
                raise _SlowOwnerError
            return None
        if not (self._hedging.spend() if asking.done() else self._hedging.tries()):
            return None
        asked_s = time.monotonic()
        limit_s = max(_MUCH_SOONER * left_s, self._usual_s)
        sums = await self._requests.sooner(self._span, limit_s, end_first)
        if sums is not None:
            self._hedging.took(self._size_bytes, time.monotonic() - asked_s)
            # The store has sent all of it before the owner has answered a question.
            if owner and not asking.done():
                self._hedging.won()
                self._tier.slow_owners.add(owner, time.monotonic())
        return sums
