"""Takeover from the previous daemon at the socket while it is still stopping."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import aiohttp
import structlog

log = structlog.get_logger()

_ASK_TIMEOUT_S = 2.0
_UCRED = struct.Struct("3i")


async def predecessor_gone(path: Path, limit_s: float) -> None:
    """Wait until a stopping daemon at the socket has ended, so that the next one can be started at any time.

    Returns immediately if none is stopping, and after `limit_s` in any case: binding the socket or locking the folder
    then fails with its own error. A daemon in another PID namespace cannot be watched and is not waited for.
    """
    pid = await _stopping(path)
    if pid is None:
        return
    log.info("waiting for the previous daemon to stop", pid=pid)
    with suppress(ProcessLookupError, TimeoutError):
        async with asyncio.timeout(limit_s):
            await _ended(pid)


async def _stopping(path: Path) -> int | None:
    """Return the process id of the daemon at the socket, if it is stopping."""
    connector, timeout = aiohttp.UnixConnector(os.fspath(path)), aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession("http://shardcache", connector=connector, timeout=timeout) as http,
            http.get("/v1/health") as answer,
        ):
            health = await answer.json()
        if not (isinstance(health, dict) and health.get("status") == "draining"):
            return None
        return await asyncio.to_thread(_listener, path)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None  # no daemon, or something else: binding the socket reports it


def _listener(path: Path) -> int | None:
    """Return the listener's process id, as the kernel reports it; None in another PID namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_ASK_TIMEOUT_S)
        sock.connect(os.fspath(path))
        pid, _uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid) or None


async def _ended(pid: int) -> None:
    """Wait for a process that is not our child (pidfd_open(2)). Raises ProcessLookupError if there is none."""
    loop, ended, fd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)
    try:
        loop.add_reader(fd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
