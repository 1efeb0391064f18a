"""Watch over one request to the tier: the owner may have lost it, or the store may be quicker.

The tier is a cache that the nodes of a cluster share, with an nginx on each node. Each part has an
owner, which is the node that fetches the part from the object store for all nodes. A daemon sends
its request to its own node's nginx, which passes the request on to the owner.

The owner has a request in hand while its nginx is working on that request or on another request for
the same part. The daemon can ask the owner a question: does the owner have a request for the part
in hand? A denial is the answer no. After the part has been sent, a denial is normal. If the part
has not been sent, a denial means that the owner has lost the request.

If several nodes request a part, the first node gets its bytes as they arrive from the object store.
The owner's nginx sends the part to the other nodes only once the part is complete, so their
requests are silent for a while. If such a node turned to the object store, the store would have to
send the same part again. That would slow down the store's answers to the tier, and so the tier
itself. So a request waits as long as the owner has it in hand. The part is requested from the store
only if it takes much longer than the other parts, or if its owner is slow itself.

Times are reading times, unless a name or comment says otherwise. The reading time of a request is
the time for which the daemon was ready to receive bytes. It stands still while the scheduler pauses
the read, so a pause does not make the owner look slow.

The questions to slow owners pay off. With an owner whose link had a tenth of the store's bandwidth,
two nodes fetched a dataset in 21 s, and in 60 s if slow owners were not asked and left out. If the
tier had cached all parts, the two times were 12 s and 65 s.

`_TierRequests` runs `send` and `watch` of a `WatchedRequest` as a race: `watch` asks the owner
questions, and may request the part from the object store.
"""

import asyncio
import math
import time
from dataclasses import dataclass, replace
from enum import Enum, auto

from shardcache.fetch.limits.hedging import LOOK_AGAIN_FACTOR, PROMPT_STALL_SHARE
from shardcache.fetch.limits.scheduler import Scheduler
from shardcache.fetch.reads import PausableRead
from shardcache.fetch.requests import Requests, RequestSpan
from shardcache.origin.tier.tier_state import (
    OWNER_HEADER,
    QUESTION_STALL_SHARE,
    Question,
    Route,
    TierState,
    sums_of,
)
from shardcache.shared.exceptions import OriginError, OriginUnavailableError
from shardcache.transport.between.flow import Commit, Received
from shardcache.transport.between.messages import Answer
from shardcache.transport.between.parts import PartSums

# Status of a denial: the owner answers that it has no request for the parts in hand.
_NOT_IN_HAND = 404
# A status of this number or more comes from this node's own nginx, which cannot reach the owner.
_UNREACHABLE = 500
# An owner is slow if the object store sends the part within this share of the time that the owner
# would still take.
_MUCH_SOONER = 0.25
# An owner is also slow if it takes this many times as long for a cached part as the object store
# usually takes for a part.
_SLOWNESS = 2


class SlowOwnerError(Exception):
    """The owner has been slow repeatedly, so the request to it was ended."""


class LostRequestError(Exception):
    """No node has the request in hand.

    A worker process of the owner's nginx was killed or hangs, or the owner's node is silent.
    """


class OwnerState(Enum):
    """Answer to the question whether the owner has a request for the parts in hand."""

    # The owner has such a request in hand.
    HAS_THEM = auto()
    # The owner has none, or only one whose nginx worker does not run.
    LOST_THEM = auto()
    # This node's nginx answers in place of the owner, which it cannot reach. From now on, it sends
    # requests for the parts to the next owner on the ring of nodes.
    UNREACHABLE = auto()
    # Neither the owner nor this node's nginx answers in time.
    SILENT = auto()


class OwnerQuestions:
    """Questions to the owner of a span's parts, which are sent through this node's nginx.

    Args:
        span: the span whose parts the questions are about.
        stall_timeout_s: time after which a silent request is given up. An answer has to come within
            a share of this time, `QUESTION_STALL_SHARE`.
    """

    def __init__(self, span: RequestSpan, stall_timeout_s: float) -> None:
        self._span = span
        self._limit_s = QUESTION_STALL_SHARE * stall_timeout_s

    async def address(self, route: Route) -> str:
        """Return the address of the node that owns the parts; "" if no answer comes.

        Args:
            route: the route of the request for the parts.
        """
        answer = await self._ask(replace(route, question=Question.OWNER))
        if answer is None:
            return ""
        return answer.headers.get(OWNER_HEADER, "")

    async def state(self, route: Route) -> OwnerState:
        """Ask the owner of the parts whether it has a request for them in hand.

        Args:
            route: the route of the request for the parts.
        """
        answer = await self._ask(replace(route, question=Question.IS_ALIVE))
        if answer is None:
            return OwnerState.SILENT
        if answer.status >= _UNREACHABLE:
            return OwnerState.UNREACHABLE
        if answer.status == _NOT_IN_HAND:
            return OwnerState.LOST_THEM
        return OwnerState.HAS_THEM

    async def _ask(self, route: Route) -> Answer | None:
        """Return the answer to a question; None if no answer comes in time.

        Args:
            route: a route with a question, which is sent in place of a request for the parts.
        """
        span = self._span
        try:
            async with asyncio.timeout(self._limit_s):
                # The answer to a question has no body, so there is no read of a body (None).
                return await span.origin.ask_tier(route, span.obj, span.parts, None)
        except (OriginError, TimeoutError):
            return None


@dataclass(frozen=True, slots=True)
class TierSpan:
    """A span that is requested from the tier, and what all requests for it use.

    Attributes:
        span: the bytes to fetch.
        tier: state of the tier.
        requests: sends requests to the object store.
        scheduler: has the state of the origin behind the tier.
        questions: questions to the owner of the parts.
        count_past_tier: called with each number of bytes that the object store sends in place of
            the tier.
        stall_timeout_s: time after which a silent request is given up.
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
        shared: the span, and what all requests for it use.
        route: address and headers of the request.
        read: the read of the tier's answer.
    """

    def __init__(self, shared: TierSpan, route: Route, read: PausableRead) -> None:
        span = shared.span
        self._span = span
        self._tier = shared.tier
        self._requests = shared.requests
        self._questions = shared.questions
        self._count_past_tier = shared.count_past_tier
        self._stall_timeout_s = shared.stall_timeout_s
        # Reading time without bytes or questions after which the owner is asked a question.
        self._max_silence_s = QUESTION_STALL_SHARE * shared.stall_timeout_s
        self._route = route
        self._read = read
        self._hedging = shared.scheduler.origin(span.claim.origin_name).hedging
        self._size_bytes = span.parts.size_bytes
        # Reading time of the latest question to the owner; minus infinity before the first one.
        self._asked_s = -math.inf
        # Reading time of the question with which the present run of denials began; None if the
        # owner's latest answer was not a denial. The first denial after bytes begins a new run.
        self._denied_since_s: float | None = None

    async def send(self) -> list[PartSums] | None:
        """Send the request, and return the checksums of the parts.

        Return None if the tier does not serve this object, which has to come from the origin then.
        """
        span = self._span
        async with self._read.stall_timeout():
            answer = await span.origin.ask_tier(self._route, span.obj, span.parts, self._read)
        if answer is None:
            return None

        sums = sums_of(answer, span.obj)
        # A part that was not in the tier's cache ("HIT") has come from the object store. So its
        # time counts among the times that parts take from the origin.
        if answer.headers.get("x-shardcache-tier") != "HIT":
            self._hedging.record_time(self._size_bytes, self._read.reading_time.elapsed_s)
        return sums

    async def watch(self, end_first: Commit) -> list[PartSums] | None:
        """Watch the request; return the checksums of the parts if the origin sends them sooner.

        The watch runs until the request ends, and is cancelled then. The watch ends the request
        itself before it raises an error. Raises OriginUnavailableError if the owner is silent,
        LostRequestError if the owner has lost the request, SlowOwnerError if the owner has been
        slow repeatedly.

        Args:
            end_first: ends the request to the tier; returns False if that has already ended.
        """
        while True:
            # Two times are compared, and the earlier one ends the pause between two looks:
            # - `look_s`: the part may be late. After each look, the request has to take a tenth
            #   longer (`LOOK_AGAIN_FACTOR`) before the next look.
            # - `question_s`: no bytes have come, and no question has been asked, for a while.
            look_s = max(self._usual_s, LOOK_AGAIN_FACTOR * self._read.reading_time.elapsed_s)
            question_s = max(self._usual_s, self._next_question_s)
            await self._read.reading_time.reaches(min(look_s, question_s))

            # The owner is asked for any of three reasons: the part is late; the part's bytes come
            # slowly; or no bytes have come, and no question has been asked, for a while.
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
        """Time in which a part of this size usually comes from the object store."""
        return self._hedging.usual_s(self._size_bytes, self._stall_timeout_s)

    @property
    def _next_question_s(self) -> float:
        """Reading time at which the owner is asked next, unless bytes come before that."""
        return max(self._asked_s, self._read.last_byte_s) + self._max_silence_s

    def _left_s(self) -> float | None:
        """Return the time that the request will still take; None if the part is not late."""
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
        """Request the parts from the object store if they are late, then judge the owner's answer.

        An owner that answers promptly is not slow itself: it is waiting for the object store. An
        owner that neither answers nor sends bytes may be dead. The next owner on the ring of nodes
        then fetches the dead owner's parts, once for all nodes. So this method does not request
        them from the object store.

        Return the checksums of the parts if the object store has sent them, otherwise None.

        Args:
            left_s: time that the request will still take; None if the part is not late.
            asking: brings the owner's answer.
            end_first: ends the request to the tier; returns False if that has already ended.
        """
        # 1. Wait a little for the owner's answer. Without a prompt answer, the bytes that have come
        #    since the question decide.
        self._asked_s = self._read.reading_time.elapsed_s
        await asyncio.wait([asking], timeout=PROMPT_STALL_SHARE * self._stall_timeout_s)
        if not asking.done():
            if not self._has_sent:
                left_s = None  # the owner may be dead
            elif left_s is None:
                left_s = self._stall_timeout_s  # the owner sends bytes, but is too slow to answer

        # 2. The object store may send the parts sooner.
        if left_s is not None:
            sums = await self._fetch_sooner(left_s, asking, end_first)
            if sums is not None:
                return sums
        # 3. The object store has not sent the parts sooner, so the owner's answer counts.
        await self._judge(await asking, end_first)
        return None

    async def _judge(self, answer: OwnerState, end_first: Commit) -> None:
        """Let the request go on, or end it, by the owner's answer.

        Bytes always show that the owner is alive. An answer shows it only if the owner has a
        request for these parts in hand.
        """
        if answer is OwnerState.LOST_THEM:
            await self._judge_denial(end_first)
            return

        self._denied_since_s = None
        if answer is OwnerState.HAS_THEM:
            # The owner is waiting for the object store. So the request must not count as stalled
            # before the first byte has come. After that byte, the stall time-out applies as usual.
            if not self._read.received_bytes:
                self._read.heard()
            return

        # The owner is unreachable or silent. The request goes on if bytes have come nevertheless.
        if self._has_sent:
            return
        is_ended = await end_first()
        if not is_ended:
            return  # the request had already ended by itself
        # If this node's nginx has sent bytes before, or has given the answer itself, then this
        # nginx is alive, and can pass a new request on to the next owner (`LostRequestError`).
        # Otherwise this nginx may itself be dead, so the tier counts as unavailable.
        if self._read.received_bytes or answer is OwnerState.UNREACHABLE:
            raise LostRequestError
        raise OriginUnavailableError(
            "the part's owner in the tier does not answer",
            url=self._span.obj.url,
        )

    async def _judge_denial(self, end_first: Commit) -> None:
        """Decide whether an owner that has denied the request has lost or has answered it.

        An owner that has sent the part has no request in hand any more, though the last bytes may
        still be on their way. So the request counts as lost only if the owner's denials go on for
        some time, and no bytes come in that time.
        """
        denied_since_s = self._denied_since_s
        # 1. This is the first denial. It proves nothing yet, as the question may have crossed with
        #    the request, or with the request's last bytes.
        # 2. There was a denial before, and bytes have come since then. So the owner has sent the
        #    part, and the bytes are on their way. If these bytes come slowly, the cause is the
        #    owner or its link, as the owner no longer waits for the object store.
        if denied_since_s is None or self._read.last_byte_s > denied_since_s:
            self._denied_since_s = self._asked_s
            if denied_since_s is not None and self._sends_slowly:
                await self._end_if_slow(end_first)
            return

        # 3. No bytes have come since the run of denials began.
        silent_s = self._asked_s - denied_since_s
        if silent_s >= self._max_silence_s and await end_first():
            raise LostRequestError

    @property
    def _has_sent(self) -> bool:
        """True if bytes have come since the owner was asked."""
        return self._read.last_byte_s > self._asked_s

    @property
    def _sends_slowly(self) -> bool:
        """True if the bytes come much more slowly than the object store usually sends them.

        The time counts from the first byte, since the owner may have waited for the object store
        before that. Right after the first byte, the result is False, as the rate is not known yet.
        """
        read = self._read
        if read.first_byte_s is None or not read.received_bytes:
            return False
        sending_s = read.reading_time.elapsed_s - read.first_byte_s
        if sending_s < PROMPT_STALL_SHARE * self._stall_timeout_s:
            return False
        whole_s = sending_s * self._size_bytes / read.received_bytes
        return whole_s >= _SLOWNESS * self._usual_s

    async def _end_if_slow(self, end_first: Commit) -> None:
        """Record that the owner is slow by itself, and end the request once that is certain.

        An owner is left out only once two cases of slowness were recorded within a minute. So the
        request goes on after the first case, and is ended after the second. Raises SlowOwnerError
        if the request was ended.
        """
        slow_owners = self._tier.slow_owners
        owner = await self._questions.address(self._route)
        if owner and not slow_owners.is_left_out(owner, time.monotonic()):
            slow_owners.record(owner, time.monotonic())
        if slow_owners.is_left_out(owner, time.monotonic()) and await end_first():
            raise SlowOwnerError

    async def _fetch_sooner(
        self,
        left_s: float,
        asking: asyncio.Future[OwnerState],
        end_first: Commit,
    ) -> list[PartSums] | None:
        """Return the checksums of the parts if the object store sends them much sooner.

        Return None if the object store does not, or if no second request is allowed.

        Args:
            left_s: time that the request to the tier will still take.
            asking: brings the owner's answer.
            end_first: ends the request to the tier; returns False if that has already ended.

        Raises SlowOwnerError if the owner has been slow repeatedly.
        """
        slow_owners = self._tier.slow_owners
        owner = await self._questions.address(self._route)
        if slow_owners.is_left_out(owner, time.monotonic()):
            if await end_first():
                raise SlowOwnerError
            return None

        # To hedge means to send a second request, to the object store. It takes credit, which each
        # part that arrives adds to. A few hedges are free of credit: these are for an owner that
        # has not answered, as it is more likely to be slow itself.
        if asking.done():
            is_allowed = self._hedging.spend()
        else:
            is_allowed = self._hedging.spend_free_first()
        if not is_allowed:
            return None

        # The store has to send the parts within a share of the time that the tier would still take.
        # But the store always gets the time that it usually takes.
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

        self._hedging.record_time(self._size_bytes, time.monotonic() - begun_s)
        # The object store has sent the parts before the owner has answered a question, so the owner
        # is slow.
        if owner and not asking.done():
            self._hedging.regain_free()
            slow_owners.record(owner, time.monotonic())
        return sums
