"""Members of a zip by its central directory, with every number checked.

`zips` calls `members_of` and `is_stored`. A zip ends with a central directory, called the directory
here, which has an entry for each member; a local header precedes each member's bytes. Zip64 is the
extension for numbers that are too large for these: the number is then in a zip64 field of the entry
or, for the whole directory, in a zip64 record. Names are decoded as by the standard library's
zipfile.

Format: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3 to 4.5.
"""

import os
import stat
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from shardcache.errors import CorruptShardError, ShardError, UnsupportedShardError

STORED = 0
DEFLATED = 8

_METHODS = {
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

_IS_ENCRYPTED = 1 << 0
_IS_UTF_8 = 1 << 11
# The number of the system that made a member, for Unix: the member's attributes have a file's mode.
_UNIX = 3

# The fields of the record at the end: signature, number of this disk, disk of the directory,
# entries on this disk, all entries, size of the directory, its offset, size of the comment.
_END = struct.Struct("<4s4H2LH")
_END_SIGNATURE = b"PK\5\6"
_MAX_COMMENT_BYTES = 0xFFFF
# The fields of the zip64 locator: signature, disk of the zip64 record, its offset, number of disks.
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_SIGNATURE = b"PK\6\7"
# The fields of the zip64 record: signature, size of the rest, two versions, two disks, entries on
# this disk, all entries, size of the directory, its offset.
_END_64 = struct.Struct("<4sQ2H2L4Q")
_END_64_SIGNATURE = b"PK\6\6"
# The fields of an entry are those of `_RawEntry`.
_ENTRY = struct.Struct("<4s2B5H3L5H2L")
_ENTRY_SIGNATURE = b"PK\1\2"
# The fields of a local header: signature, version, flags, method, time, date, CRC-32, the two
# sizes of the content, sizes of the name and of the extra fields.
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_SIGNATURE = b"PK\3\4"

# An extra field of an entry begins with its kind and its size.
_EXTRA = struct.Struct("<2H")
_ZIP_64 = 1  # kind of the zip64 field
# These stand in place of a number that is in the zip64 field or record.
_IN_ZIP_64_SHORT = 0xFFFF
_IN_ZIP_64 = 0xFFFFFFFF

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
        """The name for messages."""
        return _shown(self.name)


class _RawEntry(NamedTuple):
    """The fixed fields of an entry of the directory as they are stored, before the name.

    Attributes:
        system: number of the system that made the member.
        stored_bytes: size of the compressed content.
        size_bytes: size of the content, uncompressed.
        attributes: for members made on Unix, the file's mode in the upper half.
        header: offset of the local header in the zip.
    """

    signature: bytes
    version: int
    system: int
    version_needed: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    stored_bytes: int
    size_bytes: int
    name_bytes: int
    extra_bytes: int
    comment_bytes: int
    disk: int
    internal_attributes: int
    attributes: int
    header: int


class _Entry(NamedTuple):
    """A checked entry of the directory: a member whose local header has not been read yet.

    Attributes:
        name: name of the member, in UTF-8.
        raw_name: the name as it is stored, which the local header repeats.
        method: number of the compression method.
        crc: CRC-32 of the content.
        header: offset of the local header in the file.
        stored_bytes: size of the compressed content.
        size_bytes: size of the content, uncompressed.
    """

    name: bytes
    raw_name: bytes
    method: int
    crc: int
    header: int
    stored_bytes: int
    size_bytes: int


class _Directory(NamedTuple):
    """The directory of a zip.

    Attributes:
        start: offset of the directory in the file.
        data: the directory's bytes.
        entries: number of entries that it states.
        base: offset of the zip in its file, more than 0 if other data precedes the zip.
    """

    start: int
    data: bytes
    entries: int
    base: int


class ZipMembers:
    """The files in a zip, by number, in the order of its directory.

    A zip may have millions of members. For each, 20 bytes are kept, and a `ZipMember` is made of
    its entry in the directory whenever it is needed.

    Attributes:
        starts: u64 for each member; offset in the file of the stored bytes.
        ends: u64 for each member; offset in the file of the byte after the stored bytes.
    """

    def __init__(self, reader: "_Zip", directory: _Directory) -> None:
        self.starts = array("Q")
        self.ends = array("Q")
        self._places = array("I")  # of each member: offset in the directory of its entry
        self._reader = reader
        self._directory = directory

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> ZipMember:
        entry = self._reader.entry_at(self._directory, self._places[number])
        start = self.starts[number]
        end = self.ends[number]
        return ZipMember(entry.name, entry.method, entry.crc, start, end, entry.size_bytes)

    def append(self, place: int, start: int, end: int) -> None:
        """Add a member.

        Args:
            place: offset of its entry in the directory.
            start: offset in the file of its stored bytes.
            end: offset in the file of the byte after its stored bytes.
        """
        self._places.append(place)
        self.starts.append(start)
        self.ends.append(end)


def numbers_sorted_by(values: "array[int]") -> "array[int]":
    """Return the numbers of members, u32, in the ascending order of each member's value."""
    numbers = array("I", range(len(values)))
    # Most zips are in order already. Sorting takes 80 bytes of memory for each member.
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
    size_bytes = os.fstat(file.fileno()).st_size
    return _Zip(file, size_bytes, url).members()


def is_stored(file: BinaryIO, url: str) -> bool:
    """Return True if no file in a zip is compressed. Blocks.

    Only the directory is read, up to the first compressed file. Raises what `members_of` raises.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    return all(method == STORED for method in _Zip(file, size_bytes, url).methods())


class _Zip:
    """One zip, read by its descriptor at any offset."""

    def __init__(self, file: BinaryIO, size_bytes: int, url: str) -> None:
        self._fd = file.fileno()
        self._size_bytes = size_bytes
        self._url = url

    def methods(self) -> Iterator[int]:
        """Yield the method of compression of each file."""
        directory = self._directory()
        for place in self._places(directory):
            yield self.entry_at(directory, place).method

    def members(self) -> ZipMembers:
        """Return the files in the zip, after their local headers have been checked."""
        directory = self._directory()
        members = ZipMembers(self, directory)
        for place in self._places(directory):
            entry = self.entry_at(directory, place)
            start = self._start_of(entry)
            end = start + entry.stored_bytes
            if end > directory.start:
                raise self._corrupt(f"the member {_shown(entry.name)!r} reaches beyond the members")
            members.append(place, start, end)

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
        """Find the directory by the record at the end of the zip, which a comment may follow."""
        tail_start = max(0, self._size_bytes - _END.size - _MAX_COMMENT_BYTES)
        tail = self._read(tail_start, self._size_bytes - tail_start)
        at = tail.rfind(_END_SIGNATURE)
        while at >= 0:
            if at + _END.size <= len(tail):
                fields = _END.unpack_from(tail, at)
                comment_bytes = fields[-1]
                if at + _END.size + comment_bytes == len(tail):
                    return self._directory_by(tail_start + at, fields)
            at = tail.rfind(_END_SIGNATURE, 0, at)
        raise CorruptShardError(
            "the file does not end with a zip's directory: it is truncated, or not a zip",
            url=self._url,
        )

    def _directory_by(self, end: int, fields: tuple[int, ...]) -> _Directory:
        """Return the directory.

        It lies before the record at the end or, if there is a zip64 record, before that.

        Args:
            end: offset of the record at the end.
            fields: fields of that record.
        """
        _, disk, directory_disk, _, entries, size_bytes, start, _ = fields
        directory_end = end
        locator = self._read(max(0, end - _LOCATOR.size), _LOCATOR.size)
        if locator.startswith(_LOCATOR_SIGNATURE):
            record_start = end - _LOCATOR.size - _END_64.size
            record = self._read(max(0, record_start), _END_64.size)
            # Some writers add a zip64 record although all numbers fit without one.
            if record_start >= 0 and record.startswith(_END_64_SIGNATURE):
                directory_end = record_start
                fields = _END_64.unpack(record)
                _, _, _, _, disk, directory_disk, _, entries, size_bytes, start = fields
            elif entries == _IN_ZIP_64_SHORT or _IN_ZIP_64 in (size_bytes, start):
                raise self._corrupt("its zip64 record is not where it should be")
        if disk or directory_disk:
            raise UnsupportedShardError(
                "the zip is one of several parts",
                url=self._url,
                remedy="join the parts: zip -s 0 parts.zip --out whole.zip",
            )
        # `start` is an offset in the zip, which may come after other data in the file.
        base = directory_end - size_bytes - start
        if base < 0:
            raise self._corrupt("its directory is larger than the file")
        if size_bytes > _MAX_DIRECTORY_BYTES or entries > _MAX_MEMBERS:
            raise UnsupportedShardError(
                f"the zip has {entries:,} members, whose names and places have {size_bytes:,} "
                "bytes, which would take too much memory",
                url=self._url,
                remedy=f"write zips of at most {_MAX_MEMBERS:,} members",
            )
        data = self._read(base + start, size_bytes)
        return _Directory(base + start, data, entries, base)

    def _places(self, directory: _Directory) -> Iterator[int]:
        """Yield the offset of each file's entry, without those of folders and symbolic links."""
        data = directory.data
        at = 0
        count = 0
        while at < len(data):
            if at + _ENTRY.size > len(data) or not data.startswith(_ENTRY_SIGNATURE, at):
                raise self._corrupt(f"its directory's entry {count} is none")
            if count == directory.entries:
                raise self._corrupt(f"its directory has more than the {count} entries it states")
            raw = _RawEntry(*_ENTRY.unpack_from(data, at))
            name_start = at + _ENTRY.size
            name_end = name_start + raw.name_bytes
            end = name_end + raw.extra_bytes + raw.comment_bytes
            if end > len(data):
                raise self._corrupt(f"its directory ends inside of entry {count}")
            count += 1
            if _is_file(raw, data[name_start:name_end]):
                yield at
            at = end
        if count != directory.entries:
            raise self._corrupt(f"its directory has {count} entries instead of {directory.entries}")

    def entry_at(self, directory: _Directory, place: int) -> _Entry:
        """Return the entry at a place in the directory, checked."""
        raw = _RawEntry(*_ENTRY.unpack_from(directory.data, place))
        name_start = place + _ENTRY.size
        extra_start = name_start + raw.name_bytes
        raw_name = directory.data[name_start:extra_start]
        extra = directory.data[extra_start : extra_start + raw.extra_bytes]
        method = raw.method
        name = raw_name
        if not raw.flags & _IS_UTF_8:
            name = raw_name.decode("cp437").encode()
        shown = _shown(name)
        if raw.flags & _IS_ENCRYPTED:
            raise UnsupportedShardError(
                f"the member {shown!r} of the zip is encrypted",
                url=self._url,
                remedy="write the zip again without a password",
            )
        if method not in (STORED, DEFLATED):
            method_name = _METHODS.get(method, f"method {method}")
            raise UnsupportedShardError(
                f"the member {shown!r} of the zip is compressed by {method_name}",
                url=self._url,
                remedy="write the zip again with deflate, or stored: zip -0",
            )
        if b"\0" in name:
            raise self._corrupt(f"the name {shown!r} has a NUL")
        # The zip64 field has these numbers in this order, but only those too large for the entry.
        numbers = (raw.size_bytes, raw.stored_bytes, raw.header)
        if _IN_ZIP_64 in numbers:
            numbers = self._long_numbers(numbers, extra, shown)
        size_bytes, stored_bytes, header = numbers
        if method == STORED and stored_bytes != size_bytes:
            raise self._corrupt(f"the member {shown!r} is stored in another size than its own")
        header += directory.base
        return _Entry(name, raw_name, method, raw.crc, header, stored_bytes, size_bytes)

    def _long_numbers(
        self, numbers: tuple[int, int, int], extra: bytes, shown: str
    ) -> tuple[int, int, int]:
        """Return an entry's numbers, with each placeholder replaced from the zip64 field.

        Args:
            numbers: the numbers as they are in the entry.
            extra: the extra fields of the entry.
            shown: name of the member, for errors.
        """
        longs = iter(_longs_in(extra))
        long_numbers: list[int] = []
        for number in numbers:
            long = next(longs, None) if number == _IN_ZIP_64 else number
            if long is None:
                raise self._corrupt(f"the entry of {shown!r} lacks a zip64 number")
            long_numbers.append(long)
        size_bytes, stored_bytes, header = long_numbers
        return size_bytes, stored_bytes, header

    # Local headers

    def _start_of(self, entry: _Entry) -> int:
        """Return the offset in the file of an entry's stored bytes, which follow a local header."""
        shown = _shown(entry.name)
        local = self._read(entry.header, _LOCAL.size + len(entry.raw_name))
        if not local.startswith(_LOCAL_SIGNATURE) or len(local) < _LOCAL.size:
            raise self._corrupt(f"the member {shown!r} is not at byte {entry.header}")
        fields = _LOCAL.unpack_from(local)
        name_bytes: int
        extra_bytes: int
        name_bytes, extra_bytes = fields[-2:]
        # Both names are compared by bytes and by length: the header's name may be longer than the
        # bytes that were read.
        if local[_LOCAL.size :] != entry.raw_name or name_bytes != len(entry.raw_name):
            raise self._corrupt(
                f"the member at byte {entry.header} has another name than {shown!r}"
            )
        return entry.header + _LOCAL.size + name_bytes + extra_bytes

    def _read(self, at: int, size_bytes: int) -> bytes:
        """Return bytes of the file from an offset on; fewer, or none, beyond the file's end."""
        if at >= self._size_bytes:
            return b""
        return os.pread(self._fd, size_bytes, at)

    def _corrupt(self, what: str) -> ShardError:
        return CorruptShardError(f"the zip is damaged: {what}", url=self._url)


def _shown(name: bytes) -> str:
    """Return a member's name for messages."""
    return name.decode(errors="replace")[:_SHOWN_CHARS]


def _is_file(entry: _RawEntry, name: bytes) -> bool:
    """Return True for an entry of a regular file, False for a folder or a symbolic link."""
    if name.endswith(b"/"):
        return False
    mode = entry.attributes >> 16
    is_link = entry.system == _UNIX and stat.S_ISLNK(mode)
    return not is_link


def _longs_in(extra: bytes) -> list[int]:
    """Return the numbers in the zip64 field among an entry's extra fields; empty without one."""
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, size_bytes = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _ZIP_64:
            data = extra[at : at + size_bytes]
            whole = data[: len(data) // 8 * 8]
            return [number for (number,) in struct.iter_unpack("<Q", whole)]
        at += size_bytes
    return []
