"""The members of a zip, read from its directory, with every number checked.

A zip has each member's bytes after a local header, then the directory, which has an entry for each
member, and then the end record, which says where the directory is. `zip_layout` describes them.
"""

import os
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from shardcache.shared.exceptions import CorruptShardError, ShardError, UnsupportedShardError
from shardcache.shared.formats.zip_layout import (
    END_RECORD,
    END_SIGNATURE,
    ENTRY,
    ENTRY_SIGNATURE,
    IS_ENCRYPTED,
    IS_UTF_8,
    LOCAL_HEADER,
    LOCAL_SIGNATURE,
    LOCATOR,
    LOCATOR_SIGNATURE,
    MAX_COMMENT_BYTES,
    PLACEHOLDER_16,
    PLACEHOLDER_32,
    UNIX,
    ZIP64_RECORD,
    ZIP64_SIGNATURE,
    RawEntry,
    zip64_field,
)

# Methods of compression that are supported, and the names of others, for errors.
STORED = 0
DEFLATED = 8
_OTHER_METHODS = {
    1: "shrink",
    6: "implode",
    9: "deflate64",
    12: "bzip2",
    14: "lzma",
    93: "zstd",
    95: "xz",
    98: "PPMd",
    99: "AES encryption",
}

# The directory is read into memory as a whole, in the daemon's own process if members are
# compressed. Grouping the members into samples takes some 100 bytes per member with a short name.
_MAX_MEMBERS = 2_000_000
_MAX_DIRECTORY_BYTES = 256 * 1024 * 1024
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A regular file in a zip.

    Attributes:
        name: name of the member, in UTF-8.
        method: number of the compression method.
        crc: CRC-32 of the content.
        start: offset in the file of the stored bytes.
        end: offset in the file of the byte after the stored bytes.
        size_bytes: size of the content, uncompressed.
    """

    name: bytes
    method: int
    crc: int
    start: int
    end: int
    size_bytes: int

    @property
    def shown_name(self) -> str:
        """The name as errors show it."""
        return _shown(self.name)


class _Entry(NamedTuple):
    """A checked entry of the directory: a member whose local header has not been read yet.

    Attributes:
        name: name of the member, in UTF-8.
        raw_name: the name as it is stored, which the local header repeats.
        method: number of the compression method.
        crc: CRC-32 of the content.
        header_start: offset of the local header in the file.
        stored_bytes: size of the compressed content.
        size_bytes: size of the content, uncompressed.
    """

    name: bytes
    raw_name: bytes
    method: int
    crc: int
    header_start: int
    stored_bytes: int
    size_bytes: int


class _EndRecord(NamedTuple):
    """The fields of the end record, or of the zip64 record, that are about the directory.

    Attributes:
        record_start: offset of the record in the file. The directory ends there.
        disk: number of the part of the zip that the record is in; 0 for a zip of one part.
        directory_disk: number of the part in which the directory begins.
        entries: number of entries of the directory.
        size_bytes: size of the directory.
        start: offset of the directory in the zip.
    """

    record_start: int
    disk: int
    directory_disk: int
    entries: int
    size_bytes: int
    start: int


class _Directory(NamedTuple):
    """The directory of a zip.

    Attributes:
        start: offset of the directory in the file.
        data: the directory's bytes.
        entries: number of entries according to the end record.
        zip_start: offset of the zip in its file, more than 0 if other data precedes the zip.
    """

    start: int
    data: bytes
    entries: int
    zip_start: int


class ZipMembers:
    """The files in a zip, by number, in the order of its directory.

    A zip may have millions of members. Only 20 bytes are kept for each, besides the directory: a
    `ZipMember` is made of the member's entry whenever it is needed.

    Attributes:
        starts: u64 for each member; offset in the file of the stored bytes.
        ends: u64 for each member; offset in the file of the byte after the stored bytes.
    """

    def __init__(self, reader: "_Zip", directory: _Directory) -> None:
        self.starts = array("Q")
        self.ends = array("Q")
        self._entry_starts = array("I")  # for each member, offset in the directory of its entry
        self._reader = reader
        self._directory = directory

    def __len__(self) -> int:
        return len(self._entry_starts)

    def __getitem__(self, number: int) -> ZipMember:
        entry = self._reader.entry_at(self._directory, self._entry_starts[number])
        start = self.starts[number]
        end = self.ends[number]
        return ZipMember(entry.name, entry.method, entry.crc, start, end, entry.size_bytes)

    def append(self, entry_start: int, start: int, end: int) -> None:
        """Add a member.

        Args:
            entry_start: offset of its entry in the directory.
            start: offset in the file of its stored bytes.
            end: offset in the file of the byte after its stored bytes.
        """
        self._entry_starts.append(entry_start)
        self.starts.append(start)
        self.ends.append(end)


def numbers_sorted_by(values: "array[int]") -> "array[int]":
    """Return the numbers of all members, u32, sorted by a value of each member.

    Args:
        values: the value of each member, by the member's number.
    """
    numbers = array("I", range(len(values)))
    # Most zips are in order already, and sorting takes 80 bytes of memory for each member.
    if any(value > following for value, following in pairwise(values)):
        numbers = array("I", sorted(numbers, key=values.__getitem__))
    return numbers


def members_of(file: BinaryIO, url: str) -> ZipMembers:
    """Return the files in a zip, in the order of its directory. Blocks.

    Folders and symbolic links are left out.

    Raises OSError; CorruptShardError for a damaged zip, or a file that is not a zip;
    UnsupportedShardError for a zip with members that are encrypted, or compressed by an unusual
    method.
    """
    return _Zip(file, url).members()


def is_all_stored(file: BinaryIO, url: str) -> bool:
    """Return True if no file in a zip is compressed. Blocks.

    Only the directory is read, up to the first compressed file. Raises what `members_of` raises.
    """
    return all(method == STORED for method in _Zip(file, url).methods())


class _Zip:
    """One zip, whose file is read at any offset."""

    def __init__(self, file: BinaryIO, url: str) -> None:
        self._fd = file.fileno()
        self._size_bytes = os.fstat(self._fd).st_size
        self._url = url

    def methods(self) -> Iterator[int]:
        """Yield the method of compression of each file."""
        directory = self._directory()
        for entry_start in self._file_entry_starts(directory):
            yield self.entry_at(directory, entry_start).method

    def members(self) -> ZipMembers:
        """Return the files in the zip, after their local headers have been checked."""
        directory = self._directory()
        members = ZipMembers(self, directory)
        for entry_start in self._file_entry_starts(directory):
            entry = self.entry_at(directory, entry_start)
            start = self._content_start(entry)
            end = start + entry.stored_bytes
            if end > directory.start:
                raise self._corrupt(f"the member {_shown(entry.name)!r} overlaps the directory")
            members.append(entry_start, start, end)

        # Members must not share bytes: a small zip could then hold terabytes.
        previous_end = 0
        for number in numbers_sorted_by(members.starts):
            if members.starts[number] < previous_end:
                shown = members[number].shown_name
                raise self._corrupt(f"the member {shown!r} lies in another one")
            previous_end = members.ends[number]
        return members

    # The directory

    def _directory(self) -> _Directory:
        """Return the directory, after the numbers in the records at the end have been checked."""
        end_record = self._end_record()
        # The zip64 record has the same fields, with larger numbers.
        record = self._zip64_record(end_record) or end_record
        if record.disk or record.directory_disk:
            raise UnsupportedShardError(
                "the zip is one of several parts",
                url=self._url,
                remedy="join the parts: zip -s 0 parts.zip --out whole.zip",
            )
        # `record.start` is an offset in the zip, which may come after other data in the file.
        directory_start = record.record_start - record.size_bytes
        zip_start = directory_start - record.start
        if zip_start < 0:
            raise self._corrupt("its directory is larger than the file")
        if record.size_bytes > _MAX_DIRECTORY_BYTES or record.entries > _MAX_MEMBERS:
            raise UnsupportedShardError(
                f"the zip has {record.entries:,} members, whose names and places have "
                f"{record.size_bytes:,} bytes, which would take too much memory",
                url=self._url,
                remedy=f"write zips of at most {_MAX_MEMBERS:,} members",
            )
        data = self._read(directory_start, record.size_bytes)
        return _Directory(directory_start, data, record.entries, zip_start)

    def _end_record(self) -> _EndRecord:
        """Return the end record: the last one after which just its comment follows."""
        tail_start = max(0, self._size_bytes - END_RECORD.size - MAX_COMMENT_BYTES)
        tail = self._read(tail_start, self._size_bytes - tail_start)
        at = tail.rfind(END_SIGNATURE)
        while at >= 0:
            if at + END_RECORD.size <= len(tail):
                fields = END_RECORD.unpack_from(tail, at)
                _, disk, directory_disk, _, entries, size_bytes, start, comment_bytes = fields
                if at + END_RECORD.size + comment_bytes == len(tail):
                    record_start = tail_start + at
                    return _EndRecord(
                        record_start, disk, directory_disk, entries, size_bytes, start
                    )
            at = tail.rfind(END_SIGNATURE, 0, at)
        raise CorruptShardError(
            "the file does not end with a zip's directory: it is truncated, or not a zip",
            url=self._url,
        )

    def _zip64_record(self, end_record: _EndRecord) -> _EndRecord | None:
        """Return the zip64 record before the end record; None if there is none.

        The offset in the locator is not used, since it is wrong if other data precedes the zip. The
        zip64 record is expected right before the locator.
        """
        locator_start = max(0, end_record.record_start - LOCATOR.size)
        if not self._read(locator_start, LOCATOR.size).startswith(LOCATOR_SIGNATURE):
            return None
        record_start = locator_start - ZIP64_RECORD.size
        record = self._read(max(0, record_start), ZIP64_RECORD.size)
        if record_start >= 0 and record.startswith(ZIP64_SIGNATURE):
            fields = ZIP64_RECORD.unpack(record)
            _, _, _, _, disk, directory_disk, _, entries, size_bytes, start = fields
            return _EndRecord(record_start, disk, directory_disk, entries, size_bytes, start)
        # Without a placeholder, the record is not needed: some writers use zip64 for any zip.
        size_and_start = (end_record.size_bytes, end_record.start)
        if end_record.entries == PLACEHOLDER_16 or PLACEHOLDER_32 in size_and_start:
            raise self._corrupt("its zip64 record is not where it should be")
        return None

    def _file_entry_starts(self, directory: _Directory) -> Iterator[int]:
        """Yield the offset in the directory of each entry of a regular file."""
        data = directory.data
        at = 0
        count = 0
        while at < len(data):
            if at + ENTRY.size > len(data) or not data.startswith(ENTRY_SIGNATURE, at):
                raise self._corrupt(f"the entry {count} of its directory is malformed")
            if count == directory.entries:
                raise self._corrupt(f"its directory has more than the {count} entries it states")
            raw = RawEntry(*ENTRY.unpack_from(data, at))
            name_start = at + ENTRY.size
            name_end = name_start + raw.name_bytes
            end = name_end + raw.extra_bytes + raw.comment_bytes
            if end > len(data):
                raise self._corrupt(f"its directory ends inside entry {count}")
            count += 1
            if _is_file(raw, data[name_start:name_end]):
                yield at
            at = end
        if count != directory.entries:
            raise self._corrupt(f"its directory has {count} entries instead of {directory.entries}")

    def entry_at(self, directory: _Directory, entry_start: int) -> _Entry:
        """Return the entry at an offset in the directory, after it has been checked."""
        raw = RawEntry(*ENTRY.unpack_from(directory.data, entry_start))
        name_start = entry_start + ENTRY.size
        extra_start = name_start + raw.name_bytes
        raw_name = directory.data[name_start:extra_start]
        extra = directory.data[extra_start : extra_start + raw.extra_bytes]
        name = raw_name
        if not raw.flags & IS_UTF_8:
            name = raw_name.decode("cp437").encode()  # as zipfile does
        shown = _shown(name)
        self._check_readable(raw, shown)
        if b"\0" in name:
            raise self._corrupt(f"the name {shown!r} has a NUL")
        numbers = (raw.size_bytes, raw.stored_bytes, raw.header_start)
        if PLACEHOLDER_32 in numbers:
            numbers = self._zip64_numbers(numbers, extra, shown)
        size_bytes, stored_bytes, header_start = numbers
        if raw.method == STORED and stored_bytes != size_bytes:
            raise self._corrupt(f"the member {shown!r} is stored in another size than its own")
        header_start += directory.zip_start
        return _Entry(
            name=name,
            raw_name=raw_name,
            method=raw.method,
            crc=raw.crc,
            header_start=header_start,
            stored_bytes=stored_bytes,
            size_bytes=size_bytes,
        )

    def _check_readable(self, raw: RawEntry, shown: str) -> None:
        """Raise UnsupportedShardError for a member that is encrypted, or of an unusual method.

        Args:
            raw: the entry of the member.
            shown: name of the member, for errors.
        """
        if raw.flags & IS_ENCRYPTED:
            raise UnsupportedShardError(
                f"the member {shown!r} of the zip is encrypted",
                url=self._url,
                remedy="write the zip again without a password",
            )
        if raw.method not in (STORED, DEFLATED):
            method_name = _OTHER_METHODS.get(raw.method, f"method {raw.method}")
            raise UnsupportedShardError(
                f"the member {shown!r} of the zip is compressed by {method_name}",
                url=self._url,
                remedy="write the zip again with deflate, or stored: zip -0",
            )

    def _zip64_numbers(
        self, numbers: tuple[int, int, int], extra: bytes, shown: str
    ) -> tuple[int, int, int]:
        """Return an entry's numbers, with each placeholder replaced from the zip64 field.

        Args:
            numbers: the size, the stored size and the header's offset, as they are in the entry.
            extra: the extra fields of the entry.
            shown: name of the member, for errors.
        """
        # The zip64 field has the numbers in the same order, but only those with a placeholder.
        replacements = iter(zip64_field(extra))
        replaced: list[int] = []
        for number in numbers:
            if number != PLACEHOLDER_32:
                replaced.append(number)
                continue
            replacement = next(replacements, None)
            if replacement is None:
                raise self._corrupt(f"the entry of {shown!r} lacks a zip64 number")
            replaced.append(replacement)
        size_bytes, stored_bytes, header_start = replaced
        return size_bytes, stored_bytes, header_start

    # Local headers

    def _content_start(self, entry: _Entry) -> int:
        """Return the offset in the file of a member's stored bytes, which follow a local header."""
        shown = _shown(entry.name)
        local = self._read(entry.header_start, LOCAL_HEADER.size + len(entry.raw_name))
        if not local.startswith(LOCAL_SIGNATURE) or len(local) < LOCAL_HEADER.size:
            raise self._corrupt(f"the member {shown!r} is not at byte {entry.header_start}")
        fields = LOCAL_HEADER.unpack_from(local)
        name_bytes: int
        extra_bytes: int
        name_bytes, extra_bytes = fields[-2:]
        # The lengths are compared, too: the header's name may be longer than what was read of it.
        if local[LOCAL_HEADER.size :] != entry.raw_name or name_bytes != len(entry.raw_name):
            raise self._corrupt(
                f"the member at byte {entry.header_start} has another name than {shown!r}"
            )
        return entry.header_start + LOCAL_HEADER.size + name_bytes + extra_bytes

    def _read(self, at: int, size_bytes: int) -> bytes:
        """Return bytes of the file from an offset on; fewer, or none, beyond the file's end."""
        if at >= self._size_bytes:
            return b""
        return os.pread(self._fd, size_bytes, at)

    def _corrupt(self, problem: str) -> ShardError:
        return CorruptShardError(f"the zip is damaged: {problem}", url=self._url)


def _shown(name: bytes) -> str:
    """Return a member's name for errors, cut to a maximum length."""
    return name.decode(errors="replace")[:_SHOWN_CHARS]


def _is_file(entry: RawEntry, name: bytes) -> bool:
    """Return True for an entry of a regular file, False for a folder or a symbolic link."""
    if name.endswith(b"/"):
        return False
    mode = entry.attributes >> 16
    is_link = entry.system == UNIX and stat.S_ISLNK(mode)
    return not is_link
