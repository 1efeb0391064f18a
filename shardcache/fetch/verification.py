"""Checks of a download: its file against the origin's checksum of the object, or against its ETag.

An ETag may be the MD5 of the object, but does not say so: in S3 it is for objects uploaded in one piece and not
encrypted with a KMS or customer key; other object stores vary. So a mismatch alone proves nothing:

- It means damage if another object of the same origin matched its ETag: 128 bits do not match by chance.
- Otherwise the object is fetched once more. If the bytes differ from the first attempt's, they were damaged in transit;
  if they are the same, the origin's ETags are not MD5s and are ignored from then on.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardcache.access.urls import store_of
from shardcache.checksums import ALGORITHMS, combined
from shardcache.errors import CorruptShardError
from shardcache.logs import SharedLogger
from shardcache.origin.base import MD5, RemoteObject
from shardcache.store.partial import Partial
from shardcache.transport.parts import PartSums

log = SharedLogger()

_REMEMBERED = 1024


@dataclass(slots=True)
class PartChecksums:
    """Checksums of one download's parts, in the algorithm of the origin's own checksum.

    A part is summed while it is written; only parts from an earlier run are read back. The file keeps the CRC32Cs.
    """

    partial: Partial
    _sums: dict[int, int] = field(default_factory=dict)

    @property
    def algorithm(self) -> str | None:
        """Algorithm of the origin's checksum; None without a checksum, or if the algorithm is not supported."""
        wanted = self.partial.obj.checksum
        return wanted.algorithm if wanted is not None and wanted.algorithm in ALGORITHMS else None

    def record(self, sums: PartSums) -> None:
        """Record the checksum of a part."""
        self._sums[sums.index] = sums.checksum

    def verify(self) -> None:
        """Compare the whole object with the origin's checksum, if it has one. Blocks.

        Raises CorruptShardError; OSError if the file cannot be read.
        """
        obj, algorithm, wanted = self.partial.obj, self.algorithm, self.partial.obj.checksum
        if algorithm is None or wanted is None:
            return
        parts = self.partial.crcs() if algorithm == "crc32c" else self._with_earlier_parts(ALGORITHMS[algorithm])
        found = combined(algorithm, parts, self.partial.part_bytes, obj.size_bytes)
        if found != wanted.value:
            message = f"the {algorithm} of the received bytes is {found:x}, the origin's is {wanted.value:x}"
            raise CorruptShardError(message, url=obj.url)

    def _with_earlier_parts(self, checksum: Callable[[bytes, int], int]) -> list[int]:
        part_bytes = self.partial.part_bytes
        with open(self.partial.path, "rb", buffering=0) as file:
            return [
                self._sums[index]
                if index in self._sums
                else checksum(os.pread(file.fileno(), part_bytes, index * part_bytes), 0)
                for index in range(self.partial.count)
            ]


class Etags:
    """Knowledge of which origins' ETags are MD5s."""

    def __init__(self) -> None:
        self._digests: set[str] = set()  # origins where an object matched its ETag
        self._other: set[str] = set()  # origins whose ETags are not MD5s
        self._doubted: dict[tuple[str, str], int] = {}  # MD5s that did not match, by url and version

    def __repr__(self) -> str:
        return f"<Etags MD5 at {sorted(self._digests)}, something else at {sorted(self._other)}>"

    async def verify(self, obj: RemoteObject, path: Path) -> None:
        """Compare a file with its object's ETag, if that may be an MD5.

        Raises CorruptShardError; OSError if the file cannot be read.
        """
        if obj.checksum is None or obj.checksum.algorithm != MD5 or store_of(obj.url) in self._other:
            return
        self.judge(obj, obj.checksum.value, await asyncio.to_thread(_md5, path))

    def judge(self, obj: RemoteObject, wanted: int, found: int) -> None:
        """Compare an object's ETag with the MD5 of the received bytes, and learn from it. Raises CorruptShardError."""
        origin, name = store_of(obj.url), (obj.url, obj.version)
        if found == wanted:
            self._digests.add(origin)
            self._doubted.pop(name, None)
        elif origin not in self._digests and self._doubted.get(name) == found:
            self._other.add(origin)
            log.warning("the origin's ETags are not MD5s; no longer comparing them", origin=origin)
        else:
            self._doubt(name, found)
            raise CorruptShardError(
                f"the MD5 of the received bytes is {found:032x}, the origin's ETag is {wanted:032x}",
                url=obj.url,
                remedy="upload the shard again; if the ETag is not meant to be its MD5, set `verify_etag = false` "
                "in its [[origin]] table",
            )

    def _doubt(self, name: tuple[str, str], found: int) -> None:
        self._doubted[name] = found
        if len(self._doubted) > _REMEMBERED:
            del self._doubted[next(iter(self._doubted))]


def _md5(path: Path) -> int:
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    return int.from_bytes(digest.digest(), "big")
