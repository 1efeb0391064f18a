"""Finished parts of a file that is filled part by part."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcache.origin.base import RemoteObject
from shardcache.transport.parts import PartSums


@dataclass(slots=True)
class PartList:
    """The parts of one object, and the checksums of the finished ones.

    Attributes:
        obj: the object that is downloaded.
        part_bytes: size of every part but the last.
        done: CRC32C of each finished part, by part number.
    """

    obj: RemoteObject
    part_bytes: int
    done: dict[int, int] = field(default_factory=dict, kw_only=True)

    @property
    def count(self) -> int:
        """Number of parts; 0 for an empty object."""
        return -(-self.obj.size_bytes // self.part_bytes)

    def missing(self) -> list[int]:
        """Return the numbers of the parts still to be fetched, in order."""
        return [index for index in range(self.count) if index not in self.done]

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the offset and size of `count` consecutive parts."""
        start = first * self.part_bytes
        return start, min(start + count * self.part_bytes, self.obj.size_bytes) - start

    def record(self, sums: PartSums) -> None:
        """Mark a part as finished."""
        self.done[sums.index] = sums.crc32c

    def crcs(self) -> list[int]:
        """Return the CRC32C of every part, in order; all parts must be finished."""
        return [self.done[index] for index in range(self.count)]
