"""S3 and compatible object stores: ranged reads of one version.

HEADs and GETs are sent by transport workers to presigned urls: the SDK would deliver bodies on the event loop, at twice
the cost. It does everything else, and serves every object store or answer that differs from a public cloud's plain
bucket.
"""

import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import ClientError, NoCredentialsError, ParamValidationError
from botocore.httpsession import get_cert_path

from shardcache.errors import NotFoundError, OriginError, OriginUnavailableError, ShardChangedError
from shardcache.logs import SharedLogger
from shardcache.origin import http_semantics
from shardcache.origin.base import (
    MD5,
    PRESIGNED_OPTIONS,
    Checksum,
    Origin,
    RemoteObject,
    Route,
    Setup,
    checksum_in,
    commit_parts,
)
from shardcache.origin.breaker import Breaker
from shardcache.origin.s3_sdk import SdkSessions
from shardcache.origin.s3_signing import ALONE, BEHIND_TIER, SIGNED_FOR_S, Signer
from shardcache.transport.messages import ECHOED, Answer, Body, Request
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit, Flow, Received

log = SharedLogger()

_CHECKSUMS = ("crc32c", "crc64nvme", "crc32")
_CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
_REFUSALS = {301, 307, 308, 400, 401, 403, 404}
_MAX_REFUSALS = 3
_REFUSED_S = 60.0
_MAX_SIGNED = 64
_MAX_HOSTS = 256

# Parts are in memory while they are sent. S3 takes 10,000 of them: shards of up to 160 GB.
_UPLOAD_PART_BYTES = 16 * 1024**2
_UPLOADED_PARTS = 4
_UPLOAD_ATTEMPTS = 5
_UPLOAD_SILENCE_S = 60

# Answers of a store, and of a botocore, that know no conditions of uploads.
_NO_CONDITIONS = re.compile(r"\(NotImplemented\)|Unknown parameter in input")

_SOURCES = {"env": "AWS_ACCESS_KEY_ID in the environment", "iam-role": "the instance's role"}

Headers = Mapping[str, str]
"""Headers of an answer; names in lower case."""

T = TypeVar("T", bound=Answer | None)


class SdkNeededError(Exception):
    """The SDK has to make the request."""


class RefusedError(SdkNeededError):
    """A presigned url was refused: the SDK's answer states the reason, or only the url was not accepted."""


class _NoneFoundError(NoCredentialsError):  # type: ignore[misc]
    fmt = (
        "no credentials found in the chain: storage_options, AWS_ACCESS_KEY_ID, web identity, SSO, "
        "~/.aws/credentials and config, the container's role, the instance's role"
    )


class S3Origin(Origin):
    """Buckets with one set of options; requests are by presigned urls unless a bucket refuses them.

    After three refusals in a row the SDK serves the bucket, and one read of each minute tries a presigned url again.
    """

    def __init__(self, setup: Setup, refused_s: float = _REFUSED_S) -> None:
        # The downloader retries, counts its retries, and notices stalls; uploads leave all that to the SDK.
        self._sessions = SdkSessions(setup.table, setup.max_connections)
        self._uploading = SdkSessions(
            setup.table, setup.max_connections, attempts=_UPLOAD_ATTEMPTS, read_timeout_s=_UPLOAD_SILENCE_S
        )
        self._verify_etag = setup.table.verify_etag
        self._plain = set(setup.table.storage_options) <= PRESIGNED_OPTIONS
        self._workers = setup.workers
        self._presigned = defaultdict[str, Breaker](partial(Breaker, _MAX_REFUSALS, refused_s))  # by bucket
        self._signer = Signer(ALONE if setup.table.tier is None else BEHIND_TIER)
        self._signed: dict[str, tuple[str, float]] = {}
        self._proxy_of = lru_cache(_MAX_HOSTS)(http_semantics.proxy_of)
        self._ca_file = lru_cache(1)(_ca_file)

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; one HEAD."""
        where = _place(url)
        if not where["Key"]:
            raise NotFoundError(
                "this is a bucket", url=url, remedy="end the url with / to take every shard in the bucket"
            )
        async with self._sessions.use(url) as fs:
            try:
                head, joinable = await self._head(fs, where, url, first_bytes), True
            except SdkNeededError as exn:
                head, joinable = await _head_by_sdk(fs, where), False
                self._served_by_sdk(exn, url, where["Bucket"])
            size_bytes = http_semantics.size_of(head.get("content-length"), url)
            return self._object(url, head, size_bytes, joinable=joinable)

    async def credentials(self, url: str) -> str:
        """As `Origin.credentials`: the link of botocore's chain, never the credentials themselves."""
        async with self._sessions.use(url) as fs:
            if fs.anon:
                return "none: the [[origin]] table sets anon"
            if fs.key:
                return "storage_options of the [[origin]] table"
            if (found := await fs.session.get_credentials()) is None:
                raise _NoneFoundError
            is_temporary = (await found.get_frozen_credentials()).token
            profile = fs.session.get_config_variable("profile")
        source = _SOURCES.get(found.method, found.method.replace("-", " "))
        return f"{source}{f', profile {profile}' if profile else ''}{', temporary' if is_temporary else ''}"

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; one GET with If-Match."""
        where = _place(obj.url)
        bucket = where["Bucket"]
        async with self._sessions.use(obj.url) as fs:

            async def ask(signed: str) -> Answer | None:
                request = self._request(fs, "GET", signed, _of_version(obj, parts))
                return await self._workers.fetch(request, _body(obj, parts, held=commit is not None), flow, commit)

            try:
                if not self._admits(bucket):
                    raise SdkNeededError
                answer = await self._answer(bucket, partial(self._signed_url, fs, where, obj.url), ask)
            except SdkNeededError as exn:
                sums = await commit_parts(parts, await _read_by_sdk(fs, where, obj, parts, flow), commit)
                self._served_by_sdk(exn, obj.url, bucket)
                return sums
        if answer is None:
            return None
        if answer.sums is None:
            http_semantics.judge(answer, answer.headers.get("etag", "").strip('"'), obj, parts)
        self._presigned[bucket].succeeded()
        return answer.sums

    async def ask_tier(self, route: Route, obj: RemoteObject, parts: Parts, flow: Flow | None) -> Answer | None:
        """As `Origin.ask_tier`."""
        where = _place(obj.url)
        async with self._sessions.use(obj.url) as fs:
            if not self._usable(where["Bucket"]):
                return None
            headers = {**_of_version(obj, parts), **route.headers}
            request = Request("GET", await self._signed_url(fs, where, obj.url), headers, via=route.address)
            if flow is None:
                return await self._workers.ask(request)
            return await self._workers.fetch(request, _body(obj, parts, held=False), flow)

    async def permitted_lately(self, route: Route, url: str) -> RemoteObject | None:
        """As `Origin.permitted_lately`."""
        where = _place(url)
        async with self._sessions.use(url) as fs:
            if not self._usable(where["Bucket"]):
                return None
            signed = await self._signed_url(fs, where, url)
            answer = await self._workers.ask(Request("GET", signed, route.headers, via=route.address))
        size_bytes = http_semantics.total_bytes(answer.headers.get("content-range"))
        if answer.status != 206 or size_bytes is None or "etag" not in answer.headers:
            return None
        return self._object(url, answer.headers, size_bytes, joinable=False)

    async def list_prefix(self, prefix: str, received: Received, *, flat: bool = False) -> list[RemoteObject]:
        """As `Origin.list_prefix`; one request per thousand keys. Versions are those of `stat`."""
        where = _place(prefix)
        root = prefix.removesuffix(where["Key"])
        found: list[RemoteObject] = []
        more = {"Delimiter": "/"} if flat else {}
        async with self._sessions.use(prefix) as fs:
            while True:
                page = await fs._call_s3("list_objects_v2", Bucket=where["Bucket"], Prefix=where["Key"], **more)
                entries = page.get("Contents", [])
                found += (_listed(root + entry["Key"], entry) for entry in entries)
                folders = page.get("CommonPrefixes", [])
                found += (RemoteObject(root + folder["Prefix"], "", 0) for folder in folders)
                received(len(entries) + len(folders))
                if not page["IsTruncated"]:
                    return sorted(found, key=lambda obj: obj.url)
                before, more = more, {**more, "ContinuationToken": page["NextContinuationToken"]}
                if more == before:
                    raise OriginUnavailableError("the origin repeats a page of its listing endlessly", url=prefix)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`; in parts if the file is large, which become an object only after the last.

        One that replaces a certain version is sent whole: parts have no conditions.
        """
        where = _place(url)
        condition = {} if replaced is None else {"IfMatch": f'"{replaced}"'} if replaced else {"IfNoneMatch": "*"}
        async with self._uploading.use(url) as fs:
            put = partial(fs._put_file, str(path), f"{where['Bucket']}/{where['Key']}", max_concurrency=_UPLOADED_PARTS)
            try:
                await put(chunksize=2**32 if condition else _UPLOAD_PART_BYTES, **condition)
            except (OSError, ParamValidationError) as exn:
                if not condition or not _NO_CONDITIONS.search(f"{exn!r} {exn.__cause__!r}"):
                    raise
                await put(chunksize=_UPLOAD_PART_BYTES)
            head = await _head_by_sdk(fs, where)
            return RemoteObject(url, _etag(head.get("etag"), url), http_semantics.size_of(head["content-length"], url))

    async def close(self) -> None:
        """As `Origin.close`."""
        await self._sessions.close()
        await self._uploading.close()

    async def _head(self, fs: Any, where: dict[str, str], url: str, first_bytes: int) -> Headers:
        """Return the headers of the answer to a HEAD. Raises SdkNeededError."""
        if not self._usable(where["Bucket"]):
            raise SdkNeededError
        ahead = None
        if first_bytes:
            ahead = self._request(fs, "GET", await self._signed_url(fs, where, url), {}).beginning(first_bytes)

        async def ask(signed: str) -> Answer:
            return await self._workers.ask(self._request(fs, "HEAD", signed, _CHECKSUM_MODE), ahead)

        sign = partial(self._signer.url, fs, "head_object", {**where, "ChecksumMode": "ENABLED"}, _CHECKSUM_MODE)
        answer = await self._answer(where["Bucket"], sign, ask)
        if answer.status >= 300:
            what = f"the origin answered a HEAD with status {answer.status}"
            raise http_semantics.error_of(answer.status, what, url, answer.headers)
        return answer.headers

    def _object(self, url: str, head: Headers, size_bytes: int, *, joinable: bool) -> RemoteObject:
        version = _etag(head.get("etag"), url)
        checksum = _checksum(head, url) or (_presumed_md5(head) if self._verify_etag else None)
        return RemoteObject(url, version, size_bytes, checksum, joinable=joinable)

    def _usable(self, bucket: str) -> bool:
        """Return whether the bucket accepts presigned urls, for all that is known."""
        return self._plain and not self._presigned[bucket].is_open

    def _admits(self, bucket: str) -> bool:
        """Return whether to read by a presigned url now; where they were refused, it is a new try."""
        return self._plain and self._presigned[bucket].admits(time.monotonic())

    async def _answer(self, bucket: str, sign: Callable[[], Awaitable[str]], ask: Callable[[str], Awaitable[T]]) -> T:
        """Return the answer from the bucket's own region. Raises SdkNeededError."""
        for _ in range(2):
            answer = await ask(await sign())
            if answer is None or answer.status not in _REFUSALS:
                return answer
            self._signed.clear()
            if not self._signer.move(bucket, answer.headers.get("x-amz-bucket-region", "")):
                break
        raise RefusedError

    def _request(self, fs: Any, method: str, url: str, headers: Mapping[str, str]) -> Request:
        """Return a request. Raises SdkNeededError if it needs a proxy that only the SDK can use."""
        scheme, host, *_ = urlsplit(url)
        proxy = self._proxy_of(f"{scheme}://{host}")
        if proxy is not None and not proxy.startswith("http://"):
            raise SdkNeededError
        return Request(method, url, headers, proxy, self._ca_file(fs))

    async def _signed_url(self, fs: Any, where: dict[str, str], of: str) -> str:
        """Return a presigned url, reused for all parts of an object during half of its validity."""
        now_s = time.monotonic()
        url, signed_at_s = self._signed.get(of, ("", 0.0))
        if not url or now_s - signed_at_s > SIGNED_FOR_S / 2:
            url = await self._signer.url(fs, "get_object", where, {})
            if len(self._signed) >= _MAX_SIGNED:
                self._signed.clear()
            self._signed[of] = (url, now_s)
        return url

    def _served_by_sdk(self, cause: SdkNeededError, url: str, bucket: str) -> None:
        """Record that the SDK got what a presigned url may have been refused."""
        if not isinstance(cause, RefusedError):
            return
        breaker = self._presigned[bucket]
        was_open = breaker.is_open
        breaker.failed(time.monotonic())
        if breaker.is_open and not was_open:
            log.info("presigned urls refused; using the SDK for the bucket", url=url, bucket=bucket)


def _place(url: str) -> dict[str, str]:
    """Return `Bucket` and `Key`; an access point's ARN counts as the bucket. Raises OriginError without a bucket."""
    bucket, _, key = url.partition("://")[2].partition("/")
    if bucket.startswith("arn:"):
        name, _, key = key.partition("/")
        bucket += f"/{name}"
    if not bucket:
        raise OriginError("no bucket in the url", url=url, remedy="write s3://bucket/key")
    return {"Bucket": bucket, "Key": key}


async def _read_by_sdk(fs: Any, where: Mapping[str, str], obj: RemoteObject, parts: Parts, flow: Flow) -> memoryview:
    # The SDK would send other bytes in UTF-8; the answer's own ETag is compared in any case.
    condition = {"IfMatch": f'"{obj.version}"'} if obj.version.isascii() else {}
    answer = await fs._call_s3(
        "get_object", **where, Range=http_semantics.range_header(parts.start, parts.stop), **condition
    )
    async with answer["Body"]:  # aiobotocore 2 enters another object, which reads all at once
        status = int(answer["ResponseMetadata"]["HTTPStatusCode"])
        http_semantics.check_range(obj, parts.start, parts.stop, status, answer.get("ContentRange"))
        if _etag(answer.get("ETag"), obj.url) != obj.version:
            raise ShardChangedError("the origin sent a different version than requested", url=obj.url)
        return await http_semantics.read_exactly(parts.size_bytes, answer["Body"].read, flow, obj.url)


async def _head_by_sdk(fs: Any, where: Mapping[str, str]) -> Headers:
    try:
        answer = await fs._call_s3("head_object", ChecksumMode="ENABLED", **where)
    except OSError as exn:
        if not isinstance(exn.__cause__, ClientError):
            raise
        # An answer to HEAD has no body, hence no reason; a GET that fails the same way states it.
        answer = await fs._call_s3("get_object", Range="bytes=0-0", **where)
        answer["Body"].close()
        raise
    headers: Headers = answer["ResponseMetadata"]["HTTPHeaders"]
    return headers


def _listed(url: str, entry: Mapping[str, Any]) -> RemoteObject:
    """Return an object of a listing, whose XML is in UTF-8; in headers, each byte is a character."""
    etag = entry.get("ETag", "").encode(errors="surrogateescape").decode("latin-1")
    return RemoteObject(url, _etag(etag, url), http_semantics.size_of(entry["Size"], url))


def _etag(field: str | None, url: str) -> str:
    etag = (field or "").strip('"')
    if not ECHOED.fullmatch(etag):
        raise http_semantics.no_version(url)
    return etag


def _checksum(head: Headers, url: str) -> Checksum | None:
    """Return the object's checksum, unless it is, or may be, a composite of its uploaded parts' checksums."""
    in_parts = "-" in head["etag"]
    if head.get("x-amz-checksum-type", "COMPOSITE" if in_parts else "FULL_OBJECT") != "FULL_OBJECT":
        return None
    for algorithm in _CHECKSUMS:
        value = head.get(f"x-amz-checksum-{algorithm}", "")
        if value and "-" not in value:
            return checksum_in(algorithm, value, url)
    return None


def _presumed_md5(head: Headers) -> Checksum | None:
    """Return the ETag as an MD5, unless the headers rule that out.

    See "Object" in the S3 API reference: the ETag is an MD5 if the object was neither uploaded in parts, which shows in
    its form, nor encrypted with a KMS or customer key; in a directory bucket it never is.
    """
    etag = head["etag"].strip('"')
    encrypted = (
        "x-amz-server-side-encryption-customer-algorithm" in head
        or head.get("x-amz-server-side-encryption", "AES256") != "AES256"
    )
    if encrypted or head.get("x-amz-storage-class") == "EXPRESS_ONEZONE" or not re.fullmatch("[0-9a-f]{32}", etag):
        return None
    return Checksum(MD5, int(etag, 16))


def _of_version(obj: RemoteObject, parts: Parts) -> dict[str, str]:
    """Return the headers that request parts of exactly this version."""
    return {"Range": http_semantics.range_header(parts.start, parts.stop), "If-Match": f'"{obj.version}"'}


def _body(obj: RemoteObject, parts: Parts, *, held: bool) -> Body:
    expected = {
        "content-range": http_semantics.content_ranges(obj, parts.start, parts.stop),
        "etag": (f'"{obj.version}"', obj.version),
    }
    return Body(parts, 206, expected, held=held)


def _ca_file(fs: Any) -> str | None:
    """Return the path of the certificates that the SDK trusts."""
    path: str | None = fs.session.get_config_variable("ca_bundle") or get_cert_path(True)
    return path
