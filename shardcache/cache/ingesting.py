"""From a shard whose parts have all arrived to a published one: inflate, index, publish."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from shardcache.cache.known import Known
from shardcache.cache.room import NOW, Room
from shardcache.config import OriginTable
from shardcache.errors import CapacityError
from shardcache.redact import redact
from shardcache.store.indexers import Indexers
from shardcache.store.indexing import Request
from shardcache.store.inflate import codec_of, inflate
from shardcache.store.layout import SIDECAR, TAR
from shardcache.store.partial import Partial
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import Reservation, footprint_bytes
from shardcache.store.store import Store


@dataclass(frozen=True, slots=True)
class _Tar:
    """A whole, plain tar on disk, with the CRC32C of each of its pieces."""

    path: Path
    size_bytes: int
    crcs: list[int]


class Ingester:
    """Publishes what was downloaded."""

    def __init__(self, store: Store, room: Room, known: Known, indexers: Indexers) -> None:
        self._store = store
        self._room = room
        self._known = known
        self._indexers = indexers
        self._inflating = asyncio.Lock()
        self._queued_bytes = 0

    async def publish(self, partial: Partial, reservation: Reservation, rule: OriginTable) -> Shard:
        """Return the shard that a complete partial has become; the reservation ends with it.

        Raises ShardError when it is no sound tar, CapacityError and DiskFullError when there is no space to inflate it.
        """
        tar = await self._plain_tar(partial, reservation)
        facts = await self._index(partial, tar, reservation, rule)
        await self._known.remember(facts)
        sidecar_path = self._store.layout.in_progress(partial.key, SIDECAR)
        shard = await self._store.publish(partial.key, tar.path, sidecar_path, facts)
        # No task gets its turn from here until the caller has the shard: nobody can evict it before that.
        reservation.close(kept_bytes=shard.kept_bytes)
        self._room.arrived(shard)
        return shard

    async def _plain_tar(self, partial: Partial, reservation: Reservation) -> _Tar:
        codec = codec_of(partial.obj.url)
        if codec is None:
            return _Tar(partial.path, partial.obj.size_bytes, partial.crcs())
        path = self._store.layout.in_progress(partial.key, TAR)
        loop = asyncio.get_running_loop()

        def reserve(size_bytes: int) -> None:
            growth = self._grow(reservation, size_bytes, partial.obj.url)
            asyncio.run_coroutine_threadsafe(growth, loop).result()

        self._queued_bytes += reservation.size_bytes
        async with self._inflating:  # two that grow at once could wait for each other's space
            self._queued_bytes -= reservation.size_bytes
            size_bytes, crcs = await asyncio.to_thread(
                inflate, partial.path, path, codec, partial.part_bytes, reserve, partial.obj.url
            )
        return _Tar(path, size_bytes, crcs)

    async def _grow(self, reservation: Reservation, size_bytes: int, url: str) -> None:
        while not await self._room.try_reserve(reservation, size_bytes, NOW):
            moving_bytes = self._store.space.promised_bytes - reservation.size_bytes - self._queued_bytes
            if not moving_bytes and not any(shard.leases for shard in self._store.shards.values()):
                raise CapacityError("the shard, decompressed, does not fit beside what is arriving", url=url)
            await self._room.change()  # for a reader to be done with its shard, or another shard to be whole
        reservation.written(size_bytes)

    async def _index(self, partial: Partial, tar: _Tar, reservation: Reservation, rule: OriginTable) -> Facts:
        obj = partial.obj
        facts = Facts(
            url=redact(obj.url),
            version=obj.version,
            size_bytes=tar.size_bytes,
            origin_bytes=obj.size_bytes,
            part_bytes=partial.part_bytes,
            part_crcs=tuple(tar.crcs),
            samples=0,
        )
        request = Request(
            tar=str(tar.path),
            sidecar=str(self._store.layout.in_progress(partial.key, SIDECAR)),
            header=facts.to_json(),
            url=obj.url,
            require_end=rule.require_end,
            allowed_bytes=footprint_bytes(obj.size_bytes) - obj.size_bytes,
            ignore_trailing_data=rule.ignore_trailing_data,
        )
        indexed = await self._indexers.index(request)
        if not indexed.written:  # so many tiny samples are rare enough to be walked twice
            await self._grow(reservation, indexed.sidecar_bytes - request.allowed_bytes, obj.url)
            indexed = await self._indexers.index(replace(request, allowed_bytes=indexed.sidecar_bytes))
        return replace(facts, samples=indexed.samples)
