"""ETags of S3: which are MD5 sums, and which version an upload replaces."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import (
    CorruptShardError,
    ShardChangedError,
)
from shardcache.origin.objects import MD5, Checksum
from shardcache.origin.registry import Origins
from support.programs.downloads import PART, Rig
from support.stores.buckets import Bucket
from support.stores.faulty_proxy import FaultyProxy
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Mischief

DATA = bytes(range(256)) * 400


@pytest.fixture
def plain_client(moto: Bucket) -> Iterator[Any]:
    """A client that stores objects as older ones did: without a checksum."""
    with closing(moto.server.connect(request_checksum_calculation="when_required")) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "is_md5"),
    [
        ({}, True),
        ({"ServerSideEncryption": "AES256"}, True),
        ({"ServerSideEncryption": "aws:kms"}, False),
        ({"ServerSideEncryption": "aws:kms:dsse"}, False),
        ({"StorageClass": "EXPRESS_ONEZONE"}, False),
    ],
)
async def test_an_etag_is_taken_for_an_md5_where_s3_says_so(
    options: dict[str, str], is_md5: bool, moto: Bucket, plain_client: Any, rig: Rig
) -> None:
    """Not of what is encrypted with other keys than S3's own, nor in a directory bucket."""
    plain_client.put_object(Bucket=moto.name, Key="a.tar", Body=DATA, **options)
    checksum = (await rig.stat(f"{moto.url}/a.tar")).checksum
    assert (checksum is not None and checksum.algorithm == MD5) == is_md5


async def test_an_etag_that_is_the_md5_is_compared_where_there_is_no_checksum(
    rig: Rig, faulty: FaultyS3
) -> None:
    """A flipped bit is caught though the store keeps no checksum."""
    obj = await rig.stat(faulty.put("a.tar", DATA))
    assert obj.checksum is not None
    assert obj.checksum.algorithm == MD5
    faulty.fail(Mischief.FLIP, key="a.tar", times=1, start=PART)
    with pytest.raises(CorruptShardError, match="MD5"):
        await rig.download(obj)


async def test_a_store_whose_etags_are_no_md5_serves_at_the_second_try(
    rig: Rig, faulty: FaultyS3
) -> None:
    """The same bytes came twice; of the next object the ETag is not asked."""
    objects = [
        replace(await rig.stat(faulty.put(name, DATA)), checksum=Checksum(MD5, 1))
        for name in ("a", "b")
    ]
    with pytest.raises(CorruptShardError):
        await rig.download(objects[0])
    for obj in objects:
        assert (await rig.download(obj)).path.read_bytes() == DATA


async def test_an_upload_replaces_the_version_that_it_names(
    moto: Bucket, origins: Origins, tmp_path: Path
) -> None:
    """And, given an empty one, nothing."""
    url = moto.put("index.json", b"old")
    new = tmp_path / "index.json"
    origin = origins.origin(url)
    old = (await origins.origin(url).stat(url)).version
    new.write_bytes(b"new")
    assert (await origin.upload(new, url, old)).version != old
    new.write_bytes(b"newer")
    for replaced in (old, ""):
        with pytest.raises(ShardChangedError):
            await origin.upload(new, url, replaced)
    assert (await origin.upload(new, f"{moto.url}/other.json", "")).size_bytes == 5


async def test_an_upload_whose_answer_was_lost_is_no_other_upload(
    moto: Bucket, origins: Origins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The store refuses the SDK's repeated upload; another object is still an error."""
    url = f"{moto.url}/index.json"
    new = tmp_path / "index.json"
    new.write_bytes(b"new")
    with FaultyProxy(moto.server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        proxy.fail(Mischief.RESET_AT_ONCE, method="PUT", times=1)
        origin = origins.origin(url)
        assert (await origin.upload(new, url, "")).size_bytes == 3
        assert proxy.done[Mischief.RESET_AT_ONCE] == 1
        new.write_bytes(b"newer")
        with pytest.raises(ShardChangedError):
            await origin.upload(new, url, "")
