"""Noticing that nobody can go on: what fills the cache is in the hands of readers that wait for room themselves.

As with deadlocks in general (E. Coffman, M. Elphick and A. Shoshani, "System Deadlocks", ACM Computing Surveys 1971):
each keeps what it has while it waits for what the others have. Nothing but giving one of the waits up ends that.
"""

from __future__ import annotations

from collections.abc import Collection

from shardcache.cache.transfers import Transfer
from shardcache.cache.waiting import Stage, Wait
from shardcache.errors import CapacityError
from shardcache.store.shard import Shard
from shardcache.store.space import Space, footprint_bytes
from shardcache.units import size


def check_progress(transfer: Transfer, others: Collection[Transfer], in_use: Collection[Shard], space: Space) -> None:
    """Raise CapacityError when nobody can go on and it is this transfer that has to give up: the one that came last.

    Args:
        others: every transfer that may wait for space, this one included.
        in_use: the shards that are held by whomever.
        space: what the cache may hold, and what of that is pinned.
    """
    stuck = [each for each in others if each.stages.present is Stage.SPACE and each.longest_wait()]
    if not stuck or transfer is not max(stuck, key=lambda each: each.stages.present_since_s):
        return
    waits = [wait for each in stuck for wait in each.waits if wait.since_s is not None]
    staying_bytes = space.pinned_bytes + sum(shard.kept_bytes for shard in in_use if not shard.pinned)
    if _may_fit(stuck, staying_bytes, space.capacity_bytes) or _may_be_given_back(waits, in_use):
        return
    staying, capacity = map(size, (staying_bytes, space.capacity_bytes))
    pinned = f" or pinned ({size(space.pinned_bytes)})" if space.pinned_bytes else ""
    raise CapacityError(
        f"{staying} of the cache's {capacity} are in hand{pinned}, and all who have them, {len(waits)} reader(s), wait "
        "for room for another shard: none can go on",
        url=transfer.ref.url,
        remedy="give the cache room for readers x (shuffle_window + 1) shards: raise --capacity, or lower "
        f"shuffle_window or the number of workers{', or unpin shards' if pinned else ''}",
    )


def _may_fit(stuck: Collection[Transfer], staying_bytes: int, capacity_bytes: int) -> bool:
    """Whether one of them has room once all is gone that may go, and all that is arriving has come and gone."""
    wanted_bytes = min(footprint_bytes(each.total_bytes or 0) for each in stuck)
    return staying_bytes + wanted_bytes <= capacity_bytes


def _may_be_given_back(waits: Collection[Wait], in_use: Collection[Shard]) -> bool:
    """Whether somebody holds a shard who does not wait for room."""
    return sum(shard.leases for shard in in_use) != sum(wait.in_hand() for wait in waits)
