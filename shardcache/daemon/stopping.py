"""Reasons for a daemon to stop: a signal, idleness, a deleted folder or socket; and a forced exit.

`running` starts one task per reason. Each task sets the event `stop`; then the daemon ends its
sessions and requests in order. The `Drain` tracks both.
"""

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
    """Yield an event that SIGTERM and SIGINT set.

    After the block, another signal ends the process immediately: the daemon may take long to stop.
    No shard is lost then, just as with kill -9.
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
    """Stop a daemon that has had no session or request for `idle_exit_s` seconds."""
    await drain.wait_until_idle(idle_exit_s)
    log.info("idle", for_s=idle_exit_s)
    stop.set()


async def stop_when_lost(stop: asyncio.Event, cache: Cache) -> None:
    """Stop a daemon whose cache folder is gone.

    The next reader that needs a daemon starts one, which may have its cache elsewhere.
    """
    await cache.until_lost()
    log.info("cache folder deleted")
    stop.set()


async def stop_when_unreachable(
    stop: asyncio.Event,
    cache: Cache,
    drain: Drain,
    socket: Path,
) -> None:
    """Stop a daemon whose socket was deleted, for example by a logout, once it has no session.

    Until then, readers find the daemon by its second socket, in the cache folder. The cache is
    locked until this daemon stops, and the next daemon then uses it.
    """
    # If the socket exists again once the daemon is idle, the loop watches the socket again.
    is_gone = False
    while not is_gone:
        await cache.until_unreachable(socket)
        # Wait until there is no session at all, even if only for a moment.
        await drain.wait_until_idle(0.0)
        is_gone = not await asyncio.to_thread(socket.exists)
    log.info("socket deleted", socket=str(socket))
    stop.set()


def end_by_force(after_s: float) -> None:
    """End the process if it still runs after `after_s` seconds.

    A disk that does not respond blocks the threads that use it, so the process would never end.
    """

    def end() -> None:
        log.warning("forced exit: tasks still blocked; published shards are safe, as after a crash")
        os._exit(0)  # status 0, as for any other stop on request

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
