"""The dashboard, the daemon's own web page: its static files, and its live updates, one second apart.

The updates are server-sent events (WHATWG HTML, 9.2).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mimetypes
import time
from importlib.resources import files

from aiohttp import web

from shardcache import __version__
from shardcache.access.peer import peer_of
from shardcache.access.rules import Peer
from shardcache.cache.facade import Cache
from shardcache.server.admin import LOOP_LAG, STARTED_AT_S
from shardcache.server.drain import DRAIN
from shardcache.server.session import written
from shardcache.server.tcp import BROWSER_HEADERS

PAGE = "index.html"
STATIC_PATH = "/dashboard/static/"
LIVE_PATH = "/dashboard/live"

_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"

_PERIOD_S = 1.0
# A TCP connection may last a minute: the page reconnects before it is cut off in the middle of an event.
_LASTS_S = 45.0
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


class Files:
    """All files of the page, in memory, versioned by a hash over all of them so that browsers can cache them."""

    def __init__(self) -> None:
        folder = files(__package__) / "page"
        self._contents = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
        digest = hashlib.blake2b(digest_size=8)
        for name in sorted(self._contents):
            digest.update(name.encode() + b"\0" + self._contents[name])
        self.version = digest.hexdigest()
        # Addresses are relative: a proxy may serve the page below any path.
        folder_name = f"{STATIC_PATH}{self.version}/".removeprefix("/")
        self._contents[PAGE] = self._contents[PAGE].replace(b'"static/', f'"{folder_name}'.encode())

    def __repr__(self) -> str:
        return f"Files({self.version}, {sum(map(len, self._contents.values()))} bytes)"

    async def page(self, request: web.Request) -> web.Response:
        """Serve the page itself."""
        return self._answer(request, PAGE, _ASK_AGAIN)

    async def static(self, request: web.Request) -> web.Response:
        """Serve one of the page's files. Raises HTTPNotFound for an unknown name or another version."""
        name = request.match_info["name"]
        if request.match_info["version"] != self.version or name not in self._contents or name == PAGE:
            raise web.HTTPNotFound
        return self._answer(request, name, _FOR_EVER)

    def _answer(self, request: web.Request, name: str, keep: str) -> web.Response:
        headers = BROWSER_HEADERS | {"Cache-Control": keep, "ETag": f'"{self.version}"'}
        if any(tag.value == self.version for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        kind, _ = mimetypes.guess_type(name)
        return web.Response(
            body=self._contents[name], content_type=kind or "application/octet-stream", charset="utf-8", headers=headers
        )


class Live:
    """The page's contents as JSON text, serialized once for all users who may see the same."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._view = cache.live_view
        self._looks = self._maps = 0
        self._moment_texts: dict[Peer, str] = {}
        self._map_texts: dict[Peer, str] = {}

    async def moment(self, app: web.Application, peer: Peer) -> str:
        """Return the daemon's current state, at most a second old."""
        await self._view.look()
        if self._view.looks != self._looks:
            self._looks = self._view.looks
            self._moment_texts.clear()
        if (text := self._moment_texts.get(peer)) is None:
            head = {
                "version": __version__,
                "uptime_s": round(time.monotonic() - app[STARTED_AT_S], 3),
                "draining": app[DRAIN].began,
                "loop_lag": app[LOOP_LAG].to_json(),
            }
            visible = self._cache.visible_to(peer)
            moment = head | self._cache.status(peer) | self._view.outlook(visible)
            text = self._moment_texts[peer] = json.dumps(moment, separators=(",", ":"))
        return text

    async def map(self, peer: Peer, seen: int) -> tuple[str, int]:
        """Return the map of cached shards and its number; no text if it is the one already `seen`."""
        if self._view.maps != self._maps:
            self._maps = self._view.maps
            self._map_texts.clear()
        number = self._maps
        if number == seen:
            return "", seen
        if (text := self._map_texts.get(peer)) is None:
            text = await written(await self._view.map(self._cache.visible_to(peer)), self._cache.turns)
            if number == self._maps:
                self._map_texts[peer] = text
        return text, number


LIVE: web.AppKey[Live] = web.AppKey("LIVE", Live)


async def live(request: web.Request) -> web.StreamResponse:
    """Stream a `moment` event each second, and a `map` event whenever the map has been refreshed."""
    found, peer, seen = request.app[LIVE], peer_of(request), 0
    response = web.StreamResponse(headers=_HEADERS)
    try:
        await response.prepare(request)
        async with asyncio.timeout(_LASTS_S) as limit:
            while not request.app[DRAIN].began:
                await response.write(_event("moment", await found.moment(request.app, peer)))
                cells, seen = await found.map(peer, seen)
                if cells:
                    await response.write(_event("map", cells))
                await asyncio.sleep(_PERIOD_S)
    except TimeoutError:
        if not limit.expired():
            raise
    except ConnectionError:
        pass  # the page was closed
    return response


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
