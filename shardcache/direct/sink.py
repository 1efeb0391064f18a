"""A nameless file that is filled part by part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from awscrt import checksums

from shardcache.direct.scratch import Scratch, ScratchFile
from shardcache.origin.base import RemoteObject
from shardcache.store.files import WRITE_BYTES, write_all


@dataclass(slots=True)
class ScratchSink:
    """A `fetch.sink.Sink`; nothing of it outlives the process, so there is no journal.

    Attributes:
        obj: what is downloaded.
        part_bytes: size of every part but the last.
        file: with room for all of it.
        done: CRC32C of each finished part, by part number.
    """

    obj: RemoteObject
    part_bytes: int
    scratch: Scratch
    file: ScratchFile
    done: dict[int, int] = field(default_factory=dict)
    # Writers of one file would only spin on its lock in the kernel.
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def path(self) -> Path:
        """As `Sink.path`."""
        return self.file.path

    def missing(self) -> list[int]:
        """As `Sink.missing`."""
        return [index for index in range(self._count) if index not in self.done]

    async def write(self, index: int, data: memoryview, seen: Callable[[memoryview], object]) -> None:
        """As `Sink.write`."""
        async with self._writing:
            self.done[index] = await asyncio.to_thread(self._write, index, data, seen)

    def crcs(self) -> list[int]:
        """As `Sink.crcs`."""
        return [self.done[index] for index in range(self._count)]

    @property
    def _count(self) -> int:
        return -(-self.obj.size_bytes // self.part_bytes)

    def _write(self, index: int, data: memoryview, seen: Callable[[memoryview], object]) -> int:
        crc32c, offset = 0, index * self.part_bytes
        with self.scratch.errors(self.obj.url):
            for at in range(0, len(data), WRITE_BYTES):
                block = data[at : at + WRITE_BYTES]
                crc32c = checksums.crc32c(block, crc32c)
                seen(block)
                write_all(self.file.fd, block, offset + at)
        return crc32c
