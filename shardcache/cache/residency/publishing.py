"""Ingestion of a completely downloaded shard: inflate, index, publish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from shardcache.cache.catalog.history import History
from shardcache.cache.residency.evictor import NOW, Evictor
from shardcache.cache.transfers.transfers import KeyClaim
from shardcache.config import OriginTable
from shardcache.store.folder import SIDECAR, TAR
from shardcache.store.indexers import Indexers
from shardcache.store.indexing import IndexRequest
from shardcache.store.partial import Partial
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import footprint_bytes
from shardcache.store.store import Store


class Ingester:
    """Publishes downloaded shards."""

    def __init__(self, store: Store, evictor: Evictor, history: History, indexers: Indexers) -> None:
        self._store = store
        self._evictor = evictor
        self._history = history
        self._indexers = indexers
        self._inflating: KeyClaim | None = None

    async def publish(self, partial: Partial, claim: KeyClaim, rule: OriginTable) -> Shard:
        """Turn a complete partial into a published shard; this closes the claim's reservation.

        Raises ShardError if it is not a sound tar, CapacityError and DiskFullError if there is no space to inflate it,
        PostponedError if others need that space and no reader waits for the shard.
        """
        tar, facts = await self._plain_tar(partial, claim)
        sidecar = self._store.layout.in_progress(partial.key, SIDECAR)
        allowed_bytes = footprint_bytes(partial.obj.size_bytes) - partial.obj.size_bytes
        samples = await self._index(IndexRequest.of(tar, facts, sidecar, rule, allowed_bytes), claim)
        facts = replace(facts, samples=samples)
        await self._history.remember(facts)
        shard = await self._store.publish(partial.key, tar, sidecar, facts)
        # Nothing is awaited between here and the caller's receipt of the shard, so it cannot be evicted before.
        assert claim.reservation is not None
        claim.reservation.close(kept_bytes=shard.kept_bytes)
        self._evictor.arrived(shard)
        return shard

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
                await self._evictor.change(claim)
        self._inflating = claim
        try:
            yield
        finally:
            self._inflating = None
            self._evictor.changed.notify()

    async def _grow(self, claim: KeyClaim, size_bytes: int) -> None:
        await self._evictor.reserve(claim, size_bytes, lambda: NOW)
        assert claim.reservation is not None
        claim.reservation.written(size_bytes)

    async def _index(self, request: IndexRequest, claim: KeyClaim) -> int:
        indexed = await self._indexers.index(request)
        if not indexed.written:  # an index this large, of many tiny samples, is rare enough to scan twice
            await self._grow(claim, indexed.sidecar_bytes - request.allowed_bytes)
            indexed = await self._indexers.index(replace(request, allowed_bytes=indexed.sidecar_bytes))
        return indexed.samples
