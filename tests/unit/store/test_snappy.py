"""Snappy shards, whose library is optional and decompresses a whole file in memory."""

import os
import random
import tracemalloc
from pathlib import Path

import pytest

from shardcache.errors import CorruptShardError, UnsupportedShardError
from shardcache.store.codecs import Codec, inflate

PART_BYTES = 64 * 1024
FILE_BYTES = 64 * 1024 * 1024
STATES_1_BYTE = b"\x01"
STATES_2_GIB = b"\x80\x80\x80\x80\x08"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    pytest.importorskip("cramjam")
    return tmp_path / "shard.00000.mds.snappy"


def inflated(source: Path) -> bytes:
    """Return what a compressed file is decompressed to."""
    dst = source.with_suffix("")
    inflate(source, dst, Codec.SNAPPY, PART_BYTES, lambda _: None)
    return dst.read_bytes()


def test_incompressible_data_is_decompressed(source: Path) -> None:
    """Its compressed form is larger than itself."""
    import cramjam

    for size_bytes in (0, 1, 100, 1_000_000):
        data = random.Random(size_bytes).randbytes(size_bytes)
        source.write_bytes(cramjam.snappy.compress_raw(data))
        assert source.stat().st_size > size_bytes
        assert inflated(source) == data


@pytest.mark.parametrize(
    ("start", "error"),
    [(STATES_1_BYTE, CorruptShardError), (STATES_2_GIB, UnsupportedShardError)],
)
def test_file_is_refused_by_its_size_before_it_is_read(
    source: Path, start: bytes, error: type[Exception]
) -> None:
    """A file larger than its data can be compressed, or data over the limit, is refused."""
    source.write_bytes(start)
    os.truncate(source, FILE_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(error):
            inflated(source)
        assert tracemalloc.get_traced_memory()[1] < FILE_BYTES // 8
    finally:
        tracemalloc.stop()
