"""What S3 objects are, and parts of them, by signed urls, past the SDK: it makes the url, `Wire` asks.

The SDK's own way to a body costs a processor twice as much, and its way to a HEAD four times. It stays for everything
else, and for every store or answer that is not as plain as those of a public cloud's bucket.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import structlog
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from shardcache.config import OriginTable
from shardcache.errors import ShardChangedError
from shardcache.origin.base import Flow, RemoteObject
from shardcache.origin.http_range import check_range, no_version, range_header, wrong_length
from shardcache.origin.s3_signing import SIGNED_FOR_S, Signer
from shardcache.origin.status import error_of
from shardcache.origin.wire import Wire

log = structlog.get_logger()

_PLAIN_OPTIONS = {"key", "secret", "token", "endpoint_url", "anon", "use_ssl"}
_NEEDED = {"etag", "content-length"}
_REFUSALS = {301, 307, 308, 400, 401, 403, 404}
_PATIENCE = 3
_CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
_MOST_SIGNED = 64


class DirectRequests:
    """Asks directly as long as the store plays along."""

    def __init__(self, table: OriginTable) -> None:
        # Options that change requests in ways which a signed url does not know: the SDK shall make every request.
        self._enabled = set(table.storage_options) <= _PLAIN_OPTIONS
        self._refused = 0
        self._signer = Signer()
        self._signed: dict[str, tuple[str, float]] = {}
        self._wire: Wire | None = None

    async def head(self, fs: Any, where: dict[str, str], url: str) -> Mapping[str, str] | None:
        """Return the headers that the store answers to a HEAD with, names in lower case; None where the SDK has to ask.

        Raises OriginUnavailableError, and what botocore and the network raise.
        """
        if not self._enabled:
            return None
        params = {**where, "ChecksumMode": "ENABLED"}
        signed = await self._signer.url(fs, "head_object", params, _CHECKSUM_MODE)
        wire = self._wired(fs, signed)
        if wire is None:
            return None
        head = await wire.head(signed, _CHECKSUM_MODE)
        if head.status in _REFUSALS:
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
        if not self._enabled:
            return False
        url = await self._signed_url(fs, where, obj)
        wire = self._wired(fs, url)
        if wire is None:
            return False
        stop = start + len(buffer)
        headers = {"Range": range_header(start, stop), "If-Match": f'"{obj.version}"'}
        head = await wire.read(url, headers, buffer, flow)
        if head.status in _REFUSALS:
            self._signed.clear()
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
        self._refused = 0
        return True

    def _wired(self, fs: Any, url: str) -> Wire | None:
        """Return connections to the store; None where the environment names a proxy, which is the SDK's matter."""
        if self._wire is None:
            self._enabled = not get_environ_proxies(url)
            self._wire = Wire(_ca_file(fs))
        return self._wire if self._enabled else None

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

    def refused(self, url: str) -> None:
        """Note that the SDK got what this did not; after a few times, leave everything to the SDK."""
        self._refused += 1
        if self._enabled and self._refused >= _PATIENCE:
            log.info("the store takes no signed urls; asking through the SDK", url=url)
            self._enabled = False

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
