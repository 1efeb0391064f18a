"""All sessions' plans merged: when each shard is needed next, and which is missing first. Pure.

A session is a connected reader; its plan lists the shards that it will read, position by position.
A plan's cursor is the position that the session has reached. A use of a shard is a position, from
the cursor on, at which a plan has the shard. The plan's frontier is the first position whose shard
may be missing from the cache. `Schedule` adds the cached shards to this.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from shardcache.plan.reader_plan import NEVER, ReaderPlan

# Pace of a session until it is measured, if neither its job nor other sessions have one.
_GUESS_S = 1.0
_GUESS_OF_PARTS_S = 0.001  # the same for a plan of parts
_JOBS = 1_000  # number of jobs whose pace is remembered, even if their sessions have ended
_BATCH = 64  # number of an ended plan's uses that are dropped at a time
_NO_USES: dict[ReaderPlan, int] = {}  # default for a lookup, which saves making one each time
Session = TypeVar("Session", bound=Hashable)


class MissingShard(NamedTuple, Generic[Session]):
    """A shard that a session needs, and that is not cached.

    Attributes:
        name: the shard's name in plans.
        needed_at_s: predicted time of the need.
        session: the session.
        position: the shard's position in the session's plan.
    """

    name: str
    needed_at_s: float
    session: Session
    position: int


class Timeline(Generic[Session]):
    """The plans of all sessions.

    Attributes:
        now_s: the time of the last `tick`, to which all events and queries refer.
    """

    def __init__(self) -> None:
        self.now_s = -math.inf
        self._plans: dict[Session, ReaderPlan] = {}
        # For each shard, by its name, the next position in each plan that has it.
        self._uses: dict[str, dict[ReaderPlan, int]] = {}
        self._paces_s: dict[Hashable, float] = {}  # last measured pace of each job
        # Ended plans that still have entries in `_uses`. The time of all their uses is NEVER.
        self._ended: list[ReaderPlan] = []

    def __repr__(self) -> str:
        return f"Timeline(sessions={len(self._plans)}, shards={len(self._uses)})"

    def tick(self, now_s: float) -> None:
        """Set the current time, which must not decrease."""
        if now_s != self.now_s:
            self.now_s = now_s
            for plan in self._plans.values():
                if now_s > plan.steady_until_s:  # before then, its predictions do not change
                    plan.tick(now_s)
        if self._ended:
            self._sweep()

    # Events of sessions

    def declare(
        self,
        session: Session,
        seconds_per_shard: float | None = None,
        job: Hashable | None = None,
        *,
        is_of_parts: bool = False,
    ) -> ReaderPlan:
        """Begin a session's plan, in place of the previous one; `extend` adds its shards.

        Args:
            session: the session.
            seconds_per_shard: the session's pace. None for that of its previous plan; without a
                previous plan, it is the mean pace of all sessions.
            job: the session's job. A session without a measured pace takes the one that other
                sessions of its job have, or had before they ended.
            is_of_parts: True for a plan of parts: see `reader_plan`.
        """
        previous = self.forget(session)
        if previous is not None and previous.is_of_parts != is_of_parts:
            previous = None  # the pace of parts is not that of shards
        if seconds_per_shard is None:
            seconds_per_shard = self._usual_pace_s(is_of_parts=is_of_parts)
            if previous is not None:
                seconds_per_shard = previous.seconds_per_shard
        plan = ReaderPlan(seconds_per_shard, self.now_s, job, is_of_parts)
        self._plans[session] = plan
        if previous is not None and previous.measurements:
            plan.measurements = previous.measurements  # the pace is no guess, so it stays
        elif job in self._paces_s:
            plan.adopt_pace(self._paces_s[job])
        plan.tick(self.now_s)
        return plan

    def _usual_pace_s(self, *, is_of_parts: bool) -> float:
        """Return the mean pace of all sessions; if paces have been measured, only of those.

        Args:
            is_of_parts: whether it is the pace of parts, or that of shards.
        """
        plans = [plan for plan in self._plans.values() if plan.is_of_parts == is_of_parts]
        paces_s = [plan.seconds_per_shard for plan in plans if plan.measurements]
        if not paces_s:
            paces_s = [plan.seconds_per_shard for plan in plans]
        if not paces_s:
            return _GUESS_OF_PARTS_S if is_of_parts else _GUESS_S
        return sum(paces_s) / len(paces_s)

    def _remember_pace(self, plan: ReaderPlan) -> None:
        """Remember a plan's measured pace, for sessions of the same job that have none yet."""
        if plan.job is None or not plan.measurements:
            return
        is_first = plan.job not in self._paces_s
        self._paces_s[plan.job] = plan.seconds_per_shard
        if is_first:  # the job's other sessions have only guessed so far
            for other in self._plans.values():
                if other.job == plan.job and not other.measurements:
                    other.adopt_pace(plan.seconds_per_shard)
                    other.tick(self.now_s)
        if len(self._paces_s) > _JOBS:
            oldest = next(iter(self._paces_s))
            del self._paces_s[oldest]

    def extend(self, session: Session, names: Collection[str]) -> None:
        """Append shards to a session's plan, in reading order."""
        plan = self._plans[session]
        all_uses = self._uses
        for name in names:
            uses = all_uses.get(name)
            if uses is None:
                all_uses[name] = {plan: plan.append(name, next_use=None)}
            else:
                position = plan.append(name, next_use=uses.get(plan))
                uses.setdefault(plan, position)  # if the plan has an earlier use, that stays next

    def forget(self, session: Session) -> ReaderPlan | None:
        """Drop a session and its plan; return the plan, now ended, or None if it had none."""
        plan = self._plans.pop(session, None)
        if plan is not None:
            plan.end()
            self._ended.append(plan)
        return plan

    def _sweep(self) -> None:
        """Drop a batch of an ended plan's uses. Dropping all at once would block the event loop."""
        plan = self._ended[-1]
        # No session moves the cursor of an ended plan. It marks the uses that were dropped.
        for name, _ in plan.move(plan.cursor + _BATCH):
            self._drop(name, plan)
        if plan.cursor == plan.end_position:
            self._ended.pop()

    # In the following methods, `waited_s` is the session's total waiting time so far, which does
    # not count as reading. They do nothing for a session without a plan, such as one that reads
    # ranges of files, whose order is not known. The first three are for plans of shards.

    def waits(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session has nothing to read until it gets the shard at `position`."""
        plan = self._plan_of_shards(session)
        if plan is None:
            return
        plan.waits(position, self.now_s, waited_s)
        self._move(plan, position)

    def reads(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session takes the shard at `position`.

        The session may keep shards that it took before.
        """
        plan = self._plan_of_shards(session)
        if plan is None:
            return
        plan.reads(position, self.now_s, waited_s)
        self._move(plan, position)

    def done(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session releases the shard at `position`."""
        plan = self._plan_of_shards(session)
        if plan is None:
            return
        plan.done(position, self.now_s, waited_s)
        self._move(plan, position + 1)

    def passed(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session has read all parts before `position`, in a plan of parts."""
        plan = self._plans.get(session)
        if plan is None or not plan.is_of_parts:
            return
        plan.passed(position, self.now_s, waited_s)
        self._move(plan, position)

    def _move(self, plan: ReaderPlan, position: int) -> list[str]:
        """Advance a plan's cursor to `position`; return the names of the shards passed."""
        self._remember_pace(plan)
        passed = list(plan.move(position))
        plan.tick(self.now_s)
        for name, passed_position in passed:
            next_position = plan.next_position(passed_position)
            if next_position:  # 0 stands for none
                self._uses[name][plan] = next_position
            else:
                self._drop(name, plan)
        plan.forget_passed()
        return [name for name, _ in passed]

    def _drop(self, name: str, plan: ReaderPlan) -> None:
        """Forget a plan's uses of a shard."""
        uses = self._uses.get(name)
        if uses is not None:  # None if they were dropped at an earlier position of the same shard
            uses.pop(plan, None)
            if not uses:
                del self._uses[name]

    def missing_again(self, name: str) -> None:
        """Record that a shard is no longer cached, or does not arrive as expected.

        Plans that need the shard look for missing shards from its position on again.
        """
        for plan, position in self._uses.get(name, _NO_USES).items():
            plan.frontier = min(plan.frontier, position)

    # Queries

    def next_use(self, names: Collection[str]) -> tuple[ReaderPlan, int] | None:
        """Return plan and position of a shard's soonest use; None if no plan contains the shard.

        Args:
            names: all names of the shard.
        """
        soonest: tuple[ReaderPlan, int] | None = None
        soonest_s = NEVER  # the time of uses in ended plans, which therefore do not count
        for name in names:
            for plan, position in self._uses.get(name, _NO_USES).items():
                use_s = plan.start_s + plan.pace_s * position
                if use_s < soonest_s:
                    soonest_s = use_s
                    soonest = (plan, position)
        return soonest

    def next_missing(self, needs_no_fetch: Callable[[str], bool]) -> MissingShard[Session] | None:
        """Return the missing shard that is needed soonest, and so has to be fetched next.

        None if no shard has to be fetched. Parts are not looked for: readers request their ranges
        themselves, ahead of need.

        Args:
            needs_no_fetch: returns, for a shard's name, True if the shard must not be fetched now:
                it is cached, is being fetched, or is not worth an attempt.
        """
        soonest: MissingShard[Session] | None = None
        soonest_s = NEVER
        for session, plan in self._plans.items():
            # A plan's first missing shard is at the frontier or after it. So a plan whose frontier
            # is needed later than the best shard so far is ruled out without asking
            # `needs_no_fetch`, which saves most of the time.
            if plan.is_of_parts or plan.start_s + plan.pace_s * plan.frontier >= soonest_s:
                continue
            need_s = self._advance_frontier(plan, needs_no_fetch)
            if need_s is not None and need_s < soonest_s:
                soonest_s = need_s
                position = plan.frontier
                soonest = MissingShard(plan.names[position], need_s, session, position)
        return soonest

    def ahead(
        self,
        session: Session,
        until_s: float,
        limit: int,
    ) -> Iterator[tuple[float, int, str]]:
        """Yield time, position and name of a session's shards from its cursor on, in order.

        Args:
            session: the session; one without a plan of shards has none.
            until_s: time up to which shards are yielded.
            limit: maximum number of shards.
        """
        plan = self._plan_of_shards(session)
        if plan is None:
            return
        end = min(plan.cursor + limit, len(plan.names))
        for position in range(plan.cursor, end):
            use_s = plan.start_s + plan.pace_s * position
            if use_s > until_s:
                return
            yield use_s, position, plan.names[position]

    def covered_until_s(
        self,
        session: Session,
        needs_no_fetch: Callable[[str], bool],
        coming: Iterable[str],
    ) -> float:
        """Return when a session needs its first shard that is not cached; NEVER if all are.

        Args:
            session: the session.
            needs_no_fetch: as in `next_missing`.
            coming: names of the shards that are being fetched. They count as not cached, although
                `needs_no_fetch` returns True for them.
        """
        plan = self._plan_of_shards(session)
        if plan is None:
            return NEVER
        need_s = NEVER
        first_missing_s = self._advance_frontier(plan, needs_no_fetch)
        if first_missing_s is not None:
            need_s = first_missing_s
        for name in coming:
            position = self._uses.get(name, _NO_USES).get(plan)
            if position is not None:
                need_s = min(need_s, plan.start_s + plan.pace_s * position)
        return need_s

    def shards_per_s(self, session: Session) -> float:
        """Return the number of shards that a session reads per second, without waits.

        0 if its pace has not been measured.
        """
        plan = self._plan_of_shards(session)
        if plan is None or not plan.measurements:
            return 0.0
        return 1 / plan.pace_s

    def _plan_of_shards(self, session: Session) -> ReaderPlan | None:
        """Return a session's plan; None if it has no plan, or one of parts."""
        plan = self._plans.get(session)
        return None if plan is None or plan.is_of_parts else plan

    @staticmethod
    def _advance_frontier(
        plan: ReaderPlan,
        needs_no_fetch: Callable[[str], bool],
    ) -> float | None:
        """Move a plan's frontier to its first missing shard; return when that shard is needed.

        None if no shard is missing.
        """
        names = plan.names
        frontier = plan.frontier
        while frontier < len(names) and needs_no_fetch(names[frontier]):
            frontier += 1
        plan.frontier = frontier
        if frontier == len(names):
            return None
        return plan.start_s + plan.pace_s * frontier
