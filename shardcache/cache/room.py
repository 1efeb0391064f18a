"""Making room: promise space for a shard, evicting others if need be, or wait until that is possible."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable

import structlog

from shardcache.cache.health import Health
from shardcache.cache.holds import Holds
from shardcache.cache.names import Names
from shardcache.cache.pages import Pages
from shardcache.cache.pins import Pins
from shardcache.cache.planner import Planner
from shardcache.cache.signal import Signal
from shardcache.cache.standstill import check_progress
from shardcache.cache.transfers import Claim, PostponedError
from shardcache.errors import CapacityError, DiskFullError
from shardcache.metrics import Counters
from shardcache.store.shard import Shard
from shardcache.store.store import Store
from shardcache.units import size

log = structlog.get_logger()

# When a shard is needed by somebody who waits for it, and when one that is only warmed: later than what any plan names,
# and sooner than what none does.
NOW = float("-inf")
AFTER_ALL_PLANS = sys.float_info.max

LOOK_AGAIN_S = 1.0
# Who waits for room is woken by every change; to find out whether anybody can go on means to look at all readers.
_CHECK_AGAIN_S = 0.5
# Of so many evicted shards it is remembered that they were here.
_REMEMBERED = 100_000


class Room:
    """The space of one store, given out against the plan.

    Attributes:
        changed: notified when what may be evicted has changed.
        claims: the shards on their way, by key.
        short_bytes: how much less of the filesystem is free than must be, when that was looked at last.
    """

    def __init__(
        self,
        store: Store,
        planner: Planner,
        pages: Pages,
        names: Names,
        counters: Counters,
        health: Health,
        pins: Pins,
        holds: Holds,
        changed: Signal,
    ) -> None:
        self.changed = changed
        self.claims: dict[str, Claim] = {}
        self._store = store
        self._planner = planner
        self._pages = pages
        self._names = names
        self._counters = counters
        self._health = health
        self._pins = pins
        self._holds = holds
        self._lock = asyncio.Lock()
        self.short_bytes = 0
        self._evicted: dict[str, None] = {}
        self._still_open: dict[str, float] = {}  # since when, of shards that some process kept from going
        now = planner.now
        for shard in store.shards.values():
            now.arrived(shard.key, shard.kept_bytes)
        pins.recall()

    async def reserve(
        self, claim: Claim, size_bytes: int, needed_at_s: Callable[[], float], *, ahead_waits: bool = True
    ) -> None:
        """Grow a claim's reservation by `size_bytes` as soon as there is room, evicting if need be.

        Args:
            ahead_waits: whether to wait for room also where nobody waits for the shard.

        Raises:
            CapacityError, DiskFullError: there will never be room, or only what waits itself could give it.
            PostponedError: nobody waits for the shard, and it may not wait for room or is in the way of others.
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

    async def _try_reserve(self, claim: Claim, size_bytes: int, needed_at_s: float) -> bool:
        assert claim.reservation is not None
        async with self._lock:
            self._look_again()
            while shortfall := self._store.shortfall_bytes(size_bytes):
                if not await self._free(shortfall, needed_at_s):
                    return False
            claim.reservation.grow(size_bytes)
            return True

    async def keep_free(self) -> None:
        """Evict until as much of the filesystem is free as must be, for others fill it, too; where that cannot be done
        evict nothing, and tell it once."""
        async with self._lock:
            self._look_again()
            while shortfall := self._store.crowding_bytes():
                if not await self._free(shortfall, NOW):
                    break
        if bool(shortfall) != bool(self.short_bytes):
            state = "cannot be kept: others fill the disk" if shortfall else "is kept again"
            log.warning(f"the free space that --min-free demands {state}", short=size(shortfall))
        self.short_bytes = shortfall

    async def change(self, claim: Claim) -> None:
        """Return when what may be evicted has changed, or after a while: who closes a file tells nobody.

        Raises what `check_progress` raises for a claim that waits.
        """
        now_s = time.monotonic()
        if now_s - claim.checked_s >= _CHECK_AGAIN_S:
            claim.checked_s = now_s
            check_progress(claim, self.claims.values(), self._holds.shards, self._store.space)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self.changed.wait()

    async def resize(self, capacity_bytes: int) -> int:
        """Give the cache another capacity, and return how many bytes had to go for it.

        Raises CapacityError where it could not hold what stays, with what that is; the capacity is then as it was.
        """
        async with self._lock:
            self._look_again()
            self._pins.check_capacity(capacity_bytes)
            self._check_holds(capacity_bytes)
            space, former_bytes = self._store.space, self._store.space.capacity_bytes
            kept_bytes, space.capacity_bytes = space.kept_bytes, capacity_bytes
            try:
                while (excess_bytes := space.used_bytes - capacity_bytes) > 0:
                    if not await self._free(excess_bytes, NOW):
                        self._check_holds(capacity_bytes)
                        raise CapacityError(
                            f"{size(excess_bytes)} are still open in some process",
                            remedy="end the process that reads them (lsof names it), or try again",
                        )
            except BaseException:
                space.capacity_bytes = former_bytes
                raise
        self.changed.notify()
        return kept_bytes - space.kept_bytes

    def _check_holds(self, capacity_bytes: int) -> None:
        """Raise CapacityError unless what stays would fit in such a capacity."""
        space, shards = self._store.space, self._store.shards.values()
        read_bytes = sum(shard.kept_bytes for shard in shards if shard.leases and not shard.pinned)
        if read_bytes + space.pinned_bytes + space.promised_bytes > capacity_bytes:
            sizes = (capacity_bytes, space.pinned_bytes, read_bytes, space.promised_bytes)
            wanted, pinned, read, arriving = map(size, sizes)
            raise CapacityError(
                f"{wanted} cannot hold what stays: {pinned} are pinned, {read} in readers' hands, {arriving} promised "
                "to what arrives",
                remedy="choose more, unpin shards, or try again when jobs have ended",
            )

    def _look_again(self) -> None:
        """Let what was still open a while ago be chosen once more."""
        limit_s = time.monotonic() - LOOK_AGAIN_S
        for key in [key for key, since_s in self._still_open.items() if since_s <= limit_s]:
            del self._still_open[key]
            shard = self._store.shards.get(key)
            if shard is not None and not shard.stays:
                self._planner.now.freed(key)

    def could_fit(self, size_bytes: int, needed_at_s: float) -> bool:
        """Whether `try_reserve` would succeed now; evicts nothing."""
        if self._health.error is not None:
            return False
        self._look_again()
        shortfall = self._store.shortfall_bytes(size_bytes)
        leftovers = sum(leftover.size_bytes for leftover in self._store.leftovers.values())
        return self._victims(shortfall - leftovers, needed_at_s) is not None

    def due_s(self, key: str) -> float:
        """Return when a shard that nobody plans to read is to be here: a pinned one right after what is needed soon."""
        return self._planner.now.now_s + self._planner.lead_s if self._pins.names(key) else AFTER_ALL_PLANS

    def arrived(self, shard: Shard) -> None:
        """Take a newly published shard into account."""
        if shard.key in self._evicted:
            del self._evicted[shard.key]
            self._counters.regrets += 1
        self._planner.now.arrived(shard.key, shard.kept_bytes)
        self._pins.arrived(shard)
        self._pages.idle(shard)

    async def evict(self, shard: Shard) -> bool:
        """Remove a shard that neither lease nor pin keeps; False when it is kept, or a process still has it open.

        Meanwhile nobody reserves room, and so nobody fetches the same shard: its new files would be removed.
        """
        async with self._lock:
            if shard.stays or self._store.shards.get(shard.key) is not shard:
                return False
            return await self._evict(shard)

    async def _evict(self, shard: Shard) -> bool:
        self._planner.now.held(shard.key)  # so that nobody else chooses it meanwhile
        removed = False
        try:
            removed = await self._store.remove(shard)
        finally:
            if not removed:
                self._still_open[shard.key] = time.monotonic()
        if removed:
            log.debug("evicted", shard=shard.key if shard.facts is None else shard.facts.url)
            self._counters.evictions += 1
            self.forget(shard.key)
        return removed

    def _remember(self, key: str) -> None:
        self._evicted[key] = None
        if len(self._evicted) > _REMEMBERED:
            del self._evicted[next(iter(self._evicted))]

    def forget(self, key: str) -> None:
        """Tell plan and names that a shard is no longer here."""
        self._still_open.pop(key, None)
        self._planner.now.gone(key)
        self._pins.gone(key)
        self._pages.gone(key)
        self._names.forget(key)
        self.changed.notify()

    async def _free(self, wanted_bytes: int, needed_at_s: float) -> bool:
        for key in list(self._store.leftovers):
            if key in self._store.leftovers and await self._store.remove_leftover(key):
                return True
        victims = self._victims(wanted_bytes, needed_at_s)
        for key in victims or ():
            await self._evict_if_idle(key)
        return victims is not None  # one that could not go is no candidate any more: look again

    async def _evict_if_idle(self, key: str) -> None:
        shard = self._store.shards.get(key)  # a lease may have come while another victim was removed
        if shard is not None and not shard.stays and await self._evict(shard):
            self._remember(key)

    def _victims(self, wanted_bytes: int, needed_at_s: float) -> list[str] | None:
        return self._planner.now.victims(wanted_bytes, needed_at_s, self._planner.lead_s)

    def _check_possible(self, size_bytes: int, url: str) -> None:
        """Raise CapacityError or DiskFullError when `size_bytes` would not fit if all went that is not pinned."""
        space = self._store.space
        if size_bytes > space.capacity_bytes:
            raise CapacityError(
                f"the shard takes {size(size_bytes)}, the whole cache holds {size(space.capacity_bytes)}", url=url
            )
        if size_bytes > space.unpinned_bytes:
            raise CapacityError(
                f"the shard takes {size(size_bytes)}, and pins leave {size(space.unpinned_bytes)} of the cache's "
                f"{size(space.capacity_bytes)}",
                url=url,
                remedy="take pins back with `shardcache unpin`, or give the cache more with `shardcache set capacity`",
            )
        on_disk_bytes = space.used_bytes - space.unwritten_bytes - space.pinned_bytes
        if self._store.shortfall_bytes(size_bytes) > on_disk_bytes + space.promised_bytes:
            raise DiskFullError(
                f"the filesystem of {self._store.layout.root} cannot give {size(size_bytes)} and keep "
                f"{size(space.min_free_bytes)} free, whatever goes that is not pinned",
                url=url,
                remedy="free space there, or lower --min-free",
            )
