"""Takeover of the socket and the folder from a previous daemon that is stopping."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import structlog

from shardcache.shared.unix_socket import connected, credentials, health

log = structlog.get_logger()

_ASK_TIMEOUT_S = 2.0


async def predecessor_gone(path: Path, limit_s: float) -> None:
    """Wait until a stopping daemon at the socket has ended, so that this one can replace it.

    Returns at once if no daemon there is stopping, and after `limit_s` in any case: the error comes
    from binding the socket or locking the folder. A daemon in another PID namespace cannot be
    watched and is not waited for.
    """
    with suppress(ProcessLookupError, TimeoutError):
        async with asyncio.timeout(limit_s):
            pid = await asyncio.to_thread(_stopping_pid, path)
            if pid is not None:
                log.info("waiting for the previous daemon to stop", pid=pid)
                await _wait_for_end(pid)


def _stopping_pid(path: Path) -> int | None:
    """Return the process id of the daemon at the socket, if it is stopping; else None. Blocks."""
    # Errors say that there is no daemon; anything else at the path is reported when it is bound.
    with suppress(OSError, ValueError):
        if health(path, _ASK_TIMEOUT_S)["status"] == "draining":
            with connected(path, _ASK_TIMEOUT_S) as sock:
                pid, _uid, _gid = credentials(sock)
                return pid or None  # 0 if it is in another PID namespace
    return None


async def _wait_for_end(pid: int) -> None:
    """Wait for a process that is not our child (pidfd_open(2)).

    Raises ProcessLookupError if there is none.
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
