"""From what a user writes (patterns, prefixes, index files) to the list of shards, asked for once for everybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from weakref import WeakValueDictionary

import structlog

from shardcache.cache.allow import AllowList
from shardcache.cache.known import Known
from shardcache.errors import NotFoundError, OriginUnavailableError
from shardcache.fetch.download import Downloader
from shardcache.origin.listing import expand
from shardcache.origin.registry import Origins
from shardcache.origin.urls import INDEX_SUFFIX
from shardcache.protocol import ShardRef
from shardcache.store.catalogue import Catalogue

log = structlog.get_logger()

_KIND = "listing"

# All ranks of a job ask within moments.
_INDEX_TTL_S = 2.0


class Manifests:
    """Resolves patterns; believes a listing for `ttl_s` and keeps the last one for when the store is away."""

    def __init__(
        self,
        origins: Origins,
        downloader: Downloader,
        catalogue: Catalogue,
        known: Known,
        allow: AllowList,
        ttl_s: float,
    ) -> None:
        self._origins = origins
        self._downloader = downloader
        self._catalogue = catalogue
        self._known = known
        self._allow = allow
        self._ttl_s = ttl_s
        self._listed: dict[str, tuple[float, list[ShardRef]]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def resolve(self, patterns: Sequence[str], uid: int, *, fresh: bool = False) -> list[ShardRef]:
        """Return the shards of every pattern, in the order given, with the sample counts that are known.

        Args:
            fresh: whether the store is asked whatever is remembered.

        Raises NotAllowedError before anything is asked of a store, NotFoundError when there is no shard at all,
        and the origin's errors.
        """
        for pattern in patterns:
            self._allow.check(pattern, uid)
        for pattern in patterns if fresh else ():
            self._listed.pop(pattern, None)
        refs = [ref for pattern in patterns for ref in await self._resolve(pattern)]
        if not refs:
            raise NotFoundError("no urls given", remedy="name at least one shard")
        for ref in refs:
            self._allow.check(ref.url, uid)  # an index file may point anywhere
        return await self._known.fill(refs)

    async def _resolve(self, pattern: str) -> list[ShardRef]:
        lock = self._locks.setdefault(pattern, asyncio.Lock())
        async with lock:  # hundreds of workers start at the same moment; one of them asks
            self._drop_stale()
            if pattern not in self._listed:
                refs = await self._list(pattern)
                self._listed[pattern] = (time.monotonic(), refs)
            return self._listed[pattern][1]

    async def _list(self, pattern: str) -> list[ShardRef]:
        try:
            refs = await self._downloader.ask(pattern, lambda received: expand(pattern, self._origins, received))
        except OriginUnavailableError as exn:
            rows = await self._catalogue.get(_KIND, pattern)
            if rows is None:
                raise
            log.warning("the store does not answer; using the listing seen last", url=pattern, cause=exn.message)
            return [ShardRef.from_json(row) for row in rows]
        await self._catalogue.put([ref.to_json() for ref in refs], _KIND, pattern)
        return refs

    def _drop_stale(self) -> None:
        now_s = time.monotonic()
        self._listed = {
            pattern: entry for pattern, entry in self._listed.items() if entry[0] > now_s - self._lifetime_s(pattern)
        }

    def _lifetime_s(self, pattern: str) -> float:
        """An index file costs one request, and may just have been brought up to date for the job that asks."""
        return min(self._ttl_s, _INDEX_TTL_S) if pattern.endswith(INDEX_SUFFIX) else self._ttl_s
