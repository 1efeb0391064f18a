"""The cached shards: the reasons that keep them, and their eviction for others.

A shard stays in the cache while it is leased, pinned, or open in another process. A lease is added
by `retain`, which keeps the shard until `release`; a pin is made by a user. The schedule has the
plans of all readers, which list the shards that they will read, and chooses which of the other
shards to evict: first unplanned ones, which are in no plan. Leftovers, which are interrupted
downloads and damaged shards, are removed even before those.

A transfer fetches one shard. All transfers of the same shard have one claim (`KeyClaim`), which has
the reservation of space for it. `PartResidency` keeps the parts of objects that are read by ranges.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import structlog

from shardcache.cache.planner import Planner
from shardcache.cache.space.ahead_space import AheadSpace
from shardcache.cache.space.deadlock import check_progress
from shardcache.cache.space.part_residency import PartResidency
from shardcache.cache.space.pins import Pins
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import PostponedError
from shardcache.plan.object_parts import AHEAD_DIVISOR
from shardcache.plan.reader_plan import AFTER_ALL_PLANS, NOW
from shardcache.shared.exceptions import CacheError, CapacityError, CorruptShardError, DiskFullError
from shardcache.shared.units import size
from shardcache.store.part_file import split_part_key
from shardcache.store.shard import Shard
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters

log = structlog.get_logger()

# Nobody notifies the daemon when another process closes a file. So after this time it is checked
# again whether files are still open.
LOOK_AGAIN_S = 1.0

# Interval between a claim's checks for deadlocks. A claim that waits for space wakes at every
# change, but a check examines all readers, so it is made less often.
_CHECK_AGAIN_S = 0.5
_MAX_EVICTED = 100_000  # number of evicted shards remembered, to count those fetched again


def needed_now() -> float:
    """Return the time of need of a shard that a reader waits for; see `Residency.reserve`."""
    return NOW


class Residency:
    """The shards of one store, with their leases and pins.

    Only this class writes `Shard.leases` and `Shard.pinned`, and tells the schedule which shards
    are cached and which of them may be evicted.

    Attributes:
        changed: notified when more shards may be evictable.
        leased: shards with leases, including damaged shards that are already in quarantine.
        pinned: cached shards that are pinned, by key.
        claims: the claims of shards that are being fetched, by key.
        parts: the cached parts of objects that are read by ranges.
        ahead: space for ranges that readers request before they need them.
        min_free_short_bytes: by how much the free space of the filesystem fell short of --min-free
            at the last check; 0 if it did not.
    """

    def __init__(
        self,
        store: Store,
        planner: Planner,
        pins: Pins,
        counters: Counters,
        changed: Signal,
    ) -> None:
        self._store = store
        self._planner = planner
        self._pins = pins
        self._counters = counters
        self.changed = changed
        self.leased: set[Shard] = set()
        self.pinned: dict[str, Shard] = {}
        self.claims: dict[str, KeyClaim] = {}
        self.min_free_short_bytes = 0
        self._allocating = asyncio.Lock()
        self.parts = PartResidency(store, planner, counters, changed, self.claims, self._allocating)
        self.ahead = AheadSpace(self._ahead_bytes)
        self._evicted: dict[str, None] = {}  # keys of evicted shards, oldest first
        # Shards whose removal failed, as a process has them open, with the time of the attempt.
        self._still_open: dict[Shard, float] = {}

        # The schedule has to know which shards and parts are cached already.
        schedule = planner.schedule
        for shard in store.shards.values():
            schedule.arrived(shard.key, shard.kept_bytes)
        for file in store.parts.files():
            self.parts.opened(file)
        pins.watch(self._pin_changed)

    # The cached shards, and their leases and pins

    def arrived(self, shard: Shard) -> None:
        """Add a newly cached shard."""
        if shard.key in self._evicted:
            del self._evicted[shard.key]
            self._counters.refetches += 1
        self._planner.schedule.arrived(shard.key, shard.kept_bytes)
        self._pins.arrived(shard)  # if its url is pinned, this version is kept from now on

    def gone(self, key: str) -> None:
        """Record that a shard was evicted, quarantined or lost.

        Leases on the shard last until they are released.
        """
        self._unpin(key)
        self._planner.schedule.gone(key)
        self._planner.forget(key)
        self.changed.notify()

    def retain(self, shard: Shard) -> None:
        """Add a lease to a shard, which keeps it from eviction until `release`."""
        shard.leases += 1
        self.leased.add(shard)
        self._update_schedule(shard)

    def retain_cached(self, key: str) -> Shard | None:
        """Keep the cached shard for `key` until `release`, and return it; None if there is none."""
        shard = self._store.shards.get(key)
        if shard is not None:
            self.retain(shard)
        return shard

    def release(self, shard: Shard) -> None:
        """Remove the lease that one call of `retain` added."""
        shard.leases -= 1
        if not shard.leases:
            self.leased.discard(shard)
            self._update_schedule(shard)
        self.changed.notify()

    @contextlib.contextmanager
    def retained(self, shard: Shard) -> Iterator[None]:
        """Keep a shard from eviction during the block, in which it is examined."""
        self.retain(shard)
        try:
            yield
        finally:
            self.release(shard)

    def _pin_changed(self, key: str) -> None:
        """Keep the cached shard for `key` if it is pinned now; otherwise, let it be evicted."""
        if not self._pins.is_pinned(key):
            self._unpin(key)
            return
        shard = self._store.shards.get(key)
        if shard is not None and not shard.pinned:
            shard.pinned = True
            self.pinned[key] = shard
            self._store.space.pinned_bytes += shard.kept_bytes
            self._update_schedule(shard)

    def _unpin(self, key: str) -> None:
        """Let a pinned shard be evicted again; no-op if none is pinned under this key."""
        shard = self.pinned.pop(key, None)
        if shard is not None:
            shard.pinned = False
            self._store.space.pinned_bytes -= shard.kept_bytes
            self._update_schedule(shard)
            self.changed.notify()

    def _update_schedule(self, shard: Shard) -> None:
        """Tell the schedule whether a shard may be evicted."""
        if not self._is_cached(shard):
            return
        if shard.must_stay:
            self._planner.schedule.held(shard.key)
        else:
            self._planner.schedule.freed(shard.key)

    def _is_cached(self, shard: Shard) -> bool:
        """Return whether this very shard is in the cache."""
        # Compare by identity, not by key: a corrupt shard may be quarantined while it is leased,
        # and then fetched again as another shard with the same key.
        return self._store.shards.get(shard.key) is shard

    # Space

    @contextlib.contextmanager
    def claiming(self, key: str, transfer: Transfer) -> Iterator[KeyClaim]:
        """Add a transfer to the claim of its key, and provide that claim for the block."""
        claim = self.claims.setdefault(key, KeyClaim())
        claim.join(transfer)
        try:
            yield claim
        finally:
            claim.transfers.remove(transfer)
            if not claim.transfers:
                del self.claims[key]

    async def reserve(
        self,
        claim: KeyClaim,
        size_bytes: int,
        when_needed_s: Callable[[], float],
        *,
        waits_ahead_of_need: bool = True,
    ) -> None:
        """Grow a claim's reservation as soon as there is space, evicting shards if necessary.

        Raises CapacityError or DiskFullError if there will never be enough space, or if there is a
        deadlock over it that this claim has to end. Raises PostponedError if no reader waits for
        the shard, and the claim either has to end a deadlock or may not wait ahead of need.

        Args:
            size_bytes: number of bytes to add to the reservation.
            when_needed_s: returns the shard's time of need, which may change during the wait.
            waits_ahead_of_need: whether the claim waits for space while no reader waits for it.
        """
        if await self.try_reserve(claim, size_bytes, when_needed_s()):
            return
        with claim.waiting_for_space(size_bytes):
            while True:
                self.check_possible(claim.reserved_bytes + size_bytes, claim.url)
                if not (claim.waits or waits_ahead_of_need):
                    raise PostponedError
                await self.wait_for_change(claim)
                if await self.try_reserve(claim, size_bytes, when_needed_s()):
                    return

    async def try_reserve(self, claim: KeyClaim, size_bytes: int, needed_at_s: float) -> bool:
        """Grow a claim's reservation, evicting shards if necessary; return False if it has to wait.

        Args:
            needed_at_s: time of need; only shards that are needed later are evicted.
        """
        assert claim.reservation is not None
        async with self._allocating:
            self._reconsider_still_open()
            while shortfall_bytes := self._store.measured_space().shortfall_bytes(size_bytes):
                if not await self._free(shortfall_bytes, needed_at_s):
                    return False
            claim.reservation.grow(size_bytes)
            return True

    async def reserve_at_once(
        self,
        claim: KeyClaim,
        size_bytes: int,
        needed_at_s: float,
    ) -> bool:
        """Grow a claim's reservation if that takes no waiting, and no claim is before it in line.

        Returns whether it has grown. For the line, see `PartResidency.in_line`.

        Args:
            needed_at_s: time of need. It is `AFTER_ALL_PLANS` if no reader has requested the bytes
                yet: then only unplanned shards and parts are evicted for them.
        """
        if not self.parts.may_take_space(claim):
            return False
        return await self.try_reserve(claim, size_bytes, needed_at_s)

    def _ahead_bytes(self) -> int:
        """Return the size of `ahead`."""
        return self._store.space.effective_bytes() // AHEAD_DIVISOR

    def check_range(self, size_bytes: int, url: str) -> None:
        """Raise CapacityError if a range does not fit next to the pinned shards and `ahead`."""
        space = self._store.space
        allowed_bytes = max(0, space.unpinned_bytes - self._ahead_bytes())
        if size_bytes <= allowed_bytes:
            return
        remedy = f"{space.remedy}, or read smaller ranges"
        if space.pinned_bytes:
            remedy += ", or remove pins (shardcache unpin)"
        raise CapacityError(
            f"the range takes {size(size_bytes)}; {space.explanation}, of which it may take "
            f"{size(allowed_bytes)}",
            url=url,
            remedy=remedy,
        )

    async def keep_free(self) -> None:
        """Evict shards until --min-free is met: files of other programs take space, too.

        If it cannot be met, that is logged once.
        """
        async with self._allocating:
            self._reconsider_still_open()
            # The crowding bytes are those to evict until --min-free is met.
            short_bytes = self._store.measured_space().crowding_bytes
            # With `NOW`, any shard may be evicted that does not have to stay, however soon it is
            # needed.
            while short_bytes and await self._free(short_bytes, NOW):
                short_bytes = self._store.measured_space().crowding_bytes
        was_short = self.min_free_short_bytes > 0
        self.min_free_short_bytes = short_bytes
        if short_bytes and not was_short:
            log.warning(
                "--min-free cannot be met: other files fill the disk",
                short=size(short_bytes),
            )
        if was_short and not short_bytes:
            log.warning("--min-free is met again")

    async def wait_for_change(
        self, claim: KeyClaim, timeout_s: float = LOOK_AGAIN_S, *, or_claim_moves: bool = False
    ) -> None:
        """Wait until more shards may be evictable, but at most for `timeout_s`.

        Raises as `check_progress` does.

        Args:
            or_claim_moves: True to return at a notification of `claim.moved`, too: readers get
                ranges of the object while its whole waits for space.
        """
        now_s = time.monotonic()
        if now_s - claim.checked_s >= _CHECK_AGAIN_S:
            claim.checked_s = now_s
            check_progress(claim, self.claims.values(), self.leased, self._store.space)
        if or_claim_moves:
            await self.changed.wait_with(claim.moved, timeout_s)
        else:
            await self.changed.wait(timeout_s)

    def may_fit(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` would fit if all unpinned shards were evicted."""
        return size_bytes <= self._store.space.unpinned_bytes

    def fits_now(self, size_bytes: int, needed_at_s: float) -> bool:
        """Return whether `reserve` would succeed at once, with this time of need. Evict nothing."""
        self._reconsider_still_open()
        shortfall_bytes = self._store.measured_space().shortfall_bytes(size_bytes)
        # Leftovers are removed before any shard is evicted. If they are larger than the shortfall,
        # it becomes negative here, and no victims are needed.
        shortfall_bytes -= self._store.leftovers.size_bytes
        victims = self._planner.schedule.victims(shortfall_bytes, needed_at_s, self._planner.lead_s)
        return victims is not None

    def planned_need_s(self, key: str) -> float:
        """Return when a plan needs a shard; `unplanned_need_s` if that is sooner."""
        return min(self._planner.schedule.next_use_s(key), self.unplanned_need_s(key))

    def unplanned_need_s(self, key: str) -> float:
        """Return when a shard counts as needed apart from all plans.

        A pinned shard is needed one lead time from now, so planned shards that are needed sooner
        come first. Any other shard comes after all planned shards.
        """
        if self._pins.is_pinned(key):
            return self._planner.schedule.now_s + self._planner.lead_s
        return AFTER_ALL_PLANS

    def check_possible(self, size_bytes: int, url: str) -> None:
        """Raise CapacityError or DiskFullError if a shard would not fit with all others evicted.

        Shards that a process has open count as evictable, as the process may close them. Pinned
        shards do not, nor do shards with a hard link outside the cache.
        """
        space = self._store.space
        # 1. It fits even if all shards that could not be removed lately stay. Most of the time
        #    there are none, and no file need be examined for hard links.
        still_open = [shard for shard in self._still_open if not shard.must_stay]
        open_bytes = sum(shard.kept_bytes for shard in still_open)
        if self.may_fit(size_bytes + open_bytes):
            return

        # 2. It fits once processes have closed these shards. Hard-linked ones stay even then.
        linked_bytes = sum(shard.kept_bytes for shard in still_open if self._store.is_linked(shard))
        if self.may_fit(size_bytes + linked_bytes):
            return

        # 3. It is larger than the cache can be.
        if size_bytes > space.possible_bytes:
            is_disk_full = space.crowding_bytes > 0  # otherwise, the capacity is too small
            error = DiskFullError if is_disk_full else CapacityError
            raise error(
                f"the shard takes {size(size_bytes)}; {space.explanation}",
                url=url,
                remedy=f"{space.remedy}, or write smaller shards",
            )

        # 4. Pinned and hard-linked shards leave too little of the space that `explanation` states.
        free_bytes = max(0, space.effective_bytes() - space.pinned_bytes - linked_bytes)
        raise CapacityError(
            f"the shard takes {size(size_bytes)}; {space.explanation}, of which only "
            f"{size(free_bytes)} is not pinned or hard-linked",
            url=url,
            remedy="remove pins (shardcache unpin) or links (shardcache get --copy makes "
            f"copies), or {space.remedy}",
        )

    # Eviction

    async def evict(self, shard: Shard) -> bool:
        """Remove a shard; False if it is leased, pinned, or still open in a process."""
        # While the lock is held, no transfer can reserve space. So the shard is not fetched again
        # before its files are gone, and the removal cannot hit the new ones.
        async with self._allocating:
            return await self._evict(shard.key)

    async def _evict(self, key: str) -> bool:
        """Remove a shard, or a part of an object, by its key in the schedule.

        Returns False if it has to stay. The caller holds the lock for allocating space.
        """
        part = split_part_key(key)
        if part is not None:
            object_key, number = part
            return await self.parts.evict(object_key, number)
        shard = self._store.shards.get(key)
        if shard is None or shard.must_stay:  # this has changed since the shard was chosen
            return False
        with self.evicting(shard):
            if not await self._store.remove(shard):
                return False
        log.debug("evicted", shard=key if shard.facts is None else shard.facts.url)
        self._counters.evictions += 1
        return True

    @contextlib.contextmanager
    def evicting(self, shard: Shard) -> Iterator[None]:
        """Keep the schedule from choosing a shard during the block, in which it is removed.

        If the removal fails, the shard is not chosen again for a while.
        """
        self._planner.schedule.held(shard.key)
        try:
            yield
        finally:
            if self._is_cached(shard):  # it stays: a process has it open, or the disk failed
                self._still_open[shard] = time.monotonic()
                self._pins.arrived(shard)  # it may have been pinned in the meantime
            elif shard.key not in self._store.shards:  # otherwise, the key has another shard now
                self.gone(shard.key)

    def _reconsider_still_open(self) -> None:
        """Make those shards evictable again that could not be removed `LOOK_AGAIN_S` ago."""
        limit_s = time.monotonic() - LOOK_AGAIN_S
        due = [shard for shard, since_s in self._still_open.items() if since_s <= limit_s]
        for shard in due:
            del self._still_open[shard]
            self._update_schedule(shard)

    async def _free(self, wanted_bytes: int, needed_at_s: float) -> bool:
        """Remove a leftover, or evict shards; return False if nothing may be removed for this need.

        True does not mean that enough was freed: some of the chosen shards may have been open in a
        process. The schedule does not choose these again, so the caller tries again.
        """
        leftovers = self._store.leftovers
        for key in list(leftovers.by_key):
            is_left = key in leftovers.by_key  # a transfer may have taken it over in the meantime
            if is_left and await leftovers.remove(key):
                return True
        victims = self._planner.schedule.victims(wanted_bytes, needed_at_s, self._planner.lead_s)
        if victims is None:
            return False
        for key in victims:
            if await self._evict(key):
                self._remember_eviction(key)
        return True

    def _remember_eviction(self, key: str) -> None:
        """Remember a key, so that another fetch of its shard counts as a re-fetch."""
        self._evicted[key] = None
        if len(self._evicted) > _MAX_EVICTED:
            oldest = next(iter(self._evicted))
            del self._evicted[oldest]

    # Damage

    async def isolate(self, shard: Shard, exn: CorruptShardError) -> None:
        """Take a corrupt shard out of service; the next request re-fetches it."""
        if not self._is_cached(shard):
            return  # the shard left the cache during the check, and may have been fetched again
        log.error("cached shard is damaged; quarantined", shard=exn.url, cause=exn.message)
        self._counters.corrupt += 1
        self.gone(shard.key)
        try:
            await self._store.quarantine(shard)
        except CacheError as failure:  # the shard is out of service all the same
            log.warning(
                "cannot move the corrupt shard to quarantine yet",
                shard=exn.url,
                cause=failure.message,
            )
        self.changed.notify()  # in quarantine, it is a leftover, whose space can be freed
