"""Parser of 512-byte tar headers: USTAR, old GNU and PAX, interpreted like the standard library's tarfile.

Formats: POSIX.1-2008, pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar manual, "Basic Tar Format".
Names stay bytes throughout. All functions raise ValueError on an invalid field.
"""

from __future__ import annotations

import re
import struct
from zlib import adler32

BLOCK_BYTES = 512
ZERO_BLOCK = bytes(BLOCK_BYTES)

DIRECTORY = b"5"
GNU_SPARSE = b"S"
GNU_LONG = {b"L": b"path", b"K": b"linkpath"}  # equivalent PAX records
PAX_GLOBAL = b"g"
EXTENSIONS = frozenset({b"x", b"X", PAX_GLOBAL, *GNU_LONG})  # describe the members that follow
REGULAR = frozenset({b"0", b"\0", b"7", GNU_SPARSE})
# Links, devices, directories and fifos: no data follows, whatever the size field.
DATALESS = frozenset({b"1", b"2", b"3", b"4", DIRECTORY, b"6"})

_WITHOUT_PREFIX = frozenset({GNU_SPARSE, *GNU_LONG})  # use that field for other data
_FIELDS = struct.Struct("100s 24x 12s 12x 8s 1s 188x 155s 12x")  # name, size, checksum, type, prefix
_PAX_RECORD = re.compile(rb"([0-9]{1,9}) ([^=\n]+)=")


Header = tuple[bytes, int, bytes]
"""A header block's name, size in bytes of the data that follows (none if the kind is DATALESS), and kind."""


def parse_header(block: bytes) -> Header:
    """Parse a header block of 512 bytes, after verifying its checksum."""
    name, size, checksum, kind, prefix = _FIELDS.unpack(block)
    # The checksum is the sum of all bytes, with its own field taken as blanks. Adler-32's low half is that sum plus
    # one, modulo 65521, and about 20 times as fast as sum().
    adler = adler32(block) & 0xFFFF
    expected = parse_number(checksum) + sum(checksum) - 8 * 0x20 + 1
    if adler != expected % 65521 and adler != (expected + 256 * _high_bytes(block)) % 65521:
        raise ValueError("its checksum does not match")
    size_bytes = parse_number(size)
    if size_bytes < 0:
        raise ValueError(f"it gives a size of {size_bytes} bytes")
    name = name.partition(b"\0")[0]
    if kind == b"\0" and name.endswith(b"/"):
        kind = DIRECTORY  # as written by tars from before the directory type existed
    if prefix[0] and kind not in _WITHOUT_PREFIX:
        name = prefix.partition(b"\0")[0] + b"/" + name
    return name, size_bytes, kind


def parse_number(field: bytes) -> int:
    """Parse octal digits up to the first NUL, or GNU's base-256 if the first byte marks it."""
    if field[0] < 0x80:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    return int.from_bytes(field, "big", signed=True)


def parse_pax(payload: bytes) -> dict[bytes, bytes]:
    """Parse records of the form `length key=value\\n`, where `length` counts the whole record."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(payload):
        match = _PAX_RECORD.match(payload, at)
        if match is None:
            raise ValueError(f"its record at byte {at} has no length and keyword")
        end = at + int(match[1])
        if not match.end() < end <= len(payload) or payload[end - 1] != 0x0A:
            raise ValueError(f"its record at byte {at} has a wrong length")
        records[match[2]] = payload[match.end() : end - 1]
        at = end
    if b"path" in records:
        records[b"path"] = records[b"path"].rstrip(b"/")
    return records


def padded(size_bytes: int) -> int:
    """Round a size up to whole blocks."""
    return (size_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


def _high_bytes(block: bytes) -> int:
    """Count the bytes that are negative as signed characters, which some old tars summed."""
    return sum(byte >= 0x80 for byte in block[:148] + block[156:])
