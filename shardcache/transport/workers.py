"""The daemon's side of the transport workers: starts them, gives them requests, and passes on the results."""

import asyncio
import errno
import math
import os
import socket
import ssl
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeAlias, cast

from shardcache.errors import NO_PROCESS_REMEDY, CacheError, NotAllowedError, OriginError
from shardcache.logs import SharedLogger
from shardcache.transport import descriptors
from shardcache.transport.messages import HEAD_REMEDY, Answer, Body, Message, Request, decoded, encoded, request_to_json
from shardcache.transport.parts import PartFileError, Parts

log = SharedLogger()

Commit: TypeAlias = Callable[[], Awaitable[bool]]
"""Called when a whole body has arrived and none of it is written; returns False to drop it."""

Received: TypeAlias = Callable[[int], None]
"""Called with the number of bytes just received, to tell a slow read from a stalled one."""

# Threads of one process share its interpreter lock, which over TLS changes hands for every 16 KiB.
_REQUESTS_A_WORKER = 4
_CORES_A_WORKER = 4
_MIN_WORKERS, _MAX_WORKERS = 2, 8
# An interpreter starts in a fraction of a second; on a full node that pages, in several.
_START_LIMIT_S = 60.0
# A worker that leaves this many pings in a row unanswered hangs; one that has not started yet has longer.
_PINGS = 3
_STARTING_PINGS = 60
_SHORTEST_PING_S = 1.0
# A write that hangs with its disk must not block the daemon; if it completes later, it writes the right bytes in place.
_END_LIMIT_S = 2.0


def nothing(count: int) -> None:
    """Ignore what is received."""


class Flow:
    """Counts a read's bytes, and pauses it; this one never does, see `fetch.reads.PausableRead`.

    A read that pulls its bytes chunk by chunk awaits `ready` before each. One to which bytes are pushed is
    `interruptible`: its callback stops the read until `ready` returns. TCP flow control then stops the origin as well,
    and no byte is lost.

    Attributes:
        credit_bytes: byte credit of the read; exceeding it is harmless, but makes a bandwidth limit uneven.
        prompt: True if somebody is waiting for the first bytes, so that `written` should be called often.
    """

    credit_bytes = math.inf
    prompt = False

    def __init__(self, tally: Received = nothing) -> None:
        self._tally = tally

    def received(self, count: int) -> None:
        """Count received bytes."""
        self._tally(count)

    def written(self, size_bytes: int) -> None:
        """Record the size of the body's beginning that is in the file; not called for every read, nor at its end."""

    async def ready(self) -> None:
        """Return when the next bytes may be read."""

    def interruptible(self, pause: Callable[[], object]) -> AbstractContextManager[None]:
        """Call `pause` whenever, during the block, the read has to stop until it is `ready` again."""
        return nullcontext()


class TransportError(OSError):
    """A connection failed, or the answer was not HTTP."""


class Workers:
    """Up to `maximum` worker processes, started as requests need them and replaced when one dies.

    A request waits for a process to start only if there is none; while another starts, the others get all requests. A
    worker that has requests and does not respond for `silence_s` is killed.
    """

    def __init__(self, maximum: int | None = None, *, silence_s: float = 20.0) -> None:
        cores = len(os.sched_getaffinity(0))
        self._ping_s = max(_SHORTEST_PING_S, silence_s / (_PINGS + 1))
        self._maximum = maximum or max(_MIN_WORKERS, min(_MAX_WORKERS, cores // _CORES_A_WORKER))
        self._workers: list[_WorkerProcess] = []
        self._starting = asyncio.Lock()
        self._growing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Workers {[len(worker.requests) for worker in self._workers]} requests>"

    async def start_one(self) -> None:
        """Start a worker before the first request needs it, and wait until it is up. Raises CacheError."""
        await self._start_first()
        await self._workers[0].up.wait()

    async def start_others(self) -> None:
        """Start as many further workers as a busy daemon has at least."""
        for _ in range(_MIN_WORKERS - 1):
            await self._grow()

    async def ask(self, request: Request, ahead: Request | None = None) -> Answer:
        """Return the answer to a request, without its body.

        A request `ahead` is sent at the same time, and its body will soon be fetched: by `fetch` of the same url, which
        takes the answer if it is the expected one. Any other is dropped, as is one that nobody fetches.

        Raises TransportError, ssl.SSLCertVerificationError, NotAllowedError; OriginError for a head that is too large;
        CacheError if no process can be started.
        """
        answer = await self._run(request, None, Flow(), ahead=ahead)
        assert answer is not None
        return answer

    async def fetch(self, request: Request, body: Body, flow: Flow, commit: Commit | None = None) -> Answer | None:
        """Return the answer to a request, with its body written to the file if it is as expected.

        Returns None if `commit` refused the body. Raises what `ask` raises, and PartFileError. After it is cancelled or
        fails, nothing more is written, unless the disk hangs.
        """
        return await self._run(request, body, flow, commit)

    async def close(self) -> None:
        """Kill the processes."""
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.wait([self._growing])
        while self._workers:
            await self._workers.pop().end()

    async def _run(
        self,
        request: Request,
        body: Body | None,
        flow: Flow,
        commit: Commit | None = None,
        ahead: Request | None = None,
    ) -> Answer | None:
        await flow.ready()
        worker = await (self._worker_for("") if body is None else self._worker_for(body.parts.path, request.url))
        running = worker.begin(request, body, flow)
        if ahead is not None:
            worker.prime(ahead)
        try:
            with flow.interruptible(running.pause):
                return await running.outcome(commit)
        finally:
            await running.end()

    async def _worker_for(self, path: str, url: str = "") -> "_WorkerProcess":
        """Return the worker that writes to a file or has primed a url, else the one with the fewest requests."""
        while not (alive := [worker for worker in self._workers if not worker.has_ended]):
            await self._start_first()
        self._workers = alive
        for worker in self._workers:
            if worker.writes_to(path) or url in worker.primed:
                return worker
        best = min(self._workers, key=lambda worker: len(worker.requests))
        if len(best.requests) >= _REQUESTS_A_WORKER and len(self._workers) < self._maximum and not self._is_growing:
            self._growing = asyncio.create_task(self._grow(), name="another transport worker")
        return best

    @property
    def _is_growing(self) -> bool:
        return self._growing is not None and not self._growing.done()

    async def _start_first(self) -> None:
        async with self._starting:
            if all(worker.has_ended for worker in self._workers):
                self._workers = [await self._start()]

    async def _grow(self) -> None:
        """Start another worker, if there may be one, and use it once it takes requests."""
        async with self._starting:
            if sum(not worker.has_ended for worker in self._workers) >= self._maximum:
                return
            try:
                worker = await self._start()
            except CacheError as exn:  # the others do all of the work
                log.warning("cannot start another transport worker", cause=exn.message)
                return
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    await worker.up.wait()
                self._workers.append(worker)
            except TimeoutError:
                log.warning("transport worker failed to start", waited_s=_START_LIMIT_S)
            finally:
                if worker not in self._workers:
                    await worker.end()

    async def _start(self) -> "_WorkerProcess":
        try:
            sending, receiving = descriptors.channel()
            with receiving:
                return await self._start_with(sending, receiving.fileno())
        except OSError as exn:
            message = f"cannot start a transport worker ({exn.strerror})"
            raise CacheError(message, remedy=NO_PROCESS_REMEDY) from exn

    async def _start_with(self, files: socket.socket, passed_fd: int) -> "_WorkerProcess":
        # -P keeps the working directory out of the import path; a new session keeps Ctrl-C from reaching the process.
        command = (sys.executable, "-P", "-m", "shardcache.transport.worker", str(os.getpid()), str(passed_fd))
        try:
            _, worker = await asyncio.get_running_loop().subprocess_exec(
                partial(_WorkerProcess, self._distrust, self._ping_s, files),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                start_new_session=True,
                pass_fds=(passed_fd,),
            )
        except BaseException:
            files.close()
            raise
        return worker

    def _distrust(self, before_s: float) -> None:
        """Make all processes distrust idle connections; the clock is the machine's."""
        for worker in self._workers:
            worker.distrust(before_s)


@dataclass(slots=True, eq=False)
class _Running:
    """A request in flight."""

    number: int
    send: Callable[[Message], None]
    flow: Flow
    path: str | None
    received_bytes: int = 0
    _written_bytes: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _paused: bool = False
    _held: bool = False
    _end: Message | None = None

    def pause(self) -> None:
        """Pause until the flow is ready again."""
        if not self._paused and self._end is None:
            self._paused = True
            self.send({"do": "pause", "id": self.number})
            self._changed.set()

    async def outcome(self, commit: Commit | None) -> Answer | None:
        """Return the answer; None if its body was not committed. Raises what `Workers.fetch` raises."""
        while self._end is None:
            await self._changed.wait()
            self._changed.clear()
            if self._paused and self._end is None:
                await self.flow.ready()
                self._paused = False
                self.send({"do": "resume", "id": self.number, "limit_bytes": self.limit_bytes()})
            if self._held and self._end is None:
                self._held = False
                if commit is not None and not await commit():
                    return None
                self.send({"do": "commit", "id": self.number})
        return _result(self._end)

    async def end(self) -> None:
        """Cancel the request if it has not ended, and wait for its end."""
        if self._end is None:
            self.send({"do": "cancel", "id": self.number})
            try:
                async with asyncio.timeout(_END_LIMIT_S):
                    while self._end is None:
                        self._changed.clear()
                        await self._changed.wait()
            except TimeoutError:
                log.warning("cancelled request still writing; the disk may be hung")

    def limit_bytes(self) -> float | None:
        """Return the number of bytes of the body that may be read in all; None for no limit."""
        return None if math.isinf(self.flow.credit_bytes) else self.received_bytes + max(0, self.flow.credit_bytes)

    def receive(self, message: Message) -> None:
        """Handle the worker's message about this request."""
        if message["is"] == "held":
            self._held = True
        else:
            self.progress(message.get("received_bytes", self.received_bytes), self._written_bytes)
            self._end = message
        self._changed.set()

    def progress(self, received_bytes: int, written_bytes: int) -> None:
        """Record the numbers of bytes of the body received and written so far."""
        more_bytes = received_bytes - self.received_bytes
        if more_bytes > 0:  # two threads' reports may come in the wrong order
            self.received_bytes = received_bytes
            self.flow.received(more_bytes)
        if written_bytes > self._written_bytes:
            self._written_bytes = written_bytes
            self.flow.written(written_bytes)


class _WorkerProcess(asyncio.SubprocessProtocol):
    """One worker process."""

    def __init__(self, silent: Callable[[float], None], ping_s: float, files: socket.socket) -> None:
        self._silent = silent  # called when an idle connection stays silent, with the time of the request
        self._ping_s = ping_s  # interval of pings while there are requests
        self._files = files  # for descriptors of files without a name
        self._pings = 0  # sent since its last message
        self._pinging = False
        self.requests: dict[int, _Running] = {}  # in flight
        self.primed = deque[str](maxlen=2 * _REQUESTS_A_WORKER)  # latest urls whose bodies have not been asked for
        self.up = asyncio.Event()  # set once it takes requests, or has ended
        self.has_ended = False
        self._exited = asyncio.Event()
        self._numbers = count()
        self._partial_line = b""
        self._process: asyncio.SubprocessTransport
        self._input: asyncio.WriteTransport

    def writes_to(self, path: str) -> bool:
        """Return whether a request in flight writes to a file."""
        return bool(path) and any(path == running.path for running in self.requests.values())

    def begin(self, request: Request, body: Body | None, flow: Flow) -> _Running:
        """Send a request. Raises TransportError if the descriptor of its file cannot be sent."""
        file = {} if body is None else self._send_descriptor(body.parts)
        running = _Running(next(self._numbers), self._send, flow, None if body is None else body.parts.path)
        self.requests[running.number] = running
        if body is not None and request.url in self.primed:
            self.primed.remove(request.url)
        if not self._pinging:
            self._pings, self._pinging = -1, True
            self._ping()
        what = {"limit_bytes": running.limit_bytes(), "prompt": flow.prompt, **request_to_json(request, body)}
        self._send({"do": "ask", "id": running.number, **what, **file})
        return running

    def _send_descriptor(self, parts: Parts) -> Message:
        """Send the descriptor of a file without a name; return what the message for which it is sent says of it."""
        if parts.fd is None:
            return {}
        try:
            return {"file": descriptors.send(self._files, parts.fd)}
        except OSError as exn:  # the worker has just ended, or is far behind: a retry helps
            raise TransportError(f"the transport worker takes no file ({exn.strerror})") from exn

    def prime(self, request: Request) -> None:
        """Send a request ahead."""
        self.primed.append(request.url)
        self._send({"do": "prime", **request_to_json(request, None)})

    def distrust(self, before_s: float) -> None:
        """Close connections that have been idle since before `before_s`."""
        self._send({"do": "distrust", "before_s": before_s})

    async def end(self) -> None:
        """Kill the process."""
        if not self.has_ended:
            self.has_ended = True
            self._process.kill()
        await self._exited.wait()
        self._process.close()

    def _send(self, message: Message) -> None:
        if not self._input.is_closing():
            self._input.write(encoded(message))

    # asyncio.SubprocessProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the process and its input."""
        self._process = cast(asyncio.SubprocessTransport, transport)
        self._input = cast(asyncio.WriteTransport, self._process.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Handle each complete message."""
        self._pings = 0
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._take(decoded(line))

    def process_exited(self) -> None:
        """Fail the requests in flight: the process was killed."""
        if not self.has_ended:
            log.warning("a transport worker was killed", requests=len(self.requests))
        self.has_ended = True
        self.up.set()
        self._exited.set()
        self._files.close()
        while self.requests:
            _, running = self.requests.popitem()
            running.receive({"is": "failed", "reason": "the transport worker was killed"})

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the pipes of a process that has exited by itself."""
        self._process.close()

    def _ping(self) -> None:
        """Kill the process if it does not respond: requests fail with it, and are repeated by another.

        Counts pings, not time: if this process was stopped itself, the answers wait to be read.
        """
        self._pinging = bool(self.requests) and not self.has_ended
        if not self._pinging:
            return
        if self._pings < (_PINGS if self.up.is_set() else _STARTING_PINGS):
            self._pings += 1
            self._send({"do": "ping"})
            asyncio.get_running_loop().call_later(self._ping_s, self._ping)
        else:
            log.warning("a transport worker does not respond; replacing it", requests=len(self.requests))
            self.has_ended = True
            self._process.kill()

    def _take(self, message: Message) -> None:
        match message["is"]:
            case "progress":
                for number, *counts in message["counts"]:
                    if number in self.requests:
                        self.requests[number].progress(*counts)
            case "silent":
                self._silent(message["asked_s"])
            case "up":
                self.up.set()
            case kind:
                number = message["id"]
                running = self.requests.get(number) if kind == "held" else self.requests.pop(number, None)
                if running is not None:
                    running.receive(message)


def _result(message: Message) -> Answer:
    match message["is"]:
        case "answer":
            return Answer.from_json(message["answer"])
        case "disk":
            raise PartFileError(OSError(message["errno"], message["reason"]))
        case "near":
            raise NotAllowedError(
                message["reason"], remedy="if that is intended, the node's operator can add the url's prefix to --allow"
            )
        case "head":
            raise OriginError(message["reason"], remedy=HEAD_REMEDY)
        case "certificate":
            raise ssl.SSLCertVerificationError(errno.EPROTO, message["reason"])
        case _:
            raise TransportError(message.get("reason", "cancelled"))
