"""One shard's download: the parts for each request, the parts that arrived, and the final check.

The `Downloader` makes a `ShardDownload` for each download, and sends the requests that it yields.
"""

import functools
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardcache.fetch.limits.slot_claims import AskPriority, Claim
from shardcache.fetch.reads import UnfinishedParts
from shardcache.fetch.requests import RequestSpan
from shardcache.origin.base import Origin
from shardcache.origin.objects import DIGESTS, RemoteObject, digest_of
from shardcache.store.partial import Partial
from shardcache.transport.between.checksums import ALGORITHMS, checksum_function, combined
from shardcache.transport.between.parts import PartSums


@dataclass(slots=True)
class ShardDownload:
    """One download: its parts, and their checksums by the algorithm that the origin uses.

    The checksum of a part is computed while the part is written; only parts from an earlier run of
    the daemon have to be read back. In addition, `partial` has the CRC32C of each part, whatever
    algorithm the origin uses.

    Attributes:
        origin: the object store that the shard comes from.
        partial: the file that the parts are written to, and its record of finished parts.
        priority: returns the current priority for connections and bandwidth.
        progress: called with the number of bytes on disk.
        unfinished: counts the bytes that have arrived and belong to unfinished parts.
        first_ranges: returns the ranges of bytes (start and end) to be fetched before all others.
        done_bytes: number of bytes in finished parts.
    """

    origin: Origin
    partial: Partial
    priority: AskPriority
    progress: Callable[[int], None]
    unfinished: UnfinishedParts
    first_ranges: Callable[[], Sequence[tuple[int, int]]]
    done_bytes: int = 0
    # The checksums, by the origin's algorithm, of the parts that have arrived; by part number.
    _sums: dict[int, int] = field(default_factory=dict)

    @property
    def obj(self) -> RemoteObject:
        """The object that is downloaded."""
        return self.partial.obj

    @property
    def algorithm(self) -> str | None:
        """Algorithm of the origin's checksum of the object.

        None if the origin has no checksum, or one that cannot be combined from the checksums of
        parts.
        """
        checksum = self.obj.checksum
        if checksum is None or checksum.algorithm not in ALGORITHMS:
            return None
        return checksum.algorithm

    def start(self, missing: Sequence[int]) -> None:
        """Count the bytes that are already on disk, given the missing parts."""
        missing_bytes = sum(self.partial.size_of(index) for index in missing)
        self.done_bytes = self.obj.size_bytes - missing_bytes
        self.progress(self.done_bytes)

    def requests(
        self,
        missing: Sequence[int],
        max_parts: int,
        max_urgent_parts: int,
    ) -> Iterator[range]:
        """Yield the parts for one request after the other; each request has consecutive parts.

        Args:
            missing: numbers of the parts to fetch, in order.
            max_parts: maximum number of parts of a request.
            max_urgent_parts: the same while a reader waits for the shard: it gets the parts of a
                smaller request sooner.
        """
        remaining = dict.fromkeys(missing)  # used as a set that keeps the order of `missing`
        while remaining:
            first = self._next_part(remaining)
            del remaining[first]
            parts = range(first, first + 1)

            limit = max_parts
            if self.obj.has_ranges and self.priority().waiting:
                limit = max_urgent_parts
            while parts.stop in remaining and len(parts) < limit:
                del remaining[parts.stop]
                parts = range(parts.start, parts.stop + 1)
            yield parts

    def _next_part(self, remaining: dict[int, None]) -> int:
        """Return the number of the remaining part to fetch next."""
        if self.obj.has_ranges:
            needed = self._needed_first(remaining)
            if needed is not None:
                return needed
        return next(iter(remaining))

    def _needed_first(self, remaining: Container[int]) -> int | None:
        """Return a remaining part that must be fetched before all others; None if there is none."""
        part_bytes = self.partial.part_bytes
        for start, stop in self.first_ranges():
            last_part = (stop - 1) // part_bytes
            for part in range(start // part_bytes, last_part + 1):
                if part in remaining:
                    return part
        return None

    def span(self, claim: Claim, first: int, count: int) -> RequestSpan:
        """Return consecutive parts as the span of one request.

        Args:
            claim: the request's claim on a connection slot.
            first: number of the first part.
            count: number of parts.
        """
        # The transport also computes the origin's checksum, which the partial knows nothing about.
        parts = replace(self.partial.parts(first, count), algorithm=self.algorithm)
        when_begun = functools.partial(self.unfinished.begin, first)
        return RequestSpan(self.origin, self.obj, parts, claim, when_begun)

    def record(self, finished: list[PartSums]) -> None:
        """Record the finished parts of one request."""
        # A request's bytes are counted under its first part.
        self.unfinished.end(finished[0].index)
        for sums in finished:
            self.partial.mark_finished(sums)
            self._sums[sums.index] = sums.checksum
            self.done_bytes += self.partial.size_of(sums.index)
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
        """Return the checksum of the whole object, combined from those of its parts."""
        sums = self._part_checksums(algorithm)
        return combined(algorithm, sums, self.partial.part_bytes, self.obj.size_bytes)

    def _part_checksums(self, algorithm: str) -> list[int]:
        """Return the checksum of every part, in order.

        Parts that an earlier run of the daemon has fetched are read from the file.
        """
        if algorithm == "crc32c":
            return self.partial.crcs()
        checksum = checksum_function(algorithm)
        part_bytes = self.partial.part_bytes
        sums: list[int] = []
        with open(self.partial.path, "rb", buffering=0) as file:
            for index in range(self.partial.part_count):
                part_sum = self._sums.get(index)
                if part_sum is None:
                    data = os.pread(file.fileno(), part_bytes, index * part_bytes)
                    part_sum = checksum(data, 0)  # 0: no bytes come before these
                sums.append(part_sum)
        return sums
