"""Watch over one request to the tier: its owner may have lost it, or the store may be quicker.

If several nodes request a part, nginx sends it to the later ones only once it is whole. A node that
turned to the object store because of that would make all of them slower. So the request waits as
long as the owner has the part in hand, and only a part that takes much longer than the tier's
others is requested from the store.
"""

import asyncio
import math
import time
from dataclasses import dataclass, replace
from enum import Enum, auto

from shardcache.errors import OriginError, OriginUnavailableError
from shardcache.fetch.limits.hedging import LOOK_AGAIN, MIN_STALL_SHARE
from shardcache.fetch.limits.scheduler import Scheduler
from shardcache.fetch.reads import PausableRead
from shardcache.fetch.requests import Requests, RequestSpan
from shardcache.origin.tier.tier_state import OWNER, QUESTION, Route, TierState, sums_of
from shardcache.transport.between.flow import Commit, Received
from shardcache.transport.between.messages import Answer
from shardcache.transport.between.parts import PartSums

# Status of an owner's answer if it has no request for the parts in hand.
_NOT_IN_HAND = 404
# From this one on, statuses are of this node's nginx, which cannot reach the owner.
_UNREACHABLE = 500
# An owner is slow if the object store sends the part within this share of the time that the owner
# would still take.
_MUCH_SOONER = 0.25
# So is one that sends a cached part in this many times the time in which parts usually come from
# the object store.
_SLOWNESS = 2


class SlowOwnerError(Exception):
    """The owner has been slow before, and is slow again."""


class LostRequestError(Exception):
    """Nobody has the request in hand.

    A worker of the owner's nginx has been killed or hangs, or its node is silent.
    """


class OwnerState(Enum):
    """Answer of the parts' owner to the question whether it has a request for them in hand."""

    HAS_THEM = auto()
    # It has none, or only one that is held by a worker that does not run.
    LOST_THEM = auto()
    # This node's nginx answers in its place, and has the next owner on the ring from now on.
    UNREACHABLE = auto()
    # This node's nginx does not answer either.
    SILENT = auto()


class OwnerQuestions:
    """Questions to the owner of a span's parts, by way of this node's nginx."""

    def __init__(self, span: RequestSpan, stall_timeout_s: float) -> None:
        self._span = span
        self._limit_s = QUESTION * stall_timeout_s

    async def address(self, route: Route) -> str:
        """Return the address of the node that owns the parts; empty if unknown."""
        answer = await self._ask(replace(route, question="name"))
        if answer is None:
            return ""
        return answer.headers.get(OWNER, "")

    async def state(self, route: Route) -> OwnerState:
        """Ask the owner of the parts whether it has a request for them in hand."""
        answer = await self._ask(replace(route, question="alive"))
        if answer is None:
            return OwnerState.SILENT
        if answer.status >= _UNREACHABLE:
            return OwnerState.UNREACHABLE
        if answer.status == _NOT_IN_HAND:
            return OwnerState.LOST_THEM
        return OwnerState.HAS_THEM

    async def _ask(self, route: Route) -> Answer | None:
        """Return the answer to a question; None if there is none in time."""
        span = self._span
        try:
            async with asyncio.timeout(self._limit_s):
                return await span.origin.ask_tier(route, span.obj, span.parts, None)
        except (OriginError, TimeoutError):
            return None


@dataclass(frozen=True, slots=True)
class TierSpan:
    """A span that is requested from the tier, and what all requests for it share.

    Attributes:
        count_past_tier: called with numbers of bytes that the object store sends in its place.
    """

    span: RequestSpan
    tier: TierState
    requests: Requests
    scheduler: Scheduler
    questions: OwnerQuestions
    count_past_tier: Received
    stall_timeout_s: float


class WatchedRequest:
    """One request to the tier, and the watch over it.

    Args:
        shared: what it shares with the other requests for its span.
        read: of the answer that the tier sends.
    """

    def __init__(self, shared: TierSpan, route: Route, read: PausableRead) -> None:
        span = shared.span
        self._span = span
        self._tier = shared.tier
        self._requests = shared.requests
        self._questions = shared.questions
        self._count_past_tier = shared.count_past_tier
        self._stall_timeout_s = shared.stall_timeout_s
        self._route = route
        self._read = read
        self._hedging = shared.scheduler.origin(span.claim.origin_name).hedging
        self._size_bytes = span.parts.size_bytes
        # Reading time when the owner was last asked about the request.
        self._asked_s = -math.inf
        # Reading time of the question to which the owner first answered, since bytes came last,
        # that it has no request in hand. None unless its latest answer was that, too.
        self._denied_s: float | None = None

    async def send(self) -> list[PartSums] | None:
        """Return the checksums of the bytes; None if the object's parts bypass the tier."""
        span = self._span
        async with self._read.limit():
            answer = await span.origin.ask_tier(self._route, span.obj, span.parts, self._read)
        if answer is None:
            return None

        sums = sums_of(answer, span.obj)
        if answer.headers.get("x-shardcache-tier") != "HIT":  # then the time is the object store's
            self._hedging.took(self._size_bytes, self._read.reading_time.elapsed_s)
        return sums

    async def watch(self, end_first: Commit) -> list[PartSums] | None:
        """Return the checksums of the bytes once the origin has sent them sooner.

        Runs on until the request ends. Raises, after it has ended the request,
        OriginUnavailableError if the owner is silent, LostRequestError if the owner has lost it,
        SlowOwnerError if the owner has been slow before.
        """
        while True:
            look_s = max(self._usual_s, LOOK_AGAIN * self._read.reading_time.elapsed_s)
            question_s = max(self._usual_s, self._next_question_s)
            await self._read.reading_time.reaches(min(look_s, question_s))

            left_s = self._left_s()
            is_question_due = self._read.reading_time.elapsed_s >= self._next_question_s
            if left_s is None and not self._sends_slowly and not is_question_due:
                continue

            asking = asyncio.ensure_future(self._questions.state(self._route))
            try:
                sums = await self._look(left_s, asking, end_first)
            finally:
                asking.cancel()
            if sums is not None:
                return sums

    @property
    def _usual_s(self) -> float:
        """Time in which such a part usually comes from the object store."""
        return self._hedging.usual_s(self._size_bytes, self._stall_timeout_s)

    @property
    def _next_question_s(self) -> float:
        """Reading time at which the owner is asked next, unless it sends bytes before."""
        return max(self._asked_s, self._read.last_byte_s) + QUESTION * self._stall_timeout_s

    def _left_s(self) -> float | None:
        """Return the time that the request will still take; None if not much more than usual."""
        return self._hedging.left_s(
            self._size_bytes,
            self._read.received_bytes,
            self._read.reading_time.elapsed_s,
            self._usual_s,
            self._requests.other_rates(self._span.claim.origin_name, self._read),
            self._stall_timeout_s,
        )

    async def _look(
        self,
        left_s: float | None,
        asking: asyncio.Future[OwnerState],
        end_first: Commit,
    ) -> list[PartSums] | None:
        """Request the parts from the object store if their owner is slow, then go by its answer.

        An owner that answers promptly is not slow itself: it waits for the object store. One that
        neither answers nor sends may be dead, and then the next owner on the ring fetches its
        parts, once for all nodes: the object store is not asked for them as well.

        Args:
            left_s: time that the request will still take; None if not much more than usual.
        """
        # 1. Does the owner answer promptly, or send?
        self._asked_s = self._read.reading_time.elapsed_s
        await asyncio.wait([asking], timeout=MIN_STALL_SHARE * self._stall_timeout_s)
        if not asking.done():
            if not self._sends:
                left_s = None  # it may be dead
            elif left_s is None:
                left_s = self._stall_timeout_s  # it sends, but is too slow to answer

        # 2. The object store may be sooner, 3. or the owner's answer counts.
        if left_s is not None:
            sums = await self._fetch_sooner(left_s, asking, end_first)
            if sums is not None:
                return sums
        await self._judge(await asking, end_first)
        return None

    async def _judge(self, answer: OwnerState, end_first: Commit) -> None:
        """Go on or end the request, by the owner's answer.

        Bytes show that the owner lives. An answer shows it only if it is about these parts.
        """
        if answer is OwnerState.LOST_THEM:
            await self._judge_denial(end_first)
            return

        self._denied_s = None
        if answer is OwnerState.HAS_THEM:
            if not self._read.received_bytes:
                self._read.heard()
            return

        if self._sends or not await end_first():
            return
        # This node's nginx has sent bytes, or answers now: then the next owner can be requested.
        if self._read.received_bytes or answer is OwnerState.UNREACHABLE:
            raise LostRequestError
        raise OriginUnavailableError(
            "the part's owner in the tier does not answer",
            url=self._span.obj.url,
        )

    async def _judge_denial(self, end_first: Commit) -> None:
        """Decide whether the owner has lost the request, or has just answered it.

        It has answered if bytes have come since it last said that it has none in hand.
        """
        denied_s = self._denied_s
        if denied_s is None or self._read.last_byte_s > denied_s:
            self._denied_s = self._asked_s
            if denied_s is not None and self._sends_slowly:
                await self._end_if_slow(end_first)
            return

        silent_s = self._asked_s - denied_s
        if silent_s >= QUESTION * self._stall_timeout_s and await end_first():
            raise LostRequestError

    @property
    def _sends(self) -> bool:
        """True if bytes have come since the owner was asked."""
        return self._read.last_byte_s > self._asked_s

    @property
    def _sends_slowly(self) -> bool:
        """True if the bytes came more slowly than the object store usually sends them.

        The time counts from the first of them.
        """
        read = self._read
        if read.first_byte_s is None or not read.received_bytes:
            return False
        sending_s = read.reading_time.elapsed_s - read.first_byte_s
        if sending_s < MIN_STALL_SHARE * self._stall_timeout_s:
            return False
        whole_s = sending_s * self._size_bytes / read.received_bytes
        return whole_s >= _SLOWNESS * self._usual_s

    async def _end_if_slow(self, end_first: Commit) -> None:
        """Record that the owner is slow by itself, and end the request once that is certain."""
        slow_owners = self._tier.slow_owners
        owner = await self._questions.address(self._route)
        if owner and not slow_owners.has(owner, time.monotonic()):
            slow_owners.add(owner, time.monotonic())
        if slow_owners.has(owner, time.monotonic()) and await end_first():
            raise SlowOwnerError

    async def _fetch_sooner(
        self,
        left_s: float,
        asking: asyncio.Future[OwnerState],
        end_first: Commit,
    ) -> list[PartSums] | None:
        """Return the checksums of the bytes if the object store sends them much sooner."""
        slow_owners = self._tier.slow_owners
        owner = await self._questions.address(self._route)
        if slow_owners.has(owner, time.monotonic()):
            if await end_first():
                raise SlowOwnerError
            return None

        # An owner that has not answered is more likely to be slow itself.
        is_allowed = self._hedging.spend() if asking.done() else self._hedging.tries()
        if not is_allowed:
            return None

        begun_s = time.monotonic()
        limit_s = max(_MUCH_SOONER * left_s, self._usual_s)
        sums = await self._requests.fetch_within(
            self._span,
            self._count_past_tier,
            limit_s,
            end_first,
        )
        if sums is None:
            return None

        self._hedging.took(self._size_bytes, time.monotonic() - begun_s)
        # The store has sent all of it before the owner has answered a question.
        if owner and not asking.done():
            self._hedging.won()
            slow_owners.add(owner, time.monotonic())
        return sums
