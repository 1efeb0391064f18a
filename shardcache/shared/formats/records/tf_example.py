"""The features of a `tf.train.Example`, read from its protobuf encoding without TensorFlow.

    message Example   { Features features = 1; }
    message Features  { map<string, Feature> feature = 1; }
    message Feature   { oneof kind { BytesList = 1; FloatList = 2; Int64List = 3; } }
    message BytesList { repeated bytes value = 1; }
    message FloatList { repeated float value = 1; }       // packed in one field, or a field each
    message Int64List { repeated int64 value = 1; }       // likewise

A map is stored as one message per entry, with the key in field 1 and the value in field 2.

`tfrecord` indexes records by `features_of`. A column of its index has the messages of the features
with one name, which readers decode by `value`. A message with any other field is refused: it is not
an Example, but perhaps a SequenceExample.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.formats.records.wire import (
    FIXED_32,
    LENGTH,
    MAX_VARINT_BYTES,
    VARINT,
    fields,
    read_varint,
)

# Kinds of lists: the numbers of their fields in a Feature.
_BYTES_LIST = 1
_FLOAT_LIST = 2
_INT64_LIST = 3
_NO_LIST = 0

# Numbers of the fields in an entry of a map.
_MAP_KEY = 1
_MAP_VALUE = 2

_FLOAT = struct.Struct("<f")


class Feature(NamedTuple):
    """Place of a feature in a record. Offsets are in bytes from the record's beginning.

    Attributes:
        name: name of the feature in UTF-8.
        start: offset of the feature's message.
        end: offset of the byte after the message.
        only_string: if the feature is a list of one byte string, the start and end of that string;
            None for any other feature.
    """

    name: bytes
    start: int
    end: int
    only_string: tuple[int, int] | None


def features_of(record: bytes) -> Iterator[Feature]:
    """Yield the features of an Example. Raises ValueError if the record is not an Example."""
    for number, wire_type, start, end in fields(record, 0, len(record)):
        _expect(number == 1 and wire_type == LENGTH)
        # The field is a Features message, whose fields are the entries of a map.
        for entry_number, entry_type, entry_start, entry_end in fields(record, start, end):
            _expect(entry_number == 1 and entry_type == LENGTH)
            yield _feature(record, entry_start, entry_end)


def _feature(record: bytes, start: int, end: int) -> Feature:
    """Return the feature in an entry of the map, which lies between two offsets of the record."""
    # A field that the entry lacks counts as empty.
    name = b""
    message_start = end
    message_end = end
    for number, wire_type, field_start, field_end in fields(record, start, end):
        _expect(number in (_MAP_KEY, _MAP_VALUE) and wire_type == LENGTH)
        if number == _MAP_KEY:
            name = record[field_start:field_end]
        else:
            message_start = field_start
            message_end = field_end
    name.decode()  # UnicodeDecodeError is a ValueError
    only_string = _only_string(record, message_start, message_end)
    return Feature(name, message_start, message_end, only_string)


def _only_string(record: bytes, start: int, end: int) -> tuple[int, int] | None:
    """Return `Feature.only_string` for the message between two offsets of a record."""
    list_kind, list_start, list_end = _list_in(record, start, end)
    if list_kind != _BYTES_LIST:
        return None
    strings = _strings(record, list_start, list_end)
    first = next(strings, None)
    # All strings are checked, but not kept, since a record may have a hundred million of them.
    other_count = sum(1 for _ in strings)
    return None if other_count else first


def value(message: bytes | memoryview) -> Any:
    """Return the value of a feature, given its message.

    A list of one value becomes that value (bytes, float or int), as with TensorFlow's
    `FixedLenFeature([])`. Other lists become a list of bytes, or a numpy array of float32 or int64,
    as with `FixedLenFeature([n])`. A feature without a list becomes None.

    Raises ValueError for a message that is not a Feature, ConfigError if numpy is needed and
    missing.
    """
    data = bytes(message)
    list_kind, start, end = _list_in(data, 0, len(data))
    if list_kind == _BYTES_LIST:
        spans = _strings(data, start, end)
        strings = [data[string_start:string_end] for string_start, string_end in spans]
        return strings[0] if len(strings) == 1 else strings
    if list_kind == _FLOAT_LIST:
        return _floats(data, start, end)
    if list_kind == _INT64_LIST:
        return _integers(data, start, end)
    return None


def _list_in(data: bytes, start: int, end: int) -> tuple[int, int, int]:
    """Return (kind, start, end) of the list in a Feature; the kind is `_NO_LIST` without one."""
    list_kind = _NO_LIST
    list_start = start
    list_end = end
    for number, wire_type, field_start, field_end in fields(data, start, end):
        _expect(number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST) and wire_type == LENGTH)
        _expect(list_kind == _NO_LIST)  # a Feature has one list at most
        list_kind = number
        list_start = field_start
        list_end = field_end
    return list_kind, list_start, list_end


def _strings(data: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each string of a BytesList."""
    for number, wire_type, string_start, string_end in fields(data, start, end):
        _expect(number == 1 and wire_type == LENGTH)
        yield string_start, string_end


def _packed(data: bytes, start: int, end: int, single_wire_type: int) -> bytes:
    """Return the encoded numbers of a list, end to end.

    A list has its numbers packed in one field, or each in a field of its own.

    Args:
        data: bytes that contain the list.
        start: offset of the list in `data`.
        end: offset of the list's end.
        single_wire_type: wire type of a field with a single number.
    """
    pieces = []
    for number, wire_type, field_start, field_end in fields(data, start, end):
        _expect(number == 1 and wire_type in (LENGTH, single_wire_type))
        pieces.append(data[field_start:field_end])
    return b"".join(pieces)


def _floats(data: bytes, start: int, end: int) -> Any:
    """Return a FloatList as an array of float32, or as a float if it has only one."""
    packed = _packed(data, start, end, FIXED_32)
    _expect(len(packed) % _FLOAT.size == 0)
    if len(packed) == _FLOAT.size:
        return _FLOAT.unpack(packed)[0]
    return _numpy().frombuffer(packed, dtype="<f4").copy()


def _integers(data: bytes, start: int, end: int) -> Any:
    """Return an Int64List as an array of int64, or as an int if it has only one."""
    packed = _packed(data, start, end, VARINT)
    # A list as short as this may have only one number, for which numpy is not needed.
    if 0 < len(packed) <= MAX_VARINT_BYTES:
        number, number_end = read_varint(packed, 0, len(packed))
        if number_end == len(packed):
            return _signed(number)
    return _varints(packed)


def _varints(packed: bytes) -> Any:
    """Return consecutive varints as an array of int64.

    Each byte of a varint has 7 bits of the number, the lowest bits in the first byte. The eighth
    bit is set in all bytes but the last.
    """
    numpy = _numpy()
    data = numpy.frombuffer(packed, dtype=numpy.uint8)
    if not len(data):
        return numpy.zeros(0, dtype=numpy.int64)
    # By varint, the indexes of its last byte and its first byte in `data`.
    last_bytes = numpy.flatnonzero(data < 0x80)
    _expect(len(last_bytes) > 0 and int(last_bytes[-1]) == len(data) - 1)  # no varint is cut
    first_bytes = numpy.concatenate(([0], last_bytes[:-1] + 1))
    lengths = last_bytes - first_bytes + 1
    _expect(int(lengths.max()) <= MAX_VARINT_BYTES)
    # By byte of `data`, its index in its varint, and the bits that it adds to the number.
    places = numpy.arange(len(data)) - numpy.repeat(first_bytes, lengths)
    bits = (data & 0x7F).astype(numpy.uint64) << (7 * places).astype(numpy.uint64)
    numbers = numpy.add.reduceat(bits, first_bytes)  # the sum over the bytes of each varint
    return numbers.view(numpy.int64)


def _signed(number: int) -> int:
    """Return the int64 whose bits are the low 64 bits of a number."""
    number &= (1 << 64) - 1
    if number >> 63:
        return number - (1 << 64)
    return number


def _expect(is_met: bool) -> None:
    """Raise ValueError unless a condition on a message is met."""
    if not is_met:
        raise ValueError("not a tf.train.Example")


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as exn:
        raise ConfigError(
            "features of several numbers need the Python package numpy", remedy="pip install numpy"
        ) from exn
    return numpy
