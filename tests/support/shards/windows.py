"""Compressed data whose header asks for any window, without the memory that it takes to compress with that."""

from __future__ import annotations

import lzma
import sys
import zlib

from shardcache.store.inflate import Codec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_LZMA2 = b"\x21\x01"  # the filter's id, and the size of its properties
_STREAM_HEADER = 12


def with_window(codec: Codec, data: bytes, window_log: int) -> bytes:
    """Return data compressed by xz or zstd, with a window of 2**window_log bytes."""
    return (_xz if codec is Codec.XZ else _zstd)(data, window_log)


def _xz(data: bytes, window_log: int) -> bytes:
    """Change the block header (xz file format, 3.1): its dictionary's size, then its CRC32."""
    compressed = bytearray(lzma.compress(data, preset=0))
    end = _STREAM_HEADER + 4 * compressed[_STREAM_HEADER]
    compressed[compressed.index(_LZMA2, _STREAM_HEADER) + len(_LZMA2)] = 2 * (window_log - 12)
    compressed[end : end + 4] = zlib.crc32(compressed[_STREAM_HEADER:end]).to_bytes(4, "little")
    return bytes(compressed)


def _zstd(data: bytes, window_log: int) -> bytes:
    """Change the window descriptor of a frame that does not tell its content's size (RFC 8878, 3.1.1.1.2)."""
    compressor = zstd.ZstdCompressor()
    compressed = bytearray(compressor.compress(data) + compressor.flush())
    compressed[5] = (window_log - 10) << 3
    return bytes(compressed)
