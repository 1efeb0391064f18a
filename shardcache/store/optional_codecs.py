"""Compressions whose libraries are optional: LZ4 for tars, and Brotli and Snappy for MDS shards.

`codecs.Codec` opens files with these. Each library is imported only when a file needs it. For bad
data, the streams raise an OSError without an errno, as the gzip module does; `codec_errors` tells
bad data from a failing disk by the errno.
"""

import io
import os
from pathlib import Path
from typing import Any, BinaryIO

from shardcache.shared.exceptions import MissingPackageError, UnsupportedShardError
from shardcache.shared.units import size

_CHUNK_BYTES = 256 * 1024

# Largest decompressed size of a Snappy block. A block is a whole MDS shard, and is decompressed in
# memory as a whole. MDS shards have 64 MB unless their writer chooses another size.
_MAX_BLOCK_BYTES = 1024**3
_MAX_VARINT_BYTES = 5  # longest encoding of the decompressed size, at the start of a block


class BrotliStream(io.RawIOBase):
    """Decompressed bytes of a .br file."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises MissingPackageError, OSError."""
        super().__init__()
        try:
            import brotli
        except ImportError as exn:
            raise _missing("brotli") from exn
        self._error = brotli.error
        self._decoder = brotli.Decompressor()
        self._file = open(path, "rb")  # noqa: SIM115  # closed by `close`
        self._unread = memoryview(b"")  # decompressed bytes that were not read yet

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes. Raises EOFError for a file that is cut short, OSError for a bad one."""
        view = memoryview(buffer)
        while not self._unread:  # repeated, as a piece may be empty
            if self._decoder.is_finished():
                return 0
            self._unread = memoryview(self._next_piece())
        size_bytes = min(len(view), len(self._unread))
        view[:size_bytes] = self._unread[:size_bytes]
        self._unread = self._unread[size_bytes:]
        return size_bytes

    def _next_piece(self) -> bytes:
        """Return some decompressed bytes, at most a chunk of them.

        A few compressed bytes may become gigabytes.
        """
        data = b""
        if self._decoder.can_accept_more_data():
            data = self._file.read(_CHUNK_BYTES)
            if not data:
                raise EOFError("the file ends before its end marker")
        try:
            piece: bytes = self._decoder.process(data, output_buffer_limit=_CHUNK_BYTES)
        except self._error as exn:
            raise OSError(str(exn)) from exn  # without an errno, as for bad data
        return piece


class Lz4Stream(io.RawIOBase):
    """Decompressed bytes of all frames of an .lz4 file."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises MissingPackageError, OSError."""
        super().__init__()
        try:
            import lz4.frame
        except ImportError as exn:
            raise _missing("lz4") from exn
        self._frames = lz4.frame.open(path)

    def close(self) -> None:
        """Close the file."""
        self._frames.close()
        super().close()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes. Raises EOFError for a file that is cut short, OSError for a bad one."""
        view = memoryview(buffer)
        try:
            piece = self._frames.read(len(view))
        except RuntimeError as exn:
            raise OSError(str(exn)) from exn  # without an errno, as for bad data
        view[: len(piece)] = piece
        return len(piece)


def snappy_block(path: Path) -> BinaryIO:
    """Return the decompressed bytes of a .snappy file, which is one block.

    Raises MissingPackageError, UnsupportedShardError for a block that is too large, OSError.
    """
    try:
        import cramjam
    except ImportError as exn:
        raise _missing("cramjam") from exn
    with open(path, "rb") as file:
        size_bytes = _decoded_varint(os.pread(file.fileno(), _MAX_VARINT_BYTES, 0))
        if size_bytes > _MAX_BLOCK_BYTES:
            raise UnsupportedShardError(
                f"decompressing the snappy data needs {size(size_bytes)} of memory at once",
                remedy="write smaller shards, or compress them with zstd",
            )
        # A small block in a large file is refused before the file is read into memory.
        if os.fstat(file.fileno()).st_size > _max_compressed_bytes(size_bytes):
            raise OSError("the file is too large for the decompressed size that it states")
        data = file.read()
    try:
        return io.BytesIO(bytes(cramjam.snappy.decompress_raw(data)))
    except cramjam.DecompressionError as exn:
        raise OSError(str(exn)) from exn


def _max_compressed_bytes(size_bytes: int) -> int:
    """Return the largest size that a block can have if its data is incompressible.

    The formula is that of the reference implementation (`MaxCompressedLength` in snappy.cc).
    """
    return 32 + size_bytes + size_bytes // 6


def _decoded_varint(data: bytes) -> int:
    """Return the variable-length number at the start of some bytes.

    Each byte has seven bits of the number, the lowest bits first; its high bit is set if another
    byte follows.
    """
    number = 0
    for place, byte in enumerate(data):
        number |= (byte & 0x7F) << (7 * place)
        is_last = byte < 0x80
        if is_last:
            break
    return number


def _missing(package: str) -> MissingPackageError:
    """Return the error for a compression whose Python package is not installed."""
    return MissingPackageError(
        f"decompressing the shard needs the Python package {package}, which the daemon lacks",
        remedy=f"pip install {package} for the daemon, and start it again; or compress the "
        "shards with zstd",
    )
