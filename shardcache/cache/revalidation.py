"""Questions to stores: is the version of a shard that is cached still theirs?"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import structlog

from shardcache.cache.names import Names
from shardcache.errors import AccessDeniedError, OriginUnavailableError, ShardcacheError
from shardcache.metrics import Counters
from shardcache.origin.registry import Origins
from shardcache.origin.urls import store_of
from shardcache.store.layout import shard_key
from shardcache.store.store import Store

log = structlog.get_logger()

_GRACE_S = 1.0
_TIMEOUT_S = 5.0


class Revalidation:
    """Asks for the present version of cached shards, once per shard, whoever reads them.

    An answer that comes at once counts at once. One that does not is waited for in the background while the cached
    version is served, and counts from the next lease on; meanwhile that store is asked one question at a time, and no
    reader waits for any.

    Args:
        ttl_s: how long an answer is believed.
    """

    def __init__(
        self,
        store: Store,
        origins: Origins,
        names: Names,
        counters: Counters,
        group: asyncio.TaskGroup,
        ttl_s: float,
    ) -> None:
        self._store = store
        self._origins = origins
        self._names = names
        self._counters = counters
        self._group = group
        self._ttl_s = ttl_s
        self._questions: dict[str, asyncio.Task[ShardcacheError | None]] = {}  # by the shard's name
        self._under_way: Counter[str] = Counter()  # questions to each store
        self._silent: set[str] = set()

    def __repr__(self) -> str:
        return f"<Revalidation of {len(self._questions)} shards, {len(self._silent)} stores silent>"

    @property
    def questions(self) -> list[asyncio.Task[ShardcacheError | None]]:
        """Questions under way."""
        return list(self._questions.values())

    async def check(self, name: str, url: str) -> None:
        """Ask for the version of a shard that is cached and was not asked for lately; wait for a prompt answer alone.

        Raises the error of a store that answers that it does not have the shard any more.
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
        """Drop the questions under way."""
        for question in self.questions:
            question.cancel()

    def _is_stale(self, name: str) -> bool:
        old = time.monotonic() - self._names.checked_at_s(name) > self._ttl_s
        return old and self._names.key(name) in self._store.shards  # for any other a transfer asks

    async def _ask(self, name: str, url: str) -> ShardcacheError | None:
        """Learn the version, or return the error that a reader is to be told."""
        origin, asked_s = store_of(url), time.monotonic()
        self._under_way[origin] += 1
        try:
            key = await self._present_key(name, url)
        except ShardcacheError as exn:
            return exn
        finally:
            self._under_way[origin] -= 1
            del self._questions[name]
        if self._names.checked_at_s(name) < asked_s:  # else a transfer has asked since, and knows better
            self._names.learn(name, key, time.monotonic())
        return None

    async def _present_key(self, name: str, url: str) -> str:
        """Return the key of the store's version, or of the one known last where the store does not tell."""
        self._counters.origin_requests += 1
        try:
            async with asyncio.timeout(_TIMEOUT_S) as limit:
                obj = await self._origins.origin(url).stat(url)
        except (OriginUnavailableError, AccessDeniedError, TimeoutError) as exn:
            log.warning("the store tells of no newer version; serving the last", shard=url, cause=str(exn))
            return self._names.key(name)
        except ShardcacheError:
            raise
        except Exception:  # a top-level guard, as that of transfers: one bad shard must not end all jobs
            log.exception("asking for the version met a bug; serving the last", shard=url)
            return self._names.key(name)
        finally:
            (self._silent.add if limit.expired() else self._silent.discard)(store_of(url))
        return shard_key(url, obj.version)
