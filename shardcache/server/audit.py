"""The audit log: a line for each epoch of a job and each request that changes something, with the user's id."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator

import structlog
from aiohttp import web

from shardcache.access.peer import peer_of
from shardcache.cache.waits import JobKey

# A reader of a job: its rank and its number among the rank's workers.
Place = tuple[int | None, int | None]

# Epochs remembered, of all jobs together, and readers of each: clients name both.
_MAX_EPOCHS = 256
_MAX_READERS = 1024


class Epochs:
    """The epochs that have begun, and the readers that have declared a plan for each."""

    def __init__(self) -> None:
        self._readers: OrderedDict[tuple[JobKey, int | None], set[Place]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of epochs remembered."""
        return len(self._readers)

    def __iter__(self) -> Iterator[set[Place]]:
        """Yield the readers of each."""
        return iter(self._readers.values())

    def begins(self, job: JobKey, epoch: int | None, reader: Place) -> bool:
        """Note a reader's plan; return True if a pass over the epoch begins with it.

        A reader that declares an epoch for the second time begins another pass: the job was started again.
        """
        readers = self._readers.setdefault((job, epoch), set())
        self._readers.move_to_end((job, epoch))
        if len(self._readers) > _MAX_EPOCHS:
            self._readers.popitem(last=False)
        begins = not readers or reader in readers
        if begins:
            readers.clear()
        if len(readers) < _MAX_READERS:
            readers.add(reader)
        return begins


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
