"""TLS over a blocking socket that takes many records from it at a time."""

from __future__ import annotations

import io
import socket
import ssl
import threading
from functools import cache

# OpenSSL, when it reads a socket itself, asks the kernel twice for each record of 16 KiB.
_RECEIVE_BYTES = 256 * 1024
_memory = threading.local()


class TlsSocket:
    """The client's end of a connection, with those of a socket's methods that a request needs.

    Raises ssl.SSLError, of which ssl.SSLCertVerificationError is one, and OSError as the socket does.

    Args:
        sock: connected; belongs to this object once the handshake is done.
        host: that the certificate must name.
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
                self._flush()  # an alert says why it fails

    def sendall(self, data: bytes) -> None:
        """As a socket's."""
        self._tls.write(data)
        self._flush()

    def recv_into(self, memory: memoryview) -> int:
        """As a socket's: blocks until there is something, and takes what is there. Returns 0 at the stream's end."""
        filled = 0
        while filled < len(memory):
            try:
                count = self._tls.read(len(memory) - filled, memory[filled:])
            except ssl.SSLWantReadError:
                if filled:
                    break
                self._receive()
                continue
            except ssl.SSLEOFError:  # without TLS's own end; who counts bytes sees as much
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
        """True where bytes have come in that nobody read yet."""
        return self._received.pending > 0 or self._tls.pending() > 0

    def settimeout(self, time_s: float | None) -> None:
        """As a socket's."""
        self._sock.settimeout(time_s)

    def shutdown(self, how: int) -> None:
        """As a socket's: without a word to the peer."""
        self._sock.shutdown(how)

    def fileno(self) -> int:
        """As a socket's."""
        return self._sock.fileno()

    def close(self) -> None:
        """As a socket's."""
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
    """Return what checks certificates by an authority's file, None for the system's. Raises OSError, ssl.SSLError."""
    return ssl.create_default_context(cafile=ca_file)
