"""A shard being fetched: a file that is filled part by part, a journal of its finished parts, and its decompression.

The journal is a line of JSON that identifies the object, then eight bytes per finished part (its number and CRC32C). A
record is written after its part's bytes, so after a crash the journal never claims more than the file holds; after a
power loss it may, which is why `open` verifies the claimed parts. A compressed shard is inflated once it is complete:
readers map shards into memory, which only works for plain tars.
"""

import bz2
import contextlib
import enum
import gzip
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from shardcache.errors import CorruptShardError, TruncatedShardError, UnsupportedShardError
from shardcache.origin.base import RemoteObject
from shardcache.redact import redact
from shardcache.store.disk import disk_errors, mount_of, size_or_zero, unlink_quietly
from shardcache.store.folder import JOURNAL, PART, SIDECAR, TAR, Layout, shard_key
from shardcache.store.shard import Facts
from shardcache.transport.parts import RECORD, Parts, PartSums, crc32c, write_all
from shardcache.units import size
from shardcache.url_names import compression_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_MODE = 0o640  # readers of the group may read arriving shards, regardless of the umask

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
        """Return the decompressed stream of a file, all members or frames in one; read it within `codec_errors`."""
        match self:
            case Codec.GZIP:
                return cast(BinaryIO, gzip.open(path))
            case Codec.BZIP2:
                return cast(BinaryIO, bz2.open(path))
            case Codec.ZSTD:
                return cast(
                    BinaryIO, zstd.open(path, options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})
                )
            case Codec.XZ:
                return io.BufferedReader(_XzStreams(path), _CHUNK_BYTES)


def codec_of(url: str) -> Codec | None:
    """Return the compression by the suffix of a url, without the query of an http url; None for a plain tar."""
    compression = compression_of(url)
    return Codec(compression) if compression else None


def place_of(url: str, *, is_file: bool) -> str:
    """Return what a shard or file is cached under: its url, but for a compressed shard's own bytes, which no url is."""
    return f"{url}\0" if is_file and codec_of(url) else url


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

    def readinto(self, buffer: Any) -> int:
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


def inflate(
    src: Path, dst: Path, codec: Codec, part_bytes: int, reserve: Callable[[int], None], url: str | None = None
) -> tuple[int, list[int]]:
    """Decompress `src` into `dst`; return the size of `dst` and the CRC32C of each of its pieces. Blocks.

    `reserve` is called with the size of each piece of `part_bytes` before it is written; an exception from it stops the
    work, so that a decompression bomb is limited to the cache's capacity. Raises as `codec_errors` does, and DiskError.
    """
    size_bytes, crcs = 0, []
    with disk_errors(dst), open(dst, "wb") as file, codec_errors(codec, url), codec.open(src) as stream:
        while piece := stream.read(part_bytes):
            reserve(len(piece))
            write_all(file.fileno(), memoryview(piece), size_bytes)
            size_bytes += len(piece)
            crcs.append(crc32c(piece, 0))
    return size_bytes, crcs


@contextlib.contextmanager
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


@dataclass(slots=True)
class Partial:
    """A partially fetched version of a shard in the cache folder."""

    obj: RemoteObject
    part_bytes: int  # size of every part but the last
    path: Path
    journal_path: Path
    key: str
    is_file: bool = False  # True if the object's own bytes are wanted
    inode: int = 0  # of the file at `path`; changes if the download is restarted
    done: dict[int, int] = field(default_factory=dict)  # CRC32C of each finished part, by part number

    @property
    def count(self) -> int:
        """Number of parts; 0 for an empty object."""
        return -(-self.obj.size_bytes // self.part_bytes)

    @property
    def codec(self) -> Codec | None:
        """Compression of the shard; None for a plain tar, and for a file."""
        return None if self.is_file else codec_of(self.obj.url)

    def missing(self) -> list[int]:
        """Return the numbers of the parts still to be fetched, in order."""
        return [index for index in range(self.count) if index not in self.done]

    def parts(self, first: int, count: int) -> Parts:
        """Return the description of `count` consecutive parts, for the process that writes them."""
        start = first * self.part_bytes
        size_bytes = min(count * self.part_bytes, self.obj.size_bytes - start)
        return Parts(str(self.path), str(self.journal_path), self.part_bytes, start, size_bytes)

    def record(self, sums: PartSums) -> None:
        """Mark a part as finished."""
        self.done[sums.index] = sums.crc32c

    def crcs(self) -> list[int]:
        """Return the CRC32C of every part, in order; all parts must be finished."""
        return [self.done[index] for index in range(self.count)]

    def facts(self) -> Facts:
        """Return the facts about the complete file, except for the number of samples."""
        return self._facts(self.obj.size_bytes, self.crcs())

    def inflate(self, codec: Codec, dst: Path, reserve: Callable[[int], None]) -> Facts:
        """Decompress the complete file into `dst` and return the facts about that; see the function `inflate`."""
        return self._facts(*inflate(self.path, dst, codec, self.part_bytes, reserve, self.obj.url))

    def _facts(self, size_bytes: int, crcs: list[int]) -> Facts:
        obj = self.obj
        return Facts(
            redact(obj.url), obj.version, size_bytes, obj.size_bytes, self.part_bytes, tuple(crcs), samples=None
        )

    @classmethod
    def open(cls, layout: Layout, obj: RemoteObject, part_bytes: int, *, is_file: bool = False) -> Self:
        """Create a partial, or resume that of an interrupted download. Blocks. Raises DiskError."""
        key = shard_key(place_of(obj.url, is_file=is_file), obj.version)
        path, journal = layout.in_progress(key, PART), layout.in_progress(key, JOURNAL)
        partial = cls(obj, part_bytes, path, journal, key, is_file)
        with disk_errors(path):
            if not partial._resume():
                partial._create()
            path.chmod(_MODE)
            partial.inode = path.stat().st_ino
        return partial

    def _create(self) -> None:
        unlink_quietly(self.path, self.journal_path)
        with open(self.path, "wb") as file:
            if mount_of(self.path).is_memory:  # which would be zeroed now, and written later
                file.truncate(self.obj.size_bytes)
            elif self.obj.size_bytes:
                os.posix_fallocate(file.fileno(), 0, self.obj.size_bytes)
        self.journal_path.write_bytes(self._title() + b"\n")

    def _title(self) -> bytes:
        obj = self.obj
        title = {"url": redact(obj.url), "version": obj.version, "size_bytes": obj.size_bytes}
        return json.dumps(title | {"part_bytes": self.part_bytes}).encode()

    def _resume(self) -> bool:
        if not self.obj.ranges or size_or_zero(self.path) != self.obj.size_bytes:
            return False
        try:
            title, _, records = self.journal_path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return False
        if title != self._title():
            return False
        torn_bytes = len(records) % RECORD.size
        os.truncate(self.journal_path, len(title) + 1 + len(records) - torn_bytes)
        with open(self.path, "rb", buffering=0) as file:
            for index, crc in dict(RECORD.iter_unpack(records[: len(records) - torn_bytes])).items():
                data = os.pread(file.fileno(), self.part_bytes, index * self.part_bytes)
                if index < self.count and crc32c(data, 0) == crc:
                    self.done[index] = crc
        return True


def discard(layout: Layout, key: str, *, keep_parts: bool = False) -> None:
    """Remove all unpublished files of a key, except, with `keep_parts`, those needed to resume the download. Blocks."""
    suffixes = (TAR, SIDECAR) if keep_parts else (TAR, SIDECAR, PART, JOURNAL)
    with contextlib.suppress(OSError):  # a failing disk was reported by the failed write; the next start cleans up
        unlink_quietly(*(layout.in_progress(key, suffix) for suffix in suffixes))
