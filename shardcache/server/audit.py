"""Who asked for what: a log line for each session and each errand, with the user's id."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import structlog
from aiohttp import web

from shardcache.server.peer import peer_of

log = structlog.get_logger()

# Lines of one user in a period; what comes on top is only counted.
_LINES = 120
_PERIOD_S = 60.0


class Audit:
    """Writes the lines, so many a minute for each user: nobody fills the node's disk by asking."""

    def __init__(self) -> None:
        self._period_began_s = time.monotonic()
        self._lines: dict[int, int] = {}

    def note(self, event: str, uid: int, **fields: object) -> None:
        """Log an event, unless the user has had too many."""
        now_s = time.monotonic()
        if now_s - self._period_began_s > _PERIOD_S:
            self._end_period(now_s)
        lines = self._lines[uid] = self._lines.get(uid, 0) + 1
        if lines <= _LINES:
            log.info(event, uid=uid, **fields)

    @contextmanager
    def session(self, uid: int) -> Iterator[None]:
        """Log that a reader's session begins, and at the end of the block that it ends."""
        self.note("session begins", uid)
        try:
            yield
        finally:
            self.note("session ends", uid)

    def _end_period(self, now_s: float) -> None:
        for uid, lines in self._lines.items():
            if lines > _LINES:
                log.info("more than was logged", uid=uid, events=lines - _LINES)
        self._period_began_s = now_s
        self._lines.clear()


AUDIT = web.AppKey("AUDIT", Audit)


@web.middleware
async def audit(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Note who has something done; reading is not noted, and of sessions they tell themselves."""
    if request.method != "GET":
        request.app[AUDIT].note("asked", peer_of(request).uid, what=request.path.rpartition("/")[2])
    return await handler(request)
