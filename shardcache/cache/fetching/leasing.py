"""Published shards for callers that request them: found in the cache and checked, or fetched.

Readers with a plan, the commands that warm and pin, and the S3 endpoint all get their shards here.

- A shard is published once it has passed its checks and has its final name in the cache folder.
- A caller retains a published shard, to keep it from being evicted while the caller uses it.
- Early access is to a shard that is not published yet. It is an `Arrival`, which has the shard's
  beginning while the rest arrives, or a `PartFile`, which has some of the shard's parts.
- A shard's name in plans is its cache key if the manifest gave the version, otherwise its url. The
  `Planner` maps the name to the key of the version that is cached or being fetched.
"""

import asyncio
import contextlib
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
from shardcache.cache.waiting.waits import PriorityClass, Wait
from shardcache.shared.exceptions import CorruptShardError, OutdatedError
from shardcache.shared.protocol import ShardRef
from shardcache.store.keys import is_key, shard_key
from shardcache.store.part_file import JOURNAL_BYTES, PartFile, Span, part_key
from shardcache.store.shard import Facts, Shard
from shardcache.store.space import footprint_bytes
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters

log = structlog.get_logger()

_Early = TypeVar("_Early", Arrival, PartFile)

# Maximum number of parts of a range that are planned: a client may announce any range.
_MAX_RANGE_PARTS = 4096

# Number of urls looked up in the catalogue at a time. Larger batches would block the event loop.
_RECALLED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Published:
    """A cached shard, which the caller has to retain before its next await: it may be evicted.

    Attributes:
        shard: the shard.
        facts: the facts in its sidecar, such as its version and its number of samples.
        is_hit: True if none of its bytes had to be fetched for this request.
    """

    shard: Shard
    facts: Facts
    is_hit: bool


@dataclass(frozen=True, slots=True, eq=False)
class Leasing:
    """Gets published shards, for leases and for other uses: from the cache, or by a transfer.

    `_range_part_bytes` is the size of the parts in which ranges of objects are fetched. The lock
    `_checking` is held while a shard is checked in which a reader reported damage.
    """

    _store: Store
    _planner: Planner
    _residency: Residency
    _transfers: Transfers
    _health: DiskHealth
    _history: History
    _revalidation: Revalidation
    _counters: Counters
    _range_part_bytes: int
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def recall(self, unversioned: Iterable[tuple[str, str]]) -> None:
        """Find the cached versions of shards whose version neither a plan nor the planner has.

        They were cached before the daemon's restart. `acquire` asks the origin whether they are
        still the latest.

        Args:
            unversioned: name and url of each shard whose version the plan does not have.
        """
        # The planner maps a name of unknown version to itself.
        unknown = [(name, url) for name, url in unversioned if self._planner.key(name) == name]
        for first in range(0, len(unknown), _RECALLED_AT_ONCE):
            batch = unknown[first : first + _RECALLED_AT_ONCE]
            versions = await self._history.versions([url for _, url in batch])
            for (name, _), version in zip(batch, versions, strict=True):
                if version is None:
                    continue
                key = shard_key(name, version)
                if key in self._store.shards:
                    # The version is revalidated for the next reader, as if it was checked
                    # infinitely long ago.
                    self._planner.learn(name, key, checked_at_s=float("-inf"))

    async def acquire(
        self,
        ref: ShardRef,
        priority_class: PriorityClass,
        wait: Wait,
    ) -> Published | Arrival:
        """Return the published shard, fetched if it is missing.

        Returns early access to the shard instead, if `wait` accepts that. Raises every error that
        fetching can raise, and OutdatedError if the origin has another version than `ref` names.

        Args:
            ref: the shard, with the version that is wanted; without one, the latest is wanted.
            priority_class: class of the transfer, if there has to be one.
            wait: the caller, and how much of the shard is enough for it.
        """
        name = name_of(ref)

        async def fetch() -> Shard | Arrival:
            return await self._transfers.wait(name, ref, priority_class, wait)

        return await self._acquire(fetch, name, ref)

    async def acquire_latest(
        self,
        ref: ShardRef,
        priority_class: PriorityClass,
        wait: Wait,
    ) -> Published | Arrival:
        """Return the present version of a shard, whichever version `ref` names; see `acquire`.

        From then on, the shard's name in plans stands for this version. If the name is that of an
        earlier version, other plans with the same name get OutdatedError from `acquire`.
        """
        acquired = await self.acquire(ref._replace(version=None), priority_class, wait)
        if isinstance(acquired, Published):
            key = acquired.shard.key
        else:
            key = acquired.partial.key
        self._planner.learn(name_of(ref), key, checked_at_s=time.monotonic())
        return acquired

    async def acquire_range(self, ref: ShardRef, wait: Wait) -> Published | PartFile:
        """Return a file with the bytes that a wait needs: the whole object, or some of its parts.

        The caller retains the file before its next await. Raises every error that fetching can
        raise, and OutdatedError if the origin has another version than `ref` names.
        """
        # There has to be space for the whole range. But a caller that reads in order can begin as
        # soon as the range's first bytes are cached.
        span = wait.bytes
        first_span = wait.first_bytes
        assert span is not None
        assert first_span is not None
        name = name_of(ref)

        async def fetch() -> Shard | PartFile:
            file = self._store.parts.get(self._planner.key(name))
            if file is not None and file.has(first_span):
                return file
            self._check_range(ref, span)
            return await self._transfers.wait_for_range(name, ref, wait)

        return await self._acquire(fetch, name, ref)

    def range_bytes(self, ref: ShardRef, span: Span) -> int:
        """Return how much space a range takes, if all of its parts are fetched."""
        start, end = span
        if ref.size_bytes:
            end = min(end, ref.size_bytes)
        part_bytes = self._range_part_bytes
        first_part = start // part_bytes
        end_part = -(-end // part_bytes)  # rounded up
        parts = max(0, end_part - first_part)
        return JOURNAL_BYTES + parts * part_bytes

    def range_keys(self, ref: ShardRef, span: Span) -> list[str]:
        """Return the keys of an object, and of those of its parts that have a range.

        These are the keys in the schedule. Empty if the object's version is not known yet, or the
        range has no part.
        """
        key = self._planner.key(name_of(ref))
        if not is_key(key):
            return []
        start, end = span
        if ref.size_bytes:
            end = min(end, ref.size_bytes)
        file = self._store.parts.get(key)
        part_bytes = self._range_part_bytes if file is None else file.partial.part_bytes
        first_part = start // part_bytes
        end_part = min(-(-end // part_bytes), first_part + _MAX_RANGE_PARTS)  # rounded up
        if first_part >= end_part:
            return []
        return [key, *(part_key(key, part) for part in range(first_part, end_part))]

    def at_hand(self, name: str, span: Span, version: str | None = None) -> Shard | PartFile | None:
        """Return a cached file that has a range of an object, or None.

        The caller reads or retains the file before its next await. None means that the range has
        to be fetched or checked first, which `acquire_range` does.

        Args:
            name: name of the file in plans.
            span: start and end of the range in bytes.
            version: the wanted version; None for any.
        """
        key = self._planner.key(name)
        shard = self._store.shards.get(key)
        if shard is not None:
            if shard.facts is None:  # its sidecar has not been read yet
                return None
            # This is not `Store.is_suspect`, which also looks for the index: a range of bytes can
            # be read without one.
            if shard.suspicion:  # a reader has reported damage
                return None
            if version is not None and version != shard.facts.version:
                return None
            # The time of use is shown to users and outlasts restarts. The schedule's own record
            # determines the order of eviction.
            self._store.touch(shard)
            self._planner.schedule.used(key)
            return shard
        # The use of parts is recorded by the caller, who knows which parts it retains.
        file = self._store.parts.get(key)
        if file is None or not file.has(span):
            return None
        if version is not None and version != file.version:
            return None
        return file

    def may_serve_cached(self, ref: ShardRef) -> bool:
        """Return whether the cached bytes of a shard may be served without asking its origin.

        For a signed url, this is so only if the origin has accepted the signature.
        """
        return self._revalidation.allows(ref.url)

    @contextlib.asynccontextmanager
    async def retained(self, ref: ShardRef) -> AsyncIterator[Published]:
        """Retain a shard, fetched if it is missing, during the block of a command.

        A transfer is of the class `WARM`, so that it gives way to readers. Raises as `acquire`
        does.
        """
        # A default wait accepts neither a partial shard nor one that is not published yet.
        published = await self.acquire(ref, PriorityClass.WARM, Wait())
        assert isinstance(published, Published)
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

    def _check_range(self, ref: ShardRef, span: Span) -> None:
        """Raise CapacityError if neither a range nor the whole object will ever fit."""
        # If its size is unknown, the whole object may not fit, so the range is checked.
        if ref.size_bytes and self._residency.may_fit(footprint_bytes(ref.size_bytes)):
            return
        self._residency.check_range(self.range_bytes(ref, span), ref.url)

    async def _acquire(
        self,
        fetch: Callable[[], Awaitable[Shard | _Early]],
        name: str,
        ref: ShardRef,
    ) -> Published | _Early:
        """Return the published shard, or early access to it.

        Args:
            fetch: fetches or indexes the shard, or gives early access. It is called again and again
                while the shard is missing, is damaged, or has no index, which a reader of samples
                needs.
            name: name of the shard in plans.
            ref: the shard as the caller requests it.
        """
        shard = await self._present(name, ref)
        is_hit = shard is not None  # True while nothing of the shard had to be fetched
        while True:
            published = await self._if_usable(shard, ref, is_hit=is_hit)
            if published is not None:
                return published

            fetched = await fetch()
            if not isinstance(fetched, Shard):
                return fetched
            # A transfer returns the same `Shard` object if it has only indexed the cached file. It
            # returns another one if it has fetched the shard's bytes.
            was_only_indexed = fetched is shard
            is_hit = is_hit and was_only_indexed
            # The shard may have been evicted between its publication and this task's turn on the
            # event loop. So look it up and check it again.
            shard = self._store.shards.get(fetched.key)

    async def _present(self, name: str, ref: ShardRef) -> Shard | None:
        """Return the shard if it is cached in the version that `ref` names.

        If `ref` names none, that is the version which the origin reported last. Raises the origin's
        error for a signed url that it does not accept.
        """
        key = self._planner.key(name)
        has_bytes = key in self._store.shards or key in self._store.parts
        # Cached or arriving bytes may have been fetched by a url with another signature, so the
        # origin has to be asked whether it accepts this one. If there are no bytes, the origin sees
        # this url's signature in the first request of a new transfer.
        if has_bytes or name in self._transfers:
            await self._revalidation.check_signature(name, ref)
        if ref.version is None:
            await self._revalidation.check(name, ref)
        return self._store.shards.get(self._planner.key(name))

    async def _if_usable(
        self,
        shard: Shard | None,
        ref: ShardRef,
        *,
        is_hit: bool,
    ) -> Published | None:
        """Return a cached shard with its facts, if it is sound and has what `ref` asks for.

        None if it is damaged, or has no index and samples are wanted. Raises OutdatedError if it is
        another version than `ref` names.

        Args:
            shard: the cached shard; if it is None, so is the result.
            ref: the shard as the caller requests it.
            is_hit: whether the shard was cached when it was requested.
        """
        if shard is None:
            return None
        facts = await self._facts_if_sound(shard, ref.url)
        if facts is None:
            return None
        _check_version(facts, ref)
        if not ref.is_file and facts.samples is None:  # a reader of samples needs an index
            return None
        if is_hit:  # the schedule does not count the first use, for which a shard was fetched
            self._planner.schedule.used(shard.key)
        return Published(shard, facts, is_hit)

    async def _facts_if_sound(self, shard: Shard, url: str) -> Facts | None:
        """Return the facts of a cached shard; None if it is damaged, or has left the cache.

        If a reader reported damage, the shard is checked first. A damaged shard is taken out of
        service. Raises DiskError if the disk has failed.
        """
        try:
            if self._store.is_suspect(shard):
                await self._check_suspect(shard, url)
            if not self._is_cached(shard):
                return None
            with self._residency.retained(shard):
                # Facts stay in memory once they were read, so the history needs them only once.
                is_first_read = shard.facts is None
                facts = await self._store.facts(shard)
                if is_first_read:
                    await self._history.remember(facts)
        except CorruptShardError as exn:
            await self._take_out(shard, exn, url)
            return None
        self._store.touch(shard)
        return facts if self._is_cached(shard) else None

    def _is_cached(self, shard: Shard) -> bool:
        """Return whether this very shard is in service."""
        return self._store.shards.get(shard.key) is shard

    async def _check_suspect(self, shard: Shard, url: str) -> None:
        """Check a shard in which a reader found damage; take it out of service if there is some.

        If only the index is damaged, the shard counts as a plain file from then on. It is indexed
        again for the next reader of samples. Raises DiskError if the disk has failed.
        """
        # Shards are checked one at a time. Several readers may report the same damage: those that
        # waited for the lock find the shard checked already.
        async with self._checking:
            if not self._is_cached(shard) or not self._store.is_suspect(shard):
                return
            try:
                with self._residency.retained(shard):
                    await self._check_index_and_tar(shard, url)
            except CorruptShardError as exn:
                await self._take_out(shard, exn, url)
                return
            shard.suspicion = ""

    async def _take_out(self, shard: Shard, exn: CorruptShardError, url: str) -> None:
        """Take a damaged shard out of service. Raises DiskError if it is the disk that fails."""
        was_taken_out = await self._health.take_out(shard, exn)
        if not was_taken_out:  # it may be the disk that fails
            self._health.raise_if_failing(url)

    async def _check_index_and_tar(self, shard: Shard, url: str) -> None:
        """Check the index of a shard; if it is sound, the tar. Raises CorruptShardError."""
        facts = await self._store.facts(shard)
        # A damaged index explains the reader's report. So the tar is checked only if there is no
        # index (`samples` is None), or the index is sound.
        if facts.samples is None or await self._check_index(shard, facts):
            log.warning(
                "checking a shard that a reader found damaged",
                shard=url,
                cause=shard.suspicion,
            )
            await self._store.check_tar(shard, facts)

    async def _check_index(self, shard: Shard, facts: Facts) -> bool:
        """Return whether a shard's index is sound; if it is not, take it out of use.

        The shard then counts as a plain file, which has no samples. Raises DiskError if the disk
        has failed.
        """
        try:
            await self._store.check_sidecar(shard, facts)
        except CorruptShardError as exn:
            # If the disk has failed, the index itself may be sound.
            await self._health.examine()
            self._health.raise_if_failing(facts.url)
            log.error(
                "the index of a cached shard is damaged; rebuilding it",
                shard=facts.url,
                cause=exn.message,
            )
            self._counters.corrupt += 1
            shard.facts = replace(facts, samples=None)
            return False
        return True


def _check_version(facts: Facts, ref: ShardRef) -> None:
    """Raise OutdatedError if a cached shard is another version than `ref` names.

    That happens after `acquire_latest` for the same name, which found a later version in the
    origin.
    """
    if ref.version is not None and ref.version != facts.version:
        raise OutdatedError(
            f"the origin has version {facts.version}, the manifest names {ref.version}",
            url=ref.url,
        )
