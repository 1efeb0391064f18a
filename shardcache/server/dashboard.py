"""The dashboard: a web page with the daemon's state.

The page consists of static files, which `PageFiles` serves, and of updates, which `stream_live`
sends once a second as server-sent events (WHATWG HTML, 9.2). A moment is the content of one update:
the daemon's state at that time, as JSON. Users (`Peer`) see only the shards that they may read, so
their moments differ.
"""

import asyncio
import hashlib
import json
import mimetypes
from importlib.resources import files

from aiohttp import web

from shardcache.access.rules import Peer
from shardcache.server.peer import peer_of
from shardcache.server.service import SERVICE, Service

PAGE = "index.html"
STATIC_PATH = "/dashboard/static/"
LIVE_PATH = "/dashboard/live"

# Any web site can make a browser load addresses on this node. These headers keep a site from
# showing the dashboard inside its own page, and from using the dashboard's files.
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
_YEAR_S = 365 * 24 * 3600
_EVENT_INTERVAL_S = 1.0
# The server closes a TCP connection after a minute. A stream ends earlier, between two events. The
# page then requests another stream.
_STREAM_LIMIT_S = 45.0


class PageFiles:
    """All files of the page, in memory.

    Attributes:
        version: hash of all files. It is part of the files' addresses, so that browsers may cache
            the files and need not ask whether they have changed.
    """

    def __init__(self) -> None:
        folder = files(__package__) / "page"
        entries = [entry for entry in folder.iterdir() if entry.is_file()]
        self._contents = {entry.name: entry.read_bytes() for entry in entries}  # by file name
        self.version = _version_of(self._contents)
        # The page refers to its files as "static/…", which is replaced by the path with the
        # version. This path is relative, without a slash in front, because a proxy may serve the
        # page below any path.
        versioned_path = f"{STATIC_PATH}{self.version}/".removeprefix("/")
        html = self._contents[PAGE]
        self._contents[PAGE] = html.replace(b'"static/', f'"{versioned_path}'.encode())

    async def serve_page(self, request: web.Request) -> web.Response:
        """Serve the page itself.

        With "no-cache", the browser may keep a copy of the page, but asks each time whether the
        copy is still the latest version.
        """
        return self._answer(request, PAGE, "no-cache")

    async def serve_file(self, request: web.Request) -> web.Response:
        """Serve one of the page's files.

        Raises HTTPNotFound for an unknown name or another version.
        """
        name = request.match_info["name"]
        is_static = name in self._contents and name != PAGE  # the page itself is at "/" alone
        if not is_static or request.match_info["version"] != self.version:
            raise web.HTTPNotFound
        return self._answer(request, name, f"public, max-age={_YEAR_S}, immutable")

    def _answer(self, request: web.Request, name: str, cache_control: str) -> web.Response:
        """Return the response with a file, or status 304 if the browser has cached this version.

        Args:
            cache_control: value of the header by which browsers decide how long to cache the file.
        """
        headers = BROWSER_HEADERS | {"Cache-Control": cache_control, "ETag": f'"{self.version}"'}
        cached_tags = request.if_none_match or ()
        if any(tag.value == self.version for tag in cached_tags):
            return web.Response(status=304, headers=headers)
        content_type, _ = mimetypes.guess_type(name)
        return web.Response(
            body=self._contents[name],
            content_type=content_type or "application/octet-stream",
            charset="utf-8",
            headers=headers,
        )


def _version_of(contents: dict[str, bytes]) -> str:
    """Return the hash of all names and contents of files.

    Args:
        contents: the files' contents by name.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(contents):
        digest.update(name.encode())
        digest.update(b"\0")
        digest.update(contents[name])
    return digest.hexdigest()


class Moments:
    """The latest moment of each user, created once per refresh for all open pages of the user."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._view = service.cache.live_view
        self._texts: dict[Peer, str] = {}
        self._refreshes = 0  # number of the view's refreshes when the texts were created

    async def latest(self, peer: Peer) -> str:
        """Return a moment as JSON text; the state in it is at most a second old."""
        # This does nothing if another page's stream has just refreshed the view.
        await self._view.refresh()
        if self._refreshes != self._view.refreshes:
            self._refreshes = self._view.refreshes
            self._texts = {}
        if peer not in self._texts:
            visible = self._service.cache.visible_to(peer)
            moment = self._service.status(peer) | self._view.to_json(visible)
            self._texts[peer] = _compact_json(moment)
        return self._texts[peer]


def _compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


MOMENTS: web.AppKey[Moments] = web.AppKey("MOMENTS", Moments)


async def stream_live(request: web.Request) -> web.StreamResponse:
    """Stream a `moment` event each second, until the stream's time limit or the daemon's stop."""
    peer = peer_of(request)
    response = web.StreamResponse(headers=_LIVE_HEADERS)
    stream_limit = asyncio.timeout(_STREAM_LIMIT_S)
    try:
        await response.prepare(request)
        async with stream_limit:
            await _send_moments(request.app, peer, response)
    except TimeoutError:
        if not stream_limit.expired():
            raise  # this is another timeout, and an error
    except ConnectionError:
        pass  # the page was closed
    return response


async def _send_moments(app: web.Application, peer: Peer, response: web.StreamResponse) -> None:
    """Send a `moment` event each second until the daemon is about to stop."""
    while not app[SERVICE].drain.has_begun:
        moment = await app[MOMENTS].latest(peer)
        await response.write(_event("moment", moment))
        await asyncio.sleep(_EVENT_INTERVAL_S)


def _event(name: str, data: str) -> bytes:
    """Return a server-sent event. A line break in `data` would end the event."""
    return f"event: {name}\ndata: {data}\n\n".encode()


def add_to(app: web.Application) -> None:
    """Add the page to an application. `app[SERVICE]` must be set."""
    page_files = PageFiles()
    app[MOMENTS] = Moments(app[SERVICE])
    app.router.add_get("/", page_files.serve_page)
    app.router.add_get(STATIC_PATH + "{version}/{name}", page_files.serve_file)
    app.router.add_get(LIVE_PATH, stream_live)
