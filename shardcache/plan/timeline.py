"""All sessions' plans merged: when each shard is needed next, and which missing shard is needed first. Pure.

Times are seconds of the caller's clock, set by `tick`. They make fast and slow jobs comparable: a session's measured
pace converts a distance in its plan, in shards, into a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import NamedTuple

from shardcache.plan.course import Course

NEVER = math.inf

# Pace of a session until it is measured, if neither its job nor other sessions have one.
_GUESS_S = 1.0
# Number of jobs whose pace is remembered, including those whose sessions have ended.
_JOBS = 1_000
_NO_USES: dict[Course, int] = {}
_BATCH = 64

Use = tuple[float, Course, int]
"""A use of a shard: the time, the course, and the position on it."""


class Missing(NamedTuple):
    """A shard that a session needs and that is not cached.

    Attributes:
        position: its position in the session's plan.
    """

    name: str
    needed_at_s: float
    session: Hashable
    position: int


class Timeline:
    """The courses of all sessions at the current time.

    Attributes:
        now_s: the time of the last `tick`.
    """

    def __init__(self) -> None:
        self.now_s = -math.inf
        self._courses: dict[Hashable, Course] = {}
        self._uses: dict[str, dict[Course, int]] = {}  # each shard's next position on each course
        self._paces_s: dict[Hashable, float] = {}  # last measured pace of each job
        self._ended: list[Course] = []  # ended courses that still have entries in `_uses`, all at NEVER

    def __repr__(self) -> str:
        return f"Timeline(sessions={len(self._courses)}, shards={len(self._uses)})"

    def tick(self, now_s: float) -> None:
        """Set the current time, which applies to all events and queries until the next `tick`."""
        if now_s != self.now_s:
            self.now_s = now_s
            for course in self._courses.values():
                if now_s > course.steady_until_s:
                    course.tick(now_s)
        if self._ended:
            self._sweep()

    # Events of sessions

    def course(self, session: Hashable) -> Course | None:
        """Return the course of a session that has declared a plan."""
        return self._courses.get(session)

    def declare(self, session: Hashable, seconds_per_shard: float | None = None, job: Hashable | None = None) -> Course:
        """Begin a session's plan, empty, replacing any former one; the session keeps its pace.

        Args:
            job: its job, whose sessions, including ended ones, are assumed to have the same pace.
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
        """Remember a measured pace for the job's later sessions and those that have not read anything yet."""
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
        """Append shards to a session's plan."""
        course, all_uses = self._courses[session], self._uses
        for name in names:
            uses = all_uses.get(name)
            if uses is None:
                all_uses[name] = {course: course.append(name, None)}
            else:
                position = course.append(name, uses.get(course))
                uses.setdefault(course, position)

    def forget(self, session: Hashable) -> Course | None:
        """Drop a session's plan; return its course, now ended, or None if it had none."""
        course = self._courses.pop(session, None)
        if course is not None:
            course.end()
            self._ended.append(course)
        return course

    def _sweep(self) -> None:
        """Drop a batch of an ended course's uses: all at once would block the event loop."""
        course = self._ended[-1]
        for name, _ in course.move(course.cursor + _BATCH):
            self._drop(name, course)
        if course.cursor == len(course.names):
            self._ended.pop()

    # `stalled_s` is the session's total stall time so far, which does not count as reading.

    def waits(self, session: Hashable, position: int, stalled_s: float = 0.0) -> list[str]:
        """Record that a session has nothing to read until it gets `position`; return the shards passed."""
        course = self._courses[session]
        course.waits(position, self.now_s, stalled_s)
        return self._move(course, position)

    def reads(self, session: Hashable, position: int, stalled_s: float = 0.0) -> list[str]:
        """Record that a session takes `position`; return the shards passed."""
        course = self._courses[session]
        course.reads(position, self.now_s, stalled_s)
        return self._move(course, position)

    def done(self, session: Hashable, position: int, stalled_s: float = 0.0) -> list[str]:
        """Record that a session releases `position`; return the shards passed."""
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
        if uses is not None:  # else it was already dropped at an earlier position
            uses.pop(course, None)
            if not uses:
                del self._uses[name]

    # Queries

    def next_use(self, names: Collection[str]) -> Use | None:
        """Return the soonest use of a shard under any of its names, or None if no plan contains it."""
        soonest, soonest_s = None, NEVER
        for name in names:
            for course, position in self._uses.get(name, _NO_USES).items():
                use_s = course.start_s + course.pace_s * position
                if use_s < soonest_s:
                    soonest, soonest_s = (course, position), use_s
        return None if soonest is None else (soonest_s, *soonest)

    def evicted(self, name: str) -> None:
        """Record that a shard is no longer cached."""
        for course, position in self._uses.get(name, _NO_USES).items():
            course.frontier = min(course.frontier, position)

    def next_missing(self, present: Callable[[str], bool]) -> Missing | None:
        """Return the missing shard that is needed soonest, or None if all are present."""
        soonest, soonest_s = None, NEVER
        for session, course in self._courses.items():
            # The first gap is at the frontier or after it, so most courses can be ruled out without `present`.
            if course.start_s + course.pace_s * course.frontier < soonest_s:
                need_s = self._first_gap(course, present)
                if need_s is not None and need_s < soonest_s:
                    soonest_s, at = need_s, course.frontier
                    soonest = Missing(course.names[at], need_s, session, at)
        return soonest

    def upcoming(self) -> Iterator[str]:
        """Yield for each session the shard after the one at its cursor."""
        for course in self._courses.values():
            if course.cursor + 1 < len(course.names):
                yield course.names[course.cursor + 1]

    def ahead(self, session: Hashable, until_s: float, most: int) -> Iterator[tuple[float, int, str]]:
        """Yield (time, position, name) of a session's shards from its cursor to a time, in order, at most `most`."""
        course = self._courses.get(session)
        if course is None:
            return
        for position in range(course.cursor, min(course.cursor + most, len(course.names))):
            use_s = course.start_s + course.pace_s * position
            if use_s > until_s:
                return
            yield use_s, position, course.names[position]

    def covered_until(self, session: Hashable, cared_for: Callable[[str], bool], coming: Iterable[str]) -> float:
        """Return when a session needs its first shard that is not cached, NEVER if all are.

        Args:
            cared_for: returns True for a shard that is cached or among those in `coming`.
            coming: shards that are being fetched.
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
