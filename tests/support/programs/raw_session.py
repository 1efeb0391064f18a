"""A reading process's connection, message by message."""

import fcntl
import json
import socket
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import SESSION_PATH, ShardRef, parse, written
from shardcache.shared.versions import PROTOCOL_VERSION
from shardcache_client.daemon.websocket import WebSocket
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S


class RawSession(AbstractContextManager["RawSession"]):
    def __init__(self, daemon: Daemon | Path, job: str = "job", **hello: Any) -> None:
        path = daemon if isinstance(daemon, Path) else daemon.socket
        self._socket = WebSocket(path, SESSION_PATH, time.monotonic() + GUARD_S)
        first = {
            "type": "hello",
            "protocol": PROTOCOL_VERSION,
            "client_version": "test",
            "job": job,
        }
        self.send(**{**first, **hello})
        self.welcome = self.receive()
        self._id = 0
        self._answers: dict[int, dict[str, Any]] = {}

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        self._socket._socket.shutdown(socket.SHUT_RDWR)

    def send(self, **message: Any) -> None:
        deadline_s = time.monotonic() + GUARD_S
        if "packed" in message:
            self._socket.send(written(message), deadline_s, binary=True)
        else:
            self._socket.send(json.dumps(message).encode(), deadline_s)

    def receive(self) -> dict[str, Any]:
        return parse(self.receive_text())

    def receive_text(self, limit_s: float = GUARD_S) -> bytes:
        """Return the next message as it came, since reading a large one would block the loop."""
        message = self._socket.receive(time.monotonic() + limit_s)
        assert message is not None, "no answer"
        return message

    def unread_bytes(self) -> int:
        return int.from_bytes(
            fcntl.ioctl(self._socket._socket, termios.FIONREAD, bytes(4)), sys.byteorder
        )

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        request = self.request(kind, **fields)
        answer = self.receive()
        assert answer["id"] == request
        return answer

    def request(self, kind: str, **fields: Any) -> int:
        self._id += 1
        self.send(type=kind, id=self._id, **fields)
        return self._id

    def answer(self, request: int) -> dict[str, Any]:
        while request not in self._answers:
            answer = self.receive()
            self._answers[answer["id"]] = answer
        return self._answers.pop(request)

    def take(self, position: int, **fields: Any) -> dict[str, Any]:
        """Ask for a shard and say that it is needed; return the grant when it is in hand."""
        request = self.request("lease", position=position, **fields)
        self.send(type="need", of=request)
        granted = self.receive()
        self.settle()
        return granted

    def need(self, of: int) -> None:
        """Say that what a request asked for is needed; return when the daemon has heard it."""
        self.send(type="need", of=of)
        self.settle()

    def settle(self) -> None:
        """Return when the daemon has heard all that was sent."""
        self.ask("explain", of=0)

    def plan(
        self,
        shards: Sequence[str | ShardRef],
        order: list[int],
        reads: int | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """Declare a plan of shards, by urls alone or whole; `reads` is of this epoch or all."""
        known = Shards.of(ShardRef(each) if isinstance(each, str) else each for each in shards)
        sent = self.ask("shards", fingerprint=known.fingerprint, packed=known.packed, **fields)
        if sent["type"] == "error":
            return sent
        reads = len(order) if reads is None else reads
        return self.ask(
            "plan", epoch=0, shards=[known.fingerprint], order=order, reads=reads, **fields
        )
