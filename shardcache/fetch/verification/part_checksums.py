"""Part checksums of a download, combined and compared with the origin's checksum of the object."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from shardcache.checksums import ALGORITHMS, combined
from shardcache.errors import CorruptShardError
from shardcache.fetch.sink import Sink
from shardcache.transport.parts import PartSums


@dataclass(slots=True)
class PartChecksums:
    """Checksums of one download's parts, in the algorithm of the origin's own checksum.

    A part is summed while it is written; only parts from an earlier run are read back. The sink keeps the CRC32Cs.
    """

    sink: Sink
    _sums: dict[int, int] = field(default_factory=dict)

    @property
    def algorithm(self) -> str | None:
        """Algorithm of the origin's checksum; None without a checksum, or if the algorithm is not supported."""
        wanted = self.sink.obj.checksum
        return wanted.algorithm if wanted is not None and wanted.algorithm in ALGORITHMS else None

    def record(self, sums: PartSums) -> None:
        """Record the checksum of a part."""
        self._sums[sums.index] = sums.checksum

    def verify(self) -> None:
        """Compare the whole object with the origin's checksum, if it has one. Blocks.

        Raises CorruptShardError; OSError if the file cannot be read.
        """
        wanted = self.sink.obj.checksum
        if wanted is None or wanted.algorithm not in ALGORITHMS:
            return
        parts = self.sink.crcs() if wanted.algorithm == "crc32c" else self._with_earlier_parts(wanted.algorithm)
        found = combined(wanted.algorithm, parts, self.sink.part_bytes, self.sink.obj.size_bytes)
        if found != wanted.value:
            message = f"the {wanted.algorithm} of the received bytes is {found:x}, the origin's is {wanted.value:x}"
            raise CorruptShardError(message, url=self.sink.obj.url)

    def _with_earlier_parts(self, algorithm: str) -> list[int]:
        sink = self.sink
        with open(sink.path, "rb", buffering=0) as file:
            return [
                self._sums[index]
                if index in self._sums
                else ALGORITHMS[algorithm](os.pread(file.fileno(), sink.part_bytes, index * sink.part_bytes), 0)
                for index in range(-(-sink.obj.size_bytes // sink.part_bytes))
            ]
