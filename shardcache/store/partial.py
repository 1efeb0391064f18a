"""A shard being fetched: a file that is filled part by part, and a journal of its finished parts.

The journal is a line of JSON that identifies the object, then eight bytes per finished part (its
number and CRC32C). A record is written after its part's bytes, so after a crash the journal never
claims more than the file holds; after a power loss it may, which is why `open` verifies the
claimed parts. A compressed shard is inflated once it is complete.
"""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from shardcache.origin.objects import RemoteObject
from shardcache.shared.urls.url_names import format_of, is_stored_as_is
from shardcache.store.codecs import codec_of, inflate, write_pieces
from shardcache.store.disk.direct_reads import read_direct
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.disk.file_operations import (
    allocated_or_zero,
    inode_or_zero,
    size_or_zero,
    unlink_quietly,
)
from shardcache.store.disk.holes import punch_hole
from shardcache.store.disk.mounts import mount_of
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR, Layout
from shardcache.store.keys import place_of, shard_key, stored_url
from shardcache.store.shard import Facts
from shardcache.transport.between.checksums import crc32c
from shardcache.transport.between.parts import RECORD, Parts, PartSums

# This bit of a part's number in the journal says that the part is no longer in the file; the rest
# of the record means nothing then.
_DROPPED = 1 << 31
_MAX_TITLE_BYTES = 64 * 1024  # of a journal's first line, which identifies the object
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
    # CRC32C of parts that an earlier daemon has finished, and that are not compared with it yet.
    unchecked: dict[int, int] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        layout: Layout,
        obj: RemoteObject,
        part_bytes: int,
        *,
        is_file: bool = False,
        is_sparse: bool = False,
        granted_inodes: Collection[int] = (),
    ) -> Self:
        """Create a partial, or resume that of an interrupted download. Blocks. Raises DiskError.

        Args:
            part_bytes: size of the parts of a new one; one that is resumed keeps its own.
            is_file: whether the object's own bytes are wanted.
            is_sparse: whether to leave the space of parts unallocated until they arrive, and those
                of an earlier daemon unchecked until `check`.
            granted_inodes: inodes of previous files at this path that readers may still open by
                path and inode. A new file must not get one of them, as filesystems reuse the
                numbers. A file with one is not resumed as a sparse one, whose parts come and go.
        """
        key = shard_key(place_of(obj.url, is_file=is_file), obj.version)
        path = layout.in_progress(key, PART)
        journal = layout.in_progress(key, JOURNAL)
        partial = cls(obj, part_bytes, path, journal, key, is_file=is_file)
        with disk_errors(path):
            is_granted = is_sparse and inode_or_zero(path) in granted_inodes
            if is_granted or not partial._resume():
                partial._create(granted_inodes)
            if not is_sparse:
                partial.check(list(partial.unchecked))
                partial._allocate()
            path.chmod(_MODE)
            partial.inode = path.stat().st_ino
        return partial

    @classmethod
    def recover(cls, layout: Layout, key: str) -> Self | None:
        """Return the parts of an object that an earlier daemon has left, unchecked. Blocks.

        None if there are none, or the file is that of a transfer of the whole, which has allocated
        all of it. The object is what the journal says of it: the origin may say more.
        """
        path = layout.in_progress(key, PART)
        journal = layout.in_progress(key, JOURNAL)
        with contextlib.suppress(OSError):
            obj = _object_in(journal)
            if obj is None or key != _key_of_file(obj):
                return None
            is_sparse = allocated_or_zero(path) < obj.size_bytes
            if not is_sparse:
                return None
            # `_resume` replaces the size of the parts by that in the journal.
            partial = cls(obj, obj.size_bytes, path, journal, key, is_file=True)
            if partial._resume() and partial.unchecked:
                partial._free_unfinished()
                partial.inode = path.stat().st_ino
                return partial
        return None

    @property
    def count(self) -> int:
        """Number of parts; 0 for an empty object."""
        return -(-self.obj.size_bytes // self.part_bytes)

    @property
    def may_be_copied(self) -> bool:
        """True if the cached file may be a copy in another form, such as a decompressed tar."""
        return not self.is_file and not is_stored_as_is(self.obj.url)

    def missing(self) -> list[int]:
        """Return the numbers of the parts still to be fetched, in order."""
        return [index for index in range(self.count) if index not in self.done]

    def parts(self, first: int, count: int) -> Parts:
        """Return the description of `count` consecutive parts, for the process that writes them."""
        start = first * self.part_bytes
        size_bytes = min(count * self.part_bytes, self.obj.size_bytes - start)
        return Parts(str(self.path), str(self.journal_path), self.part_bytes, start, size_bytes)

    def is_there(self) -> bool:
        """Return whether the file is still where it was made. Blocks."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_ino == self.inode
        return False

    def size_of(self, index: int) -> int:
        """Return the number of bytes of a part."""
        return self.parts(index, 1).size_bytes

    def record(self, sums: PartSums) -> None:
        """Mark a part as finished."""
        self.done[sums.index] = sums.crc32c

    def check(self, parts: Sequence[int]) -> list[int]:
        """Compare parts with the journal; return those that are sound, and finished from now on.

        The others have to be fetched again. Blocks. Raises DiskError.
        """
        sound: list[int] = []
        with disk_errors(self.path), open(self.path, "rb", buffering=0) as file:
            for index in parts:
                crc = self.unchecked.pop(index)
                if self._crc_in_memory(file.fileno(), index) == crc:
                    self.done[index] = crc
                    sound.append(index)
        return sound

    def damaged(self, crcs: Mapping[int, int]) -> list[int]:
        """Return the parts with another CRC32C than they should have. Blocks.

        They are read from the disk, which may differ from what is in memory. `done` stays as it is.
        Raises DiskError.

        Args:
            crcs: the CRC32C that each part should have, by number.
        """
        with disk_errors(self.path):
            return [part for part, crc in crcs.items() if self._crc_on_disk(part) != crc]

    def punch(self, index: int) -> None:
        """Free the space of a part, which is no longer in `done`. Blocks. Raises DiskError.

        The journal says so first, or it would claim a hole. Files that are gone take no space.
        """
        with disk_errors(self.path), contextlib.suppress(FileNotFoundError):
            with open(self.journal_path, "r+b", buffering=0) as journal:
                journal.seek(0, os.SEEK_END)
                journal.write(RECORD.pack(index | _DROPPED, 0))
            with open(self.path, "r+b") as file:
                punch_hole(file.fileno(), index * self.part_bytes, self.size_of(index))

    def fill(self, source: Path) -> None:
        """Copy the missing parts from a file with the object's own bytes. Blocks.

        Raises DiskError.
        """
        with disk_errors(self.path), source.open("rb") as whole, self.path.open("r+b") as file:
            for index in self.missing():
                start = index * self.part_bytes
                data = os.pread(whole.fileno(), self.size_of(index), start)
                os.pwrite(file.fileno(), data, start)
                self.done[index] = crc32c(data, 0)

    def crcs(self) -> list[int]:
        """Return the CRC32C of every part, in order; all parts must be finished."""
        return [self.done[index] for index in range(self.count)]

    def facts(self) -> Facts:
        """Return the facts about the complete file, except for the number of samples."""
        return self._facts(self.obj.size_bytes, self.crcs())

    def copy(self, dst: Path, reserve: Callable[[int], None]) -> Facts | None:
        """Write the form in which the complete file is cached to `dst`; return the facts about it.

        That is the decompressed shard, or another form that its format makes. None if the file is
        cached as it is. Blocks. Raises ShardError, DiskError; see `inflate`.

        Args:
            reserve: called with a number of bytes before they are written.
        """
        url = self.obj.url
        codec = codec_of(url)
        if codec is not None:
            size_bytes, crcs = inflate(self.path, dst, codec, self.part_bytes, reserve, url)
            return self._facts(size_bytes, crcs)

        with disk_errors(dst):
            copy = format_of(url).stored_copy(self.path, url)
            if copy is None:
                return None
            with copy:
                size_bytes, crcs = write_pieces(copy, dst, self.part_bytes, reserve)
        return self._facts(size_bytes, crcs)

    def _create(self, granted_inodes: Collection[int]) -> None:
        """Make an empty file and its journal. For `granted_inodes`, see `open`."""
        unlink_quietly(self.path, self.journal_path)
        with contextlib.ExitStack() as files:
            file = files.enter_context(open(self.path, "wb"))
            while os.fstat(file.fileno()).st_ino in granted_inodes:
                # While the file stays open, the next one cannot get its number.
                unlink_quietly(self.path)
                file = files.enter_context(open(self.path, "wb"))
            file.truncate(self.obj.size_bytes)
        self.journal_path.write_bytes(self._title() + b"\n")

    def _allocate(self) -> None:
        """Allocate the space of all parts that have not arrived."""
        # A filesystem in memory would write zeros now, and the bytes later.
        is_memory = mount_of(self.path).is_memory
        if is_memory or not self.obj.size_bytes:
            return
        with open(self.path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, self.obj.size_bytes)

    def _resume(self) -> bool:
        """Note the finished parts of an interrupted download; return False if there is none."""
        if not self.obj.ranges or size_or_zero(self.path) != self.obj.size_bytes:
            return False
        try:
            title, _, records = self.journal_path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return False
        part_bytes = self._part_bytes_of(title)
        if part_bytes is None:
            return False
        self.part_bytes = part_bytes

        # A crash may have torn the last record.
        whole_bytes = len(records) - len(records) % RECORD.size
        os.truncate(self.journal_path, len(title) + 1 + whole_bytes)
        for index, crc in RECORD.iter_unpack(records[:whole_bytes]):
            if index & _DROPPED:
                self.unchecked.pop(index ^ _DROPPED, None)
            elif index < self.count:
                self.unchecked[index] = crc
        return True

    def _part_bytes_of(self, title: bytes) -> int | None:
        """Return the size of the parts in a journal; None if it is that of another object."""
        try:
            fields = json.loads(title)
        except ValueError:
            return None
        if not isinstance(fields, dict):
            return None
        part_bytes = _positive_number(fields.get("part_bytes"))
        expected = json.loads(self._title()) | {"part_bytes": part_bytes}
        return part_bytes if fields == expected else None

    def _title(self) -> bytes:
        """Return the journal's first line, without its end."""
        title = {
            "url": stored_url(self.obj.url),
            "version": self.obj.version,
            "size_bytes": self.obj.size_bytes,
            "part_bytes": self.part_bytes,
        }
        return json.dumps(title).encode()

    def _free_unfinished(self) -> None:
        """Free the space of parts that the journal does not claim: they were being written."""
        with open(self.path, "r+b") as file:
            start = 0  # of the gap before a finished part, or before the end of the file
            for index in (*sorted(self.unchecked), self.count):
                end = min(index * self.part_bytes, self.obj.size_bytes)
                if end > start:
                    punch_hole(file.fileno(), start, end - start)
                start = end + self.part_bytes

    def _facts(self, size_bytes: int, crcs: list[int]) -> Facts:
        return Facts(
            url=stored_url(self.obj.url),
            version=self.obj.version,
            size_bytes=size_bytes,
            origin_bytes=self.obj.size_bytes,
            part_bytes=self.part_bytes,
            part_crcs=tuple(crcs),
            samples=None,
        )

    def _crc_in_memory(self, fd: int, index: int) -> int:
        """Return the CRC32C of a part of an open file, from the page cache if it is there."""
        data = os.pread(fd, self.part_bytes, index * self.part_bytes)
        return crc32c(data, 0)

    def _crc_on_disk(self, index: int) -> int:
        """Return the CRC32C of a part, read past the page cache."""
        start = index * self.part_bytes
        return crc32c(read_direct(self.path, start, self.size_of(index)), 0)


def _positive_number(value: object) -> int | None:
    """Return a value of JSON if it is a positive integer, None otherwise."""
    if type(value) is int and value > 0:
        return value
    return None


def _object_in(journal: Path) -> RemoteObject | None:
    """Return the object that a journal names, or None if it is damaged. Raises OSError.

    The journal has its url, version and size only.
    """
    with journal.open("rb") as file:
        title = file.readline(_MAX_TITLE_BYTES)
    try:
        fields = json.loads(title)
        url = fields["url"]
        version = fields["version"]
        size_bytes = fields["size_bytes"]
    except (ValueError, KeyError, TypeError):
        return None
    has_names = type(url) is str and type(version) is str
    if not has_names or _positive_number(size_bytes) is None:
        return None
    return RemoteObject(url, version, size_bytes)


def _key_of_file(obj: RemoteObject) -> str:
    return shard_key(place_of(obj.url, is_file=True), obj.version)


def discard(layout: Layout, key: str, *, keep_parts: bool = False) -> None:
    """Remove all unpublished files of a key. Blocks.

    With `keep_parts`, those stay that are needed to resume the download.
    """
    suffixes = [TAR, SIDECAR]
    if not keep_parts:
        suffixes += [PART, JOURNAL]
    # A failing disk was reported by the failed write; the next start cleans up.
    with contextlib.suppress(OSError):
        unlink_quietly(*(layout.in_progress(key, suffix) for suffix in suffixes))
