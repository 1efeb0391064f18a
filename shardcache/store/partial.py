"""A shard being fetched: a file that is filled part by part, and a journal of its finished parts.

The journal is a line of JSON that identifies the object, then eight bytes per finished part (its number and CRC32C). A
record is written after its part's bytes, so after a crash the journal never claims more than the file holds; after a
power loss it may, which is why `open` verifies the claimed parts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from shardcache.checksums import crc32c
from shardcache.errors import ShardcacheError
from shardcache.origin.base import RemoteObject
from shardcache.redact import redact
from shardcache.store.disk import disk_error, disk_errors, size_or_zero, unlink_quietly
from shardcache.store.folder import JOURNAL, PART, SIDECAR, TAR, Layout, shard_key
from shardcache.store.inflate import Codec, codec_of, inflate
from shardcache.store.shard import Facts
from shardcache.transport.parts import RECORD, Parts, PartSums

_MODE = 0o640  # readers of the group may read arriving shards, regardless of the umask


@dataclass(slots=True)
class Partial:
    """A partially fetched version of a shard in the cache folder.

    Attributes:
        obj: the object that is downloaded.
        part_bytes: size of every part but the last.
        path: path of the file, for the processes that write it.
        journal_path: path of the journal of finished parts.
        key: cache key of the shard.
        inode: inode of the file at `path`; changes if the download is restarted.
        done: CRC32C of each finished part, by part number.
    """

    obj: RemoteObject
    part_bytes: int
    path: Path
    journal_path: Path
    key: str
    inode: int = 0
    done: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of parts; 0 for an empty object."""
        return -(-self.obj.size_bytes // self.part_bytes)

    @property
    def codec(self) -> Codec | None:
        """Compression of the shard; None for a plain tar."""
        return codec_of(self.obj.url)

    def missing(self) -> list[int]:
        """Return the numbers of the parts still to be fetched, in order."""
        return [index for index in range(self.count) if index not in self.done]

    def parts(self, first: int, count: int) -> Parts:
        """Return the description of `count` consecutive parts, for the process that writes them."""
        start = first * self.part_bytes
        size_bytes = min(count * self.part_bytes, self.obj.size_bytes - start)
        return Parts(str(self.path), str(self.journal_path), self.part_bytes, start, size_bytes)

    def record(self, sums: PartSums) -> None:
        """Mark a part as finished."""
        self.done[sums.index] = sums.crc32c

    def crcs(self) -> list[int]:
        """Return the CRC32C of every part, in order; all parts must be finished."""
        return [self.done[index] for index in range(self.count)]

    def disk_error(self, exn: OSError) -> ShardcacheError:
        """Return the error for a failed write."""
        return disk_error(exn, self.path)

    def facts(self) -> Facts:
        """Return the facts about the complete file, except for the number of samples."""
        return self._facts(self.obj.size_bytes, self.crcs())

    def inflate(self, codec: Codec, dst: Path, reserve: Callable[[int], None]) -> Facts:
        """Decompress the complete file into `dst` and return the facts about that; see `store.inflate.inflate`."""
        return self._facts(*inflate(self.path, dst, codec, self.part_bytes, reserve, self.obj.url))

    def _facts(self, size_bytes: int, crcs: list[int]) -> Facts:
        obj = self.obj
        return Facts(redact(obj.url), obj.version, size_bytes, obj.size_bytes, self.part_bytes, tuple(crcs), samples=0)

    @classmethod
    def open(cls, layout: Layout, obj: RemoteObject, part_bytes: int) -> Self:
        """Create a partial, or resume that of an interrupted download. Blocks.

        Raises DiskFullError if the filesystem cannot hold the shard.
        """
        key = shard_key(obj.url, obj.version)
        path, journal = layout.in_progress(key, PART), layout.in_progress(key, JOURNAL)
        partial = cls(obj, part_bytes, path, journal, key)
        with disk_errors(path):
            if not partial._resume():
                partial._create()
            path.chmod(_MODE)
            partial.inode = path.stat().st_ino
        return partial

    def _create(self) -> None:
        unlink_quietly(self.path, self.journal_path)
        with open(self.path, "wb") as file:
            if self.obj.size_bytes:
                os.posix_fallocate(file.fileno(), 0, self.obj.size_bytes)
        self.journal_path.write_bytes(json.dumps(self._title()).encode() + b"\n")

    def _title(self) -> dict[str, Any]:
        return {
            "url": redact(self.obj.url),
            "version": self.obj.version,
            "size_bytes": self.obj.size_bytes,
            "part_bytes": self.part_bytes,
        }

    def _resume(self) -> bool:
        if not self.obj.ranges or size_or_zero(self.path) != self.obj.size_bytes:
            return False
        title, _, records = _read_journal(self.journal_path).partition(b"\n")
        if title != json.dumps(self._title()).encode():
            return False
        torn_bytes = len(records) % RECORD.size
        os.truncate(self.journal_path, len(title) + 1 + len(records) - torn_bytes)
        with open(self.path, "rb", buffering=0) as file:
            for index, crc in dict(RECORD.iter_unpack(records[: len(records) - torn_bytes])).items():
                data = os.pread(file.fileno(), self.part_bytes, index * self.part_bytes)
                if index < self.count and crc32c(data, 0) == crc:
                    self.done[index] = crc
        return True


def _read_journal(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def discard(layout: Layout, key: str, *, keep_parts: bool = False) -> None:
    """Remove all unpublished files of a key, except, with `keep_parts`, those needed to resume the download. Blocks."""
    suffixes = (TAR, SIDECAR) if keep_parts else (TAR, SIDECAR, PART, JOURNAL)
    with contextlib.suppress(OSError):  # a failing disk was reported by the failed write; the next start cleans up
        unlink_quietly(*(layout.in_progress(key, suffix) for suffix in suffixes))
