"""Any messages in any order, to a daemon in this process, or to a reader from a false daemon."""

import asyncio
import atexit
import base64
import contextlib
import functools
import hashlib
import json
import logging
import re
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, get_origin

from shardcache.config.settings import Settings
from shardcache.daemon.running import DaemonRun
from shardcache.errors import ProtocolError, ShardcacheError
from shardcache.server.listening.activation import ActivatedSockets
from shardcache.server.process.service_notifier import ServiceNotifier
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import (
    REQUESTS,
    SESSION_PATH,
    MessageKind,
    ShardRef,
    check_indices,
    parse,
    written,
)
from shardcache.shared.versions import PROTOCOL_VERSION
from shardcache_client.daemon.connection import DaemonConnection, ReaderIdentity
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

Json = dict[str, Any]

SHARDS = 3
_MAX_PACKED_BYTES = 1_000_000
_HELLO = {"type": "hello", "protocol": PROTOCOL_VERSION, "client_version": "fuzz", "job": "fuzz"}
_KEY = b"AAAAAAAAAAAAAAAAAAAAAA=="
_RAW = b"\0"
_HALF_CLOSE = b"eof"


def message(data: bytes) -> None:
    """Read bytes as each kind of message: values of the right type come out, or ProtocolError."""
    with contextlib.suppress(ProtocolError):
        parsed = parse(data)
        for request in REQUESTS.values():
            with contextlib.suppress(ProtocolError):
                request.check(parsed)
                _use(parsed, request)


def _use(parsed: Json, request: MessageKind) -> None:
    for field, kind in {**request.fields, **request.optional}.items():
        assert field in request.optional or field in parsed
        value = parsed.get(field, kind())
        assert type(value) is (get_origin(kind) or kind)
        if kind is int:
            assert 0 <= value < 2**63
        elif kind is str:
            value.encode()
        elif kind == list[str]:
            assert all(type(item) is str for item in value)
    if "packed" in parsed and "packed" in request.optional:
        shards = Shards.unpack(parsed["packed"], _MAX_PACKED_BYTES)
        assert Shards.of(shards) == shards
    if "order" in request.fields:
        check_indices(parsed["order"], SHARDS)
        assert all(0 <= index < SHARDS for index in parsed["order"])


def session(data: bytes) -> None:
    """Play one session; each line is a message, where `@0` to `@2` stand for the urls of shards
    that exist, `@f` for their fingerprint, and a list of urls in `packed` for what is sent of it.

    An empty line waits for answers, one that begins with a NUL goes over the wire as it is, without
    a frame, and `eof` closes the sending half. Unless the first line says hello itself, that is
    said before.
    """
    world = _world()
    world.loop.run_until_complete(world.play(data))


@functools.cache
def _world() -> "World":
    return World()


class World:
    """A daemon, its shards, and what went wrong in it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self.urls = [f"file://{path}" for path in write_shards(self.folder, SHARDS, 3)]
        self._planned = [*self.urls, f"{self.urls[0]}x"]  # the last of which is missing
        self.socket = self.folder / "s.sock"
        self.mishaps: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _loop, context: self.mishaps.append(str(context)))
        logging.getLogger().addHandler(_Listener(self.mishaps))
        run = DaemonRun(
            self._settings(),
            self.socket,
            ServiceNotifier.take({}, 0),
            lambda store: None,
            is_private=False,
            second_socket=None,
        )
        self._serving = self.loop.create_task(run.serve(ActivatedSockets()))
        self.loop.run_until_complete(self._ready())
        # This loop runs now and then: in between, nobody would read what each signal writes to it,
        # until it is full.
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.remove_signal_handler(number)

    def _settings(self) -> Settings:
        where = {"cache_dir": self.folder / "cache", "socket": self.socket}
        limits = {
            "capacity": "100MB",
            "min_free": "0",
            "allow": f"file://{self.folder}/",
            "log_level": "error",
        }
        return Settings.load(where | limits)

    async def _ready(self) -> None:
        async with asyncio.timeout(GUARD_S):
            while not self.socket.exists() or (await self.ask("/v1/health")) is None:
                done, _ = await asyncio.wait([self._serving], timeout=0.01)
                assert not done, self._serving.exception()
        self._honest = await asyncio.to_thread(RawSession, self.socket)
        await asyncio.to_thread(self._honest.plan, self._planned, list(range(SHARDS)))

    async def play(self, data: bytes) -> None:
        """Play one session and wait until it is forgotten.

        An honest reader has a shard in hand all the while, gets another before the session ends,
        and compares both.
        """
        for number, url in enumerate(self.urls):
            data = data.replace(b"@%d" % number, url.encode())
        data = data.replace(b"@f", Shards.of(map(ShardRef, self._planned)).fingerprint.encode())
        async with asyncio.timeout(GUARD_S):
            grants = [await asyncio.to_thread(self._honest.take, 0)]
            wire = await Wire.open(self.socket)
            with contextlib.suppress(ConnectionError):
                await wire.say_all(data)
            grants.append(await asyncio.to_thread(self._honest.take, 1))
            await wire.close()
            await asyncio.to_thread(self._compare, grants)
            while not await self._is_quiet():  # asking gives the daemon its turn
                pass
        mishaps = self.mishaps[:]
        self.mishaps[:] = []
        assert not mishaps, "\n".join(mishaps)

    def _compare(self, grants: list[Json]) -> None:
        for grant, url in zip(grants, self.urls, strict=False):
            assert grant["type"] == "leased", grant
            stored = Path(url.removeprefix("file://"))
            assert Path(grant["path"]).read_bytes() == stored.read_bytes(), (
                "an honest reader got other bytes"
            )
            self._honest.send(type="release", lease=grant["lease"])
        self._honest.settle()

    async def _is_quiet(self) -> bool:
        status = await self.ask("/v1/status")
        return (
            not status["cache"]["leased_bytes"]
            and sum(job["sessions"] for job in status["jobs"]) == 1
        )

    async def ask(self, path: str) -> Any:
        text = await self._get(path)
        return json.loads(text) if text else None

    async def _get(self, path: str) -> str:
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
        except ConnectionRefusedError:
            return ""
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b" 200 " in head.splitlines()[0], head
        return body.decode()


class _Listener(logging.Handler):
    """Hears of exceptions that nobody caught: aiohttp and asyncio log them."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.append(self.format(record))


class Wire:
    """A WebSocket client that sends whatever it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._open = True
        self._listening = asyncio.create_task(self._listen())
        self._heard = asyncio.Event()

    @classmethod
    async def open(cls, path: Path) -> "Wire":
        """Connect and shake hands."""
        reader, writer = await asyncio.open_unix_connection(path)
        ask = (
            b"GET %s HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            % SESSION_PATH.encode()
        )
        writer.write(ask + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n" % _KEY)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        return cls(reader, writer)

    async def say_all(self, data: bytes) -> None:
        """Say what `session` describes."""
        lines = data.split(b"\n")
        if b"hello" not in lines[0]:
            self.say(json.dumps(_HELLO).encode())
        for line in lines:
            if not line:
                await self.settle()
            elif line == _HALF_CLOSE:
                self.half_close()
            elif line.startswith(_RAW):
                self.write(line[1:])
            else:
                self.say(line)
        await self.settle()

    def say(self, text: bytes) -> None:
        sent = _packed(text)
        self.write(frame(sent, 0x81 if sent is text else 0x82))

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if self._open:
            self._writer.write(data)

    def half_close(self) -> None:
        if self._open:
            self._open = False
            self._writer.write_eof()

    async def settle(self) -> None:
        """Wait until nothing more has been heard for as long as it takes to read a file."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        while not self._listening.done():
            self._heard.clear()
            try:
                async with asyncio.timeout(0.003):
                    await self._heard.wait()
            except TimeoutError:
                return

    async def close(self) -> None:
        self._writer.transport.abort()
        await self._listening

    async def _listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head, size_bytes = struct.unpack("!BB", await self._reader.readexactly(2))
                if size_bytes >= 126:
                    long = await self._reader.readexactly(2 if size_bytes == 126 else 8)
                    size_bytes = int.from_bytes(long, "big")
                payload = await self._reader.readexactly(size_bytes)
                if head == 0x81:
                    _check(json.loads(payload))
                self._heard.set()


def _packed(text: bytes) -> bytes:
    """Return a message with the urls of its `packed` packed, any other as it is."""
    try:
        message = json.loads(text)
        return written({**message, "packed": Shards.of(map(ShardRef, message["packed"])).packed})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return text


def frame(payload: bytes, head: int = 0x81) -> bytes:
    """Return a client's frame, by default of text, masked with zeros, which leave it as it is."""
    size_bytes = len(payload)
    if size_bytes < 126:
        size = struct.pack("!B", 0x80 | size_bytes)
    elif size_bytes < 1 << 16:
        size = struct.pack("!BH", 0x80 | 126, size_bytes)
    else:
        size = struct.pack("!BQ", 0x80 | 127, size_bytes)
    return bytes([head]) + size + bytes(4) + payload


def _check(answer: Json) -> None:
    assert isinstance(answer.get("type"), str), answer
    if answer["type"] == "error":
        assert answer["error"]["code"], answer
        assert answer["error"]["message"], answer


LIMIT_S = 10.0
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_FIRST = (
    "resolve",
    "plan",
    "lease",
    "more",
    "explain",
)  # the kept inputs have the ids of these, in this order


def answers(data: bytes) -> None:
    """Ask each question once; a line of `data` is an answer, or, with a NUL in front, no frame."""
    impostor = _impostor()
    impostor.payload = b"".join(
        line[1:] if line.startswith(_RAW) else frame_of(_packed(line)) for line in data.split(b"\n")
    )
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
    connection = DaemonConnection(path, ReaderIdentity("fuzz"), time.monotonic() + GUARD_S)
    try:
        for kind, request in [(kind, connection.request(kind)) for kind in kinds]:
            _use_answer(kind, connection.answer(request, deadline_s))
    finally:
        connection.close()


def _use_answer(kind: str, answer: Any) -> None:
    """Take an answer's fields for what the protocol says that they are, as a session does."""
    assert answer is not None, f"a reader was given {answer}"
    assert answer["type"] in REQUESTS[kind].answers, f"a reader was given {answer}"
    match answer:
        case {"type": "manifest", "packed": packed}:
            assert all(isinstance(ref.url, str) for ref in Shards.unpack(packed))
        case {
            "type": "leased" | "arriving",
            "lease": lease,
            "path": path,
            "size_bytes": size_bytes,
        }:
            assert type(lease) is int
            assert Path(path).name is not None
            assert size_bytes >= 0
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
