"""The composition root: build the parts, serve until told to stop, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import structlog

from shardcache import __version__, logs
from shardcache.cache.facade import Cache
from shardcache.config import Settings
from shardcache.fetch.download import Downloader
from shardcache.metrics import Counters
from shardcache.origin.registry import Origins
from shardcache.protocol import socket_path
from shardcache.server.app import serving
from shardcache.server.listen import bind_socket, unlink_socket
from shardcache.store.indexers import Indexers
from shardcache.store.store import Store

log = structlog.get_logger()

# Blocking work is waiting for the disk, not for a processor: part writes, fsync, SQLite, unlink, inflating.
_THREADS = 32
_INDEXERS = 2
_NICENESS = 10


def serve(settings: Settings) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    Raises SocketInUseError, CacheDirError and ConfigError before it serves anyone.
    """
    logs.configure(settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    path = socket_path(settings.socket)
    sock = bind_socket(path, settings.group)
    gc.disable()  # recovery makes many objects that all stay; looking through them would only take time
    try:
        store = await asyncio.to_thread(
            Store.open, settings.cache_dir, settings.capacity, settings.min_free, settings.group
        )
        gc.freeze()
        gc.enable()
        with contextlib.closing(store):
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "disk", _give_way))
            await _run(settings, store, sock, str(path))
    finally:
        unlink_socket(path, sock)


async def _run(settings: Settings, store: Store, sock: socket.socket, path: str) -> None:
    counters = Counters()
    origins = Origins(settings.origin, max_connections=settings.max_connections)
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
            async with serving(cache, sock):
                with _stop_signals() as stop:
                    log.info("ready", version=__version__, socket=path, store=repr(store))
                    group.create_task(origins.prepare())
                    group.create_task(indexers.prepare())
                    await stop.wait()
                log.info("stopping")
            cache.stop()
    finally:
        await indexers.close()
        await origins.close()


def _give_way() -> None:
    """Let this thread take processor time that training has no use for: on Linux each has a niceness of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Linux, or not yet built for this Python
        return None
    return uvloop.new_event_loop
