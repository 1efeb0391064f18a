"""A download's checksums: of its parts as they are written, held against the store's of the whole."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from shardcache.checksums import ALGORITHMS, combined
from shardcache.errors import CacheDirError, CorruptShardError
from shardcache.fetch.sink import Sink
from shardcache.transport.parts import PartSums


@dataclass(slots=True)
class Ledger:
    """The checksums of one download's parts, by the algorithm that the store has its own in.

    A part is summed while it is written; only what an earlier run left is read again. CRC32C is the sink's own.
    """

    sink: Sink
    _sums: dict[int, int] = field(default_factory=dict)

    @property
    def algorithm(self) -> str | None:
        """What parts have to be summed by beside CRC32C."""
        wanted = self.sink.obj.checksum
        return wanted.algorithm if wanted is not None and wanted.algorithm in ALGORITHMS else None

    def record(self, sums: PartSums) -> None:
        """Keep the checksum of a part."""
        self._sums[sums.index] = sums.checksum

    def verify(self) -> None:
        """Compare the whole with the store's checksum, where it has one. Blocks.

        Raises CorruptShardError.
        """
        wanted = self.sink.obj.checksum
        if wanted is None or wanted.algorithm not in ALGORITHMS:
            return
        parts = self.sink.crcs() if wanted.algorithm == "crc32c" else self._with_earlier_parts(wanted.algorithm)
        found = combined(wanted.algorithm, parts, self.sink.part_bytes, self.sink.obj.size_bytes)
        if found != wanted.value:
            message = f"the {wanted.algorithm} of what arrived is {found:x}, that of the store {wanted.value:x}"
            raise CorruptShardError(message, url=self.sink.obj.url)

    def _with_earlier_parts(self, algorithm: str) -> list[int]:
        sink = self.sink
        try:
            return self._read_again(algorithm)
        except OSError as exn:
            raise CacheDirError(f"cannot read {sink.path} again ({exn.strerror})", url=sink.obj.url) from exn

    def _read_again(self, algorithm: str) -> list[int]:
        sink = self.sink
        with open(sink.path, "rb", buffering=0) as file:
            return [
                self._sums[index]
                if index in self._sums
                else ALGORITHMS[algorithm](os.pread(file.fileno(), sink.part_bytes, index * sink.part_bytes), 0)
                for index in range(-(-sink.obj.size_bytes // sink.part_bytes))
            ]
