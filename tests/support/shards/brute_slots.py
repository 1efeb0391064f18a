"""The rule by which slots are dealt, in its plainest form: for comparison with the quick one."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from shardcache.errors import OriginBusyError
from shardcache.fetch.connections.aimd import Aimd
from shardcache.fetch.connections.line import Line
from shardcache.fetch.connections.priority import Priority
from shardcache.fetch.connections.round_robin import RoundRobin
from shardcache.fetch.connections.scheduler import Claim

_ALONE_S = 1.0


class BruteSlots:
    """`Scheduler` by its rule: at each step every claim of queue and holders is asked and compared.

    Of those in the queue goes first: the lowest class; in it the party that holds fewest slots, then the one that
    was served longest ago; of its claims that with the earliest deadline, then the first come.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._holding: list[Claim] = []
        self._queue: list[Claim] = []
        self._held: Counter[str] = Counter()
        self._limits: dict[str, Aimd] = {}
        self._round_robin = RoundRobin()
        self._lines: defaultdict[str, Line] = defaultdict(Line)
        self._cleared = set[str]()
        self._alone_until_s: WeakKeyDictionary[Callable[[], Priority], float] = WeakKeyDictionary()  # of each download
        self.pauses = 0

    def took(self, claim: Claim, size_bytes: int, time_s: float) -> None:
        """Record a part that arrived, and how long it was read."""
        self._lines[claim.origin].took(size_bytes, time_s, (claim.company + self._held[claim.origin]) / 2)
        if claim.priority in self._alone_until_s:
            self._prolong(claim.priority)

    def _prolong(self, ask: Callable[[], Priority]) -> None:
        loop = asyncio.get_running_loop()
        self._alone_until_s[ask] = loop.time() + _ALONE_S
        loop.call_later(_ALONE_S, self.deal)

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a slot for the block, with interruptions while `claim.work` is set.

        A block that ends with OriginBusyError lowers its origin's limit, one that ends well may raise it.
        """
        limit = self._limits.setdefault(claim.origin, Aimd(self._count))
        claim._granted, claim.paused = asyncio.get_running_loop().create_future(), False
        self._queue.append(claim)
        try:
            self.deal()
            await claim._granted
            yield
            limit.succeeded(claim._generation)
        except OriginBusyError:
            limit.refused(claim._generation)
            raise
        finally:
            self._leave(claim)
            self.deal()

    def deal(self) -> None:
        """Give every slot to whom it belongs at this moment; call it when a bid became more urgent."""
        priorities = _Priorities()
        self._cleared = self._find_cleared(priorities)
        for origin in self._cleared:
            resting = [holder for holder in self._holding if holder.origin == origin and _may_rest(holder, priorities)]
            for holder in sorted(resting, key=lambda holder: _urgency(holder, priorities), reverse=True):
                if self._held[origin] > (self._lines[origin].connections or 0) and self._may_pause_more:
                    self._pause(holder)
        while (claim := self._best(self._grantable(priorities), priorities)) is not None:
            self._grant(claim, priorities)
        while (claim := self._best(self._usurpers(priorities), priorities)) is not None:
            self._pause(max(self._victims(claim, priorities), key=lambda victim: _urgency(victim, priorities)))
            self._grant(claim, priorities)

    def _find_cleared(self, priorities: _Priorities) -> set[str]:
        """Return the origins of which somebody has the line to himself."""
        loop, origins = asyncio.get_running_loop(), set[str]()
        for claim in (*self._holding, *self._queue):
            if priorities.of(claim).alone:
                if claim.priority not in self._alone_until_s:
                    self._prolong(claim.priority)
                if loop.time() < self._alone_until_s[claim.priority]:
                    origins.add(claim.origin)
        return origins

    def _grantable(self, priorities: _Priorities) -> list[Claim]:
        if len(self._holding) >= self._count:
            return []
        open_to_all = [claim for claim in self._queue if not self._is_full(claim.origin)]
        return [claim for claim in open_to_all if priorities.of(claim).waiting or not self._rests(claim.origin)]

    def _rests(self, origin: str) -> bool:
        return origin in self._cleared and self._lines[origin].connections is None

    @property
    def _may_pause_more(self) -> bool:
        return sum(claim._begun for claim in self._queue) < self._count

    def _usurpers(self, priorities: _Priorities) -> list[Claim]:
        more = self._may_pause_more
        urgent = [claim for claim in self._queue if priorities.of(claim).waiting and (more or claim._begun)]
        return [claim for claim in urgent if self._victims(claim, priorities)]

    def _victims(self, claim: Claim, priorities: _Priorities) -> list[Claim]:
        within = self._is_full(claim.origin)
        return [
            holder
            for holder in self._holding
            if _may_rest(holder, priorities) and (holder.origin == claim.origin or not within)
        ]

    def _best(self, claims: list[Claim], priorities: _Priorities) -> Claim | None:
        if len(claims) <= 1:
            return claims[0] if claims else None
        held = Counter((priorities.of(holder).klass, priorities.of(holder).party) for holder in self._holding)

        def rank(claim: Claim) -> tuple[int, int, int, float, int]:
            priority = priorities.of(claim)
            share = held[priority.klass, priority.party]
            return priority.klass, share, self._round_robin.last(priority.party), priority.deadline_s, claim.arrival

        return min(claims, key=rank)

    def _grant(self, claim: Claim, priorities: _Priorities) -> None:
        self._queue.remove(claim)
        self._holding.append(claim)
        self._held[claim.origin] += 1
        self._round_robin.serve(priorities.of(claim).party)
        assert claim._granted is not None
        if not claim._begun:
            claim._generation = self._limits[claim.origin].generation
            claim.company = self._held[claim.origin]
            claim._granted.set_result(None)
        elif claim.work is not None:
            claim.work.resume()

    def _pause(self, claim: Claim) -> None:
        assert claim.work is not None
        claim.work.halt()
        claim.paused = True
        self._leave(claim)
        self._queue.append(claim)
        self.pauses += 1

    def _leave(self, claim: Claim) -> None:
        if claim in self._holding:
            self._holding.remove(claim)
            self._held[claim.origin] -= 1
        else:
            self._queue.remove(claim)

    def _is_full(self, origin: str) -> bool:
        limits = [self._limits[origin].limit]
        line = self._lines[origin].connections
        if origin in self._cleared and line is not None:
            limits.append(line)
        return self._held[origin] >= min(limits)


class _Priorities:
    """Claims of one moment. The parts of a download share one callable, which is asked once."""

    def __init__(self) -> None:
        self._known: dict[Callable[[], Priority], Priority] = {}

    def of(self, claim: Claim) -> Priority:
        """Return what a claim bids."""
        priority = self._known.get(claim.priority)
        if priority is None:
            priority = self._known[claim.priority] = claim.priority()
        return priority


def _may_rest(holder: Claim, priorities: _Priorities) -> bool:
    return holder.work is not None and not priorities.of(holder).waiting


def _urgency(claim: Claim, priorities: _Priorities) -> tuple[int, float, int]:
    priority = priorities.of(claim)
    return priority.klass, priority.deadline_s, claim.arrival
