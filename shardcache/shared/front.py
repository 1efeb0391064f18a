"""The front of a cluster's tier: the Unix socket at which nginx serves the daemon of its node.

The tier is an optional cache that the nodes of a cluster share: an nginx on each node. A page is a
JSON document that nginx serves about the tier. A health probe imports this module and runs every
few seconds on each node, so the module uses the standard library alone.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

from shardcache.shared.unix_socket import connected, peer_ids

FRONT = "/run/shardcache-tier/front.sock"
"""Default path of the socket."""

WAITING_NOTE = "waiting"
"""Name of a file in the socket's folder, which exists until nginx is started.

Its text is the reason why `shardcache cluster run --wait`, which starts nginx, has not done so yet.
"""

PEERS = "/.shardcache/peers"
"""Path of the page about the cluster's nodes: their number, and a hash of their list."""

STATUS = "/.shardcache/status"
"""Path of the page with the figures of this node's nginx, such as counts of requests."""

_READ_BYTES = 64 * 1024
_STATUS_DIGITS = 3  # length of an HTTP status, such as 404


class StrangerError(OSError):
    """The process that listens at a front is neither root's nor the expected user's."""


def connected_front(path: str, timeout_s: float, uid: int | None = None) -> socket.socket:
    """Return a connection to a front.

    Args:
        path: path of the front.
        timeout_s: limit on each operation of the connection.
        uid: id of the user who has to listen there, unless root does; None for this process's user.

    Raises OSError, which is StrangerError if another user listens there.
    """
    sock = connected(Path(path), timeout_s)
    try:
        check_listener(sock, uid)
    except BaseException:
        sock.close()
        raise
    return sock


def check_listener(sock: socket.socket, uid: int | None = None) -> None:
    """Raise StrangerError unless a user or root listens at the other end of a Unix socket.

    The listener has to be trusted: it is sent signed urls, and the bytes that it answers count as
    those of shards.

    Args:
        uid: id of the user; None for this process's user.
    """
    expected = os.geteuid() if uid is None else uid
    _pid, listener, _gid = peer_ids(sock)
    if listener not in (0, expected):
        raise StrangerError(
            f"user {listener} listens there, which is neither user {expected} nor root"
        )


def page(path: str, target: str, timeout_s: float, uid: int | None = None) -> dict[str, Any] | None:
    """Return a page of the front at `path`; None if the front has no page of this name.

    Args:
        target: path of the page, such as `STATUS`. The other arguments are those of
            `connected_front`.

    Raises OSError, and ValueError if something other than a tier answers.
    """
    with connected_front(path, timeout_s, uid) as sock:
        sock.sendall(page_request(target))
        chunks = iter(lambda: sock.recv(_READ_BYTES), b"")  # up to the end of the stream
        return page_of(b"".join(chunks))


def page_request(target: str) -> bytes:
    """Return the request for a page; the front closes the connection after its answer."""
    return f"GET {target} HTTP/1.0\r\nHost: tier\r\n\r\n".encode()


def page_of(answer: bytes) -> dict[str, Any] | None:
    """Return the page in the answer to a `page_request`; None for the status 404.

    Raises ValueError if the answer is not a tier's.
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    version, _, after_version = head.partition(b" ")
    status = after_version[:_STATUS_DIGITS]
    is_http = version.startswith(b"HTTP/1.")
    if is_http and status == b"404":
        return None
    if is_http and status == b"200":
        fields = json.loads(body)
        if isinstance(fields, dict):
            return fields
    raise ValueError(f"status {status.decode('latin-1') or 'unknown'}: not this tier")
