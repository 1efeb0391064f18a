"""A server that speaks enough S3 to give zeros, and knows what it could send, to how many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from support.stores.faulty_s3 import S3Server

_CHUNK = bytes(64 * 1024)


@dataclass(slots=True)
class GaugedS3(S3Server):
    """Serves one bucket, `gauged`, over plain HTTP on a free port; use it as `async with`.

    Attributes:
        pauses: keys whose answers stop after so many bytes of the body, until `go_on`.
    """

    bucket = "gauged"
    sizes: dict[str, int] = field(default_factory=dict)  # of the objects, by key
    pauses: dict[str, int] = field(default_factory=dict)
    capacity: int | None = None  # requests at a time; more are refused with 503 SlowDown. None takes all
    requests: list[tuple[str, int]] = field(default_factory=list)  # (key, first byte) of every GET
    refused: int = 0  # how many of them were
    sent_bytes: Counter[str] = field(default_factory=Counter)  # of bodies, by key, as far as the kernel took them
    at_once: int = 0  # requests that are being answered now; `most_at_once` ever
    most_at_once: int = 0
    _gates: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aexit__(self, *_: object) -> None:
        for key in list(self._gates):
            self.go_on(key)
        await S3Server.__aexit__(self)

    def put(self, key: str, size_bytes: int, *, pause_after: int | None = None) -> str:
        """Make an object of zeros; return its s3:// url."""
        self.sizes[key] = size_bytes
        if pause_after is not None:
            self.pauses[key] = pause_after
        return f"s3://{self.bucket}/{key}"

    def go_on(self, key: str) -> None:
        """Let the answers continue that were stopped by now."""
        self._gates.pop(key, asyncio.Event()).set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        key = request.match_info["key"]
        size = self.sizes[key]
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        start, stop = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        answer = web.StreamResponse(status=206 if match else 200, headers={"ETag": f'"{size}"'})
        answer.content_length = stop - start
        if match:
            answer.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if request.method == "HEAD":
            return answer
        self.requests.append((key, start))
        if self.capacity is not None and self.at_once >= self.capacity:
            self.refused += 1
            self._note()
            return web.Response(status=503, text="<Error><Code>SlowDown</Code></Error>", content_type="application/xml")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self._note()
        with contextlib.suppress(ConnectionError):  # the client went away
            await self._send(request, answer, key, stop - start, self._gates[key])
        self.at_once -= 1
        self._note()
        return answer

    async def _send(
        self, request: web.Request, answer: web.StreamResponse, key: str, size_bytes: int, gate: asyncio.Event
    ) -> None:
        assert request.transport is not None
        # Little room in the kernel: what the client does not read shall soon stop the sender.
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(_CHUNK))
        await answer.prepare(request)
        pause_after, sent = self.pauses.get(key, size_bytes), 0
        while sent < size_bytes:
            if sent == pause_after:
                await gate.wait()
            count = min(len(_CHUNK), (pause_after if sent < pause_after else size_bytes) - sent)
            await answer.write(_CHUNK[:count])
            sent += count
            self.sent_bytes[key] += count
            self._note()
