"""State shared by the server's handlers: the cache, the client's identity, the audit log, the load of the process."""

import asyncio
import math
import os
import socket
import struct
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from aiohttp import web

from shardcache import __version__
from shardcache.access import Peer
from shardcache.cache.facade import Cache
from shardcache.cache.waiting.waits import JobKey
from shardcache.metrics import Histogram
from shardcache.protocol import Json
from shardcache.server.connections import Limits
from shardcache.server.lifecycle import Drain
from shardcache.unix_socket import credentials

log = structlog.get_logger()


class Service:
    """One server's parts; `limits` returns the present limits of the Unix socket."""

    def __init__(self, cache: Cache, limits: Callable[[], Limits]) -> None:
        self.cache = cache
        self.limits = limits
        self.audit = Audit()
        self.drain = Drain()
        self.loop_lag = LoopLag()
        # Not one of the disk's threads, which all hang when the disk does: that is what the metrics should report.
        self.writer = ThreadPoolExecutor(1, "metrics")
        self._started_s = time.monotonic()

    def status(self, peer: Peer) -> Json:
        """Return the status page, but for the figures of the process."""
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "pid": os.getpid(),
            "draining": self.drain.began,
            "loop_lag": self.loop_lag.to_json(),
        } | self.cache.status(peer)


SERVICE = web.AppKey("SERVICE", Service)


# The user behind a request

_GID = struct.Struct("I")
_GROUPS_BYTES = 1024  # the maximum of Python's getsockopt: 256 groups
_SO_PEERGROUPS = getattr(socket, "SO_PEERGROUPS", 59)  # asm-generic/socket.h; Python has no name for it

# Request key: the peer as determined by a check of the server's own, where the kernel cannot identify it.
PEER = "shardcache.peer"


def peer_of(request: web.Request) -> Peer:
    """Return the user who sent the request, as the kernel reports it for the connected process.

    The ids are those at the time of connecting (SO_PEERCRED and SO_PEERGROUPS, unix(7)).
    """
    known: Peer | None = request.get(PEER)
    if known is not None:
        return known
    _pid, uid, gid = credentials(sock := socket_of(request))
    return Peer(uid, frozenset({gid, *_groups(sock)}))


def socket_of(request: web.Request) -> socket.socket:
    """Return the socket that a request came from. Raises ConnectionResetError if it is closed."""
    if request.transport is None:
        raise ConnectionResetError("the client disconnected")
    sock: socket.socket = request.transport.get_extra_info("socket")
    return sock


def _groups(sock: socket.socket) -> tuple[int, ...]:
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return ()  # a kernel before 4.13, or a user in more groups: group rules then grant nothing
    return tuple(gid for (gid,) in _GID.iter_unpack(data))


# The audit log: a line for each epoch of a job and each request that changes something, with the user's id

# A reader of a job: its rank and its number among the rank's workers.
Place = tuple[int | None, int | None]

# Epochs remembered, of all jobs together, and readers of each: clients name both.
_MAX_EPOCHS = 256
_MAX_READERS = 1024
# Lines per user and period; further events are only counted.
_LINES = 120
_PERIOD_S = 60.0


class Audit:
    """Writes the audit lines, rate-limited per user: no user can fill the node's disk with requests."""

    def __init__(self) -> None:
        self._period_began_s = time.monotonic()
        self._lines: Counter[int] = Counter()
        self._epochs: OrderedDict[tuple[JobKey, int | None], set[Place]] = OrderedDict()

    def note(self, event: str, uid: int, **fields: object) -> None:
        """Log an event, unless the user is over the limit."""
        now_s = time.monotonic()
        if now_s - self._period_began_s > _PERIOD_S:
            for user, lines in self._lines.items():
                if lines > _LINES:
                    log.info("audit lines suppressed", uid=user, events=lines - _LINES)
            self._period_began_s = now_s
            self._lines.clear()
        self._lines[uid] += 1
        if self._lines[uid] <= _LINES:
            log.info(event, uid=uid, **fields)

    def plan(self, job: JobKey, epoch: int | None, reader: Place, **fields: object) -> None:
        """Log the first plan of a job's epoch.

        A reader that declares an epoch for the second time begins another pass: the job was started again.
        """
        readers = self._epochs.setdefault((job, epoch), set())
        self._epochs.move_to_end((job, epoch))
        if len(self._epochs) > _MAX_EPOCHS:
            self._epochs.popitem(last=False)
        if not readers or reader in readers:
            readers.clear()
            self.note("session started", job[1], epoch=epoch, **fields)
        if len(readers) < _MAX_READERS:
            readers.add(reader)


# The load of the daemon's process

_LAG_PERIOD_S = 0.05
_REMEMBERED_S = 600.0
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Distribution of the event loop's timer lag over the last ten minutes, and as a histogram since the start."""

    def __init__(self) -> None:
        self.since_start = Histogram(_BOUNDS_S)
        self._late_s: deque[float] = deque(maxlen=int(_REMEMBERED_S / _LAG_PERIOD_S))

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due_s = time.monotonic() + _LAG_PERIOD_S  # the loop's own clock stands still while the loop is blocked
            await asyncio.sleep(_LAG_PERIOD_S)
            self.note(time.monotonic() - due_s)

    def note(self, late_s: float) -> None:
        """Add one measurement, in seconds, and drop the oldest."""
        self._late_s.append(late_s)
        self.since_start.observe(late_s)

    def to_json(self) -> dict[str, float]:
        """Return the median, 99th percentile and maximum, in seconds; 0 before the first measurement."""
        late_s, shares = sorted(self._late_s) or [0.0], {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}
        return {name: round(late_s[math.ceil(share * len(late_s)) - 1], 5) for name, share in shares.items()}


def process_stats() -> dict[str, int]:
    """Return the open file descriptors, threads, tasks of the running event loop and resident memory; see proc(5)."""
    # Lists of names, without a Path object per entry: this runs on the event loop.
    fds, threads = (os.listdir(f"/proc/self/{kind}") for kind in ("fd", "task"))  # noqa: PTH208
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "fds": len(fds) - 1,  # without the one that lists the folder
        "threads": len(threads),
        "tasks": len(asyncio.all_tasks()),
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }
