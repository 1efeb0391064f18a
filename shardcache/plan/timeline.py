"""All sessions' plans merged: when each shard is needed next, and which missing one is needed first. Pure.

Time is the caller's clock in seconds, told by `tick`. It makes a fast job comparable with a slow one: within a
session's plan a shard lies so many shards ahead, and the session's measured pace turns that into a moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import NamedTuple

from shardcache.plan.course import Course

NEVER = math.inf

# Until a session's pace is known it is taken to be that of its job, else that of the others, or else this.
_GUESS_S = 1.0
# The paces of as many jobs are remembered, those whose sessions have ended included.
_JOBS = 1_000
_NO_USES: dict[Course, int] = {}
_BATCH = 64

Use = tuple[float, Course, int]
"""When a shard is needed next, on which course, and at which of its positions."""


class Missing(NamedTuple):
    """A shard that some session needs and that is not here.

    Attributes:
        position: where in the session's plan it is.
    """

    name: str
    needed_at_s: float
    session: Hashable
    position: int


class Timeline:
    """The courses of all sessions, seen from the present moment.

    Attributes:
        now_s: the time of the last `tick`.
    """

    def __init__(self) -> None:
        self.now_s = -math.inf
        self._courses: dict[Hashable, Course] = {}
        self._uses: dict[str, dict[Course, int]] = {}  # where each course reads a shard next
        self._paces_s: dict[Hashable, float] = {}  # what was measured last of each job
        self._ended: list[Course] = []  # of which there still are uses; they are at no time

    def __repr__(self) -> str:
        return f"Timeline(sessions={len(self._courses)}, shards={len(self._uses)})"

    def tick(self, now_s: float) -> None:
        """Move on to a time; each event and question that follows is of that moment."""
        if now_s != self.now_s:
            self.now_s = now_s
            for course in self._courses.values():
                if now_s > course.steady_until_s:
                    course.tick(now_s)
        if self._ended:
            self._sweep()

    # What sessions do

    def course(self, session: Hashable) -> Course | None:
        """Return the course of a session that has declared a plan."""
        return self._courses.get(session)

    def declare(self, session: Hashable, seconds_per_shard: float | None = None, job: Hashable | None = None) -> Course:
        """Begin a session's plan, its first or another, with no shards yet; its pace outlives its plans.

        Args:
            job: whose other sessions, also such as have ended, are as fast as this one.
        """
        former = self.forget(session)
        if seconds_per_shard is None:
            seconds_per_shard = former.seconds_per_shard if former else self._usual_pace_s()
        course = self._courses[session] = Course(seconds_per_shard, self.now_s, job)
        if former is not None and former.measures:
            course.measures = former.measures
        elif job in self._paces_s:
            course.believe(self._paces_s[job])
        course.tick(self.now_s)
        return course

    def _usual_pace_s(self) -> float:
        courses = self._courses.values()
        paces_s = [course.seconds_per_shard for course in courses if course.measures]
        paces_s = paces_s or [course.seconds_per_shard for course in courses]
        return sum(paces_s) / len(paces_s) if paces_s else _GUESS_S

    def _remember_pace(self, course: Course) -> None:
        """Keep what was measured for sessions of the same job that come later, or have read nothing yet."""
        if course.job is None or not course.measures:
            return
        is_first = course.job not in self._paces_s
        self._paces_s[course.job] = course.seconds_per_shard
        if is_first:
            for other in self._courses.values():
                if other.job == course.job and not other.measures:
                    other.believe(course.seconds_per_shard)
                    other.tick(self.now_s)
        if len(self._paces_s) > _JOBS:
            del self._paces_s[next(iter(self._paces_s))]

    def extend(self, session: Hashable, names: Iterable[str]) -> None:
        """Add shards to the end of a session's plan."""
        course, all_uses = self._courses[session], self._uses
        for name in names:
            uses = all_uses.get(name)
            if uses is None:
                all_uses[name] = {course: course.append(name, None)}
            else:
                position = course.append(name, uses.get(course))
                uses.setdefault(course, position)

    def forget(self, session: Hashable) -> Course | None:
        """Drop a session's plan; return the course that is no more."""
        course = self._courses.pop(session, None)
        if course is not None:
            course.end()
            self._ended.append(course)
        return course

    def _sweep(self) -> None:
        """Forget some of the uses of courses that have ended: all at once would hold up everybody else."""
        course = self._ended[-1]
        for name, _ in course.move(course.cursor + _BATCH):
            self._drop(name, course)
        if course.cursor == len(course.names):
            self._ended.pop()

    # `stalled_s` is how long the session has stood still so far, all told: it does not count as reading.

    def waits(self, session: Hashable, position: int, stalled_s: float = 0.0) -> list[str]:
        """Note that a session has nothing to read until it gets `position`; return the shards that are over."""
        course = self._courses[session]
        course.waits(position, self.now_s, stalled_s)
        return self._move(course, position)

    def reads(self, session: Hashable, position: int, stalled_s: float = 0.0) -> list[str]:
        """Note that a session takes `position` into its hands; return the shards that are over."""
        course = self._courses[session]
        course.reads(position, self.now_s, stalled_s)
        return self._move(course, position)

    def done(self, session: Hashable, position: int, stalled_s: float = 0.0) -> list[str]:
        """Note that a session gives `position` back; return the shards that are over."""
        course = self._courses[session]
        course.done(position, self.now_s, stalled_s)
        return self._move(course, position + 1)

    def _move(self, course: Course, position: int) -> list[str]:
        self._remember_pace(course)
        over = list(course.move(position))
        course.tick(self.now_s)
        for name, at in over:
            again = course.again(at)
            if again is None:
                self._drop(name, course)
            else:
                self._uses[name][course] = again
        return [name for name, _ in over]

    def _drop(self, name: str, course: Course) -> None:
        uses = self._uses.get(name)
        if uses is not None:  # else it was met already, at an earlier position
            uses.pop(course, None)
            if not uses:
                del self._uses[name]

    # Questions

    def next_use(self, names: Collection[str]) -> Use | None:
        """Return the soonest use of a shard, by whichever of its names a plan knows it; None when there is none."""
        soonest, soonest_s = None, NEVER
        for name in names:
            for course, position in self._uses.get(name, _NO_USES).items():
                use_s = course.start_s + course.pace_s * position
                if use_s < soonest_s:
                    soonest, soonest_s = (course, position), use_s
        return None if soonest is None else (soonest_s, *soonest)

    def evicted(self, name: str) -> None:
        """Note that a shard is missing again."""
        for course, position in self._uses.get(name, _NO_USES).items():
            course.frontier = min(course.frontier, position)

    def next_missing(self, present: Callable[[str], bool]) -> Missing | None:
        """Return the missing shard that is needed soonest, or None when all are present."""
        soonest, soonest_s = None, NEVER
        for session, course in self._courses.items():
            # The gap is at the frontier or behind it, so that most courses need no look at what is present.
            if course.start_s + course.pace_s * course.frontier < soonest_s:
                need_s = self._first_gap(course, present)
                if need_s is not None and need_s < soonest_s:
                    soonest_s, at = need_s, course.frontier
                    soonest = Missing(course.names[at], need_s, session, at)
        return soonest

    def upcoming(self) -> Iterator[str]:
        """Yield for each session the shard that it takes or waits for next."""
        for course in self._courses.values():
            if course.cursor + 1 < len(course.names):
                yield course.names[course.cursor + 1]

    def ahead(self, session: Hashable, until_s: float, most: int) -> Iterator[tuple[float, int, str]]:
        """Yield when a session needs what, in order, from the shard in its hands to a time, and no more than `most`.

        Each is told by its time, its position in the plan, and its name.
        """
        course = self._courses.get(session)
        if course is None:
            return
        for position in range(course.cursor, min(course.cursor + most, len(course.names))):
            use_s = course.start_s + course.pace_s * position
            if use_s > until_s:
                return
            yield use_s, position, course.names[position]

    def covered_until(self, session: Hashable, cared_for: Callable[[str], bool], coming: Iterable[str]) -> float:
        """Return when a session needs the first shard that is not here; NEVER when all are.

        Args:
            cared_for: whether a shard is here or among those that are `coming`.
        """
        course = self._courses.get(session)
        if course is None:
            return NEVER
        gap_s = self._first_gap(course, cared_for)
        positions = (self._uses.get(name, _NO_USES).get(course) for name in coming)
        needs_s = [course.start_s + course.pace_s * position for position in positions if position is not None]
        return min([NEVER if gap_s is None else gap_s, *needs_s])

    @staticmethod
    def _first_gap(course: Course, present: Callable[[str], bool]) -> float | None:
        names, frontier = course.names, course.frontier
        while frontier < len(names) and present(names[frontier]):
            frontier += 1
        course.frontier = frontier
        return course.start_s + course.pace_s * frontier if frontier < len(names) else None
