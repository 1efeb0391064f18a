"""The daemon's side of one transport worker: its process, and the messages to and from it."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import cast

from shardcache.telemetry.logs import SharedLogger
from shardcache.transport.between import descriptors
from shardcache.transport.between.flow import Flow
from shardcache.transport.between.messages import (
    Body,
    Message,
    Request,
    decoded,
    encoded,
    request_to_json,
)
from shardcache.transport.between.parts import Parts
from shardcache.transport.running_request import RunningRequest, TransportError

log = SharedLogger()

# A worker that leaves more pings in a row unanswered counts as hung. One that is still starting
# gets more time.
_MAX_UNANSWERED = 3
_MAX_UNANSWERED_STARTING = 60
_MIN_PING_S = 1.0
# Requests that were sent ahead, and whose bodies nobody has asked for: the latest are remembered.
_MAX_PRIMED = 8
_STDIN = 0


def ping_interval_s(silence_s: float) -> float:
    """Return the interval of pings by which a hung worker is found within `silence_s`."""
    return max(_MIN_PING_S, silence_s / (_MAX_UNANSWERED + 1))


class WorkerProcess(asyncio.SubprocessProtocol):
    """One worker process.

    Args:
        report_silence: called when an idle connection stays silent, with the time of the request
            over it, by the monotonic clock.
        ping_s: interval of pings while there are requests.
        files: socket for descriptors of files without a name.

    Attributes:
        requests: those in flight, by number.
        primed: the latest urls whose bodies have not been asked for.
        up: set once it takes requests, or has ended.
    """

    def __init__(
        self,
        report_silence: Callable[[float], None],
        ping_s: float,
        files: socket.socket,
    ) -> None:
        self._report_silence = report_silence
        self._ping_s = ping_s
        self._files = files
        self._unanswered_pings = 0  # sent since its last message
        self._is_pinging = False
        self.requests: dict[int, RunningRequest] = {}
        self.primed = deque[str](maxlen=_MAX_PRIMED)
        self.up = asyncio.Event()
        self.has_ended = False
        self._exited = asyncio.Event()
        self._numbers = count()
        self._partial_line = b""
        self._process: asyncio.SubprocessTransport
        self._input: asyncio.WriteTransport

    def writes_to(self, path: str) -> bool:
        """Return whether a request in flight writes to a file; never for an empty path."""
        if not path:
            return False
        return any(path == running.path for running in self.requests.values())

    def begin(self, request: Request, body: Body | None, flow: Flow) -> RunningRequest:
        """Send a request. Raises TransportError if the descriptor of its file cannot be sent."""
        file: Message = {}
        path = None
        if body is not None:
            file = self._send_descriptor(body.parts)
            path = body.parts.path
        running = RunningRequest(next(self._numbers), self._send, flow, path)
        self.requests[running.number] = running
        if body is not None and request.url in self.primed:
            self.primed.remove(request.url)

        if not self._is_pinging:
            # The first one goes out with the request, too soon to be answered.
            self._unanswered_pings = -1
            self._is_pinging = True
            self._ping()
        message = {
            "do": "ask",
            "id": running.number,
            "limit_bytes": running.limit_bytes(),
            "prompt": flow.prompt,
            **request_to_json(request, body),
            **file,
        }
        self._send(message)
        return running

    def _send_descriptor(self, parts: Parts) -> Message:
        """Send the descriptor of a file without a name; return what the message says of it."""
        if parts.fd is None:
            return {}
        try:
            return {"file": descriptors.send(self._files, parts.fd)}
        except OSError as exn:  # the worker has just ended, or is far behind: a retry helps
            raise TransportError(f"the transport worker takes no file ({exn.strerror})") from exn

    def prime(self, request: Request) -> None:
        """Send a request ahead of the `begin` that asks for its body."""
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
        self._input = cast(asyncio.WriteTransport, self._process.get_pipe_transport(_STDIN))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Handle each complete message."""
        self._unanswered_pings = 0
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._take(decoded(line))

    def process_exited(self) -> None:
        """Fail the requests in flight: the process was killed."""
        if not self.has_ended:
            log.warning("transport worker was killed", requests=len(self.requests))
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
        """Ping the process at intervals while it has requests; kill it if it does not respond.

        Its requests then fail, and are sent again by another process. Pings are counted, not time:
        if this process itself was stopped, the answers wait to be read.
        """
        self._is_pinging = bool(self.requests) and not self.has_ended
        if not self._is_pinging:
            return
        max_unanswered = _MAX_UNANSWERED if self.up.is_set() else _MAX_UNANSWERED_STARTING
        if self._unanswered_pings < max_unanswered:
            self._unanswered_pings += 1
            self._send({"do": "ping"})
            asyncio.get_running_loop().call_later(self._ping_s, self._ping)
        else:
            log.warning(
                "transport worker is not responding; replacing it",
                requests=len(self.requests),
            )
            self.has_ended = True
            self._process.kill()

    def _take(self, message: Message) -> None:
        """Handle a message of the worker."""
        match message["is"]:
            case "progress":
                for number, received_bytes, written_bytes in message["counts"]:
                    if number in self.requests:
                        self.requests[number].progress(received_bytes, written_bytes)
            case "silent":
                self._report_silence(message["asked_s"])
            case "up":
                self.up.set()
            case "held":
                running = self.requests.get(message["id"])
                if running is not None:
                    running.receive(message)
            case _:  # the end of a request
                running = self.requests.pop(message["id"], None)
                if running is not None:
                    running.receive(message)
