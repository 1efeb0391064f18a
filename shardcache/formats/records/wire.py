"""Protobuf's wire format: the fields of a message.

Format: protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator

VARINT = 0
FIXED_64 = 1
LENGTH = 2
FIXED_32 = 5
MAX_VARINT_BYTES = 10

_SIZES = {FIXED_64: 8, FIXED_32: 4}


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, and start and end of the content, of each field of a message.

    Raises ValueError for a field that reaches beyond the end, or has an unknown wire type.
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
    """Return the number at an offset, and the offset of its end.

    Raises ValueError if it does not end before `end`, or is longer than 64 bits need.
    """
    number = 0
    for place in range(min(MAX_VARINT_BYTES, end - at)):
        byte = data[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, at + place + 1
    raise ValueError("a number has no end")
