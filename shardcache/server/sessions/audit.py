"""The audit log: a line for each epoch of a job and each request that changes something, with the user's id."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from shardcache.access.peer import peer_of
from shardcache.cache.waits import JobKey
from shardcache.server.sessions.epochs import Epochs, Place

log = structlog.get_logger()

# Lines per user and period; further events are only counted.
_LINES = 120
_PERIOD_S = 60.0


class Audit:
    """Writes the audit lines, rate-limited per user: no user can fill the node's disk with requests."""

    def __init__(self) -> None:
        self._period_began_s = time.monotonic()
        self._lines: dict[int, int] = {}
        self._epochs = Epochs()

    def note(self, event: str, uid: int, **fields: object) -> None:
        """Log an event, unless the user is over the limit."""
        now_s = time.monotonic()
        if now_s - self._period_began_s > _PERIOD_S:
            self._end_period(now_s)
        lines = self._lines[uid] = self._lines.get(uid, 0) + 1
        if lines <= _LINES:
            log.info(event, uid=uid, **fields)

    def plan(self, job: JobKey, epoch: int | None, reader: Place, **fields: object) -> None:
        """Log the first plan of a job's epoch; further readers of the epoch are at level debug only."""
        if self._epochs.begins(job, epoch, reader):
            self.note("session started", job[1], epoch=epoch, **fields)

    def _end_period(self, now_s: float) -> None:
        for uid, lines in self._lines.items():
            if lines > _LINES:
                log.info("audit lines suppressed", uid=uid, events=lines - _LINES)
        self._period_began_s = now_s
        self._lines.clear()


AUDIT = web.AppKey("AUDIT", Audit)


@web.middleware
async def audit(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Log each request that changes something; reads are not logged, and sessions log themselves."""
    if request.method != "GET":
        request.app[AUDIT].note("request", peer_of(request).uid, what=request.path.rpartition("/")[2])
    return await handler(request)
