"""Takeover of the socket and the cache folder from a previous daemon that is stopping.

This is for a restart in which the new daemon starts before the previous daemon has ended.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import structlog

from shardcache.shared.unix_socket import connected, health, peer_ids

log = structlog.get_logger()

_HEALTH_TIMEOUT_S = 2.0  # time limit on asking the previous daemon for its health


async def wait_for_predecessor(path: Path, limit_s: float) -> None:
    """Wait until a stopping daemon at a socket has ended, so that this daemon can replace it.

    Returns immediately if no daemon there is stopping, and after `limit_s` in any case. If the
    previous daemon still runs then, the caller gets an error when it binds the socket or locks the
    folder. There is no wait for a daemon in another PID namespace, as it cannot be watched.
    """
    with suppress(ProcessLookupError, TimeoutError):
        async with asyncio.timeout(limit_s):
            pid = await asyncio.to_thread(_stopping_pid, path)
            if pid is not None:
                log.info("waiting for the previous daemon to stop", pid=pid)
                await _wait_for_end(pid)


def _stopping_pid(path: Path) -> int | None:
    """Return the process id of a stopping daemon at a socket; None if there is none. Blocks."""
    # An error means that no daemon answers. If something else is at the path, the error is reported
    # when the socket is bound.
    with suppress(OSError, ValueError):
        if health(path, _HEALTH_TIMEOUT_S)["status"] == "draining":
            with connected(path, _HEALTH_TIMEOUT_S) as sock:
                pid, _uid, _gid = peer_ids(sock)
                return pid or None  # the id is 0 for a process in another PID namespace
    return None


async def _wait_for_end(pid: int) -> None:
    """Wait for the end of a process that is not a child of this one (pidfd_open(2)).

    Raises ProcessLookupError if there is no such process.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    fd = os.pidfd_open(pid)
    try:
        loop.add_reader(fd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
