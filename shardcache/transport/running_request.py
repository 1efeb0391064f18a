"""A request in flight in a transport worker, as the daemon sees it.

`WorkerProcess` creates a `RunningRequest` for each request that it sends to its worker, and passes
it the worker's messages. `Workers` awaits its outcome. The request's flow pauses it and gives it
byte credit, which is the number of bytes that may be read. A held body waits in the worker's memory
until it is committed, that is, until the daemon allows it to be written.
"""

import asyncio
import errno
import math
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from shardcache.shared.exceptions import NotAllowedError, OriginError
from shardcache.telemetry.logs import SharedLogger
from shardcache.transport.between.flow import Commit, Flow
from shardcache.transport.between.messages import Answer, Message
from shardcache.transport.between.parts import PartFileError
from shardcache.transport.http.http_heads import HEAD_REMEDY

log = SharedLogger()

# Longest wait for a cancelled request to end. A write that hangs with its disk must not block the
# daemon. It is safe to leave the write alone: if it completes later, it writes the right bytes in
# the right place.
_END_LIMIT_S = 2.0

# Remedy for a url whose host name leads to this node or to its cloud's metadata service.
_NEAR_REMEDY = "if that is intended, the node's operator can add the url's prefix to --allow"


class TransportError(OSError):
    """A connection failed, or the answer was not HTTP."""


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request in flight.

    Attributes:
        number: identifies the request in messages to and from its worker.
        send: sends a message to the worker.
        flow: pauses the request, grants its byte credit, and receives its progress.
        path: path of the file that its body is written to; None for no body, empty for a file
            without a name.
        received_bytes: number of bytes of the body received so far.
    """

    number: int
    send: Callable[[Message], None]
    flow: Flow
    path: str | None
    received_bytes: int = 0
    _written_bytes: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_paused: bool = False  # True from a pause until the flow is ready
    _is_held: bool = False  # True from when a held body has arrived until `commit` is called
    _last_message: Message | None = None  # how the request has ended; None while it runs

    def pause(self) -> None:
        """Pause until the flow is ready again."""
        if not self._is_paused and self._last_message is None:
            self._is_paused = True
            self.send({"do": "pause", "id": self.number})
            self._changed.set()

    async def outcome(self, commit: Commit | None) -> Answer | None:
        """Wait until the request ends, and return its answer.

        Args:
            commit: called when a held body has arrived. If it returns False, the body is dropped
                and the outcome is None. None to write the body in any case.

        Raises what `Workers.fetch` raises.
        """
        while self._last_message is None:
            await self._changed.wait()
            self._changed.clear()

            # 1. The request is paused, as its flow has no byte credit or no connection slot. It is
            #    resumed once the flow is ready.
            if self._is_paused and self._last_message is None:
                await self.flow.ready()
                self._is_paused = False
                limit_bytes = self.limit_bytes()
                self.send({"do": "resume", "id": self.number, "limit_bytes": limit_bytes})
            # 2. The whole body has arrived in the worker's memory, and waits to be committed.
            if self._is_held and self._last_message is None:
                self._is_held = False
                if commit is not None and not await commit():
                    return None
                self.send({"do": "commit", "id": self.number})
        return _result(self._last_message)

    async def end(self) -> None:
        """Cancel the request if it has not ended, and wait for its end."""
        if self._last_message is not None:
            return
        self.send({"do": "cancel", "id": self.number})
        try:
            async with asyncio.timeout(_END_LIMIT_S):
                while self._last_message is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("cancelled request still writing; the disk may be hung")

    def limit_bytes(self) -> float | None:
        """Return how many bytes of the body may be read in total; None for no limit."""
        if math.isinf(self.flow.credit_bytes):
            return None
        return self.received_bytes + max(0, self.flow.credit_bytes)

    def receive(self, message: Message) -> None:
        """Handle the worker's message that the body is held, or that the request has ended."""
        if message["is"] == "held":
            self._is_held = True
        else:
            received_bytes = message.get("received_bytes", self.received_bytes)
            self.record_progress(received_bytes, self._written_bytes, message.get("first_byte_s"))
            self._last_message = message
        self._changed.set()

    def record_progress(
        self,
        received_bytes: int,
        written_bytes: int,
        first_byte_s: float | None,
    ) -> None:
        """Record the progress of the body.

        Args:
            received_bytes: total number of bytes received so far.
            written_bytes: total number of bytes written so far.
            first_byte_s: when the first byte was received, by the monotonic clock; None if none
                was.
        """
        # Several threads of the worker report progress, so an older report may come after a newer
        # one, and is ignored.
        more_bytes = received_bytes - self.received_bytes
        if more_bytes > 0:
            self.received_bytes = received_bytes
            self.flow.received(more_bytes, first_byte_s)
        if written_bytes > self._written_bytes:
            self._written_bytes = written_bytes
            self.flow.written(written_bytes)


def _result(message: Message) -> Answer:
    """Return the answer in a request's last message, or raise the error that is reported there."""
    match message["is"]:
        case "answer":
            return Answer.from_json(message["answer"])
        case "disk":
            raise PartFileError(OSError(message["errno"], message["reason"]))
        case "near":
            raise NotAllowedError(message["reason"], remedy=_NEAR_REMEDY)
        case "head":
            raise OriginError(message["reason"], remedy=HEAD_REMEDY)
        case "certificate":
            raise ssl.SSLCertVerificationError(errno.EPROTO, message["reason"])
        case _:
            raise TransportError(message.get("reason", "cancelled"))
