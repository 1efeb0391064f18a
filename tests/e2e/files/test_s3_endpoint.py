"""The S3 endpoint as an SDK sees it: objects, ranges, parts and listings are the store's."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cases import first_quick
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.s3_door import (
    DOOR,
    address_of,
    ask,
    connect,
    connection,
    keys_of,
    refusal,
    request_of,
    signed,
)
from support.stores.buckets import Bucket, MotoS3, new_bucket
from support.stores.seaweedfs import SeaweedFS

KIB = 1024
SMALL = random.Random(1).randbytes(3 * KIB)
LARGE = random.Random(2).randbytes(12 * KIB * KIB + 77)
ODD_KEY = "a b/c+d/é=1&x%2F?.txt"
DOTS_KEY = ".../...a"


@pytest.fixture(scope="module")
def bucket(moto_server: MotoS3) -> Bucket:
    """A bucket with a small and a large object, an empty one, and two of odd names."""
    found = new_bucket(moto_server)
    found.put("small", SMALL)
    found.put("large", LARGE)
    found.put("empty", b"")
    found.put(ODD_KEY, b"odd")
    found.put(DOTS_KEY, b"dots")
    return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, bucket: Bucket) -> Iterator[Daemon]:
    """A daemon with an endpoint, for the whole module."""
    with Daemon(tmp_path_factory.mktemp("d"), *DOOR, env=bucket.env()) as running:
        yield running


@pytest.fixture
def daemon(running: Daemon, bucket: Bucket) -> Daemon:
    """The same with nothing in its cache."""
    running.empty(f"{bucket.url}/**")
    return running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Any]:
    """A client of the endpoint."""
    found = connect(daemon)
    yield found
    found.close()


def body(client: Any, bucket: Bucket, key: str, **params: Any) -> bytes:
    """Return what GetObject gives."""
    data: bytes = client.get_object(Bucket=bucket.name, Key=key, **params)["Body"].read()
    return data


def counted(daemon: Daemon, name: str) -> int:
    """Return a counter of the daemon's."""
    return int(daemon.status()["counters"][name])


@pytest.mark.parametrize(
    ("key", "content"), [("small", SMALL), ("large", LARGE), ("empty", b""), (ODD_KEY, b"odd")]
)
def test_objects_come_whole_from_the_store_and_from_the_cache(
    client: Any, bucket: Bucket, key: str, content: bytes
) -> None:
    """The first read fetches, the second finds it cached; both give all bytes."""
    assert body(client, bucket, key) == content
    assert body(client, bucket, key) == content


def test_a_cached_object_is_not_fetched_again(client: Any, bucket: Bucket, daemon: Daemon) -> None:
    """The store sends each byte once, however often an object is read."""
    before = counted(daemon, "origin_bytes")
    for _ in range(3):
        body(client, bucket, "large")
    assert counted(daemon, "origin_bytes") - before == len(LARGE)


def test_sent_bytes_are_counted(client: Any, bucket: Bucket, daemon: Daemon) -> None:
    """Requests and bytes of S3 clients are on the status page, and in the bill."""
    requests = counted(daemon, "s3_requests")
    sent_bytes = counted(daemon, "s3_bytes")
    body(client, bucket, "small")
    body(client, bucket, "small", Range="bytes=0-9")
    assert counted(daemon, "s3_requests") - requests == 2
    assert counted(daemon, "s3_bytes") - sent_bytes == len(SMALL) + 10


def test_bytes_sent_to_a_client_that_closes_early_are_counted(
    client: Any, bucket: Bucket, daemon: Daemon
) -> None:
    """The daemon counts the bytes that it sent, and not those that it kept back."""
    at_start = counted(daemon, "s3_bytes")
    body(client, bucket, "large")
    # The daemon counts an answer once it has sent all of it, when the client may have it already.
    eventually(lambda: counted(daemon, "s3_bytes") - at_start >= len(LARGE))
    before = counted(daemon, "s3_bytes")
    with connection(daemon) as early:
        early.sendall(request_of(*signed(daemon, f"/{bucket.name}/large", keys_of(daemon))))
        assert len(early.makefile("rb").read(1000)) == 1000
    eventually(lambda: counted(daemon, "s3_bytes") > before)
    assert counted(daemon, "s3_bytes") - before < len(LARGE)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("key", first_quick(["large", "small"]))
@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-2000", 5, 2001),
        ("bytes=1000-", 1000, None),
        ("bytes=-10", -10, None),
        ("bytes=-999999999", 0, None),
        ("bytes=7-999999999999", 7, None),
    ],
)
def test_ranges_are_those_bytes(
    client: Any,
    bucket: Bucket,
    *,
    key: str,
    wanted: str,
    start: int,
    end: int | None,
    is_cached: bool,
) -> None:
    """Whichever form a range has, and whether the object is cached or not."""
    content = SMALL if key == "small" else LARGE
    if is_cached:
        body(client, bucket, key)
    answer = client.get_object(Bucket=bucket.name, Key=key, Range=wanted)
    expected = content[start:end]
    first = len(content) - len(content[start:])
    assert answer["Body"].read() == expected
    assert answer["ContentRange"] == f"bytes {first}-{first + len(expected) - 1}/{len(content)}"
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206


def test_a_range_fetches_its_parts_alone(client: Any, bucket: Bucket, daemon: Daemon) -> None:
    """Of a large object, the store sends the parts that hold the range."""
    before = counted(daemon, "origin_bytes")
    body(client, bucket, "large", Range="bytes=100-199")
    assert counted(daemon, "origin_bytes") - before < len(LARGE) // 4


def test_a_range_in_cached_parts_is_a_hit(client: Any, bucket: Bucket, daemon: Daemon) -> None:
    """A long range, like a short one, is a miss when fetched, and a hit from then on."""
    hits = counted(daemon, "hits")
    misses = counted(daemon, "misses")
    for _ in range(3):
        body(client, bucket, "large", Range="bytes=0-99999")
    assert counted(daemon, "hits") - hits == 2
    assert counted(daemon, "misses") - misses == 1


@pytest.mark.parametrize("wanted", ["bytes=1-0", "bytes=a-b", "lines=1-2", "bytes=0-1,4-5"])
def test_invalid_range_gives_the_whole_object(client: Any, bucket: Bucket, wanted: str) -> None:
    """S3 ignores such ranges, too."""
    answer = client.get_object(Bucket=bucket.name, Key="small", Range=wanted)
    assert answer["Body"].read() == SMALL
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200


@pytest.mark.parametrize(
    ("key", "wanted"),
    [("small", f"bytes={len(SMALL)}-"), ("small", "bytes=-0"), ("empty", "bytes=0-0")],
)
def test_a_range_beyond_the_end_is_refused(
    client: Any, bucket: Bucket, key: str, wanted: str
) -> None:
    """With 416 and S3's code."""
    assert refusal(client.get_object, Bucket=bucket.name, Key=key, Range=wanted) == (
        416,
        "InvalidRange",
    )


@pytest.mark.parametrize("wanted", [f"bytes=7-{10**30}", f"bytes=-{10**30}"])
def test_a_range_far_beyond_the_end_is_cut_there(client: Any, bucket: Bucket, wanted: str) -> None:
    """However many digits it has."""
    answer = client.get_object(Bucket=bucket.name, Key="small", Range=wanted)
    assert answer["Body"].read() == (SMALL[7:] if "=7" in wanted else SMALL)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206


def test_a_download_is_resumed_in_the_same_version_alone(daemon: Daemon, bucket: Bucket) -> None:
    """If-Range: the rest of the version that the client has begun, or all of the present one."""
    path = f"/{bucket.name}/small"
    keys = keys_of(daemon)
    stored = ask(daemon, *signed(daemon, path, keys)).headers
    for same in (stored["ETag"], stored["Last-Modified"]):
        rest = ask(daemon, *signed(daemon, path, keys, Range="bytes=10-", If_Range=same))
        assert rest.status == 206
        assert rest.body == SMALL[10:]
    for other in ('"other"', f"W/{stored['ETag']}", "Sun, 06 Nov 1994 08:49:37 GMT", ""):
        whole = ask(daemon, *signed(daemon, path, keys, Range="bytes=10-", If_Range=other))
        assert whole.status == 200
        assert whole.body == SMALL


def test_a_weak_etag_does_not_match(client: Any, bucket: Bucket) -> None:
    """If-Match promises the same bytes; If-None-Match saves a download of the same content."""
    etag = client.head_object(Bucket=bucket.name, Key="small")["ETag"]
    of_small = {"Bucket": bucket.name, "Key": "small"}
    assert refusal(client.get_object, **of_small, IfMatch=f"W/{etag}") == (
        412,
        "PreconditionFailed",
    )
    assert refusal(client.get_object, **of_small, IfNoneMatch=f'"other", W/{etag}')[0] == 304
    assert body(client, bucket, "small", IfMatch=f'"other", {etag}') == SMALL


def test_head_says_what_the_store_says(client: Any, bucket: Bucket) -> None:
    """Size, ETag and time are the store's, and a range's length that of the range."""
    head = client.head_object(Bucket=bucket.name, Key="large")
    store = bucket.server.client.head_object(Bucket=bucket.name, Key="large")
    assert head["ETag"] == store["ETag"]
    assert head["ContentLength"] == len(LARGE)
    assert head["LastModified"] == store["LastModified"]
    part = client.head_object(Bucket=bucket.name, Key="large", Range="bytes=2-5")
    assert part["ContentLength"] == 4


def test_conditions_are_those_of_the_etag(client: Any, bucket: Bucket) -> None:
    """If-Match and If-None-Match, met and not met."""
    etag = client.head_object(Bucket=bucket.name, Key="small")["ETag"]
    of_small = {"Bucket": bucket.name, "Key": "small"}
    assert body(client, bucket, "small", IfMatch=etag) == SMALL
    assert body(client, bucket, "small", IfNoneMatch='"other"') == SMALL
    assert refusal(client.get_object, **of_small, IfMatch='"other"') == (412, "PreconditionFailed")
    assert refusal(client.get_object, **of_small, IfNoneMatch=etag)[0] == 304
    assert refusal(client.head_object, **of_small, IfMatch='"other"')[0] == 412


def test_conditions_are_those_of_the_time(client: Any, bucket: Bucket) -> None:
    """If-Modified-Since and If-Unmodified-Since compare with the store's time."""
    stored = client.head_object(Bucket=bucket.name, Key="small")["LastModified"]
    of_small = {"Bucket": bucket.name, "Key": "small"}
    earlier = stored.replace(year=stored.year - 1)
    assert body(client, bucket, "small", IfModifiedSince=earlier) == SMALL
    assert body(client, bucket, "small", IfUnmodifiedSince=stored) == SMALL
    assert refusal(client.get_object, **of_small, IfModifiedSince=stored)[0] == 304
    assert refusal(client.get_object, **of_small, IfUnmodifiedSince=earlier) == (
        412,
        "PreconditionFailed",
    )


def test_the_first_part_of_an_object_in_one_part_is_all_of_it(client: Any, bucket: Bucket) -> None:
    """And there is no second one."""
    assert body(client, bucket, "small", PartNumber=1) == SMALL
    refused = refusal(client.get_object, Bucket=bucket.name, Key="small", PartNumber=2)
    assert refused == (416, "InvalidPartNumber")


def test_listings_are_those_of_the_store(client: Any, bucket: Bucket) -> None:
    """Keys, sizes, ETags and folders are equal, by prefix, delimiter, page and first key."""
    wanted: list[dict[str, Any]] = [
        {},
        {"Prefix": "a b/"},
        {"Delimiter": "/"},
        {"Prefix": "a b/", "Delimiter": "/"},
        {"StartAfter": "empty"},
        {"Prefix": "none"},
        {"Prefix": ".."},
        {"Prefix": "...", "Delimiter": "/"},
        {"Prefix": ".../.."},
    ]
    for params in wanted:
        found = list(client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name, **params))
        store = bucket.server.client.list_objects_v2(Bucket=bucket.name, **params)
        assert [shown(entry) for entry in found[0].get("Contents", [])] == list(
            map(shown, store.get("Contents", []))
        )
        assert found[0].get("CommonPrefixes") == store.get("CommonPrefixes")
        assert found[0]["KeyCount"] == store["KeyCount"]


def test_a_listing_by_pages_has_each_key_once(client: Any, bucket: Bucket) -> None:
    """A token leads from each page to the next."""
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=bucket.name, PaginationConfig={"PageSize": 1}
    )
    keys = [entry["Key"] for page in pages for entry in page["Contents"]]
    assert keys == sorted(["small", "large", "empty", ODD_KEY, DOTS_KEY])


def test_an_empty_token_is_that_of_the_first_page(client: Any, bucket: Bucket) -> None:
    """And is in the answer, as the request had one."""
    page = client.list_objects_v2(Bucket=bucket.name, ContinuationToken="")
    assert page["ContinuationToken"] == ""
    assert page["KeyCount"] == 5


def test_the_older_listing_goes_by_markers(client: Any, bucket: Bucket) -> None:
    """Tools that still use it find each key once."""
    pages = client.get_paginator("list_objects").paginate(
        Bucket=bucket.name, PaginationConfig={"PageSize": 1}
    )
    keys = [entry["Key"] for page in pages for entry in page["Contents"]]
    assert keys == sorted(["small", "large", "empty", ODD_KEY, DOTS_KEY])


def shown(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a listing says of an object."""
    return entry["Key"], entry["Size"], entry["ETag"]


def test_buckets_are_there_or_not(client: Any, bucket: Bucket) -> None:
    """HeadBucket and GetBucketLocation, of one that exists and of another."""
    assert client.head_bucket(Bucket=bucket.name)["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert client.get_bucket_location(Bucket=bucket.name)["LocationConstraint"] is None
    assert refusal(client.head_bucket, Bucket="nowhere-at-all")[0] == 404
    assert refusal(client.get_bucket_location, Bucket="nowhere-at-all") == (404, "NoSuchBucket")


def test_missing_things_have_the_codes_of_s3(client: Any, bucket: Bucket) -> None:
    """SDKs make their exceptions of it."""
    assert refusal(client.get_object, Bucket=bucket.name, Key="none") == (404, "NoSuchKey")
    assert refusal(client.head_object, Bucket=bucket.name, Key="none")[0] == 404
    assert refusal(client.get_object, Bucket="nowhere-at-all", Key="none") == (404, "NoSuchBucket")
    assert refusal(client.list_objects_v2, Bucket="nowhere-at-all") == (404, "NoSuchBucket")


def test_s3_endpoint_refuses_writes(client: Any, bucket: Bucket) -> None:
    """Whatever writes is refused, and the same connections serve reads afterwards."""
    of_small = {"Bucket": bucket.name, "Key": "small"}
    assert refusal(client.put_object, **of_small, Body=b"x" * 100_000) == (405, "MethodNotAllowed")
    assert refusal(client.delete_object, **of_small) == (405, "MethodNotAllowed")
    assert refusal(client.create_bucket, Bucket="another-bucket") == (405, "MethodNotAllowed")
    assert refusal(client.create_multipart_upload, **of_small) == (405, "MethodNotAllowed")
    assert refusal(client.get_object_acl, **of_small) == (501, "NotImplemented")
    assert body(client, bucket, "small") == SMALL


def test_a_new_version_is_served_once_the_store_says_so(moto: Bucket, tmp_path: Path) -> None:
    """With --listing-ttl-s 0 each request asks; bytes and ETag are of the same version."""
    bucket = moto
    bucket.put("small", SMALL)
    with Daemon(tmp_path, *DOOR, "--listing-ttl-s", "0", env=bucket.env()) as daemon:
        client = connect(daemon)
        assert body(client, bucket, "small") == SMALL
        etag = bucket.put("small", b"another version")
        answer = client.get_object(Bucket=bucket.name, Key="small")
        assert answer["Body"].read() == b"another version"
        assert (
            answer["ETag"]
            == bucket.server.client.head_object(Bucket=bucket.name, Key="small")["ETag"]
        )
        assert etag
        client.close()


@pytest.mark.slow
def test_an_object_larger_than_the_cache_is_read_by_parts(bucket: Bucket, tmp_path: Path) -> None:
    """All of its bytes come, whatever fits into the cache at a time."""
    with Daemon(tmp_path, *DOOR, capacity="11MB", env=bucket.env()) as daemon:
        client = connect(daemon)
        assert body(client, bucket, "large") == LARGE
        client.close()


@pytest.mark.slow
def test_parts_are_those_of_the_upload(seaweedfs_server: SeaweedFS, tmp_path: Path) -> None:
    """A client that reads an object part by part gets the parts that the store has."""
    bucket = new_bucket(seaweedfs_server)
    content = upload_in_parts(bucket, "parts", LARGE)
    with Daemon(tmp_path, *DOOR, env=bucket.env()) as daemon:
        client = connect(daemon)
        found = [
            client.get_object(Bucket=bucket.name, Key="parts", PartNumber=number)
            for number in (1, 2)
        ]
        assert [each["Body"].read() for each in found] == content
        assert [each["PartsCount"] for each in found] == [2, 2]
        refused = refusal(client.get_object, Bucket=bucket.name, Key="parts", PartNumber=3)
        assert refused == (416, "InvalidPartNumber")
        client.close()


@pytest.mark.slow
def test_an_upload_in_a_single_part_has_one(seaweedfs_server: SeaweedFS, tmp_path: Path) -> None:
    """S3 says so of it, and nothing of an object that was uploaded as a whole."""
    bucket = new_bucket(seaweedfs_server)
    bucket.put("whole", SMALL)
    upload_parts(bucket, "part", [SMALL])
    with Daemon(tmp_path, *DOOR, env=bucket.env()) as daemon:
        client = connect(daemon)
        of_part = client.get_object(Bucket=bucket.name, Key="part", PartNumber=1)
        of_whole = client.get_object(Bucket=bucket.name, Key="whole", PartNumber=1)
        assert of_part["PartsCount"] == 1
        assert of_part["Body"].read() == SMALL
        assert "PartsCount" not in of_whole
        client.close()


def upload_in_parts(bucket: Bucket, key: str, data: bytes) -> list[bytes]:
    """Store an object in two parts; return them."""
    parts = [data[: 5 * KIB * KIB], data[5 * KIB * KIB :]]
    upload_parts(bucket, key, parts)
    return parts


def upload_parts(bucket: Bucket, key: str, parts: list[bytes]) -> None:
    """Store an object in these parts."""
    store = bucket.server.client
    upload = {"Bucket": bucket.name, "Key": key}
    upload["UploadId"] = store.create_multipart_upload(**upload)["UploadId"]
    stored = []
    for number, part in enumerate(parts, 1):
        etag = store.upload_part(**upload, PartNumber=number, Body=part)["ETag"]
        stored.append({"PartNumber": number, "ETag": etag})
    store.complete_multipart_upload(**upload, MultipartUpload={"Parts": stored})


def test_doctor_says_that_the_endpoint_answers(running: Daemon) -> None:
    """A line of its own, of a daemon that has one."""
    findings = shardcache("doctor", "--quick", "--json", "--socket", running.socket).json[
        "findings"
    ]
    [found] = [finding for finding in findings if finding["check"] == "daemon.s3"]
    assert found["state"] == "ok"


def test_credentials_are_those_of_a_credential_process(running: Daemon, bucket: Bucket) -> None:
    """The command prints what AWS' SDKs take from a process, or lines for a shell."""
    printed = shardcache("credentials", "--socket", running.socket).json
    assert printed["Version"] == 1
    client = connect(running, printed)
    assert body(client, bucket, ODD_KEY) == b"odd"
    client.close()
    lines = shardcache("credentials", "--export", "--socket", running.socket).out.splitlines()
    assert f"export AWS_SECRET_ACCESS_KEY={printed['SecretAccessKey']}" in lines
    assert f"export AWS_ENDPOINT_URL_S3=http://{address_of(running)}" in lines


@pytest.mark.slow
def test_endpoint_is_no_object_store_for_a_daemon(
    daemon: Daemon, bucket: Bucket, tmp_path: Path
) -> None:
    """A daemon with the endpoint's variables says so, as it would keep all twice or ask itself."""
    keys = keys_of(daemon)
    env = bucket.env() | {
        "AWS_ENDPOINT_URL": f"http://{address_of(daemon)}",
        "AWS_ACCESS_KEY_ID": keys["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": keys["SecretAccessKey"],
    }
    with Daemon(tmp_path, env=env) as other:
        for name in ("small", "*"):
            ran = shardcache("warm", f"{bucket.url}/{name}", socket=other.socket)
            assert ran.code != 0
            assert "S3 endpoint of a shardcache daemon" in ran.out + ran.err
            assert "AWS_ENDPOINT_URL" in ran.out + ran.err
