"""One blocking connection to an HTTP server."""

import select
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class HttpConnection:
    """One connection, one request at a time.

    Attributes:
        heard_s: time when its last answer ended; None before the first.
        is_primed: True once a request has been sent ahead of its exchange, until that begins.
    """

    socket: socket.socket
    heard_s: float | None = None
    is_primed: bool = False

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def end_reads(self) -> None:
        """End a blocking read in any thread.

        Through the base class: after SSLSocket.shutdown the reading thread would take ciphertext
        for the body.
        """
        with suppress(OSError):  # the peer closed it first
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    @property
    def is_readable(self) -> bool:
        """True if bytes or the stream's end have arrived.

        An idle connection is unusable after that.
        """
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0:
            return True
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return bool(poller.poll(0))
