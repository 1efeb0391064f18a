"""Space for a transfer, reserved as soon as the need of its shard allows."""

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext

from shardcache.cache.space.residency import LOOK_AGAIN_S, NOW, Residency
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import Class, PostponedError
from shardcache.store.space import footprint_bytes

# Whoever reads ranges meanwhile causes many changes, most of which free no space.
_TRY_AGAIN_S = 0.05


async def reserve_for_transfer(
    residency: Residency,
    claim: KeyClaim,
    transfer: Transfer,
    key: str,
    size_bytes: int,
) -> None:
    """Let a claim's reservation have `size_bytes` in all. Raises as `Residency.reserve` does."""

    def needed_at_s() -> float:
        return _needed_at_s(residency, claim, key)

    transfer.stages.enter(Stage.SPACE)
    wanted_bytes = max(0, size_bytes - claim.reserved_bytes)
    await residency.reserve(claim, wanted_bytes, needed_at_s, ahead_waits=False)


class WholeSpace:
    """Space for a whole object, of which ranges are served until there is enough.

    Args:
        key: of the object.
        size_bytes: of the object.
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
        self._waiting = ExitStack()
        self._is_waiting = False
        self._next_try_s = 0.0

    @property
    def may_fit(self) -> bool:
        """False if the cache has no space for the whole, whatever is evicted."""
        return self._residency.may_fit(self._size_bytes)

    async def try_reserve(self) -> bool:
        """Reserve the space of all parts that are not there; False if that takes waiting."""
        now_s = time.monotonic()
        if now_s < self._next_try_s:
            return False
        self._next_try_s = now_s + _TRY_AGAIN_S
        needed_at_s = _needed_at_s(self._residency, self._claim, self._key)
        with self._sparing():
            wanted_bytes = self._wanted_bytes()
            if self._is_waiting:
                self._claim.wanted_bytes = max(1, wanted_bytes)
            if not await self._residency.try_reserve(self._claim, wanted_bytes, needed_at_s):
                return False
        self._next_try_s = 0.0
        self.end_wait()
        return True

    async def reserve_at_once(self) -> bool:
        """Reserve that space although nobody needs the whole, if that takes no waiting.

        It is not worth waiting for: others, each of whom has some parts, might wait as well.
        """
        with self._sparing():
            wanted_bytes = self._wanted_bytes()
            return await self._residency.reserve_at_once(self._claim, wanted_bytes)

    async def wait(self, url: str) -> None:
        """Wait until there may be space, or the claim moves. Raises as `Residency.reserve` does."""
        if not self._is_waiting:
            self._is_waiting = True
            wanted_bytes = max(1, self._wanted_bytes())
            waiting = self._claim.waiting_for_space(wanted_bytes, serves_ranges=True)
            self._waiting.enter_context(waiting)
        self._residency.check_possible(self._size_bytes, url)
        if not self._claim.whole_waits:
            raise PostponedError
        limit_s = self._next_try_s - time.monotonic()
        await self._residency.change(self._claim, limit_s if limit_s > 0 else LOOK_AGAIN_S)

    def end_wait(self) -> None:
        """Wait no longer; no-op if nobody did."""
        self._is_waiting = False
        self._waiting.close()

    def _wanted_bytes(self) -> int:
        file = self._residency.parts.get(self._key)
        kept_bytes = 0 if file is None else file.kept_bytes
        return max(0, self._size_bytes - kept_bytes - self._claim.reserved_bytes)

    def _sparing(self) -> AbstractContextManager[None]:
        file = self._residency.parts.get(self._key)
        return nullcontext() if file is None else self._residency.parts.sparing(file)


def _needed_at_s(residency: Residency, claim: KeyClaim, key: str) -> float:
    if claim.whole_klass is Class.WAITING:
        return NOW
    if claim.whole_klass is Class.PLANNED:
        return residency.planned_s(key)
    return residency.due_s(key)
