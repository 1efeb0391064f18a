"""The composition root: build the parts, serve until told to stop, drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from shardcache import __version__, garbage, logs
from shardcache.cache.allow import AllowList
from shardcache.cache.facade import Cache
from shardcache.config import Settings
from shardcache.fetch.download import Downloader
from shardcache.metrics import Counters
from shardcache.origin.registry import Origins
from shardcache.protocol import socket_path
from shardcache.server.app import serving
from shardcache.server.drain import Drain
from shardcache.server.listen import bind_socket, unlink_socket
from shardcache.server.predecessor import predecessor_gone
from shardcache.server.tcp import Listener, listening
from shardcache.store.indexers import Indexers
from shardcache.store.store import Store

log = structlog.get_logger()

# Daemons that were told to stop end by then, whatever hangs; service managers usually allow 90 s, Kubernetes 30 s.
_STOP_LIMIT_S = 20.0
# Blocking work is waiting for the disk, not for a processor: part writes, fsync, SQLite, unlink, inflating.
_THREADS = 32
_INDEXERS = 2


def serve(settings: Settings) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    Raises SocketInUseError, CacheDirError and ConfigError before it serves anyone.
    """
    logs.configure(settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    path = socket_path(settings.socket)
    await predecessor_gone(path, _STOP_LIMIT_S)
    garbage.collect_seldom()
    with listening(settings.http, settings.http_token_file) as listener:
        await _serve_at(path, listener, settings)


async def _serve_at(path: Path, listener: Listener | None, settings: Settings) -> None:
    sock = bind_socket(path, settings.group)
    try:
        with garbage.building():
            store = await asyncio.to_thread(
                Store.open, settings.cache_dir, settings.capacity, settings.min_free, settings.group
            )
        # The server goes last: a daemon that is started before the folder is free is told that this one is stopping.
        async with contextlib.AsyncExitStack() as last:
            with contextlib.closing(store):
                loop = asyncio.get_running_loop()
                loop.set_default_executor(ThreadPoolExecutor(_THREADS, "disk"))
                try:
                    await _run(settings, store, lambda cache: last.enter_async_context(serving(cache, sock, listener)))
                finally:
                    await loop.shutdown_default_executor()  # no thread may write where the next daemon does
    finally:
        unlink_socket(path, sock)


async def _run(settings: Settings, store: Store, serve_with: Callable[[Cache], Awaitable[Drain]]) -> None:
    counters = Counters()
    origins = Origins(settings.origin, max_connections=settings.max_connections, fence=AllowList(settings.allow))
    downloader = Downloader(
        max_connections=settings.max_connections,
        shard_connections=settings.shard_connections,
        attempts=settings.attempts,
        stall_timeout_s=settings.stall_timeout_s,
        counters=counters,
        max_bandwidth=settings.max_bandwidth,
    )
    indexers = Indexers(_INDEXERS)
    try:
        async with asyncio.TaskGroup() as group:
            cache = Cache(settings, store, origins, downloader, counters, indexers, group)
            drain = await serve_with(cache)
            with _stop_signals() as stop:
                log.info("ready", version=__version__, socket=str(socket_path(settings.socket)), store=repr(store))
                group.create_task(_prepare(origins))
                group.create_task(indexers.prepare())
                await stop.wait()
            log.info("stopping")
            _end_by_force(_STOP_LIMIT_S)
            await drain.run()
            cache.stop()
    finally:
        await indexers.close()
        await origins.close()


async def _prepare(origins: Origins) -> None:
    await origins.prepare()
    garbage.spare()  # what botocore knows of S3 is tens of thousands of objects


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """Yield what the first signal to stop sets. The second ends the process on the spot, as safely as kill -9 does."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


def _end_by_force(after_s: float) -> None:
    """End the process if it still runs then: a disk that does not answer holds its threads for ever."""

    def end() -> None:
        log.warning("ends without what still hangs; no more is lost than in a crash, nothing that was published")
        os._exit(0)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Linux, or not yet built for this Python
        return None
    return uvloop.new_event_loop
