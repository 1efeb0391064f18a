"""The daemon's Unix socket, for programs that connect to it.

The client, the command line and health probes use these functions. A probe runs every few seconds
on each node, so this module uses the standard library alone.
"""

import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

MAX_SOCKET_BYTES = 107
"""Maximum length in bytes of the path of a Unix socket."""

_READ_BYTES = 64 * 1024
_UCRED = struct.Struct("iII")  # C's struct ucred: process, user and group id
_REQUEST = b"GET %s HTTP/1.0\r\nHost: shardcache\r\n\r\n"


def connected(path: Path, timeout_s: float) -> socket.socket:
    """Return a connection to the socket at a path. Raises OSError.

    Args:
        timeout_s: limit on each operation of the connection, such as a receive.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(os.fspath(path))
    except BaseException:
        sock.close()
        raise
    return sock


def peer_ids(sock: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group ids at the other end of a Unix socket.

    They are the ids that the process had when it called connect or listen. The process id is 0 if
    the process is in another PID namespace.
    """
    pid, uid, gid = _UCRED.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return pid, uid, gid


def served_lately(path: Path, within_s: float) -> bool:
    """Return whether a daemon may have listened lately at a path where no daemon listens now.

    Args:
        path: path of the socket.
        within_s: time within which a change of the socket's folder counts.
    """
    try:
        # A daemon that was killed leaves its socket behind.
        if path.is_socket():
            return True
        # A daemon that stopped has removed its socket, which changed its folder.
        since_change_s = time.time() - path.parent.stat().st_mtime
    except OSError:
        return False
    return since_change_s < within_s


def health(path: Path, timeout_s: float) -> dict[str, Any]:
    """Return the daemon's report about its health, a JSON object with a `status`.

    Args:
        timeout_s: limit on each operation of the connection.

    Raises OSError, such as TimeoutError, if nothing answers, and ValueError if something other than
    a daemon answers.
    """
    report: dict[str, Any] = json.loads(_get(path, b"/v1/health", timeout_s))
    match report:
        case {"status": str()}:
            return report
    raise ValueError("not a daemon's health")


def cached_urls(path: Path, timeout_s: float) -> list[str]:
    """Return the urls of the cached shards that this user may see.

    Objects of which only parts are cached are left out. Arguments and errors are the same as for
    `health`.
    """
    lines = _get(path, b"/v1/shards", timeout_s).splitlines()
    rows = map(json.loads, lines)
    try:
        return [str(row["url"]) for row in rows if row["cached_bytes"] == row["size_bytes"]]
    except (KeyError, TypeError):
        raise ValueError("not a daemon's list of shards") from None


def _get(path: Path, target: bytes, timeout_s: float) -> bytes:
    """Return the body of the daemon's answer to a GET, with any status. Raises OSError."""
    with connected(path, timeout_s) as sock:
        sock.sendall(_REQUEST % target)
        chunks = iter(lambda: sock.recv(_READ_BYTES), b"")  # up to the end of the stream
        answer = b"".join(chunks)
    _head, _, body = answer.partition(b"\r\n\r\n")
    return body
