"""A whole download against the checksum that the store holds for the object."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from awscrt import checksums

from shardcache.errors import CorruptShardError
from shardcache.fetch.sink import Sink

_READ_BYTES = 1024 * 1024
_READERS: dict[str, Callable[[bytes, int], int]] = {
    "crc32": checksums.crc32,
    "crc64nvme": checksums.crc64nvme,
}


async def verify(sink: Sink) -> None:
    """Compare with the store's checksum, where it has one of a kind that is known.

    CRC32C follows from the parts' own; for the others the file is read again, in a thread, while it is still in
    page cache. Raises CorruptShardError.
    """
    wanted = sink.obj.checksum
    if wanted is None:
        return
    if wanted.algorithm == "crc32c":
        found = combined_crc32c(sink.crcs(), sink.part_bytes, sink.obj.size_bytes)
    elif wanted.algorithm in _READERS:
        found = await asyncio.to_thread(_of_file, sink.path, _READERS[wanted.algorithm])
    else:
        return
    if found != wanted.value:
        raise CorruptShardError(
            f"the bytes that arrived have {wanted.algorithm} {found:x}, the store says {wanted.value:x}",
            url=sink.obj.url,
        )


def combined_crc32c(crcs: list[int], part_bytes: int, size_bytes: int) -> int:
    """Return the CRC32C of the whole from those of its parts, all of `part_bytes` but the last."""
    whole = 0
    for index, crc in enumerate(crcs):
        length = min(part_bytes, size_bytes - index * part_bytes)
        whole = checksums.combine_crc32c(whole, crc, length)
    return whole


def _of_file(path: Path, update: Callable[[bytes, int], int]) -> int:
    value = 0
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while data := file.read(_READ_BYTES):
            value = update(data, value)
    return value
