"""Plain web servers: ranged reads if the server supports them, else the whole file in one body."""

from __future__ import annotations

import ssl
from calendar import timegm
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate
from http import HTTPStatus

from shardcache.errors import OriginError, ShardcacheError, ShardChangedError
from shardcache.origin.base import Origin, RemoteObject, Setup
from shardcache.origin.http.http_client import HttpClient, InvalidUrlError
from shardcache.origin.http.ranges import (
    check_range,
    content_ranges,
    range_header,
    size_of,
    span_bytes,
    total_bytes,
    wrong_length,
)
from shardcache.origin.http_status import certificate_error, connection_error, error_of
from shardcache.origin.tier_client import Route
from shardcache.transport.flow import Flow, Received
from shardcache.transport.head import ECHOED, number_in
from shardcache.transport.messages import Answer, Body
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit


class HttpOrigin(Origin):
    """Web servers with one set of options; `storage_options` are those of `HttpClient`."""

    def __init__(self, setup: Setup) -> None:
        self._client = HttpClient(setup.table.storage_options, setup.redirect_guard, setup.workers)

    async def stat(self, url: str) -> RemoteObject:
        """As `Origin.stat`.

        Requests one byte instead of HEAD: this also shows whether ranges work, and urls presigned for GET refuse HEAD.
        """
        with _translated(url):
            answer = await self._client.get(url, {"Range": "bytes=0-0"})
        assert answer is not None
        _check(answer, url)
        size_bytes = _size_bytes(answer, url)
        version = _version(answer.headers, size_bytes)
        # Ranges that no version ties together could be of several: without one, the file comes in a single answer.
        guarded = version == answer.headers.get("etag") or _settled(answer.headers)
        ranges, joinable = guarded and answer.status != 200, "content-length" in answer.headers
        return RemoteObject(url, version, size_bytes, ranges=ranges, guarded=guarded, joinable=joinable)

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; one GET with If-Match or If-Unmodified-Since."""
        headers, body = _ask_for(obj, parts, held=commit is not None)
        with _translated(obj.url):
            answer = await self._client.get(obj.url, headers, body, flow, commit)
        if answer is None or answer.sums is not None:
            return None if answer is None else answer.sums
        _check(answer, obj.url)
        if obj.ranges:
            check_range(obj, parts.start, parts.stop, answer.status, answer.headers.get("content-range"))
        size_bytes = obj.size_bytes if obj.ranges else _size_bytes(answer, obj.url)
        if _version(answer.headers, size_bytes) != obj.version:
            raise ShardChangedError("the server sent a different version than requested", url=obj.url)
        raise wrong_length(parts.size_bytes, obj.url)

    async def ask_tier(self, route: Route, obj: RemoteObject, parts: Parts, flow: Flow | None) -> Answer | None:
        """As `Tiered.ask_tier`; None unless ETags tell versions of the file apart."""
        if not (obj.ranges and obj.version.startswith('"')):
            return None
        headers, body = _ask_for(obj, parts, held=False)
        with _translated(obj.url):
            return await self._client.ask_tier(route, obj.url, headers, body, flow)

    async def list_prefix(self, prefix: str, received: Received) -> list[RemoteObject]:
        """Raise OriginError: HTTP has no listings."""
        raise OriginError(
            "web servers cannot list files",
            url=prefix,
            remedy="use a brace pattern such as {000..099}, or an index file (.json)",
        )

    async def close(self) -> None:
        """Do nothing: the connections belong to the transport workers."""


def _ask_for(obj: RemoteObject, parts: Parts, *, held: bool) -> tuple[dict[str, str], Body]:
    """Return the headers that request parts of exactly this version, and the expected body."""
    headers, expected = _condition(obj.version), _expected_version(obj.version)
    if obj.ranges:
        headers["Range"] = range_header(parts.start, parts.stop)
        expected["content-range"] = content_ranges(obj, parts.start, parts.stop)
    return headers, Body(parts, 206 if obj.ranges else 200, expected, held=held, encoded_chunks=False)


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Translate the client's exceptions into shardcache's."""
    try:
        yield
    except InvalidUrlError as exn:
        raise OriginError("not a valid web url", url=url) from exn
    except ssl.SSLCertVerificationError as exn:
        raise certificate_error(exn, url) from exn
    except ShardcacheError as exn:  # NotFoundError is also an OSError
        exn.url = exn.url or url
        raise
    except OSError as exn:
        raise connection_error(str(exn), url) from exn


def _check(answer: Answer, url: str) -> None:
    """Raise the error for an answer without bytes of the file."""
    if answer.status >= 300 and not _is_of_empty_file(answer):
        raise error_of(answer.status, f"the server answered {answer.status} {_reason(answer.status)}", url)
    _check_encoding(answer, url)


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _is_of_empty_file(answer: Answer) -> bool:
    """Return whether the requested byte is missing because the file is empty."""
    return answer.status == 416 and total_bytes(answer.headers.get("content-range")) == 0


def _check_encoding(answer: Answer, url: str) -> None:
    """Raise OriginError if the server encodes the stored bytes as it sends them.

    A file may also be stored encoded, with the same header. Then its length is known, whereas the length of a body
    encoded on the fly is unknown or differs from the range's.
    """
    encoding, length = answer.headers.get("content-encoding", "identity"), _length(answer)
    span = span_bytes(answer.headers.get("content-range")) if answer.status == 206 else length
    if encoding != "identity" and (length is None or length != span):
        raise OriginError(
            f"the server encodes the file on the fly ({encoding}), although asked not to",
            url=url,
            remedy="turn off on-the-fly compression for these files (nginx: gzip off; Apache: SetEnv no-gzip 1)",
        )


def _length(answer: Answer) -> int | None:
    """Return the body's length, if the server states it."""
    return None if "transfer-encoding" in answer.headers else number_in(answer.headers.get("content-length"))


def _size_bytes(answer: Answer, url: str) -> int:
    """Return the whole file's size. Raises OriginError if the server does not state it."""
    return size_of(_length(answer) if answer.status == 200 else total_bytes(answer.headers.get("content-range")), url)


def _version(headers: Mapping[str, str], size_bytes: int) -> str:
    """Return the ETag verbatim, else Last-Modified; failing both, the size, which says little."""
    etag, date = headers.get("etag", ""), headers.get("last-modified", "")
    # A value that cannot be sent back cannot pin a version.
    return next(filter(ECHOED.fullmatch, (etag, date if parsedate(date) else "")), f"size={size_bytes}")


def _settled(headers: Mapping[str, str]) -> bool:
    """Return whether any later version has another Last-Modified: one of the same second may follow a new file.

    Two seconds, because files are dated by a clock that lags by some milliseconds.
    """
    try:
        sent, modified = (timegm(parsedate(headers.get(name)) or ()) for name in ("date", "last-modified"))
    except (ValueError, OverflowError):
        return False
    return sent - modified >= 2


def _condition(version: str) -> dict[str, str]:
    if version.startswith('"'):
        return {"If-Match": version}
    # A weak ETag never satisfies If-Match (RFC 9110, 13.1.1); the answer's own headers are compared instead.
    return {} if version.startswith(("W/", "size=")) else {"If-Unmodified-Since": version}


def _expected_version(version: str) -> dict[str, Sequence[str | None]]:
    """Return the headers required of an answer with this version."""
    if version.startswith("size="):
        return {}
    is_date = not version.startswith(("W/", '"')) and parsedate(version) is not None
    return {"last-modified": (version,)} if is_date else {"etag": (version,)}
