"""Checksums of parts as they arrive, and of the whole from those of its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from awscrt import checksums as crt
from isal import isal_zlib

from shardcache.errors import CacheDirError, CorruptShardError
from shardcache.fetch.sink import Sink

Data: TypeAlias = bytes | memoryview

ALGORITHMS: dict[str, Callable[[Data, int], int]] = {
    "crc32c": crt.crc32c,
    "crc32": isal_zlib.crc32,  # what SDKs store by default; three times as fast as zlib's, four times as the CRT's
    "crc64nvme": crt.crc64nvme,
}
_COMBINE: dict[str, Callable[[int, int, int], int]] = {
    "crc32c": crt.combine_crc32c,
    "crc32": crt.combine_crc32,
    "crc64nvme": crt.combine_crc64nvme,
}


@dataclass(slots=True)
class Ledger:
    """The checksums of one download's parts, by the algorithm that the store has its own in.

    A part is summed while it is written; only what an earlier run left is read again. CRC32C is the sink's own.
    """

    sink: Sink
    _sums: dict[int, int] = field(default_factory=dict)

    def observer(self, index: int) -> Callable[[memoryview], None]:
        """Return what to show the blocks of a part, in order."""
        wanted = self.sink.obj.checksum
        update = None if wanted is None or wanted.algorithm == "crc32c" else ALGORITHMS.get(wanted.algorithm)
        self._sums[index] = 0

        def see(block: memoryview) -> None:
            if update is not None:
                self._sums[index] = update(block, self._sums[index])

        return see

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


def combined(algorithm: str, parts: Sequence[int], part_bytes: int, size_bytes: int) -> int:
    """Return the checksum of the whole from those of its parts, all of `part_bytes` but the last."""
    whole = 0
    for index, part in enumerate(parts):
        whole = _COMBINE[algorithm](whole, part, min(part_bytes, size_bytes - index * part_bytes))
    return whole
