"""A WebSocket over a Unix socket, on the Sans-I/O layer of `websockets`: no thread, one descriptor.

The library's own blocking client runs a thread per connection, and threads do not survive the forks
by which a DataLoader starts its workers. A Unix socket needs no keepalive: the kernel notifies each
side immediately when the other ends.
"""

import os
import select
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

from shardcache.shared import protocol
from shardcache.shared.unix_socket import credentials

_READ_BYTES = 256 * 1024
# Opcodes of frames with parts of messages; all others are of the protocol itself.
_MESSAGE_OPCODES = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
# A pong that was begun has to be sent to its end, so it gets some time even if the wait is over.
_PONG_TIMEOUT_S = 1.0


class HandshakeError(Exception):
    """The server on the socket refused a session, by an answer with this status and body."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP status {status}")
        self.body = body


class FarewellError(ConnectionResetError):
    """The other side announced that it is going away (close code 1001)."""


class WebSocket:
    """An open WebSocket over a Unix socket.

    Methods raise OSError once it is broken or closed by the other side. Deadlines are those of
    `time.monotonic`.
    """

    def __init__(self, path: Path, resource: str, deadline_s: float) -> None:
        """Connect and shake hands by the deadline.

        Raises OSError (TimeoutError included) and HandshakeError.
        """
        self._protocol = ClientProtocol(
            parse_uri(f"ws://localhost{resource}"), max_size=protocol.MAX_MESSAGE_BYTES
        )
        self._fragments: list[bytes] = []
        self._messages: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _open_sockets.add(self._socket)
        weakref.finalize(self, self._socket.close)
        try:
            # A connect with Python's timeout fails at once if the backlog is full. One that blocks
            # in the kernel waits for a place in it, for as long as this option says.
            timeout_s = _timeout_s(deadline_s)
            seconds = int(timeout_s)
            microseconds = int((timeout_s - seconds) * 1e6)
            timeval = struct.pack("ll", seconds, microseconds)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            self._socket.connect(str(path))
            self._shake_hands(deadline_s)
        except BaseException:
            self._socket.close()
            raise

    @property
    def peer_uid(self) -> int:
        """User of the process that listens at the socket."""
        _, uid, _ = credentials(self._socket)
        return uid

    def _shake_hands(self, deadline_s: float) -> None:
        """Ask for a WebSocket, and wait until it is open. Raises OSError, HandshakeError."""
        self._protocol.send_request(self._protocol.connect())
        # A daemon that refuses a connection answers and closes without reading.
        with suppress(ConnectionError):
            self._flush(deadline_s)

        while self._protocol.state is State.CONNECTING and self._protocol.handshake_exc is None:
            if not self._pump(deadline_s):
                raise TimeoutError("no answer to the WebSocket handshake")

        exn = self._protocol.handshake_exc
        if isinstance(exn, InvalidStatus):
            raise HandshakeError(exn.response.status_code, bytes(exn.response.body or b"")) from exn
        if exn is not None:
            raise ConnectionResetError(f"WebSocket handshake failed: {exn}") from exn

    def send(self, message: bytes, deadline_s: float, *, binary: bool = False) -> None:
        """Send one message. If that takes longer than the deadline, the connection is broken."""
        self._check_open()
        if binary:
            self._protocol.send_binary(message)
        else:
            self._protocol.send_text(message)
        try:
            self._flush(deadline_s)
        except OSError:
            with suppress(OSError):
                self._pump(time.monotonic())  # a close frame with the reason may still be unread
            self._check_open()
            raise

    def receive(self, deadline_s: float) -> bytes | None:
        """Return the next message, or None if none came by the deadline (of `time.monotonic`)."""
        while not self._messages:
            self._check_open()
            if not self._pump(deadline_s):
                return None
            # Data that is not a whole message, such as a ping, does not prolong the wait.
            if not self._messages and time.monotonic() >= deadline_s:
                return None
        return self._messages.pop(0)

    def _check_open(self) -> None:
        """Raise ConnectionResetError if the WebSocket is closed."""
        if self._protocol.state is State.OPEN:
            if self._socket.fileno() < 0:  # in a forked child, or collected in a cycle
                raise ConnectionResetError("closed in this process")
            return
        self._socket.close()
        goodbye = self._protocol.close_rcvd
        if goodbye is not None and goodbye.code == CloseCode.GOING_AWAY:
            raise FarewellError("the other side is going away")
        raise ConnectionResetError("closed by the other side")

    def close(self) -> None:
        """Send a close frame if possible, and close without waiting for the answer."""
        try:
            if self._protocol.state is State.OPEN and self._socket.fileno() >= 0:
                self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                self._flush(time.monotonic())
        except OSError:
            pass  # closing the socket has the same effect
        finally:
            self._socket.close()

    def _flush(self, deadline_s: float) -> None:
        """Send all that the protocol has to send. Raises TimeoutError at the deadline."""
        for data in self._protocol.data_to_send():
            # Empty data asks to close the sending side, which `close` does for both.
            unsent = memoryview(data)
            while unsent:
                self._wait_to_send(deadline_s)
                unsent = unsent[self._socket.send(unsent) :]

    def _wait_to_send(self, deadline_s: float) -> None:
        """Receive until something can be sent. Raises TimeoutError at the deadline.

        Without receiving, both sides could wait for ever: the other one may take no more requests
        until its answers are read.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | select.POLLOUT)
        while True:
            self._socket.settimeout(_timeout_s(deadline_s))
            ready = poller.poll(_timeout_s(deadline_s) * 1000)
            if not ready:
                raise TimeoutError("timed out")
            [(_descriptor, events)] = ready
            # Also if the connection is broken: sending then raises the error.
            if events & ~select.POLLIN:
                return
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("closed by the other side")
            self._collect_received(data)

    def _pump(self, deadline_s: float) -> bool:
        """Receive and process some data; return False if none arrives by the deadline."""
        self._socket.settimeout(_timeout_s(deadline_s))
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return False
        self._collect_received(data)

        # Answers to pings and to a close frame. The other side may be gone, but its messages have
        # been received.
        with suppress(ConnectionError):
            self._flush(max(deadline_s, time.monotonic() + _PONG_TIMEOUT_S))
        return True

    def _collect_received(self, data: bytes) -> None:
        """Process received bytes, and keep the messages in them; no bytes mean the end."""
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode in _MESSAGE_OPCODES:
                self._add_to_message(event)

    def _add_to_message(self, frame: Frame) -> None:
        """Add a frame to its message, which is complete with the last one."""
        self._fragments.append(bytes(frame.data))
        if frame.fin:
            self._messages.append(b"".join(self._fragments))
            self._fragments.clear()


def _timeout_s(deadline_s: float) -> float:
    """Return the time until a deadline as a timeout of a socket.

    It is never 0, which would mean that the socket does not wait at all.
    """
    return max(deadline_s - time.monotonic(), 0.001)


_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close a forked child's copies, so that a session ends with the process that opened it.

    `close` drops this process's descriptor and sends nothing; only `shutdown` would affect the
    parent's session.
    """
    for inherited in list(_open_sockets):
        inherited.close()


os.register_at_fork(after_in_child=_close_inherited)
