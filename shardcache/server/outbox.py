"""Answers of a session, sent together while there are several."""

import asyncio
from collections.abc import Iterable, Sequence

from aiohttp import web

from shardcache.shared import protocol
from shardcache.shared.protocol import Json
from shardcache.telemetry.logs import SharedLogger

log = SharedLogger()

# Answers that may wait while the client reads earlier ones.
_MAX_WAITING = 256


class Outbox:
    """Sends answers to a client, those of one turn of the event loop by one message.

    Args:
        bundles: whether the client takes a `bundle`.

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
        """Send answers, with those that come soon after.

        Returns when it is sent, or another call is about to send it; no sooner than the client has
        read enough of those before.
        """
        self._waiting += answers
        if self._sending.locked() and len(self._waiting) < _MAX_WAITING:
            return
        async with self._sending:
            if self._bundles:
                await asyncio.sleep(0)
            while self._waiting:
                together = self._waiting
                self._waiting = []
                await self._send_all(together)

    async def _send_all(self, answers: Sequence[Json]) -> None:
        is_alone = len(answers) == 1 or not self._bundles
        together = [] if is_alone else [each for each in answers if "packed" not in each]
        if together:
            await self._send({"type": "bundle", "messages": together})
        for answer in answers:
            if not together or "packed" in answer:
                await self._send(answer)

    async def _send(self, message: Json) -> None:
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
