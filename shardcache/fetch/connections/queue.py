"""Queue of claims waiting for a connection slot, in the order in which they are served. Pure.

Each decision looks at only a few claims: those that share a priority form a group, groups of one origin, class and
party form a line, and lines are sorted by rank.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from shardcache.fetch.connections.priority import Priority
from shardcache.fetch.connections.round_robin import RoundRobin


class Waiter(Protocol):
    """A claim as the queue sees it: a number that grows from claim to claim."""

    arrival: int


W = TypeVar("W", bound=Waiter)

Rank = tuple[int, int, int, float, int]
"""Class, slots that the party holds in that class, the party's last turn, deadline, arrival."""


@dataclass(slots=True, eq=False)
class Group(Generic[W]):
    """Claims of one download on one origin.

    Attributes:
        ask: returns their current priority.
        priority: the priority returned last.
        queued: claims that wait, first come first.
        holding: claims that hold a slot.
        clears: True while other claims on the origin are paused for it.
        expected: True if the group counts even without claims.
    """

    ask: Callable[[], Priority]
    origin: str
    priority: Priority
    queued: list[W] = field(default_factory=list)
    holding: set[W] = field(default_factory=set)
    clears: bool = False
    expected: bool = False

    @property
    def place(self) -> tuple[float, int]:
        """Sort key among the groups of its line."""
        return self.priority.deadline_s, self.queued[0].arrival


@dataclass(slots=True, eq=False)
class _Line(Generic[W]):
    """Groups with queued claims of one origin, class and party."""

    origin: str
    klass: int
    party: Hashable
    groups: list[Group[W]] = field(default_factory=list)
    rank: Rank = (0, 0, 0, 0.0, 0)  # its sort key among the lines of its origin


class Queue(Generic[W]):
    """Groups of claims; every change to a group goes through the queue, so that its lines stay sorted.

    The lowest class goes first; within it the party that holds the fewest slots, then the party served longest ago; of
    its claims the one with the earliest deadline, then the first to arrive.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int, Hashable], _Line[W]] = {}
        self._orders: defaultdict[str, list[_Line[W]]] = defaultdict(list)  # by origin
        self._lines_of: defaultdict[Hashable, set[_Line[W]]] = defaultdict(set)  # by party
        self._held: Counter[tuple[int, Hashable]] = Counter()  # slots by class and party
        self._round_robin = RoundRobin()

    def origins(self) -> Iterator[str]:
        """Yield the origins with queued claims."""
        return iter(self._orders)

    def best(self, origin: str) -> tuple[Rank, Group[W]]:
        """Return the rank of an origin's claim to be served next, and its group."""
        line = self._orders[origin][0]
        return line.rank, line.groups[0]

    def rank(self, group: Group[W], claim: W) -> Rank:
        """Return the rank of any claim of a group."""
        priority = group.priority
        share, last = self._held[priority.klass, priority.party], self._round_robin.last(priority.party)
        return priority.klass, share, last, priority.deadline_s, claim.arrival

    def put(self, group: Group[W], claim: W) -> None:
        """Add a claim to the queue."""
        self._unfile(group)
        insort(group.queued, claim, key=_arrival)
        self._file(group)

    def take(self, group: Group[W], claim: W) -> None:
        """Remove a claim from the queue."""
        self._unfile(group)
        group.queued.remove(claim)
        self._file(group)

    def hold(self, group: Group[W], claim: W) -> None:
        """Record that a claim got a slot."""
        group.holding.add(claim)
        forgotten = self._round_robin.serve(group.priority.party)
        self._count(group.priority, 1)
        for party in {group.priority.party, forgotten} & self._lines_of.keys():
            self._sort(self._lines_of[party])

    def release(self, group: Group[W], claim: W) -> None:
        """Record that a claim no longer holds a slot."""
        group.holding.discard(claim)
        self._count(group.priority, -1)

    def change(self, group: Group[W], priority: Priority) -> None:
        """Change the priority of a group's claims."""
        if priority == group.priority:
            return
        self._unfile(group)
        self._count(group.priority, -len(group.holding))
        group.priority = priority
        self._count(group.priority, len(group.holding))
        self._file(group)

    def _count(self, priority: Priority, slots: int) -> None:
        if slots:
            self._held[priority.klass, priority.party] += slots
            if not self._held[priority.klass, priority.party]:
                del self._held[priority.klass, priority.party]
            self._sort({line for line in self._lines_of.get(priority.party, ()) if line.klass == priority.klass})

    def _file(self, group: Group[W]) -> None:
        if group.queued:
            key = group.origin, group.priority.klass, group.priority.party
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = _Line(*key)
                self._lines_of[line.party].add(line)
            else:
                self._remove(line)
            insort(line.groups, group, key=_place)
            self._insert(line)

    def _unfile(self, group: Group[W]) -> None:
        if group.queued:
            line = self._lines[group.origin, group.priority.klass, group.priority.party]
            self._remove(line)
            del line.groups[bisect_left(line.groups, group.place, key=_place)]
            if line.groups:
                self._insert(line)
            else:
                self._forget(line)

    def _sort(self, lines: set[_Line[W]]) -> None:
        for line in lines:
            self._remove(line)
            self._insert(line)

    def _insert(self, line: _Line[W]) -> None:
        line.rank = self.rank(line.groups[0], line.groups[0].queued[0])
        insort(self._orders[line.origin], line, key=_rank)

    def _remove(self, line: _Line[W]) -> None:
        order = self._orders[line.origin]
        del order[bisect_left(order, line.rank, key=_rank)]
        if not order:
            del self._orders[line.origin]

    def _forget(self, line: _Line[W]) -> None:
        del self._lines[line.origin, line.klass, line.party]
        self._lines_of[line.party].discard(line)
        if not self._lines_of[line.party]:
            del self._lines_of[line.party]


def _arrival(claim: Waiter) -> int:
    return claim.arrival


def _place(group: Group[W]) -> tuple[float, int]:
    return group.place


def _rank(line: _Line[W]) -> Rank:
    return line.rank
