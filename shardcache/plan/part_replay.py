"""Reads of ranges of objects, replayed without bytes, under the daemon's rules for parts. Pure.

`shardcache simulate` computes from this how many bytes and requests a training costs that reads its
samples by their ranges. A range is a span of an object's bytes; a part is a piece of fixed size, in
which objects are fetched, kept and evicted. An object is whole once all of it was fetched as one
file. Objects have numbers in place of names.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardcache.plan.object_parts import is_worth_the_whole, max_parts_per_request, runs
from shardcache.plan.part_plan import PartPlan
from shardcache.plan.reader_plan import AFTER_ALL_PLANS, NOW
from shardcache.plan.schedule import SameName, Schedule
from shardcache.shared.exceptions import CapacityError
from shardcache.shared.units import size


@dataclass(frozen=True, slots=True)
class PartRules:
    """Settings of the daemon for parts, and the space that files take.

    Attributes:
        capacity_bytes: capacity of the cache.
        part_bytes: size of a part.
        max_share: the share of an object's parts, from 0 to 1, above which the whole is fetched.
        reserved_bytes: returns the space that is reserved while a whole object is fetched, by the
            object's size.
        file_extra_bytes: space that a file of parts takes in addition to the parts.
        whole_extra_bytes: space that a whole object takes in addition to its bytes.
    """

    capacity_bytes: int
    part_bytes: int
    max_share: float
    reserved_bytes: Callable[[int], int]
    file_extra_bytes: int
    whole_extra_bytes: int


@dataclass(slots=True, eq=False)
class _ObjectParts:
    """The cached parts of an object.

    Attributes:
        number: number of the object.
        size_bytes: size of the object.
        part_bytes: size of a part; the last one may be shorter.
        count: number of all parts of the object.
        done: numbers of the cached parts.
        leases: by part, the number of ranges that need the part, and are not read yet.
        is_kept_by_part: False once the object is whole, and the schedule no longer knows its parts.
    """

    number: int
    size_bytes: int
    part_bytes: int
    count: int
    done: set[int] = field(default_factory=set)
    leases: Counter[int] = field(default_factory=Counter)
    is_kept_by_part: bool = True

    def key_of(self, part: int) -> str:
        """Return the key of a part in the schedule."""
        return f"{self.number}/{part}"

    def size_of(self, part: int) -> int:
        return min(self.part_bytes, self.size_bytes - part * self.part_bytes)

    def bytes_of(self, parts: Iterable[int]) -> int:
        return sum(map(self.size_of, parts))


class AskedRange(NamedTuple):
    """A range that a reader has asked for and not read yet.

    Attributes:
        number: number of the object.
        parts: numbers of the parts that have the range.
        file: the object's cached parts; None if the object was whole.
    """

    number: int
    parts: range
    file: _ObjectParts | None

    @property
    def kept_bytes(self) -> int:
        """Number of bytes that stay cached until the range is read, if all its parts are full.

        0 for a range of a whole object, which may be evicted before the range is read.
        """
        if self.file is None:
            return 0
        return len(self.parts) * self.file.part_bytes


class PartReplay:
    """A cache that decides about parts as the daemon does, while transfers take no time.

    Args:
        sizes: the size of each object, by the object's number.
        rules: the daemon's settings.

    Attributes:
        asked: number of ranges that were asked for.
        misses: number of those ranges for which something had to be fetched.
        store_bytes: number of bytes that were fetched.
        requests: number of requests for bytes, and for an object's version before its first part.
        used_bytes: space that everything cached takes.
        peak_bytes: maximum of this space and a reservation together.
    """

    def __init__(self, sizes: Sequence[int], rules: PartRules) -> None:
        self.asked = 0
        self.misses = 0
        self.store_bytes = 0
        self.requests = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        self._sizes = sizes
        self._rules = rules
        self._max_run = max_parts_per_request(rules.part_bytes)
        self._files: dict[int, _ObjectParts] = {}  # by the object's number
        # The object whose parts are being fetched. It keeps its file, even while that has no parts.
        self._filling: int | None = None
        self._whole: set[int] = set()  # numbers of the whole objects
        self._schedule: Schedule[int] = Schedule(SameName())
        self._schedule.tick(0.0)
        self._reads = 0  # number of ranges read, which is the time of the schedule

    def plan(self, reader: int) -> PartPlan[int]:
        """Begin the plan of a reader, given its number."""
        plan = PartPlan(lambda: self._schedule, reader)
        plan.begin()
        return plan

    def names(self, number: int, start: int, stop: int) -> list[str]:
        """Return the names by which a plan announces a range; arguments as for `ask`."""
        part_bytes = self._rules.part_bytes
        parts = range(start // part_bytes, -(-stop // part_bytes))  # `-(-a // b)` rounds up
        return [str(number), *(f"{number}/{part}" for part in parts)]

    def ask(self, number: int, start: int, stop: int) -> AskedRange:
        """Have a range fetched, unless it is cached. Its parts stay until the range is read.

        A whole object may be evicted before that: `read` then fetches the range again.

        Raises CapacityError if there is no space for the parts.

        Args:
            number: number of the object.
            start: offset of the first byte.
            stop: offset of the byte after the last one.
        """
        self.asked += 1
        part_bytes = self._rules.part_bytes
        parts = range(start // part_bytes, -(-stop // part_bytes))  # `-(-a // b)` rounds up
        if number in self._whole:
            self._schedule.used(str(number))
            return AskedRange(number, parts, None)

        self._filling = number
        file = self._files.get(number)
        if file is None:
            file = self._open(number)
        missing = [part for part in parts if part not in file.done]
        if missing:
            self.misses += 1
            if self._should_fetch_whole(file, missing) and self._fetch_whole(file):
                return AskedRange(number, parts, None)
        # The cached parts are retained first, so that they are not evicted for the missing ones.
        self._retain(file, [part for part in parts if part in file.done])
        if missing:
            self._fetch(file, missing)
            self._retain(file, missing)
        return AskedRange(number, parts, file)

    def read(self, asked: AskedRange) -> None:
        """Read a range, and release its parts.

        If the range is of a whole object that was evicted, it is fetched again first.
        """
        self._reads += 1
        self._schedule.tick(self._reads)
        if asked.file is not None:
            self._release(asked.file, asked.parts)
        elif asked.number not in self._whole:
            part_bytes = self._rules.part_bytes
            start = asked.parts.start * part_bytes
            stop = min(asked.parts.stop * part_bytes, self._sizes[asked.number])
            self._reads -= 1
            self.asked -= 1  # the range is asked for again, but counts once
            self.read(self.ask(asked.number, start, stop))

    def _open(self, number: int) -> _ObjectParts:
        """Ask the store for an object's version, and begin a file for its parts."""
        size_bytes = self._sizes[number]
        part_bytes = self._rules.part_bytes
        count = -(-size_bytes // part_bytes)
        self.requests += 1
        # If there is no space for this, there is none for a part: `_fetch` raises the error then.
        self._reserve(self._rules.file_extra_bytes)
        self.used_bytes += self._rules.file_extra_bytes
        file = _ObjectParts(number, size_bytes, part_bytes, count)
        self._files[number] = file
        return file

    def _should_fetch_whole(self, file: _ObjectParts, missing: Sequence[int]) -> bool:
        """Return whether to fetch an object as a whole, given the missing parts of a range."""
        rules = self._rules
        return is_worth_the_whole(
            len(file.done) + len(missing),
            file.count,
            rules.max_share,
            may_fit=rules.reserved_bytes(file.size_bytes) <= rules.capacity_bytes,
        )

    def _fetch(self, file: _ObjectParts, missing: Sequence[int]) -> None:
        """Fetch missing parts. Raises CapacityError if there is no space for them."""
        size_bytes = file.bytes_of(missing)
        if not self._reserve(size_bytes):
            capacity = size(self._rules.capacity_bytes)
            raise CapacityError(
                f"a range takes {size(size_bytes)}, and a node's disk has {capacity}",
                remedy="raise --disk",
            )
        for run in runs(missing, self._max_run):
            self.requests += 1
            self.store_bytes += file.bytes_of(run)
        for part in missing:
            file.done.add(part)
            self.used_bytes += file.size_of(part)
            self._schedule.arrived(file.key_of(part), file.size_of(part))

    def _fetch_whole(self, file: _ObjectParts) -> bool:
        """Fetch the rest of an object, which is whole then; return False if there is no space."""
        cached = list(file.done)
        cached_bytes = file.bytes_of(cached)
        kept_bytes = self._rules.file_extra_bytes + cached_bytes
        # The object has the space of its file and parts already. They must not be evicted for the
        # missing parts.
        self._retain(file, cached)
        # No reader needs the rest of the object now, so it takes no space of a plan.
        wanted_bytes = self._rules.reserved_bytes(file.size_bytes) - kept_bytes
        is_reserved = self._reserve(wanted_bytes, AFTER_ALL_PLANS)
        self._release(file, cached)
        if not is_reserved:
            return False

        missing = [part for part in range(file.count) if part not in file.done]
        self.requests += len(runs(missing, self._max_run))
        self.store_bytes += file.size_bytes - cached_bytes
        for part in cached:
            self._schedule.gone(file.key_of(part))
        file.is_kept_by_part = False  # for ranges whose leases on its parts end later
        del self._files[file.number]
        self._whole.add(file.number)
        self._schedule.arrived(str(file.number), self._bytes_of_whole(file.number))
        self.used_bytes += self._bytes_of_whole(file.number) - kept_bytes
        return True

    def _bytes_of_whole(self, number: int) -> int:
        """Return the space that a whole object takes."""
        return self._sizes[number] + self._rules.whole_extra_bytes

    # Parts that are kept until they are read

    def _retain(self, file: _ObjectParts, parts: Iterable[int]) -> None:
        """Add a lease to each part, which keeps it from eviction, and count it as used."""
        for part in parts:
            file.leases[part] += 1
            key = file.key_of(part)
            self._schedule.used(key)
            self._schedule.held(key)

    def _release(self, file: _ObjectParts, parts: Iterable[int]) -> None:
        """Remove a lease from each part; parts without any may be evicted."""
        for part in parts:
            file.leases[part] -= 1
            if not file.leases[part]:
                del file.leases[part]
                if file.is_kept_by_part:
                    self._schedule.freed(file.key_of(part))

    # Space

    def _reserve(self, size_bytes: int, needed_at_s: float = NOW) -> bool:
        """Evict parts and objects until there is space; return False if there cannot be.

        Args:
            size_bytes: number of bytes.
            needed_at_s: time of need; by default, a reader waits for the bytes.
        """
        shortfall_bytes = self.used_bytes + size_bytes - self._rules.capacity_bytes
        # Transfers take no time here.
        victims = self._schedule.victims(shortfall_bytes, needed_at_s, lead_s=0.0)
        if victims is None:
            return False
        for key in victims:
            self._evict(key)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + size_bytes)
        return True

    def _evict(self, key: str) -> None:
        """Evict a whole object or a part.

        The key of an object is its number. The key of a part is that of its object, a slash, and
        the part's number.
        """
        self._schedule.gone(key)
        name, slash, part = key.partition("/")
        number = int(name)
        if not slash:
            self._whole.remove(number)
            self.used_bytes -= self._bytes_of_whole(number)
            return
        file = self._files[number]
        file.done.remove(int(part))
        self.used_bytes -= file.size_of(int(part))
        if not file.done and number != self._filling:
            del self._files[number]
            self.used_bytes -= self._rules.file_extra_bytes
