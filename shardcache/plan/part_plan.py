"""A reader's plan of parts: which parts of objects it will read, range by range. Pure.

A range is a span of an object's bytes; a part is a piece of fixed size, in which objects are
cached. A reader that knows its order of ranges, such as one that permutes all samples, announces
the ranges that it reads next. `Schedule` then has their parts in a plan, as it has shards, and
evicts the parts that are needed furthest in the future.

An object may also be cached as a whole. So the plan lists it with each of its ranges: whichever of
the two is cached, the object or the part, is kept for this range.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic

from shardcache.plan.schedule import Schedule
from shardcache.plan.timeline import Session

# Ranges that were read are forgotten as many at a time, since that moves all the others.
_FORGOTTEN_TOGETHER = 4096


class PartPlan(Generic[Session]):
    """The ranges that one session has announced, and not read yet.

    The session numbers its ranges in the order in which it reads them, and may leave numbers out.

    Args:
        ask_schedule: returns the schedule, advanced to the present time.
        session: the session. It has no other plan in the schedule.
        job: the session's job, whose sessions are assumed to have the same pace.
    """

    def __init__(
        self,
        ask_schedule: Callable[[], Schedule[Session]],
        session: Session,
        job: Hashable | None = None,
    ) -> None:
        self._ask_schedule = ask_schedule
        self._session = session
        self._job = job
        # For each range that was announced and not forgotten, its number, and the plan's position
        # after the range.
        self._numbers = array("Q")
        self._ends = array("Q")
        self._read = 0  # number of these ranges that were read
        self._end = 0  # the plan's position after its last range
        self._passed = 0  # the plan's position after the last range that was read

    def __repr__(self) -> str:
        return f"PartPlan(ranges={len(self._numbers) - self._read})"

    def begin(self) -> None:
        """Begin a new, empty plan in place of the present one."""
        # The pace of parts is not that of shards, which other sessions of the job may read.
        job = ("parts", self._job)
        self._ask_schedule().declare(self._session, job=job, is_of_parts=True)
        self._numbers = array("Q")
        self._ends = array("Q")
        self._read = 0
        self._end = 0
        self._passed = 0

    def add(self, ranges: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Announce ranges, in the order of reading.

        Args:
            ranges: for each range, its number, not lower than those before, and the names in the
                schedule of the range's object, and of the parts that have the range.
        """
        schedule = self._ask_schedule()
        for number, names in ranges:
            schedule.extend(self._session, names)
            self._end += len(names)
            self._numbers.append(number)
            self._ends.append(self._end)

    def passed(self, number: int, waited_s: float = 0.0) -> None:
        """Record that a range was read, and all ranges of lower numbers were read or left out.

        Args:
            number: number of the range, which need not have been announced.
            waited_s: the session's total waiting time so far.
        """
        ranges = bisect_right(self._numbers, number, lo=self._read)
        if ranges == self._read:
            return
        self._read = ranges
        self._passed = self._ends[ranges - 1]
        self._ask_schedule().passed(self._session, self._passed, waited_s)
        if self._read >= _FORGOTTEN_TOGETHER:
            del self._numbers[: self._read]
            del self._ends[: self._read]
            self._read = 0

    @property
    def names(self) -> int:
        """Number of names in announced ranges that were not read yet: of objects and of parts."""
        return self._end - self._passed
