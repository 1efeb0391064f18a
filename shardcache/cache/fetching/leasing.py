"""Published shards for those who ask: found in the cache and checked, or fetched."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from shardcache.cache.disk_health import DiskHealth
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.listings.shard_listing import name_of
from shardcache.cache.planner import Planner
from shardcache.cache.space.residency import Residency
from shardcache.cache.versions.history import History
from shardcache.cache.versions.revalidation import Revalidation
from shardcache.cache.waiting.arrival import Arrival
from shardcache.cache.waiting.waits import Class, Wait
from shardcache.errors import CorruptShardError, OutdatedError
from shardcache.shared.protocol import ShardRef
from shardcache.store.keys import place_of, shard_key
from shardcache.store.part_file import FILE_BYTES, PartFile, Span
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import footprint_bytes
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters

log = structlog.get_logger()

_Early = TypeVar("_Early", Arrival, PartFile)

_RECALLED_AT_ONCE = 1_000  # urls looked up at a time: larger batches would block the event loop


@dataclass(frozen=True, slots=True)
class Published:
    """A cached shard, to be retained before the next await."""

    shard: Shard
    facts: Facts
    hit: bool  # True if it did not have to be fetched


@dataclass(frozen=True, slots=True, eq=False)
class Leasing:
    """Finds or fetches the published file of a planned shard."""

    _store: Store
    _planner: Planner
    _residency: Residency
    _transfers: Transfers
    _health: DiskHealth
    _history: History
    _revalidation: Revalidation
    _counters: Counters
    _range_part_bytes: int
    _examining: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def recall(self, urls: Iterable[str]) -> None:
        """Restore the versions of bare urls cached before the last restart.

        `acquire` revalidates them.
        """
        names = ((place_of(url, is_file=False), url) for url in urls)
        # The key of a name whose version is unknown is the name itself.
        unknown = [(name, url) for name, url in names if self._planner.key(name) == name]
        for first in range(0, len(unknown), _RECALLED_AT_ONCE):
            batch = unknown[first : first + _RECALLED_AT_ONCE]
            versions = await self._history.versions([url for _, url in batch])
            for (name, _), version in zip(batch, versions, strict=True):
                if version is None:
                    continue
                key = shard_key(name, version)
                if key in self._store.shards:
                    # As if learned long ago, so that the next reader has it revalidated.
                    self._planner.learn(name, key, now_s=float("-inf"))

    async def acquire(self, ref: ShardRef, wanted: Class, wait: Wait) -> Published | Arrival:
        """Return the published shard, fetched if it is missing.

        Returns early access to it if `wait` accepts that. Raises every error that fetching it can
        raise; OutdatedError if the origin has another version than the ref names.
        """
        name = name_of(ref)

        async def fetch() -> Shard | Arrival:
            return await self._transfers.wait(name, ref, wanted, wait)

        return await self._acquire(fetch, name, ref)

    async def acquire_latest(self, ref: ShardRef, wanted: Class, wait: Wait) -> Published | Arrival:
        """Return the present version of a shard as `acquire` does.

        The plans that name another version mean this one from then on.
        """
        acquired = await self.acquire(ref._replace(version=None), wanted, wait)
        if isinstance(acquired, Published):
            key = acquired.shard.key
        else:
            key = acquired.partial.key
        self._planner.learn(name_of(ref), key, time.monotonic())
        return acquired

    async def acquire_range(self, ref: ShardRef, wait: Wait) -> Published | PartFile:
        """Return a file with the bytes that a wait needs: the whole object, or some of its parts.

        Neither is retained yet. Raises every error that fetching can raise; OutdatedError if the
        origin has another version than the ref names.
        """
        span = wait.bytes
        first = wait.first_bytes
        assert span is not None
        assert first is not None
        name = name_of(ref)

        async def fetch() -> Shard | PartFile:
            file = self._store.parts.get(self._planner.key(name))
            if file is not None and file.has(first):
                return file
            self._check_range(ref, span)
            return await self._transfers.wait_for_range(name, ref, wait)

        return await self._acquire(fetch, name, ref)

    async def _acquire(
        self,
        fetch: Callable[[], Awaitable[Shard | _Early]],
        name: str,
        ref: ShardRef,
    ) -> Published | _Early:
        """Return the published shard, or early access to it.

        Args:
            fetch: fetches or indexes the shard, or gives early access; called while the shard is
                missing, is damaged, or has no index, which a reader of samples needs.
            name: name of the shard in plans.
        """
        shard = await self._present(name, ref)
        hit = shard is not None  # True while nothing of the shard had to be fetched
        while True:
            published = await self._published(shard, ref, hit=hit)
            if published is not None:
                return published

            fetched = await fetch()
            if not isinstance(fetched, Shard):
                return fetched
            was_only_indexed = fetched is shard
            hit = hit and was_only_indexed
            # The published shard may have been evicted before this task runs: check again.
            shard = self._store.shards.get(fetched.key)

    def _check_range(self, ref: ShardRef, span: Span) -> None:
        """Raise CapacityError if there will be space neither for a range nor for the whole."""
        whole_bytes = footprint_bytes(ref.size_bytes or sys.maxsize)
        if not self._residency.may_fit(whole_bytes):
            self._residency.check_range(self.range_bytes(ref, span), ref.url)

    def range_bytes(self, ref: ShardRef, span: Span) -> int:
        """Return how much space a range takes, if all of its parts are fetched."""
        start, end = span
        if ref.size_bytes:
            end = min(end, ref.size_bytes)
        part_bytes = self._range_part_bytes
        parts = -(-end // part_bytes) - start // part_bytes
        return FILE_BYTES + max(0, parts) * part_bytes

    def at_hand(self, name: str, span: Span, version: str | None = None) -> Shard | PartFile | None:
        """Return a cached file with a range, to be read or retained before the next await.

        None if it has to be fetched or checked first, which `acquire_range` does.

        Args:
            name: name of the file in plans.
            version: the wanted version; None for any.
        """
        key = self._planner.key(name)
        shard = self._store.shards.get(key)
        if shard is not None:
            # Not `is_suspect`: bytes are read without the index.
            if shard.facts is None or shard.suspicion:
                return None
            if version not in (None, shard.facts.version):
                return None
            self._store.touch(shard)
            self._planner.now.found(key)
            return shard
        file = self._store.parts.get(key)
        if file is None or not file.has(span) or version not in (None, file.version):
            return None
        return file

    def may_have(self, ref: ShardRef) -> bool:
        """Return whether a reader may have cached bytes of a shard without asking its origin."""
        return self._revalidation.allows(ref.url)

    async def _published(
        self,
        shard: Shard | None,
        ref: ShardRef,
        *,
        hit: bool,
    ) -> Published | None:
        """Return a cached shard that is sound and has what is wanted; None if there is none.

        Args:
            hit: whether the shard was cached when it was requested.
        """
        if shard is None:
            return None
        facts = await self._facts(shard, ref.url)
        if facts is None or not _is_enough(facts, ref):
            return None
        if hit:
            self._planner.now.found(shard.key)
        return Published(shard, facts, hit)

    @contextlib.asynccontextmanager
    async def published(self, ref: ShardRef) -> AsyncIterator[Published]:
        """Provide a shard, fetched if it is missing, and keep it during the block.

        Raises as `acquire` does.
        """
        published = await self.acquire(ref, Class.WARM, Wait())
        assert isinstance(published, Published)  # this wait does not accept a partial shard
        self._residency.retain(published.shard)
        try:
            yield published
        finally:
            await self.release(published.shard)

    async def release(self, shard: Shard) -> None:
        """Release a retained shard and record this as the time of its last use."""
        self._store.touch(shard)
        self._residency.release(shard)
        if not shard.leases:
            await self._store.remember_use(shard)

    async def _facts(self, shard: Shard, url: str) -> Facts | None:
        """Return the facts of a cached shard; None if it is damaged, or out of service by now.

        Raises DiskError if the disk has failed.
        """
        with self._residency.retained(shard):
            try:
                if self._store.is_suspect(shard):
                    await self._examine(shard, url)
                is_first_use = shard.facts is None
                facts = await self._store.facts(shard)
                if is_first_use:
                    await self._history.remember(facts)
            except CorruptShardError as exn:
                await self._check_disk(url)
                shard.damage = exn
                await self._residency.isolate(shard, exn)
                return None
            self._store.touch(shard)
            is_cached = self._store.shards.get(shard.key) is shard
            return facts if is_cached else None

    async def _examine(self, shard: Shard, url: str) -> None:
        """Check a shard in which a reader found damage. Raises CorruptShardError, or DiskError.

        If its index alone is damaged, it is a file from then on, and indexed again for the next
        reader of samples.
        """
        async with self._examining:  # one at a time, and once for all readers that found the same
            is_cached = self._store.shards.get(shard.key) is shard
            if not is_cached or not self._store.is_suspect(shard):
                return
            facts = await self._store.facts(shard)
            if facts.samples is None or await self._has_index(shard, facts):
                log.warning(
                    "checking a shard that a reader found damaged",
                    shard=url,
                    cause=shard.suspicion,
                )
                await self._store.check_tar(shard, facts)
            shard.suspicion = ""

    async def _has_index(self, shard: Shard, facts: Facts) -> bool:
        """Return whether a shard's index is sound; without one, it is a file from then on."""
        try:
            await self._store.check_sidecar(shard, facts)
        except CorruptShardError as exn:
            await self._check_disk(facts.url)
            log.error(
                "the index of a cached shard is damaged; rebuilding it",
                shard=facts.url,
                cause=exn.message,
            )
            self._counters.corrupt += 1
            shard.facts = replace(facts, samples=None)
            return False
        return True

    async def _check_disk(self, url: str) -> None:
        """Raise DiskError if the disk has failed, which proves nothing about its shards."""
        await self._health.examine()
        self._health.check(url)

    async def _present(self, name: str, ref: ShardRef) -> Shard | None:
        """Return the shard if it is cached; if no version is given, the origin's last known one.

        Raises the origin's error for a signed url that it does not accept.
        """
        key = self._planner.key(name)
        has_bytes = key in self._store.shards or key in self._store.parts
        # Otherwise a new transfer requests the object by this very url, signature included.
        if has_bytes or name in self._transfers:
            await self._revalidation.check_signature(name, ref)
        if ref.version is None:
            await self._revalidation.check(name, ref)
        return self._store.shards.get(self._planner.key(name))


def _is_enough(facts: Facts, ref: ShardRef) -> bool:
    """Return whether a cached shard has what is wanted: samples need an index.

    Raises OutdatedError if it is another version than `ref` names. That happens where another
    plan, which reads the latest version, has changed what the name means (`acquire_latest`).
    """
    if ref.version not in (None, facts.version):
        raise OutdatedError(
            f"the origin has version {facts.version}, the manifest names {ref.version}",
            url=ref.url,
        )
    return ref.is_file or facts.samples is not None
