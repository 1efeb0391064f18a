"""Outgoing messages of a session, of which those that come at the same time are sent together.

A bundle is a message that contains several messages. A turn of the event loop is one iteration, in
which the loop runs all tasks that are ready.
"""

import asyncio
from collections.abc import Iterable, Sequence

from aiohttp import web

from shardcache.shared import protocol
from shardcache.shared.protocol import Json
from shardcache.telemetry.logs import SharedLogger

log = SharedLogger()

# Maximum number of answers that wait while the client reads earlier answers. Once it is reached,
# `send` waits as well.
_MAX_WAITING = 256


class Outbox:
    """Sends answers to a client: all answers of one turn of the event loop in one message.

    Args:
        socket: the client's connection.
        accepts_bundles: True if the client accepts messages of type `bundle`.

    Attributes:
        is_gone: True once the client has disconnected.
    """

    def __init__(self, socket: web.WebSocketResponse, *, accepts_bundles: bool) -> None:
        self.is_gone = False
        self._socket = socket
        self._accepts_bundles = accepts_bundles
        self._waiting: list[Json] = []
        self._send_lock = asyncio.Lock()

    async def send(self, answers: Iterable[Json]) -> None:
        """Send answers, together with those that other calls add soon after.

        Returns once the answers are sent, or another call is about to send them. If too many
        answers wait, it does not return before the client has read earlier answers.
        """
        self._waiting += answers
        another_call_sends = self._send_lock.locked()
        if another_call_sends and len(self._waiting) < _MAX_WAITING:
            return
        async with self._send_lock:
            if self._accepts_bundles:
                # Other requests that are handled in this turn add their answers during the sleep.
                await asyncio.sleep(0)
            while self._waiting:
                batch = self._waiting
                self._waiting = []
                await self._send_batch(batch)

    async def _send_batch(self, answers: Sequence[Json]) -> None:
        """Send answers, in a bundle if there are several and the client accepts bundles."""
        if len(answers) == 1 or not self._accepts_bundles:
            for answer in answers:
                await self._send(answer)
            return
        # An answer with packed bytes is a binary message, so it cannot be in a bundle.
        bundled = [answer for answer in answers if "packed" not in answer]
        if bundled:
            await self._send({"type": "bundle", "messages": bundled})
        for answer in answers:
            if "packed" in answer:
                await self._send(answer)

    async def _send(self, message: Json) -> None:
        """Send one message, unless the client has disconnected."""
        if self.is_gone or self._socket.closed:
            return
        try:
            encoded = protocol.written(message)
            if "packed" in message:
                await self._socket.send_bytes(encoded)
            else:
                await self._socket.send_str(encoded.decode())
        except ConnectionError:
            log.debug("reader disconnected before its answer")
            self.is_gone = True
