"""Deadlocks over cache space: readers and transfers hold everything, and wait for more.

The general conditions apply (E. Coffman, M. Elphick and A. Shoshani, "System Deadlocks", ACM
Computing Surveys 1971): each holder keeps its space while it waits for space that the others hold.
Only abandoning one of the waits resolves it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Self

from shardcache.cache.waiting.claims import KeyClaim
from shardcache.cache.waiting.waits import Holder, PostponedError
from shardcache.errors import CapacityError
from shardcache.shared.units import size
from shardcache.store.shard import Shard
from shardcache.store.space import Space


def check_progress(
    claim: KeyClaim,
    claims: Collection[KeyClaim],
    in_use: Collection[Shard],
    space: Space,
) -> None:
    """Raise an error if there is a deadlock and this claim is the one that has to give up.

    The error is CapacityError, or PostponedError if no reader waits for the claim.

    Args:
        claims: all claims, this one included.
        in_use: the shards that have leases.
    """
    blocked = [each for each in claims if each.is_blocked]
    # Stuck waits are of readers that have nothing else to read. Other waits for space are no hurry.
    is_anyone_stuck = any(each.stuck_waits for each in blocked)
    if not is_anyone_stuck or not claim.is_blocked:
        return

    # Everything else resolves itself: shards without leases can be evicted, and running downloads
    # finish.
    running = [each for each in claims if not each.is_blocked]
    use = _SpaceUse.of(blocked, running, in_use, space)
    if use.has_room:
        return
    readers = _stuck_readers(blocked)
    all_leases = sum(shard.leases for shard in in_use)
    stuck_leases = sum(reader.leased_shards() for reader in readers)
    if all_leases != stuck_leases:
        return  # another reader has leases, and may end them

    if claim is not max(blocked, key=_giving_up_rank):
        return
    if not claim.space_waits:
        raise PostponedError
    raise _deadlock_error(claim, use, space, len(readers))


@dataclass(frozen=True, slots=True)
class _SpaceUse:
    """Bytes of the cache that stay as they are, and those that would let one transfer continue."""

    pinned_bytes: int
    leased_bytes: int  # leased and not pinned
    reserved_bytes: int  # by blocked transfers
    needed_bytes: int  # the least that a blocked transfer waits for
    possible_bytes: int  # the share of the capacity that the disk can hold

    @classmethod
    def of(
        cls,
        blocked: Collection[KeyClaim],
        running: Collection[KeyClaim],
        in_use: Collection[Shard],
        space: Space,
    ) -> Self:
        """Add up the bytes of all claims and shards."""
        # What running transfers will write may be allocated already: the disk then shows it as
        # used, although it is the cache's.
        reservations = [claim.reservation for claim in running if claim.reservation is not None]
        arriving_bytes = sum(reservation.unwritten_bytes for reservation in reservations)
        # A claim blocked by the one ahead of it wants nothing itself, but that one does.
        wanted_bytes = [claim.wanted_bytes for claim in blocked if claim.wanted_bytes]
        return cls(
            pinned_bytes=space.pinned_bytes,
            leased_bytes=sum(shard.kept_bytes for shard in in_use if not shard.pinned),
            reserved_bytes=sum(claim.reserved_bytes for claim in blocked),
            needed_bytes=min(wanted_bytes),
            possible_bytes=space.effective_bytes(arriving_bytes),
        )

    @property
    def has_room(self) -> bool:
        """True if one of the blocked transfers can continue by eviction alone."""
        staying_bytes = self.pinned_bytes + self.leased_bytes + self.reserved_bytes
        return staying_bytes + self.needed_bytes <= self.possible_bytes


def _deadlock_error(claim: KeyClaim, use: _SpaceUse, space: Space, readers: int) -> CapacityError:
    """Return the error with its arithmetic, for the readers of the claim that gives up."""
    taken = f"{size(use.pinned_bytes + use.leased_bytes)} of it is leased"
    remedy = (
        "the cache must hold ranks x (shuffle_window + 1) shards, each compressed one also in its "
        f"inflated form: {space.remedy}, or lower shuffle_window or the number of ranks"
    )
    if use.pinned_bytes:
        taken += f" or pinned ({size(use.pinned_bytes)})"
        remedy += ", or unpin shards"
    if use.reserved_bytes:
        taken += f", {size(use.reserved_bytes)} is reserved by transfers"
    return CapacityError(
        f"deadlock: {space.explanation}, {taken}, the next shard needs {size(use.needed_bytes)}, "
        f"and all {readers} reader(s) with leases wait for that space or for each other",
        url=claim.url,
        remedy=remedy,
    )


class _GivingUpRank(NamedTuple):
    """Sort key of blocked claims: the one with the largest gives up."""

    # 1. No reader waits for it: giving up is an error for nobody.
    is_idle: bool
    # 2. One of its readers is stuck. Those of other claims still have something to read.
    is_stuck: bool
    # 3. Its readers hold shards: giving up frees space for others.
    holds_shards: bool
    # 4. It is the most recent: the others continue as soon as its reader disconnects.
    since_s: float


def _giving_up_rank(claim: KeyClaim) -> _GivingUpRank:
    readers = _stuck_readers([claim])
    return _GivingUpRank(
        is_idle=not claim.space_waits,
        is_stuck=bool(claim.stuck_waits),
        holds_shards=any(reader.leased_shards() for reader in readers),
        since_s=claim.waits_since_s,
    )


def _stuck_readers(blocked: Collection[KeyClaim]) -> set[Holder]:
    """Return the readers that are stuck on blocked claims, and those that wait for such a reader.

    A loader waits for its stuck worker. It hardly asks the others in the meantime: they keep their
    shards.
    """
    waits = [wait for claim in blocked for wait in claim.stuck_waits]
    stuck = {wait.holder for wait in waits if wait.holder is not None}
    return stuck.union(*(reader.kept_waiting() for reader in stuck))
