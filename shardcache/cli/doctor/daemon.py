"""Checks of the running daemon: protocol compatibility with this installation, and health."""

from __future__ import annotations

from shardcache import __version__
from shardcache.cache.operations.origin_probe.findings import Finding, failed, of_error, ok, skipped
from shardcache.cli.doctor.blocking import in_thread
from shardcache.cli.doctor.context import Case
from shardcache.errors import DaemonError, NoDaemonError
from shardcache.protocol import SPOKEN
from shardcache.units import duration
from shardcache_client.daemon.connection import Connection, Reader

_SILENT_S = 10.0
# The daemon shows it among its jobs.
_JOB = "shardcache doctor"


async def examine(case: Case) -> list[Finding]:
    """Open a session as a training process does, and read the disk's state from the status page."""
    if case.running is None and isinstance(case.silence, NoDaemonError):
        return [skipped("daemon.version", "no daemon answers")]
    return [await in_thread(_version, case), *_health(case)]


def _version(case: Case) -> Finding:
    name = "daemon.version"
    try:
        Connection(case.socket, Reader(_JOB)).close()
    except DaemonError as exn:
        if case.running is None and exn.code == "daemon":
            return skipped(name, "you may not use the socket")
        return of_error(name, exn, "training processes of this installation are refused too")
    theirs = __version__ if case.running is None else case.running.page["version"]
    return ok(name, f"daemon {theirs} and client {__version__} speak {SPOKEN}")


def _health(case: Case) -> list[Finding]:
    if case.running is None:
        return []
    name, page = "daemon.health", case.running.page
    disk = page.get("disk") or {}
    if disk.get("silent_s", 0) > _SILENT_S:
        found = f"the cache disk has not responded for {duration(disk['silent_s'])}"
        cause = "a device or a network filesystem hangs; all disk operations are blocked"
        return [failed(name, found, cause, "dmesg | tail -50")]
    if error := disk.get("error"):
        cause = "cached shards are served, but nothing new is fetched"
        return [failed(name, error["message"], cause, error["remedy"])]
    if page.get("draining"):
        cause = "it was told to stop, and is finishing running requests"
        return [failed(name, "the daemon is stopping", cause, "systemctl start shardcache   # once it has stopped")]
    return [ok(name, "it is serving, and its disk is healthy")]
