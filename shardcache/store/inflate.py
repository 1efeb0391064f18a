"""Decompression of shards on arrival: readers map shards into memory, which only works for plain tars."""

from __future__ import annotations

import bz2
import enum
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast
from urllib.parse import urlsplit

from shardcache.access.urls import WEB, protocol_of
from shardcache.checksums import crc32c
from shardcache.errors import CorruptShardError, TruncatedShardError, UnsupportedShardError
from shardcache.store.disk import disk_errors
from shardcache.units import size

if TYPE_CHECKING:
    from typing_extensions import Buffer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


# Presets of xz need at most 65 MiB, `zstd --long` 128 MiB; a header with more could exhaust the daemon's memory.
_MAX_WINDOW_LOG = 27
_MAX_MEMORY_BYTES = 129 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024
# The libraries report it only by these messages.
_TOO_MUCH_MEMORY = ("Memory usage limit exceeded", "Frame requires too much memory")


class Codec(enum.Enum):
    """A supported compression; the value is its name in messages."""

    GZIP = "gzip"
    ZSTD = "zstd"
    BZIP2 = "bzip2"
    XZ = "xz"

    def open(self, path: Path) -> BinaryIO:
        """Return the decompressed stream of a file, with all its members or frames concatenated.

        Read it within `codec_errors`.
        """
        return cast(BinaryIO, _OPENERS[self](path))


class _XzStreams(io.RawIOBase):
    """Decompressed bytes of all streams of an .xz file, as from `lzma.open`, but with a memory limit."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "rb")  # noqa: SIM115  # closed by `close`
        self._input = b""
        self._begin()

    def _begin(self) -> None:
        self._decoder = lzma.LZMADecompressor(memlimit=_MAX_MEMORY_BYTES)

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        while True:
            if self._decoder.eof and not self._next_stream():
                return 0
            if self._decoder.needs_input and not self._input:
                self._input = self._file.read(_CHUNK_BYTES)
                if not self._input:
                    raise EOFError("the file ends before its end marker")
            piece, self._input = self._decoder.decompress(self._input, len(view)), b""
            if piece:
                view[: len(piece)] = piece
                return len(piece)

    def _next_stream(self) -> bool:
        """Move to the next stream, skipping zero padding; return False if there is none."""
        self._input = self._decoder.unused_data.lstrip(b"\0")
        while not self._input and (data := self._file.read(_CHUNK_BYTES)):
            self._input = data.lstrip(b"\0")
        if self._input:
            self._begin()
        return bool(self._input)


def _open_xz(path: Path) -> BinaryIO:
    return io.BufferedReader(_XzStreams(path), _CHUNK_BYTES)


def _open_zstd(path: Path) -> object:
    return zstd.open(path, options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})


_OPENERS: dict[Codec, Callable[[Path], object]] = {
    Codec.GZIP: gzip.open,
    Codec.ZSTD: _open_zstd,
    Codec.BZIP2: bz2.open,
    Codec.XZ: _open_xz,
}
_SUFFIXES = {
    ".tar.gz": Codec.GZIP,
    ".tgz": Codec.GZIP,
    ".tar.zst": Codec.ZSTD,
    ".tar.bz2": Codec.BZIP2,
    ".tar.xz": Codec.XZ,
}


def codec_of(url: str) -> Codec | None:
    """Return the compression of the shard at `url`, by its suffix; None for a plain tar.

    The query of an http url is not part of the name; in other urls `?` is.
    """
    name = (urlsplit(url).path if protocol_of(url) in WEB else url).lower()
    return next((codec for suffix, codec in _SUFFIXES.items() if name.endswith(suffix)), None)


def inflate(
    src: Path, dst: Path, codec: Codec, part_bytes: int, reserve: Callable[[int], None], url: str | None = None
) -> tuple[int, list[int]]:
    """Decompress `src` into `dst`, one piece of `part_bytes` in memory at a time. Blocks.

    Args:
        reserve: called with the size of each piece before it is written; an exception from it stops the work, so that a
            decompression bomb is limited to the cache's capacity.
        url: url for error messages.

    Returns:
        The size of `dst` in bytes and the CRC32C of each of its pieces, for `first_damaged_piece`.

    Raises:
        TruncatedShardError: `src` ends early.
        UnsupportedShardError: decompressing `src` needs more memory than one shard is allowed.
        CorruptShardError: `src` is damaged, or its compression differs from its suffix.
        DiskFullError, CacheDirError: the cache's disk fails.
    """
    size_bytes, crcs = 0, []
    with disk_errors(dst), open(dst, "wb") as file:
        for piece in _pieces(src, codec, part_bytes, url):
            reserve(len(piece))
            file.write(piece)
            size_bytes += len(piece)
            crcs.append(crc32c(piece, 0))
    return size_bytes, crcs


def _pieces(src: Path, codec: Codec, part_bytes: int, url: str | None) -> Iterator[bytes]:
    with codec_errors(codec, url), codec.open(src) as stream:
        while piece := stream.read(part_bytes):
            yield piece


@contextmanager
def codec_errors(codec: Codec, url: str | None) -> Iterator[None]:
    """Translate what the libraries raise into TruncatedShardError, UnsupportedShardError or CorruptShardError."""
    try:
        yield
    except EOFError as exn:
        raise TruncatedShardError(f"the {codec.value} data ends early", url=url) from exn
    except (OSError, zlib.error, lzma.LZMAError, zstd.ZstdError) as exn:
        if isinstance(exn, OSError) and exn.errno is not None:
            raise  # a disk error; for bad data, gzip and bz2 raise an OSError without errno
        if any(words in str(exn) for words in _TOO_MUCH_MEMORY):
            raise UnsupportedShardError(
                f"decompressing the {codec.value} data needs more than {size(_MAX_MEMORY_BYTES)} of memory", url=url
            ) from exn
        raise CorruptShardError(
            f"the {codec.value} data cannot be decompressed ({exn})",
            url=url,
            remedy="check that the file's suffix matches its compression, then write and upload it again",
        ) from exn
