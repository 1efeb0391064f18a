"""All sessions' plans merged: when each shard is needed next, and which missing shard is needed first. Pure.

Times are seconds of the caller's clock, set by `tick`. They make fast and slow jobs comparable: a session's measured
pace converts a distance in its plan, in shards, into a time.

The time between taking two shards does not show the pace until a shard has been released. A reader that mixes shards
takes its first ones in quick succession, since each yields few samples at first; one that resumes from a checkpoint
takes all of them together; and the data loader fills its own queues. So the pace is measured when the first shards are
released: those are read completely, and those still in use are half read on average. From then on, shards are taken as
fast as they are read.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

NEVER = math.inf

# Weight of a new measurement in the moving average: it follows a change of pace within a few shards.
_NEWEST = 0.3
# Less reading time than this does not show the pace: a loader that fills its queues reads as fast as it can.
_ENOUGH_S = 1.0
_POSITIONS: list[int] = []  # int objects shared by all plans, to save a million of them per plan
_MIN_S = 1e-6  # minimum pace, so that the positions of a plan are at distinct times
# Pace of a session until it is measured, if neither its job nor other sessions have one.
_GUESS_S = 1.0
_JOBS = 1_000  # number of jobs whose pace is remembered, including those whose sessions have ended
_BATCH = 64


@dataclass(slots=True, eq=False)
class ReaderPlan:
    """One session's plan, its position in it, its pace, and the predicted time of every further position.

    Position p will be read at `start_s + pace_s * p`, as of the last `tick`: attributes rather than a method, since
    each decision looks at every plan several times. The cursor is the latest position that the session has taken or
    waits for. Earlier ones are done as far as the plan is concerned, though their shards may still be in use.
    """

    seconds_per_shard: float  # smoothed time between taking two shards, without waits
    _since_s: float | None  # time of the last event; None while the session waits
    job: Hashable = None  # its sessions are assumed to have the same pace
    names: list[str] = field(default_factory=list, init=False)  # the shards, in reading order
    cursor: int = field(default=0, init=False)
    frontier: int = field(default=0, init=False)  # first that may be missing; from the cursor to it, all are cached
    measures: int = field(default=0, init=False)  # behind `seconds_per_shard`; 0 while it is a guess
    start_s: float = field(init=False)  # NEVER after `end`
    pace_s: float = field(init=False)
    steady_until_s: float = field(init=False)  # until then, another `tick` changes nothing
    settled: bool = field(default=False, init=False)  # True once shards are taken as fast as they are read
    _again: list[int] = field(default_factory=list, init=False)  # for each position, the next of the same shard, or 0
    _last: dict[str, int] = field(default_factory=dict, init=False)  # last position of shards read more than once
    _waited_s: float = field(default=0.0, init=False)  # total waiting time of the session at `_since_s`
    _reading: bool = field(default=False, init=False)  # True if the shard at the cursor was taken at `_since_s`
    _begun: tuple[float, float] | None = field(default=None, init=False)  # first take, and total waiting time then
    _taken: int = field(default=0, init=False)  # shards taken since then, and released:
    _given: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        assert self._since_s is not None
        self.tick(self._since_s)

    def tick(self, now_s: float) -> None:
        """Update the prediction to the time `now_s`.

        A reader that exceeds its usual time per shard is taken to be that slow, so the plan of a hanging job recedes
        into the future, and returns when the job continues.
        """
        since_s, pace_s = self._since_s, self.seconds_per_shard
        if since_s is None:  # the session waits: the shard at the cursor is needed now, at any time
            since_s = self.steady_until_s = now_s
        else:
            self.steady_until_s = since_s + pace_s
            pace_s = max(pace_s, now_s - since_s)
        self.pace_s = pace_s
        self.start_s = since_s - self.cursor * pace_s

    def end(self) -> None:
        """End the plan: nothing more of it will be read."""
        self.start_s = NEVER

    @property
    def ended(self) -> bool:
        """True after `end`."""
        return self.start_s == NEVER

    def append(self, name: str, first: int | None) -> int:
        """Append a shard and return its position; `first` is the next position of the same shard, if there is one."""
        position = len(self.names)
        if position == len(_POSITIONS):
            _POSITIONS.append(position)
        position = _POSITIONS[position]
        self.names.append(name)
        self._again.append(0)
        if first is None:
            self._last.pop(name, None)
        else:
            self._again[self._last.get(name, first)] = position
            self._last[name] = position
        return position

    def again(self, position: int) -> int:
        """Return the next position of the shard at `position`, 0 if there is none."""
        return self._again[position]

    def waits(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session reads nothing until the shard at `position` arrives."""
        self._measure(position, now_s, waited_s)
        self._since_s, self._reading = None, False

    def reads(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session has taken the shard at `position` and reads it from now on."""
        self._measure(position, now_s, waited_s)
        self._taken += 1
        self._begun = self._begun or (now_s, waited_s)
        self.settled = self.settled or position < self.cursor  # the session was resumed after a daemon restart
        if position >= self.cursor or self._since_s is None:  # an older shard, taken again, does not show the pace
            self._since_s, self._waited_s, self._reading = now_s, waited_s, position >= self.cursor

    def done(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session has released the shard at `position`."""
        if position == self.cursor:
            self._measure(position + 1, now_s, waited_s)
        if position >= 0 and not self.settled:  # a shard of a previous plan does not show the pace of this one
            self._settle(now_s, waited_s)
        if position == self.cursor:
            self._since_s, self._reading = now_s, False

    def believe(self, seconds_per_shard: float) -> None:
        """Adopt the pace of another session of the job, instead of a guess."""
        self.seconds_per_shard, self.measures = seconds_per_shard, 1

    def _settle(self, now_s: float, waited_s: float) -> None:
        """Estimate the pace from all shards so far, once the reading time suffices."""
        self._given += 1
        if self._begun is None:
            return
        begun_s, waited_before_s = self._begun
        read_s = now_s - begun_s - (waited_s - waited_before_s)
        if read_s >= _ENOUGH_S:
            self._learn(read_s / (self._given + max(0, self._taken - self._given) / 2))
            self.settled = True

    def _measure(self, position: int, now_s: float, waited_s: float) -> None:
        """Measure the shard at the cursor, if it was being read until now and the session moves on to `position`."""
        if self.settled and self._reading and self._since_s is not None and position > self.cursor:
            self._learn(max(now_s - self._since_s - (waited_s - self._waited_s), _MIN_S))

    def _learn(self, took_s: float) -> None:
        self.measures += 1
        self.seconds_per_shard += max(_NEWEST, 1 / self.measures) * (took_s - self.seconds_per_shard)

    def move(self, position: int) -> Iterator[tuple[str, int]]:
        """Advance the cursor to a position, never back; yield name and position of each shard passed."""
        while self.cursor < min(position, len(self.names)):
            yield self.names[self.cursor], self.cursor
            self.cursor += 1
        self.frontier = max(self.frontier, self.cursor)


_NO_USES: dict[ReaderPlan, int] = {}
Session = TypeVar("Session", bound=Hashable)


class Missing(NamedTuple, Generic[Session]):
    """A shard that a session needs, at a position in its plan, and that is not cached."""

    name: str
    needed_at_s: float
    session: Session
    position: int


class Timeline(Generic[Session]):
    """The plans of all sessions. All events and queries refer to the time of the last `tick`, `now_s`."""

    def __init__(self) -> None:
        self.now_s = -math.inf
        self._plans: dict[Session, ReaderPlan] = {}
        self._uses: dict[str, dict[ReaderPlan, int]] = {}  # each shard's next position on each plan
        self._paces_s: dict[Hashable, float] = {}  # last measured pace of each job
        self._ended: list[ReaderPlan] = []  # ended plans that still have entries in `_uses`, all at NEVER

    def __repr__(self) -> str:
        return f"Timeline(sessions={len(self._plans)}, shards={len(self._uses)})"

    def tick(self, now_s: float) -> None:
        """Set the current time, which must not decrease."""
        if now_s != self.now_s:
            self.now_s = now_s
            for plan in self._plans.values():
                if now_s > plan.steady_until_s:
                    plan.tick(now_s)
        if self._ended:
            self._sweep()

    # Events of sessions

    def declare(
        self, session: Session, seconds_per_shard: float | None = None, job: Hashable | None = None
    ) -> ReaderPlan:
        """Begin a session's plan, replacing any previous one; `extend` adds its shards.

        Unless its pace is given, it keeps its former one, or has that of its job, of ended sessions, too.
        """
        previous = self.forget(session)
        if seconds_per_shard is None:
            seconds_per_shard = previous.seconds_per_shard if previous else self._usual_pace_s()
        plan = self._plans[session] = ReaderPlan(seconds_per_shard, self.now_s, job)
        if previous is not None and previous.measures:
            plan.measures = previous.measures
        elif job in self._paces_s:
            plan.believe(self._paces_s[job])
        plan.tick(self.now_s)
        return plan

    def _usual_pace_s(self) -> float:
        plans = self._plans.values()
        paces_s = [plan.seconds_per_shard for plan in plans if plan.measures]
        paces_s = paces_s or [plan.seconds_per_shard for plan in plans]
        return sum(paces_s) / len(paces_s) if paces_s else _GUESS_S

    def _remember_pace(self, plan: ReaderPlan) -> None:
        """Remember a measured pace for the job's later sessions and those that have not read anything yet."""
        if plan.job is None or not plan.measures:
            return
        is_first = plan.job not in self._paces_s
        self._paces_s[plan.job] = plan.seconds_per_shard
        if is_first:
            for other in self._plans.values():
                if other.job == plan.job and not other.measures:
                    other.believe(plan.seconds_per_shard)
                    other.tick(self.now_s)
        if len(self._paces_s) > _JOBS:
            del self._paces_s[next(iter(self._paces_s))]

    def extend(self, session: Session, names: Collection[str]) -> None:
        """Append shards to a session's plan, in reading order."""
        plan, all_uses = self._plans[session], self._uses
        for name in names:
            uses = all_uses.get(name)
            if uses is None:
                all_uses[name] = {plan: plan.append(name, None)}
            else:
                position = plan.append(name, uses.get(plan))
                uses.setdefault(plan, position)

    def forget(self, session: Session) -> ReaderPlan | None:
        """Drop a session and its plan; return the plan, now ended, or None if it had none."""
        plan = self._plans.pop(session, None)
        if plan is not None:
            plan.end()
            self._ended.append(plan)
        return plan

    def _sweep(self) -> None:
        """Drop a batch of an ended plan's uses: all at once would block the event loop."""
        plan = self._ended[-1]
        for name, _ in plan.move(plan.cursor + _BATCH):
            self._drop(name, plan)
        if plan.cursor == len(plan.names):
            self._ended.pop()

    # `waited_s` is the session's total waiting time so far, which does not count as reading.

    def waits(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session has nothing to read until it gets the shard at `position`."""
        plan = self._plans[session]
        plan.waits(position, self.now_s, waited_s)
        self._move(plan, position)

    def reads(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session takes the shard at `position`; it may keep others that it took before."""
        plan = self._plans[session]
        plan.reads(position, self.now_s, waited_s)
        self._move(plan, position)

    def done(self, session: Session, position: int, waited_s: float = 0.0) -> None:
        """Record that a session releases the shard at `position`."""
        plan = self._plans[session]
        plan.done(position, self.now_s, waited_s)
        self._move(plan, position + 1)

    def _move(self, plan: ReaderPlan, position: int) -> list[str]:
        """Advance a plan's cursor; return the shards passed."""
        self._remember_pace(plan)
        passed = list(plan.move(position))
        plan.tick(self.now_s)
        for name, at in passed:
            if again := plan.again(at):
                self._uses[name][plan] = again
            else:
                self._drop(name, plan)
        return [name for name, _ in passed]

    def _drop(self, name: str, plan: ReaderPlan) -> None:
        uses = self._uses.get(name)
        if uses is not None:  # else it was already dropped at an earlier position
            uses.pop(plan, None)
            if not uses:
                del self._uses[name]

    def missed(self, name: str) -> None:
        """Record that a shard is no longer cached, or does not arrive as expected."""
        for plan, position in self._uses.get(name, _NO_USES).items():
            plan.frontier = min(plan.frontier, position)

    # Queries

    def next_use(self, names: Collection[str]) -> tuple[float, ReaderPlan, int] | None:
        """Return time, plan and position of a shard's soonest use under any of its names, None without a use."""
        soonest, soonest_s = None, NEVER
        for name in names:
            for plan, position in self._uses.get(name, _NO_USES).items():
                use_s = plan.start_s + plan.pace_s * position
                if use_s < soonest_s:
                    soonest, soonest_s = (plan, position), use_s
        return None if soonest is None else (soonest_s, *soonest)

    def next_missing(self, cared_for: Callable[[str], bool]) -> Missing[Session] | None:
        """Return the missing shard that is needed soonest, which is to be fetched next, or None if there is none.

        A shard is missing unless it is `cared_for`: cached, being fetched, or not worth an attempt.
        """
        soonest, soonest_s = None, NEVER
        for session, plan in self._plans.items():
            # The first gap is at the frontier or after it, so most plans can be ruled out without `cared_for`.
            if plan.start_s + plan.pace_s * plan.frontier < soonest_s:
                need_s = self._first_gap(plan, cared_for)
                if need_s is not None and need_s < soonest_s:
                    soonest_s, at = need_s, plan.frontier
                    soonest = Missing(plan.names[at], need_s, session, at)
        return soonest

    def ahead(self, session: Session, until_s: float, limit: int) -> Iterator[tuple[float, int, str]]:
        """Yield (time, position, name) of a session's shards from its cursor to a time, in order, at most `limit`."""
        plan = self._plans.get(session)
        if plan is None:
            return
        for position in range(plan.cursor, min(plan.cursor + limit, len(plan.names))):
            use_s = plan.start_s + plan.pace_s * position
            if use_s > until_s:
                return
            yield use_s, position, plan.names[position]

    def covered_until_s(self, session: Session, cared_for: Callable[[str], bool], coming: Iterable[str]) -> float:
        """Return when a session needs its first shard that is not cached, NEVER if all are.

        Of those that are `cared_for`, as in `next_missing`, the `coming` are only being fetched.
        """
        plan = self._plans.get(session)
        if plan is None:
            return NEVER
        gap_s = self._first_gap(plan, cared_for)
        positions = (self._uses.get(name, _NO_USES).get(plan) for name in coming)
        needs_s = [plan.start_s + plan.pace_s * position for position in positions if position is not None]
        return min([NEVER if gap_s is None else gap_s, *needs_s])

    def shards_per_s(self, session: Session) -> float:
        """Return a session's pace, without waits; 0 if it is unknown."""
        plan = self._plans.get(session)
        return 1 / plan.pace_s if plan is not None and plan.measures else 0.0

    @staticmethod
    def _first_gap(plan: ReaderPlan, cared_for: Callable[[str], bool]) -> float | None:
        names, frontier = plan.names, plan.frontier
        while frontier < len(names) and cared_for(names[frontier]):
            frontier += 1
        plan.frontier = frontier
        return plan.start_s + plan.pace_s * frontier if frontier < len(names) else None
