"""ArrayRecord files: each record is a sample, whose columns are found as in a TFRecord file.

An ArrayRecord file is a Riegeli file (`riegeli_chunks`): records are in chunks, which may be
compressed, and each block of 64 KiB begins with a header. So a record is not a range of the file.
The cache stores a copy instead: eight bytes of magic, and then each record after its length (u64).

After the chunks of records comes the footer, which says how many records there are. The last block
of the file holds the postscript, which says where the footer is. Footer and postscript are protobuf
messages; each is the first record of a chunk of its own.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shardcache.shared.exceptions import CorruptShardError
from shardcache.shared.formats.format import Decoder, Format, IndexOptions
from shardcache.shared.formats.records import tfrecord
from shardcache.shared.formats.records.riegeli_chunks import BLOCK_BYTES, RiegeliChunks
from shardcache.shared.formats.records.wire import VARINT, fields, read_varint
from shardcache.shared.formats.streams import stream_of
from shardcache.shared.tarindex.tables import Samples

# Numbers of the fields in the postscript.
_FOOTER_START_FIELD = 1
_MAGIC_FIELD = 2
# Number of the only field that is read in the footer: a message with metadata.
_METADATA_FIELD = 1
# Number of the only field that is read in this metadata.
_RECORD_COUNT_FIELD = 3

_POSTSCRIPT_MAGIC = 0x71930E704FDAE05E  # value of the postscript's `_MAGIC_FIELD`
_MAX_MESSAGE_BYTES = 1024 * 1024  # limit for the postscript and the footer

# The cached copy begins with these bytes.
_COPY_MAGIC = b"shardrec"
_LENGTH = struct.Struct("<Q")  # the length of a record, before each record in the copy
_BUFFER_BYTES = 1024 * 1024


class ArrayRecordFormat(Format):
    """ArrayRecord files; `Format` explains the attributes."""

    name = "ArrayRecord"
    # None stands for a file that is not compressed as a whole: its chunks may be.
    suffixes = {".array_record": None, ".arrayrecord": None}  # noqa: RUF012  # a Mapping
    is_common_outside_datasets = True
    may_end_in_number = True  # TensorFlow Datasets writes NAME.array_record-00000-of-00010
    may_repack = True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """As `Format.index`."""
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            return tfrecord.samples_of(_records_in_copy(file, url), url)

    def decoder(self, encoding: str) -> Decoder | None:
        """As `Format.decoder`."""
        return tfrecord.TFRECORD.decoder(encoding)

    def stored_copy(self, path: Path, url: str) -> BinaryIO:
        """As `Format.stored_copy`."""
        return stream_of(_copy_pieces(path, url))


def _records_in_copy(file: BinaryIO, url: str) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each record of a cached copy.

    Raises CorruptShardError if the copy is not as `_copy_pieces` wrote it.
    """
    at = len(_COPY_MAGIC)
    if file.read(at) != _COPY_MAGIC:
        raise _damaged_copy("it does not begin as copies do", url)
    while packed_length := file.read(_LENGTH.size):
        size_bytes = int.from_bytes(packed_length, "little")
        at += _LENGTH.size
        record = file.read(size_bytes)
        if len(packed_length) < _LENGTH.size or len(record) < size_bytes:
            raise _damaged_copy("it ends inside a record", url)
        yield at, record
        at += size_bytes


def _damaged_copy(reason: str, url: str) -> CorruptShardError:
    """Return the error for a damaged cached copy."""
    message = f"the cached copy of the ArrayRecord file is damaged: {reason}"
    return CorruptShardError(message, url=url)


def _copy_pieces(path: Path, url: str) -> Iterator[bytes]:
    """Yield the copy of an ArrayRecord file in pieces. Raises OSError, ShardError."""
    yield _COPY_MAGIC
    with open(path, "rb", buffering=BLOCK_BYTES) as file:
        try:
            yield from _ArrayRecordFile(file, url).copy_pieces()
        except (ValueError, struct.error) as exn:
            raise CorruptShardError(f"the ArrayRecord file is damaged: {exn}", url=url) from exn


class _ArrayRecordFile:
    """An ArrayRecord file.

    Its methods raise OSError, ShardError; ValueError or struct.error for a damaged file.
    """

    def __init__(self, file: BinaryIO, url: str) -> None:
        self._size_bytes = file.seek(0, os.SEEK_END)
        self._chunks = RiegeliChunks(file, url)

    def copy_pieces(self) -> Iterator[bytes]:
        """Yield the records in pieces, each record after its length."""
        footer_start, record_count = self._find_footer()
        at = 0
        yielded_count = 0
        while at < footer_start:
            chunk = self._chunks.chunk_at(at)
            # The count is checked before the chunk's records are read, since a chunk may claim any
            # number of empty records, which take almost no bytes of the file.
            if yielded_count + chunk.records > record_count or chunk.end > footer_start:
                raise ValueError(
                    f"the chunk at byte {at} has {chunk.records} records and ends at byte "
                    f"{chunk.end}; the whole file should have {record_count} records, which end "
                    f"at byte {footer_start}"
                )
            for size_bytes, pieces in self._chunks.records_of(chunk):
                yielded_count += 1
                yield _LENGTH.pack(size_bytes)
                yield from pieces
            at = chunk.end
        if yielded_count != record_count:
            raise ValueError(f"it has {yielded_count} records instead of {record_count}")

    def _find_footer(self) -> tuple[int, int]:
        """Return the offset of the footer, and the number of records that it states."""
        last_block_start = self._size_bytes - BLOCK_BYTES
        # A file has whole blocks: one at least for the records and the footer, and the last one for
        # the postscript.
        if last_block_start < BLOCK_BYTES or self._size_bytes % BLOCK_BYTES:
            raise ValueError("it does not consist of whole blocks, or is not an ArrayRecord file")
        postscript = _numbers_in(self._message_at(last_block_start))
        if postscript.get(_MAGIC_FIELD) != _POSTSCRIPT_MAGIC:
            raise ValueError("it does not end with a postscript, or is not an ArrayRecord file")
        footer_start = postscript.get(_FOOTER_START_FIELD, 0)
        if not 0 < footer_start < last_block_start:
            raise ValueError(f"its footer is said to be at byte {footer_start}")
        footer = self._message_at(footer_start)
        for number, _wire_type, start, end in fields(footer, 0, len(footer)):
            if number == _METADATA_FIELD:
                metadata = _numbers_in(footer[start:end])
                return footer_start, metadata.get(_RECORD_COUNT_FIELD, 0)
        raise ValueError("its footer does not say how many records it has")

    def _message_at(self, at: int) -> bytes:
        """Return the first record of the chunk at an offset, which is the postscript or footer.

        If the chunk has no records, this is b"", a message without fields.
        """
        chunk = self._chunks.chunk_at(at)
        first_record = next(self._chunks.records_of(chunk), None)
        if first_record is None:
            return b""
        size_bytes, pieces = first_record
        if size_bytes > _MAX_MESSAGE_BYTES:
            raise ValueError(f"the message at byte {at} has {size_bytes} bytes")
        return b"".join(pieces)


def _numbers_in(message: bytes) -> dict[int, int]:
    """Return the values of a message's varint fields, by the number of the field."""
    values = {}
    for number, wire_type, start, end in fields(message, 0, len(message)):
        if wire_type == VARINT:
            values[number], _ = read_varint(message, start, end)
    return values


ARRAY_RECORD = ArrayRecordFormat()
