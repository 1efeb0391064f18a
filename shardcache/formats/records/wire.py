"""Protobuf's wire format: the fields of a message, read without a protobuf library.

A varint is a number of 7 bits per byte, low bits first; the top bit of a byte says that more
follow. The wire type of a field says how its content ends.

Format: protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator

# The wire types.
VARINT = 0
FIXED_64 = 1
LENGTH = 2
FIXED_32 = 5
MAX_VARINT_BYTES = 10

_SIZES = {FIXED_64: 8, FIXED_32: 4}


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, start and end of the content, of each field of a message.

    Raises ValueError for a field that reaches beyond the end of the message, or has an unknown wire
    type.

    Args:
        data: bytes that contain the message.
        start: offset of the message in `data`; the offsets of the fields are in `data`, too.
        end: offset of the message's end.
    """
    at = start
    while at < end:
        tag, first = varint(data, at, end)  # the field's number, and its wire type in three bits
        kind = tag & 7
        if kind == VARINT:
            _, at = varint(data, first, end)
        elif kind == LENGTH:
            length, first = varint(data, first, end)
            at = first + length
        elif kind in _SIZES:
            at = first + _SIZES[kind]
        else:
            raise ValueError(f"a field has the wire type {kind}")
        if at > end:
            raise ValueError("a field reaches beyond its message")
        yield tag >> 3, kind, first, at


def varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the varint at an offset, and the offset of its end.

    Raises ValueError if the varint does not end before `end`, or is longer than 64 bits need.
    """
    # Most numbers are tags and lengths of a single byte.
    if at < end and data[at] < 0x80:
        return data[at], at + 1
    number = 0
    for place in range(min(MAX_VARINT_BYTES, end - at)):
        byte = data[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, at + place + 1
    raise ValueError("a number has no end")
