"""A server that speaks enough S3 and HTTP to serve objects, and breaks its word whenever it is told to."""

import asyncio
import base64
import contextlib
import enum
import functools
import gzip
import hashlib
import re
import socket
import ssl
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from aiohttp import web
from awscrt import checksums

from support.stores import aws_env

BUCKET = "faulty"


class Fault(enum.StrEnum):
    STALL = "half of the body, then nothing"
    TRICKLE = "the body at a hundredth of its size per tenth of a second"
    SILENCE = "no answer at all"
    LATE = "no answer until `answer_late`"
    RESET = "half of the body, then the connection is reset"
    TRUNCATE = "half of the body, then the connection is closed in good order"
    SLOW_DOWN = "503 SlowDown"
    SERVER_ERROR = "500 InternalError"
    FORBIDDEN = "403 AccessDenied"
    EXPIRED = "400 ExpiredToken"
    WRONG_RANGE = "another Content-Range than was asked for"
    IGNORE_RANGE = "200 and the whole object"
    WRONG_ETAG = "another ETag than was asked for, against If-Match"
    REPLACED = "the object is replaced just before it is read"
    CORRUPT = "one bit differs"
    ENCODED = "the body compressed on the way, against Accept-Encoding"


_REFUSALS = {
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.SERVER_ERROR: (500, "InternalError"),
    Fault.FORBIDDEN: (403, "AccessDenied"),
    Fault.EXPIRED: (400, "ExpiredToken"),
}


@dataclass(slots=True)
class Rule:
    """A fault for the next `times` requests for an object, of one method and, if given, of one first byte."""

    key: str
    fault: Fault
    times: int
    method: str
    start: int | None

    def takes(self, method: str, key: str, start: int | None) -> bool:
        return self.times > 0 and (self.method, self.key) == (method, key) and self.start in (None, start)


@dataclass(slots=True)
class S3Server:
    """Serves one bucket over HTTP on a free port, as `_answer` says; use it as `async with`."""

    context: ssl.SSLContext | None = None  # for https; None for plain HTTP
    front: Path | None = None  # Unix socket where it answers as well, as a tier does
    bucket: ClassVar[str]
    endpoint_url: str = field(default="", init=False)
    _runner: web.AppRunner | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", f"/{self.bucket}/{{key:.+}}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self.context)
        await site.start()
        if self.front is not None:
            await web.UnixSite(self._runner, str(self.front)).start()
        self.endpoint_url = f"http{'s' * (self.context is not None)}://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        for connection in self._runner.server.connections:  # unsent bytes would keep it open beyond the loop's end
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    def env(self) -> dict[str, str]:
        return aws_env(self.endpoint_url)

    def http_url(self, key: str) -> str:
        return f"{self.endpoint_url}/{self.bucket}/{key}"


@dataclass(slots=True)
class FaultyS3(S3Server):
    """Serves one bucket, `faulty`, over HTTP on a free port; use it as `async with`.

    Attributes:
        seen: (method, key, Range, If-Match) of every request.
        askers: id of the AWS key that signed each request, or "".
        refreshed: Range of each request that a tier has to answer past its cache.
        detoured: Range of each request that a tier has to send to another owner.
    """

    bucket = BUCKET
    access_key: str | None = None  # the only one that is taken; others get ExpiredToken. None takes all
    permits: dict[str, str] = field(default_factory=dict)  # how keys begin that each id of AWS's may read; {}: all
    ranges: bool = True  # whether Range is honoured
    lengths: bool = True  # whether Content-Length is sent with bodies; without, they come in chunks
    encoding: str | None = None  # the Content-Encoding that objects were stored with
    validators: tuple[str, ...] = ("ETag",)  # headers that tell versions apart, of "ETag" and "Last-Modified"
    crc32c: bool = False  # whether HEAD tells the objects' CRC32C
    seen: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    hosts: list[str | None] = field(default_factory=list)  # Host of every request
    askers: list[str] = field(default_factory=list)
    refreshed: list[str | None] = field(default_factory=list)
    detoured: list[str | None] = field(default_factory=list)
    owner: str | None = "10.0.0.1:9081"  # the tier's answer to questions about owners; None if the owner is silent
    owner_has_parts: bool = True  # whether the owner has requests in hand, as it says
    owner_is_slow: bool = False  # whether no owner says that it lives
    passes_on: bool = False  # whether refusals are those of an object store, passed on by a tier
    questions: Counter[str] = field(default_factory=Counter)  # those questions, by kind
    _objects: dict[str, bytes] = field(default_factory=dict)
    _rules: list[Rule] = field(default_factory=list)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    _late: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        self._late.set()
        await S3Server.__aexit__(self)

    def put(self, key: str, body: bytes) -> str:
        self._objects[key] = body
        return f"s3://{self.bucket}/{key}"

    def remove(self, key: str) -> None:
        del self._objects[key]

    def answer_late(self) -> None:
        self._late.set()

    def fail(self, key: str, fault: Fault, *, times: int = 1, method: str = "GET", start: int | None = None) -> None:
        """Break the next `times` answers for an object; `start` picks the range that begins there."""
        self._rules.append(Rule(key, fault, times, method, start))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if question := request.headers.get("X-Shardcache-Owner"):
            return await self._about_owner(question, is_detour="X-Shardcache-Detour" in request.headers)
        key, asked = request.match_info["key"], request.headers.get("Range")
        self.seen.append((request.method, key, asked, request.headers.get("If-Match")))
        self.hosts.append(request.headers.get("Host"))
        self.askers.append(_asker(request))
        if "X-Shardcache-Fresh" in request.headers:
            self.refreshed.append(asked)
        if "X-Shardcache-Detour" in request.headers:
            self.detoured.append(asked)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "")
        fault = self._fault(request.method, key, int(match[1]) if match else None)
        if fault is Fault.REPLACED:
            self._objects[key] = self._objects[key][::-1]
        if fault is Fault.LATE:
            await self._late.wait()
        if fault is Fault.SILENCE:
            await self._closing.wait()
        if fault in _REFUSALS:
            refusal = _refusal(request, *_REFUSALS[fault])
            refusal.headers.update({"X-Shardcache-Tier": "MISS"} if self.passes_on else {})
            return refusal
        if self.access_key and f"Credential={self.access_key}/" not in request.headers.get("Authorization", ""):
            return _refusal(request, 400, "ExpiredToken")
        if self.permits and not self._is_permitted(request, key):
            return _refusal(request, 403, "AccessDenied")
        if key not in self._objects:
            return _refusal(request, 404, "NoSuchKey")
        body = self._objects[key]
        if fault is not Fault.WRONG_ETAG and request.headers.get("If-Match") not in (None, _etag(body)):
            return _refusal(request, 412, "PreconditionFailed")
        headers = self._headers(body, fault)
        status = 200
        if match and self.ranges and fault is not Fault.IGNORE_RANGE:
            start, stop = int(match[1]), min(int(match[2]) + 1, len(body))
            if start >= len(body):
                return web.Response(status=416, headers={"Content-Range": f"bytes */{len(body)}"})
            shift = 1 if fault is Fault.WRONG_RANGE else 0
            headers["Content-Range"] = f"bytes {start + shift}-{stop - 1 + shift}/{len(body)}"
            status, body = 206, body[start:stop]
        return await self._send(request, status, headers, body, fault)

    def _is_permitted(self, request: web.Request, key: str) -> bool:
        asker = _asker(request)
        return asker in self.permits and key.startswith(self.permits[asker])

    async def _about_owner(self, question: str, *, is_detour: bool) -> web.Response:
        self.questions[question] += 1
        if self.owner_is_slow and question == "alive":
            await self._closing.wait()
        if question == "alive" and not self.owner_has_parts:
            return web.Response(status=404)
        owner = "10.0.0.2:9081" if is_detour else self.owner
        return web.Response(status=502 if owner is None else 200, headers={"X-Shardcache-Owner": owner or ""})

    def _fault(self, method: str, key: str, start: int | None) -> Fault | None:
        for rule in self._rules:
            if rule.takes(method, key, start):
                rule.times -= 1
                return rule.fault
        return None

    def _headers(self, body: bytes, fault: Fault | None) -> dict[str, str]:
        known = {
            "ETag": '"another"' if fault is Fault.WRONG_ETAG else _etag(body),
            "Last-Modified": f"Thu, 01 Jan 2026 00:00:{body[0] % 60 if body else 0:02d} GMT",
        }
        headers = {name: known[name] for name in self.validators}
        if self.encoding:
            headers["Content-Encoding"] = self.encoding
        if self.crc32c:
            headers["x-amz-checksum-crc32c"] = base64.b64encode(checksums.crc32c(body).to_bytes(4, "big")).decode()
            headers["x-amz-checksum-type"] = "FULL_OBJECT"
        return headers

    async def _send(
        self, request: web.Request, status: int, headers: dict[str, str], body: bytes, fault: Fault | None
    ) -> web.StreamResponse:
        if fault is Fault.ENCODED:
            assert request.headers.get("Accept-Encoding") == "identity"
            headers["Content-Encoding"], body = "gzip", gzip.compress(body)
        answer = web.StreamResponse(status=status, headers=headers)
        if self.lengths or request.method == "HEAD":
            answer.content_length = len(body)
        else:
            answer.enable_chunked_encoding()
        await answer.prepare(request)
        if request.method == "HEAD":
            return answer
        if fault is Fault.CORRUPT:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault is Fault.TRICKLE:
            await self._trickle(answer, body)
            return answer
        cut = fault in (Fault.STALL, Fault.RESET, Fault.TRUNCATE)
        await answer.write(body[: len(body) // 2] if cut else body)
        if fault is Fault.STALL:
            await self._closing.wait()
        if fault is Fault.TRUNCATE and request.transport is not None:
            request.transport.close()
        if fault is Fault.RESET and request.transport is not None:
            request.transport.abort()
        return answer

    async def _trickle(self, answer: web.StreamResponse, body: bytes) -> None:
        """Send a body in a hundred pieces, over ten seconds unless the client goes."""
        piece_bytes = -(-len(body) // 100)
        for start in range(0, len(body), piece_bytes):
            await answer.write(body[start : start + piece_bytes])
            await asyncio.sleep(0.1)


@functools.lru_cache(maxsize=8)  # it is asked for with each part of a shard
def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _asker(request: web.Request) -> str:
    """Return the id of the key that signed a request, in its headers or its url; empty without one."""
    scope = request.headers.get("Authorization", "").partition("Credential=")[2]
    return (scope or request.query.get("X-Amz-Credential", "")).partition("/")[0]


def _refusal(request: web.Request, status: int, code: str) -> web.Response:
    xml = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>on purpose</Message></Error>"
    return web.Response(status=status, text="" if request.method == "HEAD" else xml, content_type="application/xml")


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
