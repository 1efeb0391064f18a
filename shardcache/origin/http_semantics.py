"""HTTP as object stores and web servers share it: requests, ranges, errors by status, proxies."""

import os
import re
import ssl
import time
from calendar import timegm
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate
from functools import lru_cache
from typing import NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from shardcache import errors
from shardcache.access import WEB, protocol_of
from shardcache.origin.base import RemoteObject
from shardcache.transport.messages import Answer, Request, number_in
from shardcache.transport.parts import Parts
from shardcache.transport.workers import Flow

# Larger reads save wake-ups; a read returns what is available, so nothing waits for a chunk to fill.
_READ_BYTES = 256 * 1024

_MAX_SERVERS = 256
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]+)-([0-9]+)|\*)/([0-9]+|\*)")


class Environment:
    """CA file and proxies as the environment names them for programs other than the S3 SDK, looked up once each."""

    def __init__(self) -> None:
        self._ca_file = next((os.environ[name] for name in _CA_VARIABLES if os.environ.get(name)), None)
        self._proxy_of = lru_cache(_MAX_SERVERS)(proxy_of)

    def request(
        self, method: str, url: str, headers: Mapping[str, str], *, proxy: str | None = None, far_only: bool = False
    ) -> Request:
        """Return a request. Raises ConfigError for a proxy that cannot be used."""
        scheme, server, *_ = urlsplit(url)
        proxy = proxy or self._proxy_of(f"{scheme}://{server}")
        if proxy is not None and not proxy.startswith("http://"):
            remedy = "use a proxy that speaks plain HTTP, as http://host:port"
            raise errors.ConfigError(f"unsupported proxy: {proxy}", remedy=remedy)
        return Request(method, url, headers, proxy, self._ca_file, far_only)


def range_header(start: int, stop: int) -> str:
    """Return the Range header for the bytes [start, stop)."""
    return f"bytes={start}-{stop - 1}"


def total_bytes(content_range: str | None) -> int | None:
    """Return the object's size from a Content-Range header, or None."""
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    return number_in(match[3]) if match else None


def span_bytes(content_range: str | None) -> int:
    """Return the number of bytes that a Content-Range header announces; -1 if none."""
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    first, last = (number_in(match[1]), number_in(match[2])) if match else (None, None)
    return -1 if first is None or last is None else last - first + 1


def content_ranges(obj: RemoteObject, start: int, stop: int) -> tuple[str, str]:
    """Return the Content-Range headers that the answer to a ranged read may have."""
    return f"bytes {start}-{stop - 1}/{obj.size_bytes}", f"bytes {start}-{stop - 1}/*"


def check_range(obj: RemoteObject, start: int, stop: int, status: int, content_range: str | None) -> None:
    """Raise OriginUnavailableError unless an answer has exactly the requested range."""
    if status != 206:
        raise errors.OriginUnavailableError(
            f"the origin answered a ranged read with status {status}, not 206", url=obj.url
        )
    wanted, *others = content_ranges(obj, start, stop)
    if content_range not in (wanted, *others):
        raise errors.OriginUnavailableError(f"the origin sent {content_range!r} instead of {wanted!r}", url=obj.url)


async def read_exactly(count: int, read: Callable[[int], Awaitable[bytes]], flow: Flow, url: str) -> memoryview:
    """Return a body of exactly `count` bytes. Raises OriginUnavailableError for a body of another length.

    `read` returns at most the given number of bytes, as soon as any are available; b"" at the end.
    """
    buffer, filled = memoryview(bytearray(count)), 0
    while True:
        await flow.ready()
        chunk = await read(int(min(_READ_BYTES, flow.credit_bytes)))
        flow.received(len(chunk))
        end = filled + len(chunk)
        if end > count or (not chunk and end < count):
            raise wrong_length(count, url)
        if not chunk:
            return buffer
        buffer[filled:end] = chunk
        filled = end


def wrong_length(count: int, url: str) -> errors.OriginUnavailableError:
    """Return the error for a body that is not `count` bytes long."""
    return errors.OriginUnavailableError(f"the origin did not send exactly the {count} bytes requested", url=url)


def no_version(url: str) -> errors.OriginUnavailableError:
    """Return the error for an answer without a version."""
    return errors.OriginUnavailableError("the origin sent no version of the object", url=url)


def judge(answer: Answer, version: str, obj: RemoteObject, parts: Parts) -> NoReturn:
    """Raise the error for an answer of some version that was not written."""
    if answer.status >= 300:
        what = f"the origin answered a ranged read with status {answer.status}"
        raise error_of(answer.status, what, obj.url, answer.headers)
    if obj.ranges:
        check_range(obj, parts.start, parts.stop, answer.status, answer.headers.get("content-range"))
    if not version:
        raise no_version(obj.url)
    if version != obj.version:
        raise errors.ShardChangedError("the origin sent a different version than requested", url=obj.url)
    raise wrong_length(parts.size_bytes, obj.url)


def size_of(stated: object, url: str) -> int:
    """Return an object's size as its origin states it. Raises OriginError if it does not, or absurdly."""
    size_bytes = number_in(stated)
    if size_bytes is None:
        raise errors.OriginError(
            "the server does not state the file's size, so a truncated download could not be detected",
            url=url,
            remedy="serve it with a Content-Length header, as any file server does",
        )
    return size_bytes


_MEANING: dict[int, type[errors.OriginError]] = {
    401: errors.AccessDeniedError,
    403: errors.AccessDeniedError,
    404: errors.NotFoundError,
    407: errors.AccessDeniedError,
    408: errors.OriginUnavailableError,
    409: errors.OriginUnavailableError,
    410: errors.NotFoundError,
    412: errors.ShardChangedError,
    416: errors.OriginUnavailableError,
    425: errors.OriginUnavailableError,
    429: errors.OriginBusyError,
    501: errors.OriginError,
    503: errors.OriginBusyError,
    505: errors.OriginError,
}


_NONE: Mapping[str, str] = {}
_ELSEWHERE = "this redirect is not followed: use its target in the url or as `endpoint_url`"
_DENIED = (
    "if the url is signed, sign it again; else give the daemon a header that the server accepts "
    "(`storage_options` in an [[origin]] table)"
)


def error_of(status: int, message: str, url: str, headers: Mapping[str, str] = _NONE) -> errors.OriginError:
    """Return the error for a status other than 200, 206 and 304; of the answer's headers, Retry-After matters."""
    default = errors.OriginUnavailableError if status >= 500 else errors.OriginError
    denied = _MEANING.get(status) is errors.AccessDeniedError and protocol_of(url) in WEB
    remedy = _ELSEWHERE if 300 <= status < 400 else _DENIED if denied else None
    reason = headers.get("x-ms-error-code")
    error = _MEANING.get(status, default)(f"{message} ({reason})" if reason else message, url=url, remedy=remedy)
    if isinstance(error, errors.OriginUnavailableError):
        after = headers.get("retry-after", "")
        error.retry_after_s = number_in(after) or max(0, timestamp(after) - round(time.time()))
    return error


def timestamp(date: str | None) -> int:
    """Return the POSIX time of an HTTP date; 0 for anything else."""
    with suppress(ValueError, OverflowError):
        return timegm(parsedate(date) or ())
    return 0


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Translate the exceptions of the transport into shardcache's."""
    try:
        yield
    except ssl.SSLCertVerificationError as exn:
        raise certificate_error(exn, url) from exn
    except errors.ShardcacheError as exn:  # NotFoundError is also an OSError
        exn.url = exn.url or url
        raise
    except OSError as exn:
        raise connection_error(str(exn), url) from exn


def connection_error(reason: str, url: str) -> errors.OriginError:
    """Return the error for a connection that failed, or that there was none of: such a reason names the server."""
    named = reason.startswith(("connection refused", "no connection"))
    return errors.OriginUnavailableError(reason if named else f"the connection to the server failed: {reason}", url=url)


def certificate_error(exn: Exception, url: str) -> errors.OriginError:
    """Return the error for a server whose certificate is not trusted; a retry would not help."""
    return errors.OriginError(
        f"the server's certificate is not trusted: {exn}",
        url=url,
        remedy="trust its CA (AWS_CA_BUNDLE or `ca_bundle` for S3, SSL_CERT_FILE for all others), or check the "
        "host name and this machine's clock",
    )


def proxy_of(url: str) -> str | None:
    """Return the proxy for a url, chosen as the S3 SDK does: names in `no_proxy` may have a port."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy is None or proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
