"""S3: versions, ranges, checksums, refusals, credentials."""

import asyncio
import gzip
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shardcache.config.origin_table import OriginTable
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    ShardChangedError,
)
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.transport.between.flow import Flow, nothing
from support.cases import first_quick
from support.network.http_requests import Request
from support.network.scripted_server import ScriptedServer, head
from support.programs.daemon import Daemon, eventually
from support.programs.downloads import Rig
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores import aws_env
from support.stores.buckets import Bucket, read_range, read_whole, use_aws
from support.stores.faulty_proxy import FaultyProxy
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Answer, Mischief, refusal

DATA = bytes(range(256)) * 400
PRIMED_IN_VAIN = [
    Mischief.INTERNAL_ERROR,
    Mischief.RANGE_SHIFTED,
    Mischief.WHOLE,
    Mischief.ETAG_OTHER,
]


def table(**fields: object) -> OriginTable:
    """Return the table for every s3:// url."""
    return OriginTable.model_validate({"match": "s3://", **fields})


async def read(origins: Origins, obj: RemoteObject, start: int, stop: int) -> bytes:
    """Return a range as one."""
    return await read_range(origins.origin(obj.url), obj, start, stop)


@pytest.mark.parametrize("store", first_quick(["moto", "seaweedfs"]))
async def test_stat_and_ranges_give_the_object(
    store: str, origins: Origins, request: pytest.FixtureRequest
) -> None:
    """Both servers give size, the listing's version and exact bytes, and none once replaced."""
    bucket: Bucket = request.getfixturevalue(store)
    url = bucket.put("train/a.tar", DATA)
    origin = origins.origin(url)
    obj = await origin.stat(url)
    assert obj.url == url
    assert obj.size_bytes == len(DATA)
    assert obj.has_ranges is True
    assert obj.is_guarded is True
    assert await origin.list_prefix(f"{bucket.url}/train/", nothing) == [obj]
    assert await origin.list_prefix(f"{bucket.url}/train/", nothing, flat=True) == [obj]
    (entry,) = await origin.list_prefix(f"{bucket.url}/tr", nothing, flat=True)
    assert entry.url == f"{bucket.url}/train/"
    assert entry.version == ""
    counts: list[int] = []
    assert await read_range(origin, obj, 1000, 70_000, Flow(counts.append)) == DATA[1000:70_000]
    assert sum(counts) == 69_000
    assert [len(part) for part in await read_whole(origin, obj, 100_000)] == [100_000, 2_400]
    bucket.put("train/a.tar", DATA[::-1])  # If-Match refuses every range of a version that is gone
    with pytest.raises(ShardChangedError):
        await read(origins, obj, 0, 10)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, "replaced", *PRIMED_IN_VAIN])
async def test_a_part_requested_ahead_is_of_the_version_reported_since(
    fault: Mischief | str | None, faulty: FaultyS3, origins: Origins
) -> None:
    """The right answer is the read without another request; any other is dropped."""
    url = faulty.put("a.tar", DATA)
    origin = origins.origin("s3://x")
    if isinstance(fault, Mischief):
        faulty.fail(fault, key="a.tar", times=1)
    faulty.hold("a.tar", times=1, method="HEAD")
    asked = asyncio.create_task(origin.stat(url, 1000))
    await asyncio.to_thread(eventually, lambda: len(faulty.seen) == 2)
    if fault == "replaced":
        faulty.put("a.tar", DATA[::-1])
    faulty.answer_late()
    obj = await asked
    assert await read(origins, obj, 0, 1000) == (DATA[::-1] if fault == "replaced" else DATA)[:1000]
    condition = [each[-1] for each in faulty.seen if each[0] == "GET"]
    assert condition == [None] + [f'"{obj.version}"'] * (fault is not None)


async def test_few_connections_are_taken_by_what_is_requested_ahead(
    rig: Rig, faulty: FaultyS3
) -> None:
    """One of four; a busy store's answer to it counts as any other's."""
    faulty.fail(Mischief.SLOW_DOWN, key="0", times=1)
    urls = [faulty.put(str(number), DATA) for number in range(4)]
    origin = rig.origins.origin(urls[0])
    first, *_ = await asyncio.gather(
        *(rig.downloader.stat(origin, url, first_bytes=1000) for url in urls)
    )
    with pytest.raises(OriginBusyError):
        await read(rig.origins, first, 0, 1000)
    assert [each[:2] for each in faulty.seen if each[0] == "GET"] == [("GET", "0")]


@pytest.mark.slow
async def test_a_shard_that_a_reader_begins_with_is_requested_together_with_its_version(
    faulty: FaultyS3, tmp_path: Path
) -> None:
    """Once; one that is read later is requested in its version."""
    body = make_tar(random_samples(2))
    urls = [faulty.put(name, body) for name in ("a.tar", "b.tar")]
    for name in ("a.tar", "b.tar"):
        faulty.hold(name, times=1, method="HEAD")
    with Daemon(tmp_path, env=faulty.env()) as daemon, RawSession(daemon) as session:
        await asyncio.to_thread(session.plan, urls, [0, 1])
        await asyncio.to_thread(eventually, lambda: len(faulty.seen) == 3)
        faulty.answer_late()
        for position in (0, 1):
            data = Path((await asyncio.to_thread(session.take, position))["path"]).read_bytes()
            assert data == body
    reads = {
        (key, condition is None) for method, key, _, condition in faulty.seen if method == "GET"
    }
    assert reads == {("a.tar", True), ("b.tar", False)}
    assert len(faulty.seen) == 4


async def test_checksum_beyond_ascii_is_a_typed_error(
    origins: Origins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error names what the header states."""
    reply = head('ETag: "1"', "Content-Length: 5", "x-amz-checksum-crc32c: é", status="200 OK")
    with ScriptedServer(reply) as server:
        use_aws(monkeypatch, tmp_path, aws_env(server.url("")))
        with pytest.raises(OriginUnavailableError, match="states 'é' as crc32c"):
            await origins.origin("s3://b").stat("s3://b/a.tar")


@pytest.mark.slow
async def test_a_checksum_of_parts_checksums_is_ignored(moto: Bucket, origins: Origins) -> None:
    """A multipart object's composite checksum is not one of its bytes, nor is its ETag."""
    client = moto.server.client
    where = {"Bucket": moto.name, "Key": "a.tar"}
    upload = client.create_multipart_upload(**where, ChecksumAlgorithm="CRC32")["UploadId"]
    part = client.upload_part(
        **where, UploadId=upload, PartNumber=1, Body=DATA, ChecksumAlgorithm="CRC32"
    )
    parts = [{"PartNumber": 1, "ETag": part["ETag"], "ChecksumCRC32": part["ChecksumCRC32"]}]
    client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
    obj = await origins.origin(f"{moto.url}/a.tar").stat(f"{moto.url}/a.tar")
    assert obj.checksum is None
    assert await read(origins, obj, 5, 10) == DATA[5:10]


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("{}/no.tar", NotFoundError, "object does not exist"),  # though HEAD tells neither
        ("s3://no-such-bucket-here/no.tar", NotFoundError, "bucket does not exist"),
        pytest.param(
            "s3://no-such-bucket-here/",
            NotFoundError,
            "bucket does not exist",
            marks=pytest.mark.slow,
        ),
        ("s3://UPPER case/a.tar", OriginError, "client rejects"),
    ],
)
async def test_missing_bucket_or_object_is_named(
    url: str, error: type[OriginError], message: str, moto: Bucket, origins: Origins
) -> None:
    """None of them is a matter of retries."""
    url = url.format(moto.url)
    with pytest.raises(error, match=message) as failed:
        if url.endswith("/"):
            await origins.origin(url).list_prefix(url, nothing)
        else:
            await origins.origin(url).stat(url)
    assert failed.value.url == url
    assert not failed.value.retryable


class AsAmazon(FaultyProxy):
    """Refuses a request for a range of a part, as Amazon's S3 does."""

    async def ask(self, request: Request) -> Answer:
        if "range" in request.headers and "partNumber" in request.target:
            return refusal(400, "InvalidRequest")
        return await super().ask(request)


async def test_part_of_a_deleted_object_is_not_found(
    moto: Bucket, origins: Origins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HEAD states no reason, and the GET sent to learn it is one that S3 accepts."""
    url = moto.put("a.tar", DATA)
    with AsAmazon(moto.server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        origin = origins.origin(url)
        obj = await origin.stat(url)
        assert await origin.part_span(obj, 1) == (0, len(DATA))
        moto.server.client.delete_object(Bucket=moto.name, Key="a.tar")
        with pytest.raises(NotFoundError, match="object does not exist"):
            await origin.part_span(obj, 1)


@pytest.mark.slow
async def test_a_prefix_without_its_slash_is_explained(moto: Bucket, origins: Origins) -> None:
    """A url that stops at a bucket or a prefix names no object, and the remedy is the slash."""
    moto.put("train/a.tar", DATA)
    for url in (moto.url, f"{moto.url}/train"):
        with pytest.raises(NotFoundError) as caught:
            await origins.origin(url).stat(url)
        assert caught.value.url == url
        assert "/" in caught.value.remedy
        assert "end" in caught.value.remedy


async def test_error_without_credentials_names_anon(
    faulty: FaultyS3, origins: Origins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error says how to ask anonymously, and a table that says so works.

    A misspelt profile is no reason to retry; a store that is down is.
    """
    url = faulty.put("a.tar", DATA)
    use_aws(
        monkeypatch,
        tmp_path,
        {name: value for name, value in faulty.env().items() if "KEY" not in name},
    )
    with pytest.raises(AccessDeniedError) as denied:
        await origins.origin(url).stat(url)
    assert "anon = true" in denied.value.remedy
    tables = [
        table(anon=True, verify_etag=False, require_end=False),
        table(match="s3://lab/", profile="nobody"),
        table(match="s3://down/", anon=True, endpoint_url="http://127.0.0.1:1"),
    ]
    configured = Origins(tables, max_connections=4)
    obj = await configured.origin(url).stat(url)
    assert obj.size_bytes == len(DATA)
    assert obj.checksum is None
    assert configured.table(url).require_end is False
    with pytest.raises(ConfigError, match="nobody"):
        await configured.origin("s3://lab/").stat("s3://lab/a.tar")
    with pytest.raises(OriginUnavailableError, match=r"connection refused by 127\.0\.0\.1:1"):
        await configured.origin("s3://down/").stat("s3://down/a.tar")
    await configured.close()


async def test_the_tables_endpoint_region_and_profile_reach_the_store(
    moto: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The profile counts if the environment names none of them."""
    url = moto.put("a.tar", DATA)
    endpoint = moto.env()["AWS_ENDPOINT_URL"]
    use_aws(monkeypatch, tmp_path, {"AWS_EC2_METADATA_DISABLED": "true"})
    (tmp_path / "AWS_CONFIG_FILE").write_text(
        "[profile lab]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    origins = Origins(
        [table(endpoint_url=endpoint, region="us-east-1", profile="lab")], max_connections=4
    )
    assert (await origins.origin(url).stat(url)).size_bytes == len(DATA)
    await origins.close()


async def test_expired_credentials_are_read_again(
    faulty: FaultyS3, origins: Origins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next try succeeds once the file has new keys, without a restart."""
    url = faulty.put("a.tar", DATA)
    file = tmp_path / "credentials"
    env = {name: value for name, value in faulty.env().items() if "KEY" not in name}
    use_aws(monkeypatch, tmp_path, env | {"AWS_SHARED_CREDENTIALS_FILE": str(file)})
    file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = x\n")
    faulty.access_key = "old"
    obj = await origins.origin(url).stat(url)
    faulty.access_key = "new"
    with pytest.raises(OriginUnavailableError, match="expired"):
        await read(origins, obj, 0, 10)
    file.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = x\n")
    assert await read(origins, obj, 0, 10) == DATA[:10]


async def test_temporary_keys_of_the_environment_are_described_as_such(
    origins: Origins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are passed to the SDK, which would otherwise renew them, and are no reader's."""
    keys = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_SESSION_TOKEN": "token",
    }
    use_aws(monkeypatch, tmp_path, keys)
    source = await origins.origin("s3://bucket/").obtain_credentials("s3://bucket/")
    assert source == "AWS_ACCESS_KEY_ID in the environment, temporary"


@pytest.mark.parametrize(
    "early", first_quick([True, False]), ids=["before the daemon's start", "after it"]
)
async def test_credentials_are_obtained_before_the_first_url(
    early: bool, faulty: FaultyS3, origins: Origins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first url finds them ready; those that come after the start serve it too."""
    url = faulty.put("a.tar", DATA)
    config = tmp_path / "AWS_CONFIG_FILE"
    env = {name: value for name, value in faulty.env().items() if "KEY" not in name}
    use_aws(monkeypatch, tmp_path, env | {"AWS_EC2_METADATA_DISABLED": "true"})
    issued = tmp_path / "issued"
    asked = tmp_path / "asked"
    issued.write_text('{"Version": 1, "AccessKeyId": "id", "SecretAccessKey": "secret"}')
    process = f"[default]\ncredential_process = sh -c 'echo asked >> {asked}; cat {issued}'\n"
    if early:
        config.write_text(process)
    await origins.prepare_credentials()
    assert asked.exists() is early
    config.write_text(process)
    assert (await origins.origin(url).stat(url)).size_bytes == len(DATA)
    assert asked.read_text() == "asked\n"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["gzip", "aws-chunked", None])
@pytest.mark.parametrize("lengths", [True, False], ids=["lengths", "chunks"])
async def test_stored_bytes_come_however_they_are_labelled_and_sent(
    encoding: str | None, lengths: bool, faulty: FaultyS3, origins: Origins
) -> None:
    """Content-Encoding does not change the bytes; chunked answers are read like any others."""
    faulty.encoding = encoding
    faulty.lengths = lengths
    stored = gzip.compress(DATA)
    obj = await origins.origin("s3://x").stat(faulty.put("a.tar", stored))
    for _ in range(5):  # however often the fast path hands them on
        assert await read(origins, obj, 0, obj.size_bytes) == stored


async def test_version_stays_where_a_proxy_marks_it_as_weak(
    faulty: FaultyS3, origins: Origins
) -> None:
    """A proxy may mark the ETag as weak, but requests name the store's own strong one."""
    faulty.weakens = True
    obj = await origins.origin("s3://x").stat(faulty.put("a.tar", DATA))
    assert obj.version == hashlib.md5(DATA).hexdigest()
    assert obj.checksum is not None
    for _ in range(5):  # however often the fast path hands them on
        assert await read(origins, obj, 0, obj.size_bytes) == DATA
    faulty.weakens = False
    assert await origins.origin("s3://x").stat(obj.url) == obj
    faulty.put("a.tar", DATA[::-1])
    with pytest.raises(ShardChangedError):
        await read(origins, obj, 0, obj.size_bytes)


@pytest.mark.parametrize(
    "page",
    [
        "<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>",
        "<IsTruncated>true</IsTruncated>",
        "<IsTruncated>false</IsTruncated><Contents><Key>a.tar</Key><ETag>1</ETag></Contents>",
        "<Code>InternalError</Code>",
    ],
    ids=["endless", "no next page", "no size", "an error in disguise"],
)
async def test_a_listing_that_makes_no_sense_is_an_error(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origins: Origins
) -> None:
    """It is not read for ever, nor taken for less than the whole."""
    async with listing(page, page) as url:
        use_aws(monkeypatch, tmp_path, aws_env(url))
        with pytest.raises(OriginUnavailableError):
            await origins.origin("s3://bucket/").list_prefix("s3://bucket/", nothing)


@asynccontextmanager
async def listing(first: str, further: str) -> AsyncIterator[str]:
    """Serve a listing of two pages; yield the store's url."""

    async def answer(request: web.Request) -> web.Response:
        page = further if request.query.get("continuation-token") == "again" else first
        return web.Response(
            text=f"<ListBucketResult>{page}</ListBucketResult>", content_type="application/xml"
        )

    app = web.Application()
    app.router.add_get("/{bucket}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_a_listing_longer_than_a_page_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origins: Origins
) -> None:
    """A store gives a thousand keys at a time; each page is reported."""
    entry = "<Contents><Key>{}</Key><ETag>1</ETag><Size>5</Size></Contents>"
    truncated = "<IsTruncated>true</IsTruncated>"
    token = "<NextContinuationToken>again</NextContinuationToken>"
    first = f"{truncated}{token}{entry.format('a')}"
    last = f"<IsTruncated>false</IsTruncated>{entry.format('b')}{entry.format('c')}"
    pages: list[int] = []
    async with listing(first, last) as url:
        use_aws(monkeypatch, tmp_path, aws_env(url))
        found = await origins.origin("s3://bucket/").list_prefix("s3://bucket/", pages.append)
    assert [obj.url for obj in found] == [f"s3://bucket/{key}" for key in "abc"]
    assert pages == [1, 2]
