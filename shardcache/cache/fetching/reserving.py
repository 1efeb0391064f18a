"""Space for a transfer: shards that are needed later than its own may be evicted for it.

`Publisher` reserves space here for an index, and `PartFiller` for a whole object. A claim
(`KeyClaim`) stands for all transfers of one version of an object: it has the reservation, and
waits for space.
"""

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext

from shardcache.cache.space.residency import LOOK_AGAIN_S, Residency
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import PostponedError, PriorityClass, longest_wait
from shardcache.plan.reader_plan import AFTER_ALL_PLANS, NOW
from shardcache.store.space import footprint_bytes

# Minimum interval between attempts to reserve the space of a whole object. Readers of ranges cause
# many changes, most of which free no space, and an attempt takes time for each cached part.
_TRY_AGAIN_S = 0.05


async def reserve_for_transfer(
    residency: Residency,
    claim: KeyClaim,
    transfer: Transfer,
    key: str,
    size_bytes: int,
) -> None:
    """Grow a claim's reservation to `size_bytes`. Raises as `Residency.reserve` does.

    Args:
        residency: the cached shards, of which some may be evicted.
        claim: the claim of all transfers that lead to `key`.
        transfer: the transfer that does the work; the status shows that it waits for space.
        key: key of the shard.
        size_bytes: the space that the shard takes.
    """

    def needed_at_s() -> float:
        """Return when the shard is needed, which may change during the wait."""
        return _needed_at_s(residency, claim, key)

    transfer.stages.enter(Stage.SPACE)
    wanted_bytes = max(0, size_bytes - claim.reserved_bytes)
    # A shard that nobody waits for is postponed if there is no space: it must not hold up others.
    await residency.reserve(claim, wanted_bytes, needed_at_s, waits_ahead_of_need=False)


class WholeSpace:
    """Space for a whole object; until there is enough, readers are served ranges of the object.

    The caller calls `try_reserve` and `wait` in turn, and serves ranges between the calls.

    Args:
        residency: the cached shards, of which some may be evicted.
        claim: the claim of all transfers that lead to `key`.
        key: key of the object.
        size_bytes: size of the object.
    """

    def __init__(
        self,
        residency: Residency,
        claim: KeyClaim,
        key: str,
        size_bytes: int,
    ) -> None:
        self._residency = residency
        self._claim = claim
        self._key = key
        self._size_bytes = footprint_bytes(size_bytes)
        self._is_waiting = False
        self._mark = ExitStack()  # closing it ends the claim's mark as waiting for space
        # Times of the next attempts of `try_reserve` and `reserve_at_once`, by the monotonic clock;
        # 0 for immediately.
        self._next_try_s = 0.0
        self._next_at_once_s = 0.0
        self._is_put_off = False  # whether the last attempt of `try_reserve` came too soon
        self._changes = 0  # number of changes in the cache before that attempt

    @property
    def may_fit(self) -> bool:
        """False if the cache has no space for the whole, whatever is evicted."""
        return self._residency.may_fit(self._size_bytes)

    async def try_reserve(self) -> bool:
        """Reserve the space of all missing parts; return False if that takes waiting.

        No-op, which returns False, if the last attempt was a moment ago.
        """
        now_s = time.monotonic()
        self._is_put_off = now_s < self._next_try_s
        if self._is_put_off:
            return False
        self._next_try_s = now_s + _TRY_AGAIN_S
        self._changes = self._residency.changed.count
        needed_at_s = _needed_at_s(self._residency, self._claim, self._key)
        with self._keeping_own_parts():
            wanted_bytes = self._wanted_bytes()
            if self._is_waiting:
                # `wanted_bytes` of 0 would mean that the claim does not wait for space.
                self._claim.wanted_bytes = max(1, wanted_bytes)
            if not await self._residency.try_reserve(self._claim, wanted_bytes, needed_at_s):
                return False
        self._next_try_s = 0.0
        self.end_wait()
        return True

    async def reserve_at_once(self) -> bool:
        """Reserve the space of all missing parts if that takes no waiting; return False if it does.

        This is for an object that nobody needs as a whole. Waiting for its space could deadlock
        with other objects of which some parts are cached, and which wait as well. Nor is anything
        evicted for it that a plan needs.

        No-op, which returns False, if the last attempt was a moment ago.
        """
        now_s = time.monotonic()
        if now_s < self._next_at_once_s:
            return False
        self._next_at_once_s = now_s + _TRY_AGAIN_S
        with self._keeping_own_parts():
            wanted_bytes = self._wanted_bytes()
            is_reserved = await self._residency.reserve_at_once(
                self._claim, wanted_bytes, AFTER_ALL_PLANS
            )
            if not is_reserved:
                return False
        self._next_at_once_s = 0.0
        return True

    async def wait(self, url: str) -> None:
        """Wait until there may be space, or something else changes for the claim's transfers.

        Raises as `Residency.reserve` does; PostponedError if no reader waits for the whole object.

        Args:
            url: url of the object, for errors.
        """
        if not self._is_waiting:
            self._is_waiting = True
            wanted_bytes = max(1, self._wanted_bytes())  # 0 would mean that it does not wait
            waiting = self._claim.waiting_for_space(wanted_bytes, serves_ranges=True)
            self._mark.enter_context(waiting)
        self._residency.check_possible(self._size_bytes, url)
        if not self._claim.whole_waits:
            raise PostponedError
        # If an attempt was put off, or something has changed since the last one, wait only until
        # the next may be made. Otherwise, no attempt can succeed before the next change.
        limit_s = LOOK_AGAIN_S
        if self._is_put_off or self._residency.changed.count != self._changes:
            limit_s = max(0.0, self._next_try_s - time.monotonic())
        await self._residency.wait_for_change(self._claim, limit_s, or_claim_moves=True)

    def end_wait(self) -> None:
        """End the wait for space; no-op if there is none."""
        self._is_waiting = False
        self._mark.close()

    def _wanted_bytes(self) -> int:
        """Return how much space the whole object needs in addition to what it has already.

        It has the space of its file of parts, and the claim's reservation.
        """
        file = self._residency.parts.get(self._key)
        kept_bytes = 0 if file is None else file.kept_bytes
        return max(0, self._size_bytes - kept_bytes - self._claim.reserved_bytes)

    def _keeping_own_parts(self) -> AbstractContextManager[None]:
        """Keep the cached parts of the object itself from being evicted for its other parts."""
        file = self._residency.parts.get(self._key)
        if file is None:
            return nullcontext()
        return self._residency.parts.sparing(file)


def _needed_at_s(residency: Residency, claim: KeyClaim, key: str) -> float:
    """Return when a whole shard or object is needed, which decides what is evicted for it.

    Readers that wait for ranges of the object, and transfers of ranges alone, do not count.
    """
    # Not every wait counts here: a reader may ask ahead, while it still has something to read.
    if longest_wait(claim.whole_waits) is not None:
        return NOW
    whole = [transfer for transfer in claim.transfers if transfer.is_whole]
    if any(transfer.requested_class is PriorityClass.PLANNED for transfer in whole):
        return residency.planned_need_s(key)
    return residency.unplanned_need_s(key)
