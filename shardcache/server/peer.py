"""The user behind a request."""

import socket
import struct

from aiohttp import web

from shardcache.access.rules import Peer
from shardcache.shared.unix_socket import credentials

_GID = struct.Struct("I")
_GROUPS_BYTES = 1024  # the maximum of Python's getsockopt: 256 groups
# asm-generic/socket.h; Python has no name for it.
_SO_PEERGROUPS = getattr(socket, "SO_PEERGROUPS", 59)

PEER = "shardcache.peer"
"""Key of a request's user, if the user was not identified by the kernel."""


def peer_of(request: web.Request) -> Peer:
    """Return the user who sent the request, as the kernel reports it for the connected process.

    The ids are those at the time of connecting (SO_PEERCRED and SO_PEERGROUPS, unix(7)).
    """
    identified: Peer | None = request.get(PEER)
    if identified is not None:
        return identified
    sock = socket_of(request)
    _pid, uid, gid = credentials(sock)
    return Peer(uid, frozenset({gid, *_groups(sock)}))


def socket_of(request: web.Request) -> socket.socket:
    """Return the socket that a request came from. Raises ConnectionResetError if it is closed."""
    if request.transport is None:
        raise ConnectionResetError("the client disconnected")
    sock: socket.socket = request.transport.get_extra_info("socket")
    return sock


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """Return the supplementary groups of the process at the other end of a Unix socket."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return ()  # a kernel before 4.13, or a user in more groups: group rules then grant nothing
    return tuple(gid for (gid,) in _GID.iter_unpack(data))
