"""Fetching of one shard, from url to published file: stat, reserve, download, inflate, index, publish."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from shardcache.cache.disk import Health
from shardcache.cache.planner import History
from shardcache.cache.residency import NOW
from shardcache.cache.waits import Arrival, Class, KeyClaim, PostponedError, Stage, Transfer
from shardcache.errors import (
    CorruptShardError,
    DiskError,
    OriginUnavailableError,
    ShardcacheError,
    ShardChangedError,
    ShardError,
)
from shardcache.fetch.download import Downloader, refetch
from shardcache.origin.base import Origin, RemoteObject
from shardcache.origin.registry import Origins
from shardcache.store.folder.folder_contents import Leftover
from shardcache.store.folder.layout import PART, SIDECAR, TAR
from shardcache.store.indexing.indexer import IndexRequest, write_bare
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.keys import place_of, shard_key
from shardcache.store.partial import Partial, discard
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import Reservation, footprint_bytes

log = structlog.get_logger()


@dataclass(eq=False, repr=False)
class Fetcher:
    """Fetches shards on behalf of `Transfers`."""

    _health: Health
    _origins: Origins
    _downloader: Downloader
    _history: History
    _indexers: Indexers
    _part_bytes: int
    _inflating: KeyClaim | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._residency = self._health.residency
        self._store, self._planner = self._residency.store, self._residency.planner

    async def fetch(self, transfer: Transfer) -> Shard:
        """Return the published shard. Raises PostponedError if the disk has failed and no reader waits for it."""
        if self._health.error is not None and not transfer.waits:
            raise PostponedError
        try:
            return await self._fetch(transfer)
        except DiskError as exn:
            if not await self._health.examine():
                if transfer.waits:
                    raise
                raise PostponedError from exn
            log.warning("transient disk error; retrying the shard", cause=exn.message)
        return await self._fetch(transfer)

    @refetch
    async def _fetch(self, transfer: Transfer) -> Shard:
        known = self._planner.key(transfer.name)
        if known in self._store.shards:  # it lacks an index, for which the origin need not be asked
            async with self._claimed(known, transfer) as claim:
                shard = await self._cached(transfer, claim, known)
                if shard is not None:
                    return shard

        url = transfer.ref.url
        origin = self._origins.origin(url)
        transfer.stages.enter(Stage.ASKING)
        obj = await self._downloader.stat(origin, url, transfer.ref.version, self._first_bytes(transfer))
        key = shard_key(place_of(obj.url, is_file=transfer.ref.is_file), obj.version)
        self._planner.learn(transfer.name, key, obj.reported_s)
        self._planner.learn_size(transfer.name, obj.size_bytes)
        async with self._claimed(key, transfer) as claim:
            shard = await self._cached(transfer, claim, key)
            if shard is not None:
                return shard
            self._health.check(obj.url)
            transfer.begin(obj.size_bytes)
            return await self._into(transfer, claim, origin, obj, key)

    async def _cached(self, transfer: Transfer, claim: KeyClaim, key: str) -> Shard | None:
        """Return the cached shard, indexed if samples are wanted; None if there is none, or it proves damaged.

        Raises ShardError if it cannot be indexed: it stays a file.
        """
        shard = self._store.shards.get(key)
        if shard is None:
            return None
        facts = shard.facts
        if facts is not None and facts.samples is None and claim.wants_samples:
            transfer.stages.enter(Stage.DISK)
            with self._residency.retained(shard):
                try:
                    await self._store.check_tar(shard, facts)  # an index of damaged bytes would look sound
                except CorruptShardError as exn:
                    if await self._health.found(shard, exn):
                        return None
                    self._health.check(facts.url)
                    raise
                await self._index_present(transfer, claim, shard, facts)
        return shard

    def _first_bytes(self, transfer: Transfer) -> int:
        """Return how much of a shard to request before its version is known: of one that a reader already needs."""
        now = self._planner.now
        is_needed = transfer.waits or now.next_use_s(self._planner.key(transfer.name)) <= now.now_s
        # Finished parts may be there; of a file, another part may be needed first.
        return self._part_bytes if is_needed and not (self._store.leftovers or transfer.ref.is_file) else 0

    @asynccontextmanager
    async def _claimed(self, key: str, transfer: Transfer) -> AsyncIterator[KeyClaim]:
        """Serialize transfers that lead to the same key: one plan may know the version, another only the url."""
        claim = self._residency.claims.setdefault(key, KeyClaim())
        claim.transfers.append(transfer)
        try:
            async with claim.lock:
                yield claim
        finally:
            claim.transfers.remove(transfer)
            if not claim.transfers:
                del self._residency.claims[key]

    async def _into(self, transfer: Transfer, claim: KeyClaim, origin: Origin, obj: RemoteObject, key: str) -> Shard:
        reservation = claim.reservation = Reservation(self._store.space)
        self._store.adopt(key, reservation)
        adopted_bytes, gave_way = reservation.size_bytes, False
        try:
            await self._reserve(claim, transfer, key, footprint_bytes(obj.size_bytes))
            if (present := self._store.shards.get(key)) is not None:
                return present  # its eviction was under way when this began, and failed
            partial = await asyncio.to_thread(self._open, obj, transfer.ref.is_file)
            reservation.written(max(0, obj.size_bytes - adopted_bytes))
            return await self._download(claim, transfer, origin, partial)
        except PostponedError:
            gave_way = reservation.size_bytes > adopted_bytes  # others are waiting for exactly this space
            if gave_way:
                await asyncio.to_thread(discard, self._store.layout, key, keep_parts=True)
            raise
        except ShardcacheError as exn:
            exn.url = exn.url or transfer.ref.url  # the disk's errors name none
            if isinstance(exn, CorruptShardError):
                self._residency.counters.corrupt += 1
                self._origins.suspect(obj, self._part_bytes)
            if isinstance(exn, (ShardChangedError, CorruptShardError)):
                log.info("discarding the download", version=obj.version, cause=exn.message)
            if transfer.arriving is not None:
                transfer.arriving.fail(exn)
            reusable = exn.retryable and not isinstance(exn, ShardChangedError)
            await asyncio.to_thread(discard, self._store.layout, key, keep_parts=reusable)
            raise
        finally:
            self._leave_parts(key, reservation, transfer)
            if gave_way:
                self._residency.changed.notify()

    def _open(self, obj: RemoteObject, is_file: bool) -> Partial:
        self._store.folder.check()  # if the disk was unmounted, this would fill the filesystem underneath
        return Partial.open(self._store.layout, obj, self._part_bytes, is_file=is_file)

    async def _reserve(self, claim: KeyClaim, transfer: Transfer, key: str, size_bytes: int) -> None:
        transfer.stages.enter(Stage.SPACE)
        wanted_bytes = max(0, size_bytes - claim.reserved_bytes)
        await self._residency.reserve(claim, wanted_bytes, lambda: self._needed_at_s(claim, key), ahead_waits=False)

    def _needed_at_s(self, claim: KeyClaim, key: str) -> float:
        if claim.klass is Class.WAITING:
            return NOW
        due_s = self._residency.due_s(key)
        return min(self._planner.now.next_use_s(key), due_s) if claim.klass is Class.PLANNED else due_s

    async def _download(self, claim: KeyClaim, transfer: Transfer, origin: Origin, partial: Partial) -> Shard:
        begun_s = time.monotonic()
        transfer.stages.enter(Stage.NETWORK)
        # A reader of an arriving shard refuses one with torn samples, whatever the rule.
        is_strict = self._origins.rule(partial.obj.url).require_adjacent
        if partial.codec is None and partial.obj.guarded and partial.obj.ranges and (is_strict or partial.is_file):
            transfer.arriving = Arrival(partial, transfer)
        await self._downloader.download(
            origin,
            partial,
            priority=lambda: claim.priority(lambda: self._planner.now.next_use_s(partial.key)),
            progress=transfer.set_done,
            coming=transfer.coming,
            first=lambda: claim.needed_first,
        )
        transfer.stages.enter(Stage.DISK)
        shard, refused = await self._publish(partial, transfer, claim)
        self._planner.took(time.monotonic() - begun_s)
        if transfer.arriving is not None:
            for _ in transfer.arriving.readers:
                self._residency.retain(shard)
            transfer.arriving.publish(shard, refused)
        return shard

    def _leave_parts(self, key: str, reservation: Reservation, transfer: Transfer) -> None:
        """Close the reservation; finished parts stay on disk, while there is space, for the next transfer."""
        try:
            parts = Leftover.of(self._store.layout.in_progress(key, PART))
        except OSError:  # the disk is failing: leftovers are counted once it recovers
            parts = Leftover(key, (), 0)
        arriving, transfer.arriving = transfer.arriving, None
        if arriving is not None and arriving.shard is None:
            arriving.fail(OriginUnavailableError("transfer was cancelled", url=transfer.ref.url))
        # Readers have the part open, which stays for the next transfer or was removed; or an
        # inflated tar, which was removed.
        if arriving is not None and (arriving.partial.codec is not None or not parts.size_bytes):
            arriving.when_left(reservation.close)  # unlinked, but takes disk space until the last reader closes it
        else:
            reservation.close()
        if parts.size_bytes:
            self._store.leave(parts)

    # A complete file becomes a published shard

    async def _publish(self, partial: Partial, transfer: Transfer, claim: KeyClaim) -> tuple[Shard, ShardError | None]:
        """Inflate, index and publish a complete partial, which closes the claim's reservation.

        Readers that have nothing else to read get it once it is indexed, before it is synced to
        the disk. It is not indexed if nobody wants samples; nor, and that error is returned, if
        somebody waits for the mere file.
        """
        tar, facts = await self._plain_tar(partial, claim)
        sidecar, refused = self._store.layout.in_progress(partial.key, SIDECAR), None
        try:
            if claim.wants_samples and not partial.is_file:
                facts = await self._indexed(tar, sidecar, facts, partial.obj, claim)
        except ShardError as exn:
            if not claim.wants_file or partial.codec is not None:
                raise
            refused = exn
        if facts.samples is None:
            await asyncio.to_thread(write_bare, sidecar, facts.to_json())
        files = await self._store.seal(tar, sidecar, facts)
        # Begun before any reader has the shard: who has read it finds its number of samples known.
        remembering = asyncio.create_task(self._history.remember(facts))
        transfer.arriving = transfer.arriving or Arrival(partial, transfer)
        transfer.arriving.check(files)
        await remembering
        shard = await self._store.publish(partial.key, files)
        # Nothing is awaited between here and the caller's receipt of the shard, so it cannot be evicted before.
        assert claim.reservation is not None
        claim.reservation.close(kept_bytes=shard.kept_bytes)
        self._residency.arrived(shard)
        return shard, refused

    async def _index_present(self, transfer: Transfer, claim: KeyClaim, shard: Shard, facts: Facts) -> None:
        """Index a cached shard that was fetched as a plain file, or has lost its index. Raises ShardError."""
        layout = self._store.layout
        sidecar = layout.in_progress(shard.key, SIDECAR)
        reservation = claim.reservation = Reservation(self._store.space)
        try:
            obj = RemoteObject(transfer.ref.url, facts.version, facts.size_bytes)
            await self._reserve(claim, transfer, shard.key, footprint_bytes(obj.size_bytes) - obj.size_bytes)
            transfer.stages.enter(Stage.DISK)
            facts = await self._indexed(layout.tar(shard.key), sidecar, facts, obj, claim)
            await self._history.remember(facts)
            await self._store.add_index(shard, sidecar, facts)
        finally:
            reservation.close()
            await asyncio.to_thread(discard, layout, shard.key, keep_parts=True)

    async def _indexed(self, tar: Path, sidecar: Path, facts: Facts, obj: RemoteObject, claim: KeyClaim) -> Facts:
        """Write the sidecar of a complete tar with its index, and return the facts with the number of samples."""
        allowed_bytes, rule = footprint_bytes(obj.size_bytes) - obj.size_bytes, self._origins.rule(obj.url)
        request = IndexRequest(
            str(tar),
            str(sidecar),
            facts.to_json(),
            facts.url,
            rule.require_end,
            allowed_bytes,
            ignore_trailing_data=rule.ignore_trailing_data,
            require_adjacent=rule.require_adjacent,
        )
        samples = await self._index(request, claim)
        return replace(facts, samples=samples)

    async def _plain_tar(self, partial: Partial, claim: KeyClaim) -> tuple[Path, Facts]:
        codec = partial.codec
        if codec is None:
            return partial.path, partial.facts()
        path = self._store.layout.in_progress(partial.key, TAR)
        loop = asyncio.get_running_loop()

        def reserve(size_bytes: int) -> None:
            asyncio.run_coroutine_threadsafe(self._grow(claim, size_bytes), loop).result()

        async with self._turn(claim):
            return path, await asyncio.to_thread(partial.inflate, codec, path, reserve)

    @asynccontextmanager
    async def _turn(self, claim: KeyClaim) -> AsyncIterator[None]:
        """Inflate one shard at a time: two growing together could wait for each other's space."""
        while self._inflating is not None:
            with claim.waiting(behind=self._inflating):
                await self._residency.change(claim)
        self._inflating = claim
        try:
            yield
        finally:
            self._inflating = None
            self._residency.changed.notify()

    async def _grow(self, claim: KeyClaim, size_bytes: int) -> None:
        await self._residency.reserve(claim, size_bytes, lambda: NOW)
        assert claim.reservation is not None
        claim.reservation.written(size_bytes)

    async def _index(self, request: IndexRequest, claim: KeyClaim) -> int:
        indexed = await self._indexers.index(request)
        if not indexed.written:  # an index this large, of many tiny samples, is rare enough to scan twice
            await self._grow(claim, indexed.sidecar_bytes - request.allowed_bytes)
            indexed = await self._indexers.index(replace(request, allowed_bytes=indexed.sidecar_bytes))
        return indexed.samples
