"""Chunks of a Riegeli file, whose records are read piece by piece, however large they are.

An ArrayRecord file is a Riegeli file; `array_record` reads it with this module. The records are in
chunks. A chunk of records has two buffers, which may be compressed: the sizes of its records, and
the bytes of its records end to end.

The file is divided into blocks of 64 KiB. A block begins with a header, which may interrupt the
bytes of a chunk anywhere. Sizes of chunks and buffers do not count these headers.

The chunks' hashes are not compared: they are HighwayHash, which the standard library lacks, and the
object store's checksum of the whole file was compared before.

Format: github.com/google/riegeli, "Riegeli/records file format".
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from shardcache.shared.exceptions import MissingPackageError, UnsupportedShardError
from shardcache.shared.formats.records.wire import MAX_VARINT_BYTES, read_varint
from shardcache.shared.formats.zstd_library import zstd_library

BLOCK_BYTES = 64 * 1024
"""Size of a block: a block begins at each multiple of this size."""

_BLOCK_HEADER_BYTES = 24
# The header of a chunk: hash, size of the data, hash of the data, type and number of records in
# one number, size of the decoded records.
_CHUNK = struct.Struct("<5Q")
# Types of chunks.
_RECORDS = ord("r")
_TRANSPOSED = ord("t")  # the fields of the records are stored column by column
_WITHOUT_RECORDS = b"smp"  # chunks with a signature, with metadata, and with padding
# Compressions of a chunk's buffers.
_UNCOMPRESSED = b"\0"
_ZSTD = b"z"
_BROTLI = b"b"
_SNAPPY = b"s"
# Limit for the size of a chunk, both stored and decoded, since indexing has a whole record in
# memory.
_MAX_CHUNK_BYTES = 256 * 1024 * 1024
# Size of the pieces of a buffer that is decompressed. In addition, zstd needs memory for its
# window, up to 128 MiB.
_PIECE_BYTES = 256 * 1024

Record = tuple[int, Iterator[bytes]]
"""Size and pieces of a record. All pieces have to be read before the next record is."""


class Chunk(NamedTuple):
    """A chunk of the file.

    Attributes:
        start: offset at which the chunk begins.
        type: code of the character that stands for the chunk's type.
        records: number of records in the chunk.
        data_start: offset at which the chunk's data begins, which follow its header.
        data_bytes: size of the data.
        end: offset at which the next chunk begins.
    """

    start: int
    type: int
    records: int
    data_start: int
    data_bytes: int
    end: int


class RiegeliChunks:
    """The chunks of an open file.

    Args:
        file: the file, which should be buffered, since most chunks are small.
        url: url of the file, for errors.
    """

    def __init__(self, file: BinaryIO, url: str) -> None:
        self._file = file
        self._url = url

    def chunk_at(self, start: int) -> Chunk:
        """Return the chunk at an offset. Raises OSError, ValueError, UnsupportedShardError."""
        header = b"".join(self._stored_pieces(start, _CHUNK.size))
        _, data_bytes, _, type_and_records, decoded_bytes = _CHUNK.unpack(header)
        if max(data_bytes, decoded_bytes) > _MAX_CHUNK_BYTES:
            raise UnsupportedShardError(
                f"the chunk at byte {start} has more than {_MAX_CHUNK_BYTES >> 20} MiB",
                url=self._url,
                remedy="write the file with a smaller group_size",
            )
        chunk_type = type_and_records & 0xFF
        records = type_and_records >> 8

        # In Riegeli, a record's position is the offset of its chunk plus its number in the chunk.
        # To keep positions unique, a chunk takes at least as many bytes as it has records. A chunk
        # does not end inside a block's header, so the end moves to the end of such a header.
        min_end = start + records
        offset_in_block = min_end % BLOCK_BYTES
        if 0 < offset_in_block < _BLOCK_HEADER_BYTES:
            min_end += _BLOCK_HEADER_BYTES - offset_in_block
        data_start = _end_of(start, _CHUNK.size)
        data_end = _end_of(data_start, data_bytes)
        return Chunk(
            start=start,
            type=chunk_type,
            records=records,
            data_start=data_start,
            data_bytes=data_bytes,
            end=max(data_end, min_end),
        )

    def records_of(self, chunk: Chunk) -> Iterator[Record]:
        """Yield the records of a chunk. Raises OSError, ValueError, ShardError."""
        if chunk.type == _TRANSPOSED:
            raise UnsupportedShardError(
                "the records of the ArrayRecord file are transposed",
                url=self._url,
                remedy="write it with the option transpose:false, which is the default",
            )
        if chunk.type in _WITHOUT_RECORDS:
            return
        if chunk.type != _RECORDS:
            raise ValueError(f"the chunk at byte {chunk.start} is of an unknown type")
        # The data are the type of compression, the stored size of the first buffer, and the two
        # buffers: the sizes of the records, and the records end to end.
        head_bytes = min(chunk.data_bytes, 1 + MAX_VARINT_BYTES)
        head = b"".join(self._stored_pieces(chunk.data_start, head_bytes))
        compression = head[:1]
        sizes_bytes, head_end = read_varint(head, 1, len(head))
        records_bytes = chunk.data_bytes - head_end - sizes_bytes
        if records_bytes < 0:
            raise ValueError(f"the chunk at byte {chunk.start} ends early")
        sizes_start = _end_of(chunk.data_start, head_end)
        records_start = _end_of(sizes_start, sizes_bytes)
        sizes = self._decoded(compression, sizes_start, sizes_bytes)
        records = self._decoded(compression, records_start, records_bytes)
        for _ in range(chunk.records):
            size_bytes = sizes.take_varint()
            yield size_bytes, records.take(size_bytes)
        sizes.finish()
        records.finish()

    def _stored_pieces(self, at: int, size_bytes: int) -> Iterator[bytes]:
        """Yield bytes from an offset on, without the headers of blocks, at most a block at a time.

        Raises ValueError at the end of the file, or for an offset in a block's header.
        """
        while size_bytes:
            at = _after_header(at)
            # The two buffers of a chunk are read in turns, so the file may be at another offset.
            self._file.seek(at)
            piece = self._file.read(min(size_bytes, BLOCK_BYTES - at % BLOCK_BYTES))
            if not piece:
                raise ValueError(f"it ends early, at byte {at}")
            at += len(piece)
            size_bytes -= len(piece)
            yield piece

    def _decoded(self, compression: bytes, start: int, stored_bytes: int) -> "_DecodedBuffer":
        """Return the decoded content of a buffer, which is read piece by piece.

        Args:
            compression: the type of the buffer's compression.
            start: offset of the buffer in the file.
            stored_bytes: size of the buffer as stored.
        """
        if compression == _UNCOMPRESSED:
            return _DecodedBuffer(self._stored_pieces(start, stored_bytes), stored_bytes)
        # A compressed buffer begins with the size of its content.
        head = b"".join(self._stored_pieces(start, min(stored_bytes, MAX_VARINT_BYTES)))
        size_bytes, head_end = read_varint(head, 0, len(head))
        if size_bytes > _MAX_CHUNK_BYTES:
            raise ValueError(f"a buffer is said to have {size_bytes} bytes")
        stored = self._stored_pieces(_end_of(start, head_end), stored_bytes - head_end)
        if compression == _ZSTD:
            return _DecodedBuffer(_zstd_pieces(stored), size_bytes)
        if compression == _BROTLI:
            return _DecodedBuffer(self._brotli_pieces(stored), size_bytes)
        name = "snappy" if compression == _SNAPPY else repr(compression)
        raise UnsupportedShardError(
            f"the ArrayRecord file is compressed by {name}",
            url=self._url,
            remedy="write it with zstd, which is the default, or uncompressed",
        )

    def _brotli_pieces(self, stored: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the content of a buffer in brotli, in pieces of bounded size."""
        try:
            import brotli
        except ImportError as exn:
            raise MissingPackageError(
                "the ArrayRecord file is compressed by brotli, which needs the Python package "
                "brotli, where the daemon runs",
                url=self._url,
                remedy="pip install brotli, and restart the daemon; or write the file with zstd",
            ) from exn
        stream = brotli.Decompressor()
        try:
            for data in stored:
                piece = stream.process(data, output_buffer_limit=_PIECE_BYTES)
                while piece:
                    yield piece
                    piece = stream.process(b"", output_buffer_limit=_PIECE_BYTES)
        except brotli.error as exn:
            raise ValueError(f"a buffer cannot be decompressed ({exn})") from exn


class _DecodedBuffer:
    """The decoded content of a buffer, read in order.

    The methods raise ValueError if the content is shorter or longer than the buffer states.
    """

    def __init__(self, pieces: Iterator[bytes], size_bytes: int) -> None:
        """Take the pieces of the content, whose sizes have to add up to `size_bytes`."""
        self._pieces = pieces
        self._expected_bytes = size_bytes  # size of the pieces that `_pieces` has not yielded yet
        self._unread = memoryview(b"")  # the rest of the pieces that `_pieces` has yielded

    def take_varint(self) -> int:
        """Return the varint that comes next."""
        # A varint may begin in one piece and end in another.
        while len(self._unread) < MAX_VARINT_BYTES:
            piece = self._next_piece()
            if not piece:
                break
            self._unread = memoryview(bytes(self._unread) + piece)
        number, end = read_varint(self._unread, 0, len(self._unread))
        self._unread = self._unread[end:]
        return number

    def take(self, size_bytes: int) -> Iterator[bytes]:
        """Yield the next `size_bytes` bytes in pieces. Raises ValueError if fewer are left."""
        while size_bytes:
            if not self._unread:
                self._unread = memoryview(self._next_piece())
            piece = self._unread[:size_bytes]
            if not piece:
                raise ValueError("a record ends early")
            self._unread = self._unread[len(piece) :]
            size_bytes -= len(piece)
            yield bytes(piece)

    def finish(self) -> None:
        """Read the rest of the content, to check its size."""
        while self._next_piece():
            pass

    def _next_piece(self) -> bytes:
        """Return the next piece; b"" at the end."""
        piece = next(self._pieces, b"")
        self._expected_bytes -= len(piece)
        is_too_long = self._expected_bytes < 0
        is_too_short = self._expected_bytes > 0 and not piece
        if is_too_long or is_too_short:
            raise ValueError("a buffer has another size than it says")
        return piece


def _after_header(at: int) -> int:
    """Return the offset at which data continues: after the block's header if one begins at `at`.

    Raises ValueError for an offset inside a header.
    """
    offset_in_block = at % BLOCK_BYTES
    if not offset_in_block:
        return at + _BLOCK_HEADER_BYTES
    if offset_in_block < _BLOCK_HEADER_BYTES:
        raise ValueError(f"a chunk begins in a block's header, at byte {at}")
    return at


def _end_of(at: int, size_bytes: int) -> int:
    """Return the offset of the end of `size_bytes` bytes of data that begin at the offset `at`.

    The headers of blocks in between are skipped.
    """
    while size_bytes:
        at = _after_header(at)
        bytes_in_block = min(size_bytes, BLOCK_BYTES - at % BLOCK_BYTES)
        at += bytes_in_block
        size_bytes -= bytes_in_block
    return at


def _zstd_pieces(stored: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of a buffer in zstd, in pieces of bounded size."""
    zstd = zstd_library()
    stream = zstd.ZstdDecompressor()
    try:
        while not stream.eof:
            data = b""
            if stream.needs_input:
                data = next(stored, b"")
                if not data:
                    return
            piece: bytes = stream.decompress(data, _PIECE_BYTES)
            if piece:
                yield piece
    except zstd.ZstdError as exn:
        raise ValueError(f"a buffer cannot be decompressed ({exn})") from exn
