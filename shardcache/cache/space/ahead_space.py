"""A share of the cache for ranges that readers ask for before they need them.

A range is a span of an object's bytes. Readers of ranges request several ahead of need, and keep
the cached parts of the object that have these bytes. `HeldRanges` asks here, for each range, for a
place: the permission to take space in the cache. To let a range in is to give it a place, which the
range has until its reader releases it.

Readers that hold some parts and wait for more must never wait for each other. Three rules keep the
conditions of a deadlock (see `deadlock`) from ever arising, so deadlocks over ranges need not be
detected:

1. One range of each reader is let in however much space the others take: the first range that the
   reader waits for. The reader reads and releases this range before it waits for another, so while
   it has this range it waits for nothing in the cache. So it may keep a published file from
   eviction, if the range is in one. A reader's other ranges never keep a published file, which
   would take space outside of the share.
2. All other ranges of all readers together take at most this share, until they are released. Their
   readers may do anything in the meantime, such as wait for each other.
3. All parts of a range get their space at the same time (`PartFiller`). So a range that waits for
   space takes none, and the cache without this share is large enough for any range
   (`Residency.check_range`).

A reader that is stopped (SIGSTOP) keeps its ranges, as it keeps whole shards, until it continues or
its connection ends. Ranges that need this space wait until then, and later ranges wait behind them,
each at most until its reader's time limit. This is not a deadlock, since a stopped reader waits for
nothing: the check for deadlocks ignores these waits.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class RangePlace:
    """The place of one range, or its wait for a place.

    Attributes:
        size_bytes: size of the parts that have the range.
        is_awaited: True once the reader waits for the range.
        is_in_share: True while the range counts against the share; False if rule 1 has let it in.
        entered: event that ends the wait: the range is let in.
    """

    size_bytes: int
    is_awaited: bool = False
    is_in_share: bool = False
    entered: asyncio.Event = field(default_factory=asyncio.Event)


class AheadSpace:
    """The share for all readers together. Ranges enter it in the order in which they request it.

    Args:
        ask_limit_bytes: returns the size of the share, which may change.
    """

    def __init__(self, ask_limit_bytes: Callable[[], int]) -> None:
        self._ask_limit_bytes = ask_limit_bytes
        self._taken_bytes = 0
        self._waiting: dict[RangePlace, None] = {}  # in the order of request

    @property
    def limit_bytes(self) -> int:
        """Size of the share at present."""
        return self._ask_limit_bytes()

    def try_enter(self, place: RangePlace) -> bool:
        """Let a range in if the share has space for it, and no other range waits for the share.

        Returns whether it was let in.
        """
        if self._waiting or not self._has_room(place):
            return False
        self._let_in(place)
        return True

    def enqueue(self, place: RangePlace) -> None:
        """Have a range let in once the share has space for it.

        A range that is larger than the share is never let in here. It is let in by rule 1 only, as
        the first that its reader waits for.
        """
        if place.size_bytes <= self.limit_bytes:
            self._waiting[place] = None

    def leave(self, place: RangePlace) -> None:
        """End the place of a range, or its wait for one; let in waiting ranges that fit now."""
        self._waiting.pop(place, None)
        if place.is_in_share:
            place.is_in_share = False
            self._taken_bytes -= place.size_bytes
        while self._waiting:
            first = next(iter(self._waiting))
            if not self._has_room(first):
                return
            del self._waiting[first]
            self._let_in(first)

    def _has_room(self, place: RangePlace) -> bool:
        """Return whether the share has space for a range."""
        return self._taken_bytes + place.size_bytes <= self.limit_bytes

    def _let_in(self, place: RangePlace) -> None:
        """Let a range into the share."""
        place.is_in_share = True
        self._taken_bytes += place.size_bytes
        place.entered.set()


class RangePlaces:
    """The places of one reader's ranges, by the numbers of their leases.

    A lease is the reader's hold on a range. The first range is the one that rule 1 lets in.

    Args:
        ahead: the share of all readers, for the other ranges.
    """

    def __init__(self, ahead: AheadSpace) -> None:
        self._ahead = ahead
        self._places: dict[int, RangePlace] = {}
        self._waiting: dict[int, RangePlace] = {}  # ranges not let in yet, in the order of request
        self._first: RangePlace | None = None  # the range of rule 1; None while there is none

    async def enter(self, number: int, size_bytes: int, *, is_awaited: bool) -> None:
        """Wait until a range is let in. Call `leave` to end its place, also after an exception.

        Args:
            number: number of the range's lease.
            size_bytes: size of the parts that have the range.
            is_awaited: whether the reader waits for the range.
        """
        if self.try_enter(number, size_bytes, is_awaited=is_awaited):
            return
        place = RangePlace(size_bytes, is_awaited)
        self._places[number] = place
        self._waiting[number] = place
        self._ahead.enqueue(place)
        await place.entered.wait()
        self._waiting.pop(number, None)  # `_let_first_in` has removed it already, if by rule 1

    def try_enter(self, number: int, size_bytes: int, *, is_awaited: bool) -> bool:
        """Let a range in if that takes no waiting; return whether it was let in."""
        if self.try_be_first(number, size_bytes, is_awaited=is_awaited):
            return True
        place = RangePlace(size_bytes, is_awaited)
        if not self._ahead.try_enter(place):
            return False
        self._places[number] = place
        return True

    def try_be_first(self, number: int, size_bytes: int, *, is_awaited: bool) -> bool:
        """Let a range in by rule 1, if the reader waits for it and has no first range.

        Returns whether it was let in.
        """
        if not is_awaited or self._first is not None:
            return False
        self._first = RangePlace(size_bytes, is_awaited)
        self._places[number] = self._first
        return True

    def is_first(self, number: int) -> bool:
        """Return whether a range is the reader's first, which rule 1 has let in."""
        place = self._places.get(number)
        return place is not None and place is self._first

    def need(self, number: int) -> None:
        """Record that the reader waits for a range."""
        place = self._places.get(number)
        if place is not None:
            place.is_awaited = True
            self._let_first_in()

    def leave(self, number: int) -> None:
        """End the place of a range, if it has one."""
        self._waiting.pop(number, None)
        place = self._places.pop(number, None)
        if place is None:
            return
        self._ahead.leave(place)
        if place is self._first:
            self._first = None
            self._let_first_in()

    def _let_first_in(self) -> None:
        """Let in by rule 1 the range that was requested first of those the reader waits for.

        No-op if the reader has a first range.
        """
        if self._first is not None:
            return
        awaited = [number for number, place in self._waiting.items() if place.is_awaited]
        if not awaited:
            return
        self._first = self._waiting.pop(awaited[0])
        self._ahead.leave(self._first)  # the range no longer waits for the share
        self._first.entered.set()
