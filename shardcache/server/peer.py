"""The peer: the user who sent a request.

At a Unix socket, the kernel reports the user of the connected process. Over TCP, `tcp_guard`
decides which user a request counts for.
"""

import socket
import struct

from aiohttp import web

from shardcache.access.rules import Peer
from shardcache.shared.unix_socket import peer_ids

_GID = struct.Struct("I")
_GROUPS_BYTES = 1024  # the maximum of Python's getsockopt, enough for 256 groups
# Number of the option in asm-generic/socket.h: not all releases of Python have a name for it.
_SO_PEERGROUPS = getattr(socket, "SO_PEERGROUPS", 59)

PEER = "shardcache.peer"
"""Key of a request's user in a request that came over TCP."""


def peer_of(request: web.Request) -> Peer:
    """Return the user who sent a request.

    At a Unix socket, the ids are those that the process had when it connected (SO_PEERCRED and
    SO_PEERGROUPS, unix(7)).
    """
    tcp_peer: Peer | None = request.get(PEER)
    if tcp_peer is not None:
        return tcp_peer
    sock = socket_of(request)
    _pid, uid, gid = peer_ids(sock)
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
        packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        # The kernel is older than 4.13, or the user is in more than 256 groups. Rules for
        # supplementary groups then grant nothing.
        return ()
    return tuple(gid for (gid,) in _GID.iter_unpack(packed))
