"""A store that is far away: S3 and plain HTTP over a folder of files, slow to answer and narrow."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from typing import BinaryIO, Self

from support.network.http_requests import Request, answered
from support.programs.guard import GUARD_S
from support.stores import aws_env
from support.stores.mischief import Answer, refuse

# 4 ms of one connection: smooth enough, and at 170 MB/s some 700 system calls a second.
_CHUNK_BYTES = 256 * 1024
# Timers are late by a millisecond or more. What was missed may be sent at once, so that the rates are reached, too.
CREDIT_S = 0.02
_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Far:
    first_byte_s: float  # from a request to the first byte of its answer
    connection_bytes_per_s: float  # the most that one connection carries
    total_bytes_per_s: float  # the most that all connections carry together
    slow_every: int = 0  # one ranged request in this many is slow; 0 for none
    slow_bytes_per_s: float = 0.5e6  # rate of a slow one
    max_requests: int = 0  # requests served at a time, those beyond get 503 SlowDown; 0 for no limit


class Pacer:
    """Says when bytes may leave: a token bucket as a schedule, without a clock (GCRA, ITU-T I.371).

    Over any time t it lets `rate * (t + credit_s)` bytes pass at most; who asks in turn gets turns of equal size.
    """

    def __init__(self, bytes_per_s: float, credit_s: float, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._credit_s = credit_s
        self._due_s = now_s

    def due_s(self, size_bytes: int, now_s: float) -> float:
        """Return when the next bytes may leave, which are then taken as sent at that time."""
        self._due_s = max(self._due_s, now_s - self._credit_s) + size_bytes / self._bytes_per_s
        return self._due_s


@dataclass(slots=True)
class Stats:
    """Since the start: requests for objects, ranged ones, refused ones, and bytes of objects sent."""

    requests: int = 0
    ranged: int = 0
    refused: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class Store:
    """Answers for the objects of a folder: `/bucket/key` is the file `folder/bucket/key`.

    Bodies go out with sendfile(2) on the event loop; that this never waits for a disk is up to the page cache. HTTP is
    spoken by hand: a web framework took more processor time for a small range than the daemon that asked for it.
    """

    folder: Path
    far: Far
    total: Pacer
    stats: Stats = field(default_factory=Stats)
    at_once: int = 0

    async def accept(self, listener: socket.socket) -> None:
        """Answer the requests of each connection, until this is cancelled."""
        async with asyncio.TaskGroup() as connections:
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                connections.create_task(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """Answer the requests of one connection, one after the other."""
        loop = asyncio.get_running_loop()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        arrived = b""
        with sock:
            while True:
                head, end, rest = arrived.partition(b"\r\n\r\n")
                try:
                    if end:
                        arrived = rest
                        await self._answer(Request.parse(head.decode("latin-1")), sock)
                        continue
                    data = await loop.sock_recv(sock, _HEAD_BYTES)
                except (OSError, ValueError):  # whoever asked has left, as the campaign's do, or speaks no HTTP
                    return
                except asyncio.SendfileNotAvailableError:  # so asyncio says it if they left before a chunk's first byte
                    return
                if not data:
                    return
                arrived += data

    async def _answer(self, request: Request, sock: socket.socket) -> None:
        if request.path == "_stats":
            stats = json.dumps(asdict(self.stats)).encode()
            await _send(sock, request, Answer(200, {"content-length": str(len(stats))}, stats))
            return
        if request.method not in ("GET", "HEAD"):
            await _refuse(sock, request, 405, "MethodNotAllowed", {"Connection": "close"})
            raise ConnectionAbortedError("a request's body is not read")
        if self.far.max_requests and self.at_once >= self.far.max_requests:
            self.stats.refused += 1
            await _refuse(sock, request, 503, "SlowDown")
            return
        self.at_once += 1
        try:
            await self._answer_for_file(request, sock)
        finally:
            self.at_once -= 1

    async def _answer_for_file(self, request: Request, sock: socket.socket) -> None:
        self.stats.requests += 1
        await _pause(self.far.first_byte_s)
        try:
            file = (self.folder / request.path).open("rb", buffering=0)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            await _refuse(sock, request, 404, "NoSuchKey")
            return
        with file:
            await self._send_file(request, sock, file)

    async def _send_file(self, request: Request, sock: socket.socket, file: BinaryIO) -> None:
        facts = os.fstat(file.fileno())
        etag, size_bytes = _etag(facts), facts.st_size
        if request.headers.get("if-match") not in (None, "*", etag):
            await _refuse(sock, request, 412, "PreconditionFailed")
            return
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        wanted, status = range(size_bytes), 200
        if part := request.part:
            wanted, status = wanted[part], 206
            if not wanted:
                await _refuse(sock, request, 416, "InvalidRange", {"Content-Range": f"bytes */{size_bytes}"})
                return
            self.stats.ranged += 1
            headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{size_bytes}"
        headers["Content-Length"] = str(len(wanted))
        headers["Last-Modified"] = formatdate(facts.st_mtime, usegmt=True)
        has_body = request.method == "GET" and len(wanted) > 0
        # As from any server, the first bytes of the body come together with the head.
        sock.send(Answer(status, headers, b"").head(), socket.MSG_MORE if has_body else 0)
        if has_body:
            await self._send_body(sock, file, wanted)

    async def _send_body(self, sock: socket.socket, file: BinaryIO, wanted: range) -> None:
        loop = asyncio.get_running_loop()
        # HTTP/1.1: one answer at a time has the whole connection.
        is_slow = self.far.slow_every and self.stats.ranged % self.far.slow_every == 0
        rate = self.far.slow_bytes_per_s if is_slow else self.far.connection_bytes_per_s
        connection = Pacer(rate, CREDIT_S, loop.time())
        for start in wanted[::_CHUNK_BYTES]:
            size_bytes = min(_CHUNK_BYTES, wanted.stop - start)
            # One after the other: a turn on the common line is not taken by a connection that cannot use it yet.
            for pacer in (connection, self.total):
                now_s = loop.time()
                await _pause(pacer.due_s(size_bytes, now_s) - now_s)
            await loop.sock_sendfile(sock, file, start, size_bytes, fallback=False)
            self.stats.sent_bytes += size_bytes


async def _pause(delay_s: float) -> None:
    if delay_s > 0:
        await asyncio.sleep(delay_s)


def _etag(facts: os.stat_result) -> str:
    return f'"{facts.st_mtime_ns:x}{facts.st_size:x}"'


async def _refuse(
    sock: socket.socket, request: Request, status: int, code: str, headers: dict[str, str] | None = None
) -> None:
    answer = Answer(status, {}, b"")
    refuse(answer, status, code)
    answer.headers |= headers or {}
    await _send(sock, request, answer)


async def _send(sock: socket.socket, request: Request, answer: Answer) -> None:
    body = b"" if request.method == "HEAD" else answer.body
    await asyncio.get_running_loop().sock_sendall(sock, answer.head() + body)


async def serve(folder: Path, far: Far) -> None:
    """Serve on a free port of 127.0.0.1, which is printed, until standard input ends."""
    loop = asyncio.get_running_loop()
    store = Store(folder, far, Pacer(far.total_bytes_per_s, CREDIT_S, loop.time()))
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        listener.setblocking(False)
        print(listener.getsockname()[1], flush=True)
        async with asyncio.TaskGroup() as group:  # a fault of the store ends it, with its traceback
            accepting = group.create_task(store.accept(listener))

            def end() -> None:
                loop.remove_reader(sys.stdin)
                accepting.cancel()

            loop.add_reader(sys.stdin, end)  # nothing is ever written there: readable means ended


def main() -> None:
    given = json.loads(sys.argv[1])
    asyncio.run(serve(Path(given.pop("folder")), Far(**given)))


_TESTS = Path(__file__).parents[2]


class ThrottledS3:
    """A server in a process of its own on 127.0.0.1; `/bucket/key` is the file `folder/bucket/key`.

    It knows GET and HEAD of objects, with Range and If-Match; it takes any credentials or none. Entering returns once
    it listens. Files are sent from the page cache; one that is not there costs every connection the time of the disk.
    """

    endpoint_url: str  # where S3 is spoken; set on entering
    pid: int  # of the server; set on entering

    def __init__(
        self,
        folder: Path,
        *,
        first_byte_s: float = 0.03,
        connection_bytes_per_s: float = 60e6,
        total_bytes_per_s: float = 170e6,
        **moods: int,
    ) -> None:
        self._folder = folder
        self._far = Far(first_byte_s, connection_bytes_per_s, total_bytes_per_s, **moods)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.stores.throttled_s3", json.dumps(self._arguments())],
            stdin=subprocess.PIPE,  # ends with this process, however that ends
            stdout=subprocess.PIPE,
            text=True,
            cwd=_TESTS,  # where -m looks first
            # A Ctrl-C in the terminal is for whoever uses the server, which then ends it last.
            process_group=0,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            self.__exit__()
            raise RuntimeError("the throttled store did not start; it has said why on stderr")
        self.endpoint_url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        assert process is not None
        try:
            process.communicate(timeout=GUARD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def env(self) -> dict[str, str]:
        return aws_env(self.endpoint_url)

    def http_url(self, bucket: str, key: str) -> str:
        return f"{self.endpoint_url}/{bucket}/{key}"

    def stats(self) -> Stats:
        (stats,) = answered(HTTPConnection(self.endpoint_url.removeprefix("http://")), "/_stats").lines
        return Stats(**stats)

    def _arguments(self) -> dict[str, object]:
        return {"folder": os.fspath(self._folder.resolve()), **asdict(self._far)}


if __name__ == "__main__":
    main()
