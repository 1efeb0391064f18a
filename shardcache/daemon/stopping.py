"""Reasons for a daemon to stop: a signal, idleness, a deleted folder or socket; and force."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import structlog

from shardcache.cache.facade import Cache
from shardcache.server.process.drain import Drain

log = structlog.get_logger()


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that a stop signal sets.

    Signals after the block, while the daemon stops, end the process immediately: no shard is lost,
    as with kill -9.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


async def stop_when_idle(stop: asyncio.Event, drain: Drain, idle_exit_s: float) -> None:
    """Stop a daemon that has had no session for a time."""
    await drain.unused(idle_exit_s)
    log.info("idle", for_s=idle_exit_s)
    stop.set()


async def stop_when_lost(stop: asyncio.Event, cache: Cache) -> None:
    """Stop a daemon whose cache folder is gone.

    It is started again when it is needed, and may then have its cache elsewhere.
    """
    await cache.until_lost()
    log.info("cache folder deleted")
    stop.set()


async def stop_when_unreachable(
    stop: asyncio.Event, cache: Cache, drain: Drain, socket: Path
) -> None:
    """Stop a daemon whose socket was deleted, as by a logout, once it has no session.

    Until then, readers find it by its second socket, in the cache folder. The next daemon gets the
    cache, which is locked until then.
    """
    is_gone = False
    while not is_gone:
        await cache.until_unreachable(socket)
        await drain.unused(0.0)
        is_gone = not await asyncio.to_thread(socket.exists)
    log.info("socket deleted", socket=str(socket))
    stop.set()


def end_by_force(after_s: float) -> None:
    """End the process if it still runs after `after_s` seconds.

    An unresponsive disk blocks its threads for good.
    """

    def end() -> None:
        log.warning("forced exit: tasks still blocked; published shards are safe, as after a crash")
        os._exit(0)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
