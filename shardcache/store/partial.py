"""A shard being fetched: a file that is filled part by part, and a journal of its finished parts.

A fetch opens a `Partial` for the version of the shard that it downloads. Each part is recorded in
the journal (`parts_journal`) after its bytes are written. So after a crash of the daemon, the
journal never lists more than the file holds. After a power loss it may list more: the parts of an
earlier daemon are unchecked until their bytes are compared with the checksums in the journal.

A partial for a whole shard has all of its space allocated. A sparse partial holds single parts of
an object, for readers of ranges: each part takes space when it arrives, and can be dropped again.

A shard that is cached in another form than the fetched one is inflated once it is complete: the
other form, such as the decompressed tar, is written to another file.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
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
    inode_or_zero,
    size_or_zero,
    unlink_quietly,
)
from shardcache.store.disk.holes import holes, is_hole, punch_hole
from shardcache.store.disk.mounts import mount_of
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR, Layout
from shardcache.store.keys import file_key, place_of, shard_key, stored_url
from shardcache.store.parts_journal import (
    JournalTitle,
    append_dropped,
    create_journal,
    read_title,
    resume_journal,
    shorten_if_outdated,
)
from shardcache.store.shard import Facts
from shardcache.transport.between.checksums import crc32c
from shardcache.transport.between.parts import Parts, PartSums

_CRC_OF_NOTHING = 0  # the CRC32C before a part's first byte
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
        done: the finished parts: their CRC32C, by number.
        unchecked: the parts that an earlier daemon has finished, and that are not checked yet:
            their CRC32C in the journal, by number.
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
                leave the parts of an earlier daemon unchecked until `settle` is called. Space that
                an interrupted download has allocated for other parts is freed.
            granted_inodes: inode numbers of files at this path that were granted to readers. A
                reader opens the file later, by path and inode number. So a new file must not get
                one of these numbers, which filesystems reuse. Nor is a file with such a number
                resumed as a sparse partial: its parts could be dropped while readers use them.

        Raises DiskError.
        """
        key = shard_key(place_of(obj.url, is_file=is_file), obj.version)
        path = layout.unpublished(key, PART)
        journal = layout.unpublished(key, JOURNAL)
        partial = cls(obj, part_bytes, path, journal, key, is_file=is_file)
        with disk_errors(path):
            may_resume = not is_sparse or inode_or_zero(path) not in granted_inodes
            resumed = may_resume and partial._resume()
            if not resumed:
                partial._create(granted_inodes)
            if is_sparse:
                if resumed:
                    partial._drop_unwritten()
                    partial._free_unfinished()
            else:
                parts = list(partial.unchecked)
                partial.settle(parts, sound=partial.sound_parts(parts))
                partial._allocate()
            path.chmod(_MODE)
            partial.inode = path.stat().st_ino
        return partial

    @classmethod
    def recover(cls, layout: Layout, key: str) -> Self | None:
        """Return the sparse partial of a key that an earlier daemon has left. Blocks.

        Its parts are unchecked. Its object has only what the journal states: url, version and size.

        Returns None if there are no finished parts, if the files cannot be read, or if the partial
        is that of a whole shard.
        """
        path = layout.unpublished(key, PART)
        journal = layout.unpublished(key, JOURNAL)
        try:
            title = read_title(journal)
            if title is None:
                return None
            # A sparse partial has an object's own bytes, and is cached under their key.
            if key != file_key(title.url, title.version):
                return None
            # A partial for a whole object may have the same key, but has all of its space
            # allocated. So has a sparse partial with all parts, which is not recovered either.
            has_holes = allocated_or_zero(path) < title.size_bytes
            if not has_holes:
                return None
            obj = RemoteObject(title.url, title.version, title.size_bytes)
            partial = cls(obj, title.part_bytes, path, journal, key, is_file=True)
            if not partial._take_over(title):
                return None
            partial._drop_unwritten()
            if not partial.unchecked:
                return None
            partial._free_unfinished()
            partial.inode = path.stat().st_ino
        except OSError:
            return None
        return partial

    @property
    def part_count(self) -> int:
        """Number of parts; 0 for an empty object."""
        return -(-self.obj.size_bytes // self.part_bytes)  # rounded up

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

    def size_of(self, index: int) -> int:
        """Return the number of bytes of a part."""
        return min(self.part_bytes, self.obj.size_bytes - index * self.part_bytes)

    def size_of_all(self, parts: Collection[int]) -> int:
        """Return the size of some parts together, in bytes."""
        size_bytes = len(parts) * self.part_bytes
        last = self.part_count - 1
        if last in parts:  # it may be shorter than the others
            size_bytes -= self.part_bytes - self.size_of(last)
        return size_bytes

    def missing(self) -> list[int]:
        """Return the numbers of the parts still to be fetched, in order."""
        return [index for index in range(self.part_count) if index not in self.done]

    def parts(self, first: int, count: int) -> Parts:
        """Describe consecutive parts to the transport worker that will write them.

        Args:
            first: number of the first part.
            count: number of parts.
        """
        start = first * self.part_bytes
        size_bytes = min(count * self.part_bytes, self.obj.size_bytes - start)
        return Parts(str(self.path), str(self.journal_path), self.part_bytes, start, size_bytes)

    def has_file(self) -> bool:
        """Return whether the file still exists, and is the one that was opened. Blocks."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_ino == self.inode
        return False

    def mark_finished(self, sums: PartSums) -> None:
        """Count a part as finished, after the transport worker has recorded it in the journal."""
        self.done[sums.index] = sums.crc32c

    def sound_parts(self, parts: Sequence[int]) -> set[int]:
        """Return those of the parts that match their checksums in the journal.

        Nothing is changed: the caller passes the result to `settle`. Blocks. Raises DiskError.

        Args:
            parts: numbers of unchecked parts.
        """
        with disk_errors(self.path), open(self.path, "rb", buffering=0) as file:
            return self._sound_parts(file.fileno(), parts)

    def settle(self, parts: Sequence[int], sound: Set[int]) -> None:
        """Remove parts from the unchecked ones, after they were checked.

        Args:
            parts: numbers of the parts that were checked.
            sound: those of them that are sound. They count as finished; the others count as
                missing, and have to be fetched again.
        """
        for index in parts:
            crc = self.unchecked.pop(index)
            if index in sound:
                self.done[index] = crc

    def damaged_parts(self, crcs: Mapping[int, int]) -> list[int]:
        """Return the numbers of the parts whose bytes on the disk do not have the right CRC32C.

        The parts are read from the disk itself, as the page cache in memory may hold other bytes.
        `done` is not changed. Blocks. Raises DiskError.

        Args:
            crcs: the CRC32C that each part should have, by number.
        """
        with disk_errors(self.path):
            return [part for part, crc in crcs.items() if self._crc_on_disk(part) != crc]

    def free_part(self, index: int) -> None:
        """Free the space of a part that was removed from `done`. Blocks. Raises DiskError.

        The journal records the removal before the space is freed; after a crash in between, it
        would otherwise list a part that is a hole. Nothing is done if the files no longer exist.
        """
        with disk_errors(self.path), contextlib.suppress(FileNotFoundError):
            append_dropped(self.journal_path, index)
            with open(self.path, "r+b") as file:
                # The hole of the last part ends beyond the end of the file: its last block is only
                # partly in the file, and would stay allocated otherwise.
                punch_hole(file.fileno(), index * self.part_bytes, self.part_bytes)
            kept_count = len(self.done) + len(self.unchecked)
            # If this fails, as on a full disk, the next call tries again.
            with contextlib.suppress(OSError):
                shorten_if_outdated(self.journal_path, self.part_count, kept_count)

    def fill(self, source: Path) -> None:
        """Copy the missing parts from a file that has the whole object. Blocks.

        The journal does not record them: after a crash, they are copied again. Raises DiskError.
        """
        with disk_errors(self.path), source.open("rb") as whole, self.path.open("r+b") as file:
            for index in self.missing():
                start = index * self.part_bytes
                data = os.pread(whole.fileno(), self.size_of(index), start)
                os.pwrite(file.fileno(), data, start)
                self.done[index] = crc32c(data, _CRC_OF_NOTHING)

    def crcs(self) -> list[int]:
        """Return the CRC32C of every part, in order; all parts must be finished."""
        return [self.done[index] for index in range(self.part_count)]

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
        """Create the file and its journal, both without parts.

        Args:
            granted_inodes: inode numbers that the file must not get, as in `open`.
        """
        unlink_quietly(self.path, self.journal_path)
        with contextlib.ExitStack() as files:
            file = files.enter_context(open(self.path, "wb"))
            while os.fstat(file.fileno()).st_ino in granted_inodes:
                # The file is unlinked, but stays open until the loop has ended. So its number is
                # still taken, and the next file gets another one.
                unlink_quietly(self.path)
                file = files.enter_context(open(self.path, "wb"))
            file.truncate(self.obj.size_bytes)
        create_journal(self.journal_path, JournalTitle.of(self.obj, self.part_bytes))

    def _allocate(self) -> None:
        """Allocate the space of all parts before they arrive, so that it cannot run out later."""
        if not self.obj.size_bytes:
            return
        # A filesystem in memory allocates by writing zeros: each byte would be written twice.
        if mount_of(self.path).is_memory:
            return
        with open(self.path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, self.obj.size_bytes)

    def _resume(self) -> bool:
        """Take over the finished parts of an interrupted download, which are unchecked then.

        Returns False if there is no interrupted download of this object.
        """
        if not self.obj.has_ranges:  # the origin can only send the object from its first byte
            return False
        try:
            title = read_title(self.journal_path)
        except FileNotFoundError:
            return False
        return title is not None and self._take_over(title)

    def _take_over(self, title: JournalTitle) -> bool:
        """As `_resume`, given the title of the journal."""
        if size_or_zero(self.path) != self.obj.size_bytes:
            return False
        # The interrupted download may have had parts of another size, which is then kept.
        if title != JournalTitle.of(self.obj, title.part_bytes):
            return False
        self.part_bytes = title.part_bytes
        self.unchecked = resume_journal(self.journal_path, self.part_count)
        return True

    def _drop_unwritten(self) -> None:
        """Drop the unchecked parts that are not whole on the disk, and record that in the journal.

        After a power loss, the journal may list parts whose bytes had not all reached the disk. The
        others are holes, which take no space, so these parts must not count as kept bytes. A sound
        part with holes stays, as some filesystems store zeros as holes.
        """
        with open(self.path, "rb", buffering=0) as file:
            fd = file.fileno()
            with_holes: set[int] = set()  # a part may have several
            for start, end in holes(fd, self.obj.size_bytes):
                parts = range(start // self.part_bytes, -(-end // self.part_bytes))
                with_holes.update(self.unchecked.keys() & parts)
            unwritten = with_holes - self._sound_parts(fd, with_holes)
        for part in sorted(unwritten):
            append_dropped(self.journal_path, part)
            del self.unchecked[part]

    def _free_unfinished(self) -> None:
        """Free the space of parts that the journal does not list.

        They were being written when the daemon was killed, or were allocated for a whole shard.
        """
        with open(self.path, "r+b") as file:
            # Each gap reaches from the end of a finished part to the start of the next.
            gap_start = 0
            part_starts = [index * self.part_bytes for index in sorted(self.unchecked)]
            # The last gap ends beyond the end of the file, for the reason given in `free_part`.
            for gap_end in (*part_starts, self.part_count * self.part_bytes):
                if gap_end > gap_start:
                    punch_hole(file.fileno(), gap_start, gap_end - gap_start)
                gap_start = gap_end + self.part_bytes  # the end of the part at `gap_end`

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

    def _span_of(self, index: int) -> tuple[int, int]:
        """Return the start of a part in the file, and its end."""
        start = index * self.part_bytes
        return start, start + self.size_of(index)

    def _sound_parts(self, fd: int, parts: Iterable[int]) -> set[int]:
        """As `sound_parts`, given the open file."""
        return {part for part in parts if self._crc_in_memory(fd, part) == self.unchecked[part]}

    def _crc_in_memory(self, fd: int, index: int) -> int:
        """Return the CRC32C of a part of an open file, read through the page cache."""
        # After a power loss, many gigabytes may be holes. To read them all would delay the start.
        if is_hole(fd, *self._span_of(index)):
            return _crc_of_zeros(self.size_of(index))
        data = os.pread(fd, self.part_bytes, index * self.part_bytes)
        return crc32c(data, _CRC_OF_NOTHING)

    def _crc_on_disk(self, index: int) -> int:
        """Return the CRC32C of a part, read from the disk rather than from the page cache."""
        start = index * self.part_bytes
        data = read_direct(self.path, start, self.size_of(index))
        return crc32c(data, _CRC_OF_NOTHING)


@functools.lru_cache(maxsize=8)  # parts of one size, and last parts
def _crc_of_zeros(size_bytes: int) -> int:
    return crc32c(bytes(size_bytes), _CRC_OF_NOTHING)


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
        unlink_quietly(*(layout.unpublished(key, suffix) for suffix in suffixes))
