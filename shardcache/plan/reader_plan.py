"""One session's plan: its shards in reading order, its position, and its pace. Pure.

A session is a connected reader. `Timeline` has all plans, and reports what each session does.
Times are seconds of the caller's clock, which `tick` sets. They make fast and slow jobs comparable:
a session's measured pace converts a distance in its plan, in shards, into a time.

At first, the time between taking two shards does not show the pace. A reader that mixes shards
takes its first shards in quick succession, since each yields few samples at first. A reader that
resumes from a checkpoint takes all its shards together, and a data loader fills its own queues. So
the pace is first measured when shards are released: the released shards have been read completely,
and the shards still in use are half read on average. After that, the plan is settled: shards are
taken as fast as they are read.

A session that reads ranges of objects has a plan of parts, which are the pieces in which ranges are
cached. It has a position for each part of each range. It goes on for as long as the session reads,
so it forgets the positions before its cursor. Ranges are small and are released many at a time, so
its pace is measured over many positions. Nothing in it is fetched ahead.
"""

import math
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

# Special times of need, which compare with the predicted times of planned shards. A shard is
# evicted only for one that is needed sooner.
NOW = -math.inf
"""Time of need of a shard that a reader waits for: before all planned shards."""
AFTER_ALL_PLANS = sys.float_info.max
"""Time of need of a shard that is only warmed: after all planned shards, but before `NEVER`."""
NEVER = math.inf
"""Time of need of a shard that is in no plan."""

# Minimum weight of a new measurement in the moving average, which thus follows a change of pace
# within a few shards.
_MIN_WEIGHT = 0.3

# Less reading time than this does not show the pace, as a loader that fills its queues reads as
# fast as it can.
_ENOUGH_S = 1.0
# Number of positions over which the pace is measured in a plan of parts.
_PARTS_PER_MEASUREMENT = 64
# A plan of parts forgets as many positions at a time.
_FORGOTTEN_TOGETHER = 4096

# The numbers from 0 on, as int objects that all plans share. Otherwise, a plan of a million
# positions would have a million objects of its own.
_POSITIONS: list[int] = []
_MIN_S = 1e-6  # minimum time per shard, so that the positions of a plan have distinct times


@dataclass(slots=True, eq=False)
class ReaderPlan:
    """One session's plan, its pace, and the predicted time of every further position.

    As of the last `tick`, position p will be read at `start_s + pace_s * p`. Callers compute this
    from the attributes, rather than by a method, since each decision looks at every plan several
    times. The cursor is the latest position that the session has taken or waits for. The plan is
    done with earlier positions, though their shards may still be in use.

    Attributes:
        seconds_per_shard: usual time between taking two shards, without waits: a moving average.
        job: the session's job, whose sessions are assumed to have the same pace.
        is_of_parts: True for a plan of parts, False for one of shards.
        names: names of the shards, in reading order, from the position `forgotten` on.
        forgotten: number of positions that a plan of parts has forgotten; 0 in a plan of shards.
        cursor: the latest position that was taken or is awaited.
        frontier: the first position whose shard may be missing: all shards from the cursor up to
            it are cached or being fetched.
        measurements: number of measurements of `seconds_per_shard`; 0 while it is a guess.
        start_s: predicted time of position 0; NEVER after `end`.
        pace_s: predicted time per position: `seconds_per_shard`, or longer if the shard at the
            cursor has taken longer so far.
        steady_until_s: time until which another `tick` would change nothing.
        settled: True once shards are taken as fast as they are read.
    """

    seconds_per_shard: float
    _since_s: float | None  # time of the last event; None while the session waits
    job: Hashable = None
    is_of_parts: bool = False
    names: list[str] = field(default_factory=list, init=False)
    forgotten: int = field(default=0, init=False)
    cursor: int = field(default=0, init=False)
    frontier: int = field(default=0, init=False)
    measurements: int = field(default=0, init=False)
    start_s: float = field(init=False)
    pace_s: float = field(init=False)
    steady_until_s: float = field(init=False)
    settled: bool = field(default=False, init=False)
    # For each position, the next position of the same shard; 0 if there is none.
    _next_positions: list[int] = field(default_factory=list, init=False)
    # For each shard that is read more than once, its last position.
    _last: dict[str, int] = field(default_factory=dict, init=False)
    _waited_s: float = field(default=0.0, init=False)  # total waiting time at `_since_s`
    # True if the session took the shard at the cursor at `_since_s`, and reads the shard since.
    _reading: bool = field(default=False, init=False)
    _mark: int = field(default=0, init=False)  # the cursor at `_since_s`, in a plan of parts
    # The time at which the session took its first shard, and its total waiting time by then.
    _begun: tuple[float, float] | None = field(default=None, init=False)
    _taken: int = field(default=0, init=False)  # number of shards taken from then on
    _released: int = field(default=0, init=False)  # number of shards released before it is settled

    def __post_init__(self) -> None:
        assert self._since_s is not None
        self.tick(self._since_s)

    def tick(self, now_s: float) -> None:
        """Update the prediction to the time `now_s`.

        If a reader exceeds its usual time per shard, the time that it has taken so far is assumed
        for each further shard. So the plan of a job that hangs recedes into the future, and returns
        when the job continues.
        """
        pace_s = self.seconds_per_shard
        position = self._mark if self.is_of_parts else self.cursor  # at `since_s`
        measured = _PARTS_PER_MEASUREMENT if self.is_of_parts else 1
        if self._since_s is None:
            # The session waits: at any time, the shard at the cursor is needed now.
            since_s = now_s
            self.steady_until_s = now_s
        else:
            since_s = self._since_s
            self.steady_until_s = since_s + pace_s * measured
            pace_s = max(pace_s, (now_s - since_s) / measured)
        self.pace_s = pace_s
        # The session was at `position` at `since_s`; position 0 is as many paces before.
        self.start_s = since_s - position * pace_s

    def end(self) -> None:
        """End the plan, of which no further shard will be read."""
        self.start_s = NEVER

    @property
    def ended(self) -> bool:
        """True after `end`."""
        return self.start_s == NEVER

    def append(self, name: str, next_use: int | None) -> int:
        """Append a shard and return its position.

        Args:
            name: the shard's name.
            next_use: position of the shard's next use so far; None if it has no use from the cursor
                on.
        """
        position = self.end_position
        if not self.is_of_parts:  # the positions of a plan of parts grow without limit
            if position == len(_POSITIONS):
                _POSITIONS.append(position)
            position = _POSITIONS[position]  # the shared int object of the same value
        self.names.append(name)
        self._next_positions.append(0)
        if next_use is None:
            self._last.pop(name, None)  # the cursor has passed the last position, if there was one
        else:
            last = self._last.get(name, next_use)  # without an entry, the next use is the only one
            self._next_positions[last - self.forgotten] = position
            self._last[name] = position
        return position

    @property
    def end_position(self) -> int:
        """The position after the last one."""
        return self.forgotten + len(self.names)

    def forget_passed(self) -> None:
        """Forget the positions before the cursor, if they are many; no-op in a plan of shards.

        So the memory of a plan of parts does not grow with the number of parts that were read.
        """
        passed = self.cursor - self.forgotten
        if not self.is_of_parts or passed < _FORGOTTEN_TOGETHER:
            return
        for name in self.names[:passed]:
            if self._last.get(name, self.cursor) < self.cursor:
                del self._last[name]
        del self.names[:passed]
        del self._next_positions[:passed]
        self.forgotten = self.cursor

    def next_position(self, position: int) -> int:
        """Return the next position of the shard at `position`; 0, which follows none, if none."""
        return self._next_positions[position - self.forgotten]

    def waits(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session reads nothing until the shard at `position` arrives.

        Args:
            position: the position.
            now_s: the present time.
            waited_s: the session's total waiting time so far.
        """
        self._measure(position, now_s, waited_s)
        self._since_s = None
        self._reading = False

    def reads(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session has taken the shard at `position` and reads it from now on.

        For the arguments, see `waits`.
        """
        self._measure(position, now_s, waited_s)
        self._taken += 1
        if self._begun is None:
            self._begun = (now_s, waited_s)
        is_older = position < self.cursor
        if is_older:
            # Only a session that was resumed after a daemon restart takes a shard again.
            self.settled = True
        # A shard that is taken again, without a wait, does not end the reading of the present one.
        has_waited = self._since_s is None
        if has_waited or not is_older:
            self._since_s = now_s  # the time of the next shard counts from here
            self._waited_s = waited_s
            self._reading = not is_older  # a shard that is taken again does not show the pace

    def done(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session has released the shard at `position`.

        For the arguments, see `waits`. A negative position is one in a previous plan.
        """
        if position == self.cursor:
            self._measure(position + 1, now_s, waited_s)
            self._since_s = now_s
            self._reading = False
        is_of_this_plan = position >= 0  # a shard of a previous plan does not show this one's pace
        if is_of_this_plan and not self.settled:
            self._settle(now_s, waited_s)

    def passed(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session has read all parts before `position`, in a plan of parts.

        For the other arguments, see `waits`.
        """
        assert self._since_s is not None  # such a session never calls `waits`
        count = position - self._mark
        is_first = not self._reading
        if not is_first:
            if count < _PARTS_PER_MEASUREMENT:
                return
            took_s = now_s - self._since_s - (waited_s - self._waited_s)
            self._learn(max(took_s / count, _MIN_S))
        self._mark = position
        self._since_s = now_s
        self._waited_s = waited_s
        self._reading = True

    def adopt_pace(self, seconds_per_shard: float) -> None:
        """Adopt the pace of another session of the job, in place of a guess, as a measurement."""
        self.seconds_per_shard = seconds_per_shard
        self.measurements = 1

    def _settle(self, now_s: float, waited_s: float) -> None:
        """Estimate the pace from all shards read so far, if they took long enough to read."""
        self._released += 1
        if self._begun is None:
            return
        begun_s, waited_before_s = self._begun
        read_s = now_s - begun_s - (waited_s - waited_before_s)
        if read_s >= _ENOUGH_S:
            # Shards that are still in use count as half read.
            in_use = max(0, self._taken - self._released)
            shards_read = self._released + in_use / 2
            self._learn(read_s / shards_read)
            self.settled = True

    def _measure(self, position: int, now_s: float, waited_s: float) -> None:
        """Measure the time that the shard at the cursor took, if it was read until now.

        Args:
            position: the session's new position; the shard is done if this is beyond the cursor.
            now_s: the present time.
            waited_s: the session's total waiting time so far.
        """
        if not self.settled or not self._reading or self._since_s is None:
            return
        if position > self.cursor:
            took_s = now_s - self._since_s - (waited_s - self._waited_s)
            self._learn(max(took_s, _MIN_S))

    def _learn(self, took_s: float) -> None:
        """Add a measurement to the moving average, in which the first few weigh the same.

        Args:
            took_s: the time that a shard took to read.
        """
        self.measurements += 1
        weight = max(_MIN_WEIGHT, 1 / self.measurements)
        self.seconds_per_shard += weight * (took_s - self.seconds_per_shard)

    def move(self, position: int) -> Iterator[tuple[str, int]]:
        """Advance the cursor to `position`; yield name and position of each shard passed.

        The cursor moves during the iteration, and never back.
        """
        while self.cursor < min(position, self.end_position):
            yield self.names[self.cursor - self.forgotten], self.cursor
            self.cursor += 1
        self.frontier = max(self.frontier, self.cursor)
