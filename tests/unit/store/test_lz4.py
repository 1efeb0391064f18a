"""Tars that are compressed with LZ4, whose library is optional."""

import sys
from pathlib import Path

import pytest

from shardcache.errors import CorruptShardError, MissingPackageError, TruncatedShardError
from shardcache.store.codecs import Codec, codec_of, inflate
from support.shards.tars import make_tar, random_samples

PART_BYTES = 64 * 1024
TAR = make_tar(random_samples(20, {"jpg": 30_000}))


def inflated(data: bytes, folder: Path) -> bytes:
    """Return what a compressed file is decompressed to."""
    source = folder / "a.tar.lz4"
    source.write_bytes(data)
    inflate(source, folder / "a.tar", Codec.LZ4, PART_BYTES, lambda _: None, "s3://b/a.tar.lz4")
    return (folder / "a.tar").read_bytes()


def test_names_say_the_compression() -> None:
    """In any case, as of all compressions."""
    assert codec_of("s3://b/a.tar.lz4") is codec_of("s3://b/a.TAR.LZ4") is Codec.LZ4
    assert codec_of("s3://b/a.lz4") is None


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what to install, and for whom."""
    monkeypatch.setitem(sys.modules, "lz4", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "lz4.frame", raising=False)
    with pytest.raises(MissingPackageError) as caught:
        inflated(b"", tmp_path)
    assert "pip install lz4 for the daemon" in str(caught.value)


def test_frames_are_read_to_their_end(tmp_path: Path) -> None:
    """Of one frame or several, with a content of any size."""
    frame = pytest.importorskip("lz4.frame")
    middle = len(TAR) // 2
    assert inflated(frame.compress(TAR), tmp_path) == TAR
    assert inflated(frame.compress(TAR[:middle]) + frame.compress(TAR[middle:]), tmp_path) == TAR


def test_damaged_frames_are_typed_errors(tmp_path: Path) -> None:
    """A file that is cut short is one thing, other bytes are another."""
    frame = pytest.importorskip("lz4.frame")
    whole = frame.compress(TAR, content_checksum=True)
    for cut in (10, len(whole) // 2, len(whole) - 1):
        with pytest.raises(TruncatedShardError):
            inflated(whole[:cut], tmp_path)
    for damaged in (b"no lz4 at all" * 100, whole[:-4] + b"\0\0\0\0"):
        with pytest.raises(CorruptShardError):
            inflated(damaged, tmp_path)
