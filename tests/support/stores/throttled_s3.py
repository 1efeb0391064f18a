"""A store that is far away: S3 and plain HTTP over a folder of files, slow to answer and narrow."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

from support import TESTS
from support.network.http_requests import Request, answered
from support.programs.guard import GUARD_S
from support.stores import aws_env
from support.stores.mischief import Answer, part_of, refusal

# 4 ms of one connection: smooth enough, and at 170 MB/s some 700 system calls a second.
_CHUNK_BYTES = 256 * 1024
# Timers are late by a millisecond or more. What was missed may be sent at once, so that the rates
# are reached, too.
CREDIT_S = 0.02
_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Far:
    first_byte_s: float = 0.03  # from a request to the first byte of its answer
    connection_bytes_per_s: float = 60e6  # the most that one connection carries
    total_bytes_per_s: float = 170e6  # the most that all connections carry together
    slow_every: int = 0  # one ranged request in this many is slow; 0 for none
    slow_bytes_per_s: float = 0.5e6  # rate of a slow one
    max_requests: int = (
        0  # requests served at a time, those beyond get 503 SlowDown; 0 for no limit
    )


class Pacer:
    """Says when bytes may leave: a token bucket as a schedule, without a clock (GCRA, ITU-T I.371).

    Over any time t it lets `rate * (t + credit_s)` bytes pass at most; who asks in turn gets turns
    of equal size.
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
    """Requests for objects, ranged and refused ones, and object bytes sent since the start."""

    requests: int = 0
    ranged: int = 0
    refused: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class FileAnswer(Answer):
    """An answer whose body lies in a file.

    Attributes:
        path: the file.
        wanted: the bytes of it that are the body.
    """

    path: Path = Path()
    wanted: range = range(0)


@dataclass(slots=True)
class Store:
    """Answers for the objects of a folder: `/bucket/key` is the file `folder/bucket/key`.

    Bodies go out with sendfile(2) on the event loop; that this never waits for a disk is up to the
    page cache. HTTP is spoken by hand: a web framework took more processor time for a small range
    than the daemon that asked for it, and asyncio's streams take nearly twice as much as this.
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
                except (
                    OSError,
                    ValueError,
                ):  # whoever asked has left, as the campaign's do, or speaks no HTTP
                    return
                except (
                    asyncio.SendfileNotAvailableError
                ):  # so asyncio says it if they left before a chunk's first byte
                    return
                if not data:
                    return
                arrived += data

    async def _answer(self, request: Request, sock: socket.socket) -> None:
        self.at_once += 1
        try:
            answer = await self._ask(request)
            if isinstance(answer, FileAnswer) and answer.wanted and request.method == "GET":
                # As from any server, the first bytes of the body come together with the head.
                sock.send(answer.head(), socket.MSG_MORE)
                await self._send_file(answer, sock)
            else:
                body = b"" if request.method == "HEAD" else answer.body
                await asyncio.get_running_loop().sock_sendall(sock, answer.head() + body)
        finally:
            self.at_once -= 1
        if answer.status == 405:
            raise ConnectionAbortedError("a request's body is not read")

    async def _ask(self, request: Request) -> Answer:
        if request.path == "_stats":
            stats = json.dumps(asdict(self.stats)).encode()
            return Answer(200, {"content-length": str(len(stats))}, stats)
        if request.method not in ("GET", "HEAD"):
            return refusal(405, "MethodNotAllowed")
        if self.far.max_requests and self.at_once > self.far.max_requests:
            self.stats.refused += 1
            return refusal(503, "SlowDown")
        self.stats.requests += 1
        await _pause(self.far.first_byte_s)
        path = self.folder / request.path
        query = parse_qs(urlsplit(request.target).query)
        if path.is_dir() and "list-type" in query:
            return listed(path, query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
        if not path.is_file():
            return refusal(404, "NoSuchKey")
        facts = path.stat()
        etag = etag_of(facts)
        if request.headers.get("if-match") not in (None, "*", etag):
            return refusal(412, "PreconditionFailed")
        headers = {
            "etag": etag,
            "accept-ranges": "bytes",
            "last-modified": formatdate(facts.st_mtime, usegmt=True),
        }
        answer, wanted = part_of(facts.st_size, request.part, headers)
        if answer.status == 206:
            self.stats.ranged += 1
        return FileAnswer(answer.status, answer.headers, path=path, wanted=wanted)

    async def _send_file(self, answer: FileAnswer, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # HTTP/1.1: one answer at a time has the whole connection.
        is_slow = self.far.slow_every and self.stats.ranged % self.far.slow_every == 0
        rate = self.far.slow_bytes_per_s if is_slow else self.far.connection_bytes_per_s
        connection = Pacer(rate, CREDIT_S, loop.time())
        with answer.path.open("rb", buffering=0) as file:
            for start in answer.wanted[::_CHUNK_BYTES]:
                size_bytes = min(_CHUNK_BYTES, answer.wanted.stop - start)
                # One after the other: a turn on the common line is not taken by a connection that
                # cannot use it yet.
                for pacer in (connection, self.total):
                    now_s = loop.time()
                    await _pause(pacer.due_s(size_bytes, now_s) - now_s)
                await loop.sock_sendfile(sock, file, start, size_bytes, fallback=False)
                self.stats.sent_bytes += size_bytes


def listed(bucket: Path, prefix: str, delimiter: str) -> Answer:
    """Return one page of ListObjectsV2 with all keys of a bucket that begin with a prefix."""
    keys = sorted(
        path.relative_to(bucket).as_posix() for path in bucket.rglob("*") if path.is_file()
    )
    contents: list[str] = []
    folders: dict[str, None] = {}
    for key in keys:
        if not key.startswith(prefix):
            continue
        rest = key.removeprefix(prefix)
        if delimiter and delimiter in rest:
            name, _, _ = rest.partition(delimiter)
            folders[f"{prefix}{name}{delimiter}"] = None
            continue
        facts = (bucket / key).stat()
        modified = datetime.fromtimestamp(facts.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        contents.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified>"
            f"<ETag>{etag_of(facts)}</ETag><Size>{facts.st_size}</Size></Contents>"
        )
    common = [
        f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders
    ]
    body = (
        f"<?xml version='1.0'?><ListBucketResult><Name>{escape(bucket.name)}</Name>"
        f"<Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(contents) + len(common)}</KeyCount><IsTruncated>false</IsTruncated>"
        f"{''.join(contents)}{''.join(common)}</ListBucketResult>"
    ).encode()
    return Answer(200, {"content-type": "application/xml", "content-length": str(len(body))}, body)


def etag_of(facts: os.stat_result) -> str:
    return f'"{facts.st_mtime_ns:x}{facts.st_size:x}"'


async def _pause(delay_s: float) -> None:
    if delay_s > 0:
        await asyncio.sleep(delay_s)


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


class ThrottledS3:
    """A server in a process of its own on 127.0.0.1; `/bucket/key` is the file `folder/bucket/key`.

    It knows GET and HEAD of objects, with Range and If-Match, and lists a bucket on one page; it
    takes any credentials or none. Entering returns once it listens. Files are sent from the page
    cache; one that is not there costs every connection the time of the disk.
    """

    endpoint_url: str  # where S3 is spoken; set on entering
    pid: int  # of the server; set on entering

    def __init__(self, folder: Path, **far: Any) -> None:
        """Prepare one. `far`: fields of `Far`."""
        self._folder = folder
        self._far = Far(**far)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        arguments = {"folder": os.fspath(self._folder.resolve()), **asdict(self._far)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.stores.throttled_s3", json.dumps(arguments)],
            stdin=subprocess.PIPE,  # ends with this process, however that ends
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS,  # where -m looks first
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
        process = self._process
        self._process = None
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
        (stats,) = answered(
            HTTPConnection(self.endpoint_url.removeprefix("http://")), "/_stats"
        ).lines
        return Stats(**stats)


if __name__ == "__main__":
    main()
