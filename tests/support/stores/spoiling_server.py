"""HTTP servers that spoil answers as told, in the test's loop or in a thread."""

import asyncio
import random
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from support.network.http_requests import Request
from support.stores.mischief import Answer, Ending, Mischief, Scene

# A head's headers that hold for one connection alone.
HOP = ("connection", "keep-alive", "expect", "transfer-encoding")
_HEAD_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False)
class Rule:
    """Requests to spoil: of one key and first byte, if given, a random share."""

    mischief: Mischief | None
    method: str = "GET"
    key: str | None = None
    start: int | None = None
    share: float = 1.0
    times: int | None = None  # how many at most; None for all
    action: Callable[[], Awaitable[object]] | None = (
        None  # called once, before any of the requests is answered
    )
    _acting: asyncio.Future[object] | None = None

    def takes(self, request: Request, rng: random.Random) -> bool:
        start = request.part.start if request.part else None
        fits = (
            self.method == request.method
            and self.key in (None, request.key)
            and self.start in (None, start)
        )
        if not fits or self.times == 0 or rng.random() >= self.share:
            return False
        self.times = None if self.times is None else self.times - 1
        return True

    async def act(self) -> None:
        """Return once the action is done, whichever request caused it."""
        if self.action is not None:
            self._acting = self._acting or asyncio.ensure_future(self.action())
            await self._acting


class SpoilingServer:
    """Listens on a free port of the loopback; a subclass knows the right answers.

    Attributes:
        endpoint_url: where it listens; set by `listen`.
        objects: the bytes of each key, for mischief that needs more of an object than the request.
        other: bytes of another object, as long as the longest at least.
        version: header of an object's version.
        late_s, drip_s: how long a late answer waits, and a drop of a body that drips.
        refusal_headers: sent with all answers that are errors.
        connections: number of connections.
        sent_bytes: of objects and their ranges.
        done: how often each mischief really reached a client.
    """

    endpoint_url: str
    other = b""
    version = "etag"
    late_s = 2.0
    drip_s = 1.0

    def __init__(self) -> None:
        self.objects: Mapping[str, bytes] = {}
        self.refusal_headers: dict[str, str] = {}
        self.connections = 0
        self.sent_bytes = 0
        self.done: Counter[Mischief] = Counter()
        self._rules: tuple[Rule, ...] = ()
        self._rng = random.Random(0)  # decides what a rule with a share takes
        self._servers: list[asyncio.Server] = []
        self._clients: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def ask(self, request: Request) -> Answer:
        """Return the right answer."""
        raise NotImplementedError

    def drop_bytes(self, body: bytes) -> int:
        """Return how much of a body that drips is sent at a time."""
        return 1

    async def listen(
        self, context: ssl.SSLContext | None = None, front: Path | None = None
    ) -> None:
        """Serve from now on, over TLS with `context`, and at the Unix socket `front` if given."""
        server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES, ssl=context
        )
        self._servers.append(server)
        if front is not None:
            self._servers.append(
                await asyncio.start_unix_server(self._serve, front, limit=_HEAD_BYTES)
            )
        scheme = "http" if context is None else "https"
        self.endpoint_url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def end(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._clients:
            writer.transport.abort()
        await asyncio.gather(*self._clients.values())

    def fail(self, mischief: Mischief, **which: Any) -> None:
        """Spoil answers. `which`: fields of the `Rule`, by default for all of this method."""
        self._rules += (Rule(mischief, **{"method": mischief.method, **which}),)

    def before(self, action: Callable[[], object], *, key: str, start: int | None = None) -> None:
        """Call something once, in a thread, before any further GET of a key is answered."""
        self._rules += (Rule(None, key=key, start=start, action=lambda: asyncio.to_thread(action)),)

    def heal(self) -> None:
        """Spoil nothing more; what hangs goes on to hang."""
        self._rules = ()

    def rules_for(self, request: Request) -> list[Rule]:
        return [rule for rule in self._rules if rule.takes(request, self._rng)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[writer] = task
        self.connections += 1
        try:
            while request := await _read_request(reader, writer):
                if not await self._answer(request, reader, writer):
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            del self._clients[writer]
            writer.close()

    async def _answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; return whether the connection can take another."""
        rules = self.rules_for(request)
        for rule in rules:
            await rule.act()
        answer = await self.ask(request)
        mischief = next(
            (
                rule.mischief
                for rule in rules
                if rule.mischief and _can_spoil(rule.mischief, answer)
            ),
            None,
        )
        if mischief:
            start = request.part.start if request.part else 0
            whole = self.objects.get(request.key, answer.body)
            mischief.spoil(answer, Scene(start, self.other, whole, self.version))
        if answer.status >= 400:
            answer.headers |= self.refusal_headers
        if answer.late:
            await asyncio.sleep(self.late_s)
        writer.write(answer.head() if answer.raw is None else answer.raw)
        await writer.drain()
        if mischief:
            self.done[mischief] += 1
        if answer.raw is None and request.method != "HEAD":
            await self._send(answer, writer)
        await writer.drain()
        if request.method == "GET" and request.key and answer.status < 300:
            self.sent_bytes += len(answer.body)
        return await end_by(answer.ending, reader, writer)

    async def _send(self, answer: Answer, writer: asyncio.StreamWriter) -> None:
        body = answer.body[: answer.sent]
        if not answer.drips:
            writer.write(body)
            return
        drop_bytes = self.drop_bytes(body)
        for start in range(0, len(body), drop_bytes):
            if writer.transport.is_closing():
                raise ConnectionResetError
            writer.write(body[start : start + drop_bytes])
            await asyncio.sleep(self.drip_s)


class ThreadedServer(SpoilingServer):
    """A server in a thread and a loop of its own; a context manager."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self._context = context
        self._started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="spoiling-server"
        )

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        await self.listen(self._context)
        self._started.set()
        await self._stop.wait()
        await self.end()
        # A connection during its TLS handshake has neither a task nor a writer: only the loop knows
        # it.
        for transport in list(self._loop._transports.values()):  # type: ignore[attr-defined]
            transport.abort()
        await asyncio.sleep(0)
        # The task of a connection that was accepted just now may not have begun. Were it cancelled
        # with the loop, it would leave its socket open.
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.001)
            await self.end()


def _can_spoil(mischief: Mischief, answer: Answer) -> bool:
    """Tell whether an answer can be spoiled so; refusals cannot, and not all have a range."""
    return answer.status == 206 or (answer.status == 200 and not mischief.name.startswith("RANGE"))


async def end_by(
    ending: Ending, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """End a connection as an answer does; return whether it can take another request."""
    if ending is Ending.RESET:
        writer.transport.abort()
    if ending is Ending.HANG:
        await reader.read()  # until the client has had enough
    return ending is Ending.STAY


async def _read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    request = Request.parse(head.decode("latin-1"))
    if request.headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(request.headers.get("content-length", 0)))
    kept = {name: value for name, value in request.headers.items() if name not in HOP}
    return replace(request, headers=kept, body=body)
