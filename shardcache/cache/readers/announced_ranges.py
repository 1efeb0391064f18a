"""The ranges that a connected reader has announced, as a plan of parts in the schedule.

A reader that permutes all samples knows which ranges of which objects it reads, and when. It
announces them ahead of its requests, so that the cache keeps the parts that are needed soonest.
"""

from collections.abc import Sequence
from typing import Protocol

from shardcache.cache.listings.shard_listing import Listing
from shardcache.cache.readers.plan_memory import PlanMemory
from shardcache.cache.readers.services import ReaderServices
from shardcache.cache.waiting.waits import Holder
from shardcache.plan.part_plan import PartPlan
from shardcache.shared.announced_range import AnnouncedRange
from shardcache.shared.exceptions import ProtocolError


class RangeHolder(Holder, Protocol):
    """A reader with a list of shards.

    Attributes:
        listing: the shards that the reader's plan names; None without a plan.
    """

    listing: Listing | None


class AnnouncedRanges:
    """The announced ranges of one reader.

    They are only advice: ranges beyond the limit of the memory for plans are left out, and so are
    those of objects whose version is not known yet.

    Args:
        services: services that all readers use.
        memory: counts the memory of all plans.
        reader: the reader, which has a plan of ranges while it announces any.
    """

    def __init__(self, services: ReaderServices, memory: PlanMemory, reader: RangeHolder) -> None:
        self._leasing = services.leasing
        self._turns = services.turns
        self._memory = memory
        self._reader = reader
        self._plan: PartPlan[Holder] | None = None
        self._planner = services.planner
        self._next_number = 0  # the lowest number that may be announced next
        self._counted = 0  # number of names that `_memory` counts

    def begin(self) -> None:
        """Begin to announce ranges, in place of those announced before."""
        self.end()
        job = self._reader.client
        self._plan = PartPlan(lambda: self._planner.schedule, self._reader, job)
        self._plan.begin()
        self._next_number = 0

    async def add(self, ranges: Sequence[AnnouncedRange]) -> None:
        """Announce ranges, in reading order. Raises ProtocolError.

        No-op unless `begin` was called for the reader's present plan.
        """
        plan = self._plan
        if plan is None or not ranges:
            return
        if ranges[0].number < self._next_number:
            raise ProtocolError("the numbers of announced ranges must not decrease")
        self._next_number = ranges[-1].number

        def add_piece(piece: Sequence[AnnouncedRange]) -> None:
            if plan is self._plan:  # the reader may have begun another plan between two pieces
                self._add_piece(plan, piece)

        await self._turns.take(ranges, add_piece)

    def check(self, ranges: Sequence[AnnouncedRange]) -> None:
        """Raise ProtocolError unless the reader has a plan of ranges, with these positions."""
        listing = self._reader.listing
        if listing is None or not listing.is_for_ranges:
            raise ProtocolError("'plan_ranges' without a plan of ranges")
        for each in ranges:
            self._reader.ref(each.position)  # raises the error if there is no such position

    def _add_piece(self, plan: PartPlan[Holder], piece: Sequence[AnnouncedRange]) -> None:
        """Announce some ranges, as far as there is memory for them."""
        added: list[tuple[int, list[str]]] = []
        names = 0
        for number, position, start, beyond in piece:
            keys = self._leasing.range_keys(self._reader.ref(position), (start, beyond + 1))
            if keys and self._memory.may_announce(names + len(keys)):
                added.append((number, keys))
                names += len(keys)
        plan.add(added)
        self._count(plan.names)

    def passed(self, number: int, waited_s: float) -> None:
        """Record that the reader has read an announced range, and so all before it.

        Args:
            number: number of the range.
            waited_s: the reader's total waiting time so far.
        """
        if self._plan is not None:
            self._plan.passed(number, waited_s)
            self._count(self._plan.names)

    def end(self) -> None:
        """Drop what was announced; the schedule's plan is dropped by the caller."""
        self._plan = None
        self._count(0)

    def _count(self, names: int) -> None:
        """Have the memory of a number of names counted, in place of the number before."""
        self._memory.announce(names - self._counted)
        self._counted = names
