"""A reader's session over a WebSocket: requests in, answers out.

`session_start` accepts the WebSocket and runs one `ReaderSession` for each connected reader. A
reader is one process that iterates over a dataset, such as a worker of a DataLoader. Its plan is
the order in which it reads shards; a position is an index in that order. A lease is a reader's
right to read one shard of the plan. A grant is the answer that gives the reader a lease. A bundle
is a message that contains several. An arriving shard is one that the daemon is still fetching. A
list of shards is sent once, and then named by its fingerprint. `shared.protocol` documents all
messages.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import structlog
from aiohttp import WSMsgType, web

from shardcache.access.rules import Peer
from shardcache.cache.listings.shard_listing import Listing
from shardcache.cache.readers.connected_reader import Reader
from shardcache.cache.readers.leases import Lease
from shardcache.server.grants import grant_of
from shardcache.server.outbox import Outbox
from shardcache.server.service import Service
from shardcache.shared import protocol
from shardcache.shared.announced_range import announced_ranges
from shardcache.shared.exceptions import ProtocolError, ShardcacheError, internal_error
from shardcache.shared.protocol import REQUESTS, Json, take

log = structlog.get_logger()

# A request has a slot while it is handled, but not while it waits for a shard. Both the slots and
# the waiting requests of a session are limited.
_MAX_SLOTS = 32
_MAX_AWAITED = 8192
# Parsing a longer message blocks the event loop noticeably: such messages take turns.
_LONG_CHARS = 16 * 1024
# A reader waits this long for another reader to send a list of shards. Then the daemon has the
# waiting reader send the list as well.
_LIST_WAIT_S = 10.0


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
        self._plan_lock = asyncio.Lock()
        self._range_plan_lock = asyncio.Lock()
        self._resolve_lock = asyncio.Lock()
        # Holds the lock of a list of shards while this reader is to send the list, so that no other
        # reader of the same user sends it, too.
        self._held_list_lock = AsyncExitStack()
        self._running: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup
        self._resolving_id = 0  # id of the latest `resolve` request
        self._resolving_urls: list[str] = []  # urls of that request
        self._slots = asyncio.Semaphore(_MAX_SLOTS)
        self._outbox = Outbox(socket, accepts_bundles=hello.get("bundles", False))

    async def run(self) -> None:
        """Handle messages until the connection ends, then cancel the requests that still wait."""
        async with self._held_list_lock, asyncio.TaskGroup() as self._tasks:
            async for encoded in self._encoded_messages():
                # Backpressure: a client with too many unanswered requests is not read any further.
                await self._slots.acquire()
                if len(encoded) > _LONG_CHARS:
                    await self._cache.turns.wait()
                self._start(self._handle(encoded))
                # Buffered messages arrive without a pause: let other sessions run in between.
                await asyncio.sleep(0)
            for task in self._running:
                task.cancel()

    def _start(self, handling: Coroutine[Any, Any, None]) -> None:
        """Handle a message in a task, which is cancelled when the connection ends."""
        task = self._tasks.create_task(handling)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _encoded_messages(self) -> AsyncIterator[str | bytes]:
        """Yield messages as they arrive, until the connection ends."""
        # A reader may disconnect between its ping and the daemon's pong, which raises this error.
        with suppress(ConnectionError):
            async for message in self._socket:
                if self._outbox.is_gone:
                    break  # nobody needs the reader's remaining requests
                if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
                    yield message.data

    async def _handle(self, encoded: str | bytes) -> None:
        """Answer a message, for which `run` has taken a slot."""
        try:
            try:
                messages = protocol.unbundled(protocol.parse(encoded))
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
        """Grant cached ranges together; handle other messages as if each was sent alone."""
        grants: list[Json] = []
        for message in messages:
            if message.get("type") in ("need", "release"):
                # These get no answer, and wait for no shard.
                await self._handle_one(message)
                continue
            grant = self._try_grant_cached_range(message)
            if grant is None:
                self._start(self._handle_in_slot(message))
            else:
                grants.append(grant)
        if grants:
            await self._outbox.send(grants)

    async def _handle_in_slot(self, message: Json) -> None:
        """Answer one message of a bundle in a slot: `run` has taken a slot only for the bundle."""
        async with self._slots:
            await self._handle_one(message)

    async def _handle_one(self, message: Json) -> None:
        """Answer one message; after an exception, answer with an error."""
        request_id: int | None = None
        try:
            kind = str(message.get("type"))
            request = REQUESTS.get(kind, protocol.UNKNOWN_KIND)
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
        async with self._plan_lock:  # this waits for the earlier plans
            is_plan = message.get("type") in ("shards", "plan", "extend")
            if is_plan:
                return await self._answer(message, request_id)
        if message.get("type") == "plan_ranges":
            await self._plan_ranges(message)
            return None
        # Other requests do not wait for each other, and a later plan does not wait for them.
        return await self._answer(message, request_id)

    async def _answer(self, message: Json, request_id: int) -> Json | None:
        """Return the answer to a checked message; None if this kind of message gets none."""
        match message.get("type"):
            case "resolve":
                # One at a time: each manifest may have millions of shards.
                async with self._resolve_lock:
                    return await self._resolve(request_id, message)
            case "shards" if "packed" in message:
                await self._take_list(message["packed"])
                return {"type": "ok"}
            case "shards":
                is_known = await self._find_or_await_list(message["fingerprint"])
                return {"type": "ok" if is_known else "unknown"}
            case "plan":
                return await self._declare_plan(message)
            case "extend":
                return await self._extend_plan(message)
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
        max_age_s = math.inf  # by default, a listing that the cache still has may be of any age
        if "max_age_ms" in message:
            max_age_s = message["max_age_ms"] / 1000
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
            "remembered": manifest.remembered_counts,
            # This compresses the list, so it runs in a thread.
            "packed": await asyncio.to_thread(lambda: manifest.shards.packed),
        }

    # Plans

    async def _find_or_await_list(self, fingerprint: str) -> bool:
        """Return whether the daemon has a list of shards; if not, this reader has to send it now.

        If another reader of the same user is sending the list, this waits for it. If this reader
        has to send it, others wait until it has done so or disconnects.
        """
        manifests = self._cache.manifests
        await self._held_list_lock.aclose()
        lock = manifests.sending_lock(fingerprint, self._peer)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LIST_WAIT_S):
                await self._held_list_lock.enter_async_context(lock)
        if await manifests.known([fingerprint], self._peer) is None:
            return False  # the lock is held until the list is sent
        await self._held_list_lock.aclose()
        return True

    async def _take_list(self, packed: bytes) -> None:
        """Keep a list of shards that the reader has sent; other readers no longer wait for it."""
        async with self._held_list_lock:
            await self._cache.manifests.admit(packed, self._peer)

    async def _declare_plan(self, message: Json) -> Json:
        """Declare a new plan in place of the present one."""
        fingerprints: list[str] = message["shards"]
        wanted = protocol.wanted_of(message)
        listing = await self._cache.manifests.known(fingerprints, self._peer, wanted)
        if listing is None:
            return {"type": "unknown"}
        await self._check_order(message["order"], listing)
        self._reader.declare(listing, message["reads"])
        self._note_epoch(message.get("epoch"))
        await self._reader.extend(message["order"])
        return {"type": "ok"}

    async def _extend_plan(self, message: Json) -> Json:
        """Append shards to the present plan."""
        if self._reader.listing is None:
            raise ProtocolError("'extend' without a plan to extend")
        await self._check_order(message["order"], self._reader.listing)
        await self._reader.extend(message["order"])
        return {"type": "ok"}

    async def _plan_ranges(self, message: Json) -> None:
        """Take note of the ranges that the reader reads next."""
        ranges = announced_ranges(message["ranges"])
        self._reader.announced.check(ranges)
        listing = self._reader.listing
        async with self._range_plan_lock:  # each of these messages takes several turns
            if self._reader.listing is not listing:
                return  # the reader has declared another plan in the meantime
            if message.get("begins", False):
                self._reader.announced.begin()
            await self._reader.announced.add(ranges)

    async def _check_order(self, order: Sequence[object], listing: Listing) -> None:
        """Raise ProtocolError unless an order consists of indices of a listing's shards."""
        count = len(listing.shards)
        # An order may be long, so other sessions get turns on the event loop between its pieces.
        await self._cache.turns.take(order, lambda piece: protocol.check_indices(piece, count))

    def _note_epoch(self, epoch: int | None) -> None:
        """Write a plan's epoch to the audit log, once per epoch.

        A reader that skips samples declares another plan for the same epoch.
        """
        if not self._has_planned or epoch != self._epoch:
            hello = self._hello
            sizes = {name: hello[name] for name in ("world_size", "workers") if name in hello}
            place = (hello.get("rank"), hello.get("worker"))
            self._audit.note_plan(self._reader.job.key, epoch, place, **sizes)
        self._has_planned = True
        self._epoch = epoch

    # Leases

    def _try_grant_cached_range(self, message: Json) -> Json | None:
        """Return the grant of a range, if it is cached.

        Returns None for any other message, and for one that is invalid: `_handle_one` then answers
        it, with an error if necessary.
        """
        if message.get("type") != "lease":
            return None
        if self._plan_lock.locked():  # the position may be in the plan that is being declared
            return None
        try:
            REQUESTS["lease"].check(message)
            span = _range_in(message)
            if span is None:
                return None  # the whole shard is wanted
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
        return self._grant(lease, message) | {"id": message["id"]}

    async def _lease(self, request_id: int, message: Json) -> Json:
        """Wait for a shard, or a range of one, and return its grant."""
        position = message["position"]
        async with self._waiting_without_slot(request_id, position):
            lease = await self._reader.lease(
                request_id,
                position,
                span=_range_in(message),
                partial=message.get("partial", False),
                unpublished=message.get("unpublished", False),
                latest=message.get("latest", False),
                needed=message.get("needed", False),
            )
            named_path: Json = {}  # the field, if the reader wants it
            if message.get("named"):
                named_path = await self._named_path(lease)
            return self._grant(lease, message) | named_path

    async def _more(self, request_id: int, message: Json) -> Json:
        """Wait until more bytes of an arriving shard can be read, and grant its lease again."""
        number = message["lease"]
        position = self._reader.position(number)
        async with self._waiting_without_slot(request_id, position):
            lease = await self._reader.more(number, message["beyond"])
            return self._grant(lease, message)

    async def _release(self, message: Json) -> None:
        """End a lease, and report the damage that the reader found in its shard, if any."""
        self._reader.job.samples_unmatched += message.get("unmatched", 0)
        await self._reader.release(
            message["lease"],
            read=message.get("read", True),
            damage=message.get("damage", ""),
        )

    @asynccontextmanager
    async def _waiting_without_slot(self, request_id: int, position: int) -> AsyncIterator[None]:
        """Free the request's slot during the block, in which the request waits for a shard.

        Otherwise waiting requests could take all slots, and the messages that end their waits, such
        as `release`, would get none.

        Args:
            position: the position in the plan of the awaited shard.
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

    def _grant(self, lease: Lease, request: Json) -> Json:
        """Return the answer that grants a lease.

        It also reports, once, damage that was found in other shards which this reader has leased.
        """
        lease.range_number = request.get("number", lease.range_number)
        answer = grant_of(lease, request, self._cache.layout)
        damaged = [damage.to_json() for damage in self._reader.take_damage()]
        if damaged:
            answer["damaged"] = damaged
        return answer

    def _explain(self, request_id: int) -> Json:
        """Return why a request has not been answered."""
        answer: Json = {"type": "waiting", "of": request_id}
        if self._resolve_lock.locked() and request_id == self._resolving_id:
            reason = self._cache.reasons.of_listing(self._resolving_urls)
            return answer | {"reason": reason}
        if request_id not in self._awaited:
            # The answer is on its way: the reader sent this request before it could read it.
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

    In messages, `beyond` is the offset of the range's last byte. The returned end is excluded.
    """
    if "start" not in message or "beyond" not in message:
        return None
    return message["start"], message["beyond"] + 1
