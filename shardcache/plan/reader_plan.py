"""One session's plan: its shards in reading order, its position and its pace. Pure.

The time between taking two shards does not show the pace until a shard has been released. A reader that mixes shards
takes its first ones in quick succession, since each yields few samples at first; one that resumes from a checkpoint
takes all of them together; and the data loader fills its own queues. So the pace is measured when the first shards are
released: those are read completely, and those still in use are half read on average. From then on, shards are taken as
fast as they are read.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

# Weight of a new measurement in the moving average: it follows a change of pace within a few shards.
_NEWEST = 0.3
# Less reading time than this does not show the pace: a loader that fills its queues reads as fast as it can.
_ENOUGH_S = 1.0
_POSITIONS: list[int] = []  # int objects shared by all plans, to save a million of them per plan
_MIN_S = 1e-6  # minimum pace, so that the positions of a plan are at distinct times


class ReaderPlan:
    """One session's plan, its position in it, and the predicted time of every further position.

    Attributes:
        names: the shards, in reading order.
        cursor: the latest position that the session has taken or waits for. Earlier positions are done as far as the
            plan is concerned, though their shards may still be in use.
        frontier: the first position that may be missing from the cache; all from the cursor to it are cached.
        seconds_per_shard: smoothed time between taking two shards, without waits.
        measures: number of measurements behind it; 0 while it is a guess.
        job: the session's job, whose sessions are assumed to have the same pace.
        start_s, pace_s: position p will be read at `start_s + pace_s * p`, as of the last `tick`; attributes rather
            than a method, since each decision looks at every plan several times. `start_s` is NEVER after `end`.
        steady_until_s: time until which another `tick` changes nothing.
    """

    __slots__ = (
        "_again",
        "_begun",
        "_given",
        "_last",
        "_reading",
        "_settled",
        "_since_s",
        "_taken",
        "_waited_s",
        "cursor",
        "frontier",
        "job",
        "measures",
        "names",
        "pace_s",
        "seconds_per_shard",
        "start_s",
        "steady_until_s",
    )

    def __init__(self, seconds_per_shard: float, now_s: float, job: Hashable = None) -> None:
        self.names: list[str] = []
        self.cursor = 0
        self.frontier = 0
        self.seconds_per_shard = seconds_per_shard
        self.measures = 0
        self.job = job
        self._again: list[int] = []  # for each position, the next one of the same shard, or 0
        self._last: dict[str, int] = {}  # the last position of each shard that is read more than once
        self._since_s: float | None = now_s  # time of the last event; None while the session waits
        self._waited_s = 0.0  # total waiting time of the session at that time
        self._reading = False  # True if the shard at the cursor was taken at that time
        self._begun: tuple[float, float] | None = None  # time of the first take, and total waiting time then
        self._taken = self._given = 0  # shards taken and released since then
        self._settled = False  # True once shards are taken as fast as they are read
        self.tick(now_s)

    def __repr__(self) -> str:
        return f"ReaderPlan({self.cursor}/{len(self.names)}, {self.seconds_per_shard:.3g} s a shard)"

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
        self.start_s = math.inf

    @property
    def ended(self) -> bool:
        """True after `end`."""
        return self.start_s == math.inf

    def append(self, name: str, first: int | None) -> int:
        """Append a shard and return its position; `first` is the next position of the same shard, if there is one."""
        position = len(self.names)
        if position == len(_POSITIONS):
            _POSITIONS.append(position)
        position = _POSITIONS[position]
        self.names.append(name)
        self._again.append(0)
        if first is not None:
            self._again[self._last.get(name, first)] = position
            self._last[name] = position
        else:
            self._last.pop(name, None)
        return position

    def again(self, position: int) -> int | None:
        """Return the next position of the shard at `position`, or None."""
        return self._again[position] or None

    def waits(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session reads nothing until the shard at `position` arrives."""
        self._measure(position, now_s, waited_s)
        self._since_s, self._reading = None, False

    def reads(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session has taken the shard at `position` and reads it from now on."""
        self._measure(position, now_s, waited_s)
        self._taken += 1
        self._begun = self._begun or (now_s, waited_s)
        self._settled = self._settled or position < self.cursor  # the session was resumed after a daemon restart
        if position >= self.cursor or self._since_s is None:  # an older shard, taken again, does not show the pace
            self._since_s, self._waited_s, self._reading = now_s, waited_s, position >= self.cursor

    def done(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session has released the shard at `position`."""
        if position == self.cursor:
            self._measure(position + 1, now_s, waited_s)
        if position >= 0 and not self._settled:  # a shard of a previous plan does not show the pace of this one
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
            self._settled = True

    def _measure(self, position: int, now_s: float, waited_s: float) -> None:
        """Measure the shard at the cursor, if it was being read until now and the session moves on to `position`."""
        if self._settled and self._reading and self._since_s is not None and position > self.cursor:
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
