"""Bytes of objects, kept in the cache while a client reads them.

The S3 endpoint reads objects here, for clients without a plan. To hold bytes means to keep them
from eviction, as a lease does. The bytes of an object may be in a published file (the whole
object), in an arriving file (its beginning, while the rest is downloaded), or in a file of parts
(some of its parts).
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from shardcache.cache.fetching.leasing import Leasing, Published
from shardcache.cache.listings.shard_listing import name_of
from shardcache.cache.space.residency import Residency
from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.waits import JobKey, PriorityClass, Wait
from shardcache.origin.objects import RemoteObject
from shardcache.plan.reader_plan import NOW
from shardcache.shared.protocol import ShardRef
from shardcache.shared.wording.redact import redact
from shardcache.store.folder.layout import Layout
from shardcache.store.part_file import PartFile, Span
from shardcache.store.shard import Shard
from shardcache.store.space import footprint_bytes
from shardcache.telemetry.metrics import Counters


class HeldBytes(Protocol):
    """Bytes of one version of an object in a file, which stay as they are while they are held."""

    @property
    def path(self) -> Path:
        """Path of the file, which has to be opened at once, as it may be renamed later."""

    async def beyond(self, have_bytes: int) -> int:
        """Wait until the bytes that may be read end beyond `have_bytes`; return their end.

        Offsets count from the start of the object. Raises the errors of fetching.
        """

    def note_lost(self) -> None:
        """Record that others have removed the file, so that its bytes are fetched again."""


@dataclass(frozen=True, slots=True)
class _CachedObject:
    """All bytes of an object, in a published file."""

    path: Path
    _shard: Shard

    async def beyond(self, have_bytes: int) -> int:
        return self._shard.size_bytes

    def note_lost(self) -> None:
        self._shard.suspicion = "its file cannot be opened"


@dataclass(frozen=True, slots=True)
class _ArrivingObject:
    """The beginning of an object that is arriving, which grows as further bytes arrive."""

    _arrival: Arrival
    _client: JobKey

    @property
    def path(self) -> Path:
        return self._arrival.partial.path

    async def beyond(self, have_bytes: int) -> int:
        obj = self._arrival.partial.obj
        if self._arrival.shard is not None:
            return obj.size_bytes
        if self._arrival.ready_bytes <= have_bytes:
            wait = Wait(self._client, idle_since_s=time.monotonic(), is_file=True)
            await self._arrival.wait_beyond(have_bytes, wait)
        if self._arrival.shard is not None:
            return obj.size_bytes
        return self._arrival.ready_bytes

    def note_lost(self) -> None:
        """Do nothing, as the transfer that fills the file notices the loss."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Some parts of an object. `_end` is the end of the bytes that may be read."""

    _residency: Residency
    _file: PartFile
    _end: int

    @property
    def path(self) -> Path:
        return self._file.partial.path

    async def beyond(self, have_bytes: int) -> int:
        return self._end

    def note_lost(self) -> None:
        self._residency.parts.give_up_if_removed(self._file)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectReads:
    """Reads of objects in a known version, each of which holds its bytes until it ends.

    A read holds one object, or some parts of one object, and waits for no other space during that
    time. So reads never wait for each other's space in a circle.
    """

    _leasing: Leasing
    _residency: Residency
    _layout: Layout
    _counters: Counters

    def fits(self, obj: RemoteObject) -> bool:
        """Return whether there would be space for the whole object now, without waiting."""
        return self._residency.fits_now(footprint_bytes(obj.size_bytes), needed_at_s=NOW)

    def is_space_wanted(self) -> bool:
        """Return whether anything waits for space in the cache."""
        return any(claim.wanted_bytes for claim in self._residency.claims.values())

    def at_hand(self, obj: RemoteObject, span: Span) -> Path | None:
        """Return a file that has a range of an object, which has to be read before the next await.

        None if the range has to be fetched or checked first, which `hold_span` does.

        Args:
            obj: the object.
            span: start and end of the range in bytes.
        """
        file = self._leasing.at_hand(name_of(_ref(obj)), span, obj.version)
        if file is None:
            return None
        if isinstance(file, Shard):
            self._count_hit(file)
            return _tar_of(self._layout, file.key)
        self._counters.hits += 1  # only bytes of whole files are counted
        self._residency.parts.used(file, file.parts_of(span))
        return file.partial.path

    @asynccontextmanager
    async def hold_whole(self, obj: RemoteObject, client: JobKey) -> AsyncIterator[HeldBytes]:
        """Hold an object during the block, which begins once its first bytes have arrived.

        Raises every error that fetching can raise, and OutdatedError if the origin has another
        version.

        Args:
            obj: the object.
            client: the client that is charged, and shown as waiting.
        """
        file = self._leasing.at_hand(name_of(_ref(obj)), (0, obj.size_bytes), obj.version)
        if isinstance(file, Shard):
            self._count_hit(file)
            async with self._cached(file) as held:
                yield held
            return

        wait = Wait(client, idle_since_s=time.monotonic(), accepts_partial=True)
        acquired = await self._leasing.acquire(_ref(obj), PriorityClass.PLANNED, wait)
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
    async def hold_span(
        self,
        obj: RemoteObject,
        span: Span,
        client: JobKey,
        ahead: Span | None = None,
        *,
        in_order: bool = False,
    ) -> AsyncIterator[HeldBytes]:
        """Hold a range of an object during the block. Raises as `hold_whole` does.

        Args:
            obj: the object.
            span: start and end of the range in bytes.
            client: the client that is charged, and shown as waiting.
            ahead: the range that will be read next; None if it is not known.
            in_order: True if the range is read in order. The block may then begin once the first
                byte of the range has arrived, and holds only the beginning that is cached by then.
        """
        # 1. The bytes are in the published file of the whole object.
        file = self._leasing.at_hand(name_of(_ref(obj)), span, obj.version)
        if isinstance(file, Shard):
            self._count_hit(file)
            async with self._cached(file) as held:
                yield held
            return

        # 2. They have to be fetched or checked first, and may then be in either kind of file.
        if file is None:
            wait = Wait(
                client,
                idle_since_s=time.monotonic(),
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
            file = acquired
        else:
            self._counters.hits += 1  # only bytes of whole files are counted

        # 3. They are in parts.
        start, _ = span
        end = file.first_missing_byte(span)
        parts = file.parts_of((start, end))
        self._residency.parts.retain(file, parts)
        try:
            yield _Parts(self._residency, file, end)
        finally:
            self._residency.parts.release(file, parts)

    def count_sent(self, obj: RemoteObject, size_bytes: int, client: JobKey) -> None:
        """Count bytes of an object that were sent to a client."""
        self._counters.s3_bytes += size_bytes
        self._counters.bills.add_read(redact(obj.url), size_bytes, client)

    @asynccontextmanager
    async def _cached(self, shard: Shard) -> AsyncIterator[HeldBytes]:
        """Hold a published object during the block."""
        self._residency.retain(shard)
        try:
            yield _CachedObject(_tar_of(self._layout, shard.key), shard)
        finally:
            await self._leasing.release(shard)

    async def _leave(self, arrival: Arrival, client: JobKey) -> None:
        """End a read of an object that was arriving, and may be published by now.

        The published object was retained for each reader of the arriving one (`Arrival.publish`).
        """
        if arrival.shard is not None:
            await self._leasing.release(arrival.shard)
        else:
            arrival.leave(client)

    def _count(self, published: Published) -> None:
        """Count a read as a hit or a miss."""
        if published.is_hit:
            self._count_hit(published.shard)
        else:
            self._counters.misses += 1

    def _count_hit(self, shard: Shard) -> None:
        """Count a read of a published object."""
        self._counters.hits += 1
        self._counters.hit_bytes += shard.size_bytes


@lru_cache(4096)
def _tar_of(layout: Layout, key: str) -> Path:
    """Return the path of a published object.

    Paths are cached, as clients read many ranges of the same objects.
    """
    return layout.tar(key)


def _ref(obj: RemoteObject) -> ShardRef:
    """Return an object as a plain file, as transfers name it."""
    return ShardRef(obj.url, obj.version, obj.size_bytes, is_file=True)
