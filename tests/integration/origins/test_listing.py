"""Patterns, prefixes and index files against stores that are really there."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardcache.errors import ConfigError, NotFoundError, OriginError
from shardcache.origin.listing import expand
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from support.stores.buckets import Bucket
from support.stores.faulty_s3 import FaultyS3

KEYS = ("train/b.tar", "train/a.tar", "train/sub/c.tar.gz", "train/index.json", "training.tar", "val/a.tar")


def urls(shards: list[ShardRef]) -> list[str]:
    """Return the shards' urls."""
    return [shard.url for shard in shards]


@pytest.fixture
def bucket(moto: Bucket) -> Bucket:
    """A bucket with a small dataset."""
    for key in KEYS:
        moto.put(key, key.encode())
    return moto


async def test_a_prefix_takes_the_shards_below_it(bucket: Bucket, origins: Origins) -> None:
    """All folders below, sorted, with version and size as `stat` gives them; no other files, no other prefixes."""
    shards = await expand(f"{bucket.url}/train/", origins)
    assert urls(shards) == [f"{bucket.url}/train/{name}" for name in ("a.tar", "b.tar", "sub/c.tar.gz")]
    obj = await origins.origin(bucket.url).stat(shards[0].url)
    assert (shards[0].version, shards[0].size_bytes) == (obj.version, obj.size_bytes)


async def test_a_glob_takes_what_matches(bucket: Bucket, origins: Origins) -> None:
    """Within one folder or across, whatever the suffix."""
    assert urls(await expand(f"{bucket.url}/train/*.tar", origins)) == [
        f"{bucket.url}/train/a.tar",
        f"{bucket.url}/train/b.tar",
    ]
    assert urls(await expand(f"{bucket.url}/**/a.tar", origins)) == [
        f"{bucket.url}/train/a.tar",
        f"{bucket.url}/val/a.tar",
    ]
    assert urls(await expand(f"{bucket.url}/train/*.js?n", origins)) == [f"{bucket.url}/train/index.json"]


async def test_a_listing_longer_than_a_page_is_whole(seaweedfs: Bucket, origins: Origins) -> None:
    """A store gives a thousand keys at a time; each page is reported."""
    names = [f"s/{number:04}.tar" for number in range(1001)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: seaweedfs.put(name, b"x"), names))
    pages: list[int] = []
    shards = await expand(f"{seaweedfs.url}/s/", origins, pages.append)
    assert urls(shards) == [f"{seaweedfs.url}/{name}" for name in names]
    assert pages == [1000, 1]


async def test_a_list_keeps_its_order(bucket: Bucket, origins: Origins) -> None:
    """Patterns of every kind, one after the other, braces before globs."""
    shards = await expand([f"{bucket.url}/{{val,train}}/[a]*", f"{bucket.url}/x-{{1..2}}.tar"], origins)
    assert urls(shards) == [f"{bucket.url}/{name}" for name in ("val/a.tar", "train/a.tar", "x-1.tar", "x-2.tar")]


async def test_urls_and_braces_need_no_request(faulty: FaultyS3, origins: Origins) -> None:
    """Urls without a pattern are taken as they are: not one request."""
    assert await expand("s3://faulty/x-{00..02}.tar", origins) == [
        ShardRef(f"s3://faulty/x-{number:02}.tar") for number in range(3)
    ]
    assert faulty.seen == []


@pytest.mark.parametrize("place", ["s3", "http", "file"])
async def test_an_index_file_names_its_shards(place: str, faulty: FaultyS3, tmp_path: Path, origins: Origins) -> None:
    """From S3, the web and local disk: urls beside the index, counts and sizes from it."""
    data = json.dumps({"shardlist": [{"url": "b.tar", "nsamples": 7}, {"url": "a.tar"}]}).encode()
    (tmp_path / "index.json").write_bytes(data)
    index = {
        "s3": faulty.put("d/index.json", data),
        "http": faulty.http_url("d/index.json"),
        "file": f"file://{tmp_path}/index.json",
    }[place]
    base = index.removesuffix("index.json")
    assert await expand(index, origins) == [ShardRef(f"{base}b.tar", None, None, 7), ShardRef(f"{base}a.tar")]


@pytest.mark.parametrize("pattern", ["/none/", "/train/*.zip", "/train/sub/[x].tar"])
async def test_a_pattern_that_matches_nothing_is_named(pattern: str, bucket: Bucket, origins: Origins) -> None:
    """An empty dataset is never what was meant."""
    with pytest.raises(NotFoundError, match="no shard matches") as missing:
        await expand([f"{bucket.url}/train/", bucket.url + pattern], origins)
    assert missing.value.url == bucket.url + pattern
    assert missing.value.remedy


async def test_nonsense_is_refused(bucket: Bucket, origins: Origins) -> None:
    """No url at all, an index that is none, an index that is missing, a folder of another store's."""
    with pytest.raises(NotFoundError):
        await expand([], origins)
    with pytest.raises(ConfigError):
        await expand("", origins)
    with pytest.raises(OriginError, match="not an index"):
        await expand(f"{bucket.url}/train/index.json", origins)
    with pytest.raises(NotFoundError):
        await expand(f"{bucket.url}/val/index.json", origins)
