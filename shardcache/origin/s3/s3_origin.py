"""S3 and compatible object stores: ranged reads of one version.

Transport workers send HEADs and GETs to presigned urls: the SDK would deliver bodies on the event
loop, at twice the cost. The SDK (botocore, by s3fs) makes all other requests. It also makes HEADs
and GETs in a store that presigned urls do not suit. `fs` is an s3fs filesystem throughout.
"""

import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import NoCredentialsError
from botocore.httpsession import get_cert_path

from shardcache.access.protocols import row_of
from shardcache.errors import ConfigError, NotFoundError, OriginUnavailableError
from shardcache.origin.base import Setup, commit_parts
from shardcache.origin.breaker import Breaker
from shardcache.origin.http.http_errors import error_of
from shardcache.origin.http.http_semantics import (
    content_ranges,
    proxy_of,
    raise_unusable,
    range_header,
    size_of,
    total_bytes,
)
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.origin.permitted_origin import CredentialedOrigin
from shardcache.origin.s3.s3_headers import (
    Headers,
    checksum_of,
    etag_in,
    modified_s,
    part_in,
    presumed_md5,
)
from shardcache.origin.s3.s3_sdk_requests import call, head_by_sdk, object_params, read_by_sdk
from shardcache.origin.s3.s3_sessions import SdkSessions, descriptions
from shardcache.origin.s3.s3_signing import BEHIND_TIER, DIRECT, SIGNED_FOR_S, Signer
from shardcache.origin.s3.s3_uploads import Uploads
from shardcache.origin.tier.tier_state import Route
from shardcache.shared.credentials.aws_keys import AwsKeys
from shardcache.shared.own_endpoint import ENDPOINT_HEADER, OWN_ENDPOINT, OWN_ENDPOINT_REMEDY
from shardcache.telemetry.logs import SharedLogger
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.messages import Answer, Body, Request
from shardcache.transport.between.parts import Parts, PartSums

log = SharedLogger()

_CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
# Statuses by which a store may refuse a presigned url. The SDK then repeats the request, and its
# answer states the reason.
_REFUSALS = {301, 307, 308, 400, 401, 403, 404, 405}
# After this number of refusals in a row, the SDK makes a bucket's requests for this time.
_MAX_REFUSALS = 3
_REFUSED_S = 60.0
_MAX_SIGNED = 64  # number of presigned urls that are kept
_MAX_HOSTS = 256  # number of hosts whose proxy is remembered

# Descriptions of the places where botocore finds credentials, by its names; others are not changed.
_SOURCES = {
    "env": "AWS_ACCESS_KEY_ID in the environment",
    "explicit": "AWS_ACCESS_KEY_ID in the environment of a reader",
    "iam-role": "the instance's role",
}

T = TypeVar("T", bound=Answer | None)


def load() -> None:
    """Load botocore's descriptions of S3 before the first request needs them.

    Blocks; together with the import of this module, it takes a second.
    """
    descriptions()


class SdkNeededError(Exception):
    """The SDK has to make the request."""


class RefusedError(SdkNeededError):
    """A presigned url was refused.

    The SDK then makes the same request: it succeeds, or its answer states the reason.
    """


class _NoneFoundError(NoCredentialsError):  # type: ignore[misc]
    """botocore's error for missing credentials, with all places where they are looked for."""

    fmt = (
        "no credentials found in the chain: storage_options, AWS_ACCESS_KEY_ID, web identity, SSO, "
        "~/.aws/credentials and config, the container's role, the instance's role"
    )


class S3Origin(CredentialedOrigin):
    """Buckets with one set of options; requests are by presigned urls unless a bucket refuses them.

    After three refusals in a row, the SDK makes the bucket's requests, and one read of each minute
    tries a presigned url again.

    Args:
        refused_s: the time between two such tries.
    """

    credentials_kind = AwsKeys
    secrets = frozenset({"key", "secret", "token", "profile", "session"})

    def __init__(self, setup: Setup, refused_s: float = _REFUSED_S) -> None:
        table = setup.table
        # The SDK gets no timeout: the downloader retries, counts its retries, and notices stalls.
        self._sessions = SdkSessions(table, setup.max_connections, self._keys(setup))
        self._uploads = Uploads(table, setup.max_connections)
        self._verify_etag = table.verify_etag
        signed_options = row_of(setup.protocol).signed_options or frozenset()
        # True if presigned urls can express all options of the table.
        self._is_plain = signed_options.issuperset(table.storage_options)
        self._workers = setup.workers
        new_breaker = partial(Breaker, _MAX_REFUSALS, refused_s)
        self._breakers = defaultdict[str, Breaker](new_breaker)  # by bucket
        self._signer = Signer(DIRECT if table.tier is None else BEHIND_TIER)
        # Presigned urls and the times at which they were signed, by url.
        self._signed_urls: dict[str, tuple[str, float]] = {}
        self._signed_by_fs: Any = None  # the filesystem with these urls' credentials
        self._proxy_of = lru_cache(_MAX_HOSTS)(proxy_of)
        self._ca_file = lru_cache(1)(_ca_file)

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; one HEAD."""
        where = object_params(url)
        if not where["Key"]:
            raise NotFoundError(
                "this is a bucket",
                url=url,
                remedy="end the url with / to take every shard in the bucket",
            )
        async with self._sessions.use(url) as fs:
            try:
                head = await self._head(fs, where, url, first_bytes)
                is_joinable = True
            except SdkNeededError as exn:
                head = await head_by_sdk(fs, where)
                is_joinable = False
                self._record_refusal(exn, url, where["Bucket"])
            size_bytes = size_of(head.get("content-length"), url)
            return self._object(url, head, size_bytes, joinable=is_joinable)

    async def credentials(self, url: str) -> str:
        """As `Origin.credentials`: the place where botocore found them, never the keys."""
        async with self._sessions.use(url) as fs:
            if fs.anon:
                return "none: the [[origin]] table sets anon"
            if fs.key:
                return "storage_options of the [[origin]] table"
            in_use = await fs.session.get_credentials()
            if in_use is None:
                raise _NoneFoundError
            is_temporary = bool((await in_use.get_frozen_credentials()).token)
            profile = fs.session.get_config_variable("profile")

        kind: str = _SOURCES.get(in_use.method, in_use.method.replace("-", " "))
        if profile:
            kind += f", profile {profile}"
        if is_temporary:
            kind += ", temporary"
        return kind

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; one GET with If-Match."""
        where = object_params(obj.url)
        bucket = where["Bucket"]
        async with self._sessions.use(obj.url) as fs:

            async def sign() -> str:
                return await self._signed_url(fs, where, obj.url)

            async def ask(signed: str) -> Answer | None:
                request = self._request(fs, "GET", signed, _version_headers(obj, parts))
                body = _version_body(obj, parts, held=commit is not None)
                return await self._workers.fetch(request, body, flow, commit)

            try:
                if not self._admits(bucket):
                    raise SdkNeededError
                answer = await self._answer(bucket, sign, ask)
            except SdkNeededError as exn:
                data = await read_by_sdk(fs, where, obj, parts, flow)
                sums = await commit_parts(parts, data, commit)
                self._record_refusal(exn, obj.url, bucket)
                return sums
        if answer is None:
            return None
        if answer.sums is None:
            version = answer.headers.get("etag", "").strip('"')
            raise_unusable(answer, version, obj, parts)
        self._breakers[bucket].succeeded()
        return answer.sums

    async def ask_tier(
        self,
        route: Route,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow | None,
    ) -> Answer | None:
        """As `Origin.ask_tier`."""
        where = object_params(obj.url)
        async with self._sessions.use(obj.url) as fs:
            if not self._is_usable(where["Bucket"]):
                return None
            signed = await self._signed_url(fs, where, obj.url)
            headers = {**_version_headers(obj, parts), **route.headers}
            request = Request("GET", signed, headers, via=route.address)
            if flow is None:
                return await self._workers.ask(request)
            body = _version_body(obj, parts, held=False)
            return await self._workers.fetch(request, body, flow)

    async def permitted_lately(self, route: Route, url: str) -> RemoteObject | None:
        """As `Origin.permitted_lately`."""
        where = object_params(url)
        async with self._sessions.use(url) as fs:
            if not self._is_usable(where["Bucket"]):
                return None
            signed = await self._signed_url(fs, where, url)
            request = Request("GET", signed, route.headers, via=route.address)
            answer = await self._workers.ask(request)
        size_bytes = total_bytes(answer.headers.get("content-range"))
        if answer.status != 206 or size_bytes is None or "etag" not in answer.headers:
            return None
        return self._object(url, answer.headers, size_bytes, joinable=False)

    async def list_prefix(
        self,
        prefix: str,
        received: Received,
        *,
        flat: bool = False,
    ) -> list[RemoteObject]:
        """As `Origin.list_prefix`; one request per thousand keys. `stat` gives equal versions."""
        where = object_params(prefix)
        root = prefix.removesuffix(where["Key"])
        options = {"Bucket": where["Bucket"], "Prefix": where["Key"]}
        if flat:
            options["Delimiter"] = "/"

        objects: list[RemoteObject] = []
        token = None  # token of the next page; None on the first page
        async with self._sessions.use(prefix) as fs:
            while True:
                page = await call(fs, "list_objects_v2", **options)
                entries = page.get("Contents", [])
                folders = page.get("CommonPrefixes", [])
                objects += [_listed_object(root + entry["Key"], entry) for entry in entries]
                objects += [RemoteObject(root + folder["Prefix"], "", 0) for folder in folders]
                received(len(entries) + len(folders))
                if not page["IsTruncated"]:
                    return sorted(objects, key=lambda obj: obj.url)

                next_token = page["NextContinuationToken"]
                if next_token == token:
                    raise OriginUnavailableError(
                        "the origin repeats a page of its listing endlessly",
                        url=prefix,
                    )
                token = next_token
                options["ContinuationToken"] = token

    async def list_page(self, wanted: PageRequest) -> ListedPage:
        """As `Origin.list_page`; one request."""
        where = object_params(wanted.prefix)
        root = wanted.prefix.removesuffix(where["Key"])
        options: dict[str, Any] = {
            "Bucket": where["Bucket"],
            "Prefix": where["Key"],
            "MaxKeys": wanted.max_keys,
        }
        if wanted.delimiter:
            options["Delimiter"] = wanted.delimiter
        if wanted.token:
            options["ContinuationToken"] = wanted.token
        elif wanted.after:
            options["StartAfter"] = wanted.after
        async with self._sessions.use(wanted.prefix) as fs:
            page = await call(fs, "list_objects_v2", **options)
        entries = page.get("Contents", [])
        folders = page.get("CommonPrefixes", [])
        next_token = ""
        if page["IsTruncated"]:
            next_token = page.get("NextContinuationToken", "")
        return ListedPage(
            objects=[_listed_object(root + entry["Key"], entry) for entry in entries],
            folders=[root + folder["Prefix"] for folder in folders],
            next_token=next_token,
        )

    async def part_span(self, obj: RemoteObject, number: int) -> tuple[int, int] | None:
        """As `Origin.part_span`; one HEAD."""
        where = object_params(obj.url)
        async with self._sessions.use(obj.url) as fs:
            head = await head_by_sdk(fs, {**where, "PartNumber": number})
        return part_in(head, obj, number)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`."""
        return await self._uploads.upload(path, url, replaced)

    async def close(self) -> None:
        """As `Origin.close`."""
        await self._sessions.close()
        await self._uploads.close()

    def _keys(self, setup: Setup) -> AwsKeys | None:
        """Return the keys with which to read; None for the table's, or those that botocore finds.

        Temporary keys of the environment are passed explicitly. Once they have expired, botocore
        would read the same keys from the environment again, where nobody renews them.
        """
        if isinstance(setup.credentials, AwsKeys):
            return setup.credentials
        table = setup.table
        has_own = not self.secrets.isdisjoint(table.storage_options)
        if table.anon or table.profile or has_own:
            return None
        keys = AwsKeys.of(os.environ)
        return keys if keys is not None and keys.is_temporary else None

    async def _head(self, fs: Any, where: dict[str, str], url: str, first_bytes: int) -> Headers:
        """Return the headers of the answer to a HEAD. Raises SdkNeededError.

        Args:
            where: bucket and key, as parameters of the SDK.
            first_bytes: number of the object's first bytes to request ahead; 0 for none.
        """
        if not self._is_usable(where["Bucket"]):
            raise SdkNeededError
        ahead = None
        if first_bytes:
            signed_get = await self._signed_url(fs, where, url)
            ahead = self._request(fs, "GET", signed_get, {}).beginning(first_bytes)

        async def sign() -> str:
            params = {**where, "ChecksumMode": "ENABLED"}
            return await self._signer.url(fs, "head_object", params, _CHECKSUM_MODE)

        async def ask(signed: str) -> Answer:
            request = self._request(fs, "HEAD", signed, _CHECKSUM_MODE)
            return await self._workers.ask(request, ahead)

        answer = await self._answer(where["Bucket"], sign, ask)
        if ENDPOINT_HEADER in answer.headers:
            raise ConfigError(OWN_ENDPOINT, url=url, remedy=OWN_ENDPOINT_REMEDY)
        if answer.status >= 300:
            problem = f"the origin answered a HEAD with status {answer.status}"
            raise error_of(answer.status, problem, url, answer.headers)
        return answer.headers

    def _object(self, url: str, head: Headers, size_bytes: int, *, joinable: bool) -> RemoteObject:
        """Return the object that the headers of an answer describe."""
        version = etag_in(head.get("etag"), url)
        checksum = checksum_of(head, url)
        if checksum is None and self._verify_etag:
            checksum = presumed_md5(head)
        return RemoteObject(
            url,
            version,
            size_bytes,
            checksum,
            joinable=joinable,
            modified_s=modified_s(head.get("last-modified")),
        )

    # Presigned urls

    def _is_usable(self, bucket: str) -> bool:
        """Return whether presigned urls work in a bucket, as far as earlier requests have shown."""
        return self._is_plain and not self._breakers[bucket].is_open

    def _admits(self, bucket: str) -> bool:
        """Return whether to read by a presigned url now.

        In a bucket that refuses presigned urls, True is returned once a minute: that read tries
        them again.
        """
        return self._is_plain and self._breakers[bucket].admits(time.monotonic())

    async def _answer(
        self,
        bucket: str,
        sign: Callable[[], Awaitable[str]],
        ask: Callable[[str], Awaitable[T]],
    ) -> T:
        """Return the answer to a presigned url, from the bucket's own region.

        Raises SdkNeededError.

        Args:
            sign: returns the presigned url.
            ask: sends the request to it.
        """
        for _ in range(2):  # a second time if the first answer has named another region
            answer = await ask(await sign())
            if answer is None or answer.status not in _REFUSALS:
                return answer
            self._signed_urls.clear()
            region = answer.headers.get("x-amz-bucket-region", "")
            has_moved = self._signer.move(bucket, region)
            if not has_moved:
                break
        raise RefusedError

    def _request(self, fs: Any, method: str, url: str, headers: Mapping[str, str]) -> Request:
        """Return a request for a transport worker.

        Raises SdkNeededError if the request needs a proxy that only the SDK can use.
        """
        scheme, host, *_ = urlsplit(url)
        proxy = self._proxy_of(f"{scheme}://{host}")
        if proxy is not None and not proxy.startswith("http://"):
            raise SdkNeededError
        return Request(method, url, headers, proxy, self._ca_file(fs))

    async def _signed_url(self, fs: Any, where: dict[str, str], url: str) -> str:
        """Return a presigned url, reused for all parts of an object during half of its validity."""
        if fs is not self._signed_by_fs:
            self._signed_by_fs = fs
            self._signed_urls.clear()
        now_s = time.monotonic()
        signed, signed_at_s = self._signed_urls.get(url, ("", 0.0))
        if signed and now_s - signed_at_s <= SIGNED_FOR_S / 2:
            return signed

        signed = await self._signer.url(fs, "get_object", where, {})
        if len(self._signed_urls) >= _MAX_SIGNED:
            self._signed_urls.clear()
        self._signed_urls[url] = (signed, now_s)
        return signed

    def _record_refusal(self, cause: SdkNeededError, url: str, bucket: str) -> None:
        """Count the refusal of a presigned url, after the SDK's request has succeeded.

        Does nothing if the SDK made the request for another reason.
        """
        if not isinstance(cause, RefusedError):
            return
        breaker = self._breakers[bucket]
        was_open = breaker.is_open
        breaker.failed(time.monotonic())
        if breaker.is_open and not was_open:
            log.info("presigned urls refused; using the SDK for the bucket", url=url, bucket=bucket)


def _listed_object(url: str, entry: Mapping[str, Any]) -> RemoteObject:
    """Return the object that an entry of a listing describes."""
    # In a listing, the SDK decodes bytes as UTF-8. In the headers of other answers, each byte is a
    # character. A version must be the same text in both.
    etag = entry.get("ETag", "").encode(errors="surrogateescape").decode("latin-1")
    modified = entry.get("LastModified")
    return RemoteObject(
        url,
        etag_in(etag, url),
        size_of(entry["Size"], url),
        modified_s=None if modified is None else modified.timestamp(),
    )


def _version_headers(obj: RemoteObject, parts: Parts) -> dict[str, str]:
    """Return the headers that request parts of exactly this version."""
    span = range_header(parts.start, parts.stop)
    return {"Range": span, "If-Match": f'"{obj.version}"'}


def _version_body(obj: RemoteObject, parts: Parts, *, held: bool) -> Body:
    """Return the expected body of parts of exactly this version; for `held` see `Body`."""
    expected = {
        "content-range": content_ranges(obj, parts.start, parts.stop),
        "etag": (f'"{obj.version}"', obj.version),
    }
    return Body(parts, 206, expected, held=held)


def _ca_file(fs: Any) -> str | None:
    """Return the path of the certificates that the SDK trusts."""
    path: str | None = fs.session.get_config_variable("ca_bundle") or get_cert_path(verify=True)
    return path
