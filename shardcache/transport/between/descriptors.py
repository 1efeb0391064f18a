"""Files without a name, sent by the daemon to a transport worker: descriptors over a Unix socket.

A path such as /proc/PID/fd/N names the file only where /proc shows the daemon's own PID namespace;
elsewhere it may be any process's file.
"""

import errno
import os
import socket
import struct

_FD = struct.Struct("i")

Identity = tuple[int, int]
"""Device and inode of a file."""


def channel() -> tuple[socket.socket, socket.socket]:
    """Return the daemon's end of a new socket, which never blocks, and the worker's."""
    sending, receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sending.setblocking(False)
    return sending, receiving


def identity(fd: int) -> Identity:
    """Return the identity of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def send(sock: socket.socket, fd: int) -> Identity:
    """Send a copy of a descriptor, and return its file's identity. Raises OSError."""
    socket.send_fds(sock, [b"f"], [fd])  # a message has at least one byte
    return identity(fd)


def receive(sock: socket.socket, wanted: Identity) -> int:
    """Return the next descriptor that was sent.

    Raises OSError if it is of another file than `wanted`, or missing.
    """
    # `socket.recv_fds` ignores its flags.
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    _, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_FD.size), flags)
    if not ancillary:
        raise OSError(errno.EBADF, "no descriptor has arrived")
    _level, _type, data = ancillary[0]
    (fd,) = _FD.unpack(data)
    if identity(fd) != wanted:
        os.close(fd)
        raise OSError(errno.EBADF, "the descriptor of another file has arrived")
    return int(fd)
