"""Any answers, in any order, from something that calls itself the daemon: a reader makes a typed error of them."""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import re
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fuzz.sessions import frame
from shardcache.errors import ShardcacheError
from shardcache.protocol import REQUESTS, ShardRef
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity

LIMIT_S = 10.0

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_RAW = b"\0"
# The kept inputs have the ids of these, in this order.
_FIRST = ("resolve", "plan", "lease", "more", "explain")


def check(data: bytes) -> None:
    """Ask one of each question; each line of `data` is a message of the other side, with a NUL in front, no frame."""
    impostor = _impostor()
    impostor.payload = b"".join(line[1:] if line.startswith(_RAW) else frame_of(line) for line in data.split(b"\n"))
    begun_s = time.monotonic()
    with contextlib.suppress(ShardcacheError):
        _ask_all(impostor.path, begun_s + LIMIT_S)
    assert time.monotonic() < begun_s + 2 * LIMIT_S, "the reader waited beyond its deadline"


def frame_of(text: bytes) -> bytes:
    """Return a server's frame: a client's, less the mask."""
    masked = frame(text)
    head_bytes = len(masked) - len(text) - 4
    return bytes([masked[0], masked[1] & 0x7F]) + masked[2:head_bytes] + text


def _ask_all(path: Path, deadline_s: float) -> None:
    kinds = [kind for kind in dict.fromkeys([*_FIRST, *REQUESTS]) if "id" in REQUESTS[kind].fields]
    connection = DaemonConnection(path, ReaderIdentity("fuzz"))
    try:
        for kind, request in [(kind, connection.request(kind)) for kind in kinds]:
            _use(kind, connection.answer(request, deadline_s))
    finally:
        connection.close()


def _use(kind: str, answer: Any) -> None:
    """Do with an answer what a session does: take its fields for what the protocol says that they are."""
    assert answer is not None and answer["type"] in REQUESTS[kind].answers, f"a reader was given {answer}"
    match answer:
        case {"type": "manifest", "shards": rows}:
            assert all(isinstance(ShardRef.from_json(row).url, str) for row in rows)
        case {"type": "leased" | "arriving", "lease": lease, "path": path, "size_bytes": size_bytes}:
            assert type(lease) is int and Path(path).name is not None and size_bytes >= 0
        case {"type": "waiting", "reason": reason}:
            assert type(reason) is str
            assert answer.get("done_bytes", 0) / 1e6 >= 0 <= answer.get("total_bytes", 0) / 1e6


class Impostor:
    """Listens where a daemon would, shakes hands, sends its payload and says no more."""

    def __init__(self) -> None:
        self.payload = b""
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.path = folder / "s.sock"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.path))
        self._listening.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            wire, _ = self._listening.accept()
            with wire, contextlib.suppress(OSError):
                self._serve(wire)

    def _serve(self, wire: socket.socket) -> None:
        asked = b""
        while b"\r\n\r\n" not in asked:
            asked += wire.recv(4096)
        found = re.search(rb"Sec-WebSocket-Key: (\S+)", asked)
        assert found is not None, asked
        accept = base64.b64encode(hashlib.sha1(found[1] + _MAGIC).digest())
        head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        wire.sendall(head + b"Sec-WebSocket-Accept: %s\r\n\r\n" % accept + self.payload)
        wire.shutdown(socket.SHUT_WR)
        while wire.recv(65536):
            pass


@functools.cache
def _impostor() -> Impostor:
    return Impostor()
