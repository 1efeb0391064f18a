"""TLS over a blocking socket, receiving many records per system call."""

from __future__ import annotations

import io
import socket
import ssl
import threading
from functools import cache

# OpenSSL makes two system calls per record of 16 KiB when it reads a socket itself.
_RECEIVE_BYTES = 256 * 1024
_memory = threading.local()


class TlsSocket:
    """Client end of a TLS connection, with the socket methods that a request needs.

    Raises ssl.SSLError, including ssl.SSLCertVerificationError, and OSError as the socket does.

    Args:
        sock: connected socket; owned by this object once the handshake is done.
        host: name that the certificate must have.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._sock = sock
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._shake_hands()

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._receive()
            else:
                break
            finally:
                self._flush()  # an alert tells the peer why the handshake failed

    def sendall(self, data: bytes) -> None:
        """As `socket.sendall`."""
        self._tls.write(data)
        self._flush()

    def recv_into(self, memory: memoryview) -> int:
        """As `socket.recv_into`: blocks until data is available, and returns 0 at the stream's end."""
        filled = 0
        while filled < len(memory):
            try:
                count = self._tls.read(len(memory) - filled, memory[filled:])
            except ssl.SSLWantReadError:
                if filled:
                    break
                self._receive()
                continue
            except ssl.SSLEOFError:  # closed without a TLS close_notify; callers check the byte count
                break
            if not count:
                break
            filled += int(count)
        return filled

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a reader of the stream; closing it leaves the connection open."""
        return io.BufferedReader(_Stream(self))

    @property
    def pending(self) -> bool:
        """True if unread bytes have arrived."""
        return self._received.pending > 0 or self._tls.pending() > 0

    def settimeout(self, time_s: float | None) -> None:
        """As `socket.settimeout`."""
        self._sock.settimeout(time_s)

    def shutdown(self, how: int) -> None:
        """As `socket.shutdown`: sends no TLS close_notify."""
        self._sock.shutdown(how)

    def fileno(self) -> int:
        """As `socket.fileno`."""
        return self._sock.fileno()

    def close(self) -> None:
        """As `socket.close`."""
        self._sock.close()

    def _receive(self) -> None:
        if not hasattr(_memory, "block"):
            _memory.block = memoryview(bytearray(_RECEIVE_BYTES))
        if count := self._sock.recv_into(_memory.block):
            self._received.write(_memory.block[:count])
        else:
            self._received.write_eof()

    def _flush(self) -> None:
        if data := self._to_send.read():
            self._sock.sendall(data)


class _Stream(io.RawIOBase):
    def __init__(self, sock: TlsSocket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, memory: memoryview) -> int:  # type: ignore[override]
        return self._sock.recv_into(memoryview(memory))


@cache
def context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that trusts a file's certificates, or the system's for None. Raises OSError, ssl.SSLError."""
    return ssl.create_default_context(cafile=ca_file)
