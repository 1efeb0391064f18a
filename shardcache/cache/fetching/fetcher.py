"""Fetching of one shard, from url to published file: stat, reserve, download, publish.

`Transfers` runs `Fetcher.fetch` in the task of each transfer. Terms:

- A key is made of an object's url and version; there is at most one cached shard for each.
- A claim (`KeyClaim`) stands for all transfers that lead to one key. Its lock lets one of them work
  at a time, and its reservation is the disk space for the shard.
- A partial is a file that is being downloaded, with a journal of the parts that are in it.
- A leftover is a partial that no transfer works on. The next transfer of its key adopts it, which
  means that the leftover's bytes count to that transfer's reservation.
- A file of parts (`PartFile`) has some parts of an object, for readers of ranges of it.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from shardcache.cache.disk_health import DiskHealth
from shardcache.cache.fetching.part_filler import PartFiller
from shardcache.cache.fetching.publisher import Publisher
from shardcache.cache.listings.shard_listing import name_of
from shardcache.cache.planner import Planner
from shardcache.cache.space.residency import Residency
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import PostponedError
from shardcache.fetch.download import Downloader
from shardcache.fetch.retry import refetch
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.shared.exceptions import (
    CorruptShardError,
    DiskError,
    OriginUnavailableError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.shared.urls.url_names import format_of
from shardcache.store.folder.folder_contents import Leftover
from shardcache.store.folder.layout import PART
from shardcache.store.keys import place_of, shard_key
from shardcache.store.partial import Partial, discard
from shardcache.store.shard import Shard
from shardcache.store.space import Reservation
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Fetcher:
    """Fetches shards on behalf of `Transfers`.

    `_part_bytes` is the size of the parts in which a new file is downloaded. `_changed` is notified
    when a transfer has given up space that others wait for.
    """

    _store: Store
    _planner: Planner
    _residency: Residency
    _health: DiskHealth
    _origins: Origins
    _downloader: Downloader
    _publisher: Publisher
    _filler: PartFiller
    _part_bytes: int
    _counters: Counters
    _changed: Signal

    async def fetch(self, transfer: Transfer) -> Shard | None:
        """Return the published shard; None if only ranges were wanted, and all have been fetched.

        Raises the shard's errors. If no reader waits for the shard, raises PostponedError when the
        disk has failed or there is no space.
        """
        if self._health.error is not None and not transfer.waits:
            raise PostponedError
        try:
            return await self._fetch(transfer)
        except DiskError as exn:
            is_healthy = await self._health.examine()
            if not is_healthy:
                if transfer.waits:
                    raise
                raise PostponedError from exn
            log.warning("transient disk error; retrying the shard", cause=exn.message)
        return await self._fetch(transfer)

    @refetch
    async def _fetch(self, transfer: Transfer) -> Shard | None:
        """Make one attempt; `refetch` makes another if the object has changed or is corrupt."""
        # 1. A cached shard may have to be indexed. The origin need not be asked about it.
        known_key = self._planner.key(transfer.name)
        if known_key in self._store.shards:
            async with self._claimed(known_key, transfer) as claim:
                shard = await self._cached(transfer, claim, known_key)
                if shard is not None:
                    return shard

        # 2. The object's version gives the key.
        url = transfer.ref.url
        origin = self._origins.origin(url)
        obj = await self._object(transfer, origin, known_key)
        key = shard_key(place_of(obj.url, is_file=transfer.ref.is_file), obj.version)
        self._planner.learn(transfer.name, key, checked_at_s=obj.reported_s)
        self._planner.learn_size(transfer.name, obj.size_bytes)

        # 3. One transfer at a time fetches the shard of a key. The transfer after it finds the
        #    shard cached.
        async with self._claimed(key, transfer) as claim:
            shard = await self._cached(transfer, claim, key)
            if shard is not None:
                return shard
            self._health.raise_if_failing(obj.url)
            transfer.begin(obj.size_bytes)
            is_reserved = await self._serve_ranges_until_reserved(transfer, claim, origin, obj, key)
            if not is_reserved:
                return None
            # The download of the whole continues with the parts that are in the file of parts. The
            # file is confirmed once the origin has described the object to this daemon, for clients
            # that read ranges. They want the object as a plain file.
            file = self._store.parts.get(key)
            if file is not None:
                claim.has_range_readers = file.is_confirmed
                self._residency.parts.hand_over(file)
            return await self._into_cache(transfer, claim, origin, obj, key)

    async def _serve_ranges_until_reserved(
        self,
        transfer: Transfer,
        claim: KeyClaim,
        origin: Origin,
        obj: RemoteObject,
        key: str,
    ) -> bool:
        """Fetch the ranges that readers wait for, until the whole object's space is reserved.

        Return False if nobody wants the whole, and all ranges have been fetched. An object that is
        not divisible is wanted as a whole.
        """
        transfer.is_divisible = obj.is_divisible
        if not transfer.is_divisible:
            transfer.want_whole()
        reservation = Reservation(self._store.space)
        claim.reservation = reservation
        is_reserved = False
        try:
            # Parts in a file of parts have their own space. The transfer adopts it once the file is
            # handed over.
            if key not in self._store.parts:
                self._store.leftovers.adopt(key, reservation)
            is_reserved = await self._filler.fill(transfer, claim, origin, obj, key)
        finally:
            if not is_reserved:
                had_new_space = reservation.size_bytes > reservation.adopted_bytes
                self._close_reservation(reservation, key, transfer)
                if had_new_space:  # others may wait for the space that is free again
                    self._changed.notify()
        return is_reserved

    async def _object(self, transfer: Transfer, origin: Origin, key: str) -> RemoteObject:
        """Return the object to fetch: the one whose parts are cached, or else ask the origin."""
        file = self._store.parts.get(key)
        if file is not None and file.is_confirmed:
            # The object is fetched by this transfer's url: the signature of an earlier url may have
            # expired.
            return replace(file.partial.obj, url=transfer.ref.url)
        transfer.stages.enter(Stage.ASKING)
        return await self._downloader.stat(
            origin,
            transfer.ref.url,
            transfer.ref.version,
            first_bytes=self._first_bytes(transfer),
        )

    async def _cached(self, transfer: Transfer, claim: KeyClaim, key: str) -> Shard | None:
        """Return the cached shard for `key`, and index it first if samples are wanted.

        None if no shard is cached, or the cached one proves to be damaged. Raises ShardError if it
        cannot be indexed: it then stays in the cache as a plain file.
        """
        shard = self._store.shards.get(key)
        if shard is None or not claim.wants_samples:
            return shard
        # A shard whose facts were not read yet is returned as it is: `Leasing` reads them, and
        # requests the shard again if the index is missing (`samples` is None).
        facts = shard.facts
        if facts is None or facts.samples is not None:
            return shard

        transfer.stages.enter(Stage.DISK)
        try:
            with self._residency.retained(shard):
                # Compare the bytes with their checksums: an index made of damaged bytes would look
                # sound.
                await self._store.check_tar(shard, facts)
        except CorruptShardError as exn:
            was_taken_out = await self._health.take_out(shard, exn)
            if not was_taken_out:  # it may be the disk that fails
                self._health.raise_if_failing(facts.url)
            return None
        with self._residency.retained(shard):
            await self._publisher.index_present(transfer, claim, shard, facts)
        return shard

    def _first_bytes(self, transfer: Transfer) -> int:
        """Return how many bytes of a shard to request along with its version.

        The origin can answer with the version and the first part at once, which saves a round trip.
        0 if the shard is not needed now, or its first part may not be what is missing.
        """
        if self._store.leftovers.by_key:
            return 0  # a leftover may have the first part, which only the version will show
        if transfer.ref.is_file:
            return 0  # another part than the first may be needed first
        file_key = self._planner.key(name_of(transfer.ref._replace(is_file=True)))
        if file_key in self._store.shards:
            return 0  # the object's bytes are cached, and copied: see `_fill_from_cache`
        if transfer.waits:
            return self._part_bytes
        schedule = self._planner.schedule
        next_use_s = schedule.next_use_s(self._planner.key(transfer.name))
        is_due = next_use_s <= schedule.now_s
        return self._part_bytes if is_due else 0

    @asynccontextmanager
    async def _claimed(self, key: str, transfer: Transfer) -> AsyncIterator[KeyClaim]:
        """Provide the claim of all transfers that lead to a key, and hold its lock.

        Several transfers may lead to one key: one plan may give a shard's version, another only its
        url, which are two names.
        """
        with self._residency.claiming(key, transfer) as claim:
            async with claim.lock:
                yield claim

    async def _into_cache(
        self,
        transfer: Transfer,
        claim: KeyClaim,
        origin: Origin,
        obj: RemoteObject,
        key: str,
    ) -> Shard:
        """Download a version of the shard into the reserved space, and publish it.

        The claim's reservation is closed at the end.
        """
        reservation = claim.reservation
        assert reservation is not None
        # There is a leftover now if a file of parts was handed over after the space was reserved.
        self._store.leftovers.adopt(key, reservation)
        adopted_bytes = reservation.adopted_bytes
        gave_way = False
        try:
            shard = self._store.shards.get(key)
            if shard is not None:
                # The shard was being evicted when this transfer looked for it before. The eviction
                # has failed since then.
                return shard
            partial = await asyncio.to_thread(self._open, obj, is_file=transfer.ref.is_file)
            # The space of all parts is allocated now, so it counts as written.
            reservation.mark_written(max(0, obj.size_bytes - adopted_bytes))
            if partial.may_be_inflated:
                await self._fill_from_cache(partial)
            return await self._download(claim, transfer, origin, partial)
        except PostponedError:
            # The transfer needed more space, for example for the inflated shard, and no reader
            # waits for it. If it has reserved more bytes than those of the leftover, others can use
            # that space: give it back. Only the finished parts stay on disk.
            gave_way = reservation.size_bytes > adopted_bytes
            if gave_way:
                await asyncio.to_thread(discard, self._store.layout, key, keep_parts=True)
            raise
        except ShardcacheError as exn:
            await self._clean_up(transfer, obj, key, exn)
            raise
        finally:
            self._close_reservation(reservation, key, transfer)
            if gave_way:  # the space is free only now
                self._changed.notify()

    async def _fill_from_cache(self, partial: Partial) -> None:
        """Copy the object's bytes from the cache, if the object is also cached as a plain file.

        A shard that is cached in another form, such as decompressed, and the object's own bytes
        have different keys. The copy saves a download.
        """
        obj = partial.obj
        file = self._store.shards.get(shard_key(place_of(obj.url, is_file=True), obj.version))
        if file is None:
            return
        try:
            with self._residency.retained(file):
                facts = await self._store.facts(file)
                await self._store.check_tar(file, facts)
                await asyncio.to_thread(partial.fill, self._store.layout.tar(file.key))
        except CorruptShardError as exn:
            await self._health.take_out(file, exn)

    async def _clean_up(
        self,
        transfer: Transfer,
        obj: RemoteObject,
        key: str,
        exn: ShardcacheError,
    ) -> None:
        """Remove the files of a failed transfer, except parts that the next one can continue with.

        Args:
            transfer: the transfer, whose early readers get the error.
            obj: the object.
            key: key of the object's version.
            exn: the error with which the transfer failed.
        """
        exn.url = exn.url or transfer.ref.url  # errors of the disk name no url
        if isinstance(exn, CorruptShardError):
            self._counters.corrupt += 1
            # A tier, the cache that nodes share, then fetches the object again.
            self._origins.suspect(obj, self._part_bytes)
        if isinstance(exn, (ShardChangedError, CorruptShardError)):
            log.info("discarding the download", version=obj.version, cause=exn.message)
        if transfer.arriving is not None:
            transfer.arriving.fail(exn)
        is_reusable = exn.retryable and not isinstance(exn, ShardChangedError)
        await asyncio.to_thread(discard, self._store.layout, key, keep_parts=is_reusable)

    def _open(self, obj: RemoteObject, *, is_file: bool) -> Partial:
        """Open the file to download into, with the parts of an earlier transfer. Blocks."""
        # If the disk was unmounted, the download would fill the filesystem underneath.
        self._store.folder.check()
        key = shard_key(place_of(obj.url, is_file=is_file), obj.version)
        # Readers may still open an earlier file at this path, which they know by its inode. A new
        # file must not have the same number (see `GrantedFiles`).
        granted_files = self._store.parts.granted
        return Partial.open(
            self._store.layout,
            obj,
            self._part_bytes,
            is_file=is_file,
            granted_inodes=granted_files.inodes(key),
        )

    async def _download(
        self,
        claim: KeyClaim,
        transfer: Transfer,
        origin: Origin,
        partial: Partial,
    ) -> Shard:
        """Download the missing parts and publish the shard, also to those that read it early."""

        def next_use_s() -> float:
            """Return when a plan next needs the shard, by the monotonic clock."""
            return self._planner.schedule.next_use_s(partial.key)

        begun_s = time.monotonic()
        transfer.stages.enter(Stage.NETWORK)
        if self._may_be_read_early(partial):
            transfer.offer(partial)
        await self._downloader.download(
            origin,
            partial,
            priority=lambda: claim.priority(next_use_s),
            progress=transfer.set_done,
            unfinished=transfer.unfinished,
            first_ranges=lambda: claim.needed_first,
        )
        transfer.stages.enter(Stage.DISK)
        shard, index_error = await self._publisher.publish(partial, transfer, claim)
        self._planner.record_duration(time.monotonic() - begun_s)
        # Each reader of the arriving file has a lease on the shard from now on.
        if transfer.arriving is not None:
            for _ in transfer.arriving.readers:
                self._residency.retain(shard)
            transfer.arriving.publish(shard, index_error)
        return shard

    def _may_be_read_early(self, partial: Partial) -> bool:
        """Return whether readers may have a shard's beginning while the rest arrives."""
        # 1. The bytes that arrive are not the ones that are cached in the end.
        if partial.may_be_inflated:
            return False
        # 2. The format cannot be read from its beginning on.
        if not partial.is_file and not format_of(partial.obj.url).can_walk_early:
            return False
        # 3. The parts may be of several versions: the origin does not check the version with each.
        if not partial.obj.is_divisible:
            return False
        # 4. The members of a sample may be apart in the tar, unless the url's origin table requires
        #    them to be adjacent. A reader of samples refuses such a sample in an arriving shard.
        if partial.is_file:  # it is read without its samples
            return True
        return self._origins.table(partial.obj.url).require_adjacent

    def _close_reservation(self, reservation: Reservation, key: str, transfer: Transfer) -> None:
        """Close a transfer's reservation, and keep the finished parts on disk as a leftover.

        Early readers of a shard that was not published get an error.
        """
        # The space of parts that are in a file of parts is not in the reservation.
        if key in self._store.parts:
            reservation.close()
            return
        try:
            parts = Leftover.of(self._store.layout.unpublished(key, PART))
        except OSError:
            # The disk is failing. Leftovers are counted again once it has recovered. Until then,
            # this key counts as having none: an empty leftover, without paths and of 0 bytes.
            parts = Leftover(key, (), 0)

        arriving = transfer.arriving
        transfer.arriving = None
        if arriving is not None and arriving.shard is None:
            arriving.fail(
                OriginUnavailableError("the transfer was cancelled", url=transfer.ref.url)
            )

        # A file that is removed while readers have it open takes disk space until the last reader
        # closes it. So its reservation stays until then. Two files are removed: that of a shard
        # that arrived compressed, and that of a failed transfer, unless some of its parts stay.
        if arriving is not None and (arriving.partial.may_be_inflated or not parts.size_bytes):
            arriving.when_left(reservation.close)
        else:
            reservation.close()
        if parts.size_bytes:
            self._store.leftovers.keep(parts)
