"""The page's live updates: server-sent events (WHATWG HTML, 9.2), one second apart."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp import web

from shardcache import __version__
from shardcache.access.peer import peer_of
from shardcache.access.rules import Peer
from shardcache.cache.facade import Cache
from shardcache.cache.views.live import LiveView
from shardcache.server.http.admin import LOOP_LAG, STARTED_AT_S
from shardcache.server.http.json_stream import written
from shardcache.server.process.drain import DRAIN

LIVE_PATH = "/dashboard/live"

_PERIOD_S = 1.0
# A TCP connection may last a minute: the page reconnects before it is cut off in the middle of an event.
_LASTS_S = 45.0
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


class Live:
    """The page's contents as JSON text, serialized once for all users who may see the same."""

    def __init__(self, cache: Cache, live_view: LiveView) -> None:
        self.cache = cache
        self.live_view = live_view
        self._look = 0
        self._moments: dict[Peer, str] = {}
        self._changes: dict[tuple[Peer, str], tuple[str, str]] = {}

    async def moment(self, app: web.Application, peer: Peer) -> str:
        """Return the daemon's current state as JSON, at most a second old."""
        look = await self.live_view.look()
        if look != self._look:
            self._look = look
            self._moments.clear()
            self._changes.clear()
        if (text := self._moments.get(peer)) is None:
            text = self._moments[peer] = json.dumps(self._moment(app, peer), separators=(",", ":"))
        return text

    def _moment(self, app: web.Application, peer: Peer) -> dict[str, Any]:
        head = {
            "version": __version__,
            "uptime_s": round(time.monotonic() - app[STARTED_AT_S], 3),
            "draining": app[DRAIN].began,
            "loop_lag": app[LOOP_LAG].to_json(),
        }
        return head | self.cache.status(peer) | self.live_view.outlook(self.cache.sight(peer))

    async def changes(self, mark: str, peer: Peer) -> tuple[str, str]:
        """Return the changes of the map since `mark` as JSON, and the current mark."""
        found = self._changes.get((peer, mark))
        if found is None:
            look, changes = self._look, await self.live_view.changes(mark, self.cache.sight(peer))
            found = await written(changes, self.cache.turns), changes["mark"]
            if look == self._look:
                self._changes[peer, mark] = found
        return found


LIVE: web.AppKey[Live] = web.AppKey("LIVE", Live)


async def live(request: web.Request) -> web.StreamResponse:
    """Stream `moment` and `map` events. `since`, the mark of an earlier map, skips cells that the page already has."""
    found, peer, mark = request.app[LIVE], peer_of(request), request.query.get("since", "")
    response = web.StreamResponse(headers=_HEADERS)
    try:
        await response.prepare(request)
        async with asyncio.timeout(_LASTS_S) as limit:
            while not request.app[DRAIN].began:
                await response.write(_event("moment", await found.moment(request.app, peer)))
                changes, mark = await found.changes(mark, peer)
                await response.write(_event("map", changes))
                await asyncio.sleep(_PERIOD_S)
    except TimeoutError:
        if not limit.expired():
            raise
    except ConnectionError:
        pass  # the page was closed
    return response


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
