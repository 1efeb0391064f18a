"""Scheduler for the node's connections: grants them by priority, preempts the least urgent."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from shardcache.errors import OriginBusyError
from shardcache.fetch.limits import Aimd, Link
from shardcache.fetch.priority import Claim, Priority, RoundRobin

# Origins remembered; those in use and the most recent ones.
_MAX_ORIGINS = 64
# A download whose parts do not arrive holds up the others for no longer than this.
_ALONE_S = 1.0
# Priorities change with every step of a reader; asking all downloads at each part would take longer than some parts do.
ASK_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class OriginLoad:
    """Load on one origin.

    Attributes:
        name: protocol and bucket or host.
        connections: requests in flight; paused ones do not count.
        limit: current estimate of the concurrent requests that it accepts.
        throttled: number of times the limit was lowered.
    """

    name: str
    connections: int
    limit: int
    throttled: int


@dataclass(slots=True, eq=False)
class _OriginState:
    """State of one origin.

    Attributes:
        held: slots held.
        cleared: True while claims that no reader waits for are paused for one that is `alone`.
    """

    name: str
    aimd: Aimd
    link: Link = field(default_factory=Link)
    held: int = 0
    cleared: bool = False

    @property
    def is_full(self) -> bool:
        """True if it accepts no further request, or a claim that is `alone` needs the rest of the link."""
        saturating = self.link.connections if self.cleared else None
        return self.held >= min(self.aimd.limit, saturating or self.aimd.limit)

    @property
    def admits_background(self) -> bool:
        """False if only claims that readers wait for run: one is `alone`, and the link is not measured yet."""
        return not self.cleared or self.link.connections is not None


@dataclass(slots=True, eq=False)
class _Group:
    """Claims of one download on one origin.

    Attributes:
        ask: returns their current priority.
        priority: the priority returned last.
        queued: claims that wait, first come first.
        count: claims that wait or hold a slot.
    """

    ask: Callable[[], Priority]
    origin: _OriginState
    priority: Priority
    queued: list[Claim] = field(default_factory=list)
    count: int = 0


class Scheduler:
    """Fixed number of connection slots; a waiting reader's claim preempts one that no reader waits for.

    The lowest class goes first; within it the client that holds the fewest slots, then the client served longest ago;
    of its claims the one with the earliest deadline, then the first to arrive. Priorities change with time: they are
    read again by `deal`, and whenever a claim comes or goes if `ASK_AGAIN_S` has passed.

    While a claim is `alone`, only as many claims on its origin run as saturate the link, the most urgent ones: more
    would delay each of its parts. Until the link is measured, claims that no reader waits for do not run at all.

    A preempted claim pauses, and queues for another slot with its own priority. At most as many claims are paused as
    there are slots, so at most twice as many claims as slots occupy memory.

    Args:
        count: slots of all origins together, and the initial limit of each origin.

    Attributes:
        pauses: number of times that a claim was preempted, or paused for one that is `alone`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._groups: dict[tuple[Callable[[], Priority], str], _Group] = {}
        self._origins: dict[str, _OriginState] = {}  # the one used last is at the end
        self._holding: dict[Claim, _Group] = {}
        self._paused: dict[Claim, _Group] = {}  # queued again, until they get another slot
        self._round_robin = RoundRobin()
        self._alone_until_s: WeakKeyDictionary[Callable[[], Priority], float] = WeakKeyDictionary()  # by download
        self._ask_again_s = 0.0
        self.pauses = 0

    def __repr__(self) -> str:
        queued = sum(len(group.queued) for group in self._groups.values())
        return f"<Scheduler {len(self._holding)} of {self._count} held, {queued} queued>"

    def loads(self) -> list[OriginLoad]:
        """Return the load on each of the origins used last."""
        latest = list(self._origins.values())[-_MAX_ORIGINS:]
        return [OriginLoad(one.name, one.held, one.aimd.limit, one.aimd.generation) for one in latest]

    def is_throttled(self, origin: str) -> bool:
        """Return whether an origin currently accepts fewer requests than there are slots."""
        return origin in self._origins and self._origins[origin].aimd.limit < self._count

    def took(self, claim: Claim, size_bytes: int, time_s: float) -> None:
        """Record the size and read time of a part that arrived while `claim` held its slot."""
        if (origin := self._origins.get(claim.origin)) is not None:
            origin.link.took(size_bytes, time_s, (claim.concurrency + origin.held) / 2)
        if claim.priority in self._alone_until_s:
            if not self._is_alone(claim.priority):
                self._ask_again_s = 0.0  # its precedence had expired, and begins again
            self._prolong(claim.priority)

    def connection_bytes_per_s(self, origin: str) -> float | None:
        """Return the rate at which a connection to an origin reads lately; None while unknown."""
        return self._origins[origin].link.connection_bytes_per_s if origin in self._origins else None

    def share(self, origin: str) -> int:
        """Return the number of connections to an origin that each of its downloads can have at the same time."""
        downloads = sum(group.origin.name == origin for group in self._groups.values())
        known = self._origins.get(origin)
        maximum = self._count if known is None else min(known.aimd.limit, known.link.connections or known.aimd.limit)
        return max(1, maximum // max(1, downloads))

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a slot during the block; it may be preempted while `claim.work` is set.

        A block that ends with OriginBusyError lowers the origin's limit; one that succeeds may raise it.
        """
        claim.granted, claim.paused = asyncio.get_running_loop().create_future(), False
        group = self._group(claim.priority, claim.origin)
        group.count += 1
        _enqueue(group, claim)
        try:
            self._deal()
            await claim.granted
            yield
            group.origin.aimd.succeeded(claim.generation)
        except OriginBusyError:
            group.origin.aimd.refused(claim.generation)
            raise
        finally:
            self._leave(claim, group)
            self._deal()

    def deal(self) -> None:
        """Re-evaluate all priorities and reassign slots; call it when a priority has become more urgent."""
        self._ask_again_s = 0.0
        self._deal()

    def _deal(self) -> None:
        if asyncio.get_running_loop().time() >= self._ask_again_s:
            self._ask_all()
        self._clear()
        while len(self._holding) < self._count and (group := self._next()) is not None:
            self._grant(group, group.queued[0])
        while (preemptor := self._preemptor()) is not None:
            group, claim = preemptor
            self._pause(self._victims(group.origin if group.origin.is_full else None))
            self._grant(group, claim)

    def _ask_all(self) -> None:
        self._ask_again_s = asyncio.get_running_loop().time() + ASK_AGAIN_S
        asked: dict[Callable[[], Priority], Priority] = {}
        for group in self._groups.values():
            if group.ask not in asked:
                asked[group.ask] = group.ask()
            group.priority = asked[group.ask]

    def _clear(self) -> None:
        """Pause claims that no reader waits for, as far as they would slow down a claim that is `alone`."""
        alone = [group for group in self._groups.values() if group.priority.alone]
        cleared = {group.origin for group in alone if self._is_alone(group.ask)}
        for origin in self._origins.values():
            origin.cleared = origin in cleared
        for origin in cleared:
            while origin.held > (origin.link.connections or 0) and self._may_pause_more:
                if not (victims := self._victims(origin)):
                    break
                self._pause(victims)

    def _is_alone(self, ask: Callable[[], Priority]) -> bool:
        """Return whether a download has precedence: for `_ALONE_S` from the first call, and from each of its parts."""
        if ask not in self._alone_until_s:
            self._prolong(ask)
        return asyncio.get_running_loop().time() < self._alone_until_s[ask]

    def _prolong(self, ask: Callable[[], Priority]) -> None:
        loop = asyncio.get_running_loop()
        self._alone_until_s[ask] = loop.time() + _ALONE_S
        loop.call_later(_ALONE_S, self.deal)

    def _next(self) -> _Group | None:
        """Return the group whose first claim gets the next free slot."""
        return self._first(
            group
            for group in self._groups.values()
            if not group.origin.is_full and (group.priority.waiting or group.origin.admits_background)
        )

    @property
    def _may_pause_more(self) -> bool:
        return len(self._paused) < self._count

    def _preemptor(self) -> tuple[_Group, Claim] | None:
        """Return a waiting reader's claim that preempts another, which no reader waits for."""
        victims = {self._holding[claim].origin for claim in self._victims(None)}
        if not victims:
            return None
        groups = [
            group
            for group in self._groups.values()
            if group.priority.waiting and (group.origin in victims or not group.origin.is_full)
        ]
        if self._may_pause_more:
            return (group, group.queued[0]) if (group := self._first(groups)) is not None else None
        rank = self._rank()
        begun = [(group, claim) for claim, group in self._paused.items() if group in groups]
        return min(begun, key=lambda one: rank(*one), default=None)

    def _first(self, groups: Iterable[_Group]) -> _Group | None:
        """Return the group whose first claim is served first."""
        rank, queued = self._rank(), [group for group in groups if group.queued]
        return min(queued, key=lambda group: rank(group, group.queued[0]), default=None)

    def _rank(self) -> Callable[[_Group, Claim], tuple[int, int, int, float, int]]:
        held = Counter((group.priority.klass, group.priority.client) for group in self._holding.values())

        def rank(group: _Group, claim: Claim) -> tuple[int, int, int, float, int]:
            klass, client = group.priority.klass, group.priority.client
            share, turn = held[klass, client], self._round_robin.last(client)
            return klass, share, turn, group.priority.deadline_s, claim.arrival

        return rank

    def _victims(self, origin: _OriginState | None) -> list[Claim]:
        """Return the claims that may be paused, of one origin or of all."""
        return [
            claim
            for claim, group in self._holding.items()
            if claim.work is not None and not group.priority.waiting and origin in (None, group.origin)
        ]

    def _group(self, ask: Callable[[], Priority], origin: str) -> _Group:
        priority, group = ask(), self._groups.get((ask, origin))
        if group is None:
            group = self._groups[ask, origin] = _Group(ask, self._use(origin), priority)
        group.priority = priority
        return group

    def _use(self, name: str) -> _OriginState:
        """Remember an origin as the one used last, and forget unused ones beyond `_MAX_ORIGINS`."""
        origin = self._origins.pop(name) if name in self._origins else _OriginState(name, Aimd(self._count))
        self._origins[name] = origin
        if (excess := len(self._origins) - _MAX_ORIGINS) > 0:
            used = {origin, *(group.origin for group in self._groups.values())}
            for unused in [one for one in self._origins.values() if one not in used][:excess]:
                del self._origins[unused.name]
        return origin

    def _grant(self, group: _Group, claim: Claim) -> None:
        group.queued.remove(claim)
        self._holding[claim] = group
        group.origin.held += 1
        self._round_robin.serve(group.priority.client)
        self._paused.pop(claim, None)
        assert claim.granted is not None
        if not claim.granted.done():  # done if it was paused, or has just been cancelled
            claim.generation, claim.concurrency = group.origin.aimd.generation, group.origin.held
            claim.granted.set_result(None)
        elif claim.work is not None:
            claim.work.resume()

    def _pause(self, victims: list[Claim]) -> None:
        """Pause the least urgent of some claims."""

        def urgency(claim: Claim) -> tuple[int, float, int]:
            priority = self._holding[claim].priority
            return priority.klass, priority.deadline_s, claim.arrival

        claim = max(victims, key=urgency)
        assert claim.work is not None
        claim.work.halt()
        claim.paused = True
        group = self._paused[claim] = self._release(claim)
        _enqueue(group, claim)
        self.pauses += 1

    def _release(self, claim: Claim) -> _Group:
        group = self._holding.pop(claim)
        group.origin.held -= 1
        return group

    def _leave(self, claim: Claim, group: _Group) -> None:
        if claim in self._holding:
            self._release(claim)
        else:
            self._paused.pop(claim, None)
            group.queued.remove(claim)
        group.count -= 1
        if not group.count:
            del self._groups[group.ask, group.origin.name]


def _enqueue(group: _Group, claim: Claim) -> None:
    insort(group.queued, claim, key=lambda one: one.arrival)
