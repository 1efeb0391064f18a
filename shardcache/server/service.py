"""State shared by the server's handlers."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from shardcache import __version__
from shardcache.access import Peer
from shardcache.cache.facade import Cache
from shardcache.protocol import Json
from shardcache.server.audit import Audit
from shardcache.server.drain import Drain
from shardcache.server.listening.limits import Limits
from shardcache.server.process_load import LoopLag


class Service:
    """One server's parts; `limits` returns the present limits of the Unix socket."""

    def __init__(self, cache: Cache, limits: Callable[[], Limits]) -> None:
        self.cache = cache
        self.limits = limits
        self.audit = Audit()
        self.drain = Drain()
        self.loop_lag = LoopLag()
        # Not one of the disk's threads, which all hang when the disk does: that is what the metrics
        # should report.
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
