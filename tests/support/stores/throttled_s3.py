"""A store that is far away: S3 and plain HTTP over a folder of files, slow to answer and narrow."""

import asyncio
import http.client
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from aiohttp import web

from support.programs.guard import GUARD_S
from support.stores import aws_env

# 4 ms of one connection: smooth enough, and at 170 MB/s some 700 system calls a second.
_CHUNK_BYTES = 256 * 1024
# Timers are late by a millisecond or more. What was missed may be sent at once, so that the rates are reached, too.
CREDIT_S = 0.02


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

    Bodies go out with sendfile(2) on the event loop; that this never waits for a disk is up to the page cache.
    """

    folder: Path
    far: Far
    total: Pacer
    stats: Stats = field(default_factory=Stats)
    at_once: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/_stats", self._tell_stats)
        app.router.add_get("/{bucket}/{key:.+}", self._get)
        return app

    async def _tell_stats(self, _request: web.Request) -> web.Response:
        return web.json_response(asdict(self.stats))

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.far.max_requests and self.at_once >= self.far.max_requests:
            self.stats.refused += 1
            return _refusal(request, 503, "SlowDown")
        self.at_once += 1
        try:
            return await self._get_file(request)
        finally:
            self.at_once -= 1

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        await self._travel()
        path = self.folder / request.match_info["bucket"] / request.match_info["key"]
        try:
            file = path.open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return _refusal(request, 404, "NoSuchKey")
        with file:
            return await self._answer(request, file)

    async def _answer(self, request: web.Request, file: BinaryIO) -> web.StreamResponse:
        facts = os.fstat(file.fileno())
        etag, size_bytes = _etag(facts), facts.st_size
        if request.headers.get("If-Match") not in (None, "*", etag):
            return _refusal(request, 412, "PreconditionFailed")
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        wanted, status = range(size_bytes), 200
        if part := _part(request):
            wanted, status = wanted[part], 206
            if not wanted:
                return _refusal(request, 416, "InvalidRange", {"Content-Range": f"bytes */{size_bytes}"})
            self.stats.ranged += 1
            headers["Content-Range"] = f"bytes {wanted.start}-{wanted.stop - 1}/{size_bytes}"
        answer = web.StreamResponse(status=status, headers=headers)
        answer.content_length = len(wanted)
        answer.last_modified = facts.st_mtime
        try:
            await answer.prepare(request)
        except ConnectionResetError:
            return answer  # whoever asked has left, as the campaign's do
        if request.method == "GET" and request.transport is not None:
            await self._send(request.transport, file, wanted)
        return answer

    async def _send(self, transport: asyncio.Transport, file: BinaryIO, wanted: range) -> None:
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
            try:
                await loop.sendfile(transport, file, start, size_bytes)
            except (ConnectionError, RuntimeError):  # RuntimeError: asyncio saw the end of the connection first
                transport.abort()
                return
            self.stats.sent_bytes += size_bytes

    async def _travel(self) -> None:
        self.stats.requests += 1
        await _pause(self.far.first_byte_s)


async def _pause(delay_s: float) -> None:
    if delay_s > 0:
        await asyncio.sleep(delay_s)


def _part(request: web.Request) -> slice | None:
    try:
        return request.http_range if "Range" in request.headers else None
    except ValueError:  # RFC 9110, 14.2: a Range that cannot be read is no Range
        return None


def _etag(facts: os.stat_result) -> str:
    return f'"{facts.st_mtime_ns:x}{facts.st_size:x}"'


def _refusal(request: web.Request, status: int, code: str, headers: dict[str, str] | None = None) -> web.Response:
    text = "" if request.method == "HEAD" else f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml", headers=headers)


async def serve(folder: Path, far: Far) -> None:
    """Serve on a free port of 127.0.0.1, which is printed, until standard input ends."""
    loop = asyncio.get_running_loop()
    store = Store(folder, far, Pacer(far.total_bytes_per_s, CREDIT_S, loop.time()))
    runner = web.AppRunner(store.app(), access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        orphaned = asyncio.Event()
        loop.add_reader(sys.stdin, orphaned.set)  # nothing is ever written there: readable means ended
        await orphaned.wait()
    finally:
        await runner.cleanup()


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

    def __repr__(self) -> str:
        return f"<ThrottledS3 {self._folder} at {getattr(self, 'endpoint_url', 'no port')}>"

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
        connection = http.client.HTTPConnection(self.endpoint_url.removeprefix("http://"))
        try:
            connection.request("GET", "/_stats")
            return Stats(**json.load(connection.getresponse()))
        finally:
            connection.close()

    def _arguments(self) -> dict[str, object]:
        return {"folder": os.fspath(self._folder.resolve()), **asdict(self._far)}


if __name__ == "__main__":
    main()
