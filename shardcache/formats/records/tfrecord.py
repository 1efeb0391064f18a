"""TFRecord files: each record is a sample, and the features of its Example are the columns.

A record is its length (u64), a checksum of the length, its bytes, and a checksum of these, in
little-endian order; a checksum is a masked CRC-32C. A file whose first record is no
`tf.train.Example` has one column, `record`, with the bytes of each. A feature `__key__` is the
sample's key, and a feature `__url__` is left out.
"""

import struct
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from shardcache.errors import (
    CorruptShardError,
    ShardError,
    TruncatedShardError,
    UnsupportedShardError,
)
from shardcache.formats.cells import BAD, KEY, MAX_COLUMNS, RESERVED, CellTable
from shardcache.formats.format import (
    Crc32c,
    Decoder,
    Format,
    IndexOptions,
    with_compressions,
)
from shardcache.formats.records import tf_example
from shardcache.formats.records.tf_example import Feature, features_of
from shardcache.tarindex.tables import Fault, Samples

RECORD = "record"
"""Name of the only column of a file without Examples."""

MAX_RECORD_BYTES = 1024 * 1024 * 1024

_BYTES = ""  # encoding of members that are their own values
_FEATURE = "feature"
_BUFFER_BYTES = 1024 * 1024
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<L")
_HEAD_BYTES = _LENGTH.size + _CRC.size
_MASK_DELTA = 0xA282EAD8
_GZIP_MAGIC = b"\x1f\x8b"


def index(path: Path, url: str, crc32c: Crc32c) -> Samples:
    """Return the samples of the TFRecord file at `path`. Blocks.

    A record that is not an Example, in a file of Examples, is recorded as a fault.

    Raises OSError; TruncatedShardError, CorruptShardError; UnsupportedShardError for too many
    records or values, or too long a record.
    """
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        return samples_of(_records(file, url, crc32c), url)


def samples_of(records: Iterator[tuple[int, bytes]], url: str) -> Samples:
    """Return the samples of records, given with their offsets.

    Raises UnsupportedShardError for too many records or values, and what `records` raises.
    """
    return _RecordIndexer(url).indexed(records)


class TFRecordFormat(Format):
    """TFRecord files."""

    name = "TFRecord"
    suffixes = with_compressions(".tfrecord", ".tfrecords")
    is_often_a_file = True
    is_numbered_behind = True  # as TensorFlow Datasets does

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """As `Format.index`."""
        assert options.crc32c is not None
        return index(path, url, options.crc32c)

    def decoder(self, encoding: str) -> Decoder | None:
        """As `Format.decoder`."""
        if encoding == _FEATURE:
            return tf_example.value
        return super().decoder(encoding)


def _records(file: BinaryIO, url: str, crc32c: Crc32c) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each record, both checksums compared."""
    at = 0
    while head := file.read(_HEAD_BYTES):
        if head.startswith(_GZIP_MAGIC) and at == 0:
            raise CorruptShardError(
                "this is gzip data, not a plain TFRecord file",
                url=url,
                remedy="rename the file to end in .tfrecord.gz",
            )
        if len(head) < _HEAD_BYTES:
            raise _truncated(at, url)
        length_bytes = head[: _LENGTH.size]
        length_check = head[_LENGTH.size :]
        _check(length_bytes, length_check, f"the length at byte {at}", url, crc32c)
        (length,) = _LENGTH.unpack(length_bytes)
        if length > MAX_RECORD_BYTES:
            raise UnsupportedShardError(
                f"the record at byte {at} has more than {MAX_RECORD_BYTES >> 30} GiB",
                url=url,
                remedy="write smaller records",
            )
        record = file.read(length)
        check = file.read(_CRC.size)
        if len(record) < length or len(check) < _CRC.size:
            raise _truncated(at, url)
        _check(record, check, f"the record at byte {at}", url, crc32c)
        yield at + _HEAD_BYTES, record
        at += _HEAD_BYTES + length + _CRC.size


def _check(data: bytes, check: bytes, what: str, url: str, crc32c: Crc32c) -> None:
    """Raise CorruptShardError unless a checksum is that of data: its CRC-32C, masked."""
    crc = crc32c(data, 0)
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    masked = (rotated + _MASK_DELTA) & 0xFFFFFFFF
    if check != _CRC.pack(masked):
        raise CorruptShardError(
            f"{what} does not match its checksum, or the file is not a TFRecord file", url=url
        )


def _truncated(at: int, url: str) -> ShardError:
    return TruncatedShardError(f"the file ends inside the record at byte {at}", url=url)


class _RecordIndexer:
    """Indexes records one by one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._table = CellTable(url)
        self._columns: dict[bytes, int] = {}  # by the name of the feature
        self._reserved: set[int] = set()  # columns of features such as `__key__`
        # A member is first the whole message of its feature. If each feature of a column is a list
        # of one string of bytes, `_narrow` replaces the messages by these strings: here are their
        # places, member by member. A column with any other feature stays one of messages.
        self._content_starts = array("Q")
        self._content_ends = array("Q")
        self._message_columns: set[int] = set()

    def indexed(self, records: Iterator[tuple[int, bytes]]) -> Samples:
        """Return the samples of records, given with their offsets."""
        has_examples = True
        for number, (at, record) in enumerate(records):
            try:
                features = self._features(at, record) if has_examples else []
            except ValueError:
                if number:
                    self._table.add_fault(Fault.EXAMPLE, RECORD)
                    continue
                has_examples = False
            if has_examples:
                self._add(at, record, features)
            else:
                self._table.add({self._table.column(RECORD): (at, at + len(record))})
        if has_examples:
            self._narrow()
        samples = self._table.samples
        samples.encodings = [_BYTES] * len(samples.extensions)
        for column in self._message_columns:
            samples.encodings[column] = _FEATURE
        return samples

    def _features(self, at: int, record: bytes) -> list[Feature]:
        """Return the features of an Example. Raises ValueError, UnsupportedShardError."""
        # Ones without a name or content take two bytes of the record, and a hundred of memory.
        features = list(islice(features_of(record), MAX_COLUMNS + 1))
        if len(features) > MAX_COLUMNS:
            raise UnsupportedShardError(
                f"the record at byte {at} has more than {MAX_COLUMNS:,} features",
                url=self._url,
                remedy="write numbers of one kind as one feature, a list of them",
            )
        return features

    def _add(self, at: int, record: bytes, features: list[Feature]) -> None:
        """Add the sample of a record at an offset."""
        cells: dict[int, tuple[int, int]] = {}
        contents: dict[int, tuple[int, int]] = {}
        for feature in features:  # of two with one name, the last counts, as in protobuf
            column = self._column(feature.name)
            cells[column] = (at + feature.start, at + feature.end)
            if feature.content is None:
                self._message_columns.add(column)
                contents[column] = (at, at)  # never used, as those of the column stay messages
            else:
                start, end = feature.content
                contents[column] = (at + start, at + end)
        key = None
        for column in self._reserved & cells.keys():
            name = self._table.samples.extensions[column]
            del cells[column]
            start, end = contents.pop(column)
            if name == KEY:
                key = record[start - at : end - at]
            if name == BAD or (name == KEY and not key):
                self._table.add_fault(Fault.RESERVED, name)
                return
        self._table.add(cells, key)
        for start, end in contents.values():
            self._content_starts.append(start)
            self._content_ends.append(end)

    def _column(self, name: bytes) -> int:
        """Return the number of a feature's column."""
        column = self._columns.get(name)
        if column is None:
            column = self._table.column(name.decode())
            self._columns[name] = column
            if name.decode() in RESERVED:
                self._reserved.add(column)
        return column

    def _narrow(self) -> None:
        """Replace messages by the strings that they hold, in columns where each holds one."""
        samples = self._table.samples
        for member, column in enumerate(samples.extension_ids):
            if column not in self._message_columns:
                samples.starts[member] = self._content_starts[member]
                samples.ends[member] = self._content_ends[member]


TFRECORD = TFRecordFormat()
