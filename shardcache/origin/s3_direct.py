"""HEADs and ranged GETs of S3 objects by signed urls, past the SDK: it makes the url, `Wire` asks.

The SDK's own way to a body costs a processor twice as much, and its way to a HEAD four times. It stays for everything
else, and for every store or answer that is not as plain as those of a public cloud's bucket.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import structlog
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from shardcache.config import OriginTable
from shardcache.errors import ShardChangedError
from shardcache.origin.base import Flow, RemoteObject
from shardcache.origin.http_range import check_range, no_version, range_header, wrong_length
from shardcache.origin.s3_signing import SIGNED_FOR_S, Signer
from shardcache.origin.status import error_of
from shardcache.origin.wire import Head, Wire

log = structlog.get_logger()

_PLAIN_OPTIONS = {"key", "secret", "token", "endpoint_url", "anon", "use_ssl"}
_NEEDED = {"etag", "content-length"}
_REFUSALS = {301, 307, 308, 400, 401, 403, 404}
_PATIENCE = 3
_CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
_MOST_SIGNED = 64


class DirectRequests:
    """Asks a bucket's store directly as long as it plays along."""

    def __init__(self, table: OriginTable) -> None:
        # Options that change requests in ways which a signed url does not know: the SDK shall make every request.
        self._plain = set(table.storage_options) <= _PLAIN_OPTIONS
        self._refusals: Counter[str] = Counter()  # of each bucket, since a read of it succeeded
        self._signer = Signer()
        self._signed: dict[str, tuple[str, float]] = {}
        self._proxied: dict[str, bool] = {}
        self._wire: Wire | None = None

    async def head(self, fs: Any, where: dict[str, str], url: str) -> Mapping[str, str] | None:
        """Return the headers that the store answers to a HEAD with, names in lower case; None where the SDK has to ask.

        Raises OriginUnavailableError, and what botocore and the network raise.
        """
        params = {**where, "ChecksumMode": "ENABLED"}
        head = await self._answer(
            fs,
            where["Bucket"],
            lambda: self._signer.url(fs, "head_object", params, _CHECKSUM_MODE),
            lambda wire, signed: wire.head(signed, _CHECKSUM_MODE),
        )
        if head is None:
            return None
        if head.status >= 300:
            raise error_of(head.status, f"the store answered a HEAD with status {head.status}", url)
        return head.headers if head.headers.keys() >= _NEEDED else None

    async def read(
        self, fs: Any, where: dict[str, str], obj: RemoteObject, start: int, buffer: memoryview, flow: Flow
    ) -> bool:
        """Fill the buffer as `Origin.read_into` does; False where the SDK has to.

        Raises ShardChangedError, OriginUnavailableError, and what botocore and the network raise.
        """
        stop = start + len(buffer)
        headers = {"Range": range_header(start, stop), "If-Match": f'"{obj.version}"'}
        head = await self._answer(
            fs,
            where["Bucket"],
            lambda: self._signed_url(fs, where, obj),
            lambda wire, signed: wire.read(signed, headers, buffer, flow),
        )
        if head is None:
            return False  # its reason is in the body, and maybe it is only the signed url that is refused
        if head.status >= 300:
            raise error_of(head.status, f"the store answered a ranged read with status {head.status}", obj.url)
        check_range(obj, start, stop, head.status, head.headers.get("content-range"))
        if not (version := head.headers.get("etag", "").strip('"')):
            raise no_version(obj.url)
        if version != obj.version:
            raise ShardChangedError("the store sent another version than was asked for", url=obj.url)
        if "transfer-encoding" in head.headers:
            return False  # the SDK reads chunks
        if not head.complete:
            raise wrong_length(len(buffer), obj.url)
        del self._refusals[where["Bucket"]]
        return True

    async def _answer(
        self,
        fs: Any,
        bucket: str,
        sign: Callable[[], Awaitable[str]],
        ask: Callable[[Wire, str], Awaitable[Head]],
    ) -> Head | None:
        """Return the store's answer, from the bucket's own region; None where the SDK has to ask."""
        for _ in range(2):
            if not self._plain or self._refusals[bucket] >= _PATIENCE:
                return None
            signed = await sign()
            if self._is_proxied(signed):
                return None
            head = await ask(self._wired(fs), signed)
            if head.status not in _REFUSALS:
                return head
            self._signed.clear()
            if not self._signer.move(bucket, head.headers.get("x-amz-bucket-region", "")):
                return None
        return None

    def _is_proxied(self, url: str) -> bool:
        """Return True where the environment names a proxy on the way to a url: that is the SDK's matter."""
        host = urlsplit(url).netloc
        if host not in self._proxied:
            self._proxied[host] = bool(get_environ_proxies(url))
        return self._proxied[host]

    def _wired(self, fs: Any) -> Wire:
        if self._wire is None:
            self._wire = Wire(_ca_file(fs))
        return self._wire

    async def _signed_url(self, fs: Any, where: dict[str, str], obj: RemoteObject) -> str:
        """Return one url for all parts of an object, for a while."""
        now_s = time.monotonic()
        url, signed_at_s = self._signed.get(obj.url, ("", 0.0))
        if not url or now_s - signed_at_s > SIGNED_FOR_S / 2:
            url = await self._signer.url(fs, "get_object", where, {})
            if len(self._signed) >= _MOST_SIGNED:
                self._signed.clear()
            self._signed[obj.url] = (url, now_s)
        return url

    def refused(self, url: str, bucket: str) -> None:
        """Note that the SDK got what this did not; after a few times, leave the bucket to the SDK."""
        self._refusals[bucket] += 1
        if self._plain and self._refusals[bucket] == _PATIENCE:
            log.info("no fast path to the bucket; asking through the SDK", url=url, bucket=bucket)

    async def close(self) -> None:
        """Close its connections."""
        if self._wire is not None:
            await self._wire.close()


def keep_signature_v4(signature_version: str, **_context: Any) -> str | None:
    """Sign urls as requests are signed; botocore would fall back to version 2 in the older regions.

    A handler of botocore's events `choose-signer.s3.…`.
    """
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None


def _ca_file(fs: Any) -> str | None:
    """Return the certificates that the SDK trusts."""
    path: str | None = fs.session.get_config_variable("ca_bundle") or get_cert_path(True)
    return path
