"""Plain web servers: ranged reads if the server supports them, else the whole file in one body.

Transport workers, which are processes of their own, send the requests. The redirect guard is the
daemon's rules for urls: each redirect is checked against them before it is followed. The tier is an
optional cache that the nodes of a cluster share. A version is the file's ETag; else its
Last-Modified; else only its size. A file's home is the server that its url names.
"""

import http.client
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlencode

from yarl import URL

from shardcache.origin.base import Origin, Setup
from shardcache.origin.http.http_errors import error_of, timestamp, translate_transport_errors
from shardcache.origin.http.http_semantics import (
    Environment,
    Reading,
    content_ranges,
    raise_unusable,
    range_header,
    send,
    size_of,
    span_bytes,
    total_bytes,
)
from shardcache.origin.http.redirects import (
    MAX_REDIRECTS,
    REDIRECTS,
    redirect_target,
    sendable_url,
    verbatim,
)
from shardcache.origin.objects import RemoteObject
from shardcache.origin.tier.tier_state import Route
from shardcache.shared.exceptions import ConfigError, OriginError
from shardcache.shared.wording.redact import redact
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.messages import Answer, Body, Request
from shardcache.transport.between.parts import Parts, PartSums
from shardcache.transport.http.http_heads import SENDABLE, number_in

_OPTIONS = frozenset({"headers", "cookies", "params", "proxy"})
_GZIP_OFF = "nginx: gzip off; Apache: SetEnv no-gzip 1"
_ENCODED_REMEDY = f"turn off on-the-fly compression for these files ({_GZIP_OFF})"
# A file is settled if it was modified at least this long ago. Last-Modified has whole seconds, and
# the clock that sets it may lag by some milliseconds.
_SETTLED_S = 2
_SIZE_VERSION = "size="  # beginning of a version that is only the file's size


class HttpOrigin(Origin):
    """Web servers with one set of options.

    Its `storage_options` are `headers`, `cookies`, `params` and `proxy`. They may also be inside
    `client_kwargs`, as in fsspec's HTTPFileSystem. Headers, cookies and params are sent only to the
    url's own server, never to another server that a redirect leads to.
    """

    def __init__(self, setup: Setup) -> None:
        """Raise ConfigError for any option that is not supported."""
        options = setup.table.storage_options
        all_options = {**options, **options.get("client_kwargs", {})}
        all_options.pop("client_kwargs", None)
        unknown = sorted(all_options.keys() - _OPTIONS)
        if unknown:
            supported = ", ".join(sorted(_OPTIONS))
            raise ConfigError(
                f"unsupported storage_options for web servers: {', '.join(unknown)}",
                remedy=f"the [[origin]] table of a web server supports {supported}",
            )
        self._headers = _headers(options)
        self._params = _merged("params", options)
        self._proxy: str | None = all_options.get("proxy")
        self._redirect_guard = setup.redirect_guard
        self._workers = setup.workers
        self._environment = Environment()

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`.

        It requests one byte with GET instead of sending a HEAD: this also shows whether ranges
        work, and urls presigned for GET refuse HEAD.
        """
        with translate_transport_errors(url):
            answer = await self._get(url, {"Range": "bytes=0-0"}, first_bytes=first_bytes)
        # Only a read may have no answer: see `_get`.
        assert answer is not None
        _check_answer(answer, url)
        size_bytes = _size_bytes(answer, url)
        version = _version(answer.headers, size_bytes)
        # Without a reliable version, ranges could be of several versions: the file is then fetched
        # in a single answer.
        has_etag = version == answer.headers.get("etag")
        is_guarded = has_etag or _is_settled(answer.headers)
        has_ranges = answer.status != 200  # it is 206, or 416 for an empty file
        return RemoteObject(
            url,
            version,
            size_bytes,
            has_ranges=is_guarded and has_ranges,
            is_guarded=is_guarded,
            # A chunked body, which has no length, stays in memory until all of it has arrived.
            is_joinable="content-length" in answer.headers,
        )

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """As `Origin.fetch`; one GET with If-Match or If-Unmodified-Since."""
        headers, body = _headers_and_body(obj, parts, held=commit is not None)
        with translate_transport_errors(obj.url):
            answer = await self._get(obj.url, headers, Reading(body, flow, commit))
        if answer is None:  # `commit` returned False
            return None
        if answer.sums is not None:
            return answer.sums
        _check_answer(answer, obj.url)
        size_bytes = obj.size_bytes if obj.has_ranges else _size_bytes(answer, obj.url)
        raise_unusable(answer, _version(answer.headers, size_bytes), obj, parts)

    async def ask_tier(
        self,
        route: Route,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow | None,
    ) -> Answer | None:
        """As `Origin.ask_tier`.

        Returns None if the version is not a strong ETag, which the tier needs to tell versions
        apart, or if the url has secrets, which the tier would store with the file.
        """
        if not obj.has_ranges or not _is_strong_etag(obj.version):
            return None
        headers, body = _headers_and_body(obj, parts, held=False)
        with translate_transport_errors(obj.url):
            request = self._tier_request(route, obj.url, headers)
            if request is None:
                return None
            if flow is None:
                return await self._workers.ask(request)
            return await self._workers.fetch(request, body, flow)

    async def ask_tier_for_version(self, route: Route, url: str) -> RemoteObject | None:
        """As `Origin.ask_tier_for_version`."""
        with translate_transport_errors(url):
            # The route's headers say that this is a question; no others are needed.
            request = self._tier_request(route, url, {})
            if request is None:
                return None
            answer = await self._workers.ask(request)
        size_bytes = total_bytes(answer.headers.get("content-range"))
        version = answer.headers.get("etag", "")
        if answer.status != 206 or size_bytes is None or not _is_strong_etag(version):
            return None
        return RemoteObject(url, version, size_bytes)

    async def list_prefix(
        self,
        prefix: str,
        received: Received,
        *,
        flat: bool = False,
    ) -> list[RemoteObject]:
        """Raise OriginError: HTTP has no listings."""
        remedy = "use a brace pattern such as {000..099}, or an index file (.json)"
        raise OriginError("web servers cannot list files", url=prefix, remedy=remedy)

    async def _get(
        self,
        url: str,
        headers: Mapping[str, str],
        reading: Reading | None = None,
        first_bytes: int = 0,
    ) -> Answer | None:
        """Return the answer to a GET, after all redirects. The redirect guard may reject them.

        Returns None if the commit of `reading` dropped the body.

        Args:
            reading: the expected body and its destination; None to read no body.
            first_bytes: number of the file's first bytes to request at the same time; 0 for none.
        """
        home = sendable_url(url)
        target = home
        for _ in range(MAX_REDIRECTS + 1):
            is_at_home = target.origin() == home.origin()
            request = self._request(target, headers, at_home=is_at_home)
            # The read that follows begins with the url itself, not with the target of a redirect.
            ahead_bytes = first_bytes if target is home else 0
            answer = await send(self._workers, request, reading, ahead_bytes)
            if answer is None or answer.status not in REDIRECTS:
                return answer
            location = answer.headers.get("location")
            if location is None:
                return answer
            target = redirect_target(url, target, location)
            if self._redirect_guard is not None:
                self._redirect_guard.check_hop(url, str(target))
        raise OriginError(f"the server redirects more than {MAX_REDIRECTS} times", url=url)

    def _tier_request(self, route: Route, url: str, headers: Mapping[str, str]) -> Request | None:
        """Return a request to the tier; None for a url with secrets, which the tier would store.

        Args:
            headers: headers of the request to the server itself.
        """
        all_headers = {**headers, **route.headers}
        request = self._request(sendable_url(url), all_headers, at_home=True)
        # The tier does not store AWS's signatures, so they are not a reason to bypass it. Their
        # parameters are renamed here, so that `redact` does not hide them. Anything that it still
        # hides is another secret.
        without_signature = request.url.replace("X-Amz-", ".")
        if redact(without_signature) != without_signature:
            return None
        return replace(request, via=route.address, proxy=None, far_only=False)

    def _request(self, target: URL, headers: Mapping[str, str], *, at_home: bool) -> Request:
        """Return a GET request.

        Args:
            target: the url, or the target of a redirect.
            at_home: True if `target` is at home: the table's options are sent only there.
        """
        table_headers = self._headers if at_home else {}
        if at_home and self._params:
            queries = [target.raw_query_string, urlencode(self._params)]
            query = "&".join(filter(None, queries))
            target = verbatim(target, target.raw_path, query)
        guard = self._redirect_guard
        return self._environment.request(
            "GET",
            str(target),
            {**table_headers, **headers},
            proxy=self._proxy,
            far_only=guard is not None and guard.far_only,
        )


def _headers(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that the options give, including the cookies.

    The values are sent as UTF-8, so each of their bytes is a character here.
    """
    headers = _merged("headers", options)
    cookies = SimpleCookie(_merged("cookies", options))
    cookie_field = cookies.output(header="", sep=";", attrs=[]).strip()
    if cookie_field:
        headers["Cookie"] = cookie_field
    return {name: str(value).encode().decode("latin-1") for name, value in headers.items()}


def _merged(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of an option, from inside `client_kwargs` and from outside of it.

    In fsspec, the former are for the session, and the latter for each request, which wins.
    """
    of_session: dict[str, str] = options.get("client_kwargs", {}).get(name, {})
    of_request: dict[str, str] = options.get(name, {})
    return {**of_session, **of_request}


def _headers_and_body(
    obj: RemoteObject,
    parts: Parts,
    *,
    held: bool,
) -> tuple[dict[str, str], Body]:
    """Return the headers that request parts of exactly this version, and the expected body.

    Args:
        held: True to keep the body in memory until it is committed.
    """
    headers, expected = _version_headers(obj.version)
    status = 200
    if obj.has_ranges:
        status = 206
        headers["Range"] = range_header(parts.start, parts.stop)
        expected["content-range"] = content_ranges(obj, parts.start, parts.stop)
    return headers, Body(parts, status, expected, held=held, encoded_chunks=False)


def _version_headers(version: str) -> tuple[dict[str, str], dict[str, Sequence[str | None]]]:
    """Return the headers that request a version, and the headers that the answer must have.

    The latter are permitted values by name: see `Body.expected`.
    """
    if version.startswith(_SIZE_VERSION):
        return {}, {}
    if _is_strong_etag(version):
        return {"If-Match": version}, {"etag": (version,)}
    # A weak ETag never satisfies If-Match (RFC 9110, 13.1.1), nor does one without quotes, which is
    # invalid. Such an ETag is only compared with the answer's.
    if version.startswith("W/") or parsedate(version) is None:
        return {}, {"etag": (version,)}
    return {"If-Unmodified-Since": version}, {"last-modified": (version,)}


def _is_strong_etag(version: str) -> bool:
    """Return whether a version is an ETag in quotes, without "W/", the mark of a weak one."""
    return version.startswith('"')


def _check_answer(answer: Answer, url: str) -> None:
    """Raise the error for an answer that has no bytes of the file."""
    # An empty file does not have the byte that `stat` requests: the status is 416 then.
    file_bytes = total_bytes(answer.headers.get("content-range"))
    is_empty_file = answer.status == 416 and file_bytes == 0
    if answer.status >= 300 and not is_empty_file:
        reason = http.client.responses.get(answer.status, "")
        problem = f"the server answered {answer.status} {reason}"
        raise error_of(answer.status, problem, url, answer.headers)
    _check_encoding(answer, url)


def _check_encoding(answer: Answer, url: str) -> None:
    """Raise OriginError if the server encodes the stored bytes as it sends them.

    A file that is stored encoded also has a Content-Encoding. Its length is known, whereas the
    length of a body encoded on the fly is unknown, or differs from that of the requested range.
    """
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return
    length = _length(answer)
    wanted_length = length  # the whole file may have any length, if the server states it
    if answer.status == 206:
        wanted_length = span_bytes(answer.headers.get("content-range"))
    if length is None or length != wanted_length:
        raise OriginError(
            f"the server encodes the file on the fly ({encoding}), although asked not to",
            url=url,
            remedy=_ENCODED_REMEDY,
        )


def _length(answer: Answer) -> int | None:
    """Return the body's length; None if the server does not state it."""
    if "transfer-encoding" in answer.headers:
        return None
    return number_in(answer.headers.get("content-length"))


def _size_bytes(answer: Answer, url: str) -> int:
    """Return the whole file's size. Raises OriginError if the server does not state it."""
    if answer.status == 200:
        return size_of(_length(answer), url)
    return size_of(total_bytes(answer.headers.get("content-range")), url)


def _version(headers: Mapping[str, str], size_bytes: int) -> str:
    """Return the version: the ETag verbatim, else Last-Modified, else the size.

    The size is a weak version: another version may have the same. A header with characters that
    cannot be sent back is ignored, because later requests name the version in a header.
    """
    etag = headers.get("etag", "")
    if SENDABLE.fullmatch(etag):
        return etag
    date = headers.get("last-modified", "")
    if parsedate(date) and SENDABLE.fullmatch(date):
        return date
    return f"{_SIZE_VERSION}{size_bytes}"


def _is_settled(headers: Mapping[str, str]) -> bool:
    """Return whether the file was modified long enough ago for Last-Modified to be reliable.

    A file that was just modified may change again within the same second, and would then keep its
    Last-Modified. Any later version of a settled file has another one.
    """
    sent_s = timestamp(headers.get("date"))  # 0 without a valid date
    modified_s = timestamp(headers.get("last-modified"))
    return 0 < modified_s <= sent_s - _SETTLED_S
