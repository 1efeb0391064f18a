"""A blocking WebSocket over a Unix socket, on the Sans-I/O layer of `websockets`: no thread, one file descriptor.

The library's own blocking client runs a thread per connection, and threads do not survive the forks by which a
DataLoader starts its workers. A Unix socket needs no keepalive: the kernel notifies each side immediately when the
other ends.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from contextlib import suppress
from pathlib import Path

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from shardcache.protocol import MAX_MESSAGE_BYTES
from shardcache.unix_socket import credentials

_READ_BYTES = 256 * 1024
# The daemon reads its sockets from an event loop that nothing may block: if it takes no byte for this long, it is gone.
_SEND_TIMEOUT_S = 60.0


class HandshakeError(Exception):
    """The server on the socket refused a session.

    Attributes:
        status: the HTTP status.
        body: the response body.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.body = body


class FarewellError(ConnectionResetError):
    """The other side announced that it is going away (close code 1001)."""


class WebSocket:
    """An open connection. Every method raises OSError once it is broken or closed by the other side."""

    def __init__(self, path: Path, resource: str, timeout_s: float) -> None:
        """Connect and shake hands. Raises OSError (TimeoutError included) and HandshakeError."""
        self._protocol = ClientProtocol(parse_uri(f"ws://localhost{resource}"), max_size=MAX_MESSAGE_BYTES)
        self._fragments: list[bytes] = []
        self._messages: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _open_sockets.add(self._socket)
        weakref.finalize(self, self._socket.close)
        try:
            # Only a connect that blocks in the kernel waits for a place in a full backlog.
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket.connect(str(path))
            self._shake_hands(time.monotonic() + timeout_s)
        except BaseException:
            self._socket.close()
            raise

    def __repr__(self) -> str:
        return f"WebSocket({self._protocol.state.name.lower()}, fd={self._socket.fileno()})"

    @property
    def peer_uid(self) -> int:
        """User of the process that listens at the socket."""
        return credentials(self._socket)[1]

    def _shake_hands(self, deadline_s: float) -> None:
        self._protocol.send_request(self._protocol.connect())
        with suppress(ConnectionError):  # a daemon that refuses a connection answers and closes without reading
            self._flush()
        while self._protocol.state is State.CONNECTING and self._protocol.handshake_exc is None:
            if not self._pump(deadline_s):
                raise TimeoutError("no answer to the WebSocket handshake")
        exn = self._protocol.handshake_exc
        if isinstance(exn, InvalidStatus):
            raise HandshakeError(exn.response.status_code, bytes(exn.response.body or b"")) from exn
        if exn is not None:
            raise ConnectionResetError(f"WebSocket handshake failed: {exn}") from exn

    def send(self, message: bytes) -> None:
        """Send one text message."""
        self._check_open()
        self._protocol.send_text(message)
        try:
            self._flush()
        except OSError:
            with suppress(OSError):
                self._pump(time.monotonic())  # the reason for the close may still be unread
            self._check_open()
            raise

    def receive(self, deadline_s: float) -> bytes | None:
        """Return the next message, or None if none came by the deadline (of `time.monotonic`)."""
        while not self._messages:
            self._check_open()
            if not self._pump(deadline_s) or (time.monotonic() >= deadline_s and not self._messages):
                return None
        return self._messages.pop(0)

    def _check_open(self) -> None:
        if self._protocol.state is not State.OPEN:
            self._socket.close()
            goodbye = self._protocol.close_rcvd
            if goodbye is not None and goodbye.code == CloseCode.GOING_AWAY:
                raise FarewellError("the other side is going away")
            raise ConnectionResetError("closed by the other side")

    def close(self) -> None:
        """Send a close frame if possible, and close without waiting for the answer."""
        try:
            if self._protocol.state is State.OPEN and self._socket.fileno() >= 0:
                self._protocol.send_close(1000)
                self._socket.settimeout(0)
                self._send_pending()
        except OSError:
            pass  # closing the socket has the same effect
        finally:
            self._socket.close()

    def _flush(self) -> None:
        self._socket.settimeout(_SEND_TIMEOUT_S)
        self._send_pending()

    def _send_pending(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._socket.sendall(data)

    def _pump(self, deadline_s: float) -> bool:
        """Process received data; return False if none arrives by the deadline."""
        # A timeout of 0 would make the socket non-blocking.
        self._socket.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return False
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._take(event)
        with suppress(ConnectionError):  # the other side is gone, but its messages have been received
            self._flush()  # answers to pings and to a close frame
        return True

    def _take(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._fragments.append(bytes(frame.data))
            if frame.fin:
                self._messages.append(b"".join(self._fragments))
                self._fragments.clear()


_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close a forked child's copies of the sockets, so that a session ends with the process that opened it.

    `close` drops this process's descriptor and sends nothing; only `shutdown` would affect the parent's session.
    """
    for inherited in list(_open_sockets):
        inherited.close()


os.register_at_fork(after_in_child=_close_inherited)
