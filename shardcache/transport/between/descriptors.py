"""Descriptors of files without a name, sent by the daemon to a transport worker.

Besides the pipes for messages, each worker has a Unix socket for descriptors. The message states
the file's identity, which the worker compares with the descriptor that it receives. A path such as
/proc/PID/fd/N would not do in place of a descriptor: it names the file only where /proc shows the
daemon's own PID namespace, and elsewhere it may name any process's file.
"""

import errno
import os
import socket
import struct

_FD = struct.Struct("i")

Identity = tuple[int, int]
"""Device and inode of a file."""


def channel() -> tuple[socket.socket, socket.socket]:
    """Return a new socket's two ends: first the daemon's, which never blocks, then the worker's."""
    sending, receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sending.setblocking(False)
    return sending, receiving


def identity(fd: int) -> Identity:
    """Return the identity of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def send(sock: socket.socket, fd: int) -> Identity:
    """Send a copy of a descriptor, and return its file's identity. Raises OSError."""
    socket.send_fds(sock, [b"f"], [fd])  # the byte is ignored, but a message needs at least one
    return identity(fd)


def receive(sock: socket.socket, wanted: Identity) -> int:
    """Return the next descriptor that was sent.

    Raises OSError if the descriptor is that of another file than `wanted`, or none has arrived.
    """
    # `socket.recv_fds` ignores its flags, so `recvmsg` is called in its place. The daemon sends a
    # descriptor before the message that states the file's identity, so the call need not wait.
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
