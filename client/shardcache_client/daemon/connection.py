"""One connection to the daemon, which speaks `shardcache.shared.protocol`.

The messages are JSON. A request has an `id`, and its answer carries the same `id`, so answers may
come in any order. A bundle is one message that holds several. A connection does not recover: once
it is broken, every method raises NoDaemonError. Its owner, a `DaemonLink`, then opens another.
"""

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardcache import __version__
from shardcache.shared import exceptions, protocol, versions
from shardcache.shared.credentials.handed_credentials import handed_over
from shardcache.shared.protocol import Json
from shardcache_client.daemon.patience import WaitReason
from shardcache_client.daemon.websocket import FarewellError, HandshakeError, WebSocket
from shardcache_client.order.topology import Topology

log = logging.getLogger("shardcache")

# Time limit for sending a message. The kernel takes a message immediately unless it still has some
# 200 kB of earlier messages. The daemon reads its sockets in an event loop that nothing may block,
# so a daemon that has read nothing for this long is frozen.
_SEND_TIMEOUT_S = 1.0
# The daemon explains a wait immediately, unless it is overloaded.
_EXPLAIN_TIMEOUT_S = 5.0
# Wait for an answer before the log first gives the reason, and interval of the log lines after it.
_FIRST_REPORT_S = 10.0
_NEXT_REPORT_S = 60.0
# How often a request that waits for its answer calls `on_wait`.
_ON_WAIT_INTERVAL_S = 1.0
# Extra wait for an answer after the deadline, which may have passed while this process was stopped.
_LAST_LOOK_S = 1.0
# Maximum number of characters of an unexpected message type in an error's text.
_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class ReaderIdentity:
    """A reading process, as shown in the daemon's list of jobs.

    Attributes:
        job: name of the training job.
        topology: the process's place among the readers of the job.
        loader: name shared by the workers of one DataLoader, which takes batches from its workers
            in turn; empty without workers.
        batch_size: number of samples in a batch of that DataLoader.
        pid: id of the process.
    """

    job: str
    topology: Topology = field(default_factory=Topology)
    loader: str = ""
    batch_size: int = 1
    pid: int = field(default_factory=os.getpid)


class DaemonConnection:
    """An open session: the daemon has answered `hello` with `welcome`.

    Raises NoDaemonError if nothing listens on the socket or the connection breaks; its subclass
    StoppingError if the daemon announces that it is stopping; DaemonError if this user may not use
    it; VersionMismatchError if daemon and client have no protocol version in common; ProtocolError
    if a message is invalid.

    Deadlines are times of `time.monotonic`.

    Attributes:
        socket: path of the daemon's socket.
        takes_range_plans: True if the daemon takes messages of type `plan_ranges`.
    """

    def __init__(
        self,
        socket: Path,
        reader: ReaderIdentity,
        deadline_s: float,
        *,
        is_private: bool = False,
    ) -> None:
        """Open a session.

        Args:
            socket: path of the daemon's socket.
            reader: identity under which the daemon lists the session.
            deadline_s: time by which the daemon must have sent its welcome.
            is_private: True for a private daemon: the process at the socket must belong to this
                user, and is then sent this process's credentials of object stores.
        """
        self.socket = socket
        self._last_id = 0  # id of the last request
        self._takes_bundles = False  # True if several messages may be sent as one
        self.takes_range_plans = False
        self._kinds: dict[int, str] = {}  # kinds of the open requests, by id
        self._answers: dict[int, Json] = {}  # answers that nobody has taken yet, by id
        with self._translating_errors():
            self._websocket = WebSocket(socket, protocol.SESSION_PATH, deadline_s)
        try:
            if is_private and self._websocket.peer_uid != os.geteuid():
                raise exceptions.DaemonError(
                    "the daemon at the socket belongs to another user", url=str(socket)
                )
            credentials = handed_over(os.environ) if is_private else {}
            self._greet(reader, deadline_s, credentials)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"DaemonConnection({str(self.socket)!r})"

    def _greet(self, reader: ReaderIdentity, deadline_s: float, credentials: Json) -> None:
        """Send `hello`, and check the daemon's `welcome`.

        Args:
            credentials: credentials of object stores for a private daemon; empty for the node's.
        """
        spoken = versions.SPOKEN
        fields: Json = {
            "protocol": spoken.newest,
            "oldest_protocol": spoken.oldest,
            "client_version": __version__,
            "job": reader.job,
            "pid": reader.pid,
            "bundles": True,
            **asdict(reader.topology),
        }
        if reader.loader:
            fields["loader"] = reader.loader
            fields["batch_size"] = reader.batch_size
        if credentials:
            fields["credentials"] = credentials
        self.tell("hello", deadline_s, **fields)

        welcome = self._receive(deadline_s)
        if welcome is None:
            raise exceptions.NoDaemonError(
                "the daemon did not answer 'hello' in time",
                url=str(self.socket),
            )
        self._takes_bundles = welcome.get("bundles", False)
        self.takes_range_plans = welcome.get("range_plans", False)
        chosen = self._checked("hello", welcome)["protocol"]
        # The daemon has chosen a version that both sides speak. A daemon that is too old to choose
        # reports the only version it speaks, which `agree` may reject.
        chosen_alone = versions.ProtocolRange(chosen, chosen)
        daemon = versions.Release(str(welcome.get("version")), chosen_alone)
        versions.agree(daemon=daemon, client=versions.Release(__version__, spoken))

    def tell(self, kind: str, deadline_s: float | None = None, **fields: Any) -> None:
        """Send a message, without waiting for an answer.

        Args:
            deadline_s: time by which the message must be sent; None for a second from now.
        """
        if deadline_s is None:
            deadline_s = time.monotonic() + _SEND_TIMEOUT_S
        self._send({"type": kind, **fields}, deadline_s)

    def _send(self, message: Json, deadline_s: float) -> None:
        """Send a message: as a binary frame if it has packed shards, otherwise as text."""
        is_binary = "packed" in message
        with self._translating_errors():
            self._websocket.send(protocol.written(message), deadline_s, binary=is_binary)

    def request(self, kind: str, deadline_s: float | None = None, **fields: Any) -> int:
        """Send a request, with a deadline as in `tell`; return the id for `answer`."""
        request = self._new_id(kind)
        self.tell(kind, deadline_s, id=request, **fields)
        return request

    def _new_id(self, kind: str) -> int:
        """Return the id for a new request of a kind; its answer is kept when it arrives."""
        self._last_id += 1
        self._kinds[self._last_id] = kind
        return self._last_id

    def lease_message(self, *, needed: bool, **fields: Any) -> Json:
        """Return a request for a lease, with a new id, for `send_all`.

        Args:
            needed: True if the reader waits for the lease now.
            fields: the message's other fields.
        """
        message: Json = {"type": "lease", "id": self._new_id("lease"), **fields}
        if needed:
            message["needed"] = True
        return message

    def send_all(self, messages: Sequence[Json]) -> None:
        """Send messages within a second, in as few bundles as possible if the daemon takes bundles.

        A daemon that does not take bundles does not know the field `needed` of a lease, either:
        such a daemon is sent a message `need` after the lease.
        """
        deadline_s = time.monotonic() + _SEND_TIMEOUT_S
        if self._takes_bundles:
            for first in range(0, len(messages), protocol.MAX_BUNDLED):
                bundled = messages[first : first + protocol.MAX_BUNDLED]
                message = bundled[0]
                if len(bundled) > 1:
                    message = {"type": "bundle", "messages": bundled}
                self._send(message, deadline_s)
            return
        for message in messages:
            self._send(message, deadline_s)
            if message.get("needed"):
                self.tell("need", deadline_s, of=message["id"])

    def answer(self, request: int, deadline_s: float) -> Json | None:
        """Return a request's answer, or None if no answer came by the deadline.

        Raises the error if the answer is an error. Each answer is returned only once.
        """
        while request not in self._answers:
            message = self._receive(deadline_s)
            if message is None:
                return None
            for single in protocol.unbundled(message):
                self._keep_answer(single)

        kind = self._kinds.pop(request)
        return self._checked(kind, self._answers.pop(request))

    def _keep_answer(self, message: Json) -> None:
        """Keep the answer to a request. Raises errors that concern the whole connection."""
        if message.get("id") in self._kinds:
            self._answers[message["id"]] = message
        elif message["type"] == "error" and message.get("id") is None:
            raise exceptions.from_json(message["error"])
        # Anything else is unsolicited: a message from a newer release, which this one ignores.

    def has_answer(self, request: int) -> bool:
        """Return True if a request's answer was received while `answer` waited for another."""
        return request in self._answers

    def _checked(self, kind: str, answer: Json) -> Json:
        """Return the answer to a request of a kind; raise the error if the answer is an error."""
        if answer["type"] == "error":
            raise exceptions.from_json(answer["error"])
        if answer["type"] not in protocol.REQUESTS[kind].answers:
            shown = answer["type"][:_SHOWN_CHARS]
            raise exceptions.ProtocolError(
                f"the daemon answered {kind!r} with {shown!r}",
                url=str(self.socket),
            )
        return answer

    def forget(self, request: int) -> None:
        """Ignore the answer to a request."""
        self._kinds.pop(request, None)
        self._answers.pop(request, None)

    def call(
        self,
        kind: str,
        deadline_s: float,
        on_wait: Callable[[], None] = lambda: None,
        **fields: Any,
    ) -> Json:
        """Send a request and return its answer.

        Args:
            on_wait: called each second; it may raise to end the wait.

        Raises NoDaemonError if no answer comes by the deadline. A deadline that has already passed
        still leaves a second for the answer.
        """
        begun_s = time.monotonic()
        request = self.request(kind, max(deadline_s, begun_s + _SEND_TIMEOUT_S), **fields)
        report_s = begun_s + _FIRST_REPORT_S
        reason = ""
        while True:
            now_s = time.monotonic()
            is_last = now_s >= deadline_s  # True in the last round, which is after the deadline
            until_s = min(deadline_s, report_s, now_s + _ON_WAIT_INTERVAL_S)
            if is_last:
                until_s = now_s + _LAST_LOOK_S
            answer = self.answer(request, until_s)
            if answer is not None:
                return answer

            on_wait()
            if is_last:
                raise self._unanswered(kind, reason)
            if report_s <= time.monotonic() < deadline_s:
                reason = self.explain(request, deadline_s).text
                report_s = time.monotonic() + _NEXT_REPORT_S
                log.warning("waiting for %.0f s: %s", time.monotonic() - begun_s, reason)

    def _unanswered(self, kind: str, reason: str) -> exceptions.NoDaemonError:
        """Return the error for a request that was not answered in time.

        Args:
            reason: the daemon's last explanation of the wait; empty if it gave none.
        """
        why = f" ({reason})" if reason else ""
        return exceptions.NoDaemonError(
            f"the daemon did not answer {kind!r} in time{why}",
            url=str(self.socket),
            remedy="check what it is doing: shardcache status",
        )

    def explain(self, request: int, deadline_s: float) -> WaitReason:
        """Return the reason why a request is not answered yet."""
        until_s = min(deadline_s, time.monotonic() + _EXPLAIN_TIMEOUT_S)
        answer = self.answer(self.request("explain", until_s, of=request), until_s)
        if answer is None:
            return WaitReason("the daemon does not answer", done_bytes=0)

        reason = answer["reason"]
        total_bytes = answer.get("total_bytes")
        done_bytes = answer.get("done_bytes", 0)
        if total_bytes:
            reason += f" ({done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB)"
        return WaitReason(reason, done_bytes)

    def close(self) -> None:
        """End the session; the daemon drops its plan and leases."""
        self._websocket.close()

    def _receive(self, deadline_s: float) -> Json | None:
        """Return the daemon's next valid message; None if no message comes by the deadline."""
        with self._translating_errors():
            data = self._websocket.receive(deadline_s)
            if data is None:
                return None
            message = protocol.parse(data)
            for single in protocol.unbundled(message):
                _check_answer(single)
            return message

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Turn the errors of the websocket into errors of shardcache."""
        socket = str(self.socket)
        try:
            yield
        except OSError as exn:
            raise _connection_error(exn, socket) from exn
        except HandshakeError as exn:
            raise _handshake_error(exn, socket) from exn
        except exceptions.ProtocolError as exn:
            raise exceptions.ProtocolError(
                f"the daemon sent an invalid message: {exn.message}",
                url=socket,
            ) from exn


def _check_answer(message: Json) -> None:
    """Raise ProtocolError unless a message of the daemon has the fields of its type."""
    message_type = protocol.take(message, "type", str)
    kind = protocol.ANSWERS.get(message_type)
    if kind is not None:
        kind.check(message)
    # A message of an unknown type, from a newer release, may have the `id` of a request as well.
    protocol.UNKNOWN_KIND.check(message)


def log_damage(answer: Json) -> None:
    """Warn of damage that the daemon has found in shards which this process reads."""
    for error in answer.get("damaged", ()):
        damage = exceptions.from_json(error)
        log.warning(
            "%s: %s; samples that this process read from it may be wrong; the next reader gets a "
            "fresh copy",
            damage.url,
            damage.message,
        )


def hanging_daemon(socket: str | Path, sign: str) -> exceptions.NoDaemonError:
    """Return the error for a daemon that hangs.

    The remedy is not to start a daemon: the hanging one still listens at the socket.

    Args:
        socket: path of the daemon's socket.
        sign: what shows that it hangs, such as "timed out".
    """
    status = f"shardcache status --socket {shlex.quote(str(socket))}"
    return exceptions.NoDaemonError(
        f"the daemon does not answer: {sign}",
        url=str(socket),
        remedy=f"see what it is doing, and which process to end if it hangs: {status}",
    )


def _connection_error(exn: OSError, socket: str) -> exceptions.ShardcacheError:
    """Return the error for a connection that cannot be opened, or has broken."""
    if isinstance(exn, PermissionError):
        return exceptions.DaemonError(
            "you may not use the daemon's socket",
            url=socket,
            remedy=f"join the group that owns it (ls -l {shlex.quote(socket)}), then log in again",
        )
    if isinstance(exn, FileNotFoundError | ConnectionRefusedError):
        return exceptions.NoDaemonError(
            "no daemon listens at the socket",
            url=socket,
            remedy=f"start it: shardcache serve --socket {shlex.quote(socket)} "
            "--cache-dir /path/on/local/disk --capacity 500GB",
        )
    if isinstance(exn, FarewellError):
        return exceptions.StoppingError("the daemon is stopping", url=socket)
    # BlockingIOError: as many connections as the kernel allows wait for the daemon to accept them.
    if isinstance(exn, TimeoutError | BlockingIOError):
        return hanging_daemon(socket, str(exn))
    # Python checks the length of a socket's path itself, and raises an OSError without an errno.
    if exn.errno is None and "too long" in str(exn):
        return exceptions.ConfigError(
            "a socket's path has at most 107 bytes",
            url=socket,
            remedy="choose a shorter one: SHARDCACHE_SOCKET, or XDG_RUNTIME_DIR for a private "
            "daemon",
        )
    return exceptions.NoDaemonError(f"the connection to the daemon broke: {exn}", url=socket)


def _handshake_error(exn: HandshakeError, socket: str) -> exceptions.ShardcacheError:
    """Return the error that a server has sent in its answer to the WebSocket handshake."""
    try:
        return exceptions.from_json(json.loads(exn.body)["error"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return exceptions.ProtocolError(
            f"the server on this socket is not a shardcache daemon: {exn}",
            url=socket,
        )
