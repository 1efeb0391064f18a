"""One reading process's WebSocket: its requests in, answers out; its plan and leases end with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import structlog
from aiohttp import WSMsgType, web

from shardcache import __version__
from shardcache.cache.facade import Cache
from shardcache.cache.readers import Lease, Reader
from shardcache.errors import ProtocolError, ShardcacheError, VersionMismatchError
from shardcache.protocol import MAX_REQUEST_BYTES, PROTOCOL_VERSION
from shardcache.server.messages import Piece, parse, take, take_strings
from shardcache.server.peer import peer_uid

log = structlog.get_logger()

Json = dict[str, Any]

# Requests of one session that may wait for their answers together.
_MOST_AT_ONCE = 32

_UNANSWERED = ("need", "release")

# A reader that is busy with a shard does not answer a goodbye; it finds out when it asks for the next.
_CLOSE_S = 1.0


async def handle_session(request: web.Request) -> web.WebSocketResponse:
    """Serve one connection until either side ends it."""
    socket = web.WebSocketResponse(timeout=_CLOSE_S, max_msg_size=MAX_REQUEST_BYTES, compress=False)
    await socket.prepare(request)
    uid = peer_uid(request)
    try:
        reader = await _welcome(socket, request.app[CACHE], uid)
    except ShardcacheError as exn:
        await _send(socket, {"type": "error", "id": None, "error": exn.to_json()})
        await socket.close()
        return socket
    session = Session(socket, request.app[CACHE], reader, uid)
    request.app[SESSIONS].add(socket)
    try:
        await session.run()
    finally:
        request.app[SESSIONS].discard(socket)
        await reader.close()
    return socket


CACHE = web.AppKey("CACHE", Cache)
SESSIONS: web.AppKey[set[web.WebSocketResponse]] = web.AppKey("SESSIONS", set)


async def _welcome(socket: web.WebSocketResponse, cache: Cache, uid: int) -> Reader:
    first = await socket.receive()
    if first.type is not WSMsgType.TEXT:
        raise ProtocolError("a session begins with 'hello'")
    hello = parse(first.data)
    if take(hello, "type", str) != "hello":
        raise ProtocolError("a session begins with 'hello'")
    if hello.get("protocol") != PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"the daemon is version {__version__} and speaks protocol {PROTOCOL_VERSION}, "
            f"the client is version {hello.get('client_version')} and speaks {hello.get('protocol')}",
            remedy="install the same version of shardcache on the node and in the training image",
        )
    await _send(
        socket,
        {
            "type": "welcome",
            "protocol": PROTOCOL_VERSION,
            "version": __version__,
            "cache_dir": str(cache.layout.root),
        },
    )
    return cache.join(take(hello, "job", str), uid)


class Session:
    """Answers one reader. Leases are waited for side by side, so that explanations can come between."""

    def __init__(self, socket: web.WebSocketResponse, cache: Cache, reader: Reader, uid: int) -> None:
        self._socket = socket
        self._cache = cache
        self._reader = reader
        self._uid = uid
        self._awaited: dict[int, int] = {}  # positions, by the id of the request that waits for one
        self._planning = asyncio.Lock()
        self._room = asyncio.Semaphore(_MOST_AT_ONCE)

    async def run(self) -> None:
        """Handle messages until the connection ends; what is still being waited for is dropped with it."""
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[None]] = set()
            async for message in self._socket:
                if message.type is WSMsgType.TEXT:
                    # Whoever sends more than it waits for answers is not read any further, and stands still.
                    await self._room.acquire()
                    task = tasks.create_task(self._handle(message.data))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    # Messages that lie ready come without a pause; the others' have their turn between them.
                    await asyncio.sleep(0)
            for task in running:
                task.cancel()

    async def _handle(self, text: str) -> None:
        request_id: int | None = None
        try:
            message = parse(text)
            if message.get("type") not in _UNANSWERED:
                request_id = take(message, "id", int)
            async with self._in_order(message):
                answer = await self._answer(message, request_id or 0)
        except ShardcacheError as exn:
            answer = {"type": "error", "error": exn.to_json()}
        finally:
            self._room.release()
        if answer is not None and not self._socket.closed:
            await _send(self._socket, {**answer, "id": request_id})

    @asynccontextmanager
    async def _in_order(self, message: Json) -> AsyncIterator[None]:
        """Let a lease wait for the plan that was sent before it."""
        if message.get("type") in ("plan", "extend"):
            async with self._planning:
                yield
        else:
            async with self._planning:
                pass
            yield

    async def _answer(self, message: Json, request_id: int) -> Json | None:
        match message.get("type"):
            case "resolve":
                refs = await self._cache.resolve(take_strings(message, "urls"), self._uid)
                return {"type": "manifest", "shards": [ref.to_json() for ref in refs]}
            case "plan" | "extend" as kind:
                return await self._plan(message, new=kind == "plan")
            case "lease":
                return await self._lease(message, request_id)
            case "need":
                self._reader.need(take(message, "of", int))
                return None
            case "more":
                return await self._more(message, request_id)
            case "explain":
                return self._explain(take(message, "of", int))
            case "release":
                await self._reader.release(take(message, "lease", int), read=message.get("read") is not False)
                return None
            case other:
                raise ProtocolError(f"unknown message {other!r}")

    async def _plan(self, message: Json, *, new: bool) -> Json:
        piece = Piece.from_message(message, 0 if new else self._reader.shard_count)
        self._cache.check_allowed(piece.shards, self._uid)
        if new:
            self._reader.declare(take(message, "reads", int))
        await self._reader.extend(piece.shards, piece.order)
        return {"type": "ok"}

    async def _lease(self, message: Json, request_id: int) -> Json:
        position = take(message, "position", int)
        with self._waiting(request_id, position):
            lease = await self._reader.lease(request_id, position, partial=message.get("partial") is True)
            return self._told(lease)

    async def _more(self, message: Json, request_id: int) -> Json:
        number = take(message, "lease", int)
        with self._waiting(request_id, self._reader.position(number)):
            return self._told(await self._reader.more(number, take(message, "beyond", int)))

    @contextmanager
    def _waiting(self, request_id: int, position: int) -> Iterator[None]:
        self._awaited[request_id] = position
        try:
            yield
        finally:
            del self._awaited[request_id]

    def _told(self, lease: Lease) -> Json:
        layout, shard, arriving = self._cache.layout, lease.shard, lease.arriving
        if shard is not None and shard.facts is not None:
            facts = shard.facts
            return {
                "type": "leased",
                "lease": lease.number,
                "url": facts.url,
                "version": facts.version,
                "path": str(layout.tar(shard.key)),
                "index_path": str(layout.sidecar(shard.key)),
                "size_bytes": facts.size_bytes,
                "samples": facts.samples,
            }
        assert arriving is not None  # a lease is of the one or of the other
        return {
            "type": "arriving",
            "lease": lease.number,
            "url": arriving.partial.obj.url,
            "version": arriving.partial.obj.version,
            "path": str(arriving.partial.path),
            "size_bytes": arriving.partial.obj.size_bytes,
            "inode": arriving.partial.inode,
            "ready_bytes": arriving.ready_bytes,
        }

    def _explain(self, of: int) -> Json:
        position = self._awaited.get(of)
        if position is None:
            return {"type": "waiting", "of": of, "reason": "the daemon has just answered"}
        transfer = self._reader.transfer(position)
        if transfer is None:
            return {"type": "waiting", "of": of, "reason": "asking the store if the cached version is the present one"}
        answer: Json = {"type": "waiting", "of": of, "reason": self._cache.reason(transfer)}
        if transfer.total_bytes is not None:
            answer |= {"done_bytes": transfer.done_bytes, "total_bytes": transfer.total_bytes}
        return answer


async def _send(socket: web.WebSocketResponse, message: Json) -> None:
    try:
        await socket.send_str(json.dumps(message, separators=(",", ":")))
    except ConnectionError:
        log.debug("reader left before its answer", type=message.get("type"))
