"""All sessions' plans merged: when each shard is needed next, and which missing shard is needed first. Pure.

Times are seconds of the caller's clock, set by `tick`. They make fast and slow jobs comparable: a session's measured
pace converts a distance in its plan, in shards, into a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from shardcache.plan.reader_plan import ReaderPlan

NEVER = math.inf

# Pace of a session until it is measured, if neither its job nor other sessions have one.
_GUESS_S = 1.0
# Number of jobs whose pace is remembered, including those whose sessions have ended.
_JOBS = 1_000
_NO_USES: dict[ReaderPlan, int] = {}
_BATCH = 64

Use = tuple[float, ReaderPlan, int]
"""A use of a shard: the time, the plan, and the position on it."""


Session = TypeVar("Session", bound=Hashable)


class Missing(NamedTuple, Generic[Session]):
    """A shard that a session needs and that is not cached.

    Attributes:
        position: its position in the session's plan.
    """

    name: str
    needed_at_s: float
    session: Session
    position: int


class Timeline(Generic[Session]):
    """The plans of all sessions at the current time.

    Attributes:
        now_s: the time of the last `tick`.
    """

    def __init__(self) -> None:
        self.now_s = -math.inf
        self._reader_plans: dict[Session, ReaderPlan] = {}
        self._uses: dict[str, dict[ReaderPlan, int]] = {}  # each shard's next position on each plan
        self._paces_s: dict[Hashable, float] = {}  # last measured pace of each job
        self._ended: list[ReaderPlan] = []  # ended plans that still have entries in `_uses`, all at NEVER

    def __repr__(self) -> str:
        return f"Timeline(sessions={len(self._reader_plans)}, shards={len(self._uses)})"

    def tick(self, now_s: float) -> None:
        """Set the current time, which applies to all events and queries until the next `tick`."""
        if now_s != self.now_s:
            self.now_s = now_s
            for reader_plan in self._reader_plans.values():
                if now_s > reader_plan.steady_until_s:
                    reader_plan.tick(now_s)
        if self._ended:
            self._sweep()

    # Events of sessions

    def reader_plan(self, session: Session) -> ReaderPlan | None:
        """Return the plan of a session that has declared a plan."""
        return self._reader_plans.get(session)

    def declare(
        self, session: Session, seconds_per_shard: float | None = None, job: Hashable | None = None
    ) -> ReaderPlan:
        """Begin a session's plan, empty, replacing any previous one; the session keeps its pace.

        Args:
            job: its job, whose sessions, including ended ones, are assumed to have the same pace.
        """
        previous = self.forget(session)
        if seconds_per_shard is None:
            seconds_per_shard = previous.seconds_per_shard if previous else self._usual_pace_s()
        reader_plan = self._reader_plans[session] = ReaderPlan(seconds_per_shard, self.now_s, job)
        if previous is not None and previous.measures:
            reader_plan.measures = previous.measures
        elif job in self._paces_s:
            reader_plan.believe(self._paces_s[job])
        reader_plan.tick(self.now_s)
        return reader_plan

    def _usual_pace_s(self) -> float:
        plans = self._reader_plans.values()
        paces_s = [reader_plan.seconds_per_shard for reader_plan in plans if reader_plan.measures]
        paces_s = paces_s or [reader_plan.seconds_per_shard for reader_plan in plans]
        return sum(paces_s) / len(paces_s) if paces_s else _GUESS_S

    def _remember_pace(self, reader_plan: ReaderPlan) -> None:
        """Remember a measured pace for the job's later sessions and those that have not read anything yet."""
        if reader_plan.job is None or not reader_plan.measures:
            return
        is_first = reader_plan.job not in self._paces_s
        self._paces_s[reader_plan.job] = reader_plan.seconds_per_shard
        if is_first:
            for other in self._reader_plans.values():
                if other.job == reader_plan.job and not other.measures:
                    other.believe(reader_plan.seconds_per_shard)
                    other.tick(self.now_s)
        if len(self._paces_s) > _JOBS:
            del self._paces_s[next(iter(self._paces_s))]

    def extend(self, session: Session, names: Iterable[str]) -> None:
        """Append shards to a session's plan."""
        reader_plan, all_uses = self._reader_plans[session], self._uses
        for name in names:
            uses = all_uses.get(name)
            if uses is None:
                all_uses[name] = {reader_plan: reader_plan.append(name, None)}
            else:
                position = reader_plan.append(name, uses.get(reader_plan))
                uses.setdefault(reader_plan, position)

    def forget(self, session: Session) -> ReaderPlan | None:
        """Drop a session's plan; return its plan, now ended, or None if it had none."""
        reader_plan = self._reader_plans.pop(session, None)
        if reader_plan is not None:
            reader_plan.end()
            self._ended.append(reader_plan)
        return reader_plan

    def _sweep(self) -> None:
        """Drop a batch of an ended plan's uses: all at once would block the event loop."""
        reader_plan = self._ended[-1]
        for name, _ in reader_plan.move(reader_plan.cursor + _BATCH):
            self._drop(name, reader_plan)
        if reader_plan.cursor == len(reader_plan.names):
            self._ended.pop()

    # `waited_s` is the session's total waiting time so far, which does not count as reading.

    def waits(self, session: Session, position: int, waited_s: float = 0.0) -> list[str]:
        """Record that a session has nothing to read until it gets `position`; return the shards passed."""
        reader_plan = self._reader_plans[session]
        reader_plan.waits(position, self.now_s, waited_s)
        return self._move(reader_plan, position)

    def reads(self, session: Session, position: int, waited_s: float = 0.0) -> list[str]:
        """Record that a session takes `position`; return the shards passed."""
        reader_plan = self._reader_plans[session]
        reader_plan.reads(position, self.now_s, waited_s)
        return self._move(reader_plan, position)

    def done(self, session: Session, position: int, waited_s: float = 0.0) -> list[str]:
        """Record that a session releases `position`; return the shards passed."""
        reader_plan = self._reader_plans[session]
        reader_plan.done(position, self.now_s, waited_s)
        return self._move(reader_plan, position + 1)

    def _move(self, reader_plan: ReaderPlan, position: int) -> list[str]:
        self._remember_pace(reader_plan)
        over = list(reader_plan.move(position))
        reader_plan.tick(self.now_s)
        for name, at in over:
            again = reader_plan.again(at)
            if again is None:
                self._drop(name, reader_plan)
            else:
                self._uses[name][reader_plan] = again
        return [name for name, _ in over]

    def _drop(self, name: str, reader_plan: ReaderPlan) -> None:
        uses = self._uses.get(name)
        if uses is not None:  # else it was already dropped at an earlier position
            uses.pop(reader_plan, None)
            if not uses:
                del self._uses[name]

    # Queries

    def next_use(self, names: Collection[str]) -> Use | None:
        """Return the soonest use of a shard under any of its names, or None if no plan contains it."""
        soonest, soonest_s = None, NEVER
        for name in names:
            for reader_plan, position in self._uses.get(name, _NO_USES).items():
                use_s = reader_plan.start_s + reader_plan.pace_s * position
                if use_s < soonest_s:
                    soonest, soonest_s = (reader_plan, position), use_s
        return None if soonest is None else (soonest_s, *soonest)

    def evicted(self, name: str) -> None:
        """Record that a shard is no longer cached."""
        for reader_plan, position in self._uses.get(name, _NO_USES).items():
            reader_plan.frontier = min(reader_plan.frontier, position)

    def next_missing(self, present: Callable[[str], bool]) -> Missing[Session] | None:
        """Return the missing shard that is needed soonest, or None if all are present."""
        soonest, soonest_s = None, NEVER
        for session, reader_plan in self._reader_plans.items():
            # The first gap is at the frontier or after it, so most plans can be ruled out without `present`.
            if reader_plan.start_s + reader_plan.pace_s * reader_plan.frontier < soonest_s:
                need_s = self._first_gap(reader_plan, present)
                if need_s is not None and need_s < soonest_s:
                    soonest_s, at = need_s, reader_plan.frontier
                    soonest = Missing(reader_plan.names[at], need_s, session, at)
        return soonest

    def ahead(self, session: Session, until_s: float, limit: int) -> Iterator[tuple[float, int, str]]:
        """Yield (time, position, name) of a session's shards from its cursor to a time, in order, at most `limit`."""
        reader_plan = self._reader_plans.get(session)
        if reader_plan is None:
            return
        for position in range(reader_plan.cursor, min(reader_plan.cursor + limit, len(reader_plan.names))):
            use_s = reader_plan.start_s + reader_plan.pace_s * position
            if use_s > until_s:
                return
            yield use_s, position, reader_plan.names[position]

    def covered_until(self, session: Session, cared_for: Callable[[str], bool], coming: Iterable[str]) -> float:
        """Return when a session needs its first shard that is not cached, NEVER if all are.

        Args:
            cared_for: returns True for a shard that is cached or among those in `coming`.
            coming: shards that are being fetched.
        """
        reader_plan = self._reader_plans.get(session)
        if reader_plan is None:
            return NEVER
        gap_s = self._first_gap(reader_plan, cared_for)
        positions = (self._uses.get(name, _NO_USES).get(reader_plan) for name in coming)
        needs_s = [
            reader_plan.start_s + reader_plan.pace_s * position for position in positions if position is not None
        ]
        return min([NEVER if gap_s is None else gap_s, *needs_s])

    @staticmethod
    def _first_gap(reader_plan: ReaderPlan, present: Callable[[str], bool]) -> float | None:
        names, frontier = reader_plan.names, reader_plan.frontier
        while frontier < len(names) and present(names[frontier]):
            frontier += 1
        reader_plan.frontier = frontier
        return reader_plan.start_s + reader_plan.pace_s * frontier if frontier < len(names) else None
