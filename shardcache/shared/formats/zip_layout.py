"""Layout of the records of a zip: their fields, signatures and flags.

A zip has, in this order,

- each member's bytes, after a local header that repeats the member's name,
- the central directory, called the directory here, which has an entry for each member, and
- the end record, which says where the directory is. A comment may follow it.

The fields of an entry and of the end record hold numbers of 16 or 32 bits. Zip64 is the extension
for larger numbers: a field then has a placeholder, and the number is in a zip64 field of the entry
or in a zip64 record before the end record. A locator between these two records says where the zip64
record is.

Format: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3 to 4.5.
"""

import struct
from typing import NamedTuple

# Bits of an entry's flags.
IS_ENCRYPTED = 1 << 0
IS_UTF_8 = 1 << 11

UNIX = 3
"""A `RawEntry.system`, for which `RawEntry.attributes` has the mode of a file."""

# The records, one by one. A zip may be split into several parts, which the format calls disks.
#
# The fields of the end record: signature, number of this disk, disk of the directory, entries on
# this disk, all entries, size of the directory, its offset, size of the comment.
END_RECORD = struct.Struct("<4s4H2LH")
END_SIGNATURE = b"PK\5\6"
MAX_COMMENT_BYTES = 0xFFFF
# The fields of the zip64 locator: signature, disk of the zip64 record, its offset, number of disks.
LOCATOR = struct.Struct("<4sLQL")
LOCATOR_SIGNATURE = b"PK\6\7"
# The fields of the zip64 record: signature, size of the record's rest, two versions, number of this
# disk, disk of the directory, entries on this disk, all entries, size of the directory, its offset.
ZIP64_RECORD = struct.Struct("<4sQ2H2L4Q")
ZIP64_SIGNATURE = b"PK\6\6"
# The fields of a local header: signature, version, flags, method, time, date, CRC-32, the two
# sizes of the content, sizes of the name and of the extra fields.
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
LOCAL_SIGNATURE = b"PK\3\4"

# An extra field of an entry begins with its kind and its size.
_EXTRA = struct.Struct("<2H")
_ZIP_64 = 1  # kind of the zip64 field
# Placeholders for a number that is in the zip64 field or record.
PLACEHOLDER_16 = 0xFFFF
PLACEHOLDER_32 = 0xFFFFFFFF


class RawEntry(NamedTuple):
    """The fixed fields of an entry of the directory as they are stored, before the name.

    Attributes:
        system: number of the system that made the member.
        stored_bytes: size of the compressed content.
        size_bytes: size of the content, uncompressed.
        attributes: for members made on Unix, the file's mode in the upper 16 bits.
        header_start: offset of the local header in the zip.
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
    header_start: int


ENTRY = struct.Struct("<4s2B5H3L5H2L")
"""Packs and unpacks the fields of a `RawEntry`."""
ENTRY_SIGNATURE = b"PK\1\2"


def zip64_field(extra: bytes) -> list[int]:
    """Return the numbers in an entry's zip64 field; empty if it has no zip64 field.

    Each number replaces one placeholder in the entry, in this order: the size of the content, the
    size of the compressed content, and the offset of the local header.

    Args:
        extra: all extra fields of the entry.
    """
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, size_bytes = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _ZIP_64:
            data = extra[at : at + size_bytes]
            # The numbers have 8 bytes each. The number of a disk, of 4 bytes, may follow them.
            rest_bytes = len(data) % 8
            numbers_end = len(data) - rest_bytes
            return [number for (number,) in struct.iter_unpack("<Q", data[:numbers_end])]
        at += size_bytes
    return []
