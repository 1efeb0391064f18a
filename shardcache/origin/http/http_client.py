"""Client for plain web servers that checks each redirect against a redirect guard before following it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from yarl import URL

from shardcache.access.protocols import WEB
from shardcache.errors import ConfigError, OriginError
from shardcache.origin.proxy import proxy_of
from shardcache.origin.redirect_guard import RedirectGuard
from shardcache.origin.tier_client import Route
from shardcache.transport.flow import Flow
from shardcache.transport.messages import Answer, Body, Request
from shardcache.transport.workers import Commit, Workers

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_HOPS = 5
_OPTIONS = frozenset({"headers", "cookies", "params", "proxy"})
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_UNSENDABLE = re.compile(r"[^!-~]|[\"<>\\^`{|}]|%(?![0-9A-Fa-f]{2})")
# Of a Location; its bytes beyond ASCII are sent back as they came.
_BLANKS = re.compile(r"[\x00-\x20\x7f]")


class InvalidUrlError(ValueError):
    """Not a valid web url."""


class HttpClient:
    """Client with one set of options.

    Args:
        options: `headers`, `cookies`, `params` and `proxy`, also inside `client_kwargs` as in fsspec's HTTPFileSystem.
            All but the proxy are sent only to the url's own server, never to the target of a redirect.
        redirect_guard: checks redirects.

    Raises ConfigError for other options.
    """

    def __init__(self, options: Mapping[str, Any], redirect_guard: RedirectGuard, workers: Workers) -> None:
        merged = {**options, **options.get("client_kwargs", {})}
        merged.pop("client_kwargs", None)
        if unknown := sorted(merged.keys() - _OPTIONS):
            raise ConfigError(
                f"unsupported storage_options for web servers: {', '.join(unknown)}",
                remedy=f"the [[origin]] table of a web server supports {', '.join(sorted(_OPTIONS))}",
            )
        given = _merged("headers", options) | _cookie_header(_merged("cookies", options))
        self._headers = {name: str(value).encode().decode("latin-1") for name, value in given.items()}  # sent as UTF-8
        self._params = _merged("params", options)
        self._proxy: str | None = merged.get("proxy")
        self._redirect_guard = redirect_guard
        self._workers = workers

    async def get(
        self,
        url: str,
        headers: Mapping[str, str],
        body: Body | None = None,
        flow: Flow | None = None,
        commit: Commit | None = None,
    ) -> Answer | None:
        """Return the answer to a GET, after all redirects; None if `commit` refused its body.

        Raises NotAllowedError for a redirect that the guard rejects, OriginError for an invalid one, InvalidUrlError,
        and what `Workers` raise.
        """
        home = target = _parsed(url)
        for _ in range(_MOST_HOPS + 1):
            request = self._request(target, headers, at_home=target.origin() == home.origin())
            if body is None or flow is None:
                answer: Answer | None = await self._workers.ask(request)
            else:
                answer = await self._workers.fetch(request, body, flow, commit)
            location = answer.headers.get("location") if answer and answer.status in _REDIRECTS else None
            if location is None:
                return answer
            target = _next(url, target, location)
            self._redirect_guard.check_hop(url, str(target))
        raise OriginError(f"the server redirects more than {_MOST_HOPS} times", url=url)

    async def ask_tier(
        self, route: Route, url: str, headers: Mapping[str, str], body: Body, flow: Flow | None
    ) -> Answer | None:
        """Return the tier's answer to a GET; it follows no redirects. Raises InvalidUrlError, and as `Workers`."""
        request = self._request(_parsed(url), {**headers, **route.headers}, at_home=True)
        request = replace(request, via=route.address, proxy=None, far_only=False)
        return await (self._workers.ask(request) if flow is None else self._workers.fetch(request, body, flow))

    def _request(self, target: URL, headers: Mapping[str, str], *, at_home: bool) -> Request:
        own = self._headers if at_home else {}
        if at_home and self._params:
            query = "&".join(filter(None, (target.raw_query_string, urlencode(self._params))))
            target = _verbatim(target, target.raw_path, query)
        ca_file = next((os.environ[name] for name in _CA_VARIABLES if os.environ.get(name)), None)
        proxy = self._proxy or proxy_of(str(target))
        if proxy is not None and not proxy.startswith("http://"):
            raise ConfigError(
                f"unsupported proxy for web servers: {proxy}",
                remedy="use a proxy that speaks plain HTTP, as http://host:port",
            )
        return Request("GET", str(target), {**own, **headers}, proxy, ca_file, self._redirect_guard.far_only)


def _merged(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return an option's values, given for the session or for each request."""
    given: dict[str, str] = {**options.get("client_kwargs", {}).get(name, {}), **options.get(name, {})}
    return given


def _cookie_header(cookies: Mapping[str, str]) -> dict[str, str]:
    if not cookies:
        return {}
    return {"Cookie": SimpleCookie(cookies).output(header="", sep=";", attrs=[]).strip()}


def _parsed(url: str) -> URL:
    """Return a user's url, encoded only where it could not be sent: a signature is of its spelling."""
    try:
        parsed, parts = _with_host(URL(url)), urlsplit(url)
        return _verbatim(parsed, _sendable(parts.path), _sendable(parts.query))
    except ValueError as exn:
        raise InvalidUrlError(url) from exn


def _verbatim(server: URL, path: str, query: str) -> URL:
    authority = server.host_port_subcomponent or ""
    return URL.build(scheme=server.scheme, authority=authority, path=path, query_string=query, encoded=True)


def _sendable(text: str) -> str:
    return _UNSENDABLE.sub(lambda found: quote(found[0], safe=""), text)


def _next(url: str, target: URL, location: str) -> URL:
    try:
        following = _with_host(target.join(URL(_BLANKS.sub(lambda found: quote(found[0]), location), encoded=True)))
    except ValueError as exn:
        raise OriginError(f"the server redirects to an invalid url ({exn})", url=url) from None
    if following.scheme not in WEB or (target.scheme, following.scheme) == ("https", "http"):
        raise OriginError(
            f"redirects from {target.scheme} to {following.scheme} are not followed",
            url=url,
            remedy="have the server redirect to https, or use the target's url",
        )
    return following


def _with_host(url: URL) -> URL:
    """Return the url. Raises ValueError if it has no host or port, which yarl checks only on access."""
    if url.host is None or url.port is None:
        raise ValueError("no host")
    return url
