"""The dashboard: a web page.

Static files, and live updates, one second apart, as server-sent events (WHATWG HTML, 9.2).
"""

import asyncio
import hashlib
import json
import mimetypes
from importlib.resources import files

from aiohttp import web

from shardcache.access import Peer
from shardcache.server.peer import peer_of
from shardcache.server.service import SERVICE, Service

PAGE = "index.html"
STATIC_PATH = "/dashboard/static/"
LIVE_PATH = "/dashboard/live"

# Any page on the web may send a browser to an address on this node.
BROWSER_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ),
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_LIVE_HEADERS = BROWSER_HEADERS | {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
}
_PERIOD_S = 1.0
# A TCP connection may last a minute: the page reconnects before it is cut off in the middle of an
# event.
_LASTS_S = 45.0


class Files:
    """All files of the page, in memory.

    Attributes:
        version: hash over all of them, so that browsers can cache them.
    """

    def __init__(self) -> None:
        folder = files(__package__) / "page"
        entries = [entry for entry in folder.iterdir() if entry.is_file()]
        self._contents = {entry.name: entry.read_bytes() for entry in entries}
        self.version = _version_of(self._contents)
        # Addresses are relative: a proxy may serve the page below any path.
        static = f"{STATIC_PATH}{self.version}/".removeprefix("/")
        page = self._contents[PAGE]
        self._contents[PAGE] = page.replace(b'"static/', f'"{static}'.encode())

    async def page(self, request: web.Request) -> web.Response:
        """Serve the page itself."""
        return self._answer(request, PAGE, "no-cache")

    async def static(self, request: web.Request) -> web.Response:
        """Serve one of the page's files.

        Raises HTTPNotFound for an unknown name or another version.
        """
        name = request.match_info["name"]
        is_static = name in self._contents and name != PAGE
        if not is_static or request.match_info["version"] != self.version:
            raise web.HTTPNotFound
        return self._answer(request, name, "public, max-age=31536000, immutable")

    def _answer(self, request: web.Request, name: str, keep: str) -> web.Response:
        headers = BROWSER_HEADERS | {"Cache-Control": keep, "ETag": f'"{self.version}"'}
        if any(tag.value == self.version for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        kind, _ = mimetypes.guess_type(name)
        return web.Response(
            body=self._contents[name],
            content_type=kind or "application/octet-stream",
            charset="utf-8",
            headers=headers,
        )


def _version_of(contents: dict[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(contents):
        digest.update(name.encode() + b"\0" + contents[name])
    return digest.hexdigest()


class Live:
    """The page's contents as JSON text, serialized once for all users who may see the same."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._view = service.cache.live_view
        self._moments: tuple[int, dict[Peer, str]] = 0, {}  # number of the look, and its texts
        self._maps: tuple[int, dict[Peer, str]] = 0, {}

    async def moment(self, peer: Peer) -> str:
        """Return the daemon's current state, at most a second old."""
        await self._view.look()
        if self._moments[0] != self._view.looks:
            self._moments = self._view.looks, {}
        texts = self._moments[1]
        if peer not in texts:
            outlook = self._view.outlook(self._service.cache.visible_to(peer))
            texts[peer] = _compact(self._service.status(peer) | outlook)
        return texts[peer]

    async def map(self, peer: Peer, seen: int) -> tuple[str, int]:
        """Return the map of cached shards and its number; no text if that is `seen` already."""
        if self._maps[0] != self._view.maps:
            self._maps = self._view.maps, {}
        number, texts = self._maps
        if number == seen:
            return "", seen
        if peer not in texts:
            cells = await self._view.map(self._service.cache.visible_to(peer))
            texts[peer] = _compact(cells)
        return texts[peer], number


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


LIVE: web.AppKey[Live] = web.AppKey("LIVE", Live)


async def live(request: web.Request) -> web.StreamResponse:
    """Stream a `moment` event each second, and a `map` event whenever the map is refreshed."""
    found = request.app[LIVE]
    peer = peer_of(request)
    seen = 0
    response = web.StreamResponse(headers=_LIVE_HEADERS)
    try:
        await response.prepare(request)
        async with asyncio.timeout(_LASTS_S) as limit:
            while not request.app[SERVICE].drain.began:
                await response.write(_event("moment", await found.moment(peer)))
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


def add_to(app: web.Application) -> None:
    """Add the page to an application that has its service."""
    page = Files()
    app[LIVE] = Live(app[SERVICE])
    app.router.add_get("/", page.page)
    app.router.add_get(STATIC_PATH + "{version}/{name}", page.static)
    app.router.add_get(LIVE_PATH, live)
