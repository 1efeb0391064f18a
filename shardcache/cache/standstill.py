"""Deadlocks over room: all that fills the cache is kept by readers, and by shards on their way, that wait for room.

As with deadlocks in general (E. Coffman, M. Elphick and A. Shoshani, "System Deadlocks", ACM Computing Surveys 1971):
each keeps what it has while it waits for what the others have. Nothing but giving one of the waits up ends that.
"""

from __future__ import annotations

from collections.abc import Collection

from shardcache.cache.transfers import Claim, PostponedError
from shardcache.cache.waiting import Holder
from shardcache.errors import CapacityError
from shardcache.store.shard import Shard
from shardcache.store.space import Space
from shardcache.units import size


def check_progress(claim: Claim, others: Collection[Claim], in_use: Collection[Shard], space: Space) -> None:
    """Raise when nobody can go on and it is this claim that has to give up.

    Args:
        claim: one that waits for room, or for the turn of another.
        others: every claim, this one included.
        in_use: the shards that are held by whomever.
        space: what the cache may hold, and what of that is pinned.

    Raises:
        PostponedError: nobody waits for the shard.
        CapacityError: a reader does.
    """
    blocked = [each for each in others if each.is_blocked]
    waits = [wait for each in blocked for wait in each.stalled]
    if not waits or not claim.is_blocked:
        return
    readers = _stuck_readers(blocked)
    held_bytes = sum(shard.kept_bytes for shard in in_use if not shard.pinned)
    reserved_bytes = sum(each.reserved_bytes for each in blocked)
    staying_bytes = space.pinned_bytes + held_bytes + reserved_bytes
    # All else goes by itself: what nobody holds can be evicted, and what is being fetched comes and goes.
    least_bytes = min(each.wanted_bytes for each in blocked if each.wanted_bytes)
    may_be_given_back = sum(shard.leases for shard in in_use) != sum(reader.in_hand() for reader in readers)
    if staying_bytes + least_bytes <= space.capacity_bytes or may_be_given_back:
        return
    if claim is not max(blocked, key=_readiness):
        return
    if not claim.waits:
        raise PostponedError
    amounts = (space.pinned_bytes + held_bytes, space.capacity_bytes, reserved_bytes, space.pinned_bytes, least_bytes)
    kept, capacity, reserved, pinned, least = map(size, amounts)
    raise CapacityError(
        f"{kept} of the cache's {capacity} are in hand"
        + (f" or pinned ({pinned})" if space.pinned_bytes else "")
        + (f", {reserved} are taken by what comes" if reserved_bytes else "")
        + f", and the next shard takes {least}; all who have them, {len(readers)} reader(s), wait for that room or for "
        "each other: none can go on",
        url=claim.transfers[0].ref.url,
        remedy="give the cache room for readers x (shuffle_window + 1) shards, for a compressed one in both its forms: "
        "raise --capacity, or lower shuffle_window or the number of workers"
        f"{', or unpin shards' if space.pinned_bytes else ''}",
    )


def _readiness(claim: Claim) -> tuple[bool, bool, bool, float]:
    """Return how much rather than others a claim is to give up.

    First what nobody waits for; then what a reader waits for that keeps shards, for others gain by that; then what
    came last, so that the others go on as soon as its reader has left.
    """
    stalled = claim.stalled
    keeps = any(reader.in_hand() for reader in _stuck_readers([claim]))
    return not claim.waits, bool(stalled), keeps, claim.waits_since_s


def _stuck_readers(blocked: Collection[Claim]) -> set[Holder]:
    """Return the readers that wait for such shards, and those that keep theirs until these have gone on."""
    waiting = {wait.holder for claim in blocked for wait in claim.stalled if wait.holder is not None}
    return waiting.union(*(reader.kept_waiting() for reader in waiting))
