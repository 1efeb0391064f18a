"""HTTP as object stores and web servers share it: requests, ranges, versions, proxies.

The origins of S3, of cloud stores and of web servers use these functions. Transport workers are
processes that send requests and write bodies to files. A commit is a function that is called when a
body has arrived, and may still drop the body.
"""

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from shardcache.origin.http.http_errors import error_of
from shardcache.origin.objects import RemoteObject
from shardcache.shared.exceptions import (
    ConfigError,
    OriginError,
    OriginUnavailableError,
    ShardChangedError,
)
from shardcache.transport.between.flow import Commit, Flow
from shardcache.transport.between.messages import Answer, Body, Request
from shardcache.transport.between.parts import Parts
from shardcache.transport.http.http_heads import number_in
from shardcache.transport.worker_pool import Workers

# Maximum size of one read of a body. Larger reads save wake-ups. A read returns the bytes that are
# available, so it does not wait for more.
_READ_BYTES = 256 * 1024

_MAX_SERVERS = 256  # number of servers whose proxies are remembered
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
# Groups: the first byte, the last byte, and the size of the object. A refused range has a `*` in
# place of the first and last byte.
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]+)-([0-9]+)|\*)/([0-9]+|\*)")


class Environment:
    """Creates requests with the CA file and the proxies that environment variables name.

    The CA file is looked up once, and the proxy once for each server. Requests to S3 are not
    created here: they use the variables as the S3 SDK does.
    """

    def __init__(self) -> None:
        self._ca_file = _ca_file()
        self._proxy_of = lru_cache(_MAX_SERVERS)(proxy_of)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        *,
        proxy: str | None = None,
        far_only: bool = False,
    ) -> Request:
        """Return a request that uses the CA file and the proxy.

        Raises ConfigError for a proxy that cannot be used.

        Args:
            proxy: url of the proxy; None or empty for the environment's.
            far_only: True to refuse hosts that are this node or its cloud's metadata service.
        """
        if not proxy:
            scheme, server, *_ = urlsplit(url)
            proxy = self._proxy_of(f"{scheme}://{server}")
        if proxy is not None and not proxy.startswith("http://"):
            raise ConfigError(
                f"unsupported proxy: {proxy}",
                remedy="use a proxy that speaks plain HTTP, as http://host:port",
            )
        return Request(method, url, headers, proxy, self._ca_file, far_only)


class Reading(NamedTuple):
    """The body to read from an answer: the arguments of `Workers.fetch` after the request.

    Attributes:
        body: the expected body and its destination.
        flow: counts the bytes as they arrive, and pauses the read.
        commit: as in `Origin.fetch`; None to write the bytes as they arrive.
    """

    body: Body
    flow: Flow
    commit: Commit | None


async def send(
    workers: Workers,
    request: Request,
    reading: Reading | None,
    first_bytes: int,
) -> Answer | None:
    """Return the answer to a request; None if the reading's `commit` dropped the body.

    Args:
        reading: the body to read; None to read no body.
        first_bytes: for a request without a reading, the number of the object's first bytes to
            request at the same time; 0 for none.
    """
    if reading is not None:
        return await workers.fetch(request, *reading)
    return await workers.ask(request, request.beginning(first_bytes))


def _ca_file() -> str | None:
    """Return the path of the certificates that the environment names; None for the system's."""
    for name in _CA_VARIABLES:
        path = os.environ.get(name)
        if path:
            return path
    return None


def proxy_of(url: str) -> str | None:
    """Return the proxy for a url, chosen as the S3 SDK does.

    Names in the variable `no_proxy` may have a port. Returns None for a direct connection.
    """
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy is None or proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


# Ranges


def range_header(start: int, stop: int) -> str:
    """Return the Range header for the bytes `[start, stop)`."""
    return f"bytes={start}-{stop - 1}"


def total_bytes(content_range: str | None) -> int | None:
    """Return the object's size from a Content-Range header; None if it states no size."""
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None:
        return None
    return number_in(match[3])


def span_bytes(content_range: str | None) -> int | None:
    """Return the number of bytes that a Content-Range header announces; None if it has no range."""
    span = span_in(content_range)
    if span is None:
        return None
    start, stop = span
    return stop - start


def span_in(content_range: str | None) -> tuple[int, int] | None:
    """Return the range `[start, stop)` that a Content-Range header announces.

    Returns None if there is no such header, or it has no range.
    """
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None:
        return None
    first = number_in(match[1])
    last = number_in(match[2])
    if first is None or last is None:
        return None
    return first, last + 1


def content_ranges(obj: RemoteObject, start: int, stop: int) -> tuple[str, str]:
    """Return the Content-Range headers that the answer to a read of `[start, stop)` may have.

    A server may leave out the object's size: the second one has a `*` in its place.
    """
    span = f"bytes {start}-{stop - 1}"
    return f"{span}/{obj.size_bytes}", f"{span}/*"


def check_range(
    obj: RemoteObject,
    start: int,
    stop: int,
    status: int,
    content_range: str | None,
) -> None:
    """Raise OriginUnavailableError unless an answer has exactly the requested range."""
    if status != 206:
        raise OriginUnavailableError(
            f"the origin answered a ranged read with status {status}, not 206",
            url=obj.url,
        )
    permitted = content_ranges(obj, start, stop)
    if content_range not in permitted:
        raise OriginUnavailableError(
            f"the origin sent {content_range!r} instead of {permitted[0]!r}",
            url=obj.url,
        )


# Bodies and versions


async def read_exactly(
    size_bytes: int,
    read: Callable[[int], Awaitable[bytes]],
    flow: Flow,
    url: str,
) -> memoryview:
    """Return a body of exactly `size_bytes`.

    Args:
        size_bytes: the expected size of the body.
        read: returns at most the given number of bytes, as soon as any are available, and b"" at
            the end of the body.
        flow: counts the bytes as they arrive, and pauses the read.
        url: the object's url, for the error.

    Raises OriginUnavailableError for a body of another length.
    """
    buffer = memoryview(bytearray(size_bytes))
    filled = 0
    while True:
        await flow.ready()
        max_bytes = min(_READ_BYTES, flow.credit_bytes)
        chunk = await read(int(max_bytes))  # the credit may be infinite, so it is a float
        flow.received(len(chunk))
        end = filled + len(chunk)
        is_too_long = end > size_bytes
        is_too_short = not chunk and end < size_bytes
        if is_too_long or is_too_short:
            raise wrong_length(size_bytes, url)
        if not chunk:
            return buffer
        buffer[filled:end] = chunk
        filled = end


def wrong_length(size_bytes: int, url: str) -> OriginUnavailableError:
    """Return the error for a body that is not `size_bytes` long."""
    return OriginUnavailableError(
        f"the origin did not send exactly the {size_bytes} bytes requested",
        url=url,
    )


def plain_etag(etag: str) -> str:
    """Return an object store's ETag without its quotes and without "W/", the mark of a weak ETag.

    The ETags of a store are strong, but a proxy on the way may mark them as weak.
    """
    return etag.removeprefix("W/").strip('"')


def no_version(url: str) -> OriginUnavailableError:
    """Return the error for an answer without a version."""
    return OriginUnavailableError("the origin sent no version of the object", url=url)


def raise_unusable(answer: Answer, version: str, obj: RemoteObject, parts: Parts) -> NoReturn:
    """Raise the error for an answer that did not have the expected parts of an object.

    Args:
        version: the version that the answer states; empty if it states none.
    """
    if answer.status >= 300:
        problem = f"the origin answered a ranged read with status {answer.status}"
        raise error_of(answer.status, problem, obj.url, answer.headers)
    if obj.has_ranges:
        content_range = answer.headers.get("content-range")
        check_range(obj, parts.start, parts.stop, answer.status, content_range)
    if not version:
        raise no_version(obj.url)
    if version != obj.version:
        raise ShardChangedError("the origin sent a different version than requested", url=obj.url)
    raise wrong_length(parts.size_bytes, obj.url)


def size_of(stated: object, url: str) -> int:
    """Return an object's size as its origin states it.

    Args:
        stated: a number or its text; None if the origin states no size.

    Raises OriginError if the origin states no size, or a value that is not a size.
    """
    size_bytes = number_in(stated)
    if size_bytes is None:
        raise OriginError(
            "the server does not state the file's size, so a truncated download could not be "
            "detected",
            url=url,
            remedy="serve it with a Content-Length header, as any file server does",
        )
    return size_bytes
