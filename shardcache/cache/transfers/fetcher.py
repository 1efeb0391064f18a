"""Fetching of one shard, from url to published file: stat, reserve, download, inflate, index, publish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.planner import Planner
from shardcache.cache.residency.disk_health import Health
from shardcache.cache.residency.evictor import NOW, Evictor
from shardcache.cache.residency.inventory import Inventory
from shardcache.cache.residency.publishing import Ingester
from shardcache.cache.transfers.arriving import Arrival
from shardcache.cache.transfers.priorities import first_priority, priority
from shardcache.cache.transfers.transfers import Class, KeyClaim, PostponedError, Transfer
from shardcache.cache.transfers.waiting import Stage
from shardcache.errors import (
    CorruptShardError,
    DiskError,
    OriginUnavailableError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.fetch.download import Downloader
from shardcache.fetch.parts.pausable_read import Coming
from shardcache.fetch.retry import refetch
from shardcache.metrics import Counters
from shardcache.origin.base import Origin, RemoteObject
from shardcache.origin.registry import Origins
from shardcache.store import partial as partials
from shardcache.store.folder import PART, shard_key
from shardcache.store.partial import Partial
from shardcache.store.recovery import Leftover, interrupted
from shardcache.store.shard import Shard
from shardcache.store.space import Reservation, footprint_bytes
from shardcache.store.store import Store

log = structlog.get_logger()


class Fetcher:
    """Fetches shards on behalf of `Transfers`."""

    def __init__(
        self,
        store: Store,
        origins: Origins,
        downloader: Downloader,
        evictor: Evictor,
        inventory: Inventory,
        planner: Planner,
        aliases: AliasTable,
        counters: Counters,
        ingester: Ingester,
        health: Health,
        part_bytes: int,
    ) -> None:
        self._store = store
        self._origins = origins
        self._downloader = downloader
        self._evictor = evictor
        self._inventory = inventory
        self._planner = planner
        self._aliases = aliases
        self._counters = counters
        self._ingester = ingester
        self._health = health
        self._part_bytes = part_bytes

    async def fetch(self, transfer: Transfer) -> Shard:
        """Return the published shard, in the planned version or, if none was planned, the origin's present one.

        Raises the errors of the origin, the shard and the cache; PostponedError if the disk has failed and no reader
        waits for the shard.
        """
        url = transfer.ref.url
        if self._health.error is not None and not transfer.waits:
            raise PostponedError
        try:
            return await self._fetch(transfer)
        except DiskError as exn:
            exn.url = exn.url or url
            if not await self._health.examine():
                if transfer.waits:
                    raise
                raise PostponedError from exn
            log.warning("transient disk error; retrying the shard", cause=exn.message)
        try:
            return await self._fetch(transfer)
        except DiskError as exn:
            exn.url = exn.url or url
            raise

    def is_under_way(self, key: str) -> bool:
        """Return whether a transfer is working on the files of a key."""
        return key in self._evictor.claims

    @refetch
    async def _fetch(self, transfer: Transfer) -> Shard:
        url = transfer.ref.url
        origin = self._origins.origin(url)
        transfer.stages.enter(Stage.ASKING)
        with self._downloader.expect(url, lambda: first_priority(transfer)):
            obj = await self._downloader.stat(origin, url, transfer.ref.version)
            return await self._version(transfer, origin, obj)

    async def _version(self, transfer: Transfer, origin: Origin, obj: RemoteObject) -> Shard:
        key = shard_key(obj.url, obj.version)
        self._aliases.learn(transfer.name, key, obj.reported_s)
        self._aliases.learn_size(transfer.name, obj.size_bytes)
        async with self._claimed(key, transfer) as claim:
            present = self._store.shards.get(key)
            if present is not None:
                return present
            self._health.check(obj.url)
            transfer.total_bytes, transfer.done_bytes, transfer.coming = (
                obj.size_bytes,
                0,
                Coming(transfer.moved.notify),
            )
            return await self._into(transfer, claim, origin, obj)

    @asynccontextmanager
    async def _claimed(self, key: str, transfer: Transfer) -> AsyncIterator[KeyClaim]:
        """Serialize transfers that lead to the same key: one plan may know the version, another only the url."""
        claim = self._evictor.claims.setdefault(key, KeyClaim())
        claim.transfers.append(transfer)
        try:
            async with claim.lock:
                yield claim
        finally:
            claim.transfers.remove(transfer)
            if not claim.transfers:
                del self._evictor.claims[key]

    async def _into(self, transfer: Transfer, claim: KeyClaim, origin: Origin, obj: RemoteObject) -> Shard:
        key, reservation = shard_key(obj.url, obj.version), self._store.space.reserve()
        claim.reservation = reservation
        self._store.adopt(key, reservation)
        adopted_bytes, gave_way = reservation.size_bytes, False
        try:
            await self._reserve(claim, transfer, key, obj)
            if (present := self._store.shards.get(key)) is not None:
                return present  # its eviction was under way when this began, and failed
            partial = await asyncio.to_thread(self._open, obj)
            reservation.written(max(0, obj.size_bytes - adopted_bytes))
            return await self._download(claim, transfer, origin, partial)
        except PostponedError:
            gave_way = reservation.size_bytes > adopted_bytes  # others are waiting for exactly this space
            if gave_way:
                await asyncio.to_thread(partials.discard, self._store.layout, key, keep_parts=True)
            raise
        except ShardcacheError as exn:
            if isinstance(exn, CorruptShardError):
                self._counters.corrupt += 1
                self._origins.suspect(obj, self._part_bytes)
            if isinstance(exn, (ShardChangedError, CorruptShardError)):
                log.info("discarding the download", version=obj.version, cause=exn.message)
            if transfer.arriving is not None:
                transfer.arriving.fail(exn)
            reusable = exn.retryable and not isinstance(exn, ShardChangedError)
            await asyncio.to_thread(partials.discard, self._store.layout, key, keep_parts=reusable)
            raise
        finally:
            self._leave_parts(key, reservation, transfer)
            if gave_way:
                self._evictor.changed.notify()

    def _open(self, obj: RemoteObject) -> Partial:
        self._store.folder.check()  # if the disk was unmounted, this would fill the filesystem underneath
        return Partial.open(self._store.layout, obj, self._part_bytes)

    async def _reserve(self, claim: KeyClaim, transfer: Transfer, key: str, obj: RemoteObject) -> None:
        transfer.stages.enter(Stage.SPACE)
        wanted_bytes = max(0, footprint_bytes(obj.size_bytes) - claim.reserved_bytes)
        await self._evictor.reserve(claim, wanted_bytes, lambda: self._needed_at_s(key), ahead_waits=False)

    async def _download(self, claim: KeyClaim, transfer: Transfer, origin: Origin, partial: Partial) -> Shard:
        begun_s = time.monotonic()
        transfer.stages.enter(Stage.NETWORK)
        if partial.codec is None and partial.obj.guarded and partial.obj.ranges:
            transfer.arriving = Arrival(partial, transfer.coming, transfer.moved, transfer.waits)
        await self._downloader.download(
            origin,
            partial.obj,
            partial,
            priority=lambda: priority(claim.transfers, lambda: self._planner.now.next_use_s(partial.key)),
            progress=transfer.set_done,
            coming=transfer.coming,
        )
        transfer.stages.enter(Stage.DISK)
        shard = await self._ingester.publish(partial, claim, self._origins.rule(partial.obj.url))
        self._planner.learn(time.monotonic() - begun_s)
        if transfer.arriving is not None:
            self._hand_over(transfer.arriving, shard)
        return shard

    def _hand_over(self, arriving: Arrival, shard: Shard) -> None:
        for _ in arriving.readers:
            self._inventory.retain(shard)
        arriving.publish(shard)

    def _leave_parts(self, key: str, reservation: Reservation, transfer: Transfer) -> None:
        """Close the reservation; finished parts stay on disk, while there is space, for the next transfer."""
        try:
            parts = interrupted(self._store.layout.in_progress(key, PART))
        except OSError:  # the disk is failing: leftovers are counted once it recovers
            parts = Leftover(key, (), 0)
        arriving, transfer.arriving = transfer.arriving, None
        if arriving is not None and arriving.shard is None:
            arriving.fail(OriginUnavailableError("transfer was cancelled", url=transfer.ref.url))
        if arriving is not None and not parts.size_bytes:
            arriving.when_left(reservation.close)  # unlinked, but takes disk space until the last reader closes it
        else:
            reservation.close()
        if parts.size_bytes:
            self._store.leave(parts)

    def _urgency(self, key: str) -> Class:
        return min(transfer.klass for transfer in self._evictor.claims[key].transfers)

    def _needed_at_s(self, key: str) -> float:
        match self._urgency(key):
            case Class.WAITING:
                return NOW
            case Class.PLANNED:
                return min(self._planner.now.next_use_s(key), self._evictor.due_s(key))
            case Class.WARM:
                return self._evictor.due_s(key)
