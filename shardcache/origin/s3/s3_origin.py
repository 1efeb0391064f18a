"""S3 and compatible object stores: ranged reads of one version.

A presigned url carries the signature that permits a request. Transport workers, which are processes
of their own, send HEADs and GETs to presigned urls: the SDK would deliver bodies on the event loop,
at twice the cost. The SDK (botocore, by s3fs) makes all other requests, and those HEADs and GETs
for which a presigned url cannot be used. In this file, `fs` is an s3fs filesystem, and `params` is
a url's bucket and key as parameters of the SDK. The table is the `[[origin]]` table for the store
in the daemon's config. A tier is a cache that the nodes of a cluster share in front of the store.
"""

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from botocore.exceptions import NoCredentialsError

from shardcache.origin.base import Setup, commit_parts
from shardcache.origin.http.http_errors import error_of
from shardcache.origin.http.http_semantics import (
    content_ranges,
    plain_etag,
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
from shardcache.origin.s3.s3_presigned import CHECKSUM_MODE, PresignedRequests, SdkNeededError
from shardcache.origin.s3.s3_sdk_requests import (
    bucket_and_key,
    call,
    head_by_sdk,
    object_params,
    read_by_sdk,
)
from shardcache.origin.s3.s3_sessions import SdkSessions, descriptions
from shardcache.origin.s3.s3_uploads import Uploads
from shardcache.origin.tier.tier_state import Route
from shardcache.shared.credentials.aws_keys import AwsKeys
from shardcache.shared.exceptions import ConfigError, NotFoundError, OriginUnavailableError
from shardcache.shared.own_endpoint import ENDPOINT_HEADER, OWN_ENDPOINT, OWN_ENDPOINT_REMEDY
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.messages import Answer, Body, Request
from shardcache.transport.between.parts import Parts, PartSums

_PROBE_INTERVAL_S = 60.0  # see `S3Origin`
# Descriptions of the places where botocore finds credentials, by botocore's names of them. Other
# names need no description. Explicit credentials are keys that `_keys` has read.
_SOURCES = {
    "env": "AWS_ACCESS_KEY_ID in the environment",
    "explicit": "AWS_ACCESS_KEY_ID in the environment",
    "iam-role": "the instance's role",
}


def load() -> None:
    """Load botocore's descriptions of S3 before the first request needs them.

    Blocks; together with the import of this module, it takes a second.
    """
    descriptions()


class _NoCredentialsFoundError(NoCredentialsError):  # type: ignore[misc]
    """botocore's error for missing credentials, with all places where they are looked for."""

    # The error's message; botocore would insert its arguments.
    fmt = (
        "no credentials found in the chain: storage_options, AWS_ACCESS_KEY_ID, web identity, SSO, "
        "~/.aws/credentials and config, the container's role, the instance's role"
    )


class S3Origin(CredentialedOrigin):
    """Buckets with one set of options.

    Args:
        setup: the origin's setup.
        probe_interval_s: in a bucket that refuses presigned urls, the SDK makes the requests, but
            one is tried again after each interval.
    """

    credentials_kind = AwsKeys
    secrets = frozenset({"key", "secret", "token", "profile", "session"})

    def __init__(self, setup: Setup, probe_interval_s: float = _PROBE_INTERVAL_S) -> None:
        table = setup.table
        # The SDK gets no timeout: the downloader retries, counts its retries, and notices stalls.
        self._sessions = SdkSessions(table, setup.max_connections, self._keys(setup))
        self._uploads = Uploads(table, setup.max_connections)
        self._verify_etag = table.verify_etag
        self._presigned = PresignedRequests(setup, probe_interval_s)
        self._workers = setup.workers

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; one HEAD."""
        params = object_params(url)
        if not params["Key"]:
            raise NotFoundError(
                "this is a bucket",
                url=url,
                remedy="end the url with / to take every shard in the bucket",
            )
        async with self._sessions.use(url) as fs:
            try:
                head = await self._presigned_head(fs, params, url, first_bytes)
                is_joinable = True  # transport workers write bytes as they arrive
            except SdkNeededError as exn:
                head = await head_by_sdk(fs, params)
                is_joinable = False  # the SDK reads all bytes of a request into memory
                self._presigned.record_refusal(exn, url, params["Bucket"])
            size_bytes = size_of(head.get("content-length"), url)
            return self._object(url, head, size_bytes, is_joinable=is_joinable)

    async def obtain_credentials(self, url: str) -> str:
        """As `Origin.obtain_credentials`: the place where botocore found them, never the keys."""
        async with self._sessions.use(url) as fs:
            if fs.anon:
                return "none: the [[origin]] table sets anon"
            if fs.key:
                return "storage_options of the [[origin]] table"
            credentials = await fs.session.get_credentials()
            if credentials is None:
                raise _NoCredentialsFoundError
            keys = await credentials.get_frozen_credentials()
            profile = fs.session.get_config_variable("profile")

        place: str = credentials.method
        source = _SOURCES.get(place, place.replace("-", " "))
        if profile:
            source += f", profile {profile}"
        if keys.token:
            source += ", temporary"
        return source

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; one GET with If-Match."""
        params = object_params(obj.url)
        bucket = params["Bucket"]
        async with self._sessions.use(obj.url) as fs:
            try:
                answer = await self._presigned_get(fs, params, obj, parts, flow, commit)
            except SdkNeededError as exn:
                data = await read_by_sdk(fs, params, obj, parts, flow)
                sums = await commit_parts(parts, data, commit)
                self._presigned.record_refusal(exn, obj.url, bucket)
                return sums
        if answer is None:  # `commit` returned False
            return None
        if answer.sums is None:  # the answer was not as expected, so nothing was written
            version = plain_etag(answer.headers.get("etag", ""))
            raise_unusable(answer, version, obj, parts)
        self._presigned.record_success(bucket)
        return answer.sums

    async def ask_tier(
        self,
        route: Route,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow | None,
    ) -> Answer | None:
        """As `Origin.ask_tier`; the tier is asked only by presigned urls."""
        params = object_params(obj.url)
        async with self._sessions.use(obj.url) as fs:
            if not self._presigned.is_usable(params["Bucket"]):
                return None
            signed = await self._presigned.url_for_get(fs, params, obj.url)
            headers = {**_range_headers(obj, parts), **route.headers}
            request = Request("GET", signed, headers, via=route.address)
            if flow is None:
                return await self._workers.ask(request)
            body = _expected_body(obj, parts, held=False)
            return await self._workers.fetch(request, body, flow)

    async def ask_tier_for_version(self, route: Route, url: str) -> RemoteObject | None:
        """As `Origin.ask_tier_for_version`."""
        params = object_params(url)
        async with self._sessions.use(url) as fs:
            if not self._presigned.is_usable(params["Bucket"]):
                return None
            signed = await self._presigned.url_for_get(fs, params, url)
            request = Request("GET", signed, route.headers, via=route.address)
            answer = await self._workers.ask(request)
        # A good answer is that to a ranged read, which states the object's size and version.
        size_bytes = total_bytes(answer.headers.get("content-range"))
        if answer.status != 206 or size_bytes is None or "etag" not in answer.headers:
            return None
        return self._object(url, answer.headers, size_bytes, is_joinable=False)

    async def list_prefix(
        self,
        prefix: str,
        received: Received,
        *,
        flat: bool = False,
    ) -> list[RemoteObject]:
        """As `Origin.list_prefix`; one request per thousand keys.

        The objects have the same versions as from `stat`.
        """
        params = object_params(prefix)
        bucket_url = prefix.removesuffix(params["Key"])
        options = {"Bucket": params["Bucket"], "Prefix": params["Key"]}
        if flat:
            options["Delimiter"] = "/"

        objects: list[RemoteObject] = []
        async with self._sessions.use(prefix) as fs:
            async for page in _pages(fs, options, prefix):
                entries = page.get("Contents", [])
                folders = page.get("CommonPrefixes", [])
                objects += [_listed_object(bucket_url, entry) for entry in entries]
                objects += [_listed_folder(bucket_url, folder) for folder in folders]
                received(len(entries) + len(folders))
        return sorted(objects, key=lambda obj: obj.url)

    async def list_page(self, wanted: PageRequest) -> ListedPage:
        """As `Origin.list_page`; one request."""
        # A prefix has no version: it may be the beginning of keys that look as if they had one.
        bucket, key_prefix = bucket_and_key(wanted.prefix)
        bucket_url = wanted.prefix.removesuffix(key_prefix)
        options: dict[str, Any] = {
            "Bucket": bucket,
            "Prefix": key_prefix,
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
            objects=[_listed_object(bucket_url, entry) for entry in entries],
            folders=[bucket_url + folder["Prefix"] for folder in folders],
            next_token=next_token,
        )

    async def part_span(self, obj: RemoteObject, number: int) -> tuple[int, int] | None:
        """As `Origin.part_span`; one HEAD."""
        params = object_params(obj.url)
        async with self._sessions.use(obj.url) as fs:
            head = await head_by_sdk(fs, {**params, "PartNumber": number})
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

        Temporary keys in the environment are passed to botocore explicitly. Otherwise, it would
        look for new keys in the environment once these expire, but the daemon's environment never
        changes.
        """
        if isinstance(setup.credentials, AwsKeys):
            return setup.credentials
        table = setup.table
        has_secrets = not self.secrets.isdisjoint(table.storage_options)
        if table.anon or table.profile or has_secrets:
            return None
        keys = AwsKeys.of(os.environ)
        if keys is None or not keys.is_temporary:
            return None
        return keys

    async def _presigned_head(
        self,
        fs: Any,
        params: dict[str, str],
        url: str,
        first_bytes: int,
    ) -> Headers:
        """Return the headers of the answer to a HEAD by a presigned url. Raises SdkNeededError.

        Args:
            params: bucket and key, as parameters of the SDK.
            first_bytes: number of the object's first bytes to request at the same time; 0 for none.
                Their answer waits for the `fetch` that follows.
        """
        if not self._presigned.is_usable(params["Bucket"]):
            raise SdkNeededError
        get_ahead = None  # the request for the first bytes
        if first_bytes:
            signed_get = await self._presigned.url_for_get(fs, params, url)
            get_object = self._presigned.request(fs, "GET", signed_get, {})
            get_ahead = get_object.beginning(first_bytes)

        async def sign() -> str:
            return await self._presigned.url_for_head(fs, params)

        async def send(signed: str) -> Answer:
            request = self._presigned.request(fs, "HEAD", signed, CHECKSUM_MODE)
            return await self._workers.ask(request, get_ahead)

        answer = await self._presigned.ask(params["Bucket"], sign, send)
        if ENDPOINT_HEADER in answer.headers:
            raise ConfigError(OWN_ENDPOINT, url=url, remedy=OWN_ENDPOINT_REMEDY)
        if answer.status >= 300:
            problem = f"the origin answered a HEAD with status {answer.status}"
            raise error_of(answer.status, problem, url, answer.headers)
        return answer.headers

    async def _presigned_get(
        self,
        fs: Any,
        params: dict[str, str],
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None,
    ) -> Answer | None:
        """Return the answer to a GET by a presigned url; None if `commit` returned False.

        Raises SdkNeededError.
        """
        if not self._presigned.admit(params["Bucket"]):
            raise SdkNeededError

        async def sign() -> str:
            return await self._presigned.url_for_get(fs, params, obj.url)

        async def send(signed: str) -> Answer | None:
            request = self._presigned.request(fs, "GET", signed, _range_headers(obj, parts))
            body = _expected_body(obj, parts, held=commit is not None)
            return await self._workers.fetch(request, body, flow, commit)

        return await self._presigned.ask(params["Bucket"], sign, send)

    def _object(
        self, url: str, head: Headers, size_bytes: int, *, is_joinable: bool
    ) -> RemoteObject:
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
            is_joinable=is_joinable,
            modified_s=modified_s(head.get("last-modified")),
        )


async def _pages(fs: Any, options: Mapping[str, str], prefix: str) -> AsyncIterator[Any]:
    """Yield the SDK's answer for each page of a listing.

    Args:
        options: parameters of the SDK for the first page.
        prefix: the listed prefix, for the error.

    Raises OriginUnavailableError if the origin repeats a page.
    """
    token = None  # token of the present page; None for the first page
    page_options = dict(options)
    while True:
        page = await call(fs, "list_objects_v2", **page_options)
        yield page
        if not page["IsTruncated"]:
            return

        next_token = page["NextContinuationToken"]
        if next_token == token:
            raise OriginUnavailableError(
                "the origin repeats a page of its listing endlessly",
                url=prefix,
            )
        token = next_token
        page_options["ContinuationToken"] = token


def _listed_object(bucket_url: str, entry: Mapping[str, Any]) -> RemoteObject:
    """Return the object that an entry of a listing describes."""
    url = bucket_url + entry["Key"]
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


def _listed_folder(bucket_url: str, folder: Mapping[str, Any]) -> RemoteObject:
    """Return a folder of a listing, which has neither a version nor a size."""
    return RemoteObject(bucket_url + folder["Prefix"], version="", size_bytes=0)


def _range_headers(obj: RemoteObject, parts: Parts) -> dict[str, str]:
    """Return the headers that request parts of exactly this version."""
    span = range_header(parts.start, parts.stop)
    return {"Range": span, "If-Match": f'"{obj.version}"'}


def _expected_body(obj: RemoteObject, parts: Parts, *, held: bool) -> Body:
    """Return the expected body of parts of exactly this version.

    Args:
        held: True to keep the body in memory until it is committed.
    """
    expected = {
        "content-range": content_ranges(obj, parts.start, parts.stop),
        # Some stores omit the quotes, and a proxy on the way may mark the ETag as weak ("W/").
        "etag": (f'"{obj.version}"', obj.version, f'W/"{obj.version}"'),
    }
    return Body(parts, 206, expected, held=held)
