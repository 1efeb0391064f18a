"""A proxy before a real S3 server, which spoils answers as it is told to."""

import asyncio
import http.client
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote, urlsplit

from support.programs.guard import GUARD_S
from support.stores.mischief import Answer, Ending, Mischief, Scene, spoil

# A head's headers that hold for one connection alone.
_HOP = ("connection", "keep-alive", "expect", "transfer-encoding")
_HEAD_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False)
class Rule:
    """Requests to be spoiled: those for one key and first byte, where given, and of these a share at random."""

    mischief: Mischief | None
    method: str
    key: str | None
    start: int | None
    share: float
    times: int | None  # how many at most; None for all
    action: Callable[[], object] | None = None  # called once, in a thread, before any of the requests is passed on
    _acting: asyncio.Task[object] | None = None

    def takes(self, request: "_Request", rng: random.Random) -> bool:
        fits = self.method == request.method and self.key in (None, request.key) and self.start in (None, request.start)
        if not fits or self.times == 0 or rng.random() >= self.share:
            return False
        self.times = None if self.times is None else self.times - 1
        return True

    async def act(self) -> None:
        """Return once the action is done, whichever request caused it: a late part may be asked for twice."""
        if self.action is not None:
            self._acting = self._acting or asyncio.create_task(asyncio.to_thread(self.action))
            await self._acting


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.target).path).lstrip("/").partition("/")[2]

    @property
    def start(self) -> int | None:
        match = re.match(r"bytes=(\d+)-", self.headers.get("range", ""))
        return int(match[1]) if match else None


class FaultyProxy:
    """Passes requests on to a server, bodies included, in a thread and a loop of its own; a context manager.

    Signatures stay right: the client signs the proxy's own address, and that is the Host which the server sees.
    """

    endpoint_url: str  # where it listens; set on entering

    def __init__(
        self,
        upstream_url: str,
        *,
        objects: Mapping[str, bytes] | None = None,
        other: bytes = b"",
        version: str = "etag",
        late_s: float = 2.0,
        drip_s: float = 1.0,
    ) -> None:
        """Prepare one.

        Args:
            objects: the bytes of each key, for mischief that needs more of an object than was asked for.
            other: bytes of another object, as long as the longest at least.
            version: header of an object's version.
            late_s, drip_s: how late a late answer is, and how long a byte takes that drips.
        """
        self._upstream = urlsplit(upstream_url).netloc
        self._objects = objects or {}
        self._other, self._version = other, version
        self._rng = random.Random(0)  # decides what a rule with a share takes
        self._late_s, self._drip_s = late_s, drip_s
        self._rules: tuple[Rule, ...] = ()
        self._clients: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._forgotten: set[asyncio.StreamWriter] = set()
        self.connections = 0  # so far
        self.swallowed = 0  # requests that came over forgotten connections
        self.sent_bytes = 0  # of objects and their ranges
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="faulty-proxy")
        self.done: Counter[Mischief] = Counter()  # how often each mischief really reached a client

    def __repr__(self) -> str:
        return f"<FaultyProxy before {self._upstream}, {self.done.total()} answers spoiled>"

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which an AWS SDK finds the server, with the proxy in between."""
        return {**env, "AWS_ENDPOINT_URL": self.endpoint_url}

    def fail(
        self,
        mischief: Mischief,
        *,
        key: str | None = None,
        start: int | None = None,
        share: float = 1.0,
        times: int | None = None,
        method: str | None = None,
    ) -> None:
        self._rules += (Rule(mischief, method or mischief.method, key, start, share, times),)

    def before(self, action: Callable[[], object], *, key: str, start: int | None = None) -> None:
        """Call something once, before any further GET of a key is passed on."""
        self._rules += (Rule(None, "GET", key, start, 1.0, None, action),)

    def heal(self) -> None:
        """Spoil nothing more; what hangs goes on to hang."""
        self._rules = ()

    def forget(self) -> int:
        """Swallow whatever comes over the present connections, as a NAT does; return how many there are."""

        async def swallow() -> int:
            self._forgotten |= self._clients.keys()
            return len(self._clients)

        return asyncio.run_coroutine_threadsafe(swallow(), self._loop).result()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.endpoint_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()
        for writer in self._clients:
            writer.transport.abort()
        await asyncio.gather(*self._clients.values())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[writer] = task
        self.connections += 1
        try:
            while request := await _read_request(reader, writer):
                if writer in self._forgotten:
                    self.swallowed += 1
                    await _end(Ending.HANG, reader, writer)
                    break
                if not await self._answer(request, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            del self._clients[writer]
            self._forgotten.discard(writer)
            writer.close()

    async def _answer(self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection can take another."""
        rules = [rule for rule in self._rules if rule.takes(request, self._rng)]
        for rule in rules:
            await rule.act()
        answer = await asyncio.to_thread(self._ask, request)
        mischief = next((rule.mischief for rule in rules if rule.mischief and _can_spoil(rule.mischief, answer)), None)
        if mischief:
            whole = self._objects.get(request.key, answer.body)
            spoil(mischief, answer, Scene(request.start or 0, self._other, whole, self._version))
        if answer.late:
            await asyncio.sleep(self._late_s)
        writer.write(answer.head() if answer.raw is None else answer.raw)
        await writer.drain()
        if mischief:
            self.done[mischief] += 1
        if answer.raw is None and request.method != "HEAD":
            await self._send(answer, writer)
        await writer.drain()
        if request.method == "GET" and request.key and answer.status < 300:
            self.sent_bytes += len(answer.body)
        return await _end(answer.ending, reader, writer)

    async def _send(self, answer: Answer, writer: asyncio.StreamWriter) -> None:
        body = answer.body[: answer.sent]
        if not answer.drips:
            writer.write(body)
            return
        for byte in body:
            if writer.transport.is_closing():
                raise ConnectionResetError
            writer.write(bytes([byte]))
            await asyncio.sleep(self._drip_s)

    def _ask(self, request: _Request) -> Answer:
        with closing(http.client.HTTPConnection(self._upstream, timeout=GUARD_S)) as connection:
            connection.request(request.method, request.target, request.body, request.headers)
            answer = connection.getresponse()
            body = answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders() if name.lower() not in _HOP}
        if request.method != "HEAD":
            headers["content-length"] = str(len(body))
        return Answer(answer.status, headers, body)


def _can_spoil(mischief: Mischief, answer: Answer) -> bool:
    """Tell whether an answer can be made worse that way: refusals stay what they are, and not all have a range."""
    return answer.status == 206 or (answer.status == 200 and not mischief.name.startswith("RANGE"))


async def _end(ending: Ending, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    match ending:
        case Ending.STAY:
            return True
        case Ending.CLOSE:
            return False
        case Ending.RESET:
            writer.transport.abort()
            return False
        case Ending.HANG:
            await reader.read()  # until the client has had enough
            return False


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Request | None:
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, target, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return _Request(method, target, {name: value for name, value in headers.items() if name not in _HOP}, body)
