"""ArrayRecord files: each record is a sample, with the columns of a TFRecord file's.

They are Riegeli files: records come in compressed chunks, and every 64 KiB a block's header is
inserted. So a copy is cached instead: eight bytes of magic, and each record behind its length, u64.

Format: github.com/google/riegeli, "Riegeli/records file format"; ArrayRecord's footer says
where the chunks of records end, and how many records they have. Hashes are not compared: they are
HighwayHash, which the standard library lacks; the object store's checksum was compared before.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shardcache.errors import (
    CorruptShardError,
    MissingPackageError,
    ShardError,
    UnsupportedShardError,
)
from shardcache.formats.format import Decoder, Format, IndexOptions
from shardcache.formats.records import tfrecord
from shardcache.formats.records.wire import VARINT, fields, varint
from shardcache.formats.streams import stream_of
from shardcache.formats.zstd_library import zstd_library
from shardcache.tarindex.tables import Samples

_BLOCK_BYTES = 64 * 1024
_BLOCK_HEADER_BYTES = 24
# hash, size of the data, hash of the data, type and number of records, size of the records
_CHUNK = struct.Struct("<5Q")
# Types of chunks.
_RECORDS = ord("r")
_TRANSPOSED = ord("t")
_WITHOUT_RECORDS = b"smp"  # signature, metadata, padding
# Compressions of a chunk's buffers.
_UNCOMPRESSED = b"\0"
_ZSTD = b"z"
_BROTLI = b"b"
_SNAPPY = b"s"
# Fields of the postscript and of the footer, which are protobuf messages.
_POSTSCRIPT_FOOTER = 1
_POSTSCRIPT_MAGIC = 2
_FOOTER_METADATA = 1
_METADATA_RECORDS = 3
_MAGIC_NUMBER = 0x71930E704FDAE05E
# Limit for a chunk, stored and decoded, of which several buffers are in memory.
_MAX_CHUNK_BYTES = 256 * 1024 * 1024

_MAGIC = b"shardrec"
_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 1024 * 1024


class _Chunk(NamedTuple):
    """A chunk of the file.

    Attributes:
        kind: the character that stands for its type.
        records: number of them.
        decoded_bytes: size of all its records.
        data: without the headers of blocks.
        end: offset at which the next chunk begins.
    """

    kind: int
    records: int
    decoded_bytes: int
    data: bytes
    end: int


class ArrayRecordFormat(Format):
    """ArrayRecord files."""

    name = "ArrayRecord"
    suffixes = {".array_record": None, ".arrayrecord": None}  # noqa: RUF012  # a Mapping
    is_often_a_file = True
    is_numbered_behind = True  # as TensorFlow Datasets does
    repacks = True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """As `Format.index`."""
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            return tfrecord.samples_of(_copied_records(file, url), url)

    def decoder(self, encoding: str) -> Decoder | None:
        """As `Format.decoder`."""
        return tfrecord.TFRECORD.decoder(encoding)

    def stored_copy(self, path: Path, url: str) -> BinaryIO:
        """As `Format.stored_copy`."""
        return stream_of(_copy(path, url))


def _copied_records(file: BinaryIO, url: str) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of each record of a copy."""
    at = len(_MAGIC)
    if file.read(at) != _MAGIC:
        raise CorruptShardError("the cached copy is damaged: another format", url=url)
    while head := file.read(_LENGTH.size):
        at += _LENGTH.size
        record = file.read(int.from_bytes(head, "little"))
        yield at, record
        at += len(record)


def _copy(path: Path, url: str) -> Iterator[bytes]:
    """Yield the copy of a file that is cached, in pieces."""
    yield _MAGIC
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        for record in _Riegeli(file, url).records():
            yield _LENGTH.pack(len(record))
            yield record


class _Riegeli:
    """The records of an ArrayRecord file."""

    def __init__(self, file: BinaryIO, url: str) -> None:
        self._file = file
        self._url = url
        self._size_bytes = file.seek(0, os.SEEK_END)

    def records(self) -> Iterator[bytes]:
        """Yield the records. Raises OSError, ShardError."""
        try:
            yield from self._records()
        except (ValueError, struct.error) as exn:
            raise self._corrupt(str(exn)) from exn

    def _records(self) -> Iterator[bytes]:
        footer_at, count = self._footer()
        at = 0
        yielded = 0
        while at < footer_at:
            chunk = self._chunk(at)
            # Before its records are read: without bytes of their own, any number of them takes
            # almost none in the file.
            if yielded + chunk.records > count or chunk.end > footer_at:
                raise ValueError(
                    f"the chunk at byte {at} has {chunk.records} records and ends at byte "
                    f"{chunk.end}, and the file {count} up to byte {footer_at}"
                )
            for record in self._records_in(chunk, at):
                yielded += 1
                yield record
            at = chunk.end
        if at != footer_at or yielded != count:
            raise ValueError(f"it has {yielded} records up to byte {at} instead of {count}")

    def _footer(self) -> tuple[int, int]:
        """Return the offset of the footer, and the number of records."""
        last_block = self._size_bytes - _BLOCK_BYTES
        if last_block < _BLOCK_BYTES or self._size_bytes % _BLOCK_BYTES:
            raise ValueError("it does not consist of whole blocks, or is not an ArrayRecord file")
        postscripts = list(self._records_in(self._chunk(last_block), last_block))
        postscript = _numbers_in(postscripts[0]) if postscripts else {}
        if postscript.get(_POSTSCRIPT_MAGIC) != _MAGIC_NUMBER:
            raise ValueError("it does not end with a postscript, or is not an ArrayRecord file")
        footer_at = postscript.get(_POSTSCRIPT_FOOTER, 0)
        if not 0 < footer_at < last_block:
            raise ValueError(f"its footer is said to be at byte {footer_at}")
        footer = next(self._records_in(self._chunk(footer_at), footer_at), b"")
        for number, _, start, end in fields(footer, 0, len(footer)):
            if number == _FOOTER_METADATA:
                metadata = _numbers_in(footer[start:end])
                return footer_at, metadata.get(_METADATA_RECORDS, 0)
        raise ValueError("its footer does not say how many records it has")

    def _chunk(self, at: int) -> _Chunk:
        """Return the chunk at an offset. Raises ValueError, UnsupportedShardError."""
        head, data_at = self._read(at, _CHUNK.size)
        _, size_bytes, _, kind_and_records, decoded_bytes = _CHUNK.unpack(head)
        if max(size_bytes, decoded_bytes) > _MAX_CHUNK_BYTES:
            raise UnsupportedShardError(
                f"the chunk at byte {at} has more than {_MAX_CHUNK_BYTES >> 20} MiB",
                url=self._url,
                remedy="write the file with a smaller group_size",
            )
        data, data_end = self._read(data_at, size_bytes)
        kind = kind_and_records & 0xFF
        records = kind_and_records >> 8

        # A record's position is its chunk's plus its number there. To keep positions unique, a
        # chunk takes at least as many bytes as it has records. No chunk ends in a block's header.
        min_end = at + records
        in_block = min_end % _BLOCK_BYTES
        if 0 < in_block < _BLOCK_HEADER_BYTES:
            min_end += _BLOCK_HEADER_BYTES - in_block
        return _Chunk(kind, records, decoded_bytes, data, max(data_end, min_end))

    def _records_in(self, chunk: _Chunk, at: int) -> Iterator[bytes]:
        """Yield the records of the chunk at an offset. Raises ValueError, ShardError."""
        if chunk.kind == _TRANSPOSED:
            raise UnsupportedShardError(
                "the records of the ArrayRecord file are transposed",
                url=self._url,
                remedy="write it with the option transpose:false, which is the default",
            )
        if chunk.kind in _WITHOUT_RECORDS:
            return
        if chunk.kind != _RECORDS:
            raise ValueError(f"the chunk at byte {at} is of an unknown type")
        data = chunk.data
        compression = data[:1]
        sizes_bytes, start = varint(data, 1, len(data))
        values_start = start + sizes_bytes
        if values_start > len(data):
            raise ValueError(f"the chunk at byte {at} ends early")
        sizes = self._plain(compression, data[start:values_start])
        values = self._plain(compression, data[values_start:])
        size_at = 0
        value_at = 0
        for _ in range(chunk.records):
            size_bytes, size_at = varint(sizes, size_at, len(sizes))
            end = value_at + size_bytes
            if end > len(values):
                raise ValueError(f"a record of the chunk at byte {at} ends early")
            yield values[value_at:end]
            value_at = end

    def _plain(self, compression: bytes, data: bytes) -> bytes:
        """Return the content of a buffer of a chunk."""
        if compression == _UNCOMPRESSED:
            return data
        size_bytes, start = varint(data, 0, len(data))
        if size_bytes > _MAX_CHUNK_BYTES:
            raise ValueError(f"a buffer is said to have {size_bytes} bytes")
        if compression == _ZSTD:
            plain = _zstd_content(data[start:], size_bytes)
        elif compression == _BROTLI:
            plain = self._brotli_content(data[start:], size_bytes)
        else:
            name = "snappy" if compression == _SNAPPY else repr(compression)
            raise UnsupportedShardError(
                f"the ArrayRecord file is compressed by {name}",
                url=self._url,
                remedy="write it with zstd, which is the default, or uncompressed",
            )
        if len(plain) != size_bytes:
            raise ValueError("a buffer has another size than it says")
        return plain

    def _brotli_content(self, data: bytes, size_bytes: int) -> bytes:
        try:
            import brotli
        except ImportError as exn:
            raise MissingPackageError(
                "the ArrayRecord file is compressed by brotli, which needs the Python package "
                "brotli, where the daemon runs",
                url=self._url,
                remedy="pip install brotli, and restart the daemon; or write the file with zstd",
            ) from exn
        try:
            stream = brotli.Decompressor()
            # A byte more than the buffer should have shows the error; more are never made.
            plain: bytes = stream.process(data, output_buffer_limit=size_bytes + 1)
            while len(plain) < size_bytes and not stream.is_finished():
                more = stream.process(b"", output_buffer_limit=size_bytes + 1 - len(plain))
                if not more:
                    break
                plain += more
        except brotli.error as exn:
            raise ValueError(f"a buffer cannot be decompressed ({exn})") from exn
        return plain

    def _read(self, at: int, size_bytes: int) -> tuple[bytes, int]:
        """Return bytes from an offset on, without the headers of blocks, and where they end."""
        pieces = []
        while size_bytes:
            in_block = at % _BLOCK_BYTES
            if in_block < _BLOCK_HEADER_BYTES:
                if in_block:
                    raise ValueError(f"a chunk begins in a block's header, at byte {at}")
                at += _BLOCK_HEADER_BYTES
                in_block = _BLOCK_HEADER_BYTES
            self._file.seek(at)
            piece = self._file.read(min(size_bytes, _BLOCK_BYTES - in_block))
            if not piece:
                raise ValueError(f"it ends early, at byte {at}")
            pieces.append(piece)
            at += len(piece)
            size_bytes -= len(piece)
        return b"".join(pieces), at

    def _corrupt(self, what: str) -> ShardError:
        return CorruptShardError(f"the ArrayRecord file is damaged: {what}", url=self._url)


def _numbers_in(message: bytes) -> dict[int, int]:
    """Return the values of those of a message's fields that are varints, by number of the field."""
    numbers = {}
    for field, kind, start, end in fields(message, 0, len(message)):
        if kind == VARINT:
            numbers[field], _ = varint(message, start, end)
    return numbers


def _zstd_content(data: bytes, size_bytes: int) -> bytes:
    zstd = zstd_library()
    try:
        plain: bytes = zstd.ZstdDecompressor().decompress(data, size_bytes + 1)
    except zstd.ZstdError as exn:
        raise ValueError(f"a buffer cannot be decompressed ({exn})") from exn
    return plain


ARRAY_RECORD = ArrayRecordFormat()
