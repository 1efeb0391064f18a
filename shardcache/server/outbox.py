"""Answers of a session, sent together while there are several."""

import asyncio
from collections.abc import Iterable, Sequence

from aiohttp import web

from shardcache.shared import protocol
from shardcache.shared.protocol import Json
from shardcache.telemetry.logs import SharedLogger

log = SharedLogger()

# Answers that wait while the client reads earlier ones. With more, `send` does not return.
_MAX_WAITING = 256


class Outbox:
    """Sends answers to a client, all of one turn of the event loop in one message.

    Args:
        socket: the client's connection.
        bundles: True if the client accepts messages of type `bundle`.

    Attributes:
        is_gone: True once the client has disconnected.
    """

    def __init__(self, socket: web.WebSocketResponse, *, bundles: bool) -> None:
        self.is_gone = False
        self._socket = socket
        self._bundles = bundles
        self._waiting: list[Json] = []
        self._sending = asyncio.Lock()

    async def send(self, answers: Iterable[Json]) -> None:
        """Send answers, together with those that come soon after.

        Returns once they are sent, or another call is about to send them; but not before the client
        has read enough of earlier ones.
        """
        self._waiting += answers
        is_sent_by_another_call = self._sending.locked()
        if is_sent_by_another_call and len(self._waiting) < _MAX_WAITING:
            return
        async with self._sending:
            if self._bundles:
                await asyncio.sleep(0)  # other requests of this turn add their answers
            while self._waiting:
                waiting = self._waiting
                self._waiting = []
                await self._send_all(waiting)

    async def _send_all(self, answers: Sequence[Json]) -> None:
        """Send answers, in a bundle if there are several and the client accepts one."""
        if len(answers) == 1 or not self._bundles:
            for answer in answers:
                await self._send(answer)
            return
        # Answers with packed bytes are binary messages, each by itself.
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
            data = protocol.written(message)
            if "packed" in message:
                await self._socket.send_bytes(data)
            else:
                await self._socket.send_str(data.decode())
        except ConnectionError:
            log.debug("reader disconnected before its answer")
            self.is_gone = True
