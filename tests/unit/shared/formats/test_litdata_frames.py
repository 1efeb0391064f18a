"""Chunks of LitData whose samples are compressed by hundreds, sound and damaged."""

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import CorruptShardError, ShardError
from shardcache.shared.formats.chunks.litdata_chunks import LITDATA
from shardcache.shared.formats.zstd_library import zstd_library
from support import TESTS
from support.cases import first_quick

zstd = zstd_library()

DATA = TESTS / "data/formats/litdata"
URL = "s3://bucket/set/chunk-0-0.bin"
FRAMED = (DATA / "framed/chunk-0-0.bin").read_bytes()
PLAIN = (DATA / "unframed/chunk-0-0.bin").read_bytes()


def copied(folder: Path, data: bytes) -> bytes | None:
    """Return what is cached of a chunk; None for the chunk itself."""
    path = folder / "chunk"
    path.write_bytes(data)
    stream = LITDATA.stored_copy(path, URL)
    if stream is None:
        return None
    with stream:
        return stream.read()


def test_frames_are_cached_as_the_plain_chunk(tmp_path: Path) -> None:
    """Byte for byte what LitData writes of the same samples without compression."""
    assert copied(tmp_path, FRAMED) == PLAIN
    assert copied(tmp_path, PLAIN) is None


@given(st.integers(8, len(FRAMED) - 1), st.integers(0, 255))
def test_changed_byte_is_found_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    place: int,
    value: int,
) -> None:
    """Behind the magic; no number in the file is trusted."""
    data = bytearray(FRAMED)
    data[place] = value
    try:
        found = copied(tmp_path_factory.mktemp("frames"), bytes(data))
    except ShardError as exn:
        assert exn.url == URL
        return
    assert found is not None
    assert len(found) == len(PLAIN)


@given(st.integers(8, len(FRAMED) - 1))
def test_every_cut_is_noticed(tmp_path_factory: pytest.TempPathFactory, size_bytes: int) -> None:
    """Wherever a chunk ends early."""
    with pytest.raises(ShardError):
        copied(tmp_path_factory.mktemp("frames"), FRAMED[:size_bytes])


LARGE_BYTES = 64 * 1024**2


def of_one_sample(frame: bytes, plain_bytes: int) -> bytes:
    """Return a chunk with one frame that holds one sample of a stated size."""
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, 1, 1, 1)
    offsets = struct.pack("<2I", 0, plain_bytes)
    start = len(head) + len(offsets) + struct.calcsize("<IIQII")
    return head + offsets + struct.pack("<IIQII", 0, 1, start, len(frame), plain_bytes) + frame


def test_large_frame_is_decompressed_piece_by_piece(tmp_path: Path) -> None:
    """A chunk is copied in the daemon's own process, whose memory is limited."""
    (tmp_path / "chunk").write_bytes(of_one_sample(zstd.compress(bytes(LARGE_BYTES)), LARGE_BYTES))
    tracemalloc.start()
    try:
        stream = LITDATA.stored_copy(tmp_path / "chunk", URL)
        assert stream is not None
        with stream:
            size_bytes = sum(map(len, iter(lambda: stream.read(1024**2), b"")))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size_bytes == LARGE_BYTES + struct.calcsize("<3I")
    assert peak_bytes < LARGE_BYTES / 8


@pytest.mark.parametrize("bits", first_quick([6, 3, 4, 5, 7, 8], 3))
def test_frame_of_any_ratio_of_compression_is_decompressed(tmp_path: Path, bits: int) -> None:
    """Also if a piece of the frame ends just where a piece of its content does."""
    alphabet = bytes(byte % 2**bits for byte in range(256))
    data = random.Random(0).randbytes(2 * 1024**2).translate(alphabet)
    chunk = of_one_sample(zstd.compress(data), len(data))
    cached = copied(tmp_path, chunk)
    assert cached is not None
    assert cached[struct.calcsize("<3I") :] == data


@pytest.mark.parametrize(
    "stated_bytes", first_quick([0, 1, LARGE_BYTES - 1, LARGE_BYTES + 1, 2**32 - 1], 2)
)
def test_frame_of_another_size_is_refused(tmp_path: Path, stated_bytes: int) -> None:
    """A bomb is not written to the disk beyond what it states, nor read beyond 4 GiB."""
    with pytest.raises(CorruptShardError, match=r"size|4 GiB"):
        copied(tmp_path, of_one_sample(zstd.compress(bytes(LARGE_BYTES)), stated_bytes))
