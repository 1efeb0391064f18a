"""One shard's download: which parts each request fetches, what has arrived, and the final check."""

import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shardcache.fetch.limits.slot_claims import AskPriority, Claim
from shardcache.fetch.reads import Coming
from shardcache.fetch.requests import RequestSpan
from shardcache.origin.base import Origin
from shardcache.origin.objects import DIGESTS, RemoteObject, digest_of
from shardcache.store.partial import Partial
from shardcache.transport.between.checksums import ALGORITHMS, checksum_function, combined
from shardcache.transport.between.parts import PartSums


@dataclass(slots=True)
class ShardDownload:
    """One download: its parts, and their checksums in the algorithm of the origin's own checksum.

    A part is summed while it is written; only parts from an earlier run are read back. The file
    keeps the CRC32Cs.

    Attributes:
        partial: the file that the parts are written to.
        priority: returns the current priority for connections and bandwidth.
        progress: called with the number of bytes on disk.
        coming: counts the bytes that have arrived but are not on disk yet.
        first: returns the start and end of bytes to be fetched before all others.
        done_bytes: number of bytes on disk.
    """

    origin: Origin
    partial: Partial
    priority: AskPriority
    progress: Callable[[int], None]
    coming: Coming
    first: Callable[[], Sequence[tuple[int, int]]]
    done_bytes: int = 0
    _sums: dict[int, int] = field(default_factory=dict)  # of parts that have arrived, by number

    @property
    def obj(self) -> RemoteObject:
        """The object that is downloaded."""
        return self.partial.obj

    @property
    def algorithm(self) -> str | None:
        """Algorithm of the origin's checksum.

        None without a checksum, or if it cannot be made of those of the parts.
        """
        checksum = self.obj.checksum
        if checksum is None or checksum.algorithm not in ALGORITHMS:
            return None
        return checksum.algorithm

    def start(self, missing: Sequence[int]) -> None:
        """Count the bytes that are already on disk."""
        missing_bytes = sum(self.partial.parts(index, 1).size_bytes for index in missing)
        self.done_bytes = self.obj.size_bytes - missing_bytes
        self.progress(self.done_bytes)

    def requests(self, missing: Sequence[int], maximum: int) -> Iterator[range]:
        """Yield consecutive parts for one request each.

        These are single parts as soon as a reader waits.

        Args:
            missing: the parts to fetch, in order.
            maximum: the most parts of a request.
        """
        remaining = dict.fromkeys(missing)  # a set in the order of `missing`
        while remaining:
            first = self._next_part(remaining)
            del remaining[first]
            parts = range(first, first + 1)

            has_waiting_reader = self.obj.ranges and self.priority().waiting
            limit = 1 if has_waiting_reader else maximum
            while parts.stop in remaining and len(parts) < limit:
                del remaining[parts.stop]
                parts = range(parts.start, parts.stop + 1)
            yield parts

    def _next_part(self, remaining: dict[int, None]) -> int:
        """Return the part to fetch next, of those that remain."""
        if self.obj.ranges:
            needed = self._needed_first(remaining)
            if needed is not None:
                return needed
        return next(iter(remaining))

    def _needed_first(self, remaining: Container[int]) -> int | None:
        """Return a part that must be fetched before all others; None if there is none."""
        part_bytes = self.partial.part_bytes
        for start, stop in self.first():
            end_part = -(-stop // part_bytes)
            for part in range(start // part_bytes, end_part):
                if part in remaining:
                    return part
        return None

    def span(self, claim: Claim, first: int, count: int) -> RequestSpan:
        """Return consecutive parts as one request."""
        parts = replace(self.partial.parts(first, count), algorithm=self.algorithm)
        begun = partial(self.coming.begin, first)
        return RequestSpan(self.origin, self.obj, parts, claim, begun)

    def record(self, finished: list[PartSums]) -> None:
        """Record finished parts."""
        self.coming.end(finished[0].index)
        for sums in finished:
            self.partial.record(sums)
            self._sums[sums.index] = sums.checksum
            self.done_bytes += self.partial.parts(sums.index, 1).size_bytes
        self.progress(self.done_bytes)

    def verify(self) -> None:
        """Compare the whole object with the origin's checksum, if it has one. Blocks.

        Raises CorruptShardError; OSError if the file cannot be read.
        """
        expected = self.obj.checksum
        if expected is None:
            return
        if self.algorithm is not None:
            expected.check(self._checksum(self.algorithm), self.obj.url)
        elif expected.algorithm in DIGESTS:
            expected.check(digest_of(self.partial.path, expected.algorithm), self.obj.url)

    def _checksum(self, algorithm: str) -> int:
        """Return the whole's checksum, from those of its parts."""
        sums = self._part_checksums(algorithm)
        return combined(algorithm, sums, self.partial.part_bytes, self.obj.size_bytes)

    def _part_checksums(self, algorithm: str) -> list[int]:
        """Return the checksum of every part, reading those that an earlier run has fetched."""
        if algorithm == "crc32c":
            return self.partial.crcs()
        checksum = checksum_function(algorithm)
        part_bytes = self.partial.part_bytes
        sums: list[int] = []
        with open(self.partial.path, "rb", buffering=0) as file:
            for index in range(self.partial.count):
                part_sum = self._sums.get(index)
                if part_sum is None:
                    data = os.pread(file.fileno(), part_bytes, index * part_bytes)
                    part_sum = checksum(data, 0)
                sums.append(part_sum)
        return sums
