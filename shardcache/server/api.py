"""The admin API, JSON over HTTP for the command line and for `curl --unix-socket`; and the dashboard, a web page."""

import asyncio
import hashlib
import json
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from importlib.resources import files

import structlog
from aiohttp import web

from shardcache import errors
from shardcache.access import Peer
from shardcache.cache.facade import Cache
from shardcache.errors import ShardcacheError
from shardcache.protocol import Json, parse, take
from shardcache.server.service import SERVICE, Service, peer_of, process_stats
from shardcache.tarindex.contents import TokenMember

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Send = Callable[[Json], Awaitable[None]]

_STATUS: dict[type[ShardcacheError], int] = {
    errors.NotFoundError: 404,
    errors.AccessDeniedError: 403,
    errors.NotAllowedError: 403,
    errors.ConfigError: 400,
    errors.ProtocolError: 400,
    errors.StoppingError: 503,
    errors.ExhaustedError: 503,
    errors.CacheError: 507,
}
_BODY_S = 10.0

log = structlog.get_logger()

routes = web.RouteTableDef()


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn a ShardcacheError or an HTTP error into its JSON, with the best matching HTTP status."""
    try:
        return await handler(request)
    except ShardcacheError as exn:
        return _failure(exn, next((code for kind, code in _STATUS.items() if isinstance(exn, kind)), 502))
    except web.HTTPClientError as exn:  # no such path, no such method, too large a body
        answer = _failure(errors.ProtocolError(f"{request.method} {request.path}: {exn.reason}"), exn.status)
        if "Allow" in exn.headers:
            answer.headers["Allow"] = exn.headers["Allow"]
        return answer
    except ConnectionError:
        return web.Response()  # the client disconnected midway and receives no response
    except OSError as exn:  # the process's own: it has run out of descriptors, say
        return _failure(errors.ExhaustedError(f"the daemon cannot answer ({exn.strerror or exn})"), 503)
    except web.HTTPException:
        raise
    except Exception as exn:  # a top-level guard, as of sessions: the client is told what happened
        if request.writer.output_size:  # a stream is under way, which can only be cut off
            raise
        log.exception("unexpected error in a request", path=request.path)
        return _failure(errors.internal_error(exn), 500)


def _failure(exn: ShardcacheError, status: int) -> web.Response:
    return web.json_response({"error": exn.to_json()}, status=status)


@routes.get("/v1/health")
async def health(request: web.Request) -> web.Response:
    """Report the daemon's health: `ok`, `degraded` while its disk is unhealthy, `draining` while it stops.

    The HTTP status is always 200: a liveness probe must not kill a daemon that still serves cached shards.
    """
    service = request.app[SERVICE]
    found = service.cache.health()
    return web.json_response(found | {"status": "draining"} if service.drain.began else found)


@routes.get("/v1/status")
async def status(request: web.Request) -> web.Response:
    """Return the version, process figures, cache, counters, transfers and jobs."""
    return web.json_response(request.app[SERVICE].status(peer_of(request)) | {"process": process_stats()})


@routes.get("/v1/shards")
async def shards(request: web.Request) -> web.StreamResponse:
    """Stream the cached shards whose url starts with `prefix`, one per line."""
    return await _list(request, request.app[SERVICE].cache.shards(request.query.get("prefix", ""), peer_of(request)))


@routes.get("/v1/pins")
async def pins(request: web.Request) -> web.StreamResponse:
    """Stream the pinned shards, one per line."""
    return await _list(request, request.app[SERVICE].cache.pins(peer_of(request)))


@routes.post("/v1/verify")
async def verify(request: web.Request) -> web.StreamResponse:
    """Verify the cached shards whose url starts with `prefix`; stream events, one per line."""
    prefix = take(await _body(request), "prefix", str)
    return await _list(request, request.app[SERVICE].cache.verify(prefix, peer_of(request)))


@routes.post("/v1/index")
async def index(request: web.Request) -> web.StreamResponse:
    """Count the samples of the shards that `urls` name, and the tokens in the member `tokens`; stream events."""
    body = await _body(request)
    member = TokenMember.parse(take(body, "tokens", str)) if "tokens" in body else None
    return await _fetch(request, partial(Cache.index, member=member))


async def _fetch(
    request: web.Request, do: Callable[[Cache, list[str], Peer, Send], Awaitable[None]]
) -> web.StreamResponse:
    """Do something that may fetch the shards that the body's `urls` name; stream events, one per line."""
    cache, urls, peer = request.app[SERVICE].cache, await _urls(request), peer_of(request)
    return await _stream(request, lambda send: do(cache, urls, peer, send))


async def _drop(request: web.Request, do: Callable[[Cache, list[str], Peer], Awaitable[Json]]) -> web.Response:
    """Do something to the cached shards that the body's `urls` match; return what became of each."""
    return web.json_response(await do(request.app[SERVICE].cache, await _urls(request), peer_of(request)))


routes.post("/v1/warm")(partial(_fetch, do=Cache.warm))
routes.post("/v1/pin")(partial(_fetch, do=Cache.pin))
routes.post("/v1/evict")(partial(_drop, do=Cache.evict))
routes.post("/v1/unpin")(partial(_drop, do=Cache.unpin))


async def _list(request: web.Request, events: AsyncIterator[Json]) -> web.StreamResponse:
    async def run(send: Send) -> None:
        async for event in events:
            await send(event)

    return await _stream(request, run)


async def _stream(request: web.Request, run: Callable[[Send], Awaitable[None]]) -> web.StreamResponse:
    """Stream events as JSON lines. The response starts with the first, so that an earlier error gets its HTTP status.

    A later error is the last line.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})

    async def send(event: Json) -> None:
        if not response.prepared:
            await response.prepare(request)
        await response.write(json.dumps(event, ensure_ascii=False).encode() + b"\n")

    try:
        try:
            await run(send)
        except ShardcacheError as exn:
            if not response.prepared:
                raise
            await send({"event": "failed", "error": exn.to_json()})
    except* ConnectionError:
        pass  # the client disconnected: running transfers finish, no others are started
    return response


async def _urls(request: web.Request) -> list[str]:
    return take(await _body(request), "urls", list[str])


async def _body(request: web.Request) -> Json:
    try:
        async with asyncio.timeout(_BODY_S):
            return parse(await request.read())
    except TimeoutError:  # a connection that its client holds for nothing
        raise errors.ProtocolError(f"the request's body did not arrive within {_BODY_S:g} s") from None


# The dashboard: static files, and live updates, one second apart, as server-sent events (WHATWG HTML, 9.2)

PAGE = "index.html"
STATIC_PATH = "/dashboard/static/"
LIVE_PATH = "/dashboard/live"

# Any page on the web may send a browser to an address on this node.
BROWSER_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_LIVE_HEADERS = BROWSER_HEADERS | {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
_PERIOD_S = 1.0
# A TCP connection may last a minute: the page reconnects before it is cut off in the middle of an event.
_LASTS_S = 45.0


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

    async def page(self, request: web.Request) -> web.Response:
        """Serve the page itself."""
        return self._answer(request, PAGE, "no-cache")

    async def static(self, request: web.Request) -> web.Response:
        """Serve one of the page's files. Raises HTTPNotFound for an unknown name or another version."""
        name = request.match_info["name"]
        if request.match_info["version"] != self.version or name not in self._contents or name == PAGE:
            raise web.HTTPNotFound
        return self._answer(request, name, "public, max-age=31536000, immutable")

    def _answer(self, request: web.Request, name: str, keep: str) -> web.Response:
        headers = BROWSER_HEADERS | {"Cache-Control": keep, "ETag": f'"{self.version}"'}
        if any(tag.value == self.version for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return web.Response(body=self._contents[name], content_type=kind, charset="utf-8", headers=headers)


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
            texts[peer] = json.dumps(self._service.status(peer) | outlook, separators=(",", ":"))
        return texts[peer]

    async def map(self, peer: Peer, seen: int) -> tuple[str, int]:
        """Return the map of cached shards and its number; no text if it is the one already `seen`."""
        if self._maps[0] != self._view.maps:
            self._maps = self._view.maps, {}
        number, texts = self._maps
        if number == seen:
            return "", seen
        if peer not in texts:
            cache = self._service.cache
            texts[peer] = json.dumps(await self._view.map(cache.visible_to(peer)), separators=(",", ":"))
        return texts[peer], number


LIVE: web.AppKey[Live] = web.AppKey("LIVE", Live)


async def live(request: web.Request) -> web.StreamResponse:
    """Stream a `moment` event each second, and a `map` event whenever the map has been refreshed."""
    found, peer, seen = request.app[LIVE], peer_of(request), 0
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


def add_dashboard(app: web.Application) -> None:
    """Add the page to an application."""
    page = Files()
    app[LIVE] = Live(app[SERVICE])
    app.router.add_get("/", page.page)
    app.router.add_get(STATIC_PATH + "{version}/{name}", page.static)
    app.router.add_get(LIVE_PATH, live)
