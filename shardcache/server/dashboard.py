"""The dashboard: a web page with the daemon's state.

The page consists of static files, which `PageFiles` serves, and of updates that are one second
apart, which `stream_live` sends. The updates are server-sent events (WHATWG HTML, 9.2). A moment is
the content of one update: the state at that time, as JSON. Each user sees only the shards that the
user may read, so each user (`Peer`) gets moments of their own.
"""

import asyncio
import hashlib
import json
import mimetypes
from dataclasses import dataclass, field
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
# The server closes a TCP connection after a minute. A stream ends earlier, between two events, and
# the page then requests another stream.
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
        self._contents = {entry.name: entry.read_bytes() for entry in entries}
        self.version = _version_of(self._contents)
        # In the page, the names of files begin with "static/". This beginning is replaced by the
        # path with the version. The new path is relative, without a slash in front, because a proxy
        # may serve the page below any path.
        versioned_path = f"{STATIC_PATH}{self.version}/".removeprefix("/")
        html = self._contents[PAGE]
        self._contents[PAGE] = html.replace(b'"static/', f'"{versioned_path}'.encode())

    async def serve_page(self, request: web.Request) -> web.Response:
        """Serve the page itself.

        "no-cache" lets the browser keep a copy of the page, but the browser has to ask each time
        whether the copy is still the latest version.
        """
        return self._answer(request, PAGE, "no-cache")

    async def serve_file(self, request: web.Request) -> web.Response:
        """Serve one of the page's files.

        Raises HTTPNotFound for an unknown name or another version.
        """
        name = request.match_info["name"]
        is_static = name in self._contents and name != PAGE
        if not is_static or request.match_info["version"] != self.version:
            raise web.HTTPNotFound
        return self._answer(request, name, f"public, max-age={_YEAR_S}, immutable")

    def _answer(self, request: web.Request, name: str, cache_control: str) -> web.Response:
        """Return the answer with a file, or status 304 if the browser has cached this version.

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
    """Return the hash of all files, by their names."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(contents):
        digest.update(name.encode())
        digest.update(b"\0")
        digest.update(contents[name])
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Texts:
    """The page's contents, as JSON text, after one refresh of the view.

    Attributes:
        refresh: number of refreshes of the view so far.
        by_peer: the text for each user who has the page open. Users may see different shards, so
            their texts may differ.
    """

    refresh: int
    by_peer: dict[Peer, str] = field(default_factory=dict)


class LiveTexts:
    """The page's contents as JSON text, created once per refresh for all open pages of a user."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._view = service.cache.live_view
        self._latest = _Texts(refresh=0)

    async def moment(self, peer: Peer) -> str:
        """Return the daemon's current state, at most a second old."""
        # This does nothing if another page's stream has just refreshed the view.
        await self._view.refresh()
        if self._latest.refresh != self._view.refreshes:
            self._latest = _Texts(self._view.refreshes)
        texts = self._latest.by_peer
        if peer not in texts:
            outlook = self._view.outlook(self._service.cache.visible_to(peer))
            texts[peer] = _compact_json(self._service.status(peer) | outlook)
        return texts[peer]


def _compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


LIVE_TEXTS: web.AppKey[LiveTexts] = web.AppKey("LIVE_TEXTS", LiveTexts)


async def stream_live(request: web.Request) -> web.StreamResponse:
    """Stream a `moment` event each second, until the stream's time limit or the daemon's stop."""
    peer = peer_of(request)
    response = web.StreamResponse(headers=_LIVE_HEADERS)
    limit = asyncio.timeout(_STREAM_LIMIT_S)
    try:
        await response.prepare(request)
        async with limit:
            await _send_events(request.app, peer, response)
    except TimeoutError:
        # The stream's limit ends the stream without an error. Any other timeout is an error.
        if not limit.expired():
            raise
    except ConnectionError:
        pass  # the page was closed
    return response


async def _send_events(app: web.Application, peer: Peer, response: web.StreamResponse) -> None:
    """Send events until the daemon is about to stop."""
    texts = app[LIVE_TEXTS]
    while not app[SERVICE].drain.began:
        moment = await texts.moment(peer)
        await response.write(_event("moment", moment))
        await asyncio.sleep(_EVENT_INTERVAL_S)


def _event(name: str, data: str) -> bytes:
    """Return a server-sent event; `data` has no line breaks."""
    return f"event: {name}\ndata: {data}\n\n".encode()


def add_to(app: web.Application) -> None:
    """Add the page to an application. `app[SERVICE]` must be set."""
    page_files = PageFiles()
    app[LIVE_TEXTS] = LiveTexts(app[SERVICE])
    app.router.add_get("/", page_files.serve_page)
    app.router.add_get(STATIC_PATH + "{version}/{name}", page_files.serve_file)
    app.router.add_get(LIVE_PATH, stream_live)
