"""Ranges of objects that one reader holds, and what it will probably read next."""

from dataclasses import dataclass

from shardcache.cache.space.part_residency import PartResidency
from shardcache.cache.waiting.waits import JobKey
from shardcache.store.keys import stored_url
from shardcache.store.part_file import PartFile, Span
from shardcache.telemetry.metrics import Counters

_MAX_AHEAD_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HeldRange:
    """Parts of an object that are retained for a reader."""

    file: PartFile
    parts: range
    size_bytes: int  # of the range


@dataclass(slots=True)
class SequentialRun:
    """Ranges of a file that are read one after another, and so tell what is read next."""

    start: int = 0  # of the last range
    end: int = 0
    run_bytes: int = 0  # read without a gap, up to there

    def then(self, needed: tuple[int, int]) -> tuple[int, int] | None:
        """Note that a range is needed; return that which will probably be needed after it.

        As many bytes as were read in a row, so that a reader of the whole file soon waits for the
        network alone, and a reader of single ranges fetches no others.
        """
        start, end = needed
        follows = self.run_bytes > 0 and self.start <= start <= self.end < end
        new_bytes = end - start
        if follows:
            new_bytes = self.run_bytes + end - self.end
        self.run_bytes = new_bytes
        self.start = start
        self.end = end
        if not follows:
            return None
        return end, end + min(self.run_bytes, _MAX_AHEAD_BYTES)


class HeldRanges:
    """Ranges of a reader's plan of ranges: their parts stay cached while it holds them."""

    def __init__(self, parts: PartResidency, counters: Counters, client: JobKey) -> None:
        self._parts = parts
        self._counters = counters
        self._client = client
        self._runs: dict[int, SequentialRun] = {}  # by position in the plan

    def read_next(self, position: int, span: Span) -> Span | None:
        """Return the range that will probably be read after one; None if there is no telling."""
        run = self._runs.setdefault(position, SequentialRun())
        return run.then(span)

    def forget_order(self) -> None:
        """Expect nothing of what was read so far: the plan has changed."""
        self._runs.clear()

    def hold(self, file: PartFile, span: Span) -> HeldRange:
        """Retain the parts of a range."""
        start, end = span
        size_bytes = max(0, min(end, file.partial.obj.size_bytes) - start)
        held = HeldRange(file, file.parts_of(span), size_bytes)
        self._parts.retain(file, held.parts)
        return held

    def release(self, held: HeldRange, *, read: bool) -> None:
        """Release a range that was read, or whose file could not be."""
        self.let_go(held)
        if not read:
            self._parts.check(held.file)
            return
        url = stored_url(held.file.partial.obj.url)
        self._counters.bills.add_read(url, held.size_bytes, self._client)

    def let_go(self, held: HeldRange) -> None:
        """Release a range of a reader that is gone."""
        self._parts.release(held.file, held.parts)
