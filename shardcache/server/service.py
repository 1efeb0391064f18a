"""State shared by the server's handlers, which get it as `app[SERVICE]`."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from shardcache import __version__
from shardcache.access.rules import Peer
from shardcache.cache.facade import Cache
from shardcache.server.audit import Audit
from shardcache.server.listening.limits import Limits
from shardcache.server.process.drain import Drain
from shardcache.server.process.process_load import LoopLag
from shardcache.shared.protocol import Json


class Service:
    """The objects that the handlers of one server share.

    Args:
        cache: the node's cache.
        limits: returns the present limits of connections to the Unix socket.
        s3_address: HOST:PORT of the S3 endpoint; None if there is none.
    """

    def __init__(
        self,
        cache: Cache,
        limits: Callable[[], Limits],
        s3_address: str | None = None,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.s3_address = s3_address
        self.audit = Audit()
        self.drain = Drain()
        self.loop_lag = LoopLag()
        # A separate thread, because a hung disk blocks the threads that access it, and the metrics
        # should report that.
        self.metrics_writer = ThreadPoolExecutor(1, "metrics")
        self._started_s = time.monotonic()

    def status(self, peer: Peer) -> Json:
        """Return the status page as a user may see it, without its field `process`."""
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "pid": os.getpid(),
            "draining": self.drain.has_begun,
            "loop_lag": self.loop_lag.to_json(),
            "s3": self.s3_address,
        } | self.cache.status(peer)


SERVICE = web.AppKey("SERVICE", Service)
