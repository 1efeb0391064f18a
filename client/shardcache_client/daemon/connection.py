"""One connection to the daemon, speaking `shardcache.protocol`: requests, and answers matched by `id`.

Blocking, on the Sans-I/O layer of `websockets`: no thread, one file descriptor. The library's own blocking client runs
a thread per connection, and threads do not survive the forks by which a DataLoader starts its workers. A Unix socket
needs no keepalive: the kernel notifies each side immediately when the other ends.

A connection does not recover: once broken, every method raises NoDaemonError, and the owner opens another (see
`session`).
"""

import json
import logging
import os
import shlex
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from shardcache import __version__, errors, protocol
from shardcache.protocol import Json
from shardcache.unix_socket import credentials
from shardcache_client.order.rounds import Topology

log = logging.getLogger("shardcache")

_READ_BYTES = 256 * 1024
# For messages that nothing waits for. The kernel takes them unless it still has some 200 kB of
# earlier ones, and the daemon reads its sockets from an event loop that nothing may block: one that
# has not for this long is frozen.
_SEND_TIMEOUT_S = 1.0
# An answer to a ping cannot be taken back, so it gets some time even if the wait is over.
_PONG_TIMEOUT_S = 1.0
# The daemon explains a wait immediately, unless it is overloaded.
_EXPLAIN_TIMEOUT_S = 5.0
_FIRST_REPORT_S, _NEXT_REPORT_S = 10.0, 60.0


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
        self._protocol = ClientProtocol(parse_uri(f"ws://localhost{resource}"), max_size=protocol.MAX_MESSAGE_BYTES)
        self._fragments: list[bytes] = []
        self._messages: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _open_sockets.add(self._socket)
        weakref.finalize(self, self._socket.close)
        try:
            # Only a connect that blocks in the kernel waits for a place in a full backlog.
            timeout_s = _left_s(deadline_s)
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket.connect(str(path))
            self._shake_hands(deadline_s)
        except BaseException:
            self._socket.close()
            raise

    @property
    def peer_uid(self) -> int:
        """User of the process that listens at the socket."""
        return credentials(self._socket)[1]

    def _shake_hands(self, deadline_s: float) -> None:
        self._protocol.send_request(self._protocol.connect())
        with suppress(ConnectionError):  # a daemon that refuses a connection answers and closes without reading
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
        """Send one message. One that is not sent by the deadline breaks the connection."""
        self._check_open()
        (self._protocol.send_binary if binary else self._protocol.send_text)(message)
        try:
            self._flush(deadline_s)
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
                self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                self._flush(time.monotonic())
        except OSError:
            pass  # closing the socket has the same effect
        finally:
            self._socket.close()

    def _flush(self, deadline_s: float) -> None:
        for data in filter(None, self._protocol.data_to_send()):
            self._socket.settimeout(_left_s(deadline_s))
            self._socket.sendall(data)

    def _pump(self, deadline_s: float) -> bool:
        """Process received data; return False if none arrives by the deadline."""
        self._socket.settimeout(_left_s(deadline_s))
        try:
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return False
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for frame in self._protocol.events_received():
            if isinstance(frame, Frame) and frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                self._fragments.append(bytes(frame.data))
                if frame.fin:
                    self._messages.append(b"".join(self._fragments))
                    self._fragments.clear()
        with suppress(ConnectionError):  # the other side is gone, but its messages have been received
            # Answers to pings and to a close frame.
            self._flush(max(deadline_s, time.monotonic() + _PONG_TIMEOUT_S))
        return True


def _left_s(deadline_s: float) -> float:
    """Return the time until a deadline as a socket's timeout, of which 0 means another thing."""
    return max(deadline_s - time.monotonic(), 0.001)


_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close a forked child's copies of the sockets, so that a session ends with the process that opened it.

    `close` drops this process's descriptor and sends nothing; only `shutdown` would affect the parent's session.
    """
    for inherited in list(_open_sockets):
        inherited.close()


os.register_at_fork(after_in_child=_close_inherited)


@dataclass(frozen=True, slots=True)
class ReaderIdentity:
    """A reading process, as shown in the daemon's list of jobs."""

    job: str
    topology: Topology = field(default_factory=Topology)
    loader: str = ""  # name shared by the workers of one DataLoader, which takes batches from them in turn
    batch_size: int = 1  # samples in such a batch
    pid: int = field(default_factory=os.getpid)


class DaemonConnection:
    """An open session: the daemon has answered `hello` with `welcome`.

    Raises NoDaemonError if nothing listens on the socket or the connection breaks; its subclass StoppingError if the
    daemon announces that it is stopping; DaemonError if this user may not use it; VersionMismatchError if daemon and
    client have no protocol version in common; ProtocolError if a message is invalid. With
    `is_private`, only a daemon of this user may be at the socket.

    Deadlines are those of `time.monotonic`; that of the constructor is for everything from the
    connect to the welcome.
    """

    def __init__(self, socket: Path, reader: ReaderIdentity, deadline_s: float, *, is_private: bool = False) -> None:
        self._path = socket
        self._requests = 0
        self._kinds: dict[int, str] = {}  # by id, for requests that are not answered yet
        self._answers: dict[int, Json] = {}
        with self._translated():
            self._websocket = WebSocket(socket, protocol.SESSION_PATH, deadline_s)
        try:
            if is_private and self._websocket.peer_uid != os.geteuid():
                raise errors.DaemonError("the daemon at the socket belongs to another user", url=str(socket))
            self._greet(reader, deadline_s)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"DaemonConnection({str(self._path)!r})"

    def _greet(self, reader: ReaderIdentity, deadline_s: float) -> None:
        spoken = protocol.SPOKEN
        self.tell(
            "hello",
            deadline_s,
            protocol=spoken.newest,
            oldest_protocol=spoken.oldest,
            client_version=__version__,
            job=reader.job,
            pid=reader.pid,
            **asdict(reader.topology),
            **({"loader": reader.loader, "batch_size": reader.batch_size} if reader.loader else {}),
        )
        welcome = self._receive(deadline_s)
        if welcome is None:
            raise errors.NoDaemonError("the daemon did not answer 'hello' in time", url=str(self._path))
        chosen = self._checked("hello", welcome)["protocol"]
        # The daemon has chosen a version that both speak; daemons older than negotiation report their only version.
        daemon = protocol.Release(str(welcome.get("version")), protocol.Spoken(chosen, chosen))
        protocol.agree(daemon=daemon, client=protocol.Release(__version__, spoken))

    def tell(self, kind: str, deadline_s: float | None = None, **fields: Any) -> None:
        """Send a message that gets no answer, within a second if there is no deadline."""
        if deadline_s is None:
            deadline_s = time.monotonic() + _SEND_TIMEOUT_S
        message = {"type": kind, **fields}
        with self._translated():
            self._websocket.send(protocol.written(message), deadline_s, binary="packed" in message)

    def request(self, kind: str, deadline_s: float | None = None, **fields: Any) -> int:
        """Send a request, within a second if there is no deadline; return its id, for `answer`."""
        self._requests += 1
        self._kinds[self._requests] = kind
        self.tell(kind, deadline_s, id=self._requests, **fields)
        return self._requests

    def answer(self, request: int, deadline_s: float) -> Json | None:
        """Return a request's answer, or None if none came by the deadline. If the answer is an error, raise it."""
        while request not in self._answers:
            message = self._receive(deadline_s)
            if message is None:
                return None
            if message.get("id") in self._kinds:
                self._answers[message["id"]] = message
            elif message["type"] == "error" and message.get("id") is None:
                raise errors.from_json(message["error"])
            # Anything else is unsolicited: a message from a newer release, which this one ignores.
        return self._checked(self._kinds.pop(request), self._answers.pop(request))

    def _checked(self, request: str, answer: Json) -> Json:
        """Return the answer to a kind of request; raise it if it is an error."""
        if answer["type"] == "error":
            raise errors.from_json(answer["error"])
        if answer["type"] not in protocol.REQUESTS[request].answers:
            raise errors.ProtocolError(
                f"the daemon answered {request!r} with {answer['type'][:100]!r}", url=str(self._path)
            )
        return answer

    def forget(self, request: int) -> None:
        """Ignore the answer to a request."""
        self._kinds.pop(request, None)
        self._answers.pop(request, None)

    def call(self, kind: str, deadline_s: float, **fields: Any) -> Json:
        """Send a request and return its answer. Raises NoDaemonError if none comes by the deadline."""
        begun_s = time.monotonic()
        request = self.request(kind, deadline_s, **fields)
        report_s = begun_s + _FIRST_REPORT_S
        reason = ""
        while (answer := self.answer(request, min(deadline_s, report_s))) is None:
            if time.monotonic() >= deadline_s:
                why = f" ({reason})" if reason else ""
                raise errors.NoDaemonError(
                    f"the daemon did not answer {kind!r} in time{why}",
                    url=str(self._path),
                    remedy="check what it is doing: shardcache status",
                )
            reason, _ = self.explain(request, deadline_s)
            report_s = time.monotonic() + _NEXT_REPORT_S
            log.warning("waiting for %.0f s: %s", time.monotonic() - begun_s, reason)
        return answer

    def explain(self, request: int, deadline_s: float) -> tuple[str, int]:
        """Return the daemon's reason for not having answered a request yet, and how much of a shard has arrived."""
        until_s = min(deadline_s, time.monotonic() + _EXPLAIN_TIMEOUT_S)
        answer = self.answer(self.request("explain", until_s, of=request), until_s)
        if answer is None:
            return "the daemon does not answer", 0
        total_bytes, done_bytes = answer.get("total_bytes"), answer.get("done_bytes", 0)
        done = f" ({done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB)" if total_bytes else ""
        return f"{answer['reason']}{done}", done_bytes

    def close(self) -> None:
        """End the session; the daemon drops its plan and leases."""
        self._websocket.close()

    def _receive(self, deadline_s: float) -> Json | None:
        with self._translated():
            data = self._websocket.receive(deadline_s)
            if data is None:
                return None
            message = protocol.parse(data)
            protocol.ANSWERS.get(protocol.take(message, "type", str), protocol.UNKNOWN).check(message)
            protocol.UNKNOWN.check(message)  # whatever its type, its `id` may name a request
            return message

    @contextmanager
    def _translated(self) -> Iterator[None]:
        where = str(self._path)
        try:
            yield
        except PermissionError as exn:
            remedy = f"join the group that owns it (ls -l {shlex.quote(where)}), then log in again"
            raise errors.DaemonError("you may not use the daemon's socket", url=where, remedy=remedy) from exn
        except (FileNotFoundError, ConnectionRefusedError) as exn:
            start = f"shardcache serve --socket {shlex.quote(where)} --cache-dir /path/on/local/disk --capacity 500GB"
            raise errors.NoDaemonError(
                "no daemon listens at the socket", url=where, remedy=f"start it: {start}"
            ) from exn
        except FarewellError as exn:
            raise errors.StoppingError("the daemon is stopping", url=where) from exn
        except TimeoutError as exn:
            # Something listens, so it is not to be started: it hangs, or is stopped.
            status = f"shardcache status --socket {shlex.quote(where)}"
            raise errors.NoDaemonError(
                f"the daemon does not answer: {exn}",
                url=where,
                remedy=f"see what it is doing, and which process to end if it hangs: {status}",
            ) from exn
        except OSError as exn:
            if exn.errno is None and "too long" in str(exn):  # Python's own check, before the kernel's
                remedy = "choose a shorter one: SHARDCACHE_SOCKET, or XDG_RUNTIME_DIR for a private daemon"
                raise errors.ConfigError("a socket's path has at most 107 bytes", url=where, remedy=remedy) from exn
            raise errors.NoDaemonError(f"the connection to the daemon broke: {exn}", url=where) from exn
        except HandshakeError as exn:
            raise _refusal(exn, where) from exn
        except errors.ProtocolError as exn:
            raise errors.ProtocolError(f"the daemon sent an invalid message: {exn.message}", url=where) from exn


def _refusal(exn: HandshakeError, where: str) -> errors.ShardcacheError:
    try:
        return errors.from_json(json.loads(exn.body)["error"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return errors.ProtocolError(f"the server on this socket is not a shardcache daemon: {exn}", url=where)
