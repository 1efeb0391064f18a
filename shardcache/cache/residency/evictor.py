"""Cache space: reserves space for shards, evicting others if necessary, or waits until that is possible."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable

import structlog

from shardcache.cache.planner import Planner
from shardcache.cache.residency.deadlock import check_progress
from shardcache.cache.residency.disk_health import Health
from shardcache.cache.residency.inventory import LOOK_AGAIN_S, Inventory
from shardcache.cache.residency.pins import Pins
from shardcache.cache.signal import Signal
from shardcache.cache.transfers.transfers import KeyClaim, PostponedError
from shardcache.errors import CapacityError, DiskFullError
from shardcache.metrics import Counters
from shardcache.store.shard import Shard
from shardcache.store.store import Store
from shardcache.units import size

log = structlog.get_logger()

# Times of need: of a shard that a reader waits for, and of one that is only warmed; the latter comes after all planned
# shards and before those in no plan.
NOW = float("-inf")
AFTER_ALL_PLANS = sys.float_info.max

# A claim waiting for space wakes at every change; a deadlock check examines all readers, and so runs less often.
_CHECK_AGAIN_S = 0.5
# Number of evicted shards remembered, to count re-fetches.
_REMEMBERED = 100_000


class Evictor:
    """Allocator and evictor for the space of one store, following the plan.

    Attributes:
        changed: notified when the set of evictable shards may have changed.
        claims: the shards being fetched, by key.
        short_bytes: shortfall of free space on the filesystem below --min-free, at the last check.
    """

    def __init__(
        self,
        store: Store,
        planner: Planner,
        inventory: Inventory,
        pins: Pins,
        health: Health,
        counters: Counters,
        changed: Signal,
    ) -> None:
        self.changed = changed
        self.claims: dict[str, KeyClaim] = {}
        self._store = store
        self._planner = planner
        self._inventory = inventory
        self._pins = pins
        self._health = health
        self._counters = counters
        self._lock = asyncio.Lock()
        self.short_bytes = 0
        self._evicted: dict[str, None] = {}

    async def reserve(
        self, claim: KeyClaim, size_bytes: int, needed_at_s: Callable[[], float], *, ahead_waits: bool = True
    ) -> None:
        """Grow a claim's reservation by `size_bytes` as soon as there is space, evicting if necessary.

        Args:
            claim: the claim of the shard.
            size_bytes: the space to add.
            needed_at_s: returns when the shard is needed.
            ahead_waits: wait for space even if no reader waits for the shard.

        Raises:
            CapacityError, DiskFullError: there will never be enough space, or there is a deadlock over it.
            PostponedError: no reader waits for the shard, and it may not wait for space or blocks others.
        """
        if await self._try_reserve(claim, size_bytes, needed_at_s()):
            return
        with claim.waiting(size_bytes):
            while True:
                self._check_possible(claim.reserved_bytes + size_bytes, claim.transfers[0].ref.url)
                if not (ahead_waits or claim.waits):
                    raise PostponedError
                await self.change(claim)
                if await self._try_reserve(claim, size_bytes, needed_at_s()):
                    return

    async def _try_reserve(self, claim: KeyClaim, size_bytes: int, needed_at_s: float) -> bool:
        assert claim.reservation is not None
        async with self._lock:
            self._inventory.look_again()
            while shortfall := self._store.shortfall_bytes(size_bytes):
                if not await self._free(shortfall, needed_at_s):
                    return False
            claim.reservation.grow(size_bytes)
            return True

    async def keep_free(self) -> None:
        """Evict until --min-free is met, as other files take space, too; if that cannot be met, only log it, once."""
        async with self._lock:
            self._inventory.look_again()
            while shortfall := self._store.crowding_bytes():
                if not await self._free(shortfall, NOW):
                    break
        if bool(shortfall) != bool(self.short_bytes):
            state = "cannot be met: other files fill the disk" if shortfall else "is met again"
            log.warning(f"--min-free {state}", short=size(shortfall))
        self.short_bytes = shortfall

    async def change(self, claim: KeyClaim) -> None:
        """Wait until more may be evictable, or a short while: closing a file in another process notifies nobody.

        Raises as `check_progress` does for a waiting claim.
        """
        now_s = time.monotonic()
        if now_s - claim.checked_s >= _CHECK_AGAIN_S:
            claim.checked_s = now_s
            check_progress(claim, self.claims.values(), self._inventory.leased, self._store.space)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self.changed.wait()

    def may_fit(self, size_bytes: int) -> bool:
        """Return False if `size_bytes` would not fit even with all unpinned shards evicted."""
        space = self._store.space
        return size_bytes <= space.effective_bytes(space.unwritten_bytes) - space.pinned_bytes

    def could_fit(self, size_bytes: int, needed_at_s: float) -> bool:
        """Return whether `_try_reserve` would succeed now; evict nothing."""
        if self._health.error is not None:
            return False
        self._inventory.look_again()
        shortfall = self._store.shortfall_bytes(size_bytes)
        leftovers = sum(leftover.size_bytes for leftover in self._store.leftovers.values())
        return self._victims(shortfall - leftovers, needed_at_s) is not None

    def due_s(self, key: str) -> float:
        """Return the time of need of an unplanned shard; a pinned one follows those needed within the lead time."""
        return self._planner.now.now_s + self._planner.lead_s if self._pins.names(key) else AFTER_ALL_PLANS

    def arrived(self, shard: Shard) -> None:
        """Register a newly published shard."""
        if shard.key in self._evicted:
            del self._evicted[shard.key]
            self._counters.refetches += 1
        self._inventory.published(shard)
        self._pins.arrived(shard)

    async def evict(self, shard: Shard) -> bool:
        """Remove a shard; False if it is leased, pinned, or still open in a process.

        No space can be reserved during the removal, so the same shard cannot be re-fetched and lose its new files.
        """
        async with self._lock:
            return await self._evict(shard.key)

    async def _evict(self, key: str) -> bool:
        shard = self._store.shards.get(key)
        if shard is None or shard.stays:  # since it was chosen
            return False
        try:
            with self._inventory.evicting(shard):
                if not await self._store.remove(shard):
                    return False
        finally:
            if self._store.shards.get(key) is shard:
                self._pins.arrived(shard)  # it may have been pinned in the meantime
        log.debug("evicted", shard=key if shard.facts is None else shard.facts.url)
        self._counters.evictions += 1
        return True

    def _remember(self, key: str) -> None:
        self._evicted[key] = None
        if len(self._evicted) > _REMEMBERED:
            del self._evicted[next(iter(self._evicted))]

    async def _free(self, wanted_bytes: int, needed_at_s: float) -> bool:
        for key in list(self._store.leftovers):
            if key in self._store.leftovers and await self._store.remove_leftover(key):
                return True
        victims = self._victims(wanted_bytes, needed_at_s)
        for key in victims or ():
            if await self._evict(key):
                self._remember(key)
        return victims is not None  # a shard that could not be removed is no longer a candidate: try again

    def _victims(self, wanted_bytes: int, needed_at_s: float) -> list[str] | None:
        return self._planner.now.victims(wanted_bytes, needed_at_s, self._planner.lead_s)

    def _check_possible(self, size_bytes: int, url: str) -> None:
        """Raise CapacityError or DiskFullError if `size_bytes` would not fit even with all unpinned shards evicted."""
        space = self._store.space
        if self.may_fit(size_bytes):
            return
        if size_bytes > space.effective_bytes(space.unwritten_bytes):
            remedy = f"{space.remedy}, or write smaller shards"
            kind = DiskFullError if space.crowding_bytes else CapacityError  # the disk is full, or too small
            raise kind(f"the shard takes {size(size_bytes)}; {space.explanation}", url=url, remedy=remedy)
        free_bytes = max(0, space.effective_bytes() - space.pinned_bytes)
        raise CapacityError(
            f"the shard takes {size(size_bytes)}; {space.explanation}, of which only {size(free_bytes)} is not pinned",
            url=url,
            remedy=f"remove pins with `shardcache unpin`, or {space.remedy}",
        )
