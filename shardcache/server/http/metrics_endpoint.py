"""`/metrics`, for Prometheus and tools that read its formats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from shardcache.access.peer import peer_of
from shardcache.server.http.admin import LOOP_LAG
from shardcache.server.http.metrics_families import measured, told
from shardcache.server.process.drain import DRAIN
from shardcache.server.process.process_stats import process_stats
from shardcache.server.sessions.session import CACHE

# A thread of its own: the disk's threads all hang when the disk does, which is what the metrics should report.
_WRITER = web.AppKey("WRITER", ThreadPoolExecutor)


class Scrape(Collector):
    """The metrics of one scrape."""

    def __init__(self, found: Sequence[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        """Return the families of samples."""
        return self._found


def add_metrics(app: web.Application) -> None:
    """Add `/metrics` to an application."""
    app[_WRITER] = ThreadPoolExecutor(1, "metrics")
    app.router.add_get("/metrics", metrics)
    app.on_cleanup.append(_end_writer)


async def _end_writer(app: web.Application) -> None:
    app[_WRITER].shutdown(wait=False)


async def metrics(request: web.Request) -> web.Response:
    """Return every metric as text, or as OpenMetrics if the request asks for it."""
    app, cache = request.app, request.app[CACHE]
    page = cache.status(peer_of(request)) | {"draining": app[DRAIN].began, "process": process_stats()}
    measures = list(measured(cache.measures, app[LOOP_LAG].since_start))
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))

    def written() -> bytes:
        registry = CollectorRegistry()
        registry.register(Scrape([*told(page), *measures]))
        ProcessCollector(registry=registry)
        return encode(registry)

    # In a thread: writing a thousand lines takes too long for the event loop.
    body = await asyncio.get_running_loop().run_in_executor(app[_WRITER], written)
    return web.Response(body=body, headers={"Content-Type": content_type})
