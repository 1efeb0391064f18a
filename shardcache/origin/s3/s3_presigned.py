"""Requests to presigned urls: how they are made, and which buckets accept them.

A presigned url carries the signature that permits a request. `S3Origin` sends its HEADs and GETs to
these urls. Where it cannot, the SDK (botocore, by s3fs) makes the request. In this file, `fs` is an
s3fs filesystem, and `params` is an object's bucket and key as parameters of the SDK. A breaker
counts the refusals of a bucket; while it is open, the bucket's requests are left to the SDK.
"""

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from botocore.httpsession import get_cert_path

from shardcache.access.protocols import row_of
from shardcache.origin.base import Setup
from shardcache.origin.breaker import Breaker
from shardcache.origin.http.http_semantics import proxy_of
from shardcache.origin.s3.s3_signing import BEHIND_TIER, DIRECT, SIGNED_FOR_S, Signer
from shardcache.telemetry.logs import SharedLogger
from shardcache.transport.between.messages import Answer, Request

log = SharedLogger()

CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}
"""Header by which a HEAD asks for the object's checksums. It is signed along with the url."""

# Statuses by which a store may refuse a presigned url: see `RefusedError`.
_REFUSALS = {301, 307, 308, 400, 401, 403, 404, 405}
# After this number of refusals in a row, the SDK makes a bucket's requests for a while.
_MAX_REFUSALS = 3
_MAX_SIGNED = 64  # number of presigned urls that are kept
_MAX_HOSTS = 256  # number of hosts whose proxy is remembered

T = TypeVar("T", bound=Answer | None)


class SdkNeededError(Exception):
    """The SDK has to make the request."""


class RefusedError(SdkNeededError):
    """A presigned url was refused.

    The SDK then makes the same request: it succeeds, or its answer states the reason.
    """


class _SignedUrl(NamedTuple):
    """A presigned url, and the time at which it was signed, by the monotonic clock."""

    url: str
    signed_at_s: float


class PresignedRequests:
    """Presigned urls for the buckets of one origin, and the requests to them.

    After three refusals in a row, a bucket's requests are left to the SDK, except for probes: reads
    that find out whether the bucket accepts presigned urls again.

    Args:
        setup: the origin's setup.
        probe_interval_s: time between two probes of a bucket.
    """

    def __init__(self, setup: Setup, probe_interval_s: float) -> None:
        table = setup.table
        supported_options = row_of(setup.protocol).presigned_options or frozenset()
        # True if presigned urls support all options of the table.
        self._supports_options = supported_options.issuperset(table.storage_options)
        new_breaker = partial(Breaker, _MAX_REFUSALS, probe_interval_s)
        self._breakers = defaultdict[str, Breaker](new_breaker)  # by bucket
        self._signer = Signer(DIRECT if table.tier is None else BEHIND_TIER)
        self._signed_urls: dict[str, _SignedUrl] = {}  # for GETs, by the object's own url
        self._signed_by_fs: Any = None  # the filesystem whose credentials have signed these urls
        self._proxy_of = lru_cache(_MAX_HOSTS)(proxy_of)
        self._ca_file = lru_cache(1)(_ca_file)  # for the current filesystem

    # Buckets that accept presigned urls

    def is_usable(self, bucket: str) -> bool:
        """Return whether presigned urls work in a bucket, as far as earlier requests have shown."""
        return self._supports_options and not self._breakers[bucket].is_open

    def admit(self, bucket: str) -> bool:
        """Return whether to read by a presigned url now.

        In a bucket that refuses presigned urls, this returns True once in each `probe_interval_s`:
        that read is a probe.
        """
        return self._supports_options and self._breakers[bucket].admit(time.monotonic())

    def record_success(self, bucket: str) -> None:
        """Record that a read by a presigned url has succeeded."""
        self._breakers[bucket].succeeded()

    def record_refusal(self, cause: SdkNeededError, url: str, bucket: str) -> None:
        """Count the refusal of a presigned url, after the SDK's request has succeeded.

        Does nothing if the SDK made the request for another reason.

        Args:
            cause: the error after which the SDK made the request.
        """
        if not isinstance(cause, RefusedError):
            return
        breaker = self._breakers[bucket]
        was_open = breaker.is_open
        breaker.failed(time.monotonic())
        if breaker.is_open and not was_open:
            log.info("presigned urls refused; using the SDK for the bucket", url=url, bucket=bucket)

    # Urls and requests

    async def url_for_get(self, fs: Any, params: dict[str, str], url: str) -> str:
        """Return a presigned url for a GET of an object.

        It is reused for all parts of the object during half of its validity.

        Args:
            url: the object's own url.
        """
        if fs is not self._signed_by_fs:
            self._signed_by_fs = fs
            self._signed_urls.clear()
        now_s = time.monotonic()
        kept = self._signed_urls.get(url)
        if kept is not None and now_s - kept.signed_at_s <= SIGNED_FOR_S / 2:
            return kept.url

        signed = await self._signer.url(fs, "get_object", params, {})
        if len(self._signed_urls) >= _MAX_SIGNED:
            self._signed_urls.clear()
        self._signed_urls[url] = _SignedUrl(signed, now_s)
        return signed

    async def url_for_head(self, fs: Any, params: dict[str, str]) -> str:
        """Return a presigned url for a HEAD with the header `CHECKSUM_MODE`."""
        head_params = {**params, "ChecksumMode": "ENABLED"}
        return await self._signer.url(fs, "head_object", head_params, CHECKSUM_MODE)

    def request(self, fs: Any, method: str, url: str, headers: Mapping[str, str]) -> Request:
        """Return a request to a presigned url, for a transport worker.

        Raises SdkNeededError if the request needs a proxy that only the SDK can use.
        """
        scheme, host, *_ = urlsplit(url)
        proxy = self._proxy_of(f"{scheme}://{host}")
        if proxy is not None and not proxy.startswith("http://"):
            raise SdkNeededError
        return Request(method, url, headers, proxy, self._ca_file(fs))

    async def ask(
        self,
        bucket: str,
        sign: Callable[[], Awaitable[str]],
        send: Callable[[str], Awaitable[T]],
    ) -> T:
        """Send a request to a presigned url in the bucket's own region, and return the answer.

        Args:
            bucket: the bucket.
            sign: returns the presigned url.
            send: sends the request to the presigned url; may return None for a dropped body.

        Raises RefusedError, and what `sign` and `send` raise.
        """
        for _ in range(2):  # a second time if the first answer has named another region
            signed = await sign()
            answer = await send(signed)
            if answer is None or answer.status not in _REFUSALS:
                return answer
            self._signed_urls.clear()  # whatever the reason, none of them is to be used again
            region = answer.headers.get("x-amz-bucket-region", "")
            has_moved = self._signer.move(bucket, region)
            if not has_moved:
                break
        raise RefusedError


def _ca_file(fs: Any) -> str | None:
    """Return the path of the certificates that the SDK trusts."""
    path: str | None = fs.session.get_config_variable("ca_bundle") or get_cert_path(verify=True)
    return path
