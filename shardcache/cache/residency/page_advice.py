"""Page-cache control: reads shards into memory before use and drops their pages when others are needed sooner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.planner import Planner
from shardcache.cache.signal import Signal
from shardcache.errors import ShardcacheError
from shardcache.plan.page_plan import PagePlan
from shardcache.store.disk.memory import Memory
from shardcache.store.disk.page_cache import let_go, read_ahead
from shardcache.store.shard import Shard
from shardcache.store.store import Store

log = structlog.get_logger()


class Pages:
    """Advises the kernel on the page cache, following the plan."""

    def __init__(self, store: Store, planner: Planner, aliases: AliasTable, changed: Signal) -> None:
        self._store = store
        self._planner = planner
        self._aliases = aliases
        self._changed = changed
        self._plan = PagePlan()
        self._idle: list[Shard] = []

    def idle(self, shard: Shard) -> None:
        """Note that a shard with pages in memory is no longer leased."""
        self._idle.append(shard)

    def gone(self, key: str) -> None:
        """Note that a shard is no longer cached."""
        self._plan.gone(key)

    async def run(self) -> None:
        """Update the advice at every change of state, until cancelled."""
        while True:
            seen = self._changed.count
            try:
                await self._advise(await asyncio.to_thread(Memory.read))
            except ShardcacheError as exn:  # the cache disk failed: each reader gets its own error
                log.warning("cannot read ahead into memory", cause=exn.message)
            if self._changed.count == seen:
                await self._changed.wait()

    async def _advise(self, memory: Memory) -> None:
        idle, self._idle = self._idle, []
        for shard in idle:
            if not shard.leases and self._is_here(shard.key):
                await self._each(let_go, self._plan.let_go(shard.key, shard.size_bytes, memory.spare_bytes, self._in_s))
        upcoming = [self._aliases.key(name) for name in self._planner.now.upcoming()]
        await self._each(read_ahead, self._plan.read_ahead(upcoming, self._size_bytes, memory.spare_bytes))

    async def _each(self, advise: Callable[[Path], None], keys: list[str]) -> None:
        for key in keys:
            await asyncio.to_thread(advise, self._store.layout.tar(key))

    def _in_s(self, key: str) -> float:
        now = self._planner.now
        return now.next_use_s(key) - now.now_s

    def _size_bytes(self, key: str) -> int | None:
        shard = self._store.shards.get(key)
        return None if shard is None else shard.size_bytes

    def _is_here(self, key: str) -> bool:
        return key in self._store.shards
