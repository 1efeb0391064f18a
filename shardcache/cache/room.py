"""Making room: promise space for a shard, evicting others if need be, or wait until that is possible."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice

from shardcache.cache.names import Names
from shardcache.cache.signal import Signal
from shardcache.errors import CapacityError, DiskFullError
from shardcache.metrics import Counters
from shardcache.plan.replacement import Candidate, choose_victims
from shardcache.plan.timeline import Timeline
from shardcache.store.shard import Shard
from shardcache.store.space import Reservation
from shardcache.store.store import Store

# How many of the least recently used shards one decision looks at: it bounds the time that a decision takes when
# everything cached is planned.
_LOOK_AT = 256
_LOOK_AGAIN_S = 1.0


class Room:
    """The space of one store, given out against the timeline."""

    def __init__(self, store: Store, timeline: Timeline, names: Names, counters: Counters, changed: Signal) -> None:
        self.changed = changed
        self._store = store
        self._timeline = timeline
        self._names = names
        self._counters = counters
        self._lock = asyncio.Lock()

    async def try_reserve(self, reservation: Reservation, size_bytes: int, needed_in: float) -> bool:
        """Grow the reservation by `size_bytes` if that can be done now, evicting if need be."""
        async with self._lock:
            while shortfall := self._store.shortfall_bytes(size_bytes):
                if not await self._free(shortfall, needed_in):
                    return False
            reservation.grow(size_bytes)
            return True

    async def change(self) -> None:
        """Return when what may be evicted has changed, or after a while: who closes a file tells nobody."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_AGAIN_S):
                await self.changed.wait()

    def could_fit(self, size_bytes: int, needed_in: float) -> bool:
        """Whether `try_reserve` would succeed now; evicts nothing."""
        shortfall = self._store.shortfall_bytes(size_bytes)
        leftovers = sum(leftover.size_bytes for leftover in self._store.leftovers.values())
        return self._victims(shortfall - leftovers, needed_in) is not None

    def next_use(self, key: str) -> float:
        """Return how soon a cached shard is needed, under whatever name plans know it."""
        return min(map(self._timeline.next_use, self._names.names(key)))

    async def evict(self, shard: Shard) -> bool:
        """Remove a shard that no lease holds; False when a process still has it open."""
        if not await self._store.remove(shard):
            return False
        self._counters.evictions += 1
        self.forget(shard.key)
        return True

    def forget(self, key: str) -> None:
        """Tell plan and names that a shard is no longer here."""
        for name in self._names.names(key):
            self._timeline.evicted(name)
        self._names.forget(key)
        self.changed.notify()

    async def _free(self, wanted_bytes: int, needed_in: float) -> bool:
        for key in list(self._store.leftovers):
            if key in self._store.leftovers and await self._store.remove_leftover(key):
                return True
        victims = self._victims(wanted_bytes, needed_in)
        if victims is None:
            return False
        evicted = [await self._evict_if_idle(key) for key in victims]
        return any(evicted)

    async def _evict_if_idle(self, key: str) -> bool:
        shard = self._store.shards.get(key)  # a lease may have come while another victim was removed
        return shard is not None and not shard.leases and await self.evict(shard)

    def _victims(self, wanted_bytes: int, needed_in: float) -> list[str] | None:
        idle = (Candidate(shard.key, shard.kept_bytes) for shard in self._store.idle())
        return choose_victims(islice(idle, _LOOK_AT), wanted_bytes, self.next_use, needed_in)

    def check_possible(self, size_bytes: int, url: str) -> None:
        """Raise CapacityError or DiskFullError when even an otherwise empty cache could not hold `size_bytes`."""
        space = self._store.space
        if size_bytes > space.capacity_bytes:
            raise CapacityError(
                f"the shard takes {size_bytes} bytes, the whole cache holds {space.capacity_bytes}", url=url
            )
        on_disk_bytes = space.used_bytes - space.unwritten_bytes
        if self._store.shortfall_bytes(size_bytes) > on_disk_bytes + space.promised_bytes:
            raise DiskFullError(
                f"the filesystem of {self._store.layout.root} has no {size_bytes} bytes to give above "
                f"the {space.min_free_bytes} that stay free",
                url=url,
                remedy="free space there, or lower --min-free",
            )
