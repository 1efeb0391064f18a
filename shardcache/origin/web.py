"""Plain web servers: ranged reads if the server supports them, else the whole file in one body.

Each redirect is checked against the redirect guard before it is followed.
"""

import http.client
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from yarl import URL

from shardcache.access import WEB
from shardcache.errors import ConfigError, OriginError
from shardcache.origin import http_semantics
from shardcache.origin.base import Origin, RemoteObject, Route, Setup
from shardcache.redact import redact
from shardcache.transport.messages import ECHOED, Answer, Body, Request, number_in
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit, Flow, Received

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5
_OPTIONS = frozenset({"headers", "cookies", "params", "proxy"})
_UNSENDABLE = re.compile(r"[^!-~]|[\"<>\\^`{|}]|%(?![0-9A-Fa-f]{2})")
_BLANKS = re.compile(r"[\x00-\x20\x7f]")  # of a Location; its bytes beyond ASCII are sent back as they came


class HttpOrigin(Origin):
    """Web servers with one set of options.

    `storage_options` are `headers`, `cookies`, `params` and `proxy`, also inside `client_kwargs` as in fsspec's
    HTTPFileSystem. All but the proxy are sent only to the url's own server, never to the target of a redirect.
    """

    def __init__(self, setup: Setup) -> None:
        """Raise ConfigError for other options."""
        options = setup.table.storage_options
        merged = {**options, **options.get("client_kwargs", {})}
        merged.pop("client_kwargs", None)
        if unknown := sorted(merged.keys() - _OPTIONS):
            raise ConfigError(
                f"unsupported storage_options for web servers: {', '.join(unknown)}",
                remedy=f"the [[origin]] table of a web server supports {', '.join(sorted(_OPTIONS))}",
            )
        cookies = SimpleCookie(_merged("cookies", options)).output(header="", sep=";", attrs=[]).strip()
        given = _merged("headers", options) | ({"Cookie": cookies} if cookies else {})
        self._headers = {name: str(value).encode().decode("latin-1") for name, value in given.items()}  # sent as UTF-8
        self._params = _merged("params", options)
        self._proxy: str | None = merged.get("proxy")
        self._redirect_guard = setup.redirect_guard
        self._workers = setup.workers
        self._environment = http_semantics.Environment()

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`.

        Requests one byte instead of HEAD: this also shows whether ranges work, and urls presigned for GET refuse HEAD.
        """
        with http_semantics.translated(url):
            answer = await self._get(url, {"Range": "bytes=0-0"}, first_bytes=first_bytes)
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
        with http_semantics.translated(obj.url):
            answer = await self._get(obj.url, headers, body, flow, commit)
        if answer is None or answer.sums is not None:
            return None if answer is None else answer.sums
        _check(answer, obj.url)
        size_bytes = obj.size_bytes if obj.ranges else _size_bytes(answer, obj.url)
        http_semantics.judge(answer, _version(answer.headers, size_bytes), obj, parts)

    async def ask_tier(self, route: Route, obj: RemoteObject, parts: Parts, flow: Flow | None) -> Answer | None:
        """As `Origin.ask_tier`; None unless ETags tell versions of the file apart, and for secrets that it keeps."""
        if not (obj.ranges and obj.version.startswith('"')):
            return None
        headers, body = _ask_for(obj, parts, held=False)
        with http_semantics.translated(obj.url):
            request = self._tier_request(route, obj.url, headers)
            if request is None:
                return None
            return await (self._workers.ask(request) if flow is None else self._workers.fetch(request, body, flow))

    async def permitted_lately(self, route: Route, url: str) -> RemoteObject | None:
        """As `Origin.permitted_lately`."""
        with http_semantics.translated(url):
            request = self._tier_request(route, url, {})
            if request is None:
                return None
            answer = await self._workers.ask(request)
        size_bytes = http_semantics.total_bytes(answer.headers.get("content-range"))
        version = answer.headers.get("etag", "")
        if answer.status != 206 or size_bytes is None or not version.startswith('"'):
            return None
        return RemoteObject(url, version, size_bytes)

    async def list_prefix(self, prefix: str, received: Received, *, flat: bool = False) -> list[RemoteObject]:
        """Raise OriginError: HTTP has no listings."""
        remedy = "use a brace pattern such as {000..099}, or an index file (.json)"
        raise OriginError("web servers cannot list files", url=prefix, remedy=remedy)

    async def _get(self, url: str, headers: Mapping[str, str], *reading: Any, first_bytes: int = 0) -> Answer | None:
        """Return the answer to a GET, after all redirects, which the guard may reject; None if `commit` refused."""
        home = target = _parsed(url)
        for _ in range(MAX_REDIRECTS + 1):
            request = self._request(target, headers, at_home=target.origin() == home.origin())
            workers, ahead = self._workers, request.beginning(first_bytes if target is home else 0)
            asked = workers.fetch(request, *reading) if reading else workers.ask(request, ahead)
            answer: Answer | None = await asked
            location = answer.headers.get("location") if answer and answer.status in REDIRECTS else None
            if location is None:
                return answer
            target = following(url, target, location)
            if self._redirect_guard is not None:
                self._redirect_guard.check_hop(url, str(target))
        raise OriginError(f"the server redirects more than {MAX_REDIRECTS} times", url=url)

    def _tier_request(self, route: Route, url: str, headers: Mapping[str, str]) -> Request | None:
        """Return a request to the tier; None for a url with secrets that the tier would keep."""
        request = self._request(_parsed(url), {**headers, **route.headers}, at_home=True)
        bare = request.url.replace("X-Amz-", ".")
        if redact(bare) != bare:
            return None
        return replace(request, via=route.address, proxy=None, far_only=False)

    def _request(self, target: URL, headers: Mapping[str, str], *, at_home: bool) -> Request:
        own = self._headers if at_home else {}
        if at_home and self._params:
            query = "&".join(filter(None, (target.raw_query_string, urlencode(self._params))))
            target = _verbatim(target, target.raw_path, query)
        far_only = self._redirect_guard is not None and self._redirect_guard.far_only
        return self._environment.request("GET", str(target), {**own, **headers}, proxy=self._proxy, far_only=far_only)


def _ask_for(obj: RemoteObject, parts: Parts, *, held: bool) -> tuple[dict[str, str], Body]:
    """Return the headers that request parts of exactly this version, and the expected body."""
    headers, expected = _pinned(obj.version)
    if obj.ranges:
        headers["Range"] = http_semantics.range_header(parts.start, parts.stop)
        expected["content-range"] = http_semantics.content_ranges(obj, parts.start, parts.stop)
    return headers, Body(parts, 206 if obj.ranges else 200, expected, held=held, encoded_chunks=False)


def _check(answer: Answer, url: str) -> None:
    """Raise the error for an answer without bytes of the file."""
    # The requested byte is missing from an empty file.
    is_empty = answer.status == 416 and http_semantics.total_bytes(answer.headers.get("content-range")) == 0
    if answer.status >= 300 and not is_empty:
        reason = http.client.responses.get(answer.status, "")
        what = f"the server answered {answer.status} {reason}"
        raise http_semantics.error_of(answer.status, what, url, answer.headers)
    _check_encoding(answer, url)


def _check_encoding(answer: Answer, url: str) -> None:
    """Raise OriginError if the server encodes the stored bytes as it sends them.

    A file may also be stored encoded, with the same header. Then its length is known, whereas the length of a body
    encoded on the fly is unknown or differs from the range's.
    """
    encoding, length = answer.headers.get("content-encoding", "identity"), _length(answer)
    span = http_semantics.span_bytes(answer.headers.get("content-range")) if answer.status == 206 else length
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
    return http_semantics.size_of(
        _length(answer) if answer.status == 200 else http_semantics.total_bytes(answer.headers.get("content-range")),
        url,
    )


def _version(headers: Mapping[str, str], size_bytes: int) -> str:
    """Return the ETag verbatim, else Last-Modified; failing both, the size, which says little."""
    etag, date = headers.get("etag", ""), headers.get("last-modified", "")
    # A value that cannot be sent back cannot pin a version.
    return next(filter(ECHOED.fullmatch, (etag, date if parsedate(date) else "")), f"size={size_bytes}")


def _settled(headers: Mapping[str, str]) -> bool:
    """Return whether any later version has another Last-Modified: one of the same second may follow a new file.

    Two seconds, because files are dated by a clock that lags by some milliseconds.
    """
    sent, modified = (http_semantics.timestamp(headers.get(name)) for name in ("date", "last-modified"))
    return 0 < modified <= sent - 2


def _pinned(version: str) -> tuple[dict[str, str], dict[str, Sequence[str | None]]]:
    """Return the headers that request a version, and those required of its answer."""
    if version.startswith("size="):
        return {}, {}
    if version.startswith('"'):
        return {"If-Match": version}, {"etag": (version,)}
    # A weak ETag never satisfies If-Match (RFC 9110, 13.1.1); the answer's own headers are compared instead.
    if version.startswith("W/") or parsedate(version) is None:
        return {}, {"etag": (version,)}
    return {"If-Unmodified-Since": version}, {"last-modified": (version,)}


def _merged(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return an option's values, given for the session or for each request."""
    given: dict[str, str] = {**options.get("client_kwargs", {}).get(name, {}), **options.get(name, {})}
    return given


def _parsed(url: str) -> URL:
    """Return a user's url, encoded only where it could not be sent: a signature is of its spelling."""
    try:
        parsed, parts = _with_host(URL(url)), urlsplit(url)
        return _verbatim(parsed, _sendable(parts.path), _sendable(parts.query))
    except ValueError as exn:
        raise OriginError("not a valid web url", url=url) from exn


def _verbatim(server: URL, path: str, query: str) -> URL:
    authority = server.host_port_subcomponent or ""
    return URL.build(scheme=server.scheme, authority=authority, path=path, query_string=query, encoded=True)


def _sendable(text: str) -> str:
    return _UNSENDABLE.sub(lambda found: quote(found[0], safe=""), text)


def following(url: str, target: URL, location: str) -> URL:
    """Return where a redirect leads. Raises OriginError unless it can be followed."""
    try:
        found = _with_host(target.join(URL(_BLANKS.sub(lambda blank: quote(blank[0]), location), encoded=True)))
    except ValueError as exn:
        raise OriginError(f"the server redirects to an invalid url ({exn})", url=url) from None
    if found.scheme not in WEB or (target.scheme, found.scheme) == ("https", "http"):
        raise OriginError(
            f"redirects from {target.scheme} to {found.scheme} are not followed",
            url=url,
            remedy="have the server redirect to https, or use the target's url",
        )
    return found


def _with_host(url: URL) -> URL:
    """Return the url. Raises ValueError if it has no host or port, which yarl checks only on access."""
    if url.host is None or url.port is None:
        raise ValueError("no host")
    return url
