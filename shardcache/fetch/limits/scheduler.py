"""Scheduler for the node's connections: grants them by priority, preempts the least urgent.

Each request for parts holds a connection slot while it runs. A claim asks for a slot; it is queued
until the scheduler grants the slot, and paused while its slot is taken away. Claims of one download
on one origin are a group, and `Rank` is the order in which claims are served. A download is
streamed if a reader reads its shard as it arrives, so that the order of its parts matters more than
throughput. A link is the connection to an origin as a whole; it is saturated if more connections
would not make it faster, and cleared if requests that no reader waits for are paused on it.

A download has no object of its own here: its `AskPriority` function identifies it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from shardcache.fetch.limits.hedging import HEDGED_SHARE, Hedging
from shardcache.fetch.limits.origin_states import Aimd, Limit, OriginLoad, OriginState
from shardcache.fetch.limits.slot_claims import (
    AskPriority,
    Claim,
    ClaimGroup,
    Ranking,
    RoundRobin,
)
from shardcache.fetch.stopwatch import now_s
from shardcache.shared.exceptions import OriginBusyError

# Number of origins whose state is remembered: the origins in use, and the ones used last.
_MAX_ORIGINS = 64
# Time for which a streamed download has precedence after each of its parts. If its parts do not
# arrive, it holds up the other downloads no longer than this.
_PRECEDENCE_S = 1.0
# Minimum time between two rounds of asking all downloads for their priorities. Priorities change
# with every step of a reader, but asking at each part would take longer than some parts do.
ASK_AGAIN_S = 0.02


class Scheduler:
    """Fixed number of connection slots, which are granted to claims by their rank.

    A claim that a reader waits for preempts a claim that no reader waits for. The preempted claim
    pauses, and queues for another slot with its own priority. At most as many claims are paused as
    there are slots, so at most twice as many claims as slots occupy memory.

    While a download is streamed, only the most urgent claims run on its origin, and no more of them
    than saturate the link: further claims would delay each of the download's parts. As long as the
    link is not measured, the download fetches one part at a time; apart from these parts, only
    claims that other readers wait for may begin.

    Args:
        slots: number of slots for all origins together; also the initial limit of each origin.
        hedged_share: maximum share of an origin's parts whose requests may be hedged.

    Attributes:
        pauses: number of times that a claim was paused, to be preempted or to clear a link.
    """

    def __init__(self, slots: int, hedged_share: float = HEDGED_SHARE) -> None:
        self._slots = slots
        self._hedged_share = hedged_share
        self._groups: dict[tuple[AskPriority, str], ClaimGroup] = {}
        self._origins: dict[str, OriginState] = {}  # the origin used last is at the end
        # These dictionaries are used as sets that keep their order.
        self._holding: dict[Claim, None] = {}  # claims that hold a slot
        self._paused: dict[Claim, None] = {}  # paused claims, which are also queued again
        self._round_robin = RoundRobin()
        self._ranking = Ranking(self._round_robin)
        # The time until which each streamed download has precedence.
        self._precedence_until_s: WeakKeyDictionary[AskPriority, float] = WeakKeyDictionary()
        self._ask_due_s = 0.0  # time from which all priorities are to be asked for again
        self.pauses = 0

    def __repr__(self) -> str:
        queued = sum(len(group.queued) for group in self._groups.values())
        return f"<Scheduler {len(self._holding)} of {self._slots} held, {queued} queued>"

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Wait for a slot, and hold it during the block.

        The claim may be preempted while `claim.work` is set. A block that ends with OriginBusyError
        lowers the origin's limit on concurrent requests; a block that succeeds may raise it.
        """
        self._enter(claim)
        aimd = claim.group.origin.aimd
        try:
            self._reassign()
            await claim.granted
            yield
            aimd.succeeded(claim.generation)
        except OriginBusyError:
            aimd.refused(claim.generation)
            raise
        finally:
            self._leave(claim)
            self._reassign()

    def reconsider(self) -> None:
        """Ask all downloads for their priorities, and reassign the slots.

        A download that has become more urgent should call this. Without a call, the same happens
        when a claim comes or goes, if `ASK_AGAIN_S` has passed.
        """
        self._ask_due_s = 0.0
        self._reassign()

    def record_time(self, claim: Claim, size_bytes: int, time_s: float) -> None:
        """Record the size and read time of a part that arrived while `claim` held its slot."""
        origin = self.origin(claim.origin_name)
        # The concurrency at the beginning and at the end of the read are averaged.
        mean_concurrency = (claim.concurrency + origin.held) / 2
        origin.link.record_time(size_bytes, time_s, mean_concurrency)

        # A streamed download keeps its precedence as long as its parts arrive.
        download = claim.ask_priority
        if download in self._precedence_until_s:
            self._prolong_precedence(download)

    def share(self, origin: OriginState) -> int:
        """Return how many connections to an origin each of its present downloads can have."""
        downloads = sum(group.origin is origin for group in self._groups.values())
        connections = origin.usable // max(1, downloads)
        return max(1, connections)

    def origin(self, name: str) -> OriginState:
        """Return the state of an origin, which is created for a new name.

        The origin counts as the one used last. Unused origins beyond `_MAX_ORIGINS` are forgotten.
        """
        origin = self._origins.pop(name, None)
        if origin is None:
            origin = OriginState(name, Aimd(self._slots), Hedging(self._hedged_share))
        self._origins[name] = origin

        excess = len(self._origins) - _MAX_ORIGINS
        if excess > 0:
            self._forget(excess, origin)
        return origin

    def _forget(self, excess: int, newest: OriginState) -> None:
        """Forget unused origins.

        Args:
            excess: maximum number of origins to forget.
            newest: an origin that is about to be used, and must not be forgotten.
        """
        used = {newest, *(group.origin for group in self._groups.values())}
        unused = [origin for origin in self._origins.values() if origin not in used]
        for origin in unused[:excess]:
            del self._origins[origin.name]

    def loads(self) -> list[OriginLoad]:
        """Return the load on each of the origins used last."""
        latest = list(self._origins.values())[-_MAX_ORIGINS:]
        return [origin.load for origin in latest]

    def limits(self, name: str | None = None) -> Iterator[Limit]:
        """Yield the limit of each origin that throttles, then the limit on all connections.

        A limit holds if claims wait because of it.

        Args:
            name: name of the only origin whose limit is wanted; None for all origins.
        """
        awaited_origins = [group.origin for group in self._groups.values() if group.queued]
        for origin in self._origins.values():
            is_wanted = name is None or name == origin.name
            if is_wanted and origin.aimd.is_lowered:
                limit = origin.aimd.limit
                text = f"{origin.name} throttles to {limit} of {self._slots} connections"
                is_awaited = origin in awaited_origins
                yield Limit("throttling", text, holds=is_awaited and origin.is_full)

        held = len(self._holding)
        text = f"{held} of {self._slots} connections"
        yield Limit("connections", text, holds=bool(awaited_origins) and held >= self._slots)

    def _enter(self, claim: Claim) -> None:
        """Queue a claim for a slot, in the group of its download."""
        claim.granted = asyncio.get_running_loop().create_future()
        claim.was_paused = False

        key = (claim.ask_priority, claim.origin_name)
        group = self._groups.get(key)
        if group is None:
            priority = claim.ask_priority()
            group = ClaimGroup(claim.ask_priority, self.origin(claim.origin_name), priority)
            self._groups[key] = group
        group.count += 1
        group.enqueue(claim)
        claim.group = group

    def _leave(self, claim: Claim) -> None:
        """Remove a claim, whether it holds a slot, is paused, or has not got a slot yet."""
        group = claim.group
        if claim in self._holding:
            self._release(claim)
        else:
            self._paused.pop(claim, None)
            group.queued.remove(claim)
        group.count -= 1
        if not group.count:
            del self._groups[group.ask_priority, group.origin.name]

    def _reassign(self) -> None:
        """Reassign the slots, in three steps.

        1. If a download is streamed, claims that no reader waits for pause on its origin.
        2. Free slots go to claims whose origin has room for more requests, by their ranks.
        3. If no slot is left, or an origin has no room, a claim that a reader waits for takes the
           slot of the least urgent claim that no reader waits for.

        The order matters: step 1 frees slots for step 2, and step 3 must not preempt a claim while
        there is a free slot.
        """
        if now_s() >= self._ask_due_s:
            self._ask_all_priorities()

        # 1. Pause
        self._clear_links()

        # 2. Fill
        while len(self._holding) < self._slots:
            claim = self._first_queued(lambda group: group.is_admitted)
            if claim is None:
                break
            self._grant(claim)

        # 3. Preempt
        while True:
            claim = self._preemptor()
            if claim is None:
                break
            # A claim to pause exists, as `_preemptor` has made sure of it.
            origin = claim.group.origin
            if origin.is_full:
                self._pause_one(origin)
            else:
                # The origin has room, so a slot of any origin will do.
                self._pause_one(None)
            self._grant(claim)

    def _ask_all_priorities(self) -> None:
        """Ask each download once for its priority, and recount the slots by the answers."""
        self._ask_due_s = now_s() + ASK_AGAIN_S
        downloads = {group.ask_priority for group in self._groups.values()}
        priorities = {ask_priority: ask_priority() for ask_priority in downloads}
        for group in self._groups.values():
            group.priority = priorities[group.ask_priority]
        self._ranking.recount(self._holding)

    def _clear_links(self) -> None:
        """Pause claims that no reader waits for, on origins where a download is streamed.

        As many pause as are needed to leave no more claims than saturate the link.
        """
        cleared: set[OriginState] = set()
        for group in self._groups.values():
            if not group.priority.streamed:
                continue
            if group.ask_priority not in self._precedence_until_s:
                # The download is streamed for the first time, so its precedence begins.
                self._prolong_precedence(group.ask_priority)
            if self._has_precedence(group.ask_priority):
                cleared.add(group.origin)

        for origin in self._origins.values():
            origin.cleared = origin in cleared

        for origin in cleared:
            # While the link is not measured, it has no room for claims that no reader waits for.
            room = origin.link.connections or 0
            while origin.held > room and self._may_pause_more:
                has_paused = self._pause_one(origin)
                if not has_paused:
                    break

    def _has_precedence(self, download: AskPriority) -> bool:
        """Return True if a streamed download has precedence at present."""
        return now_s() < self._precedence_until_s[download]

    def _prolong_precedence(self, download: AskPriority) -> None:
        """Give a download precedence for `_PRECEDENCE_S`; reassign the slots when that is over."""
        self._precedence_until_s[download] = now_s() + _PRECEDENCE_S
        asyncio.get_running_loop().call_later(_PRECEDENCE_S, self._reassign)

    @property
    def _may_pause_more(self) -> bool:
        """True while fewer claims are paused than there are slots, which bounds the memory."""
        return len(self._paused) < self._slots

    def _preemptor(self) -> Claim | None:
        """Return the claim that is to preempt another; None if there is none.

        A reader waits for this claim, and there is another claim that can be preempted for it.
        """
        if not any(group.queued and group.priority.waiting for group in self._groups.values()):
            return None
        preemptible_origins = {claim.group.origin for claim in self._victims(None)}
        if not preemptible_origins:
            return None

        def may_preempt(group: ClaimGroup) -> bool:
            if not group.priority.waiting:
                return False
            # A claim may always take the slot of another claim on the same origin. The slot of a
            # claim on another origin is of use only if the claim's own origin has room.
            return group.origin in preemptible_origins or group.is_admitted

        if self._may_pause_more:
            return self._first_queued(may_preempt)
        # No more claims may be paused. A claim that is paused itself may still preempt another: the
        # two change places, so that the number of paused claims stays the same.
        paused = [claim for claim in self._paused if may_preempt(claim.group)]
        return min(paused, key=self._ranking.rank, default=None)

    def _first_queued(self, is_eligible: Callable[[ClaimGroup], bool]) -> Claim | None:
        """Return the queued claim to serve first; None if there is none.

        Args:
            is_eligible: returns True for the groups whose claims may be served.
        """
        groups = [group for group in self._groups.values() if group.queued and is_eligible(group)]
        heads = [group.queued[0] for group in groups]
        return min(heads, key=self._ranking.rank, default=None)

    def _victims(self, origin: OriginState | None) -> list[Claim]:
        """Return the claims that may be paused: they hold a slot, and no reader waits for them.

        Args:
            origin: the only origin whose claims are wanted; None for all origins.
        """
        victims: list[Claim] = []
        for claim in self._holding:
            group = claim.group
            if claim.work is None or group.priority.waiting:
                continue
            if origin in (None, group.origin):
                victims.append(claim)
        return victims

    def _grant(self, claim: Claim) -> None:
        """Give a queued claim a slot, which is its first one or another one after a pause."""
        group = claim.group
        group.queued.remove(claim)
        self._holding[claim] = None
        self._ranking.granted(claim)
        group.origin.held += 1
        self._round_robin.serve(group.priority.client)
        self._paused.pop(claim, None)
        if not claim.granted.done():
            claim.generation = group.origin.aimd.generation
            claim.concurrency = group.origin.held
            claim.granted.set_result(None)
        elif claim.work is not None:
            claim.work.resume()
        # In any other case, the claim has just been cancelled or its work has ended. It is about to
        # be removed by `_leave`.

    def _pause_one(self, origin: OriginState | None) -> bool:
        """Pause the least urgent claim, and queue it again; return False if none may be paused.

        Args:
            origin: the only origin whose claims may be paused; None for all origins.
        """
        victims = self._victims(origin)
        if not victims:
            return False
        claim = max(victims, key=_pausing_order)
        assert claim.work is not None  # `_victims` leaves out claims without work
        claim.work.halt()
        claim.was_paused = True
        self._release(claim)
        self._paused[claim] = None
        claim.group.enqueue(claim)
        self.pauses += 1
        return True

    def _release(self, claim: Claim) -> None:
        """Take the slot of a claim that holds one."""
        del self._holding[claim]
        self._ranking.released(claim)
        claim.group.origin.held -= 1


def _pausing_order(claim: Claim) -> tuple[int, float, int]:
    """Return a sort key by which the least urgent claim, which is paused first, is the greatest."""
    priority = claim.group.priority
    return priority.priority_class, priority.deadline_s, claim.arrival
