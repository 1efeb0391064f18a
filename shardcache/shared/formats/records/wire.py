"""Protobuf's wire format: the fields of a message, read without a protobuf library.

A field is a tag, which has the field's number and wire type, and its content. The wire type says
where the content ends. A varint is a number of 7 bits per byte, low bits first; the top bit of a
byte says that more follow.

Format: protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator

# The wire types. The content of a field of the type `LENGTH` comes after its length.
VARINT = 0
FIXED_64 = 1
LENGTH = 2
FIXED_32 = 5

MAX_VARINT_BYTES = 10  # for a number of 64 bits

_FIXED_SIZES = {FIXED_64: 8, FIXED_32: 4}


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, start, end) for each field of a message.

    Start and end are those of the field's content. Raises ValueError for a field that reaches
    beyond the end of the message, or has an unknown wire type.

    Args:
        data: bytes that contain the message.
        start: offset of the message in `data`; the offsets of the fields are in `data`, too.
        end: offset of the message's end.
    """
    at = start
    while at < end:
        tag, content_start = read_varint(data, at, end)
        number = tag >> 3
        wire_type = tag & 7
        if wire_type == VARINT:
            _, at = read_varint(data, content_start, end)
        elif wire_type == LENGTH:
            length, content_start = read_varint(data, content_start, end)
            at = content_start + length
        elif wire_type in _FIXED_SIZES:
            at = content_start + _FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"a field has the wire type {wire_type}")
        if at > end:
            raise ValueError("a field reaches beyond its message")
        yield number, wire_type, content_start, at


def read_varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the varint at an offset, and the offset of its end.

    Raises ValueError if the varint does not end before `end`, or is longer than 64 bits need.
    """
    # Most numbers are tags and lengths of a single byte.
    if at < end and data[at] < 0x80:
        return data[at], at + 1
    number = 0
    for index in range(min(MAX_VARINT_BYTES, end - at)):
        byte = data[at + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, at + index + 1
    raise ValueError("a number has no end")
