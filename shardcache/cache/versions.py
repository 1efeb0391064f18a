"""Versions of shards: the last one fetched of each url, and whether the cached one is still the origin's."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog

from shardcache.access.urls import store_of
from shardcache.cache.planner import AliasTable
from shardcache.errors import AccessDeniedError, OriginUnavailableError, ShardcacheError
from shardcache.metrics import Counters
from shardcache.origin.registry import Origins
from shardcache.protocol import ShardRef
from shardcache.redact import redact
from shardcache.store.catalogue import Catalogue
from shardcache.store.folder import shard_key
from shardcache.store.shard import Facts
from shardcache.store.store import Store

log = structlog.get_logger()

_KIND = "shard"

# Revalidation: a reader waits this long for an answer, and nothing waits longer than the timeout.
_GRACE_S = 1.0
_TIMEOUT_S = 5.0


class History:
    """The last version fetched of each url and its sample count, which outlive the shard: rows of the catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._rebuilding = asyncio.Lock()

    async def rebuild(self, store: Store) -> None:
        """Restore lost rows from the sidecars of the published shards; lookups wait until this is done.

        If several versions of a url are cached, the most recently read one is kept. Counts of shards no longer cached
        cannot be restored.
        """
        async with self._rebuilding:
            if await self.catalogue.count(_KIND) >= len(store.shards):
                return
            log.info("rebuilding sample counts from the sidecars", shards=len(store.shards))
            async with aclosing(store.sidecars()) as sidecars:
                async for some in sidecars:
                    rows = [((_KIND, facts.url), [facts.version, facts.samples]) for facts in some]
                    await self.catalogue.add_many(rows)

    async def remember(self, facts: Facts) -> None:
        """Store a shard's version and sample count."""
        await self.catalogue.put([facts.version, facts.samples], _KIND, facts.url)

    async def versions(self, urls: Sequence[str]) -> list[str | None]:
        """Return the last version fetched of each url, or None."""
        rows = await self._rows(urls)
        return [str(row[0]) if row else None for row in rows]

    async def fill(self, refs: list[ShardRef]) -> list[ShardRef]:
        """Return the refs with known sample counts filled in; a ref without a version gets the last version's."""
        unknown = [ref.url for ref in refs if ref.samples is None]  # an index file gives every count
        known = dict(zip(unknown, await self._rows(unknown), strict=True))
        return [_filled(ref, known.get(ref.url)) for ref in refs]

    async def _rows(self, urls: Sequence[str]) -> list[list[object] | None]:
        async with self._rebuilding:
            pass
        return await self.catalogue.get_many([(_KIND, redact(url)) for url in urls])


def _filled(ref: ShardRef, row: list[object] | None) -> ShardRef:
    if row is None or ref.samples is not None or ref.version not in (None, row[0]):
        return ref
    samples = row[1]
    return replace(ref, samples=samples) if isinstance(samples, int) else ref


class Revalidation:
    """Asks origins for the present version of cached shards, once per shard for all readers.

    A prompt answer takes effect immediately. A slow one is awaited in the background while the cached version is
    served, and takes effect from the next lease on; until then that origin gets one such request at a time, and no
    reader waits for it.

    Args:
        ttl_s: how long an answer stays valid.
    """

    def __init__(
        self,
        store: Store,
        origins: Origins,
        aliases: AliasTable,
        counters: Counters,
        group: asyncio.TaskGroup,
        ttl_s: float,
    ) -> None:
        self._store = store
        self._origins = origins
        self._aliases = aliases
        self._counters = counters
        self._group = group
        self._ttl_s = ttl_s
        self._questions: dict[str, asyncio.Task[ShardcacheError | None]] = {}  # by the shard's name
        self._under_way: Counter[str] = Counter()  # pending requests, by origin
        self._silent: set[str] = set()

    def __repr__(self) -> str:
        return f"<Revalidation of {len(self._questions)} shards, {len(self._silent)} origins silent>"

    @property
    def questions(self) -> list[asyncio.Task[ShardcacheError | None]]:
        """The pending requests."""
        return list(self._questions.values())

    async def check(self, name: str, url: str) -> None:
        """Revalidate a cached shard unless that was done lately; wait only as long as for a prompt answer.

        Raises the origin's error if it answers that it no longer has the shard.
        """
        origin = store_of(url)
        if not self._is_stale(name) or (origin in self._silent and self._under_way[origin]):
            return
        if name not in self._questions:
            self._questions[name] = self._group.create_task(self._ask(name, url), name=f"revalidate {url}")
        if origin in self._silent:
            return
        answered, _ = await asyncio.wait([question := self._questions[name]], timeout=_GRACE_S)
        if not answered:
            self._silent.add(origin)
        elif (error := question.result()) is not None:
            raise error

    def stop(self) -> None:
        """Cancel the pending requests."""
        for question in self.questions:
            question.cancel()

    def _is_stale(self, name: str) -> bool:
        old = time.monotonic() - self._aliases.checked_at_s(name) > self._ttl_s
        return old and self._aliases.key(name) in self._store.shards  # for a missing shard, the transfer asks

    async def _ask(self, name: str, url: str) -> ShardcacheError | None:
        """Learn the present version, or return the error for the reader."""
        origin, asked_s = store_of(url), time.monotonic()
        self._under_way[origin] += 1
        try:
            key = await self._present_key(name, url)
        except ShardcacheError as exn:
            return exn
        finally:
            self._under_way[origin] -= 1
            del self._questions[name]
        if self._aliases.checked_at_s(name) < asked_s:  # else a transfer has asked more recently
            self._aliases.learn(name, key, time.monotonic())
        return None

    async def _present_key(self, name: str, url: str) -> str:
        """Return the key of the origin's present version, or of the last known one if the origin does not answer."""
        self._counters.origin_requests += 1
        try:
            async with asyncio.timeout(_TIMEOUT_S) as limit:
                obj = await self._origins.origin(url).stat(url)
        except (OriginUnavailableError, AccessDeniedError, TimeoutError) as exn:
            log.warning("cannot revalidate the shard; serving the cached version", shard=url, cause=str(exn))
            return self._aliases.key(name)
        except ShardcacheError:
            raise
        except Exception:  # a top-level guard like that of transfers: one bad shard must not end all jobs
            log.exception("unexpected error in revalidation; serving the cached version", shard=url)
            return self._aliases.key(name)
        finally:
            (self._silent.add if limit.expired() else self._silent.discard)(store_of(url))
        return shard_key(url, obj.version)
