"""Bytes of objects, kept in the cache while somebody reads them."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from shardcache.cache.fetching.leasing import Leasing, Published
from shardcache.cache.listings.shard_listing import name_of
from shardcache.cache.space.residency import NOW, Residency
from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.waits import Class, JobKey, Wait
from shardcache.origin.objects import RemoteObject
from shardcache.redact import redact
from shardcache.shared.protocol import ShardRef
from shardcache.store.folder.layout import Layout
from shardcache.store.part_file import PartFile, Span
from shardcache.store.shard import Shard
from shardcache.store.space import footprint_bytes
from shardcache.telemetry.metrics import Counters


class HeldBytes(Protocol):
    """Bytes of one version of an object in a file, which stay as they are while they are held."""

    @property
    def path(self) -> Path:
        """Path of the file; open it at once, as it may be renamed later."""

    async def beyond(self, have_bytes: int) -> int:
        """Return the end of the bytes that may be read, once it is beyond `have_bytes`.

        Raises the errors of fetching.
        """

    def lost(self) -> None:
        """Note that others have removed the file: its bytes are fetched again."""


@dataclass(frozen=True, slots=True)
class _CachedObject:
    """A published object: all of its bytes."""

    path: Path
    _shard: Shard

    async def beyond(self, have_bytes: int) -> int:
        return self._shard.size_bytes

    def lost(self) -> None:
        self._shard.suspicion = "its file cannot be opened"


@dataclass(frozen=True, slots=True)
class _ArrivingObject:
    """An object that is arriving: its beginning, which grows."""

    _arrival: Arrival
    _client: JobKey

    @property
    def path(self) -> Path:
        return self._arrival.partial.path

    async def beyond(self, have_bytes: int) -> int:
        size_bytes = self._arrival.partial.obj.size_bytes
        if self._arrival.shard is not None:
            return size_bytes
        if self._arrival.ready_bytes <= have_bytes:
            wait = Wait(self._client, since_s=time.monotonic(), is_file=True)
            await self._arrival.wait_beyond(have_bytes, wait)
        return size_bytes if self._arrival.shard is not None else self._arrival.ready_bytes

    def lost(self) -> None:
        """Nothing to note: the transfer that fills the file finds out."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Some parts of an object."""

    _residency: Residency
    _file: PartFile
    _end: int

    @property
    def path(self) -> Path:
        return self._file.partial.path

    async def beyond(self, have_bytes: int) -> int:
        return self._end

    def lost(self) -> None:
        self._residency.parts.give_up_if_removed(self._file)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectReads:
    """Reads of objects in a known version, each of which holds what it reads until it ends.

    A read holds one object, or some parts of one, and waits for nothing else meanwhile: reads
    never wait for each other's space in a circle.
    """

    _leasing: Leasing
    _residency: Residency
    _layout: Layout
    _counters: Counters

    def fits(self, obj: RemoteObject) -> bool:
        """Return whether there is space for the whole object now, beside what readers hold."""
        return self._residency.fits_now(footprint_bytes(obj.size_bytes), NOW)

    def is_space_wanted(self) -> bool:
        """Return whether anything waits for space in the cache."""
        return any(claim.wanted_bytes for claim in self._residency.claims.values())

    def at_hand(self, obj: RemoteObject, span: Span) -> Path | None:
        """Return a file that has a range of an object, to be read before the next await.

        None if the range has to be fetched or checked first, which `span` does.
        """
        file = self._leasing.at_hand(name_of(_ref(obj)), span, obj.version)
        if file is None:
            return None
        self._counters.hits += 1
        if isinstance(file, PartFile):
            self._residency.parts.used(file, file.parts_of(span))
            return file.partial.path
        self._counters.hit_bytes += file.size_bytes  # bytes of parts are not counted
        return _tar_of(self._layout, file.key)

    @asynccontextmanager
    async def whole(self, obj: RemoteObject, client: JobKey) -> AsyncIterator[HeldBytes]:
        """Hold an object during the block, which begins once the object's first bytes are there.

        Raises every error of its fetching; OutdatedError if the origin has another version.
        """
        wait = Wait(client, since_s=time.monotonic(), partial=True)
        acquired = await self._leasing.acquire(_ref(obj), Class.PLANNED, wait)
        if isinstance(acquired, Published):
            self._count(acquired)
            async with self._cached(acquired.shard) as held:
                yield held
            return
        self._counters.misses += 1
        try:
            yield _ArrivingObject(acquired, client)
        finally:
            await self._leave(acquired, client)

    @asynccontextmanager
    async def span(
        self,
        obj: RemoteObject,
        span: Span,
        client: JobKey,
        ahead: Span | None = None,
        *,
        in_order: bool = False,
    ) -> AsyncIterator[HeldBytes]:
        """Hold a range of an object during the block. Raises as `whole` does.

        Args:
            ahead: the range that will be read next, if that is known.
            in_order: True if the range is read in order: the block may begin once its first byte is
                there, and holds the cached beginning of it.
        """
        wait = Wait(
            client,
            since_s=time.monotonic(),
            bytes=span,
            in_order=in_order,
            ahead=ahead,
        )
        acquired = await self._leasing.acquire_range(_ref(obj), wait)
        if isinstance(acquired, Published):
            self._count(acquired)
            async with self._cached(acquired.shard) as held:
                yield held
            return
        self._counters.misses += 1
        start, _ = span
        end = acquired.end_in(span)
        parts = acquired.parts_of((start, end))
        self._residency.parts.retain(acquired, parts)
        try:
            yield _Parts(self._residency, acquired, end)
        finally:
            self._residency.parts.release(acquired, parts)

    def sent(self, obj: RemoteObject, size_bytes: int, client: JobKey) -> None:
        """Count bytes of an object that were sent to a client."""
        self._counters.s3_bytes += size_bytes
        self._counters.bills.add_read(redact(obj.url), size_bytes, client)

    @asynccontextmanager
    async def _cached(self, shard: Shard) -> AsyncIterator[HeldBytes]:
        self._residency.retain(shard)
        try:
            yield _CachedObject(self._layout.tar(shard.key), shard)
        finally:
            await self._leasing.release(shard)

    async def _leave(self, arrival: Arrival, client: JobKey) -> None:
        """End a read of an arriving object, which may be published by now."""
        if arrival.shard is not None:
            await self._leasing.release(arrival.shard)
        else:
            arrival.leave(client)

    def _count(self, published: Published) -> None:
        """Count a read as a hit or a miss."""
        if published.hit:
            self._counters.hits += 1
            self._counters.hit_bytes += published.facts.size_bytes
        else:
            self._counters.misses += 1


@lru_cache(4096)
def _tar_of(layout: Layout, key: str) -> Path:
    """Return the path of a published object; small ranges are read of the same ones again."""
    return layout.tar(key)


def _ref(obj: RemoteObject) -> ShardRef:
    return ShardRef(obj.url, obj.version, obj.size_bytes, is_file=True)
