"""aiohttp's client, kept within a fence: each redirect is judged before it is followed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

from shardcache.errors import OriginError
from shardcache.origin.far_resolver import FarResolver
from shardcache.origin.fence import Fence
from shardcache.origin.sockets import IDLE_S, Distrust, new_socket

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_HOPS = 5
# What identifies the daemon to the server that it was configured for, and to no other.
_PERSONAL = frozenset({"headers", "auth", "cookies", "cookie_jar", "params"})
# What need not be encoded to be sent.
_SENDABLE = re.compile(r"[!-~]*")


class HttpClient:
    """GETs with one set of options, those of fsspec's HTTPFileSystem.

    Args:
        options: `client_kwargs` for the session, anything else for each request.
        max_connections: to all servers together.
        fence: judges where a server leads.
    """

    def __init__(self, options: Mapping[str, Any], max_connections: int, fence: Fence) -> None:
        requests = dict(options)
        session = {"trust_env": True, "timeout": _TIMEOUT, **requests.pop("client_kwargs", {})}
        self._session_options = session
        self._request_options = requests
        self._max_connections = max_connections
        self._fence = fence
        self._sessions: dict[tuple[bool, bool], aiohttp.ClientSession] = {}
        self._distrust = Distrust()

    @asynccontextmanager
    async def get(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer to a GET, after all redirects.

        Raises NotAllowedError for a redirect that leads outside, OriginError for one that makes no sense, and what
        aiohttp raises.
        """
        home = target = _parsed(url)
        for _ in range(_MOST_HOPS + 1):
            async with self._ask(target, headers, at_home=target.origin() == home.origin()) as answer:
                location = answer.headers.get("Location") if answer.status in _REDIRECTS else None
                if location is None:
                    yield answer
                    return
            target = _next(url, target, location)
            self._fence.check_hop(url, str(target))
        raise OriginError(f"the server redirects more than {_MOST_HOPS} times", url=url)

    @asynccontextmanager
    async def _ask(
        self, target: URL, headers: Mapping[str, str], *, at_home: bool
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        options = self._request_options if at_home else _impersonal(self._request_options)
        own: Mapping[str, str] = options.get("headers", {})
        fixed = {"headers": {"Accept-Encoding": "identity", **own, **headers}, "allow_redirects": False}

        async def ask(*, pooled: bool) -> aiohttp.ClientResponse:
            return await self._session(at_home=at_home, pooled=pooled).get(target, **{**options, **fixed})

        async with await self._distrust.ask(lambda: ask(pooled=True), lambda: ask(pooled=False)) as answer:
            yield answer

    def _session(self, *, at_home: bool, pooled: bool) -> aiohttp.ClientSession:
        if (at_home, pooled) not in self._sessions:
            options = self._session_options if at_home else _impersonal(self._session_options)
            resolver = FarResolver() if self._fence.far_only else None
            kept = {"keepalive_timeout": IDLE_S} if pooled else {"force_close": True}
            connector = aiohttp.TCPConnector(
                limit=self._max_connections, resolver=resolver, socket_factory=new_socket, **kept
            )
            session = aiohttp.ClientSession(connector=connector, auto_decompress=False, **options)
            self._sessions[at_home, pooled] = session
        return self._sessions[at_home, pooled]

    async def close(self) -> None:
        """Close every connection."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()


def _impersonal(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _PERSONAL}


def _parsed(url: str) -> URL:
    try:
        return _with_host(URL(url))
    except ValueError as exn:
        raise aiohttp.InvalidURL(url) from exn


def _next(url: str, target: URL, location: str) -> URL:
    try:
        # As it stands where that is possible: the path of a signed url may not be spelt otherwise.
        following = _with_host(target.join(URL(location, encoded=_SENDABLE.fullmatch(location) is not None)))
    except ValueError as exn:
        raise OriginError(f"the server redirects to what is no url of the web ({exn})", url=url) from None
    if following.scheme not in ("http", "https") or (target.scheme, following.scheme) == ("https", "http"):
        raise OriginError(
            f"the server redirects from {target.scheme} to {following.scheme}, which is not followed", url=url
        )
    return following


def _with_host(url: URL) -> URL:
    """Return the url. Raises ValueError where it has no host or port, at which yarl looks only when it is asked."""
    if url.host is None or url.port is None:
        raise ValueError("no host")
    return url
