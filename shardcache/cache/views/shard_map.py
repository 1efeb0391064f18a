"""The map of cached shards: when each is needed next.

It alone says on the page whether a shard is cached, to users who have only a browser. Each second
it costs a page 22 ms of a processor and 150 kB with 4,500 shards, 95 ms and 680 kB with 20,000.
"""

import bisect
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardcache.cache.planner import Planner
from shardcache.cache.views.visibility import Visible
from shardcache.cache.waiting.turns import Turns
from shardcache.cache.waiting.waits import Holder
from shardcache.plan.reader_plan import NEVER
from shardcache.plan.schedule import Schedule
from shardcache.redact import redact
from shardcache.shared.protocol import Json
from shardcache.store.shard import Shard
from shardcache.store.store import Store

# The map's bands: needed within this many seconds; after these, needed later; then in no plan.
BANDS_S = (60.0, 300.0, 900.0, 3600.0)
LEASED = -1
UNPLANNED = len(BANDS_S) + 1

# As many cells as a picture can show; a larger cache is shown in part.
_MAX_CELLS = 20_000

# After a restart only the shards' keys are known: each refresh reads sidecars for this long.
_READING_S = 0.5
_READ_AT_ONCE = 256


class _Cell(NamedTuple):
    """One cached shard of the map."""

    url: str
    band: int  # LEASED, UNPLANNED, or the index in `BANDS_S` of its next use
    size_bytes: int
    pinned: bool


class ShardMap:
    """The cached shards as of the last refresh, each with the band of its next use."""

    def __init__(self, store: Store, planner: Planner, turns: Turns) -> None:
        self._store = store
        self._planner = planner
        self._turns = turns
        self._cells: list[_Cell] = []
        self._urls: dict[str, str] = {}  # of cached shards, by key; empty for a damaged sidecar

    async def to_json(self, visible: Visible) -> Json:
        """Return the number of cached shards, and the visible ones by folder.

        Each is a row of name, band, size, and 1 if it is pinned.
        """
        folders: defaultdict[str, list[Any]] = defaultdict(list)

        def add(cells: Iterable[_Cell]) -> None:
            for cell in cells:
                if visible(cell.url):
                    folder, slash, name = redact(cell.url).rpartition("/")
                    row = [name, cell.band, cell.size_bytes, int(cell.pinned)]
                    folders[folder + slash].append(row)

        await self._turns.take(self._cells, add)
        return {"shards": len(self._store.shards), "folders": folders}

    async def refresh(self) -> bool:
        """Look at the cached shards; return False while some sidecars have not been read yet."""
        shards = list(itertools.islice(self._store.shards.values(), _MAX_CELLS))
        is_complete = await self._learn_urls(shards)
        cells: list[_Cell] = []

        def add(some: Iterable[Shard]) -> None:
            now = self._planner.now
            for shard in some:
                url = self._urls.get(shard.key)
                if url:
                    cells.append(_Cell(url, _band(shard, now), shard.size_bytes, shard.pinned))

        await self._turns.take(shards, add)
        self._cells = cells
        return is_complete

    async def _learn_urls(self, shards: Sequence[Shard]) -> bool:
        """Learn the urls of shards, if need be from their sidecars.

        Returns False if some are left for the next time.
        """
        until_s = time.monotonic() + _READING_S
        known = self._urls
        self._urls = {shard.key: known[shard.key] for shard in shards if shard.key in known}
        self._urls |= {shard.key: shard.facts.url for shard in shards if shard.facts is not None}
        unread = [shard for shard in shards if shard.key not in self._urls]
        for first in range(0, len(unread), _READ_AT_ONCE):
            if time.monotonic() > until_s:
                return False
            some = unread[first : first + _READ_AT_ONCE]
            peeked = await self._store.peek(some)
            for shard, facts in zip(some, peeked, strict=True):
                # A damaged one is quarantined by its next use or check.
                self._urls[shard.key] = facts.url if facts else ""
        return True


def _band(shard: Shard, now: Schedule[Holder]) -> int:
    if shard.leases:
        return LEASED
    use_s = now.next_use_s(shard.key)
    if use_s == NEVER:
        return UNPLANNED
    return bisect.bisect_left(BANDS_S, use_s - now.now_s)
