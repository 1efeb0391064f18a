"""A shard being fetched: a file that is filled part by part, and a journal of its finished parts.

The journal is a line of JSON that identifies the object, then eight bytes per finished part (its
number and CRC32C). A record is written after its part's bytes, so after a crash the journal never
claims more than the file holds; after a power loss it may, which is why `open` verifies the
claimed parts. A compressed shard is inflated once it is complete.
"""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from shardcache.origin.objects import RemoteObject
from shardcache.redact import redact
from shardcache.store.codecs import Codec, codec_of, inflate
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.disk.file_operations import size_or_zero, unlink_quietly
from shardcache.store.disk.mounts import mount_of
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR, Layout
from shardcache.store.keys import place_of, shard_key
from shardcache.store.shard import Facts
from shardcache.transport.checksums import crc32c
from shardcache.transport.parts import RECORD, Parts, PartSums

_MODE = 0o640  # readers of the group may read arriving shards, regardless of the umask


@dataclass(slots=True)
class Partial:
    """A partially fetched version of a shard in the cache folder."""

    obj: RemoteObject
    part_bytes: int  # size of every part but the last
    path: Path
    journal_path: Path
    key: str
    is_file: bool = False  # True if the object's own bytes are wanted
    inode: int = 0  # of the file at `path`; changes if the download is restarted
    done: dict[int, int] = field(default_factory=dict)  # CRC32C of finished parts, by number

    @property
    def count(self) -> int:
        """Number of parts; 0 for an empty object."""
        return -(-self.obj.size_bytes // self.part_bytes)

    @property
    def codec(self) -> Codec | None:
        """Compression of the shard; None for a plain tar, and for a file."""
        return None if self.is_file else codec_of(self.obj.url)

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

    def facts(self) -> Facts:
        """Return the facts about the complete file, except for the number of samples."""
        return self._facts(self.obj.size_bytes, self.crcs())

    def inflate(self, codec: Codec, dst: Path, reserve: Callable[[int], None]) -> Facts:
        """Decompress the complete file into `dst`; return the facts about that. See `inflate`."""
        url = self.obj.url
        size_bytes, crcs = inflate(self.path, dst, codec, self.part_bytes, reserve, url)
        return self._facts(size_bytes, crcs)

    def _facts(self, size_bytes: int, crcs: list[int]) -> Facts:
        return Facts(
            url=redact(self.obj.url),
            version=self.obj.version,
            size_bytes=size_bytes,
            origin_bytes=self.obj.size_bytes,
            part_bytes=self.part_bytes,
            part_crcs=tuple(crcs),
            samples=None,
        )

    @classmethod
    def open(
        cls,
        layout: Layout,
        obj: RemoteObject,
        part_bytes: int,
        *,
        is_file: bool = False,
    ) -> Self:
        """Create a partial, or resume that of an interrupted download. Blocks. Raises DiskError."""
        key = shard_key(place_of(obj.url, is_file=is_file), obj.version)
        path = layout.in_progress(key, PART)
        journal = layout.in_progress(key, JOURNAL)
        partial = cls(obj, part_bytes, path, journal, key, is_file)
        with disk_errors(path):
            if not partial._resume():
                partial._create()
            path.chmod(_MODE)
            partial.inode = path.stat().st_ino
        return partial

    def _create(self) -> None:
        unlink_quietly(self.path, self.journal_path)
        with open(self.path, "wb") as file:
            if mount_of(self.path).is_memory:  # which would be zeroed now, and written later
                file.truncate(self.obj.size_bytes)
            elif self.obj.size_bytes:
                os.posix_fallocate(file.fileno(), 0, self.obj.size_bytes)
        self.journal_path.write_bytes(self._title() + b"\n")

    def _title(self) -> bytes:
        title = {
            "url": redact(self.obj.url),
            "version": self.obj.version,
            "size_bytes": self.obj.size_bytes,
            "part_bytes": self.part_bytes,
        }
        return json.dumps(title).encode()

    def _resume(self) -> bool:
        """Mark the finished parts of an interrupted download; return False if there is none."""
        if not self.obj.ranges or size_or_zero(self.path) != self.obj.size_bytes:
            return False
        try:
            title, _, records = self.journal_path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return False
        if title != self._title():
            return False

        whole_bytes = len(records) - len(records) % RECORD.size  # a crash may tear the last one
        os.truncate(self.journal_path, len(title) + 1 + whole_bytes)
        recorded = dict(RECORD.iter_unpack(records[:whole_bytes]))
        with open(self.path, "rb", buffering=0) as file:
            for index, crc in recorded.items():
                data = os.pread(file.fileno(), self.part_bytes, index * self.part_bytes)
                if index < self.count and crc32c(data, 0) == crc:
                    self.done[index] = crc
        return True


def discard(layout: Layout, key: str, *, keep_parts: bool = False) -> None:
    """Remove all unpublished files of a key. Blocks.

    With `keep_parts`, those stay that are needed to resume the download.
    """
    suffixes = [TAR, SIDECAR]
    if not keep_parts:
        suffixes += [PART, JOURNAL]
    # A failing disk was reported by the failed write; the next start cleans up
    with contextlib.suppress(OSError):
        unlink_quietly(*(layout.in_progress(key, suffix) for suffix in suffixes))
