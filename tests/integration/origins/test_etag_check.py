"""Where a store has no checksum of an object, its ETag may be one."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.config import Config

from shardcache.config import OriginTable
from shardcache.errors import CorruptShardError
from shardcache.origin.base import MD5, Checksum
from shardcache.origin.registry import Origins
from support.programs.downloads import PART, Rig
from support.stores.buckets import Bucket
from support.stores.faulty_s3 import Fault, FaultyS3
from support.stores.moto_s3 import REGION

DATA = random.Random(5).randbytes(9 * PART)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A downloader."""
    rig = Rig(tmp_path / "cache")
    yield rig
    await rig.origins.close()


@pytest.fixture
def plain_client(moto: Bucket) -> Iterator[Any]:
    """A client that stores objects as older ones did: without a checksum."""
    session = botocore.session.Session()
    session.set_credentials("test", "test")
    config = Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required")
    endpoint_url = moto.server.endpoint_url
    with closing(session.create_client("s3", region_name=REGION, endpoint_url=endpoint_url, config=config)) as client:
        yield client


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


async def test_an_etag_that_is_the_md5_is_compared_where_there_is_no_checksum(rig: Rig, faulty: FaultyS3) -> None:
    """A flipped bit is caught though the store keeps no checksum."""
    obj = await rig.stat(faulty.put("a.tar", DATA))
    assert obj.checksum is not None
    assert obj.checksum.algorithm == MD5
    faulty.fail("a.tar", Fault.CORRUPT, start=7 * PART)
    with pytest.raises(CorruptShardError, match="MD5"):
        await rig.download(obj)


async def test_a_store_whose_etags_are_no_md5_serves_at_the_second_try(rig: Rig, faulty: FaultyS3) -> None:
    """The same bytes came twice; of the next object the ETag is not asked."""
    objects = [replace(await rig.stat(faulty.put(name, DATA)), checksum=Checksum(MD5, 1)) for name in ("a", "b")]
    with pytest.raises(CorruptShardError):
        await rig.download(objects[0])
    for obj in objects:
        assert (await rig.download(obj)).path.read_bytes() == DATA


async def test_verify_etag_turns_it_off(faulty: FaultyS3) -> None:
    """For one origin, as its table says."""
    url = faulty.put("a.tar", DATA)
    table = OriginTable.model_validate({"match": "s3://", "verify_etag": False})
    origins = Origins((table,), max_connections=4)
    assert (await origins.origin(url).stat(url)).checksum is None
    await origins.close()
