"""Interrupted downloads go on from their sound parts; compressed shards are inflated."""

import bz2
import gzip
import lzma
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from awscrt import checksums

from shardcache.errors import (
    CapacityError,
    CorruptShardError,
    DiskFullError,
    ShardError,
    TruncatedShardError,
    UnsupportedShardError,
)
from shardcache.origin.objects import RemoteObject
from shardcache.shared.formats.zstd_library import zstd_library
from shardcache.store.codecs import Codec, codec_of, inflate
from shardcache.store.disk.file_operations import allocated_or_zero
from shardcache.store.disk.holes import punch_hole
from shardcache.store.folder.layout import Layout
from shardcache.store.indexing.indexer import IndexRequest, index_shard
from shardcache.store.partial import Partial
from shardcache.store.parts_journal import resume_journal
from shardcache.transport.between.checksums import crc32c
from shardcache.transport.between.parts import write_parts
from support.shards.stores import open_store
from support.shards.tars import make_tar, random_samples, with_window

PART_BYTES = 4096
DATA = random.Random(7).randbytes(5 * PART_BYTES + 100)
OBJECT = RemoteObject("s3://bucket/shard.tar", '"v1"', len(DATA))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    store = open_store(tmp_path)
    store.close()
    return store.layout


def write_some(partial: Partial, *indices: int) -> None:
    for index in indices:
        start = index * partial.part_bytes
        piece = DATA[start : start + partial.part_bytes]
        for sums in write_parts(partial.parts(index, 1), piece):
            partial.mark_finished(sums)


def test_parts_in_any_order_make_the_whole(layout: Layout) -> None:
    """Parts land in space taken beforehand, with the checksums of the pieces."""
    partial = Partial.open(layout, OBJECT, PART_BYTES)
    stat = partial.path.stat()
    assert stat.st_size == len(DATA)
    assert stat.st_blocks * 512 >= len(DATA), "a disk may fill up later"
    assert partial.missing() == [0, 1, 2, 3, 4, 5]
    write_some(partial, 5, 0, 3, 1, 4, 2)
    assert partial.missing() == []
    assert partial.path.read_bytes() == DATA
    assert partial.crcs() == [
        checksums.crc32c(DATA[at : at + PART_BYTES]) for at in range(0, len(DATA), PART_BYTES)
    ]


def test_finished_bytes_are_those_of_the_object(layout: Layout) -> None:
    """The last part is shorter than the others."""
    partial = Partial.open(layout, OBJECT, PART_BYTES)
    write_some(partial, 5)
    assert partial.done_bytes == 100
    write_some(partial, 0)
    assert partial.done_bytes == PART_BYTES + 100


def test_a_damaged_part_is_fetched_again(layout: Layout) -> None:
    """Claimed parts are checked, as a journal may exceed the disk after a power loss."""
    partial = Partial.open(layout, OBJECT, PART_BYTES)
    write_some(partial, 0, 1, 2)
    with open(partial.path, "r+b") as file:
        os.pwrite(file.fileno(), b"\0" * PART_BYTES, PART_BYTES)
    assert Partial.open(layout, OBJECT, PART_BYTES).missing() == [1, 3, 4, 5]


def test_a_torn_record_is_ignored(layout: Layout) -> None:
    """A journal cut in the middle of a record counts only whole ones, and goes on aligned."""
    partial = Partial.open(layout, OBJECT, PART_BYTES)
    write_some(partial, 0, 1)
    os.truncate(partial.journal_path, partial.journal_path.stat().st_size - 3)
    again = Partial.open(layout, OBJECT, PART_BYTES)
    assert again.missing() == [1, 2, 3, 4, 5]
    write_some(again, 1, 2)
    assert Partial.open(layout, OBJECT, PART_BYTES).missing() == [3, 4, 5]


@pytest.mark.parametrize("title", [b"", b"nonsense", b"7", b"[]", b"{}", b"[" * 100_000])
def test_damaged_title_starts_over(layout: Layout, title: bytes) -> None:
    """The parts may be those of any object, so they are fetched again."""
    partial = Partial.open(layout, OBJECT, PART_BYTES)
    write_some(partial, 0, 1)
    records = partial.journal_path.read_bytes().partition(b"\n")[2]
    partial.journal_path.write_bytes(title + b"\n" + records)
    assert Partial.recover(layout, partial.key) is None
    assert len(Partial.open(layout, OBJECT, PART_BYTES).missing()) == 6


def test_parts_keep_the_size_that_they_were_fetched_in(layout: Layout) -> None:
    """A download goes on with what is there, whatever the size of new ones is by then."""
    write_some(Partial.open(layout, OBJECT, PART_BYTES), 0, 1)
    partial = Partial.open(layout, OBJECT, 2 * PART_BYTES)
    assert partial.part_bytes == PART_BYTES
    assert partial.missing() == [2, 3, 4, 5]


def test_file_that_readers_may_still_open_is_told_from_the_next_one(layout: Layout) -> None:
    """Filesystems reuse the inodes by which readers know files, so a new one differs."""
    before = Partial.open(layout, OBJECT, PART_BYTES, is_sparse=True)
    granted = {before.inode}
    before.path.unlink()
    after = Partial.open(layout, OBJECT, PART_BYTES, is_sparse=True, granted_inodes=granted)
    assert after.inode not in granted
    # Its parts are given up one by one, so nobody else may have it.
    third = Partial.open(layout, OBJECT, PART_BYTES, is_sparse=True, granted_inodes={after.inode})
    assert third.inode != after.inode
    # A transfer of the whole gives up none.
    write_some(third, 2)
    whole = Partial.open(layout, OBJECT, PART_BYTES, granted_inodes={third.inode})
    assert whole.inode == third.inode
    assert list(whole.done) == [2]


def test_journal_of_parts_that_come_and_go_stays_short(layout: Layout) -> None:
    """The length depends only on parts in the file, which a later daemon finds."""
    partial = Partial.open(layout, OBJECT, PART_BYTES, is_sparse=True)
    write_some(partial, 0, 4)
    lengths = []
    for _ in range(2000):
        write_some(partial, 2)
        del partial.done[2]
        partial.free_part(2)
        lengths.append(partial.journal_path.stat().st_size)
    assert max(lengths) < 8192
    write_some(partial, 3)
    again = Partial.open(layout, OBJECT, PART_BYTES, is_sparse=True)
    assert again.unchecked == partial.done
    assert sorted(again.sound_parts(list(again.unchecked))) == [0, 3, 4]


BLOCK_BYTES = 4096


def punch(partial: Partial, start: int, size_bytes: int = BLOCK_BYTES) -> None:
    """Leave a hole in the file, as bytes do that never reached the disk."""
    with open(partial.path, "r+b") as file:
        punch_hole(file.fileno(), start, size_bytes)


def restarted(layout: Layout, partial: Partial, *, is_opened: bool) -> Partial:
    """Return the partial of a later daemon: opened for a range, or found at the start."""
    if is_opened:
        return Partial.open(layout, partial.obj, PART_BYTES, is_file=True, is_sparse=True)
    found = Partial.recover(layout, partial.key)
    assert found is not None
    return found


@pytest.mark.parametrize("is_opened", [False, True])
def test_part_that_never_reached_the_disk_is_not_kept(layout: Layout, is_opened: bool) -> None:
    """The journal may have, after a power loss, so it is told; a hole takes no space."""
    part_bytes = 2 * BLOCK_BYTES
    partial = Partial.open(layout, OBJECT, part_bytes, is_file=True, is_sparse=True)
    write_some(partial, 0, 1, 2)
    punch(partial, 0, part_bytes)
    punch(partial, part_bytes + BLOCK_BYTES)

    again = restarted(layout, partial, is_opened=is_opened)

    assert list(again.unchecked) == [2]
    assert allocated_or_zero(partial.path) == 2 * BLOCK_BYTES  # of a part that ends in the second
    assert list(resume_journal(partial.journal_path, partial.part_count)) == [2]


@pytest.mark.parametrize("is_opened", [False, True])
def test_zeros_that_the_filesystem_keeps_as_a_hole_are_kept(
    layout: Layout, is_opened: bool
) -> None:
    """Filesystems that compress do so, and copies of a cache folder by `cp`."""
    obj = replace(OBJECT, size_bytes=4 * BLOCK_BYTES)
    partial = Partial.open(layout, obj, 2 * BLOCK_BYTES, is_file=True, is_sparse=True)
    for sums in write_parts(partial.parts(0, 1), bytes(2 * BLOCK_BYTES)):
        partial.mark_finished(sums)
    for sums in write_parts(partial.parts(1, 1), DATA[:BLOCK_BYTES] + bytes(BLOCK_BYTES)):
        partial.mark_finished(sums)
    punch(partial, 0, 2 * BLOCK_BYTES)
    punch(partial, 3 * BLOCK_BYTES)

    again = restarted(layout, partial, is_opened=is_opened)

    assert again.unchecked == partial.done
    assert again.sound_parts([0, 1]) == {0, 1}


def test_another_version_starts_over(layout: Layout) -> None:
    """Its parts are never mixed in."""
    write_some(Partial.open(layout, OBJECT, PART_BYTES), 0, 1)
    other = RemoteObject(OBJECT.url, '"v2"', len(DATA))
    assert len(Partial.open(layout, other, PART_BYTES).missing()) == 6


zstd = zstd_library()

URL = "s3://bucket/train-000000.tar.gz"
PIECE_BYTES = 1 << 14
COMPRESS: dict[Codec, Callable[[bytes], bytes]] = {
    Codec.GZIP: gzip.compress,
    # With a content checksum, as the zstd program writes; without one, zstd cannot tell damage from
    # data.
    Codec.ZSTD: lambda data: zstd.compress(
        data, options={zstd.CompressionParameter.checksum_flag: 1}
    ),
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
    return tmp_path / "shard.tar"


def run(
    compressed: bytes, dst: Path, codec: Codec, reserve: Callable[[int], None] | None = None
) -> list[int]:
    """Inflate some bytes into `dst` and return the checksums."""
    src = dst.with_suffix(".part")
    src.write_bytes(compressed)
    size_bytes, crcs = inflate(src, dst, codec, PIECE_BYTES, reserve or Reservation(dst), URL)
    assert size_bytes == dst.stat().st_size
    return crcs


def index(tar: Path) -> None:
    header = {"size_bytes": tar.stat().st_size}
    index_shard(IndexRequest(str(tar), str(tar.with_suffix(".idx")), header, URL, True, 1 << 20))


@pytest.mark.parametrize("codec", list(COMPRESS))
def test_inflated_shard_is_the_tar_that_was_compressed(dst: Path, codec: Codec) -> None:
    """Every codec gives the tar back in reserved space, with the store's checksums."""
    reservation = Reservation(dst)
    crcs = run(COMPRESS[codec](TAR), dst, codec, reservation)
    assert dst.read_bytes() == TAR
    assert reservation.reserved_bytes == len(TAR)
    assert crcs == [crc32c(TAR[at : at + PIECE_BYTES], 0) for at in range(0, len(TAR), PIECE_BYTES)]


@pytest.mark.parametrize("codec", list(COMPRESS))
def test_several_members_are_joined(dst: Path, codec: Codec) -> None:
    """Files by pigz, bgzip, pzstd and pbzip2, or joined by cat, are read to the end."""
    pieces = [TAR[at : at + 20_000] for at in range(0, len(TAR), 20_000)]
    run(b"".join(map(COMPRESS[codec], pieces)), dst, codec)
    assert dst.read_bytes() == TAR


@pytest.mark.slow
@pytest.mark.parametrize("codec", list(COMPRESS))
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
    """The tar's own end tells what the compression cannot."""
    pieces = [gzip.compress(TAR[:20_480]), gzip.compress(TAR[20_480:])]
    run(pieces[0], dst, Codec.GZIP)
    with pytest.raises(TruncatedShardError):
        index(dst)


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@pytest.mark.parametrize("codec", list(COMPRESS))
def test_data_other_than_a_compressed_tar_is_an_error(dst: Path, codec: Codec) -> None:
    """Nothing, a changed byte or a plain tar is refused; a tar's remedy is its name."""
    with pytest.raises(TruncatedShardError):
        run(b"", dst, codec)
        index(dst)  # some decompress nothing to nothing
    for data in (flipped(COMPRESS[codec](TAR)), TAR):
        with pytest.raises(CorruptShardError, match="cannot be decompressed") as caught:
            run(data, dst, codec)
        assert caught.value.url == URL
        assert "suffix" in caught.value.remedy


@pytest.mark.parametrize("codec", list(COMPRESS))
def test_a_bomb_is_stopped_at_the_limit(dst: Path, codec: Codec) -> None:
    """A small file that would fill the disk writes no byte past what was granted."""
    with pytest.raises(CapacityError):
        run(
            COMPRESS[codec](bytes(4 << 20)),
            dst,
            codec,
            Reservation(dst, limit_bytes=10 * PIECE_BYTES),
        )
    assert dst.stat().st_size <= 10 * PIECE_BYTES


@pytest.mark.parametrize("codec", [Codec.XZ, Codec.ZSTD])
def test_a_window_that_takes_much_memory_is_refused(dst: Path, codec: Codec) -> None:
    """A header that asks for 64 MiB passes, and 512 MiB is refused with a remedy."""
    run(with_window(codec, TAR, 26), dst, codec)
    assert dst.read_bytes() == TAR
    with pytest.raises(UnsupportedShardError, match="needs more than 135") as caught:
        run(with_window(codec, TAR, 29), dst, codec)
    assert caught.value.url == URL
    assert "smaller window" in caught.value.remedy


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
        inflate(src, Path("/dev/full"), Codec.GZIP, PIECE_BYTES, lambda size_bytes: None, URL)


@pytest.mark.parametrize(
    ("url", "codec"),
    [
        ("s3://bucket/a.tar", None),
        ("s3://bucket/a.tar.gz", Codec.GZIP),
        ("s3://bucket/a.TGZ", Codec.GZIP),
        ("file:///data/a.tar.zst", Codec.ZSTD),
        ("gs://bucket/a.Tar.Bz2", Codec.BZIP2),
        ("s3://bucket/a.tar.xz", Codec.XZ),
        ("s3://bucket/a.txz", Codec.XZ),
        ("s3://bucket/a.TBZ2", Codec.BZIP2),
        ("s3://bucket/a.tbz", Codec.BZIP2),
        ("s3://bucket/a.tar.zstd", Codec.ZSTD),
        ("s3://bucket/a.tzst", Codec.ZSTD),
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
