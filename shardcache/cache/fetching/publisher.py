"""Publishing of shards: a complete file is inflated, indexed, synced, and given its final name.

`Fetcher` publishes each shard here once all its bytes have arrived. A partial is the file that they
arrived in. To inflate a shard means to write it in the form that the cache keeps, such as a
decompressed tar, if its format has such a form. The sidecar is the small file next to the tar that
has the shard's facts and its index. A claim (`KeyClaim`) stands for all transfers of one version of
an object, and has the reservation of space for it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from shardcache.cache.fetching.reserving import reserve_for_transfer
from shardcache.cache.fetching.shard_indexing import ShardIndexing, allowed_index_bytes
from shardcache.cache.space.residency import Residency, needed_now
from shardcache.cache.versions.history import History
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.origin.objects import RemoteObject
from shardcache.shared.exceptions import ShardError
from shardcache.shared.tarindex import tables
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.folder.layout import SIDECAR, TAR
from shardcache.store.partial import Partial, discard
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import Reservation
from shardcache.store.store import Store


class Publisher:
    """Turns complete files into published shards, and indexes those published without an index.

    Args:
        changed: the cache's signal, which is notified when the next shard may be inflated. A claim
            that waits for its turn waits for this signal (`Residency.wait_for_change`).
    """

    def __init__(
        self,
        store: Store,
        residency: Residency,
        indexing: ShardIndexing,
        history: History,
        changed: Signal,
    ) -> None:
        self._store = store
        self._residency = residency
        self._indexing = indexing
        self._history = history
        self._changed = changed
        self._inflating: KeyClaim | None = None  # the claim whose shard is being inflated

    async def publish(
        self,
        partial: Partial,
        transfer: Transfer,
        claim: KeyClaim,
    ) -> tuple[Shard, ShardError | None]:
        """Inflate, index and publish a complete partial. This closes the claim's reservation.

        Readers that have nothing else to read get the shard once it is indexed, before it is synced
        to the disk. If nobody wants samples, the shard is not indexed. If it cannot be indexed, and
        somebody waits for the plain file, it is published without an index.

        Returns the shard, and the error for which it has no index, if there was one.
        """
        tar, facts = await self._stored_file(partial, claim)
        sidecar = self._store.layout.unpublished(partial.key, SIDECAR)
        index_error: ShardError | None = None
        try:
            if claim.wants_samples and not partial.is_file:
                facts = await self._write_index(tar, sidecar, facts, partial.obj, claim)
        except ShardError as exn:
            # If somebody wants the plain file, it is published although it is not a sound shard.
            # But an inflated file does not have the object's own bytes: as a plain file, it is of
            # no use.
            if not claim.wants_file or partial.may_be_inflated:
                raise
            index_error = exn
        if facts.samples is None:
            await asyncio.to_thread(_write_sidecar_without_index, sidecar, facts)

        files = await self._store.seal(tar, sidecar, facts)
        # A reader that has read the shard expects the daemon to know its number of samples. So the
        # history begins to store that number before any reader gets the shard. Readers do not wait
        # for the database: this is awaited after they have the files.
        remembering = asyncio.create_task(self._history.remember(facts))
        arrival = transfer.arriving
        if arrival is None:  # nobody could read the shard before it was checked
            arrival = transfer.offer(partial)
        arrival.offer_files(files)
        await remembering

        shard = await self._store.publish(partial.key, files)
        # Nothing is awaited between here and the caller's receipt of the shard, so it cannot be
        # evicted before.
        assert claim.reservation is not None
        claim.reservation.close(kept_bytes=shard.kept_bytes)
        self._residency.arrived(shard)
        return shard, index_error

    async def index_present(
        self,
        transfer: Transfer,
        claim: KeyClaim,
        shard: Shard,
        facts: Facts,
    ) -> None:
        """Index a cached shard that was fetched as a plain file, or has lost its index.

        Raises ShardError.
        """
        layout = self._store.layout
        sidecar = layout.unpublished(shard.key, SIDECAR)
        obj = RemoteObject(transfer.ref.url, facts.version, facts.size_bytes)
        reservation = Reservation(self._store.space)
        claim.reservation = reservation
        try:
            index_bytes = allowed_index_bytes(obj)
            await reserve_for_transfer(self._residency, claim, transfer, shard.key, index_bytes)
            transfer.stages.enter(Stage.DISK)
            tar = layout.tar(shard.key)
            facts = await self._write_index(tar, sidecar, facts, obj, claim)
            await self._history.remember(facts)
            await self._store.add_index(shard, sidecar, facts)
        finally:
            reservation.close()
            # Unless the index was added, this removes the unfinished sidecar. Parts that a transfer
            # of the same key left on disk are kept for the next one.
            await asyncio.to_thread(discard, layout, shard.key, keep_parts=True)

    async def _write_index(
        self,
        tar: Path,
        sidecar: Path,
        facts: Facts,
        obj: RemoteObject,
        claim: KeyClaim,
    ) -> Facts:
        """Write the sidecar of a complete shard; return the facts with the number of samples.

        Args:
            tar: path of the shard's file.
            sidecar: path of the sidecar to write.
            facts: facts for the sidecar, still without the number of samples.
            obj: the shard's object in the origin.
            claim: the claim whose reservation grows if the index needs more space than expected.
        """

        async def grow(size_bytes: int) -> None:
            """Reserve more space for a large index."""
            await self._grow(claim, size_bytes)

        samples = await self._indexing.index(tar, sidecar, facts, obj, grow)
        return replace(facts, samples=samples)

    # Inflating

    async def _stored_file(self, partial: Partial, claim: KeyClaim) -> tuple[Path, Facts]:
        """Return the path of the file to publish, and its facts without the number of samples.

        That is the file which was downloaded, unless the shard's format is cached in another form.
        """
        if not partial.may_be_inflated:
            return partial.path, partial.facts()

        path = self._store.layout.unpublished(partial.key, TAR)
        loop = asyncio.get_running_loop()

        def reserve(size_bytes: int) -> None:
            """Reserve space for the copy. Called in the thread that writes it, which waits."""
            growing = asyncio.run_coroutine_threadsafe(self._grow(claim, size_bytes), loop)
            growing.result()

        async with self._inflating_turn(claim):
            facts = await asyncio.to_thread(partial.write_inflated, path, reserve)
        if facts is None:  # the file is cached as it is: it turned out to need no other form
            return partial.path, partial.facts()
        return path, facts

    @asynccontextmanager
    async def _inflating_turn(self, claim: KeyClaim) -> AsyncIterator[None]:
        """Wait until no other shard is being inflated, and let no other begin during the block.

        The size of an inflated shard is known only at the end: two shards that grow at the same
        time could wait for each other's space.
        """
        while self._inflating is not None:
            with claim.waiting_behind(self._inflating):
                # Waits for the signal that is notified below, when the other shard is inflated.
                await self._residency.wait_for_change(claim)
        self._inflating = claim
        try:
            yield
        finally:
            self._inflating = None
            self._changed.notify()

    async def _grow(self, claim: KeyClaim, size_bytes: int) -> None:
        """Reserve space that is written at once, and count it as written.

        The space is for a shard that has been downloaded already. So it is needed now, not at the
        time of the shard's next use.
        """
        await self._residency.reserve(claim, size_bytes, needed_now)
        assert claim.reservation is not None
        claim.reservation.mark_written(size_bytes)


def _write_sidecar_without_index(sidecar: Path, facts: Facts) -> None:
    """Write the sidecar of a shard whose samples are not known. Blocks. Raises DiskError."""
    with disk_errors(sidecar):
        tables.write(sidecar, facts.to_json(), tables.Samples())
