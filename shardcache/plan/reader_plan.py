"""One session's plan: its shards in reading order, its position, and its pace. Pure.

Times are seconds of the caller's clock, set by `tick`. They make fast and slow jobs comparable: a
session's measured pace converts a distance in its plan, in shards, into a time.

The time between taking two shards does not show the pace until a shard has been released. A reader
that mixes shards takes its first ones in quick succession, since each yields few samples at first;
one that resumes from a checkpoint takes all of them together; and the data loader fills its own
queues. So the pace is measured when the first shards are released: those are read completely, and
those still in use are half read on average. From then on, shards are taken as fast as they are
read.
"""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

NEVER = math.inf

# Weight of a new measurement in the moving average: it follows a change of pace within a few
# shards.
_NEWEST = 0.3

# Less reading time than this does not show the pace: a loader that fills its queues reads as fast
# as it can.
_ENOUGH_S = 1.0
_POSITIONS: list[int] = []  # int objects shared by all plans, to save a million of them per plan
_MIN_S = 1e-6  # minimum pace, so that the positions of a plan are at distinct times


@dataclass(slots=True, eq=False)
class ReaderPlan:
    """One session's plan, its pace, and the predicted time of every further position.

    Position p will be read at `start_s + pace_s * p`, as of the last `tick`: attributes rather than
    a method, since each decision looks at every plan several times. The cursor is the latest
    position that the session has taken or waits for. Earlier ones are done as far as the plan is
    concerned, though their shards may still be in use.

    Attributes:
        seconds_per_shard: smoothed time between taking two shards, without waits.
        job: its sessions are assumed to have the same pace.
        names: the shards, in reading order.
        cursor: the latest position taken or awaited.
        frontier: first position whose shard may be missing; from the cursor to it, all are cached.
        measures: number of measurements of `seconds_per_shard`; 0 while it is a guess.
        start_s: predicted time of position 0; NEVER after `end`.
        pace_s: predicted time per position.
        steady_until_s: until then, another `tick` changes nothing.
        settled: True once shards are taken as fast as they are read.
    """

    seconds_per_shard: float
    _since_s: float | None  # time of the last event; None while the session waits
    job: Hashable = None
    names: list[str] = field(default_factory=list, init=False)
    cursor: int = field(default=0, init=False)
    frontier: int = field(default=0, init=False)
    measures: int = field(default=0, init=False)
    start_s: float = field(init=False)
    pace_s: float = field(init=False)
    steady_until_s: float = field(init=False)
    settled: bool = field(default=False, init=False)
    # For each position, the next one of the same shard, or 0.
    _next_positions: list[int] = field(default_factory=list, init=False)
    # The last position of each shard that is read more than once.
    _last: dict[str, int] = field(default_factory=dict, init=False)
    # At `_since_s`: the session's total waiting time, and whether it took the shard at the cursor.
    _waited_s: float = field(default=0.0, init=False)
    _reading: bool = field(default=False, init=False)
    # When the session took its first shard: the time, and its total waiting time by then.
    _begun: tuple[float, float] | None = field(default=None, init=False)
    _taken: int = field(default=0, init=False)  # number of shards taken since then
    _released: int = field(default=0, init=False)  # and number of shards released

    def __post_init__(self) -> None:
        assert self._since_s is not None
        self.tick(self._since_s)

    def tick(self, now_s: float) -> None:
        """Update the prediction to the time `now_s`.

        A reader that exceeds its usual time per shard is taken to be that slow, so the plan of a
        hanging job recedes into the future, and returns when the job continues.
        """
        pace_s = self.seconds_per_shard
        if self._since_s is None:
            # The session waits: the shard at the cursor is needed now, at any time.
            since_s = now_s
            self.steady_until_s = now_s
        else:
            since_s = self._since_s
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
        """Append a shard and return its position.

        Args:
            first: the next position of the same shard, if the plan has one already.
        """
        position = len(self.names)
        if position == len(_POSITIONS):
            _POSITIONS.append(position)
        position = _POSITIONS[position]  # the shared object of that value
        self.names.append(name)
        self._next_positions.append(0)
        if first is None:
            self._last.pop(name, None)
        else:
            # The shard's last position so far gets this one as its next.
            self._next_positions[self._last.get(name, first)] = position
            self._last[name] = position
        return position

    def next_position(self, position: int) -> int:
        """Return the next position of the shard at `position`, 0 if there is none."""
        return self._next_positions[position]

    def waits(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session reads nothing until the shard at `position` arrives."""
        self._measure(position, now_s, waited_s)
        self._since_s = None
        self._reading = False

    def reads(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session has taken the shard at `position` and reads it from now on."""
        self._measure(position, now_s, waited_s)
        self._taken += 1
        if self._begun is None:
            self._begun = (now_s, waited_s)
        is_older = position < self.cursor
        if is_older:
            self.settled = True  # the session was resumed after a daemon restart
        if not is_older or self._since_s is None:
            self._since_s = now_s
            self._waited_s = waited_s
            self._reading = not is_older  # an older shard, taken again, does not show the pace

    def done(self, position: int, now_s: float, waited_s: float) -> None:
        """Record that the session has released the shard at `position`."""
        if position == self.cursor:
            self._measure(position + 1, now_s, waited_s)
        is_of_this_plan = position >= 0  # else it does not show the pace of this one
        if is_of_this_plan and not self.settled:
            self._settle(now_s, waited_s)
        if position == self.cursor:
            self._since_s = now_s
            self._reading = False

    def believe(self, seconds_per_shard: float) -> None:
        """Adopt the pace of another session of the job, instead of a guess."""
        self.seconds_per_shard = seconds_per_shard
        self.measures = 1

    def _settle(self, now_s: float, waited_s: float) -> None:
        """Estimate the pace from all shards so far, once the reading time suffices."""
        self._released += 1
        if self._begun is None:
            return
        begun_s, waited_before_s = self._begun
        read_s = now_s - begun_s - (waited_s - waited_before_s)
        if read_s >= _ENOUGH_S:
            in_use = max(0, self._taken - self._released)
            shards_read = self._released + in_use / 2
            self._learn(read_s / shards_read)
            self.settled = True

    def _measure(self, position: int, now_s: float, waited_s: float) -> None:
        """Measure the shard at the cursor, if it was read until now and `position` is beyond it."""
        if not self.settled or not self._reading or self._since_s is None:
            return
        if position > self.cursor:
            took_s = now_s - self._since_s - (waited_s - self._waited_s)
            self._learn(max(took_s, _MIN_S))

    def _learn(self, took_s: float) -> None:
        """Add a measurement to the moving average, in which the first few weigh the same."""
        self.measures += 1
        weight = max(_NEWEST, 1 / self.measures)
        self.seconds_per_shard += weight * (took_s - self.seconds_per_shard)

    def move(self, position: int) -> Iterator[tuple[str, int]]:
        """Advance the cursor, never back; yield name and position of each shard passed."""
        while self.cursor < min(position, len(self.names)):
            yield self.names[self.cursor], self.cursor
            self.cursor += 1
        self.frontier = max(self.frontier, self.cursor)
