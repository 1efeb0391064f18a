"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct

from aiohttp import web

_UCRED = struct.Struct("3i")


def peer_uid(request: web.Request) -> int:
    """Return the user id of the connected process, as the kernel vouches for it (SO_PEERCRED, unix(7))."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has gone")
    sock: socket.socket = transport.get_extra_info("socket")
    _pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)
