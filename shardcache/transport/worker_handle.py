"""The daemon's side of one transport worker: its process, and the messages to and from it.

`Workers` creates a `WorkerProcess` for each worker and gives it requests. Messages go to the
worker's standard input and come from its standard output, each as a line of JSON. A message to the
worker names a command in its field "do"; a message from the worker names an event in "is".

A request is primed if it was sent ahead of the request for its body, so that the answer is already
on its way. Byte credit is the number of bytes of a body that may be read.
"""

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

# A worker that leaves this many pings in a row unanswered counts as hung at the next ping. A worker
# that is still starting gets more time.
_MAX_UNANSWERED = 3
_MAX_UNANSWERED_STARTING = 60
_MIN_PING_S = 1.0
# Number of the latest primed requests that are remembered until their bodies are requested.
_MAX_PRIMED = 8
_STDIN = 0


def ping_interval_s(silence_s: float) -> float:
    """Return the interval of pings by which a hung worker is noticed within `silence_s`."""
    return max(_MIN_PING_S, silence_s / (_MAX_UNANSWERED + 1))


class WorkerProcess(asyncio.SubprocessProtocol):
    """One worker process.

    Args:
        report_silence: called with the time when a request was sent, by the monotonic clock, if the
            server gave no answer to it over a reused connection.
        ping_s: interval of pings while there are requests.
        files_socket: socket over which the worker gets the descriptors of files that have no name.

    Attributes:
        requests: the requests in flight, by number.
        primed: urls of the latest primed requests whose bodies have not been requested so far.
        started_or_ended: set once the worker takes requests, or has ended.
        has_ended: True once the process was killed or has exited.
    """

    def __init__(
        self,
        report_silence: Callable[[float], None],
        ping_s: float,
        files_socket: socket.socket,
    ) -> None:
        self._report_silence = report_silence
        self._ping_s = ping_s
        self._files_socket = files_socket
        self._unanswered_pings = 0  # number of pings sent since the worker's last message
        self._is_pinging = False
        self.requests: dict[int, RunningRequest] = {}
        self.primed = deque[str](maxlen=_MAX_PRIMED)
        self.started_or_ended = asyncio.Event()
        self.has_ended = False
        self._exited = asyncio.Event()
        self._numbers = count()
        self._partial_line = b""
        self._process: asyncio.SubprocessTransport
        self._input: asyncio.WriteTransport

    def writes_to(self, path: str) -> bool:
        """Return whether a request in flight writes to the file at a path.

        An empty path stands for a file without a name; the result is then False.
        """
        if not path:
            return False
        return any(path == running.path for running in self.requests.values())

    def begin(self, request: Request, body: Body | None, flow: Flow) -> RunningRequest:
        """Send a request to the worker, and return it as a request in flight.

        Args:
            body: the expected body and its destination; None if no body is to be written.
            flow: pauses the request and grants its byte credit.

        Raises TransportError if the descriptor of the body's file cannot be sent.
        """
        file_field: Message = {}
        path = None
        if body is not None:
            file_field = self._send_descriptor(body.parts)
            path = body.parts.path
        running = RunningRequest(next(self._numbers), self._send, flow, path)
        self.requests[running.number] = running
        if body is not None and request.url in self.primed:
            self.primed.remove(request.url)

        self._start_pinging()
        message = {
            "do": "ask",
            "id": running.number,
            "limit_bytes": running.limit_bytes(),
            "prompt": flow.prompt,
            **request_to_json(request, body),
            **file_field,
        }
        self._send(message)
        return running

    def _send_descriptor(self, parts: Parts) -> Message:
        """Send the descriptor of the parts' file, if the file has no name.

        Return the field of the request's message that identifies the file, or no field.
        """
        if parts.fd is None:
            return {}
        try:
            return {"file": descriptors.send(self._files_socket, parts.fd)}
        except OSError as exn:
            # The worker has just ended, or is far behind with its work. A retry helps in both
            # cases, so the error is one that is retried.
            raise TransportError(f"the transport worker takes no file ({exn.strerror})") from exn

    def _start_pinging(self) -> None:
        """Ping the process from now on, unless it is pinged already."""
        if not self._is_pinging:
            # The first ping goes out together with the worker's first request, too early for a
            # timely answer, so it is not counted.
            self._unanswered_pings = -1
            self._is_pinging = True
            self._ping()

    def prime(self, request: Request) -> None:
        """Send a request ahead of the call of `begin` that requests its body."""
        self.primed.append(request.url)
        self._send({"do": "prime", **request_to_json(request, body=None)})

    def distrust(self, before_s: float) -> None:
        """Have the worker close its connections that have been idle since before `before_s`."""
        self._send({"do": "distrust", "before_s": before_s})

    async def end(self) -> None:
        """Kill the process, and wait until it has exited."""
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
            self._handle(decoded(line))

    def process_exited(self) -> None:
        """Fail the requests in flight, as no answer to them will come."""
        if not self.has_ended:
            log.warning("transport worker was killed", requests=len(self.requests))
        self.has_ended = True
        self.started_or_ended.set()
        self._exited.set()
        self._files_socket.close()
        while self.requests:
            _, running = self.requests.popitem()
            running.receive({"is": "failed", "reason": "the transport worker was killed"})

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the pipes of a process that has exited by itself."""
        self._process.close()

    def _ping(self) -> None:
        """Ping the process at intervals while it has requests; kill it if it does not respond.

        The requests of a killed process fail, and are sent again by another worker. Unanswered
        pings are counted rather than time: if the daemon itself was stopped for a while, the
        worker's answers are still waiting to be read.
        """
        self._is_pinging = bool(self.requests) and not self.has_ended
        if not self._is_pinging:
            return
        has_started = self.started_or_ended.is_set()
        max_unanswered = _MAX_UNANSWERED if has_started else _MAX_UNANSWERED_STARTING
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

    def _handle(self, message: Message) -> None:
        """Handle a message from the worker."""
        match message["is"]:
            case "progress":
                for number, received_bytes, written_bytes, first_byte_s in message["counts"]:
                    running = self.requests.get(number)
                    if running is not None:
                        running.record_progress(received_bytes, written_bytes, first_byte_s)
            case "silent":
                self._report_silence(message["asked_s"])
            case "up":
                self.started_or_ended.set()
            case "held":  # a body has arrived and waits to be committed
                running = self.requests.get(message["id"])
                if running is not None:
                    running.receive(message)
            case _:  # every other message reports the end of a request
                running = self.requests.pop(message["id"], None)
                if running is not None:
                    running.receive(message)
