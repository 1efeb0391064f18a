"""A share of the cache for ranges that readers ask for before they need them.

Readers that hold some parts and wait for more must never wait for each other. The conditions of a
deadlock (see `deadlock`) are broken where they begin, so ranges need no detection:

1. Of each reader, one range is let in whatever the others take: the first that the reader waits
   for. It is read and released before the reader waits for another, so a reader that has it waits
   for nothing in the cache. If it is in a published file, that file is retained for it, and for no
   other range.
2. All other ranges of all readers together take at most this share, until they are released. Their
   readers may do anything in the meantime, such as wait for each other.
3. The parts of a range get their space at the same time (`PartFiller`). A range that waits for
   space has none, and the rest of the cache is enough for any range (`Residency.check_range`).

A reader that is stopped (SIGSTOP) keeps its ranges, as it keeps whole shards, until it continues or
its connection ends. Ranges that need this space wait until then, and so do those that asked after
them: each at most for its reader's time limit, whose error says how much space ranges in use take.
That is not a deadlock, since a stopped reader waits for nothing: the check for deadlocks ignores
these waits.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class RangePlace:
    """A range that a reader has asked for, from its request to its release.

    Attributes:
        size_bytes: size of its parts.
        is_awaited: True once the reader waits for it.
        is_in_share: True while it counts against the share.
        entered: set once the range may take space.
    """

    size_bytes: int
    is_awaited: bool = False
    is_in_share: bool = False
    entered: asyncio.Event = field(default_factory=asyncio.Event)


class AheadSpace:
    """The share of all readers, which their ranges enter in the order of request.

    Args:
        limit_bytes: returns the size of the share, which may change.
    """

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._waiting: dict[RangePlace, None] = {}  # in the order of request

    @property
    def limit_bytes(self) -> int:
        """Size of the share at present."""
        return self._limit_bytes()

    def try_enter(self, place: RangePlace) -> bool:
        """Let a range in if there is space in the share, and no other range waits for it."""
        if self._waiting or not self._has_room(place):
            return False
        self._let_in(place)
        return True

    def enqueue(self, place: RangePlace) -> None:
        """Let a range in once there is space in the share.

        One that is larger than the share is not let in here: only as its reader's first, rule 1.
        """
        if place.size_bytes <= self._limit_bytes():
            self._waiting[place] = None

    def leave(self, place: RangePlace) -> None:
        """End the place of a range, or its wait for one."""
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
        return self._taken_bytes + place.size_bytes <= self._limit_bytes()

    def _let_in(self, place: RangePlace) -> None:
        place.is_in_share = True
        self._taken_bytes += place.size_bytes
        place.entered.set()


class RangePlaces:
    """The places of one reader's ranges, by the numbers of their leases."""

    def __init__(self, ahead: AheadSpace) -> None:
        self._ahead = ahead
        self._places: dict[int, RangePlace] = {}
        self._waiting: dict[int, RangePlace] = {}  # those not let in yet, in the order of request
        self._first: RangePlace | None = None  # the range of rule 1, if there is one now

    async def enter(self, number: int, size_bytes: int, *, is_awaited: bool) -> None:
        """Return once a range may take space. Call `leave` in any case, an exception included."""
        if self.try_enter(number, size_bytes, is_awaited=is_awaited):
            return
        place = RangePlace(size_bytes, is_awaited)
        self._places[number] = place
        self._waiting[number] = place
        self._ahead.enqueue(place)
        await place.entered.wait()
        self._waiting.pop(number, None)

    def try_enter(self, number: int, size_bytes: int, *, is_awaited: bool) -> bool:
        """Let a range in if that takes no waiting; return whether it did."""
        if self.try_be_first(number, size_bytes, is_awaited=is_awaited):
            return True
        place = RangePlace(size_bytes, is_awaited)
        if not self._ahead.try_enter(place):
            return False
        self._places[number] = place
        return True

    def try_be_first(self, number: int, size_bytes: int, *, is_awaited: bool) -> bool:
        """Let a range in as the reader's first, if the reader waits for it and has no first one."""
        if not is_awaited or self._first is not None:
            return False
        self._first = RangePlace(size_bytes, is_awaited)
        self._places[number] = self._first
        return True

    def is_first(self, number: int) -> bool:
        """Return whether a range was let in as the one that the reader waits for."""
        place = self._places.get(number)
        return place is not None and place is self._first

    def need(self, number: int) -> None:
        """Note that the reader waits for a range."""
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
        """Let in the earliest range that the reader waits for, unless it has a first one."""
        if self._first is not None:
            return
        awaited = [number for number, place in self._waiting.items() if place.is_awaited]
        if not awaited:
            return
        self._first = self._waiting.pop(awaited[0])
        self._ahead.leave(self._first)  # it need not wait for the share any more
        self._first.entered.set()
