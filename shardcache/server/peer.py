"""Who is at the other end of a socket."""

from __future__ import annotations

import socket
import struct

from aiohttp import web

from shardcache.cache.allow import Peer

_UCRED = struct.Struct("iII")
_GID = struct.Struct("I")
_GROUPS_BYTES = 1024  # the most that Python's getsockopt takes: 256 groups
_SO_PEERGROUPS = getattr(socket, "SO_PEERGROUPS", 59)  # asm-generic/socket.h; Python has no name for it

# Of a request: whom a server's own check found, where no kernel can tell.
PEER = "shardcache.peer"


def peer_of(request: web.Request) -> Peer:
    """Return the user who asks, as the kernel vouches for the connected process.

    These are the ids of the moment at which it connected (SO_PEERCRED and SO_PEERGROUPS, unix(7)).
    """
    known: Peer | None = request.get(PEER)
    if known is not None:
        return known
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has gone")
    return peer_at(transport.get_extra_info("socket"))


def peer_at(sock: socket.socket) -> Peer:
    """Return the user at the other end of a connected Unix socket."""
    _pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(uid, frozenset({gid, *_groups(sock)}))


def _groups(sock: socket.socket) -> tuple[int, ...]:
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return ()  # a kernel before 4.13, or somebody in more groups: rules for groups then open nothing
    return tuple(gid for (gid,) in _GID.iter_unpack(data))
