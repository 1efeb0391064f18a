"""Ranges of objects that one reader holds, and a prediction of the ranges that it reads next.

A range is a span of an object's bytes. To hold a range means to retain the parts of the object that
have its bytes, so that they stay in the cache. A connected reader with a plan of ranges, such as
one that reads files, gets its ranges here. Its order of reading predicts the next range of a file,
which is fetched ahead. For the places of ranges in the cache, see `AheadSpace`.
"""

from dataclasses import dataclass

from shardcache.cache.fetching.leasing import Leasing, Published
from shardcache.cache.listings.shard_listing import name_of
from shardcache.cache.space.ahead_space import RangePlaces
from shardcache.cache.space.part_residency import PartResidency
from shardcache.cache.space.residency import Residency
from shardcache.cache.waiting.waits import JobKey, Wait
from shardcache.shared.protocol import ShardRef
from shardcache.store.keys import stored_url
from shardcache.store.part_file import PartFile, Span
from shardcache.store.shard import Shard
from shardcache.telemetry.metrics import Counters

# The most bytes of a file that are fetched ahead of a reader that reads the file in order.
_MAX_AHEAD_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class SequentialRun:
    """Ranges of a file that a reader reads in order, from which its next range is predicted.

    Attributes:
        start: start of the last range.
        end: end of the last range.
        run_bytes: number of bytes read without a gap, up to `end`; 0 before the first range.
    """

    start: int = 0
    end: int = 0
    run_bytes: int = 0

    def advance(self, needed: Span, max_bytes: int) -> Span | None:
        """Record that a range is needed; return the range that will probably be needed after it.

        The predicted range has as many bytes as were read in order, at most `max_bytes`. For a
        reader of the whole file, the predicted range is soon large enough to keep the network busy.
        Returns None if the reader does not read in order: nothing is fetched ahead then.
        """
        start, end = needed
        # A range continues the run if it begins within the last range, or where the last range
        # ends, and if it goes further than the last range.
        is_in_order = self.run_bytes > 0 and self.start <= start <= self.end < end
        if is_in_order:
            self.run_bytes += end - self.end
        else:
            self.run_bytes = end - start
        self.start = start
        self.end = end
        if not is_in_order:
            return None
        return end, end + min(self.run_bytes, max_bytes)

    def read_to(self, end: int) -> None:
        """Record that the reader has also got the bytes from the last range's end up to `end`."""
        self.run_bytes += max(0, end - self.end)
        self.end = max(self.end, end)


@dataclass(slots=True)
class HeldRange:
    """A range of an object whose parts are retained for a reader.

    `_run` is the reader's run in this file, by which its next range is predicted.

    Attributes:
        file: the file with the object's cached parts.
        span: start and end of the bytes that the reader may read.
        parts: numbers of the parts that have these bytes.
    """

    file: PartFile
    span: Span
    parts: range
    _run: SequentialRun
    _residency: PartResidency

    @property
    def size_bytes(self) -> int:
        """Number of bytes in the range; bytes beyond the end of the object do not count."""
        start, end = self.span
        obj = self.file.partial.obj
        return max(0, min(end, obj.size_bytes) - start)

    def hold_ahead(self, end: int) -> int:
        """Extend the range up to `end`, or to the first byte before it that is not cached.

        Returns the end of the bytes that the reader may read then.
        """
        start, held_to = self.span
        cached_to = self.file.first_missing_byte((start, end))
        if cached_to <= held_to:
            return held_to
        self.span = (start, cached_to)
        parts = self.file.parts_of(self.span)
        self._residency.retain(self.file, range(self.parts.stop, parts.stop))
        self.parts = parts
        self._run.read_to(cached_to)
        return cached_to


class HeldRanges:
    """The ranges of one reader's plan of ranges.

    Args:
        residency: the cached shards and parts.
        leasing: finds or fetches files with the wanted ranges.
        counters: the daemon's counters.
        client: the reader's job, which is charged for the bytes that are read.

    Attributes:
        places: the places of the ranges that are requested and not released yet.
    """

    def __init__(
        self,
        residency: Residency,
        leasing: Leasing,
        counters: Counters,
        client: JobKey,
    ) -> None:
        self._ahead = residency.ahead
        self.places = RangePlaces(self._ahead)
        self._leasing = leasing
        self._part_residency = residency.parts
        self._counters = counters
        self._client = client
        self._runs: dict[int, SequentialRun] = {}  # by position in the plan

    def advance(self, position: int, span: Span) -> Span | None:
        """Record that a range is read; return the range that will probably be read after it.

        None if that cannot be predicted.

        Args:
            position: position of the file in the plan.
            span: start and end of the range in bytes.
        """
        # A predicted range may take half of the space for reading ahead: if it is larger than the
        # free part of this space, it is not fetched ahead at all.
        max_bytes = min(_MAX_AHEAD_BYTES, self._ahead.limit_bytes // 2)
        return self._run_at(position).advance(span, max_bytes)

    def _run_at(self, position: int) -> SequentialRun:
        """Return the run in the file at a position of the plan; a new one if there is none yet."""
        return self._runs.setdefault(position, SequentialRun())

    def forget_runs(self) -> None:
        """Forget the ranges read so far, as the reader has declared another plan."""
        self._runs.clear()

    async def acquire(
        self,
        number: int,
        ref: ShardRef,
        wait: Wait,
        *,
        is_awaited: bool,
    ) -> Published | PartFile:
        """Return a file with the range of a wait, as `Leasing.acquire_range` does.

        The range has a place among `places`, by the number of its lease, until the range is
        released. A range in a published file takes no space of its own, so its place is given up at
        once, unless it is the first range that the reader waits for.

        Args:
            number: id of the lease.
            ref: the object.
            wait: the reader's wait for the range.
            is_awaited: whether the reader has nothing else to read.
        """
        assert wait.bytes is not None
        size_bytes = self._leasing.range_bytes(ref, wait.bytes)
        keeps_place = False
        try:
            await self.places.enter(number, size_bytes, is_awaited=is_awaited)
            acquired = await self._leasing.acquire_range(ref, wait)
            keeps_place = isinstance(acquired, PartFile) or self.places.is_first(number)
        finally:
            if not keeps_place:
                self.places.leave(number)
        return acquired

    def try_acquire(
        self,
        number: int,
        ref: ShardRef,
        span: Span,
        *,
        is_awaited: bool,
    ) -> Shard | PartFile | None:
        """Return a file with a range, as `acquire` does; None if the caller would have to wait.

        Args:
            number: id of the lease.
            ref: the object.
            span: start and end of the range in bytes.
            is_awaited: whether the reader has nothing else to read.
        """
        # 1. The object store may have to be asked for the version, or about the url's signature.
        if ref.version is None or not self._leasing.may_serve_cached(ref):
            return None

        # 2. The bytes may have to be fetched or checked.
        file = self._leasing.at_hand(name_of(ref), span, ref.version)
        if file is None:
            return None

        # 3. The bytes are in a published file, which takes no further space. It is retained only
        #    for the reader's first range, which this range may become.
        if isinstance(file, Shard):
            self.places.try_be_first(number, size_bytes=0, is_awaited=is_awaited)
            self._counters.hits += 1
            self._counters.hit_bytes += file.size_bytes
            return file

        # 4. The bytes are in parts, which count against the space for ranges. If other ranges are
        #    waiting for this space, this range has to wait as well.
        size_bytes = self._leasing.range_bytes(ref, span)
        if not self.places.try_enter(number, size_bytes, is_awaited=is_awaited):
            return None
        self._counters.hits += 1
        return file

    def hold(self, position: int, file: PartFile, span: Span) -> HeldRange:
        """Retain the parts of a range of the object at a position of the plan.

        Args:
            position: position of the object in the plan.
            file: the file with the object's cached parts, which has all that are needed.
            span: start and end of the range in bytes.
        """
        parts = file.parts_of(span)
        self._part_residency.retain(file, parts)
        return HeldRange(file, span, parts, self._run_at(position), self._part_residency)

    def release(self, held: HeldRange, *, read: bool) -> None:
        """Release a range, and charge its bytes to the reader's job.

        Args:
            held: the range.
            read: False if the reader could not read the file, which another program may have
                removed.
        """
        self.let_go(held)
        if not read:
            self._part_residency.give_up_if_removed(held.file)
            return
        obj = held.file.partial.obj
        url = stored_url(obj.url)
        self._counters.bills.add_read(url, held.size_bytes, self._client)

    def let_go(self, held: HeldRange) -> None:
        """Release a range without counting it as read: its reader may have disconnected."""
        self._part_residency.release(held.file, held.parts)
