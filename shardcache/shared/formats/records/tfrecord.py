"""TFRecord files: each record is a sample, and the features of its Example are the columns.

A record in the file is a length (u64), a checksum of the length, the record's bytes, and a checksum
of these bytes. Numbers are little-endian, and a checksum is a masked CRC-32C. Records are usually
serialised `tf.train.Example` messages, which have named features. A feature `__key__` is the
sample's key, and a feature `__url__` is left out. A file whose first record is not an Example has a
single column, `record`, with the bytes of each record.

An encoding is the way in which a column's values are stored. A fault is the reason why a single
sample is unusable although its shard is intact.
"""

import struct
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from shardcache.shared.exceptions import (
    CorruptShardError,
    ShardError,
    TruncatedShardError,
    UnsupportedShardError,
)
from shardcache.shared.formats.cells import BAD, KEY, MAX_COLUMNS, RESERVED, CellTable
from shardcache.shared.formats.format import (
    Crc32c,
    Decoder,
    Format,
    IndexOptions,
    with_compressions,
)
from shardcache.shared.formats.records import tf_example
from shardcache.shared.formats.records.tf_example import Feature, features_of
from shardcache.shared.tarindex.tables import Fault, Samples

RECORD = "record"
"""Name of the only column of a file without Examples."""

MAX_RECORD_BYTES = 1024 * 1024 * 1024

_BYTES = ""  # encoding of cells that are plain bytes
_FEATURE = "feature"  # encoding of cells that are Feature messages
_BUFFER_BYTES = 1024 * 1024
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<L")
_HEAD_BYTES = _LENGTH.size + _CRC.size
_MASK_DELTA = 0xA282EAD8  # added by TFRecord's masking of checksums
_GZIP_MAGIC = b"\x1f\x8b"


def index(path: Path, url: str, crc32c: Crc32c) -> Samples:
    """Return the samples of the TFRecord file at `path`. Blocks.

    A record in a file of Examples that is not an Example is recorded as a fault.

    Raises OSError; TruncatedShardError, CorruptShardError; UnsupportedShardError for too many
    records or values, or too long a record.
    """
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        return samples_of(_records(file, url, crc32c), url)


def samples_of(records: Iterator[tuple[int, bytes]], url: str) -> Samples:
    """Return the samples of records.

    Raises UnsupportedShardError for too many records or values, and what `records` raises.

    Args:
        records: yields the offset in the file and the bytes of each record.
        url: url of the shard, for errors.
    """
    return _RecordIndexer(url).indexed(records)


class TFRecordFormat(Format):
    """TFRecord files; `Format` explains the attributes."""

    name = "TFRecord"
    suffixes = with_compressions(".tfrecord", ".tfrecords")
    is_common_outside_datasets = True
    may_end_in_number = True  # TensorFlow Datasets writes NAME.tfrecord-00000-of-00010

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
    """Yield the offset and the bytes of each record, after both of its checksums were compared.

    The offset is that of the record's bytes, which come after its length.
    """
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
        packed_length = head[: _LENGTH.size]
        length_crc = head[_LENGTH.size :]
        _check_crc(packed_length, length_crc, f"the length at byte {at}", url, crc32c)
        (length,) = _LENGTH.unpack(packed_length)
        if length > MAX_RECORD_BYTES:
            raise UnsupportedShardError(
                f"the record at byte {at} has more than {MAX_RECORD_BYTES >> 30} GiB",
                url=url,
                remedy="write smaller records",
            )
        record = file.read(length)
        record_crc = file.read(_CRC.size)
        if len(record) < length or len(record_crc) < _CRC.size:
            raise _truncated(at, url)
        _check_crc(record, record_crc, f"the record at byte {at}", url, crc32c)
        yield at + _HEAD_BYTES, record
        at += _HEAD_BYTES + length + _CRC.size


def _check_crc(data: bytes, stored_crc: bytes, subject: str, url: str, crc32c: Crc32c) -> None:
    """Raise CorruptShardError unless `stored_crc` is the masked CRC-32C of `data`.

    Args:
        data: the bytes.
        stored_crc: the checksum in the file, four bytes.
        subject: subject of the error's message.
        url: url of the shard, for the error.
        crc32c: computes a CRC-32C.
    """
    crc = crc32c(data, 0)  # 0, since there are no bytes before `data`
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    masked = (rotated + _MASK_DELTA) & 0xFFFFFFFF
    if stored_crc != _CRC.pack(masked):
        raise CorruptShardError(
            f"{subject} does not match its checksum, or the file is not a TFRecord file", url=url
        )


def _truncated(at: int, url: str) -> ShardError:
    return TruncatedShardError(f"the file ends inside the record at byte {at}", url=url)


class _RecordIndexer:
    """Indexes records one by one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._table = CellTable(url)
        self._columns: dict[bytes, int] = {}  # numbers of columns, by the name of the feature
        self._reserved: set[int] = set()  # columns of features such as `__key__`
        # At first, a cell is the whole message of its feature. If each feature of a column is a
        # list of one byte string, `_narrow_cells` replaces the messages by these strings at the
        # end. For that, these two arrays have the start and the end of the string in each cell.
        self._string_starts = array("Q")
        self._string_ends = array("Q")
        # The columns with any other feature, whose cells stay messages.
        self._message_columns: set[int] = set()

    def indexed(self, records: Iterator[tuple[int, bytes]]) -> Samples:
        """Return the samples of records, given their offsets and bytes; see `samples_of`."""
        has_examples = True
        for number, (start, record) in enumerate(records):
            features = None
            if has_examples:
                features = self._features(start, record)
            # The first record decides for all whether they are Examples.
            if number == 0 and features is None:
                has_examples = False
            if not has_examples:
                self._table.add([(self._table.column(RECORD), (start, start + len(record)))])
            elif features is None:
                self._table.add_fault(Fault.EXAMPLE, RECORD)
            else:
                self._add(start, record, features)
        if has_examples:
            self._narrow_cells()
        samples = self._table.samples
        samples.encodings = [_BYTES] * len(samples.extensions)
        for column in self._message_columns:
            samples.encodings[column] = _FEATURE
        return samples

    def _features(self, start: int, record: bytes) -> list[Feature] | None:
        """Return the features of an Example; None for a record that is not an Example.

        Raises UnsupportedShardError for too many features.
        """
        # Features are counted here, since empty ones take two bytes of the record each, but a
        # hundred bytes of memory.
        try:
            features = list(islice(features_of(record), MAX_COLUMNS + 1))
        except ValueError:
            return None
        if len(features) > MAX_COLUMNS:
            raise UnsupportedShardError(
                f"the record at byte {start} has more than {MAX_COLUMNS:,} features",
                url=self._url,
                remedy="write numbers of one kind as one feature, a list of them",
            )
        return features

    def _add(self, record_start: int, record: bytes, features: list[Feature]) -> None:
        """Add the sample of a record.

        Args:
            record_start: offset of the record in the file.
            record: bytes of the record.
            features: the record's features, with offsets in the record.
        """
        # By column, start and end in the file: of the feature's message, and of its only string.
        messages: dict[int, tuple[int, int]] = {}
        strings: dict[int, tuple[int, int]] = {}
        # Of two features with the same name, the last counts, as in protobuf.
        for feature in features:
            column = self._column(feature.name)
            messages[column] = (record_start + feature.start, record_start + feature.end)
            if feature.only_string is None:
                self._message_columns.add(column)
                # A placeholder, which is not used since the cells of this column stay messages.
                strings[column] = (record_start, record_start)
            else:
                start, end = feature.only_string
                strings[column] = (record_start + start, record_start + end)
        key = None
        for column in self._reserved & messages.keys():
            name = self._table.samples.extensions[column]
            # The values of reserved features are not cells.
            del messages[column]
            start, end = strings.pop(column)
            if name == KEY:
                key = record[start - record_start : end - record_start]
            # A key that is empty, or not a single byte string, makes the sample unusable.
            is_bad_key = name == KEY and not key
            if name == BAD or is_bad_key:
                self._table.add_fault(Fault.RESERVED, name)
                return
        self._table.add(messages.items(), key)
        for start, end in strings.values():
            self._string_starts.append(start)
            self._string_ends.append(end)

    def _column(self, name: bytes) -> int:
        """Return the number of a feature's column."""
        column = self._columns.get(name)
        if column is None:
            column = self._table.column(name.decode())
            self._columns[name] = column
            if name.decode() in RESERVED:
                self._reserved.add(column)
        return column

    def _narrow_cells(self) -> None:
        """Replace messages by their strings, in columns whose messages have one string each."""
        samples = self._table.samples
        for cell, column in enumerate(samples.extension_ids):
            if column not in self._message_columns:
                samples.starts[cell] = self._string_starts[cell]
                samples.ends[cell] = self._string_ends[cell]


TFRECORD = TFRecordFormat()
