"""HEADs and ranged GETs of S3 objects by presigned urls: the SDK makes the url, a transport worker requests it.

The SDK delivers bodies on the event loop, at twice the cost. It is used for everything else, and for every object store
or answer that differs from a public cloud's plain bucket.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from botocore.httpsession import get_cert_path

from shardcache.config import OriginTable
from shardcache.errors import ShardChangedError
from shardcache.observability.shared_logger import SharedLogger
from shardcache.origin.base import RemoteObject
from shardcache.origin.http.ranges import check_range, content_ranges, no_version, range_header, wrong_length
from shardcache.origin.http_status import error_of
from shardcache.origin.proxy import proxy_of
from shardcache.origin.s3.signing import SIGNED_FOR_S, Signer
from shardcache.origin.tier_client import PRESIGNED_OPTIONS, Route
from shardcache.transport.flow import Flow
from shardcache.transport.messages import Answer, Body, Request
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit, Workers

log = SharedLogger()

T = TypeVar("T", bound=Answer | None)

_NEEDED = {"etag", "content-length"}
_REFUSALS = {301, 307, 308, 400, 401, 403, 404}
_PATIENCE = 3
_CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
_MOST_SIGNED = 64
_MOST_HOSTS = 256


class RefusedError(Exception):
    """The SDK has to make the request: its answer states the reason, or only the presigned url was refused."""


class DirectRequests:
    """Requests by presigned urls, per bucket for as long as they are not refused."""

    def __init__(self, table: OriginTable, workers: Workers) -> None:
        self._plain = set(table.storage_options) <= PRESIGNED_OPTIONS
        self._workers = workers
        self._refusals: Counter[str] = Counter()  # by bucket, since its last successful read
        self._signer = Signer()
        self._signed: dict[str, tuple[str, float]] = {}
        self._proxies: dict[str, str | None] = {}
        self._ca_file: tuple[Any, str | None] = None, None

    async def head(self, fs: Any, where: dict[str, str], url: str) -> Mapping[str, str]:
        """Return the headers of the answer to a HEAD, names in lower case.

        Raises RefusedError, OriginUnavailableError, and what botocore and the network raise.
        """
        params = {**where, "ChecksumMode": "ENABLED"}

        async def ask(signed: str) -> Answer:
            return await self._workers.ask(self._request(fs, "HEAD", signed, _CHECKSUM_MODE))

        sign = partial(self._signer.url, fs, "head_object", params, _CHECKSUM_MODE)
        answer = await self._answer(where["Bucket"], sign, ask)
        if answer.status >= 300:
            raise error_of(answer.status, f"the origin answered a HEAD with status {answer.status}", url)
        if not answer.headers.keys() >= _NEEDED:
            raise RefusedError
        return answer.headers

    async def fetch(
        self, fs: Any, where: dict[str, str], obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; also raises RefusedError, and what botocore and the network raise."""

        async def ask(signed: str) -> Answer | None:
            request = self._request(fs, "GET", signed, _of_version(obj, parts))
            return await self._workers.fetch(request, _body(obj, parts, held=commit is not None), flow, commit)

        answer = await self._answer(where["Bucket"], partial(self._signed_url, fs, where, obj), ask)
        if answer is None:
            return None
        if answer.sums is None:
            _judge(answer, obj, parts)
        del self._refusals[where["Bucket"]]
        return answer.sums

    async def ask_tier(
        self, route: Route, fs: Any, where: dict[str, str], obj: RemoteObject, parts: Parts, flow: Flow | None
    ) -> Answer | None:
        """As `Tiered.ask_tier`; also raises what botocore and the network raise."""
        if not self._usable(where["Bucket"]):
            return None
        headers = {**_of_version(obj, parts), **route.headers}
        request = Request("GET", await self._signed_url(fs, where, obj), headers, via=route.address)
        if flow is None:
            return await self._workers.ask(request)
        return await self._workers.fetch(request, _body(obj, parts, held=False), flow)

    def _usable(self, bucket: str) -> bool:
        return self._plain and self._refusals[bucket] < _PATIENCE

    async def _answer(self, bucket: str, sign: Callable[[], Awaitable[str]], ask: Callable[[str], Awaitable[T]]) -> T:
        """Return the answer from the bucket's own region. Raises RefusedError."""
        for _ in range(2):
            if not self._usable(bucket):
                break
            answer = await ask(await sign())
            if answer is None or answer.status not in _REFUSALS:
                return answer
            self._signed.clear()
            if not self._signer.move(bucket, answer.headers.get("x-amz-bucket-region", "")):
                break
        raise RefusedError

    def _request(self, fs: Any, method: str, url: str, headers: Mapping[str, str]) -> Request:
        """Return a request. Raises RefusedError if it needs a proxy that only the SDK can use."""
        if fs is not self._ca_file[0]:
            self._ca_file = fs, _ca_file(fs)
        host = urlsplit(url).netloc
        if host not in self._proxies:
            if len(self._proxies) >= _MOST_HOSTS:
                self._proxies.clear()
            self._proxies[host] = proxy_of(url)
        proxy = self._proxies[host]
        if proxy is not None and not proxy.startswith("http://"):
            raise RefusedError
        return Request(method, url, headers, proxy, self._ca_file[1])

    async def _signed_url(self, fs: Any, where: dict[str, str], obj: RemoteObject) -> str:
        """Return a presigned url, reused for all parts of an object during half of its validity."""
        now_s = time.monotonic()
        url, signed_at_s = self._signed.get(obj.url, ("", 0.0))
        if not url or now_s - signed_at_s > SIGNED_FOR_S / 2:
            url = await self._signer.url(fs, "get_object", where, {})
            if len(self._signed) >= _MOST_SIGNED:
                self._signed.clear()
            self._signed[obj.url] = (url, now_s)
        return url

    def refused(self, url: str, bucket: str) -> None:
        """Record that the SDK got what a presigned url did not; after `_PATIENCE` times, use the SDK for the bucket."""
        self._refusals[bucket] += 1
        if self._plain and self._refusals[bucket] == _PATIENCE:
            log.info("presigned urls refused; using the SDK for the bucket", url=url, bucket=bucket)


def _of_version(obj: RemoteObject, parts: Parts) -> dict[str, str]:
    """Return the headers that request parts of exactly this version."""
    return {"Range": range_header(parts.start, parts.stop), "If-Match": f'"{obj.version}"'}


def _body(obj: RemoteObject, parts: Parts, *, held: bool) -> Body:
    expected = {
        "content-range": content_ranges(obj, parts.start, parts.stop),
        "etag": (f'"{obj.version}"', obj.version),
    }
    return Body(parts, 206, expected, held=held)


def _judge(answer: Answer, obj: RemoteObject, parts: Parts) -> NoReturn:
    """Raise the error for an answer that was not written."""
    if answer.status >= 300:
        raise error_of(answer.status, f"the origin answered a ranged read with status {answer.status}", obj.url)
    check_range(obj, parts.start, parts.stop, answer.status, answer.headers.get("content-range"))
    if not (version := answer.headers.get("etag", "").strip('"')):
        raise no_version(obj.url)
    if version != obj.version:
        raise ShardChangedError("the origin sent a different version than requested", url=obj.url)
    raise wrong_length(parts.size_bytes, obj.url)


def keep_signature_v4(signature_version: str, **_context: Any) -> str | None:
    """Select signature version 4 for urls, as for requests; botocore would fall back to version 2 in older regions.

    Handler for botocore's events `choose-signer.s3.…`.
    """
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None


def _ca_file(fs: Any) -> str | None:
    """Return the path of the certificates that the SDK trusts."""
    path: str | None = fs.session.get_config_variable("ca_bundle") or get_cert_path(True)
    return path
