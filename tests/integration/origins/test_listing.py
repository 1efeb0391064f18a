"""Patterns, prefixes and index files against stores that are really there."""

import pytest

from shardcache.errors import ConfigError, NotFoundError, OriginError
from shardcache.origin.patterns.expansion import expand
from shardcache.origin.registry import Origins
from shardcache.shared.protocol import ShardRef
from support.stores.buckets import Bucket
from support.stores.faulty_s3 import FaultyS3

KEYS = (
    "train/b.tar",
    "train/a.tar",
    "train/sub/c.tar.gz",
    "train/index.json",
    "training.tar",
    "val/a.tar",
)


def urls(shards: list[ShardRef]) -> list[str]:
    """Return the shards' urls."""
    return [shard.url for shard in shards]


@pytest.fixture
def bucket(moto: Bucket) -> Bucket:
    """A bucket with a small dataset."""
    for key in KEYS:
        moto.put(key, key.encode())
    return moto


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        # No other files, no other prefixes.
        ("train/", ["train/a.tar", "train/b.tar", "train/sub/c.tar.gz"]),
        ("train/*.tar", ["train/a.tar", "train/b.tar"]),
        ("**/a.tar", ["train/a.tar", "val/a.tar"]),
        ("train/*.js?n", ["train/index.json"]),
        ("{val,train}/[a]*", ["val/a.tar", "train/a.tar"]),  # braces first
    ],
)
async def test_patterns_take_what_matches(
    pattern: str, names: list[str], bucket: Bucket, origins: Origins
) -> None:
    """Prefixes and globs are sorted, braces in order, and versions are those of `stat`."""
    shards = await expand(f"{bucket.url}/{pattern}", origins)
    assert urls(shards) == [f"{bucket.url}/{name}" for name in names]
    obj = await origins.origin(bucket.url).stat(f"{bucket.url}/train/a.tar")
    for shard in shards:
        if shard.url == obj.url:
            assert shard.version == obj.version
            assert shard.size_bytes == obj.size_bytes


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        pytest.param("/none/", NotFoundError, "no shard matches", marks=pytest.mark.slow),
        ("/train/*.zip", NotFoundError, "no shard matches"),
        pytest.param(
            "/train/sub/[x].tar", NotFoundError, "no shard matches", marks=pytest.mark.slow
        ),
        ("/train/index.json", OriginError, "not an index"),
        ("/val/index.json", NotFoundError, "does not exist"),
    ],
)
async def test_a_pattern_that_matches_nothing_is_named(
    pattern: str, error: type[OriginError], message: str, bucket: Bucket, origins: Origins
) -> None:
    """An empty dataset is never what was meant."""
    with pytest.raises(error, match=message) as missing:
        await expand(bucket.url + pattern, origins)
    assert missing.value.url == bucket.url + pattern
    assert missing.value.remedy


async def test_urls_and_braces_need_no_request(faulty: FaultyS3, origins: Origins) -> None:
    """Urls without a pattern are taken as they are: not one request. An empty one is an error."""
    assert list(await expand("s3://faulty/x-{00..02}.tar", origins)) == [
        ShardRef(f"s3://faulty/x-{number:02}.tar") for number in range(3)
    ]
    with pytest.raises(ConfigError):
        await expand("", origins)
    assert faulty.seen == []
