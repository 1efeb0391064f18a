"""What is in the cache, in the order in which it may go: what nobody plans first, then furthest next use. Pure.

The order is that of L. Belady's MIN ("A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 1966). Next uses shift all the time, with each session's pace and progress, yet no queue is sorted anew: every
resident lies in the queue of one course that plans it, by position, and within a course that order never shifts.
The use by that course is no sooner than its soonest use by any. So the furthest of all queues' ends, if its soonest
use turns out to be the one it is queued for, is the furthest of all; and if not, it moves to the queue where it belongs
and the next is looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from shardcache.plan.course import Course
from shardcache.plan.sieve import Sieve
from shardcache.plan.timeline import NEVER, Timeline

_SLACK = 64
_BATCH = 32


@dataclass(slots=True, eq=False)
class Resident:
    """A shard in the cache.

    Attributes:
        size_bytes: what its removal frees.
        held: whether a reader has it in hand; it is in no queue then.
        used_again: whether it was asked for when it was here already, since it last left the queue of the unplanned.
        course, position: where it is queued; no course while it is held or nobody plans it.
    """

    key: str
    size_bytes: int
    held: bool = False
    used_again: bool = False
    course: Course | None = None
    position: int = 0


class Residents:
    """The shards in the cache.

    Args:
        names: returns every name by which plans may know a key.
    """

    def __init__(self, timeline: Timeline, names: Callable[[str], Collection[str]]) -> None:
        self._timeline = timeline
        self._names = names
        self._residents: dict[str, Resident] = {}
        self._unplanned = Sieve()
        self._queues: dict[Course, list[tuple[int, str]]] = {}  # heaps: the furthest position first
        self._orphans: list[tuple[int, str]] = []  # entries of queues whose course has ended

    def __repr__(self) -> str:
        return f"Residents(shards={len(self)}, unplanned={len(self._unplanned)})"

    def __len__(self) -> int:
        return len(self._residents)

    def __contains__(self, key: str) -> bool:
        return key in self._residents

    def add(self, key: str, size_bytes: int) -> None:
        """Note that a shard is here."""
        self._residents[key] = Resident(key, size_bytes)
        self._queue(self._residents[key])

    def remove(self, key: str) -> None:
        """Note that a shard is gone, if it was here."""
        resident = self._residents.pop(key, None)
        if resident is not None:
            self._unplanned.discard(key)
            queue = self._queues.get(resident.course) if resident.course is not None else None
            if resident.course is not None and queue and queue[0] == (-resident.position, key):
                self._pop(resident.course)  # as with every victim; an entry that stays is met later, and dropped then

    def hold(self, key: str) -> None:
        """Note that a reader has a shard in hand: it cannot go."""
        resident = self._residents[key]
        resident.held, resident.course = True, None
        self._unplanned.discard(key)

    def free(self, key: str) -> None:
        """Note that no reader has a shard in hand any more."""
        resident = self._residents.get(key)
        if resident is not None:
            resident.held = False
            self._queue(resident)

    def use_again(self, key: str) -> None:
        """Note that a shard was asked for and was here."""
        self._residents[key].used_again = True
        if key in self._unplanned:
            self._unplanned.visit(key)

    def planned(self, key: str) -> None:
        """Note that one more plan names a shard, if it is here."""
        resident = self._residents.get(key)
        # In another course's queue it may stay: its place there is no sooner than its soonest use.
        if resident is not None and not resident.held and (resident.course is None or resident.course.ended):
            self._queue(resident)

    def passed(self, key: str) -> None:
        """Note that a plan has come past a shard, if it is here, or names it no longer."""
        resident = self._residents.get(key)
        if resident is not None and not resident.held:
            self._queue(resident)

    def forget(self, course: Course) -> None:
        """Note that a plan is no more."""
        self._orphans += self._queues.pop(course, ())
        if len(self._orphans) > 2 * len(self) + _SLACK:  # nobody wanted a victim for a long time
            self._orphans = [entry for entry in set(self._orphans) if self._is_lost(entry[1])]

    def settle(self) -> None:
        """Find a queue for some of those whose course has ended: all at once would hold up everybody else."""
        for _, key in self._orphans[-_BATCH:]:
            if self._is_lost(key):
                self._queue(self._residents[key])
        del self._orphans[-_BATCH:]

    def _is_lost(self, key: str) -> bool:
        resident = self._residents.get(key)
        return resident is not None and resident.course is not None and resident.course.ended

    def _queue(self, resident: Resident) -> None:
        use = self._timeline.next_use(self._names(resident.key))
        if use is None:
            resident.course = None
            if resident.key not in self._unplanned:
                self._unplanned.add(resident.key, visited=resident.used_again)
                resident.used_again = False
            return
        self._unplanned.discard(resident.key)
        _, course, position = use
        if (resident.course, resident.position) != (course, position):
            resident.course, resident.position = course, position
            self._push(course, position, resident.key)

    def _push(self, course: Course, position: int, key: str) -> None:
        queue = self._queues.setdefault(course, [])
        heapq.heappush(queue, (-position, key))
        if len(queue) > 2 * len(self) + _SLACK:  # mostly entries that are no longer true
            self._queues[course] = [entry for entry in set(queue) if self._is_true(course, entry)]
            heapq.heapify(self._queues[course])

    def _is_true(self, course: Course, entry: tuple[int, str]) -> bool:
        resident = self._residents.get(entry[1])
        return resident is not None and resident.course is course and resident.position == -entry[0]

    # Who goes

    def victims(self, wanted_bytes: int, needed_at_s: float, *, spare_planned: bool) -> list[str] | None:
        """Return keys that free `wanted_bytes` together, for a shard that is needed at a time; None if they cannot.

        Shards that nobody plans come first, in SIEVE's order, then the furthest next use; of those that would do
        together, the ones that the others can do without are kept. Nothing goes that is needed before the shard
        which it would make room for, or at the same time: that would only move the miss.

        Args:
            spare_planned: take only what nobody plans.
        """
        chosen: list[tuple[str, int]] = []
        missing_bytes = wanted_bytes
        if missing_bytes > 0:
            for resident, use_s in self._furthest():
                if use_s <= needed_at_s or (spare_planned and use_s < NEVER):
                    break
                chosen.append((resident.key, resident.size_bytes))
                missing_bytes -= resident.size_bytes
                if missing_bytes <= 0:
                    break
        return None if missing_bytes > 0 else _without_the_needless(chosen, -missing_bytes)

    def _furthest(self) -> Iterator[tuple[Resident, float]]:
        """Yield what may go and when it is needed, the furthest first."""
        given: set[str] = set()
        while True:
            for key in self._unplanned.order():
                if key not in given:
                    given.add(key)
                    yield self._residents[key], NEVER
            if not self._orphans:
                break
            self.settle()
        yield from self._furthest_planned()

    def _furthest_planned(self) -> Iterator[tuple[Resident, float]]:
        given: dict[str, tuple[Course, int]] = {}
        try:
            while (end := self._furthest_end()) is not None:
                use_s, course = end
                position, key = self._pop(course)
                # An entry that is not true any more, or was made twice, is met at the end of its queue, and dropped.
                if key in given or not self._is_true(course, (position, key)):
                    continue
                use = self._timeline.next_use(self._names(key))
                if use is not None and use[0] < use_s:
                    self._queue(self._residents[key])
                    continue
                given[key] = course, position
                yield self._residents[key], use_s
        finally:
            for key, (course, position) in given.items():
                heapq.heappush(self._queues.setdefault(course, []), (position, key))

    def _furthest_end(self) -> tuple[float, Course] | None:
        """Return the furthest use that any queue ends with, and the queue's course."""
        furthest: tuple[float, Course] | None = None
        for course, queue in self._queues.items():
            use_s = course.start_s - course.pace_s * queue[0][0]
            if furthest is None or use_s > furthest[0]:
                furthest = use_s, course
        return furthest

    def _pop(self, course: Course) -> tuple[int, str]:
        queue = self._queues[course]
        entry = heapq.heappop(queue)
        if not queue:
            del self._queues[course]
        return entry


def _without_the_needless(chosen: Iterable[tuple[str, int]], spare_bytes: int) -> list[str]:
    """Return the chosen keys but for those whose bytes are not needed, the soonest needed spared first."""
    kept: list[str] = []
    for key, size_bytes in reversed(list(chosen)):
        if size_bytes <= spare_bytes:
            spare_bytes -= size_bytes
        else:
            kept.append(key)
    return kept[::-1]
