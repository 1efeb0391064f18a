"""One connection to the daemon, in the words of `shardcache.protocol`: requests, and answers by their `id`.

Blocking and without threads. It does not mend itself: once broken, every method raises NoDaemonError, and whoever
owns it opens another (see `session`).
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator
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
    VersionMismatchError,
    from_json,
)
from shardcache.protocol import PROTOCOL_VERSION, SESSION_PATH, ShardRef
from shardcache_client.daemon.websocket import HandshakeError, WebSocket
from shardcache_client.topology import Topology

Json = dict[str, Any]

_OPEN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads, as the daemon shows it in its list of jobs."""

    job: str
    topology: Topology = field(default_factory=Topology)
    pid: int = field(default_factory=os.getpid)

    def message(self) -> Json:
        """Return the fields of the `hello` message."""
        place = self.topology
        return {
            "protocol": PROTOCOL_VERSION,
            "client_version": __version__,
            "job": self.job,
            "rank": place.rank,
            "world_size": place.world_size,
            "worker": place.worker,
            "workers": place.workers,
            "pid": self.pid,
        }


class Connection:
    """An open session: hello was answered by welcome.

    Raises NoDaemonError when nothing listens at the socket or the connection breaks, DaemonError when this user may
    not use it, VersionMismatchError when the daemon speaks another version of the protocol. Deadlines are those of
    `time.monotonic`.
    """

    def __init__(self, socket: Path, reader: Reader) -> None:
        self._path = socket
        self._requests = 0
        self._answers: dict[int, Json] = {}
        with self._translated():
            self._websocket = WebSocket(socket, SESSION_PATH, _OPEN_TIMEOUT_S)
        try:
            self._greet(reader)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Connection({str(self._path)!r}, {self._websocket!r})"

    def _greet(self, reader: Reader) -> None:
        self.tell("hello", **reader.message())
        welcome = self._receive(time.monotonic() + _OPEN_TIMEOUT_S)
        if welcome is None:
            raise NoDaemonError(f"the daemon does not answer within {_OPEN_TIMEOUT_S:g} s", url=str(self._path))
        if welcome.get("type") == "error":
            raise from_json(welcome["error"])
        if welcome.get("protocol") != PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"the daemon (shardcache {welcome.get('version')}) speaks version {welcome.get('protocol')} of the "
                f"protocol, this client (shardcache {__version__}) version {PROTOCOL_VERSION}",
                url=str(self._path),
                remedy="install the same release of shardcache on the node and in the training image",
            )

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message that has no answer."""
        with self._translated():
            self._websocket.send(json.dumps({"type": kind, **fields}, separators=(",", ":")).encode())

    def request(self, kind: str, **fields: Any) -> int:
        """Send a request; return the id under which `answer` finds its answer."""
        self._requests += 1
        self.tell(kind, id=self._requests, **fields)
        return self._requests

    def answer(self, request: int, deadline_s: float) -> Json | None:
        """Return a request's answer, or None when it does not come until the deadline. Raises the error it may be."""
        while request not in self._answers:
            message = self._receive(deadline_s)
            if message is None:
                return None
            if message.get("id") is None:
                raise from_json(message.get("error") or {"message": f"the daemon sent {message}"})
            self._answers[message["id"]] = message
        answer = self._answers.pop(request)
        if answer["type"] == "error":
            raise from_json(answer["error"])
        return answer

    def call(self, kind: str, deadline_s: float, **fields: Any) -> Json:
        """Send a request and return its answer. Raises DaemonError when none comes until the deadline."""
        answer = self.answer(self.request(kind, **fields), deadline_s)
        if answer is None:
            raise DaemonError(
                f"the daemon did not answer {kind!r} in time",
                url=str(self._path),
                remedy="see what it is busy with: shardcache status",
            )
        return answer

    def close(self) -> None:
        """End the session: the daemon drops its plan and its leases."""
        self._websocket.close()

    def _receive(self, deadline_s: float) -> Json | None:
        with self._translated():
            data = self._websocket.receive(deadline_s)
            return None if data is None else json.loads(data)

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
        except OSError as exn:
            if exn.errno is None and "too long" in str(exn):  # Python's own check, before the kernel's
                raise ConfigError("a socket's path has at most 107 bytes", url=where) from exn
            raise NoDaemonError(f"the connection to the daemon broke: {exn}", url=where) from exn
        except HandshakeError as exn:
            raise _refusal(exn, where) from exn
        except ValueError as exn:
            raise ProtocolError(f"the daemon sent what is no JSON: {exn}", url=where) from exn


def _how_to_start(socket: str) -> str:
    return f"start it: shardcache serve --socket {shlex.quote(socket)} --cache-dir /path/on/local/disk --capacity 500GB"


def _refusal(exn: HandshakeError, where: str) -> ShardcacheError:
    try:
        return from_json(json.loads(exn.body)["error"])
    except (ValueError, KeyError, TypeError):
        return ProtocolError(f"what listens there is no shardcache daemon: {exn}", url=where)


def resolve(socket: Path, reader: Reader, urls: Iterable[str], timeout_s: float) -> list[ShardRef]:
    """Ask the daemon, over a connection of its own, which shards the urls, patterns and prefixes stand for.

    Raises what `Connection` raises, NotFoundError and whatever else the store has to say about them.
    """
    connection = Connection(socket, reader)
    try:
        answer = connection.call("resolve", time.monotonic() + timeout_s, urls=list(urls))
        return [ShardRef.from_json(row) for row in answer["shards"]]
    finally:
        connection.close()
