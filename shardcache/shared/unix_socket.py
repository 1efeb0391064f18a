"""The daemon's socket seen from outside.

Uses the standard library alone, as probes run every few seconds on each node.
"""

import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

MAX_SOCKET_BYTES = 107
"""Longest path of a Unix socket."""

_READ_BYTES = 64 * 1024
_UCRED = struct.Struct("iII")  # C's struct ucred: process, user and group id
_REQUEST = b"GET %s HTTP/1.0\r\nHost: shardcache\r\n\r\n"


def connected(path: Path, timeout_s: float) -> socket.socket:
    """Return a connection to the socket at `path`; `timeout_s` limits each step. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(os.fspath(path))
    except BaseException:
        sock.close()
        raise
    return sock


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group ids at the other end of a Unix socket.

    They are those at the time of its connect or listen. The process id is 0 if the process is in
    another PID namespace.
    """
    pid, uid, gid = _UCRED.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return pid, uid, gid


def served_lately(path: Path, within_s: float) -> bool:
    """Return whether a daemon may have listened lately at a socket where none listens now.

    A daemon that was killed leaves its socket; one that stopped has removed it, which changed the
    folder.

    Args:
        within_s: time for which a change of the folder counts.
    """
    try:
        return path.is_socket() or time.time() - path.parent.stat().st_mtime < within_s
    except OSError:
        return False


def health(path: Path, timeout_s: float) -> dict[str, Any]:
    """Return the health that the daemon reports; `timeout_s` limits each step.

    Raises OSError if nothing answers (TimeoutError included), ValueError if something other than a
    daemon does.
    """
    report: dict[str, Any] = json.loads(_get(path, b"/v1/health", timeout_s))
    match report:
        case {"status": str()}:
            return report
    raise ValueError("not a daemon's health")


def cached_urls(path: Path, timeout_s: float) -> list[str]:
    """Return the urls of the cached shards that this user may see; `timeout_s` limits each step.

    Objects of which only parts are cached are left out.
    Raises OSError if nothing answers, ValueError if something other than a daemon does.
    """
    rows = map(json.loads, _get(path, b"/v1/shards", timeout_s).splitlines())
    try:
        return [str(row["url"]) for row in rows if row["cached_bytes"] == row["size_bytes"]]
    except (KeyError, TypeError):
        raise ValueError("not a daemon's list of shards") from None


def _get(path: Path, target: bytes, timeout_s: float) -> bytes:
    """Return the body of the daemon's answer to a GET, whatever its status. Raises OSError."""
    with connected(path, timeout_s) as sock:
        sock.sendall(_REQUEST % target)
        answer = b"".join(iter(lambda: sock.recv(_READ_BYTES), b""))
    _head, _, body = answer.partition(b"\r\n\r\n")
    return body
