"""The reader gives the samples that were packed, as copies, and leaves nothing behind."""

import gc
import os
from contextlib import closing
from pathlib import Path

import pytest

from shardcache.errors import CacheDirError, CorruptShardError, SampleError
from shardcache_client.reading.leased.shards import MappedShard, ShardPlace
from support.shards.tars import make_tar, pack, published, random_samples

URL = "s3://bucket/train-000000.tar"
SAMPLES = random_samples(20, {"jpg": 3000, "json": 40, "cls": 1})


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, Path]:
    """Paths of a published shard."""
    return published(tmp_path / "shard.tar", make_tar(SAMPLES), URL)


def open_files() -> int:
    """Return this process's count of descriptors, without those of earlier tests."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_bad_sample_has_its_own_error(tmp_path: Path) -> None:
    """The error has key and url; samples before and behind it can still be had."""
    tar = pack([("a.jpg", b"1"), ("b.jpg", b"2"), ("b.jpg", b"3"), ("c.jpg", b"4")])
    shard = published(tmp_path / "shard.tar", tar, URL)
    with closing(MappedShard(ShardPlace(*shard), URL)) as reader:
        samples = reader.samples()
        assert next(samples)["__key__"] == "a"
        with pytest.raises(SampleError, match="'b' has two members") as caught:
            next(samples)
        assert caught.value.url == URL
        assert "rewrite the shard" in caught.value.remedy
        with pytest.raises(SampleError):
            reader.cutter()(1)
        assert [sample["jpg"] for sample in reader.samples(2)] == [b"4"]


def test_an_unlinked_shard_can_be_read_to_its_end(shard: tuple[Path, Path]) -> None:
    """A mapped shard stays mapped until it is let go; samples are copies, which outlive it."""
    with closing(MappedShard(ShardPlace(*shard), URL)) as reader:
        for path in shard:
            path.unlink()
        samples = list(reader.samples())
    assert samples == [{**sample, "__url__": URL} for sample in SAMPLES]


def test_closing_gives_everything_back(shard: tuple[Path, Path]) -> None:
    """No descriptor or mapping is left, and an iterator in use ends in ValueError."""
    before = open_files()
    reader = MappedShard(ShardPlace(*shard), URL)
    assert open_files() <= before + 2  # Python keeps one for each map
    samples = reader.samples()
    next(samples)
    reader.close()
    reader.close()
    assert str(shard[0]) not in Path("/proc/self/maps").read_text()
    with pytest.raises(ValueError, match=r"closed|released"):
        next(samples)
    assert open_files() == before


@pytest.mark.parametrize("missing", [0, 1])
def test_cache_invisible_to_this_process_is_reported(
    shard: tuple[Path, Path], missing: int
) -> None:
    """As in a container without the mount: the error names the file and the remedy."""
    shard[missing].unlink()
    before = open_files()
    with pytest.raises(CacheDirError, match=shard[missing].name) as caught:
        MappedShard(ShardPlace(*shard), URL)
    assert caught.value.url == URL
    assert "mount" in caught.value.remedy
    assert open_files() == before


@pytest.mark.parametrize(
    ("truncated", "size_bytes", "text"),
    [pytest.param(0, 5120, "5120 bytes instead of", marks=pytest.mark.slow), (1, 100, "sidecar")],
)
def test_a_damaged_file_names_the_shard(
    shard: tuple[Path, Path], truncated: int, size_bytes: int, text: str
) -> None:
    """Sizes are compared before any read, and the sidecar's error gets its shard's url."""
    os.truncate(shard[truncated], size_bytes)
    before = open_files()
    with pytest.raises(CorruptShardError, match=text) as caught:
        MappedShard(ShardPlace(*shard), URL)
    assert caught.value.url == URL
    assert open_files() == before
