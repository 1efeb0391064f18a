"""One connection to the daemon, speaking `shardcache.protocol`: requests, and answers matched by `id`.

Blocking, without threads. A connection does not recover: once broken, every method raises NoDaemonError, and the owner
opens another (see `session`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardcache import __version__
from shardcache.errors import (
    ConfigError,
    DaemonError,
    NoDaemonError,
    ProtocolError,
    ShardcacheError,
    StoppingError,
    from_json,
)
from shardcache.protocol import (
    ANSWERS,
    REQUESTS,
    SESSION_PATH,
    SPOKEN,
    UNKNOWN,
    Json,
    Release,
    Spoken,
    agree,
    parse,
    take,
)
from shardcache_client.daemon.websocket import FarewellError, HandshakeError, WebSocket
from shardcache_client.topology import Topology

log = logging.getLogger("shardcache")

_OPEN_TIMEOUT_S = 10.0
# The daemon explains a wait immediately, unless it is overloaded.
_EXPLAIN_TIMEOUT_S = 5.0
_FIRST_REPORT_S, _NEXT_REPORT_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class ReaderIdentity:
    """A reading process, as shown in the daemon's list of jobs.

    Attributes:
        loader: name shared by the workers of one DataLoader, which takes batches from them in turn; empty if this
            process is not a worker.
        batch_size: samples in such a batch.
    """

    job: str
    topology: Topology = field(default_factory=Topology)
    loader: str = ""
    batch_size: int = 1
    pid: int = field(default_factory=os.getpid)

    def message(self) -> Json:
        """Return the fields of the `hello` message."""
        place = self.topology
        loader = {"loader": self.loader, "batch_size": self.batch_size} if self.loader else {}
        return {
            "protocol": SPOKEN.newest,
            "oldest_protocol": SPOKEN.oldest,
            "client_version": __version__,
            "job": self.job,
            "rank": place.rank,
            "world_size": place.world_size,
            "worker": place.worker,
            "workers": place.workers,
            "pid": self.pid,
            **loader,
        }


class DaemonConnection:
    """An open session: the daemon has answered `hello` with `welcome`.

    Raises NoDaemonError if nothing listens on the socket or the connection breaks; its subclass StoppingError if the
    daemon announces that it is stopping; DaemonError if this user may not use it; VersionMismatchError if daemon and
    client have no protocol version in common; ProtocolError if a message is invalid. Deadlines are those of
    `time.monotonic`.

    Args:
        is_private: True if only a daemon of this user may be at the socket.
    """

    def __init__(
        self, socket: Path, reader: ReaderIdentity, timeout_s: float = _OPEN_TIMEOUT_S, *, is_private: bool = False
    ) -> None:
        self._path = socket
        self._requests = 0
        self._kinds: dict[int, str] = {}  # by id, for requests that are not answered yet
        self._answers: dict[int, Json] = {}
        with self._translated():
            self._websocket = WebSocket(socket, SESSION_PATH, timeout_s)
        try:
            if is_private and self._websocket.peer_uid != os.geteuid():
                raise DaemonError("the daemon at the socket belongs to another user", url=str(socket))
            self._greet(reader, timeout_s)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"DaemonConnection({str(self._path)!r}, {self._websocket!r})"

    def _greet(self, reader: ReaderIdentity, timeout_s: float) -> None:
        self.tell("hello", **reader.message())
        welcome = self._receive(time.monotonic() + timeout_s)
        if welcome is None:
            raise NoDaemonError(f"the daemon did not answer within {timeout_s:g} s", url=str(self._path))
        chosen = self._checked("hello", welcome)["protocol"]
        # The daemon has chosen a version that both speak; daemons older than negotiation report their only version.
        daemon = Release(str(welcome.get("version")), Spoken(chosen, chosen))
        agree(daemon=daemon, client=Release(__version__, SPOKEN))

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message that gets no answer."""
        with self._translated():
            self._websocket.send(json.dumps({"type": kind, **fields}, separators=(",", ":")).encode())

    def request(self, kind: str, **fields: Any) -> int:
        """Send a request; return its id, for `answer`."""
        self._requests += 1
        self._kinds[self._requests] = kind
        self.tell(kind, id=self._requests, **fields)
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
                raise from_json(message["error"])
            # Anything else is unsolicited: a message from a newer release, which this one ignores.
        return self._checked(self._kinds.pop(request), self._answers.pop(request))

    def _checked(self, request: str, answer: Json) -> Json:
        """Return the answer to a kind of request; raise it if it is an error."""
        if answer["type"] == "error":
            raise from_json(answer["error"])
        if answer["type"] not in REQUESTS[request].answers:
            raise ProtocolError(f"the daemon answered {request!r} with {answer['type'][:100]!r}", url=str(self._path))
        return answer

    def forget(self, request: int) -> None:
        """Ignore the answer to a request."""
        self._kinds.pop(request, None)
        self._answers.pop(request, None)

    def call(self, kind: str, deadline_s: float, **fields: Any) -> Json:
        """Send a request and return its answer. Raises NoDaemonError if none comes by the deadline."""
        request, begun_s = self.request(kind, **fields), time.monotonic()
        report_s = begun_s + _FIRST_REPORT_S
        while (answer := self.answer(request, min(deadline_s, report_s))) is None:
            if time.monotonic() >= deadline_s:
                raise NoDaemonError(
                    f"the daemon did not answer {kind!r} in time",
                    url=str(self._path),
                    remedy="check what it is doing: shardcache status",
                )
            reason, report_s = self.explain(request, deadline_s), time.monotonic() + _NEXT_REPORT_S
            log.warning("waiting for the daemon for %.0f s: %s", time.monotonic() - begun_s, reason)
        return answer

    def explain(self, request: int, deadline_s: float = math.inf) -> str:
        """Return the daemon's reason for not having answered a request yet."""
        until_s = min(deadline_s, time.monotonic() + _EXPLAIN_TIMEOUT_S)
        answer = self.answer(self.request("explain", of=request), until_s)
        if answer is None:
            return "the daemon is too busy to say why"
        total_bytes = answer.get("total_bytes")
        done = f" ({answer.get('done_bytes', 0) / 1e6:.0f} of {total_bytes / 1e6:.0f} MB)" if total_bytes else ""
        return f"{answer['reason']}{done}"

    def close(self) -> None:
        """End the session; the daemon drops its plan and leases."""
        self._websocket.close()

    def _receive(self, deadline_s: float) -> Json | None:
        with self._translated():
            data = self._websocket.receive(deadline_s)
            return None if data is None else _parse(data)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        where = str(self._path)
        try:
            yield
        except PermissionError as exn:
            remedy = f"join the group that owns it (ls -l {shlex.quote(where)}), then log in again"
            raise DaemonError("you may not use the daemon's socket", url=where, remedy=remedy) from exn
        except (FileNotFoundError, ConnectionRefusedError) as exn:
            raise NoDaemonError("no daemon listens at the socket", url=where, remedy=_how_to_start(where)) from exn
        except FarewellError as exn:
            raise StoppingError("the daemon is stopping", url=where) from exn
        except OSError as exn:
            if exn.errno is None and "too long" in str(exn):  # Python's own check, before the kernel's
                remedy = "choose a shorter one: SHARDCACHE_SOCKET, or XDG_RUNTIME_DIR for a private daemon"
                raise ConfigError("a socket's path has at most 107 bytes", url=where, remedy=remedy) from exn
            raise NoDaemonError(f"the connection to the daemon broke: {exn}", url=where) from exn
        except HandshakeError as exn:
            raise _refusal(exn, where) from exn
        except ProtocolError as exn:
            raise ProtocolError(f"the daemon sent an invalid message: {exn.message}", url=where) from exn


def _parse(data: bytes) -> Json:
    message = parse(data)
    ANSWERS.get(take(message, "type", str), UNKNOWN).check(message)
    UNKNOWN.check(message)  # whatever its type, its `id` may name a request
    return message


def _how_to_start(socket: str) -> str:
    return f"start it: shardcache serve --socket {shlex.quote(socket)} --cache-dir /path/on/local/disk --capacity 500GB"


def _refusal(exn: HandshakeError, where: str) -> ShardcacheError:
    try:
        return from_json(json.loads(exn.body)["error"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ProtocolError(f"the server on this socket is not a shardcache daemon: {exn}", url=where)
