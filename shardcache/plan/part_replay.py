"""Reads of ranges of objects, replayed without bytes, under the daemon's rules for parts. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardcache.errors import CapacityError
from shardcache.plan.object_parts import is_worth_the_whole, max_parts_per_request, runs
from shardcache.plan.schedule import SameName, Schedule
from shardcache.shared.units import size

_NOW = float("-inf")  # time of need of a part that a reader waits for: before anything planned


@dataclass(frozen=True, slots=True)
class PartRules:
    """Settings of the daemon for parts, and the space that files take.

    Attributes:
        capacity_bytes: capacity of the cache.
        part_bytes: size of a part.
        max_share: the share of an object's parts from which the whole is fetched.
        reserved_bytes: returns the space reserved while a whole object is fetched, by its size.
        file_bytes: space of a file of parts in addition to the parts.
        whole_bytes: space of a whole object in addition to its bytes.
    """

    capacity_bytes: int
    part_bytes: int
    max_share: float
    reserved_bytes: Callable[[int], int]
    file_bytes: int
    whole_bytes: int


@dataclass(slots=True, eq=False)
class _ObjectParts:
    """The cached parts of an object; `leases` are those of ranges that were asked for."""

    number: int
    size_bytes: int
    part_bytes: int
    count: int  # number of all its parts
    done: set[int] = field(default_factory=set)
    leases: Counter[int] = field(default_factory=Counter)
    is_own: bool = True  # False once the object is whole

    def key_of(self, part: int) -> str:
        return f"{self.number}/{part}"

    def size_of(self, part: int) -> int:
        return min(self.part_bytes, self.size_bytes - part * self.part_bytes)

    def bytes_of(self, parts: Iterable[int]) -> int:
        return sum(map(self.size_of, parts))


class AskedRange(NamedTuple):
    """Parts of an object that a reader has asked for; `file` is None if the object was whole."""

    number: int
    parts: range
    file: _ObjectParts | None

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay cached until the range is read, with the rest of its last part."""
        if self.file is None:
            return 0
        return len(self.parts) * self.file.part_bytes


class PartReplay:
    """A cache that decides about parts as the daemon does; transfers are instant.

    Args:
        sizes: sizes of the objects, which have numbers in place of names.
        rules: settings.

    Attributes:
        asked: number of ranges that were asked for.
        misses: number of those that took a fetch.
        store_bytes: bytes that were fetched.
        requests: number of requests for bytes, and for an object's version before its first part.
        used_bytes: space of all that is cached.
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
        self._files: dict[int, _ObjectParts] = {}
        self._filling: int | None = None  # the object whose parts are fetched: it keeps its file
        self._whole: set[int] = set()
        self._schedule: Schedule[int] = Schedule(SameName())

    def ask(self, number: int, start: int, stop: int) -> AskedRange:
        """Have a range fetched, unless it is cached. Its parts stay until it is read.

        Raises CapacityError if there is no space for it.

        Args:
            number: number of the object.
            start: first byte.
            stop: the byte after the last one.
        """
        self.asked += 1
        part_bytes = self._rules.part_bytes
        parts = range(start // part_bytes, -(-stop // part_bytes))
        if number in self._whole:
            self._schedule.found(str(number))
            return AskedRange(number, parts, None)

        self._filling = number
        file = self._files.get(number)
        if file is None:
            file = self._open(number)
        missing = [part for part in parts if part not in file.done]
        if missing:
            self.misses += 1
            if self._is_worth_the_whole(file, missing) and self._fetch_whole(file):
                return AskedRange(number, parts, None)
        self._retain(file, [part for part in parts if part in file.done])
        if missing:
            self._fetch(file, missing)
            self._retain(file, missing)
        return AskedRange(number, parts, file)

    def read(self, asked: AskedRange) -> None:
        """Read a range, and release it. It is fetched again if its whole object was evicted."""
        if asked.file is not None:
            self._release(asked.file, asked.parts)
        elif asked.number not in self._whole:
            part_bytes = self._rules.part_bytes
            start = asked.parts.start * part_bytes
            stop = min(asked.parts.stop * part_bytes, self._sizes[asked.number])
            self.asked -= 1  # it is the same range, which counts once
            self.read(self.ask(asked.number, start, stop))

    def _open(self, number: int) -> _ObjectParts:
        """Ask the store for an object's version, and begin a file for its parts."""
        size_bytes = self._sizes[number]
        part_bytes = self._rules.part_bytes
        count = -(-size_bytes // part_bytes)
        self.requests += 1
        self._reserve(self._rules.file_bytes)
        self.used_bytes += self._rules.file_bytes
        file = _ObjectParts(number, size_bytes, part_bytes, count)
        self._files[number] = file
        return file

    def _is_worth_the_whole(self, file: _ObjectParts, missing: Sequence[int]) -> bool:
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
        """Fetch the rest of an object; return False if there is no space for it."""
        cached = list(file.done)
        cached_bytes = file.bytes_of(cached)
        kept_bytes = self._rules.file_bytes + cached_bytes
        self._retain(file, cached)  # so that none of them is evicted for the other parts
        is_reserved = self._reserve(self._rules.reserved_bytes(file.size_bytes) - kept_bytes)
        self._release(file, cached)
        if not is_reserved:
            return False

        missing = [part for part in range(file.count) if part not in file.done]
        self.requests += sum(1 for _ in runs(missing, self._max_run))
        self.store_bytes += file.size_bytes - cached_bytes
        for part in cached:
            self._schedule.gone(file.key_of(part))
        file.is_own = False
        del self._files[file.number]
        self._whole.add(file.number)
        self._schedule.arrived(str(file.number), self._bytes_of_whole(file.number))
        self.used_bytes += self._bytes_of_whole(file.number) - kept_bytes
        return True

    def _bytes_of_whole(self, number: int) -> int:
        """Return the space that a whole object takes."""
        return self._sizes[number] + self._rules.whole_bytes

    # Parts that are kept until they are read

    def _retain(self, file: _ObjectParts, parts: Iterable[int]) -> None:
        for part in parts:
            file.leases[part] += 1
            key = file.key_of(part)
            self._schedule.found(key)
            self._schedule.held(key)

    def _release(self, file: _ObjectParts, parts: Iterable[int]) -> None:
        for part in parts:
            file.leases[part] -= 1
            if not file.leases[part]:
                del file.leases[part]
                if file.is_own:
                    self._schedule.freed(file.key_of(part))

    # Space

    def _reserve(self, size_bytes: int) -> bool:
        """Evict until there is space; return False if there cannot be."""
        shortfall_bytes = self.used_bytes + size_bytes - self._rules.capacity_bytes
        victims = self._schedule.victims(shortfall_bytes, _NOW, lead_s=0.0)
        if victims is None:
            return False
        for key in victims:
            self._evict(key)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + size_bytes)
        return True

    def _evict(self, key: str) -> None:
        """Evict a part, whose key is that of its object, a slash and its number; or an object."""
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
            self.used_bytes -= self._rules.file_bytes
