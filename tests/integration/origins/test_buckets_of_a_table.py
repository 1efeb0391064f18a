"""Buckets that share an `[[origin]]` table and differ: in region, in what they take, in the way to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardcache.config import OriginTable
from shardcache.errors import OriginError
from shardcache.origin.registry import Origins
from support.network.lead import lead
from support.stores.buckets import use_aws
from support.stores.origins import read_range
from support.stores.strict_s3 import StrictS3

DATA = bytes(range(256)) * 400
HERE, THERE = "us-east-1", "eu-west-3"
READS = 5
TABLE = OriginTable.model_validate({"match": "s3://", "storage_options": {"use_ssl": False}})


@pytest.fixture
async def strict() -> AsyncIterator[StrictS3]:
    """A store with a bucket in the SDK's region, one in another, and one that takes no signed urls."""
    regions = {"near": HERE, "far": THERE, "odd": HERE}
    async with StrictS3(regions, headers_only=frozenset({"odd"})) as server:
        yield server


async def read(origins: Origins, strict: StrictS3, bucket: str) -> bool:
    """Return whether a bucket's object comes, part by part, each time by a version of its own."""
    url = strict.put(bucket, "a b+c.tar", DATA)
    origin = origins.origin(url)
    parts = [await read_range(origin, await origin.stat(url), start, start + 1000) for start in range(READS)]
    return parts == [DATA[start : start + 1000] for start in range(READS)]


def late(strict: StrictS3, bucket: str) -> list[tuple[bool, int]]:
    """Return of a bucket's later requests whether they went by signed urls, and the answers' status."""
    return [(each.by_url, each.status) for each in strict.seen if each.bucket == bucket][-READS:]


@pytest.mark.parametrize("endpoint", ["s3's own hosts", "http://minio:80", "http://minio:9000"])
async def test_each_bucket_is_asked_in_its_own_region(
    endpoint: str, strict: StrictS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One in another region is asked directly as well; one that takes no signed urls goes by the SDK, and it alone."""
    own = endpoint.startswith("s3")
    use_aws(monkeypatch, tmp_path, strict.env(None if own else endpoint))
    hosts = ["near.s3", "odd.s3", "far.s3", f"far.s3.{THERE}"] if own else []
    for name in [*(f"{host}.amazonaws.com" for host in hosts), "minio"]:
        lead(monkeypatch, name, "127.0.0.1", port=strict.port)
    origins = Origins([TABLE], max_connections=4)
    for bucket in ("odd", "far", "near", "far"):
        assert await read(origins, strict, bucket)
    await origins.close()
    assert set(late(strict, "near")) == {(True, 200), (True, 206)}
    assert set(late(strict, "far")) == {(True, 200), (True, 206)}
    assert set(late(strict, "odd")) == {(False, 200), (False, 206)}


@pytest.mark.parametrize("first", ["near", "odd"])
async def test_the_environments_proxies_hold_for_each_host(
    first: str, strict: StrictS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A host that `no_proxy` names is asked directly, any other by the proxy, whichever is asked first."""
    use_aws(monkeypatch, tmp_path, strict.env())
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{strict.port}")
    monkeypatch.setenv("no_proxy", "near.s3.amazonaws.com")
    lead(monkeypatch, "near.s3.amazonaws.com", "127.0.0.1", port=strict.port)
    lead(monkeypatch, "odd.s3.amazonaws.com", "127.0.0.1", port=1)  # nobody is there
    origins = Origins([TABLE], max_connections=4)
    for bucket in (first, "near", "odd"):
        assert await read(origins, strict, bucket)
    await origins.close()
    assert {each.proxied for each in strict.seen if each.bucket == "near"} == {False}
    assert {each.proxied for each in strict.seen if each.bucket == "odd"} == {True}
    assert {each.by_url for each in strict.seen if each.bucket == "near"} == {True}


@pytest.mark.parametrize("region", ["elsewhere.example/", "a" * 100, "eu west", ""])
async def test_a_region_that_is_none_leads_nowhere(
    region: str, strict: StrictS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A header that would change the host is left to the SDK, which refuses it."""
    strict.regions = {"near": region}
    use_aws(monkeypatch, tmp_path, strict.env())
    for name in ("near.s3.amazonaws.com", "near.s3.elsewhere.example"):
        lead(monkeypatch, name, "127.0.0.1", port=strict.port)
    origins = Origins([TABLE], max_connections=4)
    with pytest.raises(OriginError):
        await read(origins, strict, "near")
    await origins.close()
    assert strict.hosts == {"near.s3.amazonaws.com"}
