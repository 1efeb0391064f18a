"""One shard, from its url to a published file: ask, reserve, download, inflate, index, publish."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from shardcache.cache.ingesting import Ingester
from shardcache.cache.names import Names
from shardcache.cache.room import Room
from shardcache.cache.transfers import Class, PostponedError, Stage, Transfer
from shardcache.errors import CorruptShardError, ShardcacheError, ShardChangedError
from shardcache.fetch.download import Downloader
from shardcache.metrics import Counters
from shardcache.origin.base import Origin, RemoteObject
from shardcache.origin.registry import Origins
from shardcache.store import partial as partials
from shardcache.store.layout import PART, shard_key
from shardcache.store.partial import Partial
from shardcache.store.recovery import interrupted
from shardcache.store.shard import Shard
from shardcache.store.space import Reservation, footprint_bytes
from shardcache.store.store import Store

log = structlog.get_logger()

# A shard that is replaced while it is read is fetched anew this often; whoever rewrites it faster than it can be
# read once is told so.
_VERSIONS = 3

# What someone warms is needed later than what any plan names, and sooner than what none does.
_AFTER_ALL_PLANS = sys.maxsize


@dataclass(frozen=True, slots=True)
class Claim:
    """The transfers that lead to one key; the one that holds the lock does the work, as urgently as all of them."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    transfers: list[Transfer] = field(default_factory=list)


class Fetcher:
    """What `Transfers` calls for each shard."""

    def __init__(
        self,
        store: Store,
        origins: Origins,
        downloader: Downloader,
        room: Room,
        names: Names,
        counters: Counters,
        ingester: Ingester,
        part_bytes: int,
    ) -> None:
        self._store = store
        self._origins = origins
        self._downloader = downloader
        self._room = room
        self._names = names
        self._counters = counters
        self._ingester = ingester
        self._part_bytes = part_bytes
        self._claims: dict[str, Claim] = {}

    async def fetch(self, transfer: Transfer) -> Shard:
        """Return the published shard; the store's present version of it where that is not the planned one.

        Raises every error of the origin, the shard and the cache.
        """
        origin = self._origins.origin(transfer.ref.url)
        failure: ShardcacheError | None = None
        for _ in range(_VERSIONS):
            transfer.stage = Stage.ASKING
            obj = await self._downloader.stat(origin, transfer.ref.url)
            try:
                return await self._version(transfer, origin, obj)
            except (ShardChangedError, CorruptShardError) as exn:
                # A bit that flipped on the way is mended by another try; a damaged object is damaged again.
                if isinstance(exn, CorruptShardError) and isinstance(failure, CorruptShardError):
                    raise
                failure = exn
                log.info("fetching the shard anew", url=transfer.ref.url, version=obj.version, cause=exn.message)
        assert failure is not None
        raise failure

    async def _version(self, transfer: Transfer, origin: Origin, obj: RemoteObject) -> Shard:
        key = shard_key(obj.url, obj.version)
        self._names.learn(transfer.name, key, time.monotonic())
        if transfer.ref.version not in (None, obj.version):
            log.warning("the store holds another version than the manifest", url=obj.url, version=obj.version)
        async with self._claimed(key, transfer):
            present = self._store.shards.get(key)
            if present is not None:
                return present
            transfer.total_bytes, transfer.done_bytes = obj.size_bytes, 0
            return await self._into(transfer, origin, obj)

    @asynccontextmanager
    async def _claimed(self, key: str, transfer: Transfer) -> AsyncIterator[None]:
        """Wait for another transfer that leads to the same key: one plan knew the version, another only the url."""
        claim = self._claims.setdefault(key, Claim())
        claim.transfers.append(transfer)
        try:
            async with claim.lock:
                yield
        finally:
            claim.transfers.remove(transfer)
            if not claim.transfers:
                del self._claims[key]

    async def _into(self, transfer: Transfer, origin: Origin, obj: RemoteObject) -> Shard:
        key, reservation = shard_key(obj.url, obj.version), self._store.space.reserve()
        self._store.adopt(key, reservation)
        adopted_bytes = reservation.size_bytes
        try:
            await self._reserve(reservation, transfer, key, obj)
            if (present := self._store.shards.get(key)) is not None:
                return present  # it was being evicted when this began, and could not be
            partial = await asyncio.to_thread(Partial.open, self._store.layout, obj, self._part_bytes)
            reservation.written(max(0, obj.size_bytes - adopted_bytes))
            return await self._download(reservation, transfer, origin, partial)
        except ShardcacheError as exn:
            if isinstance(exn, CorruptShardError):
                self._counters.corrupt += 1
            reusable = exn.retryable and not isinstance(exn, ShardChangedError)
            await asyncio.to_thread(partials.discard, self._store.layout, key, keep_parts=reusable)
            raise
        finally:
            self._leave_parts(key, reservation)

    async def _reserve(self, reservation: Reservation, transfer: Transfer, key: str, obj: RemoteObject) -> None:
        transfer.stage = Stage.SPACE
        wanted_bytes = max(0, footprint_bytes(obj.size_bytes) - reservation.size_bytes)
        while not await self._room.try_reserve(reservation, wanted_bytes, self._needed_in(key)):
            self._room.check_possible(footprint_bytes(obj.size_bytes), obj.url)
            if self._urgency(key) is Class.PLANNED and not self._is_awaited(key):
                self._names.learn_size(transfer.name, obj.size_bytes)
                raise PostponedError
            await self._room.change()

    async def _download(self, reservation: Reservation, transfer: Transfer, origin: Origin, partial: Partial) -> Shard:
        transfer.stage = Stage.NETWORK
        await self._downloader.download(
            origin, partial.obj, partial, priority=lambda: self._urgency(partial.key), progress=transfer.set_done
        )
        transfer.stage = Stage.DISK
        require_end = self._origins.rule(partial.obj.url).require_end
        return await self._ingester.publish(partial, reservation, require_end=require_end)

    def _leave_parts(self, key: str, reservation: Reservation) -> None:
        """End the reservation; what it leaves on disk stays, while there is space, for whoever asks for it next."""
        reservation.close()
        parts = interrupted(self._store.layout.in_progress(key, PART))
        if parts.size_bytes:
            self._store.leave(parts)

    def _urgency(self, key: str) -> Class:
        return min(transfer.klass for transfer in self._claims[key].transfers)

    def _is_awaited(self, key: str) -> bool:
        return any(transfer.waiters for transfer in self._claims[key].transfers)

    def _needed_in(self, key: str) -> float:
        match self._urgency(key):
            case Class.WAITING | Class.NEXT:
                return 0
            case Class.PLANNED:
                return self._room.next_use(key)
            case Class.WARM:
                return _AFTER_ALL_PLANS
