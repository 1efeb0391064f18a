"""A shard being fetched: a file that is filled part by part, and a journal of its finished parts.

A fetch opens a `Partial` for the version of the shard that it downloads. The journal begins with a
line of JSON, its title, which identifies the object. Then it has a record of eight bytes for each
finished part: the part's number and its CRC32C. A record is written after the part's bytes, so
after a crash of the daemon the journal never claims more than the file holds. After a power loss it
may, so the parts of an earlier daemon are unchecked until their bytes are compared with the
journal. A compressed shard is inflated, that is, decompressed to another file, once it is complete.

There are two kinds of partials. One for a whole shard has all of its space allocated. A sparse one
holds single parts of an object for readers of ranges; each part takes space when it arrives, and
can be dropped again. A partial is idle if no transfer is using it.
"""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from shardcache.origin.objects import RemoteObject
from shardcache.shared.urls.url_names import format_of, is_stored_as_is
from shardcache.store.codecs import codec_of, inflate, write_parts
from shardcache.store.disk.direct_reads import read_direct
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.disk.file_operations import (
    allocated_or_zero,
    fsync_path,
    inode_or_zero,
    size_or_zero,
    unlink_quietly,
)
from shardcache.store.disk.holes import punch_hole
from shardcache.store.disk.mounts import mount_of
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR, Layout
from shardcache.store.keys import file_key, place_of, shard_key, stored_url
from shardcache.store.shard import Facts
from shardcache.transport.between.checksums import crc32c
from shardcache.transport.between.parts import RECORD, Parts, PartSums

# If this bit of a part's number in a journal's record is set, the part is no longer in the file.
# The record's checksum has no meaning then.
_DROPPED = 1 << 31
_MAX_TITLE_BYTES = 64 * 1024  # limit on the size of a journal's title
# A journal is shortened if it is longer than this, and has more than this number of records for
# each part in the file.
_SHORT_JOURNAL_BYTES = 4096
_MAX_RECORDS_PER_PART = 4
_SHORTENED = ".shortened"  # suffix of the file that is to replace a journal
_MODE = 0o640  # readers of the group may read arriving shards, regardless of the umask


@dataclass(slots=True)
class Partial:
    """A partially fetched version of a shard in the cache folder.

    Attributes:
        obj: the object that is fetched, in the version to fetch.
        part_bytes: size of every part except the last.
        path: path of the file with the parts.
        journal_path: path of the journal of the finished parts.
        key: cache key of this version of the shard.
        is_file: True if the object's own bytes are wanted, not another form such as a decompressed
            tar.
        inode: inode of the file at `path`, which changes if the download is restarted.
        done: CRC32C of the finished parts, by number.
        unchecked: CRC32C of parts that an earlier daemon has finished, by number. The bytes of
            these parts have not been compared with their checksums yet.
    """

    obj: RemoteObject
    part_bytes: int
    path: Path
    journal_path: Path
    key: str
    is_file: bool = False
    inode: int = 0
    done: dict[int, int] = field(default_factory=dict)
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
        """Create a partial, or resume the partial of an interrupted download. Blocks.

        Args:
            part_bytes: size of the parts of a new partial; a resumed partial keeps its own size.
            is_file: True if the object's own bytes are wanted.
            is_sparse: True to allocate the space of each part only when the part arrives, and to
                leave the parts of an earlier daemon unchecked until `settle` is called.
            granted_inodes: inodes of previous files at this path that readers may still open by
                path and inode. A new file must not get the same number, though filesystems reuse
                the numbers of inodes: those readers would take it for the old file. A file with
                such a number is not resumed as a sparse one either: its parts could be dropped
                while those readers use them.

        Raises DiskError.
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
                unchecked = list(partial.unchecked)
                partial.settle(unchecked, partial.sound(unchecked))
                partial._allocate()
            path.chmod(_MODE)
            partial.inode = path.stat().st_ino
        return partial

    @classmethod
    def recover(cls, layout: Layout, key: str) -> Self | None:
        """Return the sparse partial that an earlier daemon has left under a key. Blocks.

        Its parts are unchecked. Its object has only what the journal states: url, version and size.
        Return None if there are no finished parts, and for the partial of a whole shard, which has
        all of its space allocated.
        """
        path = layout.in_progress(key, PART)
        journal = layout.in_progress(key, JOURNAL)
        with contextlib.suppress(OSError):
            obj = _object_in(journal)
            if obj is None or key != file_key(obj.url, obj.version):
                return None
            is_sparse = allocated_or_zero(path) < obj.size_bytes
            if not is_sparse:
                return None
            partial = cls(
                obj,
                part_bytes=obj.size_bytes,  # `_resume` replaces it by the size in the journal
                path=path,
                journal_path=journal,
                key=key,
                is_file=True,
            )
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
    def may_be_inflated(self) -> bool:
        """True if the shard may be cached in another form than the fetched one.

        `write_inflated` writes the other form, such as a decompressed tar, to another file.
        """
        return not self.is_file and not is_stored_as_is(self.obj.url)

    @property
    def done_bytes(self) -> int:
        """Number of bytes in finished parts."""
        return self.size_of_all(self.done)

    def size_of_all(self, parts: Collection[int]) -> int:
        """Return the size of some parts together, in bytes."""
        size_bytes = len(parts) * self.part_bytes
        last = self.count - 1  # this part may be shorter than the others
        if last in parts:
            size_bytes -= self.part_bytes - self.size_of(last)
        return size_bytes

    def missing(self) -> list[int]:
        """Return the numbers of the parts still to be fetched, in order."""
        return [index for index in range(self.count) if index not in self.done]

    def parts(self, first: int, count: int) -> Parts:
        """Return consecutive parts as the transport worker that writes them needs them.

        Args:
            first: number of the first part.
            count: number of parts; at the end of the object, the last may be shorter.
        """
        start = first * self.part_bytes
        size_bytes = min(count * self.part_bytes, self.obj.size_bytes - start)
        return Parts(str(self.path), str(self.journal_path), self.part_bytes, start, size_bytes)

    def is_there(self) -> bool:
        """Return whether the file still exists, and is the one that was opened. Blocks."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_ino == self.inode
        return False

    def size_of(self, index: int) -> int:
        """Return the number of bytes of a part."""
        return min(self.part_bytes, self.obj.size_bytes - index * self.part_bytes)

    def record(self, sums: PartSums) -> None:
        """Mark a part as finished."""
        self.done[sums.index] = sums.crc32c

    def sound(self, parts: Sequence[int]) -> set[int]:
        """Return those unchecked parts that match their checksums in the journal.

        Nothing is changed; see `settle`. Blocks. Raises DiskError.

        Args:
            parts: numbers of unchecked parts.
        """
        with disk_errors(self.path), open(self.path, "rb", buffering=0) as file:
            fd = file.fileno()
            return {part for part in parts if self._crc_in_memory(fd, part) == self.unchecked[part]}

    def settle(self, parts: Sequence[int], sound: Set[int]) -> None:
        """Record the result of `sound`: parts are not unchecked any more.

        Sound parts count as finished. The others count as missing, and have to be fetched again.
        """
        for index in parts:
            crc = self.unchecked.pop(index)
            if index in sound:
                self.done[index] = crc

    def damaged(self, crcs: Mapping[int, int]) -> list[int]:
        """Return the numbers of the parts whose bytes on the disk do not have the right CRC32C.

        The parts are read from the disk itself, as the page cache in memory may hold other bytes.
        `done` is not changed. Blocks. Raises DiskError.

        Args:
            crcs: the CRC32C that each part should have, by number.
        """
        with disk_errors(self.path):
            return [part for part, crc in crcs.items() if self._crc_on_disk(part) != crc]

    def punch(self, index: int) -> None:
        """Free the space of a part that was removed from `done`. Blocks. Raises DiskError.

        The journal records the removal before the space is freed; after a crash in between, it
        would otherwise claim a part that is a hole. Nothing is done if the files no longer exist.
        """
        with disk_errors(self.path), contextlib.suppress(FileNotFoundError):
            with open(self.journal_path, "r+b", buffering=0) as journal:
                journal.seek(0, os.SEEK_END)
                journal.write(RECORD.pack(index | _DROPPED, 0))
            with open(self.path, "r+b") as file:
                punch_hole(file.fileno(), index * self.part_bytes, self.size_of(index))
            # The disk may be full just now. Then the journal is shortened when the next part goes.
            with contextlib.suppress(OSError):
                self._shorten_journal()

    def _shorten_journal(self) -> None:
        """Replace the journal by one without outdated records, if most of its records are outdated.

        A part that comes and goes again and again would otherwise add two records each time.
        """
        parts_count = len(self.done) + len(self.unchecked)
        records_bytes = _MAX_RECORDS_PER_PART * parts_count * RECORD.size
        if self.journal_path.stat().st_size <= _SHORT_JOURNAL_BYTES + records_bytes:
            return
        title, _, records = self.journal_path.read_bytes().partition(b"\n")
        current = b"".join(RECORD.pack(*record) for record in self._listed(records).items())
        # A transport worker may append a record while the journal is replaced, and the record is
        # lost then. Its part counts as finished until the journal is read again, at a restart or
        # when the whole object is fetched; then it is fetched again.
        shortened = self.journal_path.with_suffix(_SHORTENED)
        shortened.write_bytes(title + b"\n" + current)
        fsync_path(shortened)
        shortened.replace(self.journal_path)

    def fill(self, source: Path) -> None:
        """Copy the missing parts from another file, which has the whole object. Blocks.

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
        """Return the facts about the complete file; the number of samples in them is None."""
        return self._facts_of_file(self.obj.size_bytes, self.crcs())

    def write_inflated(self, dst: Path, reserve: Callable[[int], None]) -> Facts | None:
        """Write the complete file to `dst` in the form in which it is cached. Blocks.

        The form is the decompressed shard, or another copy that the shard's format prescribes.
        Return the facts about the copy. Return None, and write nothing, if the shard is cached as
        it was fetched.

        Args:
            reserve: called with a number of bytes before they are written, to reserve their space.

        Raises ShardError, DiskError; see `inflate`.
        """
        url = self.obj.url
        codec = codec_of(url)
        if codec is not None:
            size_bytes, crcs = inflate(self.path, dst, codec, self.part_bytes, reserve, url)
            return self._facts_of_file(size_bytes, crcs)

        with disk_errors(dst):
            copy = format_of(url).stored_copy(self.path, url)
            if copy is None:
                return None
            with copy:
                size_bytes, crcs = write_parts(copy, dst, self.part_bytes, reserve)
        return self._facts_of_file(size_bytes, crcs)

    def _create(self, granted_inodes: Collection[int]) -> None:
        """Create the file, without parts, and its journal.

        Args:
            granted_inodes: inode numbers that the file must not get, as in `open`.
        """
        unlink_quietly(self.path, self.journal_path)
        with contextlib.ExitStack() as files:
            file = files.enter_context(open(self.path, "wb"))
            while os.fstat(file.fileno()).st_ino in granted_inodes:
                # The unlinked file stays open until a file with another number is made: its number
                # is taken until then, so the next file cannot get it, too.
                unlink_quietly(self.path)
                file = files.enter_context(open(self.path, "wb"))
            file.truncate(self.obj.size_bytes)
        self.journal_path.write_bytes(self._title() + b"\n")

    def _allocate(self) -> None:
        """Allocate the space of all parts before they arrive, so that it cannot run out later."""
        # A filesystem in memory would allocate by writing zeros, and each byte would be written
        # twice.
        is_memory = mount_of(self.path).is_memory
        if is_memory or not self.obj.size_bytes:
            return
        with open(self.path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, self.obj.size_bytes)

    def _resume(self) -> bool:
        """Read the finished parts of an interrupted download from its journal.

        These parts are unchecked. Return False if there is no interrupted download of this object.
        """
        if not self.obj.ranges:  # the origin can only send the object from its first byte
            return False
        if size_or_zero(self.path) != self.obj.size_bytes:
            return False
        try:
            title, _, records = self.journal_path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return False
        part_bytes = self._part_bytes_of(title)
        if part_bytes is None:
            return False
        self.part_bytes = part_bytes

        # The last record may be incomplete, if the daemon was killed while it was written.
        whole_bytes = len(records) - len(records) % RECORD.size
        os.truncate(self.journal_path, len(title) + 1 + whole_bytes)
        self.unchecked = self._listed(records)
        return True

    def _listed(self, records: bytes) -> dict[int, int]:
        """Return the CRC32C of the parts that a journal lists, by number.

        Args:
            records: the journal's records; an incomplete one at the end is ignored.
        """
        listed: dict[int, int] = {}
        whole_bytes = len(records) - len(records) % RECORD.size
        for index, crc in RECORD.iter_unpack(records[:whole_bytes]):
            if index & _DROPPED:
                listed.pop(index ^ _DROPPED, None)
            elif index < self.count:
                listed[index] = crc
        return listed

    def _part_bytes_of(self, title: bytes) -> int | None:
        """Return the size of the parts that a journal's title states.

        Return None if the title is damaged, or identifies another object.
        """
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
        """Return the journal's first line, without the line break."""
        title = {
            "url": stored_url(self.obj.url),
            "version": self.obj.version,
            "size_bytes": self.obj.size_bytes,
            "part_bytes": self.part_bytes,
        }
        return json.dumps(title).encode()

    def _free_unfinished(self) -> None:
        """Free the space of parts that the journal does not list.

        The daemon was killed while such parts were written.
        """
        with open(self.path, "r+b") as file:
            # Start of the gap before the next finished part, or before the end of the file.
            start = 0
            for index in (*sorted(self.unchecked), self.count):
                end = min(index * self.part_bytes, self.obj.size_bytes)
                if end > start:
                    punch_hole(file.fileno(), start, end - start)
                start = end + self.part_bytes

    def _facts_of_file(self, size_bytes: int, crcs: list[int]) -> Facts:
        """Return the facts about a cached file of this object.

        Args:
            size_bytes: size of the file.
            crcs: CRC32C of each of its parts, in order.
        """
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
        """Return the CRC32C of a part of an open file, read through the page cache."""
        data = os.pread(fd, self.part_bytes, index * self.part_bytes)
        return crc32c(data, 0)

    def _crc_on_disk(self, index: int) -> int:
        """Return the CRC32C of a part, read from the disk rather than from the page cache."""
        start = index * self.part_bytes
        return crc32c(read_direct(self.path, start, self.size_of(index)), 0)


def _positive_number(value: object) -> int | None:
    """Return a value of JSON if it is a positive integer, None otherwise."""
    if type(value) is int and value > 0:
        return value
    return None


def _object_in(journal: Path) -> RemoteObject | None:
    """Return the object that a journal's title identifies, with its url, version and size only.

    Return None if the title is damaged. Raises OSError.
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


def discard(layout: Layout, key: str, *, keep_parts: bool = False) -> None:
    """Remove all unpublished files of a key. Blocks.

    Args:
        keep_parts: True to keep the finished parts and their journal, so that a later fetch can
            resume the download. Only an inflated tar and a new sidecar are then removed.
    """
    suffixes = [TAR, SIDECAR]
    if not keep_parts:
        suffixes += [PART, JOURNAL]
    # An error is ignored: a failing disk has already been reported by the write that failed, and
    # the next start of the daemon removes the files.
    with contextlib.suppress(OSError):
        unlink_quietly(*(layout.in_progress(key, suffix) for suffix in suffixes))
