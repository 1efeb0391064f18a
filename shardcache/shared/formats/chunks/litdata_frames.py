"""Chunks of LitData whose samples are compressed in groups, each a frame of zstd.

    magic           8 bytes
    version, flags  u16 each
    counts          number of samples, samples per frame, number of frames: u32 each
    offsets         u32[samples + 1]: offset of each sample, and of the end of the last one, in the
                    decompressed content of all frames, end to end
    frames          for each frame: number of its first sample u32, number of samples u32, offset in
                    the file u64, compressed size u32, plain size u32
    content         the frames

`litdata_chunks` caches a chunk of frames as a plain chunk, which is not compressed, so that its
samples are ranges of bytes.
"""

import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shardcache.shared.exceptions import (
    CorruptShardError,
    TruncatedShardError,
    UnsupportedShardError,
)
from shardcache.shared.formats.chunks.offset_table import (
    U32_BYTES,
    ForwardReader,
    are_ascending,
    u32s,
)
from shardcache.shared.formats.files import opened
from shardcache.shared.formats.streams import stream_of
from shardcache.shared.formats.zstd_library import zstd_library
from shardcache.shared.tarindex.members import Read

_MAGIC = b"LDFZ01\0\0"
_VERSION = 1
_PREFIX = struct.Struct("<8sHHIII")
_FRAME = struct.Struct("<IIQII")
_PIECE_BYTES = 256 * 1024  # maximum size of the pieces in which frames are read and decompressed
_MAX_WINDOW_LOG = 27  # a window of 128 MiB, as for shards that are compressed as a whole


class _Frame(NamedTuple):
    """An entry of the table of frames.

    Attributes:
        first_sample: number of the frame's first sample.
        samples: number of samples in the frame.
        start: offset of the frame in the file.
        stored_bytes: compressed size of the frame.
        plain_bytes: size of the frame's content.
    """

    first_sample: int
    samples: int
    start: int
    stored_bytes: int
    plain_bytes: int


def is_framed(read: Read) -> bool:
    """Return True for a chunk whose samples are compressed in frames."""
    return read(0, 0, len(_MAGIC)) == _MAGIC


def plain_chunk(path: Path, url: str) -> BinaryIO:
    """Return the stream of the plain chunk with the samples of a chunk of frames. Blocks.

    Raises CorruptShardError, TruncatedShardError, UnsupportedShardError, OSError. Reading from the
    stream may raise them, too.
    """
    with opened(path) as (read, size_bytes):
        bytes_at = ForwardReader(read, size_bytes, url)
        prefix = bytes_at(0, _PREFIX.size)
        _, version, _, sample_count, _, frame_count = _PREFIX.unpack(prefix)
        if version != _VERSION:
            raise UnsupportedShardError(
                f"zstd frames of version {version} are not supported, only {_VERSION}",
                url=url,
                remedy="update shardcache, or write the dataset without compression=",
            )
        offsets_bytes = U32_BYTES * (sample_count + 1)
        table_start = _PREFIX.size + offsets_bytes
        table_bytes = _FRAME.size * frame_count
        if table_start + table_bytes > size_bytes:
            raise TruncatedShardError(
                f"the file has {size_bytes} bytes, too few for {sample_count:,} samples in "
                f"{frame_count:,} frames",
                url=url,
            )
        offsets = u32s(bytes_at(_PREFIX.size, offsets_bytes))
        table = bytes_at(table_start, table_bytes)
        frames = [_Frame._make(fields) for fields in _FRAME.iter_unpack(table)]
    damage = _damage_of(offsets, frames, size_bytes)
    if damage is not None:
        raise CorruptShardError(damage, url=url)
    return stream_of(_plain_pieces(path, offsets, frames, url))


def _damage_of(offsets: "array[int]", frames: list[_Frame], size_bytes: int) -> str | None:
    """Return the reason why the tables are damaged; None if they are not.

    The frames have to hold all samples, one after another.
    """
    if offsets[0] or not are_ascending(offsets):
        return "the offsets of its samples are not ascending"
    next_sample = 0
    for number, frame in enumerate(frames):
        end = frame.first_sample + frame.samples
        # `offsets` has one entry more than there are samples, so `end` must be an index of it.
        if frame.first_sample != next_sample or end >= len(offsets):
            return f"its frame {number} does not begin with sample {next_sample}"
        if frame.plain_bytes != offsets[end] - offsets[next_sample]:
            return f"its frame {number} does not have the size of its samples"
        if frame.start + frame.stored_bytes > size_bytes:
            return f"its frame {number} ends after the end of the file"
        next_sample = end
    if next_sample + 1 != len(offsets):
        return f"its frames hold {next_sample} of {len(offsets) - 1} samples"
    return None


def _plain_pieces(
    path: Path, offsets: "array[int]", frames: list[_Frame], url: str
) -> Iterator[bytes]:
    """Yield the plain chunk: the header (see `offset_table`), then the samples of each frame."""
    count = len(offsets) - 1
    header_bytes = U32_BYTES + U32_BYTES * len(offsets)  # the count, then the offsets
    # The offsets in a plain chunk are u32.
    if header_bytes + offsets[-1] >= 2**32:
        raise CorruptShardError("it would have more than 4 GiB as a plain chunk", url=url)
    header = array("I", [count, *(header_bytes + offset for offset in offsets)])
    if sys.byteorder == "big":
        header.byteswap()
    yield header.tobytes()
    with opened(path) as (read, _):
        for number, frame in enumerate(frames):
            yield from _decompressed(frame, read, number, url)


def _decompressed(frame: _Frame, read: Read, number: int, url: str) -> Iterator[bytes]:
    """Yield the content of a frame in pieces of bounded size, however large the frame is.

    Args:
        frame: the frame.
        read: reads bytes of the file.
        number: number of the frame, for errors.
        url: url of the shard, for errors.
    """
    zstd = zstd_library()
    limits = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
    decoder = zstd.ZstdDecompressor(options=limits)
    at = frame.start
    end = frame.start + frame.stored_bytes
    missing_bytes = frame.plain_bytes
    while not decoder.eof:
        data = b""
        if decoder.needs_input:
            max_bytes = min(_PIECE_BYTES, end - at)
            data = read(at, 0, max_bytes)  # 0: there need not be any bytes
            if not data:
                break  # the frame ends early
            at += len(data)
        try:
            piece: bytes = decoder.decompress(data, _PIECE_BYTES)
        except zstd.ZstdError as exn:
            raise CorruptShardError(
                f"its frame {number} cannot be decompressed ({exn})", url=url
            ) from exn
        missing_bytes -= len(piece)
        if missing_bytes < 0:
            break  # the frame has more content than it states
        yield piece
    if missing_bytes or not decoder.eof:
        raise CorruptShardError(
            f"its frame {number} does not have the size that it states", url=url
        )
