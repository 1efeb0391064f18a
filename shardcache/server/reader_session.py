"""A reader's session over a WebSocket: requests in, answers out.

`session_start` accepts the WebSocket and runs one `ReaderSession` for each connected reader. A
reader is one process that iterates over a dataset, such as a worker of a DataLoader. Its plan is
the order in which it reads shards. A lease is a reader's right to read one shard of the plan. A
grant is the answer that gives the reader a lease. A bundle is a message that stands for several. An
arriving shard is one that the daemon is still fetching. `shared.protocol` documents all messages.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import structlog
from aiohttp import WSMsgType, web

from shardcache.access.rules import Peer
from shardcache.cache.readers.connected_reader import Reader
from shardcache.cache.readers.held_ranges import HeldRange
from shardcache.cache.readers.leases import Lease
from shardcache.cache.waiting.arrival import Arrival
from shardcache.errors import ProtocolError, ShardcacheError, internal_error
from shardcache.redact import redact
from shardcache.server.outbox import Outbox
from shardcache.server.service import Service
from shardcache.shared import protocol
from shardcache.shared.protocol import REQUESTS, Json, take
from shardcache.store.partial import Partial
from shardcache.store.shard import Facts

log = structlog.get_logger()

# Number of requests of one session that are handled concurrently. Requests that wait for a shard
# are not among them: they have a limit of their own.
_MAX_AT_ONCE = 32
_MAX_AWAITED = 8192
# Parsing a longer message blocks the event loop noticeably: such messages take turns.
_LONG_CHARS = 16 * 1024
# A reader waits this long for another reader to send a list of shards. After that, the daemon has
# the waiting reader send the list as well.
_SENDING_S = 10.0


class ReaderSession:
    """Answers one reader's requests.

    Requests for leases wait concurrently, so that `explain` is answered while they wait.

    Args:
        peer: the user whose process is at the other end of the connection.
        hello: the session's first message, which has been checked and answered.
    """

    def __init__(
        self,
        socket: web.WebSocketResponse,
        service: Service,
        reader: Reader,
        peer: Peer,
        hello: Json,
    ) -> None:
        self._socket = socket
        self._cache = service.cache
        self._audit = service.audit
        self._reader = reader
        self._peer = peer
        self._hello = hello
        # By request id: the position in the plan whose shard the request waits for.
        self._awaited: dict[int, int] = {}
        self._has_planned = False
        self._epoch: int | None = None  # epoch of the latest plan, if the client has named it
        self._planning = asyncio.Lock()
        self._resolving = asyncio.Lock()
        # Holds the lock of a list of shards while this reader is to send the list. No other reader
        # of the same user then sends it, too.
        self._list_lock = AsyncExitStack()
        self._running: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup
        self._resolving_id = 0  # id of the latest `resolve` request
        self._resolving_urls: list[str] = []  # urls of that request
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self._outbox = Outbox(socket, bundles=hello.get("bundles", False))

    async def run(self) -> None:
        """Handle messages until the connection ends, then cancel the requests that still wait."""
        async with self._list_lock, asyncio.TaskGroup() as self._tasks:
            async for text in self._texts():
                # Backpressure: a client with too many unanswered requests is not read any further.
                await self._slots.acquire()
                if len(text) > _LONG_CHARS:
                    await self._cache.turns.wait()
                self._start(self._handle(text))
                # Buffered messages arrive without a pause: let other sessions run in between.
                await asyncio.sleep(0)
            for task in self._running:
                task.cancel()

    def _start(self, handling: Coroutine[Any, Any, None]) -> None:
        """Handle a message in a task, which is cancelled when the connection ends."""
        task = self._tasks.create_task(handling)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _texts(self) -> AsyncIterator[str | bytes]:
        """Yield messages as they arrive, until the connection ends."""
        # A reader may disconnect between its ping and the daemon's pong, which raises this error.
        with suppress(ConnectionError):
            async for message in self._socket:
                if self._outbox.is_gone:
                    break  # nobody needs the reader's remaining requests
                if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                    yield message.data

    async def _handle(self, text: str | bytes) -> None:
        """Answer a message, for which `run` has taken a slot."""
        try:
            try:
                messages = protocol.unbundled(protocol.parse(text))
            except ProtocolError as exn:
                await self._outbox.send([{"type": "error", "error": exn.to_json(), "id": None}])
                return
            if len(messages) == 1:
                await self._handle_one(messages[0])
            else:
                await self._handle_bundle(messages)
        finally:
            # The slot is released only after the answer is sent: a client that reads no answers
            # must not make them pile up here.
            self._slots.release()

    async def _handle_bundle(self, messages: Sequence[Json]) -> None:
        """Grant cached ranges in one answer; handle other messages as if each was sent alone."""
        granted: list[Json] = []
        for message in messages:
            if message.get("type") in ("need", "release"):
                # These get no answer, and wait for no shard.
                await self._handle_one(message)
                continue
            grant = self._grant_at_hand(message)
            if grant is None:
                self._start(self._handle_in_slot(message))
            else:
                granted.append(grant)
        if granted:
            await self._outbox.send(granted)

    async def _handle_in_slot(self, message: Json) -> None:
        """Answer one message of a bundle in a slot: `run` has taken one slot for the bundle."""
        async with self._slots:
            await self._handle_one(message)

    async def _handle_one(self, message: Json) -> None:
        """Answer one message; an exception becomes an error as the answer."""
        request_id: int | None = None
        try:
            request = REQUESTS.get(str(message.get("type")), protocol.UNKNOWN_KIND)
            if "id" in request.fields:
                request_id = take(message, "id", int)
            request.check(message)
            answer = await self._answer_in_order(message, request_id or 0)
        except ShardcacheError as exn:
            answer = {"type": "error", "error": exn.to_json()}
        except Exception as exn:
            # A top-level guard, as for transfers: without an answer, the reader would never stop
            # waiting.
            log.exception("unexpected error in a reader's request")
            answer = {"type": "error", "error": internal_error(exn).to_json()}
        if answer is not None:
            await self._outbox.send([{**answer, "id": request_id}])

    async def _answer_in_order(self, message: Json, request_id: int) -> Json | None:
        """Answer plans one after another, and any other request after all earlier plans.

        A later request refers to the plan: for example, a lease names a position in it.

        Args:
            request_id: id of the message; 0 if it has none.
        """
        async with self._planning:  # this waits for the earlier plans
            is_plan = message.get("type") in ("shards", "plan", "extend")
            if is_plan:
                return await self._answer(message, request_id)
        # Other requests do not wait for each other, and a later plan does not wait for them.
        return await self._answer(message, request_id)

    async def _answer(self, message: Json, request_id: int) -> Json | None:
        """Return the answer to a checked message; None if this kind of message gets none."""
        match message.get("type"):
            case "resolve":
                # One at a time: each manifest may have millions of shards.
                async with self._resolving:
                    return await self._resolve(request_id, message)
            case "shards" if "packed" in message:
                await self._take_list(message["packed"])
                return {"type": "ok"}
            case "shards":
                is_known = await self._find_list(message["fingerprint"])
                return {"type": "ok" if is_known else "unknown"}
            case "plan" | "extend" as kind:
                return await self._plan(message, new=kind == "plan")
            case "lease":
                return await self._lease(request_id, message)
            case "more":
                return await self._more(request_id, message)
            case "need":
                self._reader.need(message["of"])
            case "release":
                await self._release(message)
            case "explain":
                return self._explain(message["of"])
            case other:
                raise ProtocolError(f"unknown message {other!r}")
        return None

    async def _resolve(self, request_id: int, message: Json) -> Json:
        """Return the manifest of a dataset: the shards that its urls and patterns stand for."""
        urls: list[str] = message["urls"]
        wanted = protocol.wanted_of(message)
        # Without a maximum age, a listing of any age that the cache still has is used.
        max_age_s = message["max_age_ms"] / 1000 if "max_age_ms" in message else math.inf
        self._resolving_id = request_id
        self._resolving_urls = urls
        with self._reader.waiting_for_listing(urls):
            manifest = await self._cache.manifests.resolve(
                urls,
                self._peer,
                wanted=wanted,
                max_age_s=max_age_s,
            )
        return {
            "type": "manifest",
            "remembered": manifest.remembered,
            # This compresses the list, so it runs in a thread.
            "packed": await asyncio.to_thread(lambda: manifest.shards.packed),
        }

    # Plans

    async def _find_list(self, fingerprint: str) -> bool:
        """Return whether the daemon has a list of shards; if not, this reader is to send the list.

        Other readers of the same user that need the list wait until this reader has sent it or
        disconnects.
        """
        manifests = self._cache.manifests
        await self._list_lock.aclose()
        lock = manifests.sending_lock(fingerprint, self._peer)
        with suppress(TimeoutError):
            async with asyncio.timeout(_SENDING_S):
                await self._list_lock.enter_async_context(lock)
        if await manifests.known([fingerprint], self._peer) is None:
            return False  # the lock is held until the list is sent
        await self._list_lock.aclose()
        return True

    async def _take_list(self, packed: bytes) -> None:
        """Take a list of shards that the reader has sent; other readers no longer wait for it."""
        async with self._list_lock:
            await self._cache.manifests.admit(packed, self._peer)

    async def _plan(self, message: Json, *, new: bool) -> Json:
        """Declare a new plan, or extend the present one.

        Args:
            new: True for a message of type `plan`, False for `extend`.
        """
        reader = self._reader
        if new:
            lists: list[str] = message["shards"]
            wanted = protocol.wanted_of(message)
            listing = await self._cache.manifests.known(lists, self._peer, wanted)
            if listing is None:
                return {"type": "unknown"}
        elif reader.listing is None:
            raise ProtocolError("'extend' without a plan to extend")
        else:
            listing = reader.listing
        order = message["order"]
        count = len(listing.shards)
        # An order may be long, so other sessions get turns on the event loop between its pieces.
        await self._cache.turns.take(order, lambda piece: protocol.check_indices(piece, count))
        if new:
            reader.declare(listing, message["reads"])
            self._note_epoch(message.get("epoch"))
        await reader.extend(order)
        return {"type": "ok"}

    def _note_epoch(self, epoch: int | None) -> None:
        """Write a plan's epoch to the audit log, once per epoch.

        A reader that skips samples declares another plan for the same epoch.
        """
        if not self._has_planned or epoch != self._epoch:
            hello = self._hello
            sizes = {name: hello[name] for name in ("world_size", "workers") if name in hello}
            place = (hello.get("rank"), hello.get("worker"))
            self._audit.plan(self._reader.job.key, epoch, place, **sizes)
        self._has_planned = True
        self._epoch = epoch

    # Leases

    def _grant_at_hand(self, message: Json) -> Json | None:
        """Return the grant of a range that is cached.

        Returns None for any other message, and for one that is invalid: `_handle_one` then answers
        it, with an error if necessary.
        """
        if message.get("type") != "lease":
            return None
        if self._planning.locked():  # the position may be in the plan that is being declared
            return None
        try:
            REQUESTS["lease"].check(message)
            span = _range_in(message)
            if span is None:
                return None
            lease = self._reader.try_lease(
                message["id"],
                message["position"],
                span,
                needed=message.get("needed", False),
            )
        except ShardcacheError:
            return None
        if lease is None:
            return None
        return self._granted(lease, message) | {"id": message["id"]}

    async def _lease(self, request_id: int, message: Json) -> Json:
        """Wait for a shard, or a range of one, and return its grant."""
        position = message["position"]
        async with self._waiting(request_id, position):
            lease = await self._reader.lease(
                request_id,
                position,
                span=_range_in(message),
                partial=message.get("partial", False),
                unpublished=message.get("unpublished", False),
                latest=message.get("latest", False),
                needed=message.get("needed", False),
            )
            named_path = await self._named_path(lease) if message.get("named") else {}
            return self._granted(lease, message) | named_path

    async def _more(self, request_id: int, message: Json) -> Json:
        """Wait until more bytes of an arriving shard can be read, and grant its lease again."""
        number = message["lease"]
        async with self._waiting(request_id, self._reader.position(number)):
            lease = await self._reader.more(number, message["beyond"])
            return self._granted(lease, message)

    async def _release(self, message: Json) -> None:
        """End a lease, and report the damage that the reader found in its shard, if any."""
        self._reader.job.samples_unmatched += message.get("unmatched", 0)
        await self._reader.release(
            message["lease"],
            read=message.get("read", True),
            damage=message.get("damage", ""),
        )

    @asynccontextmanager
    async def _waiting(self, request_id: int, position: int) -> AsyncIterator[None]:
        """Free the request's slot while the request waits for a shard.

        Otherwise waiting requests could take all slots, and the messages that end their waits, such
        as `release`, would get none.
        """
        if request_id in self._awaited:
            raise ProtocolError(f"request {request_id} has not been answered yet")
        if len(self._awaited) >= _MAX_AWAITED:
            raise ProtocolError(f"a reader may wait for at most {_MAX_AWAITED} shards at a time")
        self._awaited[request_id] = position
        self._slots.release()
        try:
            yield
        finally:
            del self._awaited[request_id]
            await self._slots.acquire()

    async def _named_path(self, lease: Lease) -> Json:
        """Return the field `named_path`: a path of a cached shard that ends with its object's name.

        Returns no field if the shard is not published yet.
        """
        if lease.shard is None or lease.shard.facts is None:
            return {}
        return {"named_path": str(await self._cache.named_path(lease.shard, lease.shard.facts))}

    def _granted(self, lease: Lease, request: Json) -> Json:
        """Return the answer that grants a lease.

        It also reports damage that was found in other shards that this reader has leased.
        """
        damaged = [damage.to_json() for damage in self._reader.take_damage()]
        answer: Json = {"lease": lease.number}
        if damaged:
            answer["damaged"] = damaged
        if lease.is_whole and lease.facts is not None:
            return {"type": "leased"} | answer | self._leased_fields(lease, lease.facts)

        granted = lease.granted
        if isinstance(granted, HeldRange):
            ready_bytes = 0
            # Only a range that is needed now also holds the cached bytes that follow it. Ranges
            # that are not needed yet share a limited part of the cache's space.
            if request.get("needed"):
                ready_bytes = granted.hold_ahead(request.get("ahead_to", 0))
            fields = self._arriving_fields(granted.file.partial, ready_bytes)
            return {"type": "arriving"} | answer | fields

        # A granted lease is for a published shard, a range or an arriving shard.
        assert isinstance(granted, Arrival)
        fields = self._arriving_fields(granted.partial, granted.ready_bytes)
        return {"type": "arriving"} | answer | fields

    def _leased_fields(self, lease: Lease, facts: Facts) -> Json:
        """Return the fields of an answer that grants a whole shard."""
        return {
            "url": facts.url,
            "version": facts.version,
            **self._paths(lease),
            "size_bytes": facts.size_bytes,
            "samples": facts.samples or 0,
        }

    def _paths(self, lease: Lease) -> Json:
        """Return the paths of a whole shard's files.

        If the files are not published yet, the inode is returned as well: the paths may soon be
        other files'.
        """
        if lease.shard is not None:
            layout = self._cache.layout
            key = lease.shard.key
            return {"path": str(layout.tar(key)), "index_path": str(layout.sidecar(key))}
        # A lease on a whole shard without a published shard has the unpublished files.
        assert lease.files is not None
        files = lease.files
        return {"path": str(files.tar), "index_path": str(files.sidecar), "inode": files.inode}

    @staticmethod
    def _arriving_fields(partial: Partial, ready_bytes: int) -> Json:
        """Return the fields of an answer that grants an incomplete file.

        Args:
            ready_bytes: number of bytes at the file's beginning that may be read; for a range, the
                end of the bytes that may be read, or 0 for no more than the requested bytes.
        """
        obj = partial.obj
        return {
            "url": redact(obj.url),
            "version": obj.version,
            "path": str(partial.path),
            "inode": partial.inode,
            "size_bytes": obj.size_bytes,
            "ready_bytes": ready_bytes,
        }

    def _explain(self, request_id: int) -> Json:
        """Return why a request has not been answered."""
        answer: Json = {"type": "waiting", "of": request_id}
        if self._resolving.locked() and request_id == self._resolving_id:
            reason = self._cache.reasons.of_listing(self._resolving_urls)
            return answer | {"reason": reason}
        if request_id not in self._awaited:
            return answer | {"reason": "the daemon has just answered"}

        transfer = self._reader.transfer(self._awaited[request_id])
        if transfer is None:
            return answer | {"reason": "checking with the origin for a newer version"}
        wait = self._reader.wait(request_id)
        answer["reason"] = self._cache.reasons.of_wait(wait, transfer)
        if transfer.total_bytes is not None:
            answer["done_bytes"] = transfer.arrived_bytes
            answer["total_bytes"] = transfer.total_bytes
        return answer


def _range_in(message: Json) -> tuple[int, int] | None:
    """Return start and end of the range that a reader wants; None if it wants the whole shard.

    In messages, `beyond` is the offset of the range's last byte; the end returned is one more.
    """
    if "start" not in message or "beyond" not in message:
        return None
    return message["start"], message["beyond"] + 1
