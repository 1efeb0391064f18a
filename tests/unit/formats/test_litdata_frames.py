"""Chunks of LitData whose samples are compressed by hundreds, sound and damaged."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ShardError
from shardcache.formats.chunks.litdata_chunks import LITDATA

DATA = Path(__file__).parents[2] / "data/formats/litdata"
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
