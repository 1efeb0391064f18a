"""Live view of the cache for open dashboard pages.

It is refreshed at most once a second, however many pages are open, and not at all when none is. Map and lanes, which
cost the most and change the least, are refreshed alternately.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.loop_turns import Turns
from shardcache.cache.planner import Planner
from shardcache.cache.readers.readers import Readers
from shardcache.cache.transfers.transfers import Transfer, Transfers
from shardcache.cache.views.job_timelines import JobTimelines, Lane, gaps
from shardcache.cache.views.shard_map import ShardMap
from shardcache.redact import HIDDEN, redact
from shardcache.store.store import Store

Json = dict[str, Any]
Sight = Callable[[str], bool]

# A little less than the pages' interval, so that no page gets the same state twice.
_PERIOD_S = 0.9


class LiveView:
    """Waiting readers, needs of the next minutes, and the map of cached shards.

    Attributes:
        looks: number of refreshes.
    """

    def __init__(
        self,
        store: Store,
        planner: Planner,
        aliases: AliasTable,
        transfers: Transfers,
        readers: Readers,
        turns: Turns,
        reason: Callable[[Transfer], str],
    ) -> None:
        self.looks = 0
        self._transfers = transfers
        self._reason = reason
        self._shard_map = ShardMap(store, planner, turns)
        self._ahead = JobTimelines(store, planner, aliases, transfers, readers, turns)
        self._lanes: list[Lane] = []
        self._looking = asyncio.Lock()
        self._looked_at_s = -math.inf

    def __repr__(self) -> str:
        return f"LiveView({self._shard_map!r}, looks={self.looks})"

    async def look(self) -> int:
        """Refresh the view unless that was done just now; return the number of the last refresh."""
        async with self._looking:
            if time.monotonic() - self._looked_at_s >= _PERIOD_S:
                if self.looks % 2 == 0 or not self._shard_map.complete:
                    await self._shard_map.look()
                if self.looks % 2 or not self.looks:
                    self._lanes = await self._ahead.look()
                self._looked_at_s = time.monotonic()
                self.looks += 1
            return self.looks

    def outlook(self, sight: Sight) -> Json:
        """Return the present waits, and each job's next minutes with the missing shards as of the last refresh."""
        return {
            "waits": list(self._waits(sight)),
            "lanes": [lane.to_json(sight) for lane in self._lanes],
            "gaps": [use.to_json(sight) for use in gaps(self._lanes)],
        }

    async def changes(self, mark: str, sight: Sight) -> Json:
        """Return the changes of the map since a mark; see `ShardMap.changes`."""
        return await self._shard_map.changes(mark, sight)

    def _waits(self, sight: Sight) -> Iterator[Json]:
        """Yield, for each shard and job, the number of readers that wait for it, for how long and why."""
        for transfer in self._transfers.all():
            readers: Counter[Hashable] = Counter()
            since_s: dict[Hashable, float] = {}
            for wait in transfer.waits:
                if wait.since_s is not None:
                    readers[wait.party] += 1
                    since_s[wait.party] = min(wait.since_s, since_s.get(wait.party, math.inf))
            url = transfer.ref.url
            for party, count in readers.items():
                job, uid = party if isinstance(party, tuple) else (None, None)
                yield {
                    "job": job,
                    "uid": uid,
                    "readers": count,
                    "for_s": round(time.monotonic() - since_s[party], 1),
                    "url": redact(url) if sight(url) else HIDDEN,
                    "reason": self._reason(transfer) if sight(url) else transfer.stages.present.value,
                }
