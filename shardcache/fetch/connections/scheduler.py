"""Scheduler for the node's connections: grants them by priority, preempts the least urgent."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

from shardcache.errors import OriginBusyError
from shardcache.fetch.connections.aimd import Aimd
from shardcache.fetch.connections.line import Line
from shardcache.fetch.connections.priority import Priority
from shardcache.fetch.connections.queue import Group, Queue


class Pausable(Protocol):
    """Work that runs while its claim holds a slot, and pauses otherwise."""

    def halt(self) -> None:
        """Pause."""

    def resume(self) -> None:
        """Continue after `halt`."""


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
class Claim:
    """One part's claim on a connection slot; reused for each attempt, so that retries keep their place among equals.

    Attributes:
        priority: returns the current priority.
        origin: origin under whose concurrency limit it falls.
        work: can be paused while the slot is held; None where nothing can.
        paused: True if it was preempted during the current attempt.
        company: slots held on its origin when it was granted one, including its own.
        arrival: a number that grows from claim to claim.
    """

    priority: Callable[[], Priority]
    origin: str = ""
    work: Pausable | None = None
    arrival: int = field(default_factory=count().__next__)
    _granted: asyncio.Future[None] | None = None
    _generation: int = 0
    paused: bool = False
    company: int = 0

    def again(self) -> Claim:
        """Return a claim for a hedged request, with the same place among equals."""
        return Claim(self.priority, self.origin, arrival=self.arrival)

    @property
    def _begun(self) -> bool:
        return self._granted is not None and self._granted.done()


_Group: TypeAlias = "Group[Claim]"


class Scheduler:
    """Fixed number of connection slots; a waiting reader's claim preempts one that no reader waits for.

    `Queue` decides which queued claim goes first. Priorities change with time: they are read again by `deal`, and
    whenever a claim comes or goes if `ASK_AGAIN_S` has passed.

    While a claim is `alone`, only as many claims on its origin run as saturate the link, the most urgent ones: more
    would delay each of its parts. Until the link is measured, claims that no reader waits for do not run at all.

    A preempted claim pauses, and queues for another slot with its own priority. At most as many claims are paused as
    there are slots, so at most twice as many claims as slots occupy memory.

    Args:
        count: slots of all origins together, and the initial limit of each origin.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._groups: dict[tuple[Callable[[], Priority], str], _Group] = {}
        self._queue = Queue[Claim]()
        self._holding: dict[Claim, _Group] = {}
        self._waiting: dict[Claim, _Group] = {}
        self._paused: dict[Claim, _Group] = {}  # those of `_waiting` that were preempted
        self._held: Counter[str] = Counter()  # slots by origin
        self._lesser: Counter[str] = Counter()  # those of `_held` that no reader waits for
        self._clearing: Counter[str] = Counter()  # groups that others are paused for, by origin
        self._limits: dict[str, Aimd] = {}  # the origin used last is at the end
        self._lines: defaultdict[str, Line] = defaultdict(Line)
        self._alone_until_s: WeakKeyDictionary[Callable[[], Priority], float] = WeakKeyDictionary()  # by download
        self._ask_again_s = 0.0
        self._pauses = 0

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._holding)} of {self._count} held, {len(self._waiting)} queued>"

    @property
    def pauses(self) -> int:
        """Number of times a claim was preempted or paused for one that is `alone`."""
        return self._pauses

    def loads(self) -> list[OriginLoad]:
        """Return the load on each of the origins used last."""
        latest = list(self._limits.items())[-_MAX_ORIGINS:]
        return [OriginLoad(name, self._held[name], aimd.limit, aimd.generation) for name, aimd in latest]

    def is_throttled(self, origin: str) -> bool:
        """Return whether an origin currently accepts fewer requests than there are slots."""
        return origin in self._limits and self._limits[origin].limit < self._count

    def connection_bytes_per_s(self, origin: str) -> float | None:
        """Return the rate at which a connection to an origin reads lately; None while unknown."""
        return self._lines[origin].connection_bytes_per_s

    def share(self, origin: str) -> int:
        """Return the number of connections to an origin that each of its downloads can have at the same time."""
        most, line = self._limits[origin].limit if origin in self._limits else self._count, self._lines[origin]
        downloads = sum(group.origin == origin for group in self._groups.values())
        return max(1, min(most, line.connections or most) // max(1, downloads))

    def took(self, claim: Claim, size_bytes: int, time_s: float) -> None:
        """Record the size and read time of a part that arrived while `claim` held its slot."""
        self._lines[claim.origin].took(size_bytes, time_s, (claim.company + self._held[claim.origin]) / 2)
        if claim.priority in self._alone_until_s:
            if not self._is_alone(claim.priority):
                self._ask_again_s = 0.0  # its precedence had expired, and begins again
            self._prolong(claim.priority)

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a slot during the block; it may be preempted while `claim.work` is set.

        A block that ends with OriginBusyError lowers the origin's limit; one that succeeds may raise it.
        """
        claim._granted, claim.paused = asyncio.get_running_loop().create_future(), False
        self._join(claim)
        limit = self._limits[claim.origin]
        try:
            self._deal()
            await claim._granted
            yield
            limit.succeeded(claim._generation)
        except OriginBusyError:
            limit.refused(claim._generation)
            raise
        finally:
            self._leave(claim)
            self._deal()

    @contextmanager
    def expect(self, priority: Callable[[], Priority], origin: str) -> Iterator[None]:
        """Respect the priority of a download without claims yet: if it is `alone`, no planned part begins."""
        group = self._group(priority, origin)
        group.expected = True
        self._deal()
        try:
            yield
        finally:
            group.expected = False
            self._disband(group)
            self._deal()

    def deal(self) -> None:
        """Re-evaluate all priorities and reassign slots; call it when a priority has become more urgent."""
        self._ask_all()
        self._deal()

    def _deal(self) -> None:
        if asyncio.get_running_loop().time() >= self._ask_again_s:
            self._ask_all()
        self._clear()
        while (claim := self._next()) is not None:
            self._grant(claim)
        while (claim := self._usurper()) is not None:
            group = self._waiting[claim]
            self._pause(max(self._victims(group.origin), key=self._urgency))
            self._grant(claim)

    def _ask_all(self) -> None:
        self._ask_again_s = asyncio.get_running_loop().time() + ASK_AGAIN_S
        priorities: dict[Callable[[], Priority], Priority] = {}
        for (ask, _), group in self._groups.items():
            if ask not in priorities:
                priorities[ask] = ask()
            self._take_priority(group, priorities[ask])

    def _take_priority(self, group: _Group, priority: Priority) -> None:
        if priority.waiting != group.priority.waiting:
            self._lesser[group.origin] += -len(group.holding) if priority.waiting else len(group.holding)
        self._queue.change(group, priority)
        clears = priority.alone and self._is_alone(group.ask)
        self._clearing[group.origin] += clears - group.clears
        group.clears = clears

    def _is_alone(self, ask: Callable[[], Priority]) -> bool:
        """Return whether a download has precedence: for `_ALONE_S` from the first call, and from each of its parts."""
        if ask not in self._alone_until_s:
            self._prolong(ask)
        return asyncio.get_running_loop().time() < self._alone_until_s[ask]

    def _prolong(self, ask: Callable[[], Priority]) -> None:
        loop = asyncio.get_running_loop()
        self._alone_until_s[ask] = loop.time() + _ALONE_S
        loop.call_later(_ALONE_S, self.deal)

    def _clear(self) -> None:
        """Pause claims that no reader waits for, as far as they would slow down a claim that is `alone`."""
        for origin in [origin for origin, groups in self._clearing.items() if groups and self._lesser[origin]]:
            least = self._lines[origin].connections or 0
            while self._held[origin] > least and self._may_pause_more and (victims := self._victims_in(origin)):
                self._pause(max(victims, key=self._urgency))

    def _next(self) -> Claim | None:
        """Return the claim that gets the next free slot."""
        if len(self._holding) >= self._count:
            return None
        return self._first(origin for origin in self._queue.origins() if not self._is_full(origin))

    def _first(self, origins: Iterable[str], *, waiting: bool = False) -> Claim | None:
        """Return the first claim on some origins: only a waiting reader's, if `waiting` or if no others may run."""
        bests = map(self._queue.best, origins)
        fit = [
            (rank, group)
            for rank, group in bests
            if group.priority.waiting or not (waiting or self._rests(group.origin))
        ]
        return min(fit, key=itemgetter(0))[1].queued[0] if fit else None

    @property
    def _may_pause_more(self) -> bool:
        return len(self._paused) < self._count

    def _usurper(self) -> Claim | None:
        """Return the claim that preempts another, which no reader waits for."""
        if not any(self._lesser.values()):
            return None
        victims = {group.origin for holder, group in self._holding.items() if _may_rest(holder, group)}
        origins = [
            origin for origin in self._queue.origins() if origin in victims or (victims and not self._is_full(origin))
        ]
        if self._may_pause_more:
            return self._first(origins, waiting=True)
        begun = [
            (claim, group)
            for claim, group in self._paused.items()
            if group.priority.waiting and group.origin in origins
        ]
        ranked = [(self._queue.rank(group, claim), claim) for claim, group in begun]
        return min(ranked, key=itemgetter(0))[1] if ranked else None

    def _victims(self, origin: str) -> list[Claim]:
        return self._victims_in(origin if self._is_full(origin) else None)

    def _victims_in(self, origin: str | None) -> list[Claim]:
        """Return the claims that may be paused, of one origin or of all."""
        resting = [(holder, group) for holder, group in self._holding.items() if _may_rest(holder, group)]
        return [holder for holder, group in resting if origin in (None, group.origin)]

    def _urgency(self, holder: Claim) -> tuple[int, float, int]:
        priority = self._holding[holder].priority
        return priority.klass, priority.deadline_s, holder.arrival

    def _join(self, claim: Claim) -> None:
        group = self._waiting[claim] = self._group(claim.priority, claim.origin)
        self._queue.put(group, claim)

    def _group(self, ask: Callable[[], Priority], origin: str) -> _Group:
        priority, group = ask(), self._groups.get((ask, origin))
        if group is None:
            self._use(origin)
            group = self._groups[ask, origin] = Group(ask, origin, priority)
        self._take_priority(group, priority)
        return group

    def _use(self, origin: str) -> None:
        """Remember an origin as the one used last, and forget unused ones beyond `_MAX_ORIGINS`."""
        self._limits[origin] = self._limits.pop(origin, Aimd(self._count))
        if len(self._limits) > _MAX_ORIGINS:
            used = {origin, *(group.origin for group in self._groups.values())}
            for name in [name for name in self._limits if name not in used][: len(self._limits) - _MAX_ORIGINS]:
                del self._limits[name]
                self._lines.pop(name, None)
                for counts in (self._held, self._lesser, self._clearing):
                    counts.pop(name, None)

    def _grant(self, claim: Claim) -> None:
        group = self._waiting.pop(claim)
        self._paused.pop(claim, None)
        self._queue.take(group, claim)
        self._queue.hold(group, claim)
        self._holding[claim] = group
        self._held[claim.origin] += 1
        self._lesser[claim.origin] += not group.priority.waiting
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
        group = self._release(claim)
        self._waiting[claim] = self._paused[claim] = group
        self._queue.put(group, claim)
        self._pauses += 1

    def _release(self, claim: Claim) -> _Group:
        group = self._holding.pop(claim)
        self._queue.release(group, claim)
        self._held[claim.origin] -= 1
        self._lesser[claim.origin] -= not group.priority.waiting
        return group

    def _leave(self, claim: Claim) -> None:
        if claim in self._holding:
            group = self._release(claim)
        else:
            group = self._waiting.pop(claim)
            self._paused.pop(claim, None)
            self._queue.take(group, claim)
        self._disband(group)

    def _disband(self, group: _Group) -> None:
        if not (group.queued or group.holding or group.expected):
            self._clearing[group.origin] -= group.clears
            del self._groups[group.ask, group.origin]

    def _rests(self, origin: str) -> bool:
        """Return whether only claims that readers wait for run: one is `alone` and the link is not measured yet."""
        return bool(self._clearing[origin]) and self._lines[origin].connections is None

    def _is_full(self, origin: str) -> bool:
        most, line = self._limits[origin].limit, self._lines[origin].connections
        return self._held[origin] >= (min(most, line) if self._clearing[origin] and line else most)


def _may_rest(holder: Claim, group: _Group) -> bool:
    return holder.work is not None and not group.priority.waiting
