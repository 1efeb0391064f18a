"""A blocking WebSocket over a Unix socket, on the Sans-I/O layer of `websockets`.

`DaemonConnection` speaks to the daemon over it. It needs no thread, and one file descriptor. The
library's own blocking client runs a thread per connection, and threads do not survive the forks by
which a DataLoader starts its workers. A Unix socket needs no keepalive: the kernel notifies each
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
from shardcache.shared.unix_socket import peer_ids

_READ_BYTES = 256 * 1024
# Opcodes of frames that carry messages; other frames (ping, pong, close) control the connection.
_MESSAGE_OPCODES = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
# Extra time for sending a pong. A frame that is half sent would break the connection, so sending it
# goes on for this long after the deadline.
_PONG_TIMEOUT_S = 1.0


class HandshakeError(Exception):
    """The server answered the handshake with an HTTP error instead of opening a WebSocket.

    Attributes:
        body: body of the server's answer.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP status {status}")
        self.body = body


class FarewellError(ConnectionResetError):
    """The other side announced that it is going away (close code 1001)."""


class WebSocket:
    """An open WebSocket over a Unix socket.

    Methods raise OSError once the connection is broken or closed by the other side. Deadlines are
    times of `time.monotonic`.
    """

    def __init__(self, path: Path, resource: str, deadline_s: float) -> None:
        """Connect and shake hands by the deadline.

        Args:
            path: path of the Unix socket.
            resource: path in the handshake's HTTP request.

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
            # The kernel, not Python, times the connect. With a timeout set in Python the socket
            # does not block, and `connect` fails immediately if the listener's backlog is full. A
            # blocking `connect` waits for a place in the backlog, for up to SO_SNDTIMEO.
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
        _, uid, _ = peer_ids(self._socket)
        return uid

    def _shake_hands(self, deadline_s: float) -> None:
        """Ask for a WebSocket, and wait until it is open. Raises OSError, HandshakeError."""
        self._protocol.send_request(self._protocol.connect())
        # A daemon that refuses a connection answers, and closes without reading the request. The
        # error of sending is ignored, as the answer can still be received.
        with suppress(ConnectionError):
            self._flush(deadline_s)

        while self._protocol.state is State.CONNECTING and self._protocol.handshake_exc is None:
            if not self._receive_data(deadline_s):
                raise TimeoutError("no answer to the WebSocket handshake")

        exn = self._protocol.handshake_exc
        if isinstance(exn, InvalidStatus):
            raise HandshakeError(exn.response.status_code, bytes(exn.response.body or b"")) from exn
        if exn is not None:
            raise ConnectionResetError(f"WebSocket handshake failed: {exn}") from exn

    def send(self, message: bytes, deadline_s: float, *, binary: bool = False) -> None:
        """Send one message. A send that misses the deadline raises, and breaks the connection.

        Args:
            binary: True to send the message as a binary frame; False for text in UTF-8.
        """
        self._check_open()
        if binary:
            self._protocol.send_binary(message)
        else:
            self._protocol.send_text(message)
        try:
            self._flush(deadline_s)
        except OSError:
            with suppress(OSError):
                self._receive_data(time.monotonic())
            # The other side may have sent a close frame before it closed the socket. This raises
            # FarewellError then, if the frame says that it is going away.
            self._check_open()
            raise

    def receive(self, deadline_s: float) -> bytes | None:
        """Return the next message, or None if no message came by the deadline."""
        while not self._messages:
            self._check_open()
            if not self._receive_data(deadline_s):
                return None
            # Data that is not a whole message, such as a ping, does not prolong the wait.
            if not self._messages and time.monotonic() >= deadline_s:
                return None
        return self._messages.pop(0)

    def _check_open(self) -> None:
        """Raise ConnectionResetError if the WebSocket is closed."""
        if self._protocol.state is State.OPEN:
            # The descriptor is closed in a forked child (see `_close_inherited`), and by the
            # finalizer if the garbage collector has found this object in a cycle.
            if self._socket.fileno() < 0:
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
        """Send the bytes that the protocol has queued. Raises TimeoutError at the deadline."""
        for data in self._protocol.data_to_send():
            # Empty data asks to shut down the sending side only. There is nothing to do for it, as
            # `close` closes both sides.
            unsent = memoryview(data)
            while unsent:
                self._wait_to_send(deadline_s)
                unsent = unsent[self._socket.send(unsent) :]

    def _wait_to_send(self, deadline_s: float) -> None:
        """Receive until the socket takes bytes. Raises TimeoutError at the deadline.

        Without receiving, both sides could wait for ever: the other side may take no more requests
        until its answers are read.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | select.POLLOUT)
        while True:
            timeout_s = _timeout_s(deadline_s)
            ready = poller.poll(timeout_s * 1000)
            if not ready:
                raise TimeoutError("timed out")
            # With a timeout, `send` returns once some of its bytes are taken. Without one, it waits
            # until all of them are, and nothing is received until then.
            self._socket.settimeout(timeout_s)
            [(_descriptor, events)] = ready
            # True if the socket can be written to, and also if the connection is broken: the send
            # that follows then raises the error.
            if events & ~select.POLLIN:
                return
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("closed by the other side")
            self._collect_received(data)

    def _receive_data(self, deadline_s: float) -> bool:
        """Receive and process some data; return False if none arrives by the deadline."""
        self._socket.settimeout(_timeout_s(deadline_s))
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return False
        self._collect_received(data)

        # Send the protocol's answers to pings and to a close frame. If the other side is gone, this
        # fails, which does not matter: its messages have been received.
        with suppress(ConnectionError):
            self._flush(max(deadline_s, time.monotonic() + _PONG_TIMEOUT_S))
        return True

    def _collect_received(self, data: bytes) -> None:
        """Process received bytes, and keep the messages in them. Empty data is the end of file."""
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode in _MESSAGE_OPCODES:
                self._add_to_message(event)

    def _add_to_message(self, frame: Frame) -> None:
        """Add a frame to the message being received; the last frame completes the message."""
        self._fragments.append(bytes(frame.data))
        if frame.fin:
            self._messages.append(b"".join(self._fragments))
            self._fragments.clear()


def _timeout_s(deadline_s: float) -> float:
    """Return the time until a deadline as a timeout of a socket.

    It is never 0, which would mean that the socket does not wait at all.
    """
    return max(deadline_s - time.monotonic(), 0.001)


# The sockets of this process, which `_close_inherited` closes in a forked child.
_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close the sockets that a forked child has inherited.

    A session then ends with the process that opened it, even if the child runs on. Closing drops
    the child's descriptor and sends nothing, so the parent's session is not affected; `shutdown`
    would end it.
    """
    for inherited in list(_open_sockets):
        inherited.close()


os.register_at_fork(after_in_child=_close_inherited)
