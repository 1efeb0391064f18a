"""One session's plan: its shards in reading order, how far it has come and how fast it goes. Pure.

The time from taking one shard to taking the next says nothing of the pace as long as none was given back. A reader that
mixes shards takes its first ones in quick succession, for each gives few samples at first; one that goes on from a
checkpoint takes all of them together; and the loader before it fills its own queues. So the pace is measured from the
first shard that is given back: what was given back by then is read, and what is in hand is half read on average. From
there on, shards are taken as fast as they are read.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

# Of each newly measured duration this much enters the average: a change of pace is believed after a few shards.
_NEWEST = 0.3
# Less reading than this tells no pace: a loader that fills its queues reads as fast as it can.
_ENOUGH_S = 1.0
_POSITIONS: list[int] = []  # shared by all courses: a million int objects less to fetch from memory
_LEAST_S = 1e-6  # positions of a course are at different times, however fast it goes


class Course:
    """Where one session is in its plan, and when it will be where.

    Attributes:
        names: the shards, in reading order.
        cursor: the newest position that was taken into hands or is waited for. What lies before it is over for the
            plan, though some of it may still be in hand.
        frontier: the first position that may be missing from the cache; every one from the cursor to it is there.
        seconds_per_shard: smoothed time from taking one shard to taking the next, standing still left out.
        measures: how many durations that was learnt from; 0 while it is a guess.
        job: of the session; the pace of its other sessions is more than a guess.
        start_s, pace_s: the position p will be read at `start_s + pace_s * p`, as seen at the last `tick`; attributes
            rather than a method, for a decision looks at every course several times. NEVER at the end.
        steady_until_s: until when another `tick` would change nothing.
    """

    __slots__ = (
        "_again",
        "_begun",
        "_given",
        "_last",
        "_reading",
        "_settled",
        "_since_s",
        "_stalled_s",
        "_taken",
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
        self._last: dict[str, int] = {}  # the latest position of each shard that is read more than once
        self._since_s: float | None = now_s
        self._stalled_s = 0.0  # how long the session had stood still by then
        self._reading = False  # whether the shard at the cursor was taken then
        self._begun: tuple[float, float] | None = None  # when the first shard was taken, and how long stalled by then
        self._taken = self._given = 0  # shards since then
        self._settled = False  # whether shards are taken as fast as they are read
        self.tick(now_s)

    def __repr__(self) -> str:
        return f"Course({self.cursor}/{len(self.names)}, {self.seconds_per_shard:.3g} s a shard)"

    def tick(self, now_s: float) -> None:
        """Look ahead from now.

        A reader that overstays its usual time is taken to be as slow as it looks, so the plan of a job that hangs
        recedes, and is back the moment it goes on.
        """
        since_s, pace_s = self._since_s, self.seconds_per_shard
        if since_s is None:  # it waits: the shard at the cursor is wanted now, whenever that is
            since_s = self.steady_until_s = now_s
        else:
            self.steady_until_s = since_s + pace_s
            pace_s = max(pace_s, now_s - since_s)
        self.pace_s = pace_s
        self.start_s = since_s - self.cursor * pace_s

    def end(self) -> None:
        """Note that nothing of this will be read any more."""
        self.start_s = math.inf

    @property
    def ended(self) -> bool:
        """Whether that is so."""
        return self.start_s == math.inf

    def append(self, name: str, first: int | None) -> int:
        """Add a shard at the end and return its position; `first` is the next one at which it is read already."""
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
        """Return the next position of the shard that is read at `position`, or None."""
        return self._again[position] or None

    def waits(self, position: int, now_s: float, stalled_s: float) -> None:
        """Note that nothing is being read until the shard at `position` is there."""
        self._measure(position, now_s, stalled_s)
        self._since_s, self._reading = None, False

    def reads(self, position: int, now_s: float, stalled_s: float) -> None:
        """Note that the shard at `position` is taken into hands and read from now on, beside those already there."""
        self._measure(position, now_s, stalled_s)
        self._taken += 1
        self._begun = self._begun or (now_s, stalled_s)
        self._settled = self._settled or position < self.cursor  # it went on from there: the daemon is another
        if position >= self.cursor or self._since_s is None:  # an older one, taken again, tells nothing of the pace
            self._since_s, self._stalled_s, self._reading = now_s, stalled_s, position >= self.cursor

    def done(self, position: int, now_s: float, stalled_s: float) -> None:
        """Note that the shard at `position` is given back."""
        if position == self.cursor:
            self._measure(position + 1, now_s, stalled_s)
        if position >= 0 and not self._settled:  # one of a former plan tells nothing of this one
            self._settle(now_s, stalled_s)
        if position == self.cursor:
            self._since_s, self._reading = now_s, False

    def believe(self, seconds_per_shard: float) -> None:
        """Take over the pace of another session of the job, in place of a guess."""
        self.seconds_per_shard, self.measures = seconds_per_shard, 1

    def _settle(self, now_s: float, stalled_s: float) -> None:
        """Learn from all shards so far, once they tell enough."""
        self._given += 1
        if self._begun is None:
            return
        begun_s, stalled_before_s = self._begun
        read_s = now_s - begun_s - (stalled_s - stalled_before_s)
        if read_s >= _ENOUGH_S:
            self._learn(read_s / (self._given + max(0, self._taken - self._given) / 2))
            self._settled = True

    def _measure(self, position: int, now_s: float, stalled_s: float) -> None:
        """Learn from the shard at the cursor, if it was being read until now and the session goes beyond it."""
        if self._settled and self._reading and self._since_s is not None and position > self.cursor:
            self._learn(max(now_s - self._since_s - (stalled_s - self._stalled_s), _LEAST_S))

    def _learn(self, took_s: float) -> None:
        self.measures += 1
        self.seconds_per_shard += max(_NEWEST, 1 / self.measures) * (took_s - self.seconds_per_shard)

    def move(self, position: int) -> Iterator[tuple[str, int]]:
        """Go to a position, never back; yield name and position of each shard that is over by that."""
        while self.cursor < min(position, len(self.names)):
            yield self.names[self.cursor], self.cursor
            self.cursor += 1
        self.frontier = max(self.frontier, self.cursor)
