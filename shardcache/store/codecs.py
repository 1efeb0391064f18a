"""Decompression of shards.

Readers map shards into memory, which only works for plain tars. So a shard that is compressed at
its origin is decompressed once it has arrived: `Partial.write_inflated` calls `inflate`. A codec is
one of the supported compressions.
"""

import bz2
import contextlib
import enum
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardcache.shared.exceptions import (
    CorruptShardError,
    TruncatedShardError,
    UnsupportedShardError,
)
from shardcache.shared.formats.zstd_library import zstd_library
from shardcache.shared.units import size
from shardcache.shared.urls.url_names import compression_of
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.optional_codecs import BrotliStream, Lz4Stream, snappy_block
from shardcache.transport.between.checksums import crc32c
from shardcache.transport.between.parts import write_all

zstd = zstd_library()

# Limits on the memory of a decompression: a file's header could demand more than the node has.
# Presets of xz need at most 65 MiB; `zstd --long` needs a window of 128 MiB (2**27). The memory
# limit allows 1 MiB more for everything but the window.
_MAX_WINDOW_LOG = 27
_MAX_MEMORY_BYTES = 129 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024

# Words in the messages of xz and zstd if the memory limit was exceeded. Nothing else in their
# errors shows that.
_TOO_MUCH_MEMORY = ("Memory usage limit exceeded", "Frame requires too much memory")


class Codec(enum.Enum):
    """A supported compression; the value is its name in messages."""

    GZIP = "gzip"
    ZSTD = "zstd"
    BZIP2 = "bzip2"
    XZ = "xz"
    LZ4 = "lz4"
    BROTLI = "brotli"
    SNAPPY = "snappy"

    def open(self, path: Path) -> BinaryIO:
        """Return the decompressed stream of a file, with all of its members or frames.

        The stream should be read within `codec_errors`.
        """
        match self:
            case Codec.GZIP:
                return cast(BinaryIO, gzip.open(path))
            case Codec.BZIP2:
                return cast(BinaryIO, bz2.open(path))
            case Codec.ZSTD:
                return cast(
                    BinaryIO,
                    zstd.open(
                        path,
                        options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG},
                    ),
                )
            case Codec.XZ:
                return io.BufferedReader(_XzStreams(path), _CHUNK_BYTES)
            case Codec.LZ4:
                return io.BufferedReader(Lz4Stream(path), _CHUNK_BYTES)
            case Codec.BROTLI:
                return io.BufferedReader(BrotliStream(path), _CHUNK_BYTES)
            case Codec.SNAPPY:
                return snappy_block(path)


def codec_of(url: str) -> Codec | None:
    """Return the compression that a url's suffix names; None for a plain tar."""
    compression = compression_of(url)
    return Codec(compression) if compression else None


class _XzStreams(io.RawIOBase):
    """Decompressed bytes of all streams of an .xz file.

    `lzma.open` would do the same, but has no memory limit.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "rb")  # noqa: SIM115  # closed by `close`
        self._input = b""  # compressed bytes that were read and not passed to the decoder yet
        self._decoder = _new_xz_decoder()

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        while True:
            if self._decoder.eof:
                has_begun_next = self._begin_next_stream()
                if not has_begun_next:
                    return 0
            if self._decoder.needs_input and not self._input:
                self._input = self._file.read(_CHUNK_BYTES)
                if not self._input:
                    raise EOFError("the file ends before its end marker")
            piece = self._decoder.decompress(self._input, len(view))
            self._input = b""
            if piece:
                view[: len(piece)] = piece
                return len(piece)

    def _begin_next_stream(self) -> bool:
        """Go on with the next stream, after any padding of zeros; return False if there is none."""
        self._input = self._decoder.unused_data.lstrip(b"\0")
        while not self._input:
            data = self._file.read(_CHUNK_BYTES)
            if not data:
                return False
            self._input = data.lstrip(b"\0")
        self._decoder = _new_xz_decoder()
        return True


def _new_xz_decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(memlimit=_MAX_MEMORY_BYTES)


def inflate(
    src: Path,
    dst: Path,
    codec: Codec,
    part_bytes: int,
    reserve: Callable[[int], None],
    url: str | None = None,
) -> tuple[int, list[int]]:
    """Decompress the file `src` into the file `dst`, part by part. Blocks.

    Args:
        part_bytes: size of every part of `dst` except the last.
        reserve: called with the size of each part before the part is written. An exception from
            this function stops the work, so that a decompression bomb is limited to the cache's
            capacity.
        url: the shard's url, for errors.

    Returns:
        the size of `dst`, and the CRC32C of each of its parts.

    Raises as `codec_errors` does, and DiskError.
    """
    with disk_errors(dst), codec_errors(codec, url), codec.open(src) as stream:
        return write_parts(stream, dst, part_bytes, reserve)


def write_parts(
    stream: BinaryIO,
    dst: Path,
    part_bytes: int,
    reserve: Callable[[int], None],
) -> tuple[int, list[int]]:
    """Write a stream to `dst`, part by part. Blocks.

    Arguments and result are those of `inflate`. Errors of either file are not translated.
    """
    size_bytes = 0
    crcs: list[int] = []
    with open(dst, "wb") as file:
        while part := stream.read(part_bytes):
            reserve(len(part))
            write_all(file.fileno(), memoryview(part), size_bytes)
            size_bytes += len(part)
            crcs.append(crc32c(part, 0))
    return size_bytes, crcs


@contextlib.contextmanager
def codec_errors(codec: Codec, url: str | None) -> Iterator[None]:
    """Translate the errors that the libraries raise, during the block, for bad data.

    Raises TruncatedShardError, UnsupportedShardError, CorruptShardError.
    """
    try:
        yield
    except EOFError as exn:
        raise TruncatedShardError(f"the {codec.value} data ends early", url=url) from exn
    except (OSError, zlib.error, lzma.LZMAError, zstd.ZstdError) as exn:
        # An error of the disk has an errno. The OSErrors of gzip and bz2 for bad data have none.
        is_of_disk = isinstance(exn, OSError) and exn.errno is not None
        if is_of_disk:
            raise
        if any(words in str(exn) for words in _TOO_MUCH_MEMORY):
            limit = size(_MAX_MEMORY_BYTES)
            raise UnsupportedShardError(
                f"decompressing the {codec.value} data needs more than {limit} of memory",
                url=url,
            ) from exn
        raise CorruptShardError(
            f"the {codec.value} data cannot be decompressed ({exn})",
            url=url,
            remedy="check that the file's suffix matches its compression, then write and upload "
            "it again",
        ) from exn
