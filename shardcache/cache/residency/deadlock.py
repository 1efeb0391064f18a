"""Detection of deadlocks over cache space: everything cached is held by readers and transfers waiting for space.

The general conditions apply (E. Coffman, M. Elphick and A. Shoshani, "System Deadlocks", ACM Computing Surveys 1971):
each party holds its space while it waits for space that the others hold. Only abandoning one of the waits resolves it.
"""

from __future__ import annotations

from collections.abc import Collection

from shardcache.cache.transfers.transfers import KeyClaim, PostponedError
from shardcache.cache.transfers.waiting import Holder
from shardcache.errors import CapacityError
from shardcache.store.shard import Shard
from shardcache.store.space import Space
from shardcache.units import size


def check_progress(claim: KeyClaim, others: Collection[KeyClaim], in_use: Collection[Shard], space: Space) -> None:
    """Raise if there is a deadlock and this claim is the one to give up.

    Args:
        claim: one that waits for space, or for another claim's turn to end.
        others: every claim, including this one.
        in_use: all shards with leases.
        space: the cache's effective capacity and pinned size.

    Raises:
        PostponedError: no reader waits for the shard.
        CapacityError: a reader waits for it.
    """
    blocked = [each for each in others if each.is_blocked]
    waits = [wait for each in blocked for wait in each.reader_waits]
    if not waits or not claim.is_blocked:
        return
    readers = _stuck_readers(blocked)
    held_bytes = sum(shard.kept_bytes for shard in in_use if not shard.pinned)
    reserved_bytes = sum(each.reserved_bytes for each in blocked)
    staying_bytes = space.pinned_bytes + held_bytes + reserved_bytes
    # Everything else resolves itself: shards without leases can be evicted, and running downloads finish.
    least_bytes = min(each.wanted_bytes for each in blocked if each.wanted_bytes)
    may_be_given_back = sum(shard.leases for shard in in_use) != sum(reader.leased_shards() for reader in readers)
    running = [each.reservation for each in others if each.reservation is not None and not each.is_blocked]
    possible_bytes = space.effective_bytes(sum(reservation.unwritten_bytes for reservation in running))
    if staying_bytes + least_bytes <= possible_bytes or may_be_given_back:
        return
    if claim is not max(blocked, key=_readiness):
        return
    if not claim.waits:
        raise PostponedError
    amounts = (space.pinned_bytes + held_bytes, reserved_bytes, space.pinned_bytes, least_bytes)
    kept, reserved, pinned, least = map(size, amounts)
    raise CapacityError(
        f"deadlock: {space.explanation}, {kept} of it is leased"
        + (f" or pinned ({pinned})" if space.pinned_bytes else "")
        + (f", {reserved} is reserved by transfers" if reserved_bytes else "")
        + f", the next shard needs {least}, and all {len(readers)} reader(s) with leases wait for that space or for "
        "each other",
        url=claim.transfers[0].ref.url,
        remedy="the cache must hold readers x (shuffle_window + 1) shards, each compressed one also in its inflated "
        f"form: {space.remedy}, or lower shuffle_window or the number of workers"
        f"{', or unpin shards' if space.pinned_bytes else ''}",
    )


def _readiness(claim: KeyClaim) -> tuple[bool, bool, bool, float]:
    """Return a sort key; the claim with the largest is to give up.

    First claims that no reader waits for; then those of readers that hold shards, which frees space for others; then
    the most recent, so that the others continue as soon as its reader disconnects.
    """
    keeps = any(reader.leased_shards() for reader in _stuck_readers([claim]))
    return not claim.waits, bool(claim.reader_waits), keeps, claim.waits_since_s


def _stuck_readers(blocked: Collection[KeyClaim]) -> set[Holder]:
    """Return the readers that wait for blocked shards, and those that keep their own shards until these continue."""
    waiting = {wait.holder for claim in blocked for wait in claim.reader_waits if wait.holder is not None}
    return waiting.union(*(reader.kept_waiting() for reader in waiting))
