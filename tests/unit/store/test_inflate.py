"""Compressed shards become the very tar that was compressed, or a typed error."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache.checksums import crc32c
from shardcache.errors import (
    CapacityError,
    CorruptShardError,
    DiskFullError,
    ShardError,
    TruncatedShardError,
    UnsupportedShardError,
)
from shardcache.store.indexing import IndexRequest, index_shard
from shardcache.store.partial import Codec, codec_of, inflate
from support.shards.tars import make_tar, random_samples, with_window

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

URL = "s3://bucket/train-000000.tar.gz"
PART_BYTES = 1 << 14
COMPRESS: dict[Codec, Callable[[bytes], bytes]] = {
    Codec.GZIP: gzip.compress,
    # With a content checksum, as the zstd program writes; without one, zstd cannot tell damage from data.
    Codec.ZSTD: lambda data: zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}),
    Codec.BZIP2: bz2.compress,
    Codec.XZ: lzma.compress,
}
TAR = make_tar(random_samples(50))


class Reservation:
    """Counts what was reserved, and refuses to pass a limit."""

    def __init__(self, dst: Path, limit_bytes: int = 1 << 40) -> None:
        self.dst = dst
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0

    def __call__(self, size_bytes: int) -> None:
        """Reserve; check on the way that the file never ran ahead of what was reserved."""
        assert self.dst.stat().st_size <= self.reserved_bytes
        if self.reserved_bytes + size_bytes > self.limit_bytes:
            raise CapacityError("too large")
        self.reserved_bytes += size_bytes


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    """Where the plain tar goes."""
    return tmp_path / "shard.tar"


def run(compressed: bytes, dst: Path, codec: Codec, reserve: Callable[[int], None] | None = None) -> list[int]:
    """Inflate some bytes into `dst` and return the checksums."""
    src = dst.with_suffix(".part")
    src.write_bytes(compressed)
    size_bytes, crcs = inflate(src, dst, codec, PART_BYTES, reserve or Reservation(dst), URL)
    assert size_bytes == dst.stat().st_size
    return crcs


def index(tar: Path) -> None:
    """Index a file."""
    header = {"size_bytes": tar.stat().st_size}
    index_shard(IndexRequest(str(tar), str(tar.with_suffix(".idx")), header, URL, True, 1 << 20))


@pytest.mark.parametrize("codec", Codec)
def test_inflated_shard_is_the_tar_that_was_compressed(dst: Path, codec: Codec) -> None:
    """Every codec gives the tar back, all of it reserved, with checksums that the store can verify it by."""
    reservation = Reservation(dst)
    crcs = run(COMPRESS[codec](TAR), dst, codec, reservation)
    assert dst.read_bytes() == TAR
    assert reservation.reserved_bytes == len(TAR)
    assert crcs == [crc32c(TAR[at : at + PART_BYTES], 0) for at in range(0, len(TAR), PART_BYTES)]


@pytest.mark.parametrize("codec", Codec)
def test_several_members_are_joined(dst: Path, codec: Codec) -> None:
    """Files by pigz, bgzip, pzstd and pbzip2, or joined by cat, are read to the end."""
    pieces = [TAR[at : at + 20_000] for at in range(0, len(TAR), 20_000)]
    run(b"".join(map(COMPRESS[codec], pieces)), dst, codec)
    assert dst.read_bytes() == TAR


@pytest.mark.parametrize("codec", Codec)
def test_every_cut_is_noticed(dst: Path, codec: Codec) -> None:
    """Compressed data that ends early never passes for a whole shard."""
    compressed = COMPRESS[codec](TAR)
    for size_bytes in [
        *range(1, 40),
        *range(40, len(compressed) - 40, 997),
        *range(len(compressed) - 40, len(compressed)),
    ]:
        with pytest.raises(ShardError) as caught:
            run(compressed[:size_bytes], dst, codec)
        assert caught.value.url == URL
        if size_bytes > 40:
            assert isinstance(caught.value, TruncatedShardError)


def test_a_cut_between_two_members_is_noticed_by_the_index(dst: Path) -> None:
    """Where the compression cannot tell, the tar's own end does."""
    pieces = [gzip.compress(TAR[:20_480]), gzip.compress(TAR[20_480:])]
    run(pieces[0], dst, Codec.GZIP)
    with pytest.raises(TruncatedShardError):
        index(dst)


@pytest.mark.parametrize("codec", Codec)
def test_an_empty_file_is_no_shard(dst: Path, codec: Codec) -> None:
    """Nothing decompresses to nothing or to an error; neither is served."""
    with pytest.raises(TruncatedShardError):
        run(b"", dst, codec)
        index(dst)


@pytest.mark.parametrize("codec", Codec)
def test_damage_is_noticed(dst: Path, codec: Codec) -> None:
    """A changed byte in the middle fails the codec's own checksum."""
    compressed = bytearray(COMPRESS[codec](TAR))
    compressed[len(compressed) // 2] ^= 0xFF
    with pytest.raises(CorruptShardError, match="cannot be decompressed") as caught:
        run(bytes(compressed), dst, codec)
    assert caught.value.url == URL


@pytest.mark.parametrize("codec", Codec)
def test_plain_tar_under_a_compressed_name_is_reported(dst: Path, codec: Codec) -> None:
    """The remedy sends the reader to the name."""
    with pytest.raises(CorruptShardError) as caught:
        run(TAR, dst, codec)
    assert "suffix" in caught.value.remedy


@pytest.mark.parametrize("codec", Codec)
def test_a_bomb_is_stopped_at_the_limit(dst: Path, codec: Codec) -> None:
    """A small file that would fill the disk writes no byte past what was granted."""
    with pytest.raises(CapacityError):
        run(COMPRESS[codec](bytes(4 << 20)), dst, codec, Reservation(dst, limit_bytes=10 * PART_BYTES))
    assert dst.stat().st_size <= 10 * PART_BYTES


@pytest.mark.parametrize("codec", [Codec.XZ, Codec.ZSTD])
def test_a_window_that_takes_much_memory_is_refused(dst: Path, codec: Codec) -> None:
    """The header asks for 64 MiB as the strongest presets do, and passes; for 512 MiB, and is refused with a remedy."""
    run(with_window(codec, TAR, 26), dst, codec)
    assert dst.read_bytes() == TAR
    with pytest.raises(UnsupportedShardError, match="needs more than 135") as caught:
        run(with_window(codec, TAR, 29), dst, codec)
    assert caught.value.url == URL and "smaller window" in caught.value.remedy


def test_streams_of_xz_are_joined_past_their_padding(dst: Path) -> None:
    """As `xz` and `pixz` write them; what follows and is no stream is not taken for the end."""
    streams = lzma.compress(TAR[:20_480]) + bytes(512_000) + lzma.compress(TAR[20_480:]) + bytes(4)
    run(streams, dst, Codec.XZ)
    assert dst.read_bytes() == TAR
    with pytest.raises(CorruptShardError):
        run(streams + b"junk that is no stream", dst, Codec.XZ)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_not_taken_for_bad_data(tmp_path: Path) -> None:
    """gzip's errors and the disk's are both OSErrors; they are told apart."""
    src = tmp_path / "shard.part"
    src.write_bytes(gzip.compress(TAR))
    with pytest.raises(DiskFullError):
        inflate(src, Path("/dev/full"), Codec.GZIP, PART_BYTES, lambda size_bytes: None, URL)


@pytest.mark.parametrize(
    ("url", "codec"),
    [
        ("s3://bucket/a.tar", None),
        ("s3://bucket/a.tar.gz", Codec.GZIP),
        ("s3://bucket/a.TGZ", Codec.GZIP),
        ("file:///data/a.tar.zst", Codec.ZSTD),
        ("gs://bucket/a.Tar.Bz2", Codec.BZIP2),
        ("s3://bucket/a.tar.xz", Codec.XZ),
        ("https://host/a.tar.gz?signature=b.tar", Codec.GZIP),
        ("https://host/a.tar?name=b.tar.gz", None),
        ("HTTP://host/a.tgz#top", Codec.GZIP),
        ("s3://bucket/what?.tar.gz", Codec.GZIP),
        ("s3://bucket/tar.gz/a.tar", None),
    ],
)
def test_the_codec_follows_from_the_name(url: str, codec: Codec | None) -> None:
    """Whatever its case; an http url's query is no part of it, an S3 key's question mark is."""
    assert codec_of(url) is codec
