"""Space for a transfer, reserved as soon as the need of its shard allows."""

from shardcache.cache.space.residency import NOW, Residency
from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import Class


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


def _needed_at_s(residency: Residency, claim: KeyClaim, key: str) -> float:
    if claim.klass is Class.WAITING:
        return NOW
    if claim.klass is Class.PLANNED:
        return residency.planned_s(key)
    return residency.due_s(key)
