"""User operations on published shards: list, evict, verify."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from shardcache.cache.catalog.url_matching import Matching
from shardcache.cache.residency.evictor import Evictor
from shardcache.cache.residency.inventory import Inventory
from shardcache.cache.residency.pins import Pins, pinned_by
from shardcache.cache.residency.quarantine import Quarantine
from shardcache.errors import CorruptShardError, ExhaustedError
from shardcache.store.shard import Facts, Shard
from shardcache.store.store import Store

Event = dict[str, Any]
Sight = Callable[[str], bool]
"""Predicate: may the caller see this url?"""

_AT_ONCE = 256


class Maintenance:
    """Lists, evicts and verifies the shards of one store."""

    def __init__(
        self, store: Store, evictor: Evictor, inventory: Inventory, pins: Pins, quarantine: Quarantine
    ) -> None:
        self._store = store
        self._evictor = evictor
        self._inventory = inventory
        self._pins = pins
        self._quarantine = quarantine

    async def shards(
        self, prefix: str = "", sight: Sight = lambda _: True
    ) -> AsyncGenerator[tuple[Shard, Facts], None]:
        """Yield the published shards whose url starts with `prefix`; quarantine damaged ones on the way."""

        def is_meant(facts: Facts) -> bool:
            return facts.url.startswith(prefix) and sight(facts.url)

        for number, shard in enumerate(list(self._store.shards.values())):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # a hundred thousand shards would block the event loop
            if shard.facts is not None and not is_meant(shard.facts):
                continue  # without reading its sidecar
            try:
                facts = await self._store.facts(shard)
            except CorruptShardError as exn:
                await self._quarantine.found(shard, exn)
                continue
            if is_meant(facts) and self._store.shards.get(shard.key) is shard:
                yield shard, facts

    async def evict(self, patterns: Sequence[str], sight: Sight = lambda _: True) -> Event:
        """Remove the shards that match the urls, patterns or prefixes; report those that stayed and why."""
        matching = await asyncio.to_thread(Matching, patterns)
        evicted: list[str] = []
        kept: list[Event] = []
        freed_bytes = 0
        async for shard, facts in self.shards(sight=lambda url: url in matching and sight(url)):
            if shard.stays:
                kept.append({"url": facts.url, "reason": self._why_it_stays(shard, facts)})
            elif await self._evictor.evict(shard):
                evicted.append(facts.url)
                freed_bytes += shard.kept_bytes
            else:
                kept.append({"url": facts.url, "reason": "a process still has it open"})
        return {"evicted": evicted, "kept": kept, "freed_bytes": freed_bytes}

    def _why_it_stays(self, shard: Shard, facts: Facts) -> str:
        pin = self._pins.get(facts.url) if shard.pinned else None
        return f"in use by {shard.leases} reader(s)" if pin is None else pinned_by(pin)

    async def verify(self, prefix: str = "", sight: Sight = lambda _: True) -> AsyncIterator[Event]:
        """Verify every shard by reading it again, quarantine damaged ones, and yield events."""
        shards = [found async for found in self.shards(prefix, sight)]
        total_bytes = sum(shard.size_bytes for shard, _ in shards)
        yield {"event": "start", "shards": len(shards), "total_bytes": total_bytes}
        done_bytes = corrupt = 0
        for number, (shard, facts) in enumerate(shards, 1):
            error = await self._verify(shard)
            corrupt += isinstance(error, CorruptShardError)
            done_bytes += shard.size_bytes
            result = {"ok": True} if error is None else {"ok": False, "error": error.to_json()}
            yield {"event": "shard", "url": facts.url, **result}
            yield {
                "event": "progress",
                "done_shards": number,
                "shards": len(shards),
                "done_bytes": done_bytes,
                "total_bytes": total_bytes,
            }
        yield {"event": "done", "shards": len(shards), "corrupt": corrupt, "bytes": done_bytes}

    async def _verify(self, shard: Shard) -> CorruptShardError | ExhaustedError | None:
        if self._store.shards.get(shard.key) is not shard:
            return None  # evicted since it was listed
        try:
            with self._inventory.retained(shard):
                await self._store.check(shard)
        except CorruptShardError as exn:
            await self._quarantine.found(shard, exn)
            return exn
        except ExhaustedError as exn:
            return exn
        return None
