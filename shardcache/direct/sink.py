"""A nameless file that is filled part by part."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardcache.direct.scratch import Scratch, ScratchFile
from shardcache.errors import ShardcacheError
from shardcache.origin.base import RemoteObject
from shardcache.transport.parts import Parts, PartSums


@dataclass(slots=True)
class ScratchSink:
    """A `fetch.sink.Sink` without a journal, since nothing of it outlives the process.

    Attributes:
        obj: the object that is downloaded.
        part_bytes: size of every part but the last.
        file: file with space for the whole object.
        done: CRC32C of each finished part, by part number.
    """

    obj: RemoteObject
    part_bytes: int
    scratch: Scratch
    file: ScratchFile
    done: dict[int, int] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """As `Sink.path`."""
        return self.file.path

    def missing(self) -> list[int]:
        """As `Sink.missing`."""
        return [index for index in range(self._count) if index not in self.done]

    def parts(self, first: int, count: int) -> Parts:
        """As `Sink.parts`."""
        start = first * self.part_bytes
        stop = min(start + count * self.part_bytes, self.obj.size_bytes)
        return Parts(str(self.file.path_for_others), None, self.part_bytes, start, stop - start)

    def record(self, sums: PartSums) -> None:
        """As `Sink.record`."""
        self.done[sums.index] = sums.crc32c

    def disk_error(self, exn: OSError) -> ShardcacheError:
        """As `Sink.disk_error`."""
        return self.scratch.error(exn, self.obj.url)

    def crcs(self) -> list[int]:
        """As `Sink.crcs`."""
        return [self.done[index] for index in range(self._count)]

    @property
    def _count(self) -> int:
        return -(-self.obj.size_bytes // self.part_bytes)
