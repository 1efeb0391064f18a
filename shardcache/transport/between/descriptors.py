"""Descriptors of files without a name, sent by the daemon to a transport worker.

Besides the pipes for messages, each worker has a Unix socket for descriptors. The message of a
request states the file's identity, which the worker compares with that of the descriptor that it
receives. A path such as /proc/PID/fd/N cannot replace the descriptor: outside the daemon's own PID
namespace, /proc may show a file of another process under this path.
"""

import errno
import os
import socket
import struct

_FD = struct.Struct("i")

Identity = tuple[int, int]
"""Device and inode of a file."""


def channel() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets: the daemon's, which never blocks, and the worker's."""
    daemon_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon_end.setblocking(False)
    return daemon_end, worker_end


def identity(fd: int) -> Identity:
    """Return the identity of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def send(sock: socket.socket, fd: int) -> Identity:
    """Send a copy of a descriptor, and return its file's identity. Raises OSError."""
    socket.send_fds(sock, [b"f"], [fd])  # the byte is ignored, but a message needs at least one
    return identity(fd)


def receive(sock: socket.socket, expected: Identity) -> int:
    """Return the next descriptor that was sent.

    Raises OSError if it is the descriptor of another file than expected, or none has arrived.
    """
    # `socket.recv_fds` ignores its flags, so `recvmsg` is called in its place. The daemon sends a
    # descriptor before the message that states the file's identity, so the call need not wait.
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    _, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_FD.size), flags)
    if not ancillary:
        raise OSError(errno.EBADF, "no descriptor has arrived")
    _level, _type, data = ancillary[0]
    (fd,) = _FD.unpack(data)
    if identity(fd) != expected:
        os.close(fd)
        raise OSError(errno.EBADF, "the descriptor of another file has arrived")
    return int(fd)
