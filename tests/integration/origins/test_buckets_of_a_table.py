"""Buckets that share an `[[origin]]` table and differ in region, access or route."""

import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shardcache.config.origin_table import OriginTable
from shardcache.errors import OriginError, OriginUnavailableError
from shardcache.origin.base import Setup
from shardcache.origin.registry import Origins
from shardcache.origin.s3.s3_origin import S3Origin
from shardcache.transport.worker_pool import Workers
from support.cases import first_quick
from support.network.lead import lead
from support.stores import aws_env
from support.stores.buckets import read_range, use_aws

ACCESS_KEY = "strict"
SECRET_KEY = "strict-secret"
_DOMAIN = ".amazonaws.com"


class Seen(NamedTuple):
    """One request: its bucket, signed url or not, proxy or not, and the answer's status."""

    bucket: str
    by_url: bool
    proxied: bool
    status: int


@dataclass(slots=True)
class StrictS3:
    """Buckets in regions, in both styles of addressing.

    Attributes:
        regions: of the buckets; a request that is signed for another is refused with the right one.
        headers_only: buckets whose objects signed urls do not open.
        tagged: whether answers have an ETag.
        seen: every request.
        hosts: that were asked for.
    """

    regions: Mapping[str, str]
    headers_only: frozenset[str] = frozenset()
    tagged: bool = True
    seen: list[Seen] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    port: int = 0
    _objects: dict[str, bytes] = field(default_factory=dict)

    def put(self, bucket: str, key: str, body: bytes) -> str:
        """Store bytes; return their s3:// url."""
        self._objects[f"{bucket}/{key}"] = body
        return f"s3://{bucket}/{key}"

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a request."""
        self.hosts.add(request.headers["Host"])
        place = self._place(request)
        bucket = place.partition("/")[0]
        by_url = "X-Amz-Signature" in request.query_string
        answer = self._refusal(request, bucket, by_url) or self._object(
            request, self._objects[place]
        )
        self.seen.append(
            Seen(bucket, by_url, request.raw_path.startswith("http://"), answer.status)
        )
        return answer

    @staticmethod
    def _place(request: web.Request) -> str:
        host = request.headers["Host"]
        path = request.rel_url.path.lstrip("/")
        return f"{host.partition('.s3.')[0]}/{path}" if host.endswith(_DOMAIN) else path

    def _refusal(self, request: web.Request, bucket: str, by_url: bool) -> web.Response | None:
        region = self.regions[bucket]
        host = request.headers["Host"]
        is_other_host = host.endswith(_DOMAIN) and not host.endswith(
            (f".s3.{region}{_DOMAIN}", f"{bucket}.s3{_DOMAIN}")
        )
        if is_other_host or _region(request, by_url) != region:
            return _refuse(301 if is_other_host else 400, region)
        if by_url and bucket in self.headers_only:
            return _refuse(403, region)
        return None

    def _object(self, request: web.Request, body: bytes) -> web.Response:
        headers = {"ETag": f'"{hashlib.md5(body).hexdigest()}"'} if self.tagged else {}
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(len(body))})
        part = request.http_range
        assert part.start is not None
        assert part.stop is not None
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(body)}"
        return web.Response(status=206, body=body[part], headers=headers)


def _refuse(status: int, region: str) -> web.Response:
    code = {
        301: "PermanentRedirect",
        400: "AuthorizationHeaderMalformed",
        403: "SignatureDoesNotMatch",
    }[status]
    return web.Response(
        status=status,
        text=f"<Error><Code>{code}</Code></Error>",
        content_type="application/xml",
        headers={"x-amz-bucket-region": region},
    )


def _region(request: web.Request, by_url: bool) -> str:
    """Return the region that a request is signed for."""
    if by_url:
        return request.query["X-Amz-Credential"].split("/")[2]
    return request.headers["Authorization"].partition("Credential=")[2].split("/")[2]


DATA = bytes(range(256)) * 400
HERE = "us-east-1"
THERE = "eu-west-3"
READS = 5
TABLE = OriginTable.model_validate({"match": "s3://", "storage_options": {"use_ssl": False}})


@pytest.fixture
async def strict() -> AsyncIterator[StrictS3]:
    """A store with buckets in the SDK's region, in another, and without signed urls."""
    regions = {"near": HERE, "far": THERE, "odd": HERE}
    strict = StrictS3(regions, headers_only=frozenset({"odd"}))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", strict.answer)
    async with TestServer(app) as server:
        strict.port = server.port or 0
        yield strict


def env(endpoint_url: str = "") -> dict[str, str]:
    """Return the variables for an AWS SDK; without an endpoint it asks the hosts of S3 itself."""
    found = aws_env(endpoint_url) | {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
    return {name: value for name, value in found.items() if value}


async def read(origins: Origins, strict: StrictS3, bucket: str) -> bool:
    """Return whether a bucket's object comes, part by part, each time by a version of its own."""
    url = strict.put(bucket, "a b+c.tar", DATA)
    origin = origins.origin(url)
    parts = [
        await read_range(origin, await origin.stat(url), start, start + 1000)
        for start in range(READS)
    ]
    return parts == [DATA[start : start + 1000] for start in range(READS)]


def late(strict: StrictS3, bucket: str) -> list[tuple[bool, int]]:
    """Return the later requests of a bucket: by signed url or not, and the answer's status."""
    return [(each.by_url, each.status) for each in strict.seen if each.bucket == bucket][-READS:]


@pytest.mark.parametrize("endpoint", first_quick(["s3's own hosts", "http://minio:80"]))
async def test_each_bucket_is_asked_in_its_own_region(
    endpoint: str, strict: StrictS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One in another region is asked directly, and one without signed urls goes by the SDK."""
    own = endpoint.startswith("s3")
    use_aws(monkeypatch, tmp_path, env("" if own else endpoint))
    hosts = ["near.s3", "odd.s3", "far.s3", f"far.s3.{THERE}"] if own else []
    for name in [*(f"{host}.amazonaws.com" for host in hosts), "minio"]:
        lead(monkeypatch, name, "127.0.0.1", port=strict.port)
    origins = Origins([TABLE], max_connections=4)
    for bucket in ("odd", "far", "near", "far"):
        assert await read(origins, strict, bucket)
    await origins.close()
    for bucket, by_url in {"near": True, "far": True, "odd": False}.items():
        assert set(late(strict, bucket)) == {(by_url, 200), (by_url, 206)}


async def test_the_environments_proxies_hold_for_each_host(
    strict: StrictS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A host that `no_proxy` names is asked directly, others by the proxy, in any order."""
    use_aws(monkeypatch, tmp_path, env())
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{strict.port}")
    monkeypatch.setenv("no_proxy", "near.s3.amazonaws.com")
    lead(monkeypatch, "near.s3.amazonaws.com", "127.0.0.1", port=strict.port)
    lead(monkeypatch, "odd.s3.amazonaws.com", "127.0.0.1", port=1)  # nobody is there
    origins = Origins([TABLE], max_connections=4)
    for bucket in ("odd", "near", "odd"):
        assert await read(origins, strict, bucket)
    await origins.close()
    assert {each.proxied for each in strict.seen if each.bucket == "near"} == {False}
    assert {each.proxied for each in strict.seen if each.bucket == "odd"} == {True}
    assert {each.by_url for each in strict.seen if each.bucket == "near"} == {True}


@pytest.mark.parametrize("region", first_quick(["elsewhere.example/", ""]))
async def test_invalid_region_is_not_followed(
    region: str, strict: StrictS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A header that would change the host is left to the SDK, which refuses it."""
    strict.regions = {"near": region}
    use_aws(monkeypatch, tmp_path, env())
    for name in ("near.s3.amazonaws.com", "near.s3.elsewhere.example"):
        lead(monkeypatch, name, "127.0.0.1", port=strict.port)
    origins = Origins([TABLE], max_connections=4)
    with pytest.raises(OriginError):
        await read(origins, strict, "near")
    await origins.close()
    assert strict.hosts == {"near.s3.amazonaws.com"}


@pytest.fixture
async def odd(
    strict: StrictS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[S3Origin]:
    """The origin of the bucket `odd`, which tries refused presigned urls at each read."""
    use_aws(monkeypatch, tmp_path, env("http://minio:80"))
    lead(monkeypatch, "minio", "127.0.0.1", port=strict.port)
    workers = Workers()
    origin = S3Origin(Setup("s3", TABLE, 4, None, workers), probe_interval_s=0.0)
    yield origin
    await origin.close()
    await workers.close()


async def test_refused_presigned_urls_are_tried_again(strict: StrictS3, odd: S3Origin) -> None:
    """A bucket that accepts presigned urls again is soon read with them again."""
    url = strict.put("odd", "a.tar", DATA)
    for start in range(READS):
        obj = await odd.stat(url)
        assert await read_range(odd, obj, start, start + 1000) == DATA[start : start + 1000]
    strict.headers_only = frozenset()
    await read_range(odd, obj, 0, 1000)
    await odd.stat(url)
    assert [(each.by_url, each.status) for each in strict.seen[-2:]] == [(True, 206), (True, 200)]


async def test_objects_without_etag_are_no_refusal_of_presigned_urls(
    strict: StrictS3, odd: S3Origin
) -> None:
    """Such objects and the bucket's next are requested by presigned urls all the same."""
    url = strict.put("odd", "a.tar", DATA)
    strict.headers_only = frozenset()
    strict.tagged = False
    for _ in range(READS):
        with pytest.raises(OriginUnavailableError, match="no version"):
            await odd.stat(url)
    strict.tagged = True
    await odd.stat(url)
    assert [(each.by_url, each.status) for each in strict.seen] == [(True, 200)] * (READS + 1)
