"""A reader's session over a WebSocket: requests in, answers out; its plan and leases end with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import structlog
from aiohttp import WSMsgType, web

from shardcache import __version__
from shardcache.access.peer import peer_of
from shardcache.access.rules import Peer
from shardcache.cache.facade import Cache
from shardcache.cache.jobs import Loader
from shardcache.cache.loop_turns import Turns
from shardcache.cache.planner import Planned
from shardcache.cache.readers import Lease, Reader
from shardcache.cache.waits import Arrival
from shardcache.errors import ProtocolError, ShardcacheError
from shardcache.logs import about
from shardcache.protocol import (
    MAX_REQUEST_BYTES,
    REQUESTS,
    SPOKEN,
    UNKNOWN,
    Json,
    Release,
    ShardRef,
    agree,
    check_indices,
    parse,
    take,
)
from shardcache.redact import redact
from shardcache.server.audit import AUDIT, Audit
from shardcache.server.connection_limit import LIMITS
from shardcache.server.drain import DRAIN
from shardcache.units import user_name

log = structlog.get_logger()

# Requests of one session handled concurrently, and requests waiting for a shard.
_MAX_AT_ONCE = 32
_MAX_AWAITED = 8192

# Parsing a longer message blocks the event loop noticeably: such messages take turns.
_LONG_CHARS = 16 * 1024

# A reader sends its hello immediately; a client that never does would hold its connection indefinitely.
_HELLO_S = 10.0

# A reader busy with a shard does not answer the close handshake; its next request fails instead.
_CLOSE_S = 1.0


async def handle_session(request: web.Request) -> web.WebSocketResponse:
    """Serve one session until either side closes it."""
    sessions = request.app[DRAIN].sessions
    request.app[LIMITS]().check_sessions(len(sessions))
    socket = web.WebSocketResponse(timeout=_CLOSE_S, max_msg_size=MAX_REQUEST_BYTES, compress=False)
    await socket.prepare(request)
    peer, cache, notes = peer_of(request), request.app[CACHE], request.app[AUDIT]
    sessions.add(socket)
    try:
        hello = await _hello(socket)
        protocol = _agreed(hello)
        REQUESTS["hello"].check(hello)  # not earlier: that of another version may have other fields
        with about(job=hello["job"], uid=peer.uid):
            await asyncio.to_thread(user_name, peer.uid)  # remembered for status pages, which must not wait for it
            reader = cache.join(hello["job"], peer.uid, _loader(hello))
            log.debug("reader connected", **_place(hello))
            try:
                welcome = {"protocol": protocol, "version": __version__, "cache_dir": str(cache.layout.root)}
                await _send(socket, {"type": "welcome", **welcome})
                await Session(socket, cache, reader, peer, partial(_note_plan, notes, reader, hello)).run()
            finally:
                await reader.close()
                log.debug("reader disconnected", **_place(hello))
    except ShardcacheError as exn:
        notes.note("session refused", peer.uid, cause=exn.message)
        await _send(socket, {"type": "error", "id": None, "error": exn.to_json()})
        await socket.close()
    finally:
        sessions.discard(socket)
    return socket


CACHE = web.AppKey("CACHE", Cache)


async def _hello(socket: web.WebSocketResponse) -> Json:
    try:
        first = await socket.receive(_HELLO_S)
    except (TimeoutError, ConnectionError):
        raise ProtocolError(f"no 'hello' within {_HELLO_S:g} s") from None
    hello = parse(first.data) if first.type is WSMsgType.TEXT else {}
    if hello.get("type") != "hello":
        raise ProtocolError("a session must begin with 'hello'")
    return hello


def _agreed(hello: Json) -> int:
    """Return the session's protocol version. Raises VersionMismatchError, ProtocolError."""
    return agree(daemon=Release(__version__, SPOKEN), client=Release.of(hello))


def _loader(hello: Json) -> Loader | None:
    """Return the DataLoader that the reader says it is a worker of. Raises ProtocolError."""
    if "loader" not in hello:
        return None
    return Loader(take(hello, "loader", str), take(hello, "rank", int), take(hello, "batch_size", int))


def _place(hello: Json) -> Json:
    """Return the reader's place in its job, as far as its hello has it."""
    return {name: hello[name] for name in ("rank", "worker", "pid") if name in hello}


def _note_plan(notes: Audit, reader: Reader, hello: Json, epoch: int | None) -> None:
    sizes = {name: hello[name] for name in ("world_size", "workers") if name in hello}
    notes.plan(reader.job.key, epoch, (hello.get("rank"), hello.get("worker")), **sizes)


async def _texts(socket: web.WebSocketResponse) -> AsyncIterator[str]:
    with suppress(ConnectionError):  # the reader disconnected between its ping and our pong
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                yield message.data


class Session:
    """Answers one reader's requests. Leases are waited for concurrently, so that `explain` is answered meantime."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        cache: Cache,
        reader: Reader,
        peer: Peer,
        note_epoch: Callable[[int | None], None],
    ) -> None:
        """Prepare one; `note_epoch` is called with each epoch that the reader begins."""
        self._socket = socket
        self._cache = cache
        self._reader = reader
        self._peer = peer
        self._awaited: dict[int, int] = {}  # position waited for, by request id
        self._note_epoch = note_epoch
        self._planned = False
        self._epoch: int | None = None  # of the latest plan
        self._planning = asyncio.Lock()
        self._resolving = asyncio.Lock()
        self._listed: tuple[int, list[str]] = 0, []  # id and urls of the latest `resolve`
        self._room = asyncio.Semaphore(_MAX_AT_ONCE)
        self._gone = False
        self._news = DamageNotices()

    async def run(self) -> None:
        """Handle messages until the connection ends; requests still waiting are cancelled."""
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[None]] = set()
            async for text in _texts(self._socket):
                if self._gone:
                    break  # the reader has disconnected: nobody needs its remaining requests
                # Backpressure: a client with too many unanswered requests is not read any further.
                await self._room.acquire()
                if len(text) > _LONG_CHARS:
                    await self._cache.turns.wait()
                task = tasks.create_task(self._handle(text))
                running.add(task)
                task.add_done_callback(running.discard)
                # Buffered messages arrive without a pause: let other sessions run in between.
                await asyncio.sleep(0)
            for task in running:
                task.cancel()

    async def _handle(self, text: str) -> None:
        request_id: int | None = None
        try:
            try:
                message = parse(text)
                request = REQUESTS.get(str(message.get("type")), UNKNOWN)
                if "id" in request.fields:
                    request_id = take(message, "id", int)
                async with self._in_order(message):
                    request.check(message)
                    answer = await self._answer(message, request_id or 0)
            except ShardcacheError as exn:
                answer = {"type": "error", "error": exn.to_json()}
            if answer is not None:
                await self._say({**answer, "id": request_id})
        finally:
            self._room.release()  # not earlier: answers that the client does not read would pile up in memory

    async def _say(self, answer: Json) -> None:
        if not (self._gone or self._socket.closed):
            text = await written(answer, self._cache.turns)
            self._gone = not await _say(self._socket, text)

    @asynccontextmanager
    async def _in_order(self, message: Json) -> AsyncIterator[None]:
        """Make other requests wait for the plan that was sent before them."""
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
                async with self._resolving:  # one at a time: each may be millions of shards
                    self._listed = request_id, message["urls"]
                    found = await self._cache.resolve(message["urls"], self._peer)
                    tokens: list[int | None] = []
                    await self._cache.turns.take(found.refs, lambda some: tokens.extend(ref.tokens for ref in some))
                    answer = {"type": "manifest", "shards": found.refs, "remembered": found.remembered}
                    return answer if tokens.count(None) == len(tokens) else answer | {"tokens": tokens}
            case "plan" | "extend" as kind:
                return await self._plan(message, new=kind == "plan")
            case "lease":
                return await self._lease(request_id, message["position"], partial=message.get("partial", False))
            case "need":
                self._reader.need(message["of"])
                return None
            case "more":
                return await self._more(request_id, message["lease"], message["beyond"])
            case "explain":
                return self._explain(message["of"])
            case "release":
                self._news.over(message["lease"])
                await self._reader.release(message["lease"], read=message.get("read", True))
                return None
            case other:
                raise ProtocolError(f"unknown message {other!r}")

    async def _plan(self, message: Json, *, new: bool) -> Json:
        if not (new or self._planned):
            raise ProtocolError("'extend' without a plan to extend")
        shards, order = await self._piece(message, 0 if new else self._reader.shard_count)
        if new:
            await self._reader.declare(message["reads"])
            self._begin(message.get("epoch"))
        await self._reader.extend(shards, order)
        return {"type": "ok"}

    def _begin(self, epoch: int | None) -> None:
        """Note the epoch of a plan, unless it is the present one: a reader that skips samples plans others instead."""
        if not self._planned or epoch != self._epoch:
            self._note_epoch(epoch)
        self._planned, self._epoch = True, epoch

    async def _piece(self, message: Json, known_shards: int) -> tuple[list[Planned], list[int]]:
        """Return the shards added to a plan, and the positions added as indices into all of its shards."""
        rows, order = message["shards"], message["order"]
        shards: list[Planned] = []
        planned, shard_of = self._reader.planned, ShardRef.from_json
        await self._cache.turns.take(rows, lambda some: shards.extend(planned(shard_of(row)) for row in some))
        rows.clear()  # free memory early: the plans of many readers may be waiting for their turn
        await self._cache.turns.take(order, lambda some: check_indices(some, known_shards + len(shards)))
        await self._cache.check_allowed([shard.ref for shard in shards], self._peer)
        return shards, order

    async def _lease(self, request_id: int, position: int, *, partial: bool) -> Json:
        async with self._waiting(request_id, position):
            lease = await self._reader.lease(request_id, position, partial=partial)
            self._news.lent(lease)
            return self._told(lease) | self._news.take()

    async def _more(self, request_id: int, number: int, beyond_bytes: int) -> Json:
        async with self._waiting(request_id, self._reader.position(number)):
            try:
                lease = await self._reader.more(number, beyond_bytes)
            except ShardcacheError:
                self._news.over(number)
                raise
            return self._told(lease) | self._news.take()

    @asynccontextmanager
    async def _waiting(self, request_id: int, position: int) -> AsyncIterator[None]:
        """Free the request's slot while it waits for a shard, so that `need` and `release` can be handled."""
        if request_id in self._awaited:
            raise ProtocolError(f"request {request_id} has not been answered yet")
        if len(self._awaited) >= _MAX_AWAITED:
            raise ProtocolError(f"a reader may wait for at most {_MAX_AWAITED} shards at a time")
        self._awaited[request_id] = position
        self._room.release()
        try:
            yield
        finally:
            del self._awaited[request_id]
            await self._room.acquire()

    def _told(self, lease: Lease) -> Json:
        layout, shard, arriving = self._cache.layout, lease.shard, lease.granted
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
        assert isinstance(arriving, Arrival)  # a lease is for a published or an arriving shard
        return {
            "type": "arriving",
            "lease": lease.number,
            "url": redact(arriving.partial.obj.url),
            "version": arriving.partial.obj.version,
            "path": str(arriving.partial.path),
            "size_bytes": arriving.partial.obj.size_bytes,
            "inode": arriving.partial.inode,
            "ready_bytes": arriving.ready_bytes,
        }

    def _explain(self, of: int) -> Json:
        position = self._awaited.get(of)
        if self._resolving.locked() and of == self._listed[0]:
            return {"type": "waiting", "of": of, "reason": self._cache.listing_reason(self._listed[1])}
        if position is None:
            return {"type": "waiting", "of": of, "reason": "the daemon has just answered"}
        transfer = self._reader.transfer(position)
        if transfer is None:
            return {"type": "waiting", "of": of, "reason": "checking with the origin for a newer version"}
        answer: Json = {"type": "waiting", "of": of, "reason": self._cache.reason(transfer)}
        if transfer.total_bytes is not None:
            answer |= {"done_bytes": transfer.arrived_bytes, "total_bytes": transfer.total_bytes}
        return answer


async def _send(socket: web.WebSocketResponse, message: Json) -> None:
    await _say(socket, json.dumps(message, separators=(",", ":")))


async def _say(socket: web.WebSocketResponse, text: str) -> bool:
    """Send a message; return False if the reader has disconnected."""
    try:
        await socket.send_str(text)
    except ConnectionError:
        log.debug("reader disconnected before its answer")
        return False
    return True


_dumps: Callable[[Any], str] = partial(json.dumps, separators=(",", ":"), default=ShardRef.to_json)


async def written(message: Mapping[str, Any], turns: Turns) -> str:
    """Return a message as JSON; shards become rows, and long lists take turns with other work on the event loop."""
    parts: list[str] = []  # joined once: each copy of a long message takes milliseconds

    def write(piece: Sequence[object]) -> None:
        parts.extend((_dumps(piece)[1:-1], ","))

    for name, value in message.items():
        parts += ("," if parts else "{", _dumps(name), ":")
        if not value or not isinstance(value, list):
            parts.append(_dumps(value))
            continue
        parts.append("[")
        await turns.take(value, write)
        parts[-1] = "]"
    return "".join((*parts, "}"))


class DamageNotices:
    """Watches one reader's leased shards for damage."""

    def __init__(self) -> None:
        self._lent: dict[int, Lease] = {}
        self._untold: list[Json] = []

    def lent(self, lease: Lease) -> None:
        """Start watching a lease."""
        self._lent[lease.number] = lease

    def over(self, number: int) -> None:
        """Stop watching a lease; damage found while its shard was in use is still reported."""
        lease = self._lent.pop(number, None)
        if lease is not None:
            self._note(lease)

    def take(self) -> Json:
        """Return the answer's field with the new damage notices; empty if there are none."""
        for lease in list(self._lent.values()):
            if self._note(lease):
                del self._lent[lease.number]
        untold, self._untold = self._untold, []
        return {"damaged": untold} if untold else {}

    def _note(self, lease: Lease) -> bool:
        damage = None if lease.retained is None else lease.retained.damage
        if damage is not None:
            self._untold.append(damage.to_json())
        return damage is not None
